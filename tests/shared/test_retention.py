"""When a keyframe is due and how many stay, by hand."""

from __future__ import annotations

import pytest

from diloco.core.log.retention import keyframe_due, keyframes_kept
from diloco.settings.run import LogSettings


def test_two_stay_of_a_large_model_and_more_while_there_is_room() -> None:
    # 1000 parameters: a keyframe of 12 000 bytes, and with a factor of 1 as many of records until the next
    def kept(keep_bytes: int, **values: float) -> int:
        return keyframes_kept(LogSettings.model_validate({"keep_bytes": keep_bytes} | values), 1000, 1)

    assert kept(0) == 2
    assert kept(71_999) == 2
    assert kept(72_000) == 3
    assert kept(0, keep_keyframes=5) == 5
    assert kept(240_000, keep_keyframes=5) == 10
    assert kept(72_000, keyframe_factor=0.5) == 4
    assert keyframes_kept(LogSettings(), 10**9, 1) == 2
    assert keyframes_kept(LogSettings(), 400_000, 1) == 111  # of the default model: all of a default run
    assert keyframes_kept(LogSettings(keep_bytes=96_000), 1000, 2) == 3  # AdamW's: 16 000 bytes


@pytest.mark.parametrize(
    ("log_bytes", "damaged", "due"),
    [(199, (), False), (200, (), True), (0, (), False), (0, (8,), True), (0, (7,), False), (0, (3, 9), True)],
)
def test_a_keyframe_is_due_when_the_log_has_grown_or_a_newer_one_than_the_newest_whole_is_damaged(
    log_bytes: int, damaged: tuple[int, ...], due: bool
) -> None:
    settings = LogSettings(keyframe_factor=2.0)
    assert keyframe_due(settings, log_bytes, 100, 7, damaged) == due
