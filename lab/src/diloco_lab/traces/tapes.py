"""Failure tapes (:mod:`diloco_ops.failures`) in the simulator: which failures happen to which learner.

| kind | target | in the simulator |
|---|---|---|
| ``chip_loss`` | ``learner-2/slice-3`` or ``learner-2/slice-3/chip-0`` | the slice is away for the duration |
| ``freeze`` | ``learner-2`` | the step under way takes that much longer; the learner is not heard |
| ``slow`` | ``learner-2`` | steps that begin within the duration take ``factor`` times as long |
| ``kill`` | ``learner-2`` | it begins again after ``costs.restart_s``, without the steps that it had not offered |
| ``cut`` | ``learner-2`` | nothing passes its link for the duration |

Targets may be patterns. What a tape does to other services is left out and counted: the simulator's syncer cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import get_args

from diloco.settings.validation import nearest
from diloco_lab.simulator.cluster import MICROS, ClusterLearner, micros
from diloco_lab.simulator.lifetime import Fault, FaultKind
from diloco_lab.simulator.outcome import Scenario
from diloco_ops import failures
from diloco_ops.failures import Failure, FailureTape

CUT = "cut"
KINDS = (*get_args(FaultKind), CUT)
OTHERS = ("syncer", "coordinator", "evaluator", "nats", "link", "heartbeats", "rounds", "offers", "records", "log")


@dataclass
class PlayedTape:
    """A tape as learners feel it: faults and cuts (from, until) by learner, and what was left out, by kind."""

    duration_s: float
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    cuts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)


def read(lines: Iterable[str], source: str, learners: Sequence[ClusterLearner]) -> PlayedTape:
    """Read a tape for these learners.

    Raises:
        FormatError: as :func:`diloco_ops.failures.decode`; or a failure's target is none that there is.
    """
    by_name = {learner.name: learner for learner in learners}
    tape = failures.decode(lines, source, complaint=lambda failure: _complaint(failure, by_name))
    return played(tape, learners)


def played(tape: FailureTape, learners: Sequence[ClusterLearner]) -> PlayedTape:
    """Return the faults and cuts of a tape for these learners."""
    found = PlayedTape(tape.duration_s)
    for failure in tape.failures:
        met = [learner for learner in learners if fnmatchcase(learner.name, _learner(failure))]
        if failure.kind not in KINDS or not met:
            found.left_out[failure.kind] = found.left_out.get(failure.kind, 0) + 1
            continue
        at_us, duration_us = micros(failure.at_s), micros(failure.duration_s)
        for learner in met:
            if failure.kind == CUT:
                found.cuts.setdefault(learner.name, []).append((at_us, at_us + duration_us))
            else:
                for index in _slices(failure, learner) if failure.kind == "chip_loss" else [0]:
                    fault = Fault(at_us, failure.kind, duration_us, index, failure.number("factor", 1.0))  # type: ignore[arg-type]
                    found.faults.setdefault(learner.name, []).append(fault)
    return found


def record(scenario: Scenario, drawn: Iterable[tuple[str, Fault]]) -> FailureTape:
    """Return the failures that a simulation drew (:attr:`Scenario.on_failure`), for a live run or another simulation."""
    made = [
        Failure(fault.at_us / MICROS, fault.kind, f"{name}/slice-{fault.slice}", fault.duration_us / MICROS)
        for name, fault in drawn
        if fault.at_us <= scenario.duration_us
    ]
    return FailureTape(scenario.duration_s, sorted(made, key=lambda f: (f.at_s, f.target)), {"seed": float(scenario.seed)})


def whole_learners(tape: FailureTape, downtime_s: float) -> FailureTape:
    """Return a tape for learners without slices: a lost slice freezes its learner while it would reconfigure."""
    made = [Failure(f.at_s, "freeze", _learner(f), downtime_s, f.values) if f.kind == "chip_loss" else f for f in tape.failures]
    return FailureTape(tape.duration_s, made, tape.about)


def _learner(failure: Failure) -> str:
    return failure.target.partition("/")[0]


def _slices(failure: Failure, learner: ClusterLearner) -> list[int]:
    pattern = failure.target.split("/")[1]
    if pattern.removeprefix("slice-").isdecimal():
        index = int(pattern.removeprefix("slice-"))
        return [index] if index < learner.slices else []
    return [index for index in range(learner.slices) if fnmatchcase(f"slice-{index}", pattern)]


def _complaint(failure: Failure, learners: Mapping[str, ClusterLearner]) -> str | None:
    name = _learner(failure)
    met = [learner for known, learner in learners.items() if fnmatchcase(known, name)]
    if not met:
        if name.startswith(OTHERS):
            return None
        return f"target {failure.target!r} is no learner{nearest(name, list(learners))}; there are {_listed(learners)}"
    if failure.kind == "slow":
        factor = failure.values.get("factor")
        return None if isinstance(factor, float) and factor >= 1 else f"factor = {factor!r}, expected a number, 1 or more"
    if failure.kind != "chip_loss":
        return None
    if len(failure.target.split("/")) < 2:
        return f"target {failure.target!r} names no slice; expected one such as {met[0].name}/slice-0"
    if not any(_slices(failure, learner) for learner in met):
        least = min(learner.slices for learner in met)
        return f"target {failure.target!r}: there is no such slice; {met[0].name} has slice-0 to slice-{least - 1}"
    return None


def _listed(learners: Mapping[str, ClusterLearner]) -> str:
    names = list(learners)
    return ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
