"""Lines about work that takes long."""

from __future__ import annotations

import threading

import pytest
from tests.pace import DEADLINE_S

from diloco_ops.up import progress_lines
from diloco_ops.up.progress_lines import progress_line


class Told:
    """A stream that says when it has so many lines."""

    def __init__(self, lines: int) -> None:
        self.text, self.lines, self.full = "", lines, threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        if self.text.count("\n") >= self.lines:
            self.full.set()
        return len(text)

    def flush(self) -> None:
        pass


def test_work_that_is_soon_over_has_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_line("compiling", after_s=DEADLINE_S):
        pass
    assert capsys.readouterr().out == ""


def test_long_work_has_a_line_and_then_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "AGAIN_S", 0.01)
    told = Told(2)
    with progress_line("compiling", after_s=0.0, file=told):  # type: ignore[arg-type] # of a stream it uses no more
        assert told.full.wait(DEADLINE_S)
    assert told.text.startswith("compiling\ncompiling: 0 s so far\n")


def test_the_line_comes_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(1)

    def fail() -> None:
        with progress_line("checking", after_s=0.0, file=told):  # type: ignore[arg-type]
            assert told.full.wait(DEADLINE_S)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert told.text == "checking\n"


def test_quiet_work_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_line("compiling", quiet=True, after_s=0.0):
        pass
    assert capsys.readouterr().out == ""
