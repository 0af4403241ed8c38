"""The failure tape: what breaks when, in one format for chaos on a live run, the simulator and the training lab.

JSON lines: a header, then one failure a line in the order of time. The format knows times, kinds and targets and no more of
them; who reads a tape says which kinds it can bring about, and whether others are refused or left out. ``docs/chaos.md`` is
the reference. Drawing a tape (:func:`draw`) and bringing it about are apart, so a tape can be kept, cut and replayed.

Pure: a tape is drawn from a seed, with Python's Mersenne Twister, whose ``random()`` is the same in every version.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from diloco.errors import FormatError

FORMAT = "diloco-failures"
VERSION = 1
MAX_FAILURES = 1_000_000
MAX_LINE_BYTES = 4096
MAX_SECONDS = 1e9
MAX_VALUES = 16

_KIND = re.compile(r"[a-z][a-z0-9_]{0,47}")
_TARGET = re.compile(r"[a-z0-9*?\[][a-z0-9*?\[\]!_./-]{0,127}")
_OWN_KEYS = ("at_s", "kind", "target", "duration_s")

Value = float | str


@dataclass(frozen=True)
class Failure:
    """One thing that breaks. ``duration_s`` is 0 for what happens at once."""

    at_s: float  # since the tape began
    kind: str
    target: str  # a name or a pattern of names (``learner-*``, ``learner-2/slice-3``, ``link/us-eu``, ``nats``)
    duration_s: float = 0.0
    values: Mapping[str, Value] = field(default_factory=dict)  # what else the kind wants (``factor``, ``offset_s``)

    def number(self, name: str, default: float) -> float:
        """Return one of the values as a number.

        Raises:
            FormatError: it is text.
        """
        value = self.values.get(name, default)
        if isinstance(value, str):
            raise FormatError(f"failure {self.kind!r} at {self.at_s:g} s: {name} = {value!r}, expected a number")
        return value

    def targets(self, names: Iterable[str]) -> list[str]:
        """Return the ``names`` that the target means."""
        return [name for name in names if fnmatchcase(name, self.target)]


@dataclass(frozen=True)
class FailureTape:
    """Failures in the order of time. ``about``: further values of the header (seed, rate), for people."""

    duration_s: float
    failures: Sequence[Failure]
    about: Mapping[str, Value] = field(default_factory=dict)


def encode(tape: FailureTape) -> str:
    """Return a tape as text."""
    header = {"format": FORMAT, "version": VERSION, "duration_s": tape.duration_s, **tape.about}
    return "".join(json.dumps(line) + "\n" for line in (header, *map(_plain, tape.failures)))


def _plain(failure: Failure) -> dict[str, Any]:
    return {name: getattr(failure, name) for name in _OWN_KEYS} | dict(failure.values)


def decode(
    lines: Iterable[str],
    source: str,
    known: Collection[str] | None = None,
    complaint: Callable[[Failure], str | None] | None = None,
) -> FailureTape:
    """Read a tape.

    Args:
        lines: of the file, one by one: no more of a long one than can be is held.
        source: named in errors.
        known: kinds that the reader can bring about; None: it sorts them out itself, with :func:`only`.
        complaint: what else keeps the reader from bringing a failure about; None: nothing.

    Raises:
        FormatError: naming source and line: not a tape, another version, a value out of bounds, failures out of order, a kind
            that is not ``known``, or a complaint.
    """
    numbered = _lines(lines, source)
    header = next(numbered, (0, {}))[1]
    if header.get("format") != FORMAT:
        raise FormatError(f"{source}: not a failure tape: its first line should be an object with format = {FORMAT!r}")
    if header.get("version") != VERSION:
        raise FormatError(f"{source}: version {header.get('version')!r} of the failure tape, this reads {VERSION}")
    duration_s = _seconds(header.get("duration_s"), "duration_s", f"{source}, line 1")
    about = {key: value for key, value in header.items() if key not in ("format", "version", "duration_s")}
    failures: list[Failure] = []
    for number, values in numbered:
        where = f"{source}, line {number}"
        failure = _failure(values, where)
        if failures and failure.at_s < failures[-1].at_s:
            raise FormatError(f"{where}: at_s = {failure.at_s:g} comes after {failures[-1].at_s:g}; sort the lines by at_s")
        if known is not None and failure.kind not in known:
            raise FormatError(f"{where}: kind {failure.kind!r} is not known here; known are {', '.join(sorted(known))}")
        if complaint is not None and (wrong := complaint(failure)) is not None:
            raise FormatError(f"{where}: {wrong}")
        if len(failures) == MAX_FAILURES:
            raise FormatError(f"{where}: more than {MAX_FAILURES} failures")
        failures.append(failure)
    return FailureTape(duration_s, failures, _values(about, f"{source}, line 1"))


def only(tape: FailureTape, known: Collection[str]) -> tuple[FailureTape, dict[str, int]]:
    """Return the failures of known kinds, and how many of each other kind were left out."""
    left_out: dict[str, int] = {}
    for failure in tape.failures:
        if failure.kind not in known:
            left_out[failure.kind] = left_out.get(failure.kind, 0) + 1
    return FailureTape(tape.duration_s, [f for f in tape.failures if f.kind in known], tape.about), left_out


def _lines(lines: Iterable[str], source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        where = f"{source}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise FormatError(f"{where}: longer than {MAX_LINE_BYTES} characters")
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise FormatError(f"{where}: expected a JSON object, got {type(values).__name__}")
        yield number, values


def _failure(values: dict[str, Any], where: str) -> Failure:
    kind, target = values.get("kind"), values.get("target")
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise FormatError(f"{where}: kind = {kind!r}, expected a name of lower-case letters, digits and underscores")
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise FormatError(f"{where}: target = {target!r}, expected a name or a pattern, such as learner-2 or learner-*")
    at_s = _seconds(values.get("at_s"), "at_s", where)
    duration_s = _seconds(values.get("duration_s", 0.0), "duration_s", where)
    rest = {key: value for key, value in values.items() if key not in _OWN_KEYS}
    return Failure(at_s, kind, target, duration_s, _values(rest, where))


def _seconds(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        raise FormatError(f"{where}: {name} = {value!r}, expected seconds between 0 and {MAX_SECONDS:g}")
    return float(value)


def _values(values: Mapping[str, Any], where: str) -> dict[str, Value]:
    if len(values) > MAX_VALUES:
        raise FormatError(f"{where}: {len(values)} values, at most {MAX_VALUES} are allowed")
    kept: dict[str, Value] = {}
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # an integer beyond a double's range has no place here, and would fail later
        if not isinstance(value, str) and not (number and abs(value) <= 1e300 and math.isfinite(value)):
            raise FormatError(f"{where}: {name} = {value!r}, expected a finite number or text")
        kept[name] = float(value) if number else value
    return kept


# ---- drawing


@dataclass(frozen=True)
class Spread:
    """A distribution: uniform from ``low`` to ``high``, or exponential with this ``mean`` (of lives and repairs)."""

    low: float = 0.0
    high: float = 0.0
    mean: float | None = None

    def draw(self, chance: random.Random) -> float:
        if self.mean is not None:
            return -self.mean * math.log(1.0 - chance.random())
        return self.low + (self.high - self.low) * chance.random()


@dataclass(frozen=True)
class FailureKind:
    """A kind of failure as a tape is drawn from it."""

    kind: str
    targets: Sequence[str]  # one of which it meets
    weight: float = 1.0  # how often, relative to the other kinds
    duration_s: Spread = field(default_factory=Spread)
    values: Mapping[str, Spread] = field(default_factory=dict)


def draw(
    seed: int, sources: Sequence[FailureKind], duration_s: float, rate_per_s: float, *, regular: bool = False
) -> FailureTape:
    """Draw a tape: failures at random times (a Poisson process) or one every ``1 / rate_per_s``, equal for equal arguments.

    Raises:
        FormatError: so many failures that no tape may hold them.
    """
    chance = random.Random(seed)
    able = [source for source in sources if source.targets and source.weight > 0]
    if duration_s * rate_per_s > MAX_FAILURES / 2:
        raise FormatError(f"{duration_s:g} s at {rate_per_s:g} failures a second are more than a tape's {MAX_FAILURES // 2}")
    gap_s = Spread(1 / rate_per_s, 1 / rate_per_s) if regular else Spread(mean=1 / rate_per_s)
    failures = []
    at_s = gap_s.draw(chance)
    while able and at_s < duration_s:
        failures.append(_draw_one(chance, able, at_s))
        at_s += gap_s.draw(chance)
    return FailureTape(duration_s, failures, {"seed": float(seed), "rate_per_s": rate_per_s})


def _draw_one(chance: random.Random, sources: Sequence[FailureKind], at_s: float) -> Failure:
    point = chance.random() * sum(source.weight for source in sources)
    for source in sources:
        point -= source.weight
        if point < 0:
            break
    target = source.targets[int(chance.random() * len(source.targets))]
    values = {name: round(spread.draw(chance), 3) for name, spread in source.values.items()}
    return Failure(round(at_s, 3), source.kind, target, round(source.duration_s.draw(chance), 3), values)
