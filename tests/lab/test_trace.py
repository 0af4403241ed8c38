"""Traces of failures: what is read, refused, fitted and written. Expected values are worked by hand, or are scipy's own."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import CensoredData, expon, exponweib, kstest, weibull_min
from tests.made.command_line import Command, commanding

from diloco.errors import DataError, FormatError, SettingsError
from diloco_lab.simulate_command import simulate
from diloco_lab.simulator.repair import RepairTime
from diloco_lab.traces.trace import Columns, Notation, Outage, Trace, cut, from_tape, own_names, read, slices
from diloco_lab.traces.trace_fit import _Likelihood, _Sample, fit, mean_between
from diloco_ops import failures
from diloco_ops.failures import Failure, FailureTape, Spread

EXAMPLE = Path(__file__).parents[2] / "examples" / "failures.csv"
DAY_S = 86400.0
EXAMPLE_REPAIR = RepairTime(2.0, 0.7, 1800.0)
EXAMPLE_BETWEEN_S = 12 * DAY_S


def draw(seed: int, units: int, mean_between_s: float, repair: RepairTime, duration_s: float) -> FailureTape:
    """A tape of slices that are interrupted at a constant rate while they are there, and repaired."""
    chance = random.Random(seed)
    up = Spread(mean=mean_between_s)
    lost = []
    for unit in range(units):
        at_s = up.draw(chance)
        while at_s < duration_s:
            away_s = repair.quantile_s(chance.random())
            lost.append(Failure(at_s, "chip_loss", f"learner-0/slice-{unit}", away_s))
            at_s += away_s + up.draw(chance)
    return FailureTape(duration_s, sorted(lost, key=lambda failure: failure.at_s), {"seed": float(seed)})


def example() -> str:
    """The example's text: 32 units over the first 90 days of 2026, whole seconds; ends after that are not in it."""
    begin = datetime(2026, 1, 1)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["unit", "start", "end"])
    for failure in draw(11, 32, EXAMPLE_BETWEEN_S, EXAMPLE_REPAIR, 90 * DAY_S).failures:
        start = round(failure.at_s)
        end = start + max(round(failure.duration_s), 1)
        ends = (begin + timedelta(seconds=end)).isoformat() if end < 90 * DAY_S else ""
        table.writerow([f"Node {failure.target.partition('slice-')[2]}", (begin + timedelta(seconds=start)).isoformat(), ends])
    return text.getvalue()


def parsed(text: str, **notation: Any) -> Trace:
    return read(text.splitlines(keepends=True), "trace.csv", Notation(**notation))


# ---- reading


WINDOW: dict[str, Any] = {"since": "0", "until": "1000"}


@pytest.mark.parametrize(
    "text",
    [
        "unit,start,end\na,100,160\nb,200,500\na,300,310\n",
        "unit,start,end\na,300,310\n\nb,200,500\na,100,160\n",  # in any order
        "Machine ID,Down Time,note,Up Time\na,100,x,160\nb,200,,500\na,300,,310\n",
        "host,failed_at,duration_s\na,100,60\nb,200,300\na,300,10\n",
        "time,node,state\n100,a,down\n160,a,UP\n200,b,Offline\n300,a,failed\n500,b,online\n310,a,repaired\n",
    ],
)
def test_every_shape_of_a_file_says_the_same(text: str) -> None:
    trace = parsed(text, **WINDOW)
    assert trace.duration_s == 1000
    assert set(trace.joined_s.items()) == {("a", 0.0), ("b", 0.0)}
    assert trace.outages == [Outage("a", 100, 160), Outage("b", 200, 500), Outage("a", 300, 310)]


def test_the_columns_of_a_well_known_log_are_recognised_and_rows_chosen() -> None:
    text = (
        "System,machine type,nodenum,nodenumz,Prob Started,Prob Fixed,Down Time\n"
        "2,cluster,0,0,6/21/2005 10:54,6/21/2005 11:00,6\n"
        "20,smp,0,0,6/21/2005 10:55,6/21/2005 11:00,5\n"
    )
    trace = parsed(text, where=["System=2"], time_format="%m/%d/%Y %H:%M", since="6/21/2005 10:00", until="6/22/2005 10:00")
    assert trace.outages == [Outage("0", 54 * 60, 3600)]
    assert trace.notes == [
        "unit is column 'nodenum'; start is column 'Prob Started'; end is column 'Prob Fixed'",
        "times are dates without a time zone, taken as UTC",
    ]


def test_times_have_zones_and_plain_numbers_units() -> None:
    zones = parsed("unit,start,end\na,2026-01-01T01:00:00+01:00,2026-01-01T00:30:00Z\n", since="2025-12-31T00:00:00Z")
    assert zones.outages == [Outage("a", DAY_S, DAY_S + 1800)]
    assert "times are dates with a time zone" in zones.notes
    hours = parsed("unit,start,duration\na,2,0.5\n", clock="hours", since="0", until="10")
    assert (hours.duration_s, hours.outages) == (36000, [Outage("a", 7200, 9000)])
    dates = parsed("unit,start,duration\na,2026-01-01T02:00,30\n", clock="minutes", since="2026-01-01", until="2026-01-02")
    assert dates.outages == [Outage("a", 7200, 9000)]


def test_columns_that_are_named_go_before_those_that_are_recognised() -> None:
    text = "node,gpu,start,end,back\na,x,100,160,170\n"
    trace = parsed(text, columns=Columns(unit="gpu", end="back"), **WINDOW)
    assert trace.outages == [Outage("x", 100, 170)]


def test_what_had_not_ended_lasts_as_long_as_the_observation() -> None:
    text = "unit,start,end\na,100,160\nb,200,\n"
    assert parsed(text, open="", **WINDOW).outages[1] == Outage("b", 200, 1000)
    assert parsed("unit,start,duration\na,1,2\nb,200,?\n", open="?", **WINDOW).outages[1] == Outage("b", 200, 1000)
    assert parsed("unit,time,state\nb,200,down\n", **WINDOW).outages == [Outage("b", 200, 1000)]


def test_the_observation_cuts_what_passes_its_edges() -> None:
    trace = parsed("unit,start,end\na,10,20\nb,10,120\nb,150,160\na,190,260\nc,300,310\n", since="100", until="200")
    assert trace.outages == [Outage("b", 0, 20), Outage("b", 50, 60), Outage("a", 90, 100)]
    assert "2 interruptions lie outside of the time observed, and are left out" in trace.notes
    whole = parsed("unit,start,end\na,10,20\nb,10,120\n")
    assert (whole.duration_s, whole.outages) == (110, [Outage("a", 0, 10), Outage("b", 0, 110)])
    assert "the time observed begins with the first time in the file, as --since is not given" in whole.notes
    assert "the time observed ends with the last time in the file, as --until is not given" in whole.notes


def test_a_unit_that_begins_with_up_is_observed_from_then_on() -> None:
    trace = parsed("unit,time,state\na,0,up\nb,400,up\nb,500,down\nb,600,up\nc,700,down\n", **WINDOW)
    assert trace.joined_s == {"a": 0, "b": 400, "c": 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "trace.csv, line 1: empty"),
        ("unit,start,end\n", "trace.csv: no rows"),
        ("unit,start,end\na,1\n", "trace.csv, line 2: 2 cells, expected 3"),
        ("unit,start,end\na,1,2\n,3,4\n", "trace.csv, line 3: unit is empty"),
        ("unit,start,end\na,,2\n", "trace.csv, line 2: start is empty"),
        ("unit,start,end\na,1,\n", "trace.csv, line 2: end is empty; if the interruption had not ended, say so with --open ''"),
        ("unit,start,duration\na,1,\n", "trace.csv, line 2: duration is empty"),
        ("unit,start,end\na,1,x\n", "trace.csv, line 2: end = 'x', expected a time as ISO 8601 or a number of seconds"),
        ("unit,start,end\na,nan,3\n", "trace.csv, line 2: start = 'nan', expected a time"),
        ("unit,start,end\na,5,3\n", "trace.csv, line 2: end = '3': the end does not come after start = '5'"),
        ("unit,start,end\na,5,5\n", "trace.csv, line 2: end = '5': the end does not come after start = '5'"),
        ("unit,start,duration\na,5,-1\n", "trace.csv, line 2: duration = '-1', expected seconds above 0"),
        ("unit,start,duration\na,5,long\n", "trace.csv, line 2: duration = 'long', expected seconds above 0"),
        ("unit,start,duration\na,1e9,1e-9\n", "trace.csv, line 2: duration = '1e-9': the end does not come after start"),
        ("unit,start,end\na,5,9\nb,1,2\na,8,10\n", "line 4: start: unit 'a' is still away, by the interruption of trace"),
        ("unit,start,end\na,5,9\na,9,10\n", "trace.csv, line 3: start: unit 'a' is still away"),
        ("unit,start,end\na,1,2\na,2026-01-01,2026-01-02\n", "line 3: start = '2026-01-01': dates without a time zone, taken"),
        ("unit,start,end\na,2026-01-01,2026-01-02T00:00Z\n", "line 2: end = '2026-01-02T00:00Z': dates with a time zone, and"),
        ("unit,start,end\na,0,2e9\n", "trace.csv: observed for 2e+09 s, expected above 0 and up to 1e+09"),
        ("unit,time,state\na,0,up\n", "trace.csv: observed for 0 s"),
        ("unit,time,state\na,0,up\na,1,rebooting\n", "trace.csv, line 3: state = 'rebooting', expected one of up, online"),
        ("unit,time,state\na,0,down\nb,1,up\na,1,down\n", "line 4: state = 'down': unit 'a' is so already, by trace.csv"),
        ("unit,time,state\na,5,down\na,4,up\n", "line 3: time = '4' does not come after that of unit 'a' in trace.csv, line 2"),
        ("unit,time,state\na,5,down\na,5,up\n", "trace.csv, line 3: time = '5' does not come after"),
        ("unit,time,state\na,5,\n", "trace.csv, line 2: state is empty"),
        ("unit,start,end\na,1,2\nb,1," + "2" * 65_536, "trace.csv, line 3: longer than 65536 characters"),
        ('unit,start,end\na,1,"2" 3\n', "trace.csv, line 2: not CSV"),
        ("unit,start,start,end\na,1,2,3\n", "trace.csv, line 1: column 'start' is there 2 times"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_its_line_and_field(text: str, said: str) -> None:
    with pytest.raises(FormatError) as refused:
        parsed(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("header", "notation", "said"),
    [
        ("a,b", {}, "which columns are meant? Name them: --unit, and --start with --end or --duration, or --time with --state"),
        ("start,end", {}, "there are 'start', 'end'"),
        ("node,gpu,start,end", {}, "which columns are meant?"),
        ("unit,start,end,down,up", {}, "which columns are meant?"),
        ("unit,start,end", {"columns": Columns(start="begin")}, "--start begin: trace.csv has no such column"),
        ("unit,start,end", {"columns": Columns(end="ends")}, "has no such column (did you mean 'end'?)"),
        ("unit,start,state", {"columns": Columns(start="start", state="state")}, "which columns are meant?"),
        ("unit,start,end", {"where": ["unit"]}, "--where unit: expected COLUMN=VALUE"),
        ("unit,start,end", {"where": ["nit=1"]}, "--where nit: trace.csv has no such column (did you mean 'unit'?)"),
    ],
)
def test_columns_are_not_guessed(header: str, notation: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parsed(header + "\na,1,2\n", **notation)
    assert said in str(refused.value)


def test_notations_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--clock hour: expected one of seconds.*did you mean 'hours'"):
        Notation(clock="hour")
    text = "unit,start,end\na,2026-01-01,2026-01-02\n"
    for wrong in ("%d/%m/%Y", "%m%m", "%"):
        with pytest.raises(FormatError, match="line 2: start = '2026-01-01', expected a time as the format"):
            parsed(text, time_format=wrong)
    with pytest.raises(FormatError, match="--since = '5': plain numbers of seconds, and those before it are dates"):
        parsed(text, since="5")
    with pytest.raises(FormatError, match=r"trace\.csv: no rows with unit=b"):
        parsed(text, where=["unit=b"])


CELLS = st.sampled_from(["a", "b", "1", "2", "30", "2026-01-01", "", "up", "down", "nan", "inf", '"', "-1"]) | st.text(
    max_size=5
)


@given(
    st.sampled_from(["unit,start,end", "unit,start,duration", "unit,time,state"]),
    st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=6),
)
def test_no_file_does_worse_than_a_refusal(header: str, rows: list[list[str]]) -> None:
    try:
        trace = parsed("\n".join([header, *(",".join(row) for row in rows)]))
    except FormatError:
        return
    ends: dict[str, float] = {}
    for outage in trace.outages:
        assert ends.get(outage.unit, -1.0) < outage.start_s < outage.end_s <= trace.duration_s
        ends[outage.unit] = outage.end_s


# ---- tapes


def lines(*made: Failure, duration_s: float = 1000.0) -> list[str]:
    return failures.encode(FailureTape(duration_s, made)).splitlines()


def test_a_tape_is_read_by_its_slices() -> None:
    trace = from_tape(
        lines(
            Failure(10, "chip_loss", "learner-1/slice-2/chip-7", 60),
            Failure(20, "freeze", "learner-*", 60),
            Failure(30, "chip_loss", "learner-0/slice-0", 2000),
            Failure(90, "chip_loss", "learner-1/slice-2/chip-0", 60),
            Failure(1000, "chip_loss", "learner-1/slice-2", 60),
        ),
        "tape",
    )
    assert trace.outages == [
        Outage("learner-1/slice-2", 10, 70), Outage("learner-0/slice-0", 30, 1000), Outage("learner-1/slice-2", 90, 150)
    ]  # fmt: skip
    assert list(trace.joined_s) == ["learner-1/slice-2", "learner-0/slice-0"]
    assert trace.notes == ["1 failures of kind 'freeze' are left out"]
    # 0.1 and 0.7 add up to a little less than 0.8
    assert from_tape(lines(Failure(0.1, "chip_loss", "a", 0.7), duration_s=0.8), "tape").outages == [Outage("a", 0.1, 0.8)]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([Failure(1, "chip_loss", "learner-*/slice-0", 5)], "tape, line 2: target = 'learner-*/slice-0' is a pattern"),
        ([Failure(1, "chip_loss", "learner-0/slice-0")], "tape, line 2: duration_s = 0, expected for how long"),
        (
            [Failure(1, "chip_loss", "learner-0/slice-0/chip-0", 5), Failure(6, "chip_loss", "learner-0/slice-0/chip-1", 5)],
            "tape, line 3: at_s = 6: learner-0/slice-0 is still away, until 6",
        ),
    ],
)
def test_a_tape_without_units_to_observe_is_refused(made: list[Failure], said: str) -> None:
    with pytest.raises(FormatError) as refused:
        from_tape(lines(*made), "tape")
    assert said in str(refused.value)


def test_a_tape_of_no_time_is_refused() -> None:
    with pytest.raises(FormatError, match="tape, line 1: duration_s = 0, expected above 0"):
        from_tape(lines(duration_s=0), "tape")


TRACE = Trace(
    1000.0,
    {"Node b": 0.0, "Node a": 0.0, "Node c": 0.0},
    [Outage("Node a", 100, 160), Outage("Node b", 200, 500), Outage("Node a", 900, 1000)],
)


def test_units_become_slices_in_order_of_appearance() -> None:
    targets = slices(TRACE, 2, 2)
    assert targets == {"Node b": "learner-0/slice-0", "Node a": "learner-0/slice-1", "Node c": "learner-1/slice-0"}
    assert cut(TRACE, targets).failures == [
        Failure(100, "chip_loss", "learner-0/slice-1", 60),
        Failure(200, "chip_loss", "learner-0/slice-0", 300),
        Failure(900, "chip_loss", "learner-0/slice-1", 100),
    ]
    with pytest.raises(SettingsError, match="the trace has 3 units, and 1 learners of 2 slices have 2"):
        slices(TRACE, 1, 2)
    with pytest.raises(SettingsError, match="unit 'Node b' cannot be named in a tape"):
        own_names(TRACE)


def test_a_stretch_of_a_trace_begins_with_who_is_away() -> None:
    stretch = cut(TRACE, slices(TRACE, 1, 3), 450, 460)
    assert stretch.duration_s == 460
    assert stretch.failures == [
        Failure(0, "chip_loss", "learner-0/slice-0", 50), Failure(450, "chip_loss", "learner-0/slice-1", 10)
    ]  # fmt: skip
    for from_s, for_s in ((-1.0, 10.0), (0.0, 0.0), (600.0, 401.0), (1000.0, None), (math.nan, None)):
        with pytest.raises(SettingsError, match="the trace has 1000 s"):
            cut(TRACE, slices(TRACE, 1, 3), from_s, for_s)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 1e5), st.floats(0.01, 1e5)), min_size=1, max_size=20))
def test_a_trace_that_is_written_as_a_tape_is_read_again(spans: list[tuple[str, float, float]]) -> None:
    ends: dict[str, float] = {}
    rows = ["unit,start,end\n"]
    for unit, gap, length in spans:
        start = ends.get(unit, 0.0) + gap
        ends[unit] = start + length
        rows.append(f"{unit},{start!r},{ends[unit]!r}\n")
    whole = parsed("".join(rows), since="0")
    again = from_tape(failures.encode(cut(whole, own_names(whole))).splitlines(), "tape")
    assert again.duration_s == whole.duration_s
    assert [(outage.unit, outage.start_s) for outage in again.outages] == [(o.unit, o.start_s) for o in whole.outages]
    for outage, known in zip(again.outages, whole.outages, strict=True):
        assert outage.end_s == pytest.approx(known.end_s, abs=1e-3)
        assert (known.end_s == whole.duration_s) <= (outage.end_s == again.duration_s)


# ---- fitting


def observed(duration_s: float, *outages: tuple[str, float, float], units: int | None = None) -> Trace:
    ordered = sorted((Outage(*outage) for outage in outages), key=lambda outage: outage.start_s)
    return Trace(duration_s, {outage.unit: 0.0 for outage in ordered}, ordered)


def sample(lengths: Any, cut_lengths: Any = (), duration_s: float = 1e7) -> Trace:
    """Repairs of such lengths, each of a unit of its own, and such that had not ended."""
    outages = [(f"n{number}", 1.0, 1.0 + length) for number, length in enumerate(lengths)]
    return observed(duration_s, *outages, *((f"c{n}", duration_s - length, duration_s) for n, length in enumerate(cut_lengths)))


def test_a_rate_worked_by_hand() -> None:
    # two units over 5.25 days, away for 0.5 days together: 3 interruptions in 10 days of their time, of 4 chips each
    half = DAY_S / 2
    trace = observed(5.25 * DAY_S, ("a", half, 1.5 * half), ("a", 4 * half, 4.25 * half), ("b", 10.25 * half, 10.5 * half))
    fitted = fit(trace, 2, 4)
    assert (fitted.units, fitted.interruptions, fitted.repairs, fitted.open_repairs) == (2, 3, 2, 1)
    assert fitted.up_s == 10 * DAY_S
    # of 3 events: 0.61867 to 8.76727 (Garwood)
    assert fitted.mean_between_s.value == pytest.approx(10 / 3 * DAY_S)
    assert fitted.mean_between_s.low == pytest.approx(10 / 8.76727 * DAY_S, rel=1e-5)
    assert fitted.mean_between_s.high == pytest.approx(10 / 0.618672 * DAY_S, rel=1e-5)
    assert fitted.mean_between_chip_s is not None
    assert fitted.mean_between_chip_s.value == pytest.approx(40 / 3 * DAY_S)
    assert fitted.between_shape is None
    # eight more units that never failed
    assert fit(trace, 10).mean_between_s.value == pytest.approx((10 + 8 * 5.25) / 3 * DAY_S)


def test_time_before_a_unit_joined_is_not_counted() -> None:
    trace = Trace(100.0, {"a": 0.0, "b": 60.0}, [Outage("a", 0, 10), Outage("a", 20, 25), Outage("b", 70, 73)])
    fitted = fit(trace)
    assert (fitted.interruptions, fitted.repairs, fitted.up_s) == (2, 2, 100 + 40 - 18)
    assert "interruptions that touch the beginning of the time observed count as time away only" in fitted.notes


@pytest.mark.parametrize(("events", "low", "high"), [(1, 0.025318, 5.57164), (10, 4.79539, 18.39036), (100, 81.3640, 121.6272)])
def test_the_interval_of_a_rate_is_the_known_one(events: int, low: float, high: float) -> None:
    found = mean_between(events, 1000.0)
    assert (1000 / found.high, 1000 / found.value, 1000 / found.low) == pytest.approx((low, events, high), rel=1e-4)


@pytest.mark.parametrize("repair", [RepairTime(1.0, 1.0, 3600.0), RepairTime(2.5, 0.8, 600.0), RepairTime(0.6, 1.7, 5000.0)])
def test_quantiles_without_noise_give_their_distribution_back(repair: RepairTime) -> None:
    fitted = fit(sample([repair.quantile_s((rank + 0.5) / 4000) for rank in range(4000)]))
    assert (fitted.repair.exponent, fitted.repair.shape, fitted.repair.scale_s) == pytest.approx(
        (repair.exponent, repair.shape, repair.scale_s), rel=0.02
    )
    assert fitted.mean_repair_s.value == pytest.approx(repair.mean_s, rel=1e-3)
    assert fitted.repair_distance < 1e-3
    for estimate, value in (
        (fitted.repair_exponent, repair.exponent),
        (fitted.repair_shape, repair.shape),
        (fitted.repair_scale_s, repair.scale_s),
        (fitted.mean_repair_s, repair.mean_s),
    ):
        assert estimate.low < value < estimate.high


def test_the_fit_and_its_intervals_are_those_of_the_censored_likelihood() -> None:
    chance = random.Random(3)
    lengths = [RepairTime(2.0, 0.7, 1800.0).quantile_s(chance.random()) for _ in range(400)]
    whole, short = [length for length in lengths if length < 8000], [8000.0 for length in lengths if length >= 8000]
    assert len(short) > 30
    fitted = fit(sample(whole, short))

    def likelihood(logs: Any) -> float:
        a, c, s = np.exp(logs)
        total = exponweib.logpdf(whole, a, c, scale=s).sum() + exponweib.logsf(short, a, c, scale=s).sum()
        return float(total)

    def best(index: int, value: float) -> float:
        def falling(others: Any) -> float:
            return -likelihood(np.insert(others, index, math.log(value)))

        start = np.delete(np.log([fitted.repair.exponent, fitted.repair.shape, fitted.repair.scale_s]), index)
        found = minimize(falling, start, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-7, "fatol": 1e-7})
        return -float(found.fun)

    def best_of_mean(mean_s: float) -> float:
        def falling(logs: Any) -> float:
            return -likelihood([*logs, math.log(mean_s / RepairTime(math.exp(logs[0]), math.exp(logs[1]), 1.0).mean_s)])

        found = minimize(falling, np.log([fitted.repair.exponent, fitted.repair.shape]), method="Nelder-Mead")
        return -float(found.fun)

    most = likelihood(np.log([fitted.repair.exponent, fitted.repair.shape, fitted.repair.scale_s]))
    less = most - 1.9207  # by half of the 95 % point of chi-square with one degree of freedom
    for index, estimate in enumerate((fitted.repair_exponent, fitted.repair_shape, fitted.repair_scale_s)):
        assert [best(index, value) for value in (estimate.low, estimate.value, estimate.high)] == pytest.approx(
            [less, most, less], abs=1e-3
        )
    mean = fitted.mean_repair_s
    assert [best_of_mean(value) for value in (mean.low, mean.value, mean.high)] == pytest.approx([less, most, less], abs=1e-3)
    # who left the repairs that had not ended out would find them shorter than they are
    assert fit(sample(whole)).mean_repair_s.high < fitted.mean_repair_s.low


def test_the_likelihood_and_its_slope_hold_far_out_in_the_tails() -> None:
    lengths, short = [1.0, 3.0, 40.0], [2.0, 500.0, 1e-6]
    likelihood = _Likelihood(_Sample(np.array(lengths), np.array(short)))
    for logs in ([0.3, 0.5, -1.0], [-2.0, -0.5, 3.0], [2.0, 0.7, 1.0]):
        value, slope = likelihood._value(*logs)
        a, c, s = np.exp(logs)
        # times are in medians, here of 3 s
        known = exponweib.logpdf(lengths, a, c, scale=3 * s) + math.log(3)
        tail = exponweib.logsf(short, a, c, scale=3 * s)
        far = (500 / (3 * s)) ** c  # where one is too small for scipy: a exp(-z)
        tail[1] = math.log(a) - far if far > 36 else tail[1]
        assert value == pytest.approx(known.sum() + tail.sum(), rel=1e-9)
        steps = np.eye(3) * 1e-6
        differences = [(likelihood._value(*(logs + step))[0] - likelihood._value(*(logs - step))[0]) / 2e-6 for step in steps]
        assert slope == pytest.approx(differences, rel=1e-5, abs=1e-5)


def test_the_interval_of_the_mean_is_that_of_an_exponential_where_it_is_one() -> None:
    # the interval with two free parameters more cannot be much narrower than that of the exponential alone: 1 / sqrt(n)
    fitted = fit(sample(expon.ppf((np.arange(400) + 0.5) / 400, scale=100.0)))
    exact = (fitted.mean_repair_s.value * math.exp(-1.96 / 20), fitted.mean_repair_s.value * math.exp(1.96 / 20))
    assert (fitted.mean_repair_s.low, fitted.mean_repair_s.high) == pytest.approx(exact, rel=0.02)


def test_the_distance_is_that_of_kolmogorov_and_smirnov() -> None:
    chance = random.Random(5)
    lengths = [chance.lognormvariate(6.0, 1.5) for _ in range(60)]
    fitted = fit(sample(lengths))
    known = kstest(lengths, exponweib(fitted.repair.exponent, fitted.repair.shape, scale=fitted.repair.scale_s).cdf)
    assert fitted.repair_distance == pytest.approx(known.statistic, rel=1e-6)
    # Kaplan and Meier by hand, of 1, 2, (3 or more), 4, (400 or more): 1/5, 2/5 and 7/10
    few = fit(sample([1.0, 2.0, 4.0], [3.0, 400.0]))
    cdf = exponweib(few.repair.exponent, few.repair.shape, scale=few.repair.scale_s).cdf
    steps = ((1.0, 0.0, 0.2), (2.0, 0.2, 0.4), (4.0, 0.4, 0.7))
    assert few.repair_distance == pytest.approx(max(abs(cdf(t) - f) for t, *around in steps for f in around), rel=1e-6)


def test_a_rate_that_is_not_constant_is_told_by_its_shape() -> None:
    def renewal(shape: float) -> Trace:
        chance = random.Random(8)
        outages = []
        for unit in range(20):
            at_s = chance.weibullvariate(1000.0, shape)
            while at_s < 20_000:
                outages.append((f"n{unit}", at_s, at_s + 5 + chance.random()))
                at_s = outages[-1][2] + chance.weibullvariate(1000.0, shape)
        return observed(20_000.0, *((unit, start, min(end, 20_000.0)) for unit, start, end in outages))

    bunched, constant, even = (fit(renewal(shape)) for shape in (0.5, 1.0, 2.0))
    for fitted, shape in ((bunched, 0.5), (constant, 1.0), (even, 2.0)):
        assert fitted.between_shape is not None
        assert fitted.between_shape.low < shape < fitted.between_shape.high
    assert any("in bunches" in note for note in bunched.notes)
    assert not any("constant rate" in note for note in constant.notes)
    assert any("more evenly than by chance" in note for note in even.notes)
    # scipy's own fit of the same times: from a repair to the next interruption, or to the end
    trace = renewal(0.5)
    seen, cut_ = [], []
    for unit in trace.joined_s:
        own = [outage for outage in trace.outages if outage.unit == unit]
        seen += [after.start_s - before.end_s for before, after in pairwise(own)]
        if own[-1].end_s < 20_000:
            cut_.append(20_000 - own[-1].end_s)
    known, _, _ = weibull_min.fit(CensoredData(uncensored=seen, right=cut_), floc=0)
    assert bunched.between_shape is not None
    assert bunched.between_shape.value == pytest.approx(known, rel=1e-3)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(DataError, match="1 repairs were seen from beginning to end; a fit needs two"):
        fit(sample([60.0], [5.0]))
    with pytest.raises(DataError, match="0 repairs were seen"):
        fit(Trace(100.0, {"a": 0.0}, []))
    with pytest.raises(DataError, match="all 3 repairs took 60 s; there is no distribution to fit"):
        fit(sample([60.0, 60.0, 60.0]))
    with pytest.raises(SettingsError, match="--units 1: the trace names 2"):
        fit(sample([60.0, 70.0]), 1)


def test_few_repairs_say_little_and_so_it_is_said() -> None:
    fitted = fit(sample([60.0, 90.0, 400.0]))
    assert fitted.repair_exponent.high == pytest.approx(100.0)
    assert "3 repairs are few: the intervals are wide, and approximate" in fitted.notes
    assert "the repairs do not bound the exponent: its interval ends where the search does" in fitted.notes
    assert "the 3 units that the trace names are taken for all there were, as --units is not given" in fitted.notes


def test_what_was_drawn_is_found_again_within_its_intervals() -> None:
    repair = RepairTime(2.0, 0.7, 1800.0)
    missed = 0
    for seed in range(8):
        tape = draw(seed, 32, 12 * DAY_S, repair, 60 * DAY_S)
        fitted = fit(from_tape(failures.encode(tape).splitlines(), "tape"), 32)
        assert fitted.between_shape is not None
        for estimate, value in (
            (fitted.mean_between_s, 12 * DAY_S),
            (fitted.between_shape, 1.0),
            (fitted.repair_exponent, repair.exponent),
            (fitted.repair_shape, repair.shape),
            (fitted.repair_scale_s, repair.scale_s),
            (fitted.mean_repair_s, repair.mean_s),
        ):
            missed += not estimate.low <= value <= estimate.high
    # 48 intervals of 95 %: 2.4 are missed on average, more than 7 once in 500 times
    assert missed <= 7


@pytest.mark.parametrize(("exponent", "shape"), [(1.0, 0.05), (1.0, 1.0), (1.0, 20.0), (2.0, 0.5), (3.0, 1.3), (5.0, 0.1)])
def test_the_mean_repair_is_that_of_the_closed_form(exponent: float, shape: float) -> None:
    # with a whole exponent (1 - exp(-z))^(exponent - 1) is a sum of exponentials, each with a Gamma function for its moment
    power = 1 / shape
    terms = [(-1) ** k * math.comb(int(exponent) - 1, k) * (k + 1) ** -(power + 1) for k in range(int(exponent))]
    assert RepairTime(exponent, shape, 7.0).mean_s == pytest.approx(
        7.0 * exponent * math.gamma(power + 1) * sum(terms), rel=1e-9
    )


@pytest.mark.parametrize("exponent", [0.05, 1e-3])
def test_the_mean_repair_holds_for_small_exponents(exponent: float) -> None:
    # with the inverse of the exponent as shape, nearly uniform from 0 to 1
    assert RepairTime(exponent, 1 / exponent, 1.0).mean_s == pytest.approx(0.5, abs=exponent / 10)


# ---- as a user sees it


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Command]:
    with commanding(simulate, ("simulate", "trace"), 120, tmp_path, monkeypatch, capfd) as made:
        yield made


EXAMPLE_OPTIONS = ("--open", "", "--since", "2026-01-01", "--until", "2026-04-01", "--units", "32", "--chips-per-unit", "64")


def test_the_example_is_what_its_seed_gives() -> None:
    assert EXAMPLE.read_text() == example(), "run: python tests/lab/test_trace.py"


def test_the_example_gives_back_what_it_was_drawn_with(command: Command) -> None:
    ended = command(str(EXAMPLE), *EXAMPLE_OPTIONS, "--json")
    assert ended.code == 0
    told = json.loads(ended.out)
    fitted = told["fitted"]
    for name, value in (
        ("mean_between_s", EXAMPLE_BETWEEN_S),
        ("mean_between_chip_s", 64 * EXAMPLE_BETWEEN_S),
        ("between_shape", 1.0),
        ("repair_exponent", EXAMPLE_REPAIR.exponent),
        ("repair_shape", EXAMPLE_REPAIR.shape),
        ("repair_scale_s", EXAMPLE_REPAIR.scale_s),
        ("mean_repair_s", EXAMPLE_REPAIR.mean_s),
    ):
        assert fitted[name]["low"] < value < fitted[name]["high"], name
    rows = len(EXAMPLE.read_text().splitlines()) - 1
    assert fitted["interruptions"] == fitted["repairs"] + fitted["open_repairs"] == rows
    assert (told["source"], told["duration_s"], fitted["units"]) == (str(EXAMPLE), 90 * DAY_S, 32)
    assert told["notes"] == [
        "unit is column 'unit'; start is column 'start'; end is column 'end'",
        "times are dates without a time zone, taken as UTC",
    ]


def test_a_trace_becomes_a_tape_that_fits_alike(command: Command, tmp_path: Path) -> None:
    tape = tmp_path / "tape.jsonl"
    ended = command(
        str(EXAMPLE), *EXAMPLE_OPTIONS, "--json", "--tape", str(tape), "--learners", "4", "--slices-per-learner", "8"
    )
    direct = json.loads(ended.out)
    assert f"{tape}: " in direct["notes"][2]
    assert "units in order of appearance, Node " in direct["notes"][2]
    again = json.loads(command(str(tape), "--units", "32", "--chips-per-unit", "64", "--json").out)
    for name, estimate in direct["fitted"].items():
        assert again["fitted"][name] == pytest.approx(estimate, rel=1e-6), name


def test_an_hour_of_a_trace_is_a_tape_even_where_it_is_too_little_to_fit(command: Command, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("\ufeffunit,start,duration\nn7,100,60\n")
    ended = command("one.csv", "--since", "0", "--until", "9000", "--tape", "one.jsonl", "--from", "40", "--for", "3600")
    assert ended.code == 0
    assert "1 failures in 60 min; units under their own names" in " ".join(ended.out.split())
    assert "no fit: 1 repairs were seen" in ended.out
    tape = failures.decode((tmp_path / "one.jsonl").read_text().splitlines(), "one.jsonl")
    assert tape == FailureTape(3600.0, [Failure(60.0, "chip_loss", "n7", 60.0)])


def test_a_tape_without_failures_is_cut_as_any_other(command: Command, tmp_path: Path) -> None:
    (tmp_path / "calm.jsonl").write_text("\n".join(lines()))
    assert command("calm.jsonl", "--tape", "cut.jsonl", "--for", "60").code == 0
    assert failures.decode((tmp_path / "cut.jsonl").read_text().splitlines(), "cut.jsonl") == FailureTape(60.0, [])


def test_the_table_is_for_people(command: Command) -> None:
    ended = command(str(EXAMPLE), *EXAMPLE_OPTIONS)
    assert ended.code == 0
    rows = [line.split() for line in ended.out.splitlines()]
    [between] = [row for row in rows if row[:5] == ["between", "interruptions", "of", "a", "unit"]]
    assert between[6::2] == ["days", "days", "days"]
    assert 10 < float(between[5]) < 14
    assert "Kolmogorov-Smirnov" in ended.out
    assert "unit is column 'unit'" in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no.csv"], 2, "no.csv: cannot be read: No such file"),
        (["."], 2, ".: cannot be read: Is a directory"),
        (["holes.csv"], 7, "holes.csv, line 3: end is empty"),
        (["tape.jsonl"], 3, "0 repairs were seen"),
        (["tape.jsonl", "--unit", "node"], 2, "tape.jsonl is a failure tape; options for columns, times and rows are for CSV"),
        (["one.csv"], 3, "0 repairs were seen"),
        (["one.csv", "--for", "60"], 2, "--learners, --slices-per-learner, --from and --for describe the tape to write"),
        (["one.csv", "--tape", "o", "--learners", "2"], 2, "--learners and --slices-per-learner go together"),
        (["one.csv", "--tape", "folder"], 2, "folder: cannot be written"),
        (["one.csv", "--unit", "nod"], 2, "--unit nod: one.csv has no such column"),
        (["one.csv", "--clock", "weeks"], 2, "--clock weeks: expected one of seconds"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    command: Command, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "holes.csv").write_text("unit,start,end\na,1,2\nb,3,\n")
    (tmp_path / "one.csv").write_text("unit,start,end\na,1,2\n")
    (tmp_path / "tape.jsonl").write_text("\n".join(lines()))
    (tmp_path / "folder").mkdir()
    ended = command(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


if __name__ == "__main__":
    EXAMPLE.write_text(example())
