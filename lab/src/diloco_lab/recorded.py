"""A real run's failures as a failure tape: the times in which its coordinator did not hear a learner.

A coordinator's tape (``docs/tape.md``) says when it did not hear a member any more (``Gone``), which is a while after its last
heartbeat, and when it heard it again (``Back``). For the simulator a learner is frozen in between. Why it was silent the
tape does not say: one that was killed loses more than one that was frozen. What is shorter than that while is not on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from diloco.core.run.tape import Back, Gone, Start, TapeEvent
from diloco.errors import DataError
from diloco.process import tape
from diloco.service import rundir
from diloco.wire import framing
from diloco_ops.failures import Failure, FailureTape


def of_run(directory: Path, duration_s: float) -> FailureTape:
    """Return the learners' absences in the first ``duration_s`` of a run, by the tapes in its directory.

    Raises:
        RunError: it is no run's directory, or a tape in it cannot be read.
        DataError: there is no coordinator's tape, or it cannot be followed.
    """
    run = rundir.load(directory)
    tapes, _ = tape.load_all(directory, framing.run_id(run.name, run.settings.digest()))
    events = [event for read in tapes if read.name.startswith("coordinator") for event in read.events()]
    dated = sorted((event for event in events if isinstance(event, Start | Gone | Back)), key=lambda event: event.at_ms)
    if not dated:
        raise DataError(f"{directory}: no coordinator has noted anything there")
    return recorded(dated, duration_s, run.settings.liveness.dead_s)


def recorded(events: Iterable[TapeEvent], duration_s: float, gone_s: float) -> FailureTape:
    """Return the learners' absences in ``duration_s`` from a coordinator's first start on, as freezes, in order.

    ``gone_s`` is the silence after which the coordinator took a member for gone: the run's ``liveness.dead_s``. A learner that
    is gone when another coordinator starts stays gone until it is heard. Before a learner is heard for the first time there is
    no absence.

    Raises:
        DataError: the tape does not begin with the coordinator's start, or its clock went back.
    """
    noted = [event for event in events if isinstance(event, Start | Gone | Back)]
    if not noted or not isinstance(noted[0], Start):
        raise DataError("the coordinator's tape does not begin with its start")
    for before, after in pairwise(noted):
        if after.at_ms < before.at_ms:
            raise DataError(f"the coordinator's tape goes back by {(before.at_ms - after.at_ms) / 1000:g} s: its clock was set")
    gone: dict[str, float] = {}
    absences: list[tuple[float, str, float]] = []
    for event in noted:
        at_s = (event.at_ms - noted[0].at_ms) / 1000
        if isinstance(event, Gone) and event.member.startswith("learner-"):
            gone.setdefault(event.member, max(0.0, at_s - gone_s))
        elif isinstance(event, Back) and event.member in gone:
            absences.append((gone.pop(event.member), event.member, at_s))
    absences += [(from_s, learner, duration_s) for learner, from_s in gone.items()]
    return FailureTape(
        duration_s,
        [
            Failure(from_s, "freeze", learner, min(until_s, duration_s) - from_s)
            for from_s, learner, until_s in sorted(absences)
            if from_s < duration_s
        ],
    )
