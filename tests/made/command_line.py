"""``diloco`` and one of its commands, in this process, as a user sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from tests.made.fixtures import Ended

from diloco.process import observe
from diloco_ops import cli


@dataclass(frozen=True)
class _Point:
    """An entry point."""

    name: str
    app: typer.Typer | Callable[..., None]

    def load(self) -> typer.Typer | Callable[..., None]:
        return self.app


class Command:
    """``diloco`` with these words and what is called with."""

    def __init__(self, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._words, self._monkeypatch, self._capfd = words, monkeypatch, capfd

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["diloco", *self._words, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        seen = self._capfd.readouterr()
        assert "Traceback" not in seen.out + seen.err
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, seen.out, seen.err)


@contextmanager
def commanding(
    app: typer.Typer | Callable[..., None],
    words: tuple[str, ...],
    columns: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Command]:
    """The command in a folder, on a terminal so wide; the first of the words is the application's."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "entry_points", lambda group: [_Point(words[0], app)])  # no matter what else is installed
    monkeypatch.setenv("COLUMNS", str(columns))
    yield Command(words, monkeypatch, capfd)
    observe.reset()
