"""The decisions of a learner of several processes: made by its leader one step ahead, carried out alike by all processes.

A boundary between two steps is :class:`~diloco.wire.process_messages.Decided`: a plain value that names versions, fragments and
the next batch. The leader makes it while a step runs, so that it is everywhere before that step ends. Whatever a decision needs
must be there already: a version is named once its rows are *staged* at all processes.

:class:`Decisions` is the leader's side, around the one :class:`~diloco.core.learner.learner.Learner` that the processes are
together. :class:`Course` is any process's side: it takes decisions in order and chains their hashes, which are compared at each
boundary. No clock, network or array is here; the caller serialises the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from diloco.core.learner import boundary
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import Decision
from diloco.core.learner.delta import ApplyOutcome, Unmerged
from diloco.core.learner.fragment_state import Application, FragmentState, FragmentVersion, OfferEvent, Phase
from diloco.core.learner.learner import Learner
from diloco.core.learner.saving import Saves, set_name
from diloco.core.learner.schedule import Moment
from diloco.errors import IslandError
from diloco.wire import framing
from diloco.wire.process_messages import Decided, Passed, Pending, Purpose, Save, Stage, Write

NO_DECISION = bytes(32)
BEHIND_MAX = 1  # versions of a fragment that may wait for later boundaries while steps are taken
CATCHING_UP_MAX = 16  # boundaries without a step between two steps, at which a learner that is further behind catches up
BOUNDARIES_APART_MAX = 8  # by which a process may be behind the leader; two, if collectives hold them together


@dataclass(frozen=True)
class _Staging:
    """A version whose rows are being brought to all processes, and how it is to be applied."""

    number: int
    application: Application
    carried: ApplyOutcome
    pending: tuple[Pending, ...]


class Decisions:
    """The leader's side. ``needed``: by fragment, the processes that have to have a version's rows before it is applied."""

    def __init__(
        self,
        learner: Learner,
        run: bytes,
        generation: int,
        processes: int,
        needed: Sequence[frozenset[int]],
        *,
        saves: bool = True,
    ) -> None:
        """Begin; ``saves``: whether states are saved at all, by the word of a decision."""
        self._saves_states = saves
        self.learner, self.processes, self.needed = learner, processes, needed
        self.course = Course(run, generation)
        self.saves = Saves(processes)
        self._stagings: dict[int, _Staging] = {}  # by fragment: the newest
        self._staged: dict[int, set[int]] = {}  # by fragment: processes that have all its rows
        self._numbers = 0
        self._caught_up = 0  # boundaries since the last step
        self._made: tuple[Decision, Decided] | None = None  # not carried out yet
        self.flight: StepDone | None = None  # the step that the next boundary takes for granted, until it is carried out
        self._put_off: list[
            tuple[Callable[[int, FragmentVersion], None], int, FragmentVersion]
        ] = []  # until it is: a rewind, and what follows
        self._chains: dict[int, bytes] = {}  # by number: of decisions that not all processes have passed
        self._passed = [-1] * processes
        self._early: dict[int, Passed] = {}  # by process: of the decision that was made, not carried out here yet

    # ---- facts

    def queue(self, index: int, version: FragmentVersion) -> None:
        """Take in that a fragment's log has an entry more, or was loaded again."""
        if self._put_off:
            self._put_off.append((self.queue, index, version))
        else:
            self.learner.queue(index, version)

    def rewind(self, index: int, version: FragmentVersion) -> None:
        """Take in that the log has lost entries of a fragment, after the decision that was made has been carried out."""
        if self._made is not None:
            self._put_off.append((self.rewind, index, version))
            return
        self.learner.rewind(index, version)
        self._stagings.pop(index, None)

    def to_stage(self) -> list[Stage]:
        """Return the versions whose rows are to be brought to all processes now, at most one a fragment."""
        stages = []
        named = {write.fragment for write in self._made[1].writes} if self._made else set[int]()
        with presuming(self.learner, self.flight):
            forecasts = [(state.index, self._forecast(state)) for state in self.learner.fragments if state.index not in named]
        for index, forecast in forecasts:
            known = self._stagings.get(index)
            if forecast is None or (known is not None and (known.application, known.carried, known.pending) == forecast):
                continue
            self._numbers += 1
            staging = self._stagings[index] = _Staging(self._numbers, *forecast)
            self._staged[index] = set()
            stages.append(_stage(staging))
        return stages

    def staged(self, process: int, fragment: int, number: int) -> None:
        """Take in that a process has all its rows of a stage; an older stage of the fragment counts no more."""
        staging = self._stagings.get(fragment)
        if staging is not None and staging.number == number:
            self._staged[fragment].add(process)

    def passed(self, process: int, passed: Passed) -> None:
        """Take in that a process has carried out a decision.

        Raises:
            IslandError: it took another course than the leader.
        """
        if self._made is not None and passed.number == self.course.number and process not in self._early:
            self._early[process] = passed  # it is ahead of the leader
            return
        own = self._chains.get(passed.number)
        if own is None or passed.number != self._passed[process] + 1:
            raise IslandError(
                f"process {process}, step {passed.step}: it has passed boundary {passed.number}, expected "
                f"{self._passed[process] + 1}, and the leader is at {self.course.number - 1}"
            )
        if own != passed.chain:
            raise IslandError(
                f"process {process}, step {passed.step}: its decisions up to boundary {passed.number} have the hash "
                f"{passed.chain.hex()[:16]}, the leader's have {own.hex()[:16]}"
            )
        self._passed[process] = passed.number
        for number in [number for number in self._chains if number <= min(self._passed)]:
            del self._chains[number]

    @property
    def is_followed(self) -> bool:
        """Whether all processes have carried out all that the leader has."""
        return not self._chains

    # ---- boundaries

    def make(
        self,
        now_s: float,
        batch: tuple[int, int],
        *,
        ended: bool,
        wanted: Purpose | None = None,
    ) -> Decided:
        """Make the next decision, once the one before has been carried out; ``batch`` is the next step's share and batch.

        It takes for granted that the step in ``flight`` ends before the boundary, which books it then, if it was taken.
        ``ended``: the learner leaves the run now. ``wanted``: a state that is to be saved, if that can be done now.
        """
        assert self._made is None, "the decision before has not been carried out"
        with presuming(self.learner, self.flight):
            decision = boundary.decide(self.learner, now_s, self._applicable)
        applied = {application.fragment for application in decision.applies}
        if any(state.phase is Phase.JOINING and state.index not in applied for state in self.learner.fragments):
            # a step on values that are not the log's would be taken for progress since the log's
            decision = replace(decision, wait=True, activity="recovering")
        elif not decision.stop and self._is_behind(applied) and self._caught_up < CATCHING_UP_MAX:
            # one version of a fragment is applied at a boundary: it would answer no round where versions come faster than steps
            decision = replace(decision, wait=True, activity="recovering")
        self._caught_up = self._caught_up + 1 if decision.wait else 0
        writes = [
            Write(at.fragment, at.version, staging.number, staging.carried.keeps, staging.carried.reset)
            for at in decision.applies
            for staging in [self._stagings[at.fragment]]
        ]
        at, course = decision.moment, self.course
        decided = Decided(
            generation=course.generation,
            number=course.number,
            step=course.step,
            writes=writes,
            reads=list(decision.reads),
            batch=batch,
            tokens=at.tokens,
            budget=at.budget,
            warming=at.warming_steps,
            stop=decision.stop,
            wait=decision.wait,
            finished=decision.finished,
            ended=ended,
            save=self._save(decision, wanted, ended=ended),
            previous=course.chain,
        )
        self._made = decision, decided
        if decided.save is not None:
            self.saves.begin(decided.number, decided.save)  # now: others may be at that boundary before the leader is
        return decided

    def _is_behind(self, applied: set[int]) -> bool:
        """Whether a fragment's versions come faster than steps; ``applied`` fragments have one fewer then."""
        states = self.learner.fragments
        return any(len(state.pending) - (state.index in applied) > BEHIND_MAX for state in states)

    def _save(self, decision: Decision, wanted: Purpose | None, *, ended: bool) -> Save | None:
        """Return what is saved at a boundary: the last state of a learner that ends, or else what is wanted."""
        if ended or decision.finished:
            wanted = "own"
        elif self.saves.under_way is not None:
            wanted = None
        elif decision.save is not None:
            wanted = "whole"
        if wanted is None or not self._is_whole or not self._saves_states:
            return None
        marker = (decision.save or 0) if wanted == "whole" else 0
        return self.saves.word(wanted, set_name(self.course.generation, self.course.number), marker)

    @property
    def may_save(self) -> bool:
        """Whether a state can be saved at the next boundary: fragments are the log's, nothing is half made or being saved."""
        return self.saves.under_way is None and self._is_whole

    @property
    def _is_whole(self) -> bool:
        """Whether fragments are the log's, and nothing is half made."""
        joining = any(state.phase is Phase.JOINING for state in self.learner.fragments)
        return not joining and self.learner.may_dump

    @property
    def may_answer(self) -> bool:
        """Whether offers may begin: a state is saved with none half made, so none begins before its boundary."""
        return self._made is None or self._made[1].save is None

    @property
    def made(self) -> Decided | None:
        """The decision that was made and has not been carried out."""
        return None if self._made is None else self._made[1]

    def carry_out(self) -> Decision:
        """Carry out the decision that was made, in the learner's state, in which the step before it is booked."""
        assert self._made is not None, "no decision was made"
        decision, decided = self._made
        self.flight = None
        boundary.apply(self.learner, decision)
        for application in decision.applies:
            del self._stagings[application.fragment]
        self._made = None
        self.course.take(decided)
        if decided.save is not None:
            marker = self.learner.markers.marker
            if marker is not None and marker.number == decided.save.marker:
                self.learner.markers.copied(marker)
        self._chains[decided.number] = self.course.chain
        early, self._early = self._early, {}
        for process, passed in {0: Passed(decided.number, decided.step, self.course.chain), **early}.items():
            self.passed(process, passed)
        if len(self._chains) > BOUNDARIES_APART_MAX:
            behind = min(range(self.processes), key=lambda process: self._passed[process])
            raise IslandError(
                f"process {behind}, step {decided.step}: it is {len(self._chains)} boundaries behind, at most "
                f"{BOUNDARIES_APART_MAX} are allowed: it no longer takes part in the steps"
            )
        put_off, self._put_off = self._put_off, []
        for take_in, index, version in put_off:
            take_in(index, version)
        return decision

    def submit(self, index: int) -> bool:
        """Take a fragment's snapshot as of the boundary that was carried out; return whether it can be offered at all."""
        state = self.learner.fragments[index]
        if not state.accepts(OfferEvent.SNAPSHOT):
            return False  # an offer began since the decision was made, or the value is not finite
        self.learner.submit(index, None)
        return True

    def _applicable(self, learner: Learner, state: FragmentState) -> list[Application]:
        staging = self._stagings.get(state.index)
        if staging is None or not self._staged[state.index] >= self.needed[state.index]:
            return []
        forecast = self._forecast(state)
        return [staging.application] if forecast == (staging.application, staging.carried, staging.pending) else []

    def _forecast(self, state: FragmentState) -> tuple[Application, ApplyOutcome, tuple[Pending, ...]] | None:
        """Return the next version of a fragment, how it would be applied now, and the offers that would be pending after it."""
        due = boundary.due(self.learner, state)
        if not due:
            return None
        after = state.copy()
        self.learner.work.settle(after)
        _, carried = after.apply(due[0], self.learner.accounts.step)
        merged = None if carried.merged is None else _pending(carried.merged)
        plain = ApplyOutcome(carried.keeps, merged, False, carried.cleared, carried.reset)
        return due[0], plain, tuple(_pending(offer) for offer in after.delta.pending)


class Course:
    """The decisions that one process has carried out: their number, the steps between them, and their chained hash."""

    def __init__(self, run: bytes, generation: int) -> None:
        self.run, self.generation = run, generation
        self.number = self.step = 0
        self.chain = NO_DECISION

    def take(self, decided: Decided) -> Passed:
        """Go on by a decision; return what the leader is told of it.

        Raises:
            IslandError: it is not the next one of this generation.
        """
        expected = (self.generation, self.number, self.step, self.chain)
        came = (decided.generation, decided.number, decided.step, decided.previous)
        if came != expected:
            raise IslandError(
                f"decision {decided.number} of generation {decided.generation}, step {decided.step}, after "
                f"{decided.previous.hex()[:16]}: expected decision {self.number} of generation {self.generation}, step "
                f"{self.step}, after {self.chain.hex()[:16]}"
            )
        self.chain = framing.hash_of(decided, self.run)
        self.number += 1
        self.step += not (decided.stop or decided.wait or decided.finished or decided.ended)
        return Passed(decided.number, decided.step, self.chain)


@contextmanager
def presuming(learner: Learner, flight: StepDone | None) -> Iterator[None]:
    """Have a decision take for granted that a step in flight has ended (None: there is none). No event comes within it."""
    accounts, work = learner.accounts, learner.work
    if flight is not None:
        learner.accounts, learner.work = accounts.after(flight), work.after(flight)
    try:
        yield
    finally:
        learner.accounts, learner.work = accounts, work


def moment(decided: Decided) -> Moment:
    """Return what the learning rate of the next step goes by."""
    return Moment(decided.tokens, decided.budget, decided.warming)


def carried(stage: Stage) -> ApplyOutcome:
    """Return how a stage's version is applied, as far as arrays are concerned."""
    return ApplyOutcome(stage.keeps, stage.merged, False, stage.cleared, stage.reset)


def _stage(staging: _Staging) -> Stage:
    at, how = staging.application, staging.carried
    merged = how.merged
    assert merged is None or isinstance(merged, Pending)
    pending: Iterable[Pending] = staging.pending
    return Stage(
        number=staging.number,
        fragment=at.fragment,
        version=at.version,
        keeps=how.keeps,
        merged=merged,
        cleared=how.cleared,
        reset=how.reset,
        pending=list(pending),
    )


def _pending(offer: Unmerged) -> Pending:
    return Pending(offer.identity, offer.bits, offer.dropped)
