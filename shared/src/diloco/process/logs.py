"""The logs of a run, read back: all services' JSON lines merged in time order, and one line of text for an event.

Each process writes ``DIR/logs/<service>.jsonl`` (:mod:`diloco.process.observe`), one JSON object a line with at
least ``time`` (ISO 8601, UTC), ``level``, ``service`` and ``event``. A process that is killed leaves a torn line; a line that
cannot be read is shown as it is and never ends the reading.
"""

from __future__ import annotations

import heapq
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.text import Text

from diloco.errors import RunError

LEVELS = ("debug", "info", "warning", "error", "critical")
FIXED_KEYS = ("time", "level", "service", "role", "run", "region", "event")
MAX_LINE_BYTES = 1 << 20

# Distinct at a glance on dark and on light backgrounds. In logs a service takes its colour by its name alone, since the others
# are not known; the live view gives each learner a colour of its own.
COLOURS = ("#3b9eff", "#e5873a", "#2fae72", "#c66bd6", "#d9b02b", "#e2557a", "#24b3c2", "#8f8bff")
_SYNCER_COLOURS = ("#8fa6bd", "#b39d83", "#92b08c", "#b095b8")
_LEVEL_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red", "critical": "bold red"}
_LEVEL_NAMES = {"warning": "warn", "critical": "fatal"}
_SERVICE_WIDTH = 13
_EVENT_WIDTH = 26
_PROGRESS = "progress"  # a line of it has the first of these values that fit, in few digits; the JSON has all
_PROGRESS_KEYS = (
    "state", "loss", "learners", "steps", "versions", "tokens", "tokens_per_s", "step_s", "fragments", "rounds", "bytes_up",
    "bytes_down",
)  # fmt: skip
_PROGRESS_WIDTH = 100  # 120 less what docker compose puts in front of each line


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a service's log.

    Attributes:
        time_s: seconds since the epoch; for a damaged line that of the line before it in its file.
        values: the event's own key-values, in the order written.
        raw: the line as it stands in the file.
        damaged: the line is not an event; ``event`` is then ``damaged_line``.
    """

    time_s: float
    service: str
    level: str
    event: str
    values: Mapping[str, Any]
    raw: str
    damaged: bool = False

    def json(self) -> str:
        """Return the event as one line of JSON; a damaged line is wrapped, so that every line of the output parses."""
        if not self.damaged:
            return self.raw
        return json.dumps({"service": self.service, "event": self.event, "text": self.raw})


def service_colour(name: str) -> str:
    """Return the colour (``#rrggbb``) of a service, the same in every command."""
    stem, _, number = name.rpartition("-")
    palette = _SYNCER_COLOURS if stem == "syncer" else COLOURS
    numbered = stem and number.isdecimal() and len(number) < 10
    index = int(number) if numbered and "-" not in stem else zlib.crc32(name.encode())  # learner-us-0 and learner-eu-0 differ
    return palette[index % len(palette)]


def merge(
    run_dir: Path,
    services: Sequence[str] = (),
    *,
    level: str = "debug",
    follow: bool = False,
    wait: Callable[[], bool] | None = None,
) -> Iterator[LogLine]:
    """Yield the entries of all services of a run in time order.

    Args:
        run_dir: the run's directory, with ``logs/*.jsonl``.
        services: only these (names, or patterns such as ``learner-*``); empty for all.
        level: leave out events below it; damaged lines always stay.
        follow: at the end, go on with new lines and new files; lines that arrive together are in order.
        wait: called between two looks at the files when following; ``False`` ends. Default: sleep for 0.2 s.

    Raises:
        RunError: there are no logs, or none of a service asked for (not when following: it may yet start).
    """
    logs_dir = run_dir / "logs"
    if not logs_dir.is_dir():
        raise RunError(f"{run_dir}: no logs here (expected {logs_dir}); give the directory of a run")
    if level not in LEVELS:
        raise RunError(f"log level {level!r} is unknown: give one of {', '.join(LEVELS)}")
    if not follow:
        _check_services(logs_dir, services)
    return _merge(logs_dir, services, LEVELS.index(level), follow, wait or _sleep)


def _merge(logs_dir: Path, services: Sequence[str], level: int, follow: bool, wait: Callable[[], bool]) -> Iterator[LogLine]:
    tails: dict[Path, _Tail] = {}

    def look(final: bool) -> Iterator[LogLine]:
        for path in sorted(logs_dir.glob("*.jsonl")):
            if path not in tails and _wanted(path.stem, services):
                tails[path] = _Tail(path)
        streams = [tail.read(final) for tail in tails.values()]
        for entry in heapq.merge(*streams, key=lambda entry: (entry.time_s, entry.service)):
            if entry.damaged or _rank(entry.level) >= level:
                yield entry

    yield from look(final=not follow)
    while follow and wait():
        yield from look(final=False)


def _sleep() -> bool:
    time.sleep(0.2)
    return True


def _wanted(service: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(service, pattern) for pattern in patterns)


def _check_services(logs_dir: Path, patterns: Sequence[str]) -> None:
    names = sorted(path.stem for path in logs_dir.glob("*.jsonl"))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RunError(f"{logs_dir}: no log of service {pattern!r}; there are: {', '.join(names) or 'none'}")


def _rank(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


class _Tail:
    """A file read line by line as it grows, by one reader; a file that was cut or replaced is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._time_s = 0.0

    def read(self, final: bool) -> Iterator[LogLine]:
        """Yield the entries since the last call; a last line without its end waits for it, unless the call is ``final``."""
        try:
            file = self._path.open("rb")
        except OSError:  # removed since it was listed
            return
        with file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while (line := file.readline(MAX_LINE_BYTES)) and (final or line.endswith(b"\n") or _too_long(line)):
                if _too_long(line):
                    _skip_line(file)
                self._offset = file.tell()
                if text := line.decode(errors="replace").rstrip("\r\n"):
                    entry = _parse(text, self._path.stem, self._time_s)
                    self._time_s = entry.time_s
                    yield entry


def _too_long(line: bytes) -> bool:
    return len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")


def _skip_line(file: IO[bytes]) -> None:
    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass


def _parse(line: str, service: str, time_before_s: float) -> LogLine:
    try:
        values = msgspec.json.decode(line.encode(), type=dict[str, Any])
        time_s = datetime.fromisoformat(values["time"]).timestamp()
        datetime.fromtimestamp(time_s)  # fails outside the years that this time zone has
        level, event = values["level"], values["event"]
        if not isinstance(level, str) or not isinstance(event, str):
            raise TypeError("level and event are strings")
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return LogLine(
            time_s=time_before_s, service=service, level="warning", event="damaged_line", values={}, raw=line, damaged=True
        )
    own = {key: value for key, value in values.items() if key not in FIXED_KEYS}
    return LogLine(time_s=time_s, service=service, level=level, event=event, values=own, raw=line)


def render(entry: LogLine) -> Text:
    """Return an entry as text for a terminal: time of day, service, level, event, key-values, and a traceback below.

    All values are made printable, so that no log line can move the cursor or recolour the terminal.
    """
    moment = datetime.fromtimestamp(entry.time_s).strftime("%H:%M:%S.%f")[:-3]
    style = _LEVEL_STYLES.get(entry.level, "bold red")
    line = Text(no_wrap=False, overflow="fold")
    line.append(moment if entry.time_s else " " * len(moment), "dim")
    line.append(f" {printable(entry.service):<{_SERVICE_WIDTH}} ", service_colour(entry.service))
    if entry.damaged:
        line.append("damaged line ", "yellow").append(printable(entry.raw[:200]), "dim")
        return line
    line.append(f"{_LEVEL_NAMES.get(entry.level, printable(entry.level))[:5]:<5} ", style or "dim")
    if entry.event == _PROGRESS:
        return _progress(line, entry.values)
    line.append(f"{printable(entry.event):<{_EVENT_WIDTH}}", style or "bold")
    traceback = None
    for key, value in entry.values.items():
        if key == "traceback":
            traceback = str(value)
        else:
            line.append(f" {printable(key)}=", "dim").append(_value(value))
    if traceback is not None:
        for part in traceback.rstrip().splitlines():
            line.append("\n    " + printable(part), "dim red")
    line.rstrip()
    return line


def _progress(line: Text, values: Mapping[str, Any]) -> Text:
    line.append(_PROGRESS, "bold")
    refused = ("refused",) if values.get("refused") else ()
    for key in (*refused, *_PROGRESS_KEYS):
        value = values.get(key)
        shown = _brief(value) if isinstance(value, int | float) else _value(value)
        if value is not None and line.cell_len + len(key) + len(shown) + 2 <= _PROGRESS_WIDTH:
            line.append(f" {key}=", "dim").append(shown)
    return line


def _brief(value: float) -> str:
    """Return a number in four digits, with a letter for its thousands: ``1.235M``."""
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{letter}"
    return f"{value:.4g}"


def printable(text: str) -> str:
    """Return the text with every character that a terminal would act on, or not show, written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        quoted = not value or any(char.isspace() or char in "\"'=" for char in value)
        return printable(json.dumps(value, ensure_ascii=False) if quoted else value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))
