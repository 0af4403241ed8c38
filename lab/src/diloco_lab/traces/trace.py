"""Which units were away when: read from a CSV or a failure tape, written as a failure tape, or drawn.

A unit fails and returns as one: a slice, a node, a machine. A CSV has one row an interruption (unit, start, and end
or duration) or one row a change of state (time, unit, up or down). ``docs/simulator.md`` says which columns are recognised.

Pure: the times are those of the file, and what is drawn follows a seed.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product

from diloco.errors import FormatError, SettingsError
from diloco.settings.validation import nearest
from diloco_ops import failures
from diloco_ops.failures import MAX_FAILURES, MAX_SECONDS, Failure, FailureTape

KIND = "chip_loss"
MAX_ROWS = MAX_FAILURES
MAX_LINE_CHARACTERS = 65_536
TAPE_RESOLUTION_S = 1e-3  # times of a tape are rounded to this

CLOCKS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
UP = ("up", "online", "healthy", "available", "repaired")
DOWN = ("down", "offline", "unhealthy", "unavailable", "failed")

# Names of columns as they are recognised: lower case, with one underscore for whatever is no letter or digit.
_UNITS = (
    "unit", "slice", "node", "node_id", "nodeid", "nodenum", "machine", "machine_id", "machineid", "host", "hostname",
    "server", "server_id", "device", "device_id", "gpu", "chip",
)  # fmt: skip
_SPANS = (
    ("start", "end"), ("start_s", "end_s"), ("start_time", "end_time"), ("started", "ended"), ("down", "up"),
    ("down_at", "up_at"), ("down_time", "up_time"), ("failed", "repaired"), ("failed_at", "repaired_at"),
    ("prob_started", "prob_fixed"), ("problem_started", "problem_fixed"),
)  # fmt: skip
_STARTS = ("start", "start_s", "start_time", "started", "down_at", "failed_at", "time", "timestamp")
_DURATIONS = ("duration", "duration_s")
_TIMES = ("time", "timestamp", "at", "at_s")
_STATES = ("state", "status")

# the two columns beside the unit, in each shape of a file, and by which names they go
_SHAPES: dict[tuple[str, str], Sequence[tuple[str, str]]] = {
    ("start", "end"): _SPANS,
    ("time", "state"): list(product(_TIMES, _STATES)),
    ("start", "duration"): list(product(_STARTS, _DURATIONS)),
}

_NAME = re.compile(r"[a-z0-9][a-z0-9_./-]{0,127}")


@dataclass(frozen=True, slots=True)
class Outage:
    """One unit away, in seconds since the observation began. One that touches an edge of it may go on beyond that edge."""

    unit: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """Units that were observed together, and when each was away."""

    duration_s: float
    joined_s: Mapping[str, float]  # every unit that is named, in order of appearance: when its observation began
    outages: Sequence[Outage]  # in the order of their starts; those of one unit are apart
    notes: Sequence[str] = ()  # what was recognised, assumed or left out, for people


@dataclass(frozen=True)
class Columns:
    """The columns of a CSV, by their names in its header. None: there is none, or it is to be recognised."""

    unit: str | None = None
    start: str | None = None
    end: str | None = None
    duration: str | None = None
    time: str | None = None
    state: str | None = None

    def named(self) -> dict[str, str]:
        """Return the columns that are named, by field."""
        return {field: name for field, name in asdict(self).items() if name is not None}


@dataclass(frozen=True)
class Notation:
    """How a CSV is written, where it does not say so itself."""

    columns: Columns = Columns()
    where: Sequence[str] = ()  # COLUMN=VALUE: only rows that have it
    time_format: str | None = None  # of strptime; None: ISO 8601, or plain numbers
    clock: str = "seconds"  # what plain numbers count
    open: str | None = None  # what the end or duration is given as where an interruption had not ended
    since: str | None = None  # when the observation began and ended, written as the times in the file are
    until: str | None = None

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise SettingsError(f"--clock {self.clock}: expected one of {', '.join(CLOCKS)}{nearest(self.clock, list(CLOCKS))}")


@dataclass(frozen=True)
class _Row:
    where: str
    cells: Mapping[str, str]  # by what they hold

    def text(self, field: str, hint: str = "") -> str:
        text = self.cells[field]
        if not text:
            raise FormatError(f"{self.where}: {field} is empty{hint}")
        return text


@dataclass(frozen=True)
class _Span:
    """An interruption by the clock of the file."""

    unit: str
    start: float
    end: float  # infinity: it had not ended
    where: str  # it is said


def read(lines: Iterable[str], source: str, notation: Notation) -> Trace:
    """Read a CSV.

    Args:
        lines: of the file, one by one, none longer than ``MAX_LINE_CHARACTERS`` by more than one.
        source: named in errors.
        notation: what the file does not say.

    Raises:
        FormatError: naming source, line and field: a hole, a time or a state that is none, an end that does not come after its
            start, a unit that is interrupted while it is away, too much of anything.
        SettingsError: a column that is not there, or columns that are not recognised.
    """
    records = _records(lines, source)
    header = [cell.strip() for cell in next(records, (0, []))[1]]
    if not any(header):
        raise FormatError(f"{source}, line 1: empty; expected the names of the columns")
    columns, notes = _recognised(header, source, notation.columns)
    rows = _rows(records, header, source, columns, notation.where)
    clock = _Clock(notation)
    joined: dict[str, float] = {}
    spans = _changes(rows, clock, joined) if "state" in columns else _interruptions(rows, clock, joined, notation.open)
    if not joined:
        raise FormatError(f"{source}: no rows" + "".join(f" with {condition}" for condition in notation.where))
    seen = [time for span in spans for time in (span.start, span.end) if math.isfinite(time)]
    seen += [time for time in joined.values() if math.isfinite(time)]
    since = min(seen) if notation.since is None else clock.at(notation.since, "--since")
    until = max(seen) if notation.until is None else clock.at(notation.until, "--until")
    if not 0 < until - since <= MAX_SECONDS:
        raise FormatError(
            f"{source}: observed for {until - since:g} s, expected above 0 and up to {MAX_SECONDS:g}; see --since and --until"
        )
    notes += [clock.said, *_edges(notation)]
    inside = [span for span in spans if span.end > since and span.start < until]
    if len(inside) < len(spans):
        notes.append(f"{len(spans) - len(inside)} interruptions lie outside of the time observed, and are left out")
    outages = [Outage(span.unit, max(span.start - since, 0.0), min(span.end, until) - since) for span in inside]
    late = {unit: min(max(time - since, 0.0), until - since) for unit, time in joined.items()}
    return Trace(until - since, late, sorted(outages, key=lambda outage: outage.start_s), notes)


def _edges(notation: Notation) -> Iterator[str]:
    for option, value, edge in (
        ("--since", notation.since, "begins with the first"),
        ("--until", notation.until, "ends with the last"),
    ):
        if value is None:
            yield f"the time observed {edge} time in the file, as {option} is not given"


def _records(lines: Iterable[str], source: str) -> Iterator[tuple[int, list[str]]]:
    bounded = _bounded(lines, source)
    reader = csv.reader(bounded, strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise FormatError(f"{source}, line {reader.line_num}: not CSV: {error}") from None
        yield reader.line_num, cells


def _bounded(lines: Iterable[str], source: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise FormatError(f"{source}, line {number}: longer than {MAX_LINE_CHARACTERS} characters")
        yield line


def _rows(
    records: Iterator[tuple[int, list[str]]], header: list[str], source: str, columns: Mapping[str, str], where: Sequence[str]
) -> Iterator[_Row]:
    places = {field: header.index(name) for field, name in columns.items()}
    conditions = []
    for condition in where:
        name, equals, value = condition.partition("=")
        if not equals:
            raise SettingsError(f"--where {condition}: expected COLUMN=VALUE")
        conditions.append((_place(name, header, source, "--where"), value))
    count = 0
    for number, cells in records:
        if not cells:
            continue
        if len(cells) != len(header):
            raise FormatError(f"{source}, line {number}: {len(cells)} cells, expected {len(header)} as in the header")
        count += 1
        if count > MAX_ROWS:
            raise FormatError(f"{source}, line {number}: more than {MAX_ROWS} rows")
        if all(cells[place].strip() == value for place, value in conditions):
            yield _Row(f"{source}, line {number}", {field: cells[place].strip() for field, place in places.items()})


def _place(name: str, header: list[str], source: str, option: str) -> int:
    if name not in header:
        raise SettingsError(f"{option} {name}: {source} has no such column{nearest(name, header)}")
    if header.count(name) > 1:
        raise FormatError(f"{source}, line 1: column {name!r} is there {header.count(name)} times")
    return header.index(name)


def _recognised(header: list[str], source: str, asked: Columns) -> tuple[dict[str, str], list[str]]:
    """Return the column of each field, and notes: columns that were asked for, and others if only one can be meant."""
    given = asked.named()
    for field, name in given.items():
        _place(name, header, source, f"--{field}")
    known = {re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"): name for name in header}
    units = [given["unit"]] if "unit" in given else [known[name] for name in _UNITS if name in known]
    for fields, pairs in _SHAPES.items():
        found = {tuple(given.get(field, known.get(name)) for field, name in zip(fields, pair, strict=True)) for pair in pairs}
        complete = sorted(tuple(filter(None, names)) for names in found if None not in names)
        if not complete or not given.keys() <= {"unit", *fields}:
            continue
        if len(complete) > 1 or len(units) != 1:
            break
        columns = {"unit": units[0], **dict(zip(fields, complete[0], strict=True))}
        for name in columns.values():
            _place(name, header, source, "column")
        return columns, ["; ".join(f"{field} is column {name!r}" for field, name in columns.items())]
    raise SettingsError(
        f"{source}: which columns are meant? Name them: --unit, and --start with --end or --duration, or --time with --state; "
        f"there are {', '.join(map(repr, header))}"
    )


class _Clock:
    """Reads times, all of one kind, as seconds."""

    def __init__(self, notation: Notation) -> None:
        self._format = notation.time_format
        self._unit = notation.clock
        self._kind = ""

    def at(self, text: str, where: str) -> float:
        """Return a time, in seconds on the file's clock."""
        value, kind = self._read(text, where)
        if self._kind not in ("", kind):
            raise FormatError(f"{where} = {text!r}: {kind}, and those before it are {self._kind}")
        self._kind = kind
        return value

    def lasting(self, text: str, where: str) -> float:
        """Return a duration, which is a plain number."""
        try:
            value = float(text) * CLOCKS[self._unit]
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_SECONDS:
            raise FormatError(f"{where} = {text!r}, expected {self._unit} above 0, up to {MAX_SECONDS:g} s")
        return value

    @property
    def said(self) -> str:
        return f"times are {self._kind}"

    def _read(self, text: str, where: str) -> tuple[float, str]:
        try:
            if self._format is not None:
                moment = datetime.strptime(text, self._format)
            else:
                with suppress(ValueError):
                    number = float(text) * CLOCKS[self._unit]
                    if math.isfinite(number):
                        return number, f"plain numbers of {self._unit}"
                moment = datetime.fromisoformat(text)
        except (ValueError, re.error):  # the latter from formats that name a field twice
            expected = f"ISO 8601 or a number of {self._unit}" if self._format is None else f"the format {self._format!r}"
            raise FormatError(f"{where} = {text!r}, expected a time as {expected} (see --time-format)") from None
        if moment.tzinfo is None:
            return moment.replace(tzinfo=UTC).timestamp(), "dates without a time zone, taken as UTC"
        return moment.timestamp(), "dates with a time zone"


def _interruptions(rows: Iterable[_Row], clock: _Clock, joined: dict[str, float], open_: str | None) -> list[_Span]:
    spans = []
    for row in rows:
        unit = row.text("unit")
        start = clock.at(row.text("start"), f"{row.where}: start")
        field = "end" if "end" in row.cells else "duration"
        if row.cells[field] == open_:
            end = math.inf
        elif field == "end":
            end = clock.at(row.text("end", "; if the interruption had not ended, say so with --open ''"), f"{row.where}: end")
        else:
            end = start + clock.lasting(row.text("duration"), f"{row.where}: duration")
        if end <= start:
            raise FormatError(
                f"{row.where}: {field} = {row.cells[field]!r}: the end does not come after start = {row.cells['start']!r}"
            )
        joined[unit] = -math.inf
        spans.append(_Span(unit, start, end, row.where))
    last: dict[str, _Span] = {}
    for span in sorted(spans, key=lambda span: span.start):
        before = last.get(span.unit)
        if before is not None and span.start <= before.end:
            raise FormatError(f"{span.where}: start: unit {span.unit!r} is still away, by the interruption of {before.where}")
        last[span.unit] = span
    return spans


def _changes(rows: Iterable[_Row], clock: _Clock, joined: dict[str, float]) -> list[_Span]:
    spans = []
    last: dict[str, tuple[float, bool, str]] = {}  # of each unit: when it changed, whether it went down, and where that is said
    for row in rows:
        unit = row.text("unit")
        time = clock.at(row.text("time"), f"{row.where}: time")
        state = row.text("state")
        down = state.lower() in DOWN
        if not down and state.lower() not in UP:
            raise FormatError(f"{row.where}: state = {state!r}, expected one of {', '.join((*UP, *DOWN))}")
        if unit in last:
            before, was_down, there = last[unit]
            if time <= before:
                raise FormatError(
                    f"{row.where}: time = {row.cells['time']!r} does not come after that of unit {unit!r} in {there}"
                )
            if down == was_down:
                raise FormatError(f"{row.where}: state = {state!r}: unit {unit!r} is so already, by {there}")
            if was_down:
                spans.append(_Span(unit, before, time, there))
        else:
            # one that begins with "up" was not there before, as far as one can know
            joined[unit] = -math.inf if down else time
        last[unit] = (time, down, row.where)
    return spans + [_Span(unit, time, math.inf, there) for unit, (time, down, there) in last.items() if down]


# ---- tapes


def from_tape(lines: Iterable[str], source: str) -> Trace:
    """Return the ``chip_loss`` of a failure tape: its targets are the units. Other kinds are left out.

    Raises:
        FormatError: no tape, a target that is a pattern, a unit that is lost while it is away, or a loss that takes no time.
    """
    ends: dict[str, float] = {}

    def complaint(failure: Failure) -> str | None:
        unit = _unit(failure.target)
        if failure.kind != KIND:
            return None
        if not _NAME.fullmatch(unit):
            return f"target = {failure.target!r} is a pattern; expected the name of one slice, such as learner-2/slice-3"
        if failure.duration_s == 0:
            return "duration_s = 0, expected for how long the unit is away"
        if failure.at_s <= ends.get(unit, -1.0):
            return f"at_s = {failure.at_s:g}: {unit} is still away, until {ends[unit]:g}"
        ends[unit] = failure.at_s + failure.duration_s
        return None

    tape, left_out = failures.only(failures.decode(lines, source, complaint=complaint), {KIND})
    if tape.duration_s <= 0:
        raise FormatError(f"{source}, line 1: duration_s = {tape.duration_s:g}, expected above 0")
    outages = [
        Outage(_unit(failure.target), failure.at_s, _within(failure.at_s + failure.duration_s, tape.duration_s))
        for failure in tape.failures
        if failure.at_s < tape.duration_s
    ]
    notes = [f"{count} failures of kind {kind!r} are left out" for kind, count in left_out.items()]
    return Trace(tape.duration_s, dict.fromkeys(ends, 0.0), outages, notes)


def _unit(target: str) -> str:
    return re.sub(r"/chip-[^/]*$", "", target)


def _within(end_s: float, duration_s: float) -> float:
    # a start and a duration that were rounded may add up to a little less than the end
    return duration_s if end_s > duration_s - TAPE_RESOLUTION_S else end_s


def slices(trace: Trace, learners: int, slices_per_learner: int) -> dict[str, str]:
    """Return targets of a tape: units, in order of appearance, are the slices of the first learner, then those of the next.

    Raises:
        SettingsError: more units than slices.
    """
    if len(trace.joined_s) > learners * slices_per_learner:
        raise SettingsError(
            f"the trace has {len(trace.joined_s)} units, and {learners} learners of {slices_per_learner} slices "
            f"have {learners * slices_per_learner}; raise --learners or --slices-per-learner"
        )
    places = (divmod(number, slices_per_learner) for number in range(len(trace.joined_s)))
    return {unit: f"learner-{learner}/slice-{place}" for unit, (learner, place) in zip(trace.joined_s, places, strict=True)}


def own_names(trace: Trace) -> dict[str, str]:
    """Return targets of a tape: units under their own names.

    Raises:
        SettingsError: a name that cannot be a target.
    """
    for unit in trace.joined_s:
        if not _NAME.fullmatch(unit):
            raise SettingsError(
                f"unit {unit!r} cannot be named in a tape, where names have lower-case letters, digits and _./-; "
                "give --learners and --slices-per-learner, and units become slices"
            )
    return {unit: unit for unit in trace.joined_s}


def cut(trace: Trace, targets: Mapping[str, str], from_s: float = 0.0, for_s: float | None = None) -> FailureTape:
    """Return a stretch of a trace as a failure tape. A unit away at its beginning is lost at 0; one at its end, until then.

    Raises:
        SettingsError: the stretch is not within the trace.
    """
    length_s = trace.duration_s - from_s if for_s is None else for_s
    end_s = from_s + length_s
    if not (from_s >= 0 and length_s > 0 and end_s <= trace.duration_s):
        raise SettingsError(f"--from {from_s:g} --for {length_s:g}: the trace has {trace.duration_s:g} s")
    lost = [
        Failure(
            max(outage.start_s - from_s, 0.0),
            KIND,
            targets[outage.unit],
            min(outage.end_s, end_s) - max(outage.start_s, from_s),
        )
        for outage in trace.outages
        if outage.start_s < end_s and outage.end_s > from_s
    ]
    if len(lost) > MAX_FAILURES:
        raise SettingsError(f"{len(lost)} failures are more than a tape's {MAX_FAILURES}; cut it with --for")
    return FailureTape(length_s, lost)
