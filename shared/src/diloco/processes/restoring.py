"""The checkpoint that all processes of a learner begin from: the leader names one after the other until all can.

And where a process writes the next one, so that one that all have is never overwritten before all have a newer one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from diloco.core.learner.learner import ACCOUNTS
from diloco.core.learner.saving import same_generation
from diloco.errors import RunError
from diloco.process.observe import Logger
from diloco.processes import carrier
from diloco.processes.leader import Leader
from diloco.processes.part import Part
from diloco.settings.service import LearnerSettings
from diloco.states import state
from diloco.states.state import UNFIT, State
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Candidate, Pending, Save

Check = Callable[[State], None]  # raises one of them where this process does not find the values that its devices need


@dataclass(frozen=True)
class Fit:
    """A state that this process can begin from."""

    name: str  # that all its parts have
    accounts: Mapping[str, Any]  # plain values, of the leader's part
    offers: list[list[Pending]]  # by fragment: those whose fate it does not know
    bare: list[int]  # fragments of whose accounts it has no arrays
    carried: carrier.Restored


@dataclass(frozen=True)
class CheckpointFit(Fit):
    """A checkpoint that this process can begin from."""

    path: Path
    saved: State


F = TypeVar("F", bound=Fit)


def own_place(
    settings: LearnerSettings, run: bytes, index: int, save: Save, *, missed: bool = False
) -> tuple[Path, Path | None] | None:
    """Return where a process writes its part of an own checkpoint, and where the part that is there now is kept, if it is.

    None: nowhere, since the others have gone on without it (``missed``). What is there may be of another process by now, which
    has its place and sees the same folder.

    It is kept if it is of the newest checkpoint that all processes have. A part that was kept when a process was lost is
    removed once there is a newer checkpoint. One of this generation is newer than all of its checkpoints: the generation ends,
    and what it was about to save comes too late.
    """
    if missed:
        return None
    folder = StateFolder(settings.state_dir, settings.name)
    path, previous = folder.generations(index)
    kept = folder.kept(index)
    found = state.set_of(kept, run, settings.name)
    if kept.exists() and found != save.whole and not same_generation(found or "", save.name):
        kept.unlink()
    return path, previous if state.is_of(path, run, settings.name, save.whole) else None


async def begin_again(
    settings: LearnerSettings, part: Part, leader: Leader | None, check: Check, log: Logger
) -> CheckpointFit | None:
    """Take over the accounts of the newest checkpoint that all processes can begin from; None: there is none.

    The caller takes over the model's values: all processes do so, of the same checkpoint.
    """

    def refused(fit: CheckpointFit, reason: str) -> None:
        log.warning("checkpoint_refused", file=str(fit.path), reason=reason)

    if leader is None:
        return await agree_on_state(part, None, named=lambda candidate: _named(settings, candidate, part, check))
    return await agree_on_state(part, leader, fits=_fitting(settings, part, leader, check, log), refused=refused)


async def agree_on_state(
    part: Part,
    leader: Leader | None,
    *,
    fits: Iterable[F] = (),
    named: Callable[[Candidate], F] | None = None,
    refused: Callable[[F, str], None] = lambda fit, reason: None,
) -> F | None:
    """Take over the accounts of the first state that all processes can begin from; None: there is none.

    ``fits`` are the leader's, the best one first, and ``refused`` hears which one is not taken over and why. ``named`` gives
    another process's part of one, or raises one of UNFIT. They may read files: they are called in threads.
    """
    group, fits = part.group, iter(fits)
    for number in itertools.count():
        stage, fit = f"checkpoint {number}", await asyncio.to_thread(next, fits, None)
        said = None
        if leader is not None:
            said = Candidate(stage, None, [], []) if fit is None else Candidate(stage, fit.name, fit.offers, fit.bare)
        candidate = await group.hear_leader(Candidate, stage, said)
        if candidate.name is None:
            return None
        problem = ""
        if named is not None:
            try:
                fit = await asyncio.to_thread(named, candidate)
            except UNFIT as error:
                problem = str(error)
        reason = await group.difference(stage, {"checkpoint": problem})
        taken = None
        if leader is not None and fit is not None:
            reason = reason or _restored(leader, fit)
            taken = not reason
            if reason:
                refused(fit, reason)
        if not await group.hear_answer(f"{stage}, taken", taken):
            continue
        assert fit is not None
        part.carrier.restore(fit.carried)
        if leader is not None:
            leader.note_restored(fit.name)
        return fit
    raise AssertionError("a generation ends with the leader's last word")


def newest_first(settings: LearnerSettings, run: bytes) -> list[Path]:
    """Return the leader's parts of states that are here, of the newest one first.

    They go by the time of their files; but what a generation keeps as it ends is newer than all of its checkpoints, though one
    that was being saved meanwhile may be written later.
    """
    folder = StateFolder(settings.state_dir, settings.name)
    kept, others = folder.kept(), folder.generations()
    times = {path: path.stat().st_mtime_ns for path in (kept, *others) if path.exists()}
    name = state.set_of(kept, run, settings.name)
    if name is not None:
        for path in times.keys() & set(others):
            if same_generation(state.set_of(path, run, settings.name) or "", name):
                times[path] = min(times[path], times[kept])
    return sorted(times, key=lambda path: -times[path])  # of two of one time the one that is kept


def _fitting(settings: LearnerSettings, part: Part, leader: Leader, check: Check, log: Logger) -> Iterator[CheckpointFit]:
    """Yield the checkpoints that the leader can begin from, the newest first; name those from which it cannot."""
    kept = StateFolder(settings.state_dir, settings.name).kept()
    for path in newest_first(settings, part.run.identity):
        try:
            saved = state.load(path, part.run.identity, settings.name)
            bare = _bare(saved, len(saved.accounts["fragments"])) if path == kept else []
            fit = _fit(path, saved, leader.unmerged_of(saved.accounts, bare), bare, part, check)
        except UNFIT as error:
            log.warning("checkpoint_refused", file=str(path), reason=str(error))
        else:
            yield fit


def _bare(saved: State, fragments: int) -> list[int]:
    """Return the fragments of whose accounts there are no arrays: the process that carried them is gone."""
    return [index for index in range(fragments) if not saved.layout(f"{ACCOUNTS}{index}/")]


def _named(settings: LearnerSettings, candidate: Candidate, part: Part, check: Check) -> CheckpointFit:
    """Return the checkpoint that the leader has named, as far as it is here.

    Raises:
        RunError, LookupError, ValueError: it is not, or this process cannot begin from it.
    """
    assert candidate.name is not None
    saved = state.load_set(settings.state_dir, part.run.identity, settings.name, candidate.name, part.group.place)
    return _fit(Path(candidate.name), saved, candidate.offers, candidate.bare, part, check)


def _fit(path: Path, saved: State, offers: list[list[Pending]], bare: list[int], part: Part, check: Check) -> CheckpointFit:
    """Check that this process finds all that it needs in a state: for its devices, and of the fragments that it carries.

    Raises:
        RunError, LookupError, ValueError: it does not.
    """
    check(saved)
    carrying = part.carrier
    arrays = {name: array for index in carrying.fragments for name, array in saved.arrays(f"{ACCOUNTS}{index}/").items()}
    try:
        carried = carrying.loaded(offers, arrays, bare)
    except LookupError as error:
        raise RunError(
            f"checkpoint: accounts of a fragment that this process carries are missing ({error}): another process of this "
            "learner saved them; give all its processes the same shared state_dir"
        ) from None
    return CheckpointFit(saved.set_name, saved.accounts, offers, bare, carried, path=path, saved=saved)


def _restored(leader: Leader, fit: Fit) -> str:
    """Have the leader go on with a state's accounts; return why it cannot, empty if it does."""
    try:
        leader.member.restore(fit.accounts, {}, fit.bare)
    except UNFIT as error:
        return str(error)
    return ""
