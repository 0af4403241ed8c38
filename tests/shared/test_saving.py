"""Which checkpoint of several processes counts, and which one each has to keep until a newer one does."""

from __future__ import annotations

import pytest

from diloco.core.learner.saving import Saves
from diloco.errors import IslandError
from diloco.wire.process_messages import PartSaved

WHOLE, FAILED = bytes(32), None


def saved(saves: Saves, number: int, *contents: bytes | None) -> bool:
    """Begin to save an own checkpoint, and end it in all processes; return whether it counts."""
    saves.begin(number, saves.word("own", f"boundary {number}"))
    *earlier, last = [saves.saved(process, PartSaved(number, content, 1)) for process, content in enumerate(contents)]
    assert not any(earlier)
    assert last is not None
    return bool(last.parts)


def test_a_checkpoint_counts_once_all_parts_are_saved() -> None:
    saves = Saves(2)
    saves.begin(4, saves.word("own", "boundary 4"))
    assert saves.saved(1, PartSaved(4, WHOLE, 7)) is None
    assert (saves.whole, saves.under_way is None) == ("", False)
    ended = saves.saved(0, PartSaved(4, WHOLE, 8))
    assert ended is not None
    assert {process: part.size_bytes for process, part in ended.parts.items()} == {0: 8, 1: 7}
    assert (saves.whole, saves.under_way) == ("boundary 4", None)


def test_one_that_a_process_could_not_save_does_not_count_and_the_one_before_is_kept() -> None:
    saves = Saves(3)
    assert saved(saves, 4, WHOLE, WHOLE, WHOLE)
    for number in (6, 9):
        assert not saved(saves, number, WHOLE, FAILED, WHOLE)
        assert saves.word("own", "next").whole == "boundary 4"
    assert saved(saves, 12, WHOLE, WHOLE, WHOLE)
    assert saves.word("own", "next").whole == "boundary 12"


def test_what_is_saved_for_others_replaces_no_checkpoint() -> None:
    saves = Saves(1)
    saved(saves, 4, WHOLE)
    saves.begin(5, saves.word("loan", "boundary 5"))
    ended = saves.saved(0, PartSaved(5, WHOLE, 1))
    assert ended is not None
    assert (ended.number, ended.save.purpose) == (5, "loan")
    assert saves.whole == "boundary 4"


def test_a_part_that_nobody_asked_for_is_refused() -> None:
    saves = Saves(2)
    saves.begin(4, saves.word("own", "boundary 4"))
    saves.saved(1, PartSaved(4, WHOLE, 1))
    for process, number in ((1, 4), (0, 5)):
        with pytest.raises(
            IslandError, match=f"process {process} has saved a part as of boundary {number}: it was not asked for"
        ):
            saves.saved(process, PartSaved(number, WHOLE, 1))


def test_a_learner_that_leaves_saves_its_last_state_though_the_one_before_is_being_saved() -> None:
    saves = Saves(2)
    saves.begin(4, saves.word("own", "boundary 4"))
    saves.begin(6, saves.word("own", "boundary 6"))
    assert [saves.saved(process, PartSaved(4, WHOLE, 1)) for process in (0, 1)] == [None, None]
    assert saves.saved(0, PartSaved(6, WHOLE, 1)) is None
    assert saves.saved(1, PartSaved(6, WHOLE, 1)) is not None
    assert saves.whole == "boundary 6"
