"""Boundaries between two inner steps: :func:`decide` says what one does, :func:`apply` carries it out; or both at once.

A decision is a plain value without arrays. It may be made in one process and applied in another that has had the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from diloco.core.learner import apply_step, lockstep
from diloco.core.learner.accounts import Accounts
from diloco.core.learner.delta import ApplyOutcome, VersionWrite
from diloco.core.learner.fragment_state import Application, FragmentState, FragmentVersion, OfferEvent, Phase
from diloco.core.learner.learner import Activity, Learner
from diloco.core.learner.schedule import Moment
from diloco.core.learner.slots import first_slot
from diloco.core.run.budget import accounted
from diloco.core.run.pace import first_due_steps

# of a step: how early a fragment is kept readable for a round that is expected, so that it can be answered in mid-step
PREDICTION_STEPS = 1.25


@dataclass(frozen=True)
class Decision:
    """The outcome of a boundary; ``applies`` and ``reads`` name fragments, whose arrays are elsewhere."""

    step: int  # own steps taken before it
    changes: int  # of the run, that are in force
    budget: int  # tokens of the run, with these changes
    applies: tuple[Application, ...]  # in this order
    reads: tuple[int, ...]  # fragments to be kept readable as of this boundary
    answers: tuple[int, ...]  # fragments whose open round counts as answered with this boundary's value, if it was not before
    activity: Activity
    stop: bool  # the token budget is used up, or the learner leaves: take no further step
    wait: bool  # take no step yet: a version is on its way (``round.learners_wait``, ``apply.at = overlap``)
    finished: bool  # every fragment's log is closed and applied
    moment: Moment  # gives the learning rate of the next step
    save: int | None  # number of the marker that the state answers from here on
    missing_since_s: float | None  # since when versions are missing that a step waits for, ``liveness.dead_s`` at most


Applicable: TypeAlias = Callable[[Learner, FragmentState], list[Application]]


@dataclass(frozen=True)
class Applied:
    """A version that was applied; ``write`` is None where there are no arrays."""

    application: Application
    write: VersionWrite | None


@dataclass(frozen=True)
class Wake:
    """When a boundary decides something by itself, if nothing happens before: after own steps, or at a time; None: never."""

    steps: int | None
    at_s: float | None


class _Forecast:
    """Applies versions to copies of what they concern: the learner stays as it is."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.accounts, self.fragments = learner, learner.accounts, learner.fragments

    def take(self, state: FragmentState, found: Sequence[Application]) -> FragmentState:
        """Return what a fragment becomes with its next versions; ``accounts`` and ``fragments`` go along."""
        if self.fragments is self.learner.fragments:
            self.accounts, self.fragments = replace(self.accounts), self.fragments.copy()
        after = self.fragments[state.index] = state.copy()
        self.learner.work.settle(after)
        for application in found:
            _take(self.learner.name, self.accounts, after, application)
        return after


class _Passing:
    """Applies versions to the learner itself; ``applied`` has what is to be written into the model, in order."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.accounts, self.fragments = learner, learner.accounts, learner.fragments
        self.applied: list[Applied] = []

    def take(self, state: FragmentState, found: Sequence[Application]) -> FragmentState:
        """Apply the next versions of a fragment."""
        self.applied += [apply_version(self.learner, application) for application in found]
        return state


def decide(learner: Learner, now_s: float, applicable: Applicable | None = None) -> Decision:
    """Return what the boundary at ``now_s`` does; the learner is as before.

    ``applicable`` gives the versions of a fragment that it applies: by default all that :func:`due` gives.
    """
    return _decide(learner, now_s, learner.fragments, applicable or due, _Forecast(learner))


def pass_boundary(learner: Learner, now_s: float) -> tuple[Decision, list[Applied]]:
    """Decide what the boundary at ``now_s`` does, and carry it out; return also what is to be written into the model.

    Both are those of :func:`decide` and :func:`apply`. It copies nothing, and passes over fragments that are quiet.
    """
    step, passing = learner.accounts.step, _Passing(learner)
    looked = [learner.fragments[index] for index in learner.quiet.due(step, _soon_s(learner, now_s))]
    decision = _decide(learner, now_s, looked, due, passing)
    _take_over(learner, decision, looked)
    if not learner.settings.round.learners_wait:
        for state in looked:
            learner.quiet.rest(state.index, *state.quiet_until())
    return decision, passing.applied


def _soon_s(learner: Learner, now_s: float) -> float:
    """Return until when a fragment is kept readable for a round that is expected."""
    return now_s + PREDICTION_STEPS * learner.accounts.step_average.get()


def _decide(
    learner: Learner, now_s: float, looked: Sequence[FragmentState], applicable: Applicable, after: _Forecast | _Passing
) -> Decision:
    """Return what the boundary at ``now_s`` does; versions are applied to ``after``.

    It is known that all fragments are quiet but those ``looked`` at.
    """
    step, budget = learner.accounts.step, learner.in_force.settings.tokens
    soon_s = _soon_s(learner, now_s)
    applies: list[Application] = []
    reads, answers = list[int](), list[int]()
    late = False  # a version is not there at the end of its overlap
    finished = len(looked) == len(learner.fragments)
    for state in looked:
        left = _steps_left(learner, state)
        found = [] if left else applicable(learner, state)
        late |= left == 0 and not found and _is_awaited(learner, state)
        if found:
            applies += found
            state = after.take(state, found)
        if _keep_readable(learner, state, step, soon_s):
            reads.append(state.index)
        if _is_unanswered(state):
            answers.append(state.index)
        finished = finished and state.newest.chain.closed and not state.pending
    stop = learner.draining or learner.leaving or _used_up(learner, looked, after.accounts, budget)
    since_s = learner.missing_since_s
    if learner.in_lockstep and not stop:
        holds = any(learner.work.unmerged(state) for state in after.fragments)
        ends = [state.ends for state in after.fragments]
        since_s = lockstep.missing_since_s(ends, since_s, now_s, holds=holds, moved=bool(applies))
    elif not learner.in_lockstep:
        since_s = (now_s if since_s is None else since_s) if late else None
    missing = not stop and since_s is not None and now_s - since_s < learner.settings.liveness.dead_s
    behind = missing and learner.in_lockstep
    wait = not stop and (missing or _must_wait(learner, after.fragments, step))
    marker = learner.markers.reached(after.fragments)
    return Decision(
        step=step,
        changes=learner.in_force.number,
        budget=budget,
        applies=tuple(applies),
        reads=tuple(reads),
        answers=tuple(answers),
        activity=_activity(learner, finished=finished, stop=stop, wait=wait, behind=behind),
        stop=stop,
        wait=wait,
        finished=finished,
        moment=after.accounts.moment(budget),
        save=marker.number if marker else None,
        missing_since_s=since_s,
    )


def apply(learner: Learner, decision: Decision) -> list[Applied]:
    """Carry a decision out; return what is to be written into the model, in order.

    Raises:
        ValueError: a version that it names is not the next one of its fragment.
    """
    applied = [apply_version(learner, application) for application in decision.applies]
    _take_over(learner, decision, learner.fragments)
    return applied


def _take_over(learner: Learner, decision: Decision, looked: Sequence[FragmentState]) -> None:
    """Carry out what is left of a decision whose versions are applied; the other fragments are quiet."""
    learner.changes, learner.budget = decision.changes, decision.budget
    for state in looked:
        state.snapshot = None
        if state.index in decision.answers and _is_unanswered(state):
            state.answer_step = decision.step
    if decision.stop and not learner.stopped:
        for state in learner.fragments:
            if state.closing:
                state.reopen()  # it may have stopped and answered before, and have gone on: there is more now
    learner.missing_since_s = decision.missing_since_s
    learner.stopped, learner.activity = decision.stop, decision.activity


def apply_version(learner: Learner, application: Application) -> Applied:
    """Apply one version.

    Raises:
        ValueError: it is not the next one of its fragment.
    """
    state, accounts = learner.fragments[application.fragment], learner.accounts
    learner.work.settle(state)
    version, carried, unknown = _take(learner.name, accounts, state, application)
    if unknown is not None:
        for other in learner.fragments:
            other.delta.lost_tokens += unknown
        cursor = version.chain.cursors.get(learner.name)
        state.delta.lost_tokens = accounts.tokens - (cursor.tokens if cursor else 0) - state.delta.tokens
    if application.how == "version" and version.record is not None:
        merged = carried.merged is not None or carried.forgotten
        learner.rounds_merged += merged
        learner.rounds_missed += not merged and version.record.rolled_back is None
    if state.values is None or version.theta is None:
        return Applied(application, None)
    return Applied(application, state.values.apply(carried, state.delta.pending, version.theta))


def next_decision(learner: Learner, step_tokens: int) -> Wake:
    """Return when a boundary decides something by itself, for a learner whose steps have ``step_tokens`` tokens.

    Until then boundaries may be left out, and their steps be booked together. Before an event is handed in, the boundary
    before it is to be made up for: whether a fragment is kept readable (``reads``) may change from step to step.
    """
    steps: list[int] = []
    at_s = None
    for state in learner.fragments:
        left = _steps_left(learner, state)
        if left is not None and _is_unanswered(state):
            steps.append(1)
        elif left:
            steps.append(left)
        elif due(learner, state):
            steps.append(1)
        if state.wants_answer and state.snapshot is None:
            steps.append(1)
        if learner.settings.round.learners_wait and learner.role == "learner":
            steps.append(state.version_step + _steps_due(learner, state) - learner.accounts.step)
    if learner.in_lockstep or learner.changes != learner.in_force.number:
        steps.append(1)
    if learner.missing_since_s is not None:
        at_s = learner.missing_since_s + learner.settings.liveness.dead_s
    if learner.role == "learner":
        left = learner.in_force.settings.tokens - learner.accounts.processed()
        steps.append(-(-left // step_tokens))
    return Wake(max(0, min(steps)) if steps else None, at_s)


def _take(
    name: str, accounts: Accounts, state: FragmentState, application: Application
) -> tuple[FragmentVersion, ApplyOutcome, int | None]:
    """Take a version over in a fragment and in the totals; the last value: tokens of forgotten offers (None: of none)."""
    version, carried = state.apply(application, accounts.step)
    chain, unknown = version.chain, None
    if carried.forgotten:
        unknown = accounts.count_on(chain.cursors.get(name), state.delta.incarnation)
    accounts.note_version(accounted(chain))
    return version, carried, unknown


def due(learner: Learner, state: FragmentState) -> list[Application]:
    """Return the versions of a fragment that a boundary applies."""
    if state.phase is Phase.INVALID:
        return [Application(state.index, state.newest.chain.version, "reset")]
    if not state.pending or state.phase is Phase.ENCODING:
        return []

    def may_apply(version: FragmentVersion) -> bool:
        if version.how == "reset" and not state.accepts(OfferEvent.RESET):
            return False  # an offer is being stored, which states what is about to be dropped
        return learner.markers.may_apply(version, learner.fragments)

    return [Application(state.index, version.chain.version, version.how) for version in takewhile(may_apply, state.pending)]


def _steps_left(learner: Learner, state: FragmentState) -> int | None:
    """Return the own steps before the open round's version is applied; None: on arrival, as where no step is taken any more."""
    steps_on = learner.role == "learner" and not (learner.draining or learner.leaving or learner.stopped)
    if learner.settings.apply.at == "arrival" or not steps_on:
        return None
    return apply_step.steps_left(state, learner.in_force.settings.round.overlap_steps, learner.accounts.step)


def _is_awaited(learner: Learner, state: FragmentState) -> bool:
    """Return whether a step may wait for the open round's version: not for one that a marker holds back."""
    return state.awaited and all(learner.markers.may_apply(version, learner.fragments) for version in state.pending)


def _is_unanswered(state: FragmentState) -> bool:
    """Return whether no boundary has come that the open round could have been answered with."""
    return state.answer_step is None and state.open_version == state.delta.base_version + 1


def _used_up(learner: Learner, looked: Sequence[FragmentState], accounts: Accounts, budget: int) -> bool:
    if learner.role == "evaluator":
        return False
    if any(state.newest.chain.closed for state in looked):
        return True  # whatever the budget is by now
    return accounts.processed() >= budget


def _steps_due(learner: Learner, state: FragmentState) -> int:
    """Return how many steps after the last version of a fragment its next round is due, where learners wait for it."""
    settings = learner.in_force.settings.round
    if state.delta.base_version:
        return max(settings.steps, state.steps_between)
    return first_due_steps(settings, state.index, len(learner.fragments))


def _expected_step(learner: Learner, state: FragmentState) -> int | None:
    """Return the own step after which the next round of a fragment is expected; None: it is not known."""
    if learner.settings.round.learners_wait:
        return state.version_step + _steps_due(learner, state)
    if state.opened_step is not None:
        return state.opened_step + state.steps_between  # a cycle later (:mod:`diloco.core.learner.slots`)
    if state.delta.base_version:
        return None
    return first_slot(learner.in_force.settings.round.steps, state.index, len(learner.fragments))


def _must_wait(learner: Learner, fragments: Sequence[FragmentState], step: int) -> bool:
    if not learner.settings.round.learners_wait or learner.role == "evaluator":
        return False
    if learner.in_lockstep and any(learner.work.unmerged(state) for state in fragments):
        return True  # a version that a log was loaded with is no answer to a step that is held on to
    return any(step - state.version_step >= _steps_due(learner, state) for state in fragments)


def _keep_readable(learner: Learner, state: FragmentState, step: int, soon_s: float) -> bool:
    """Return whether a round of the fragment is open, or expected before the next boundary, at ``soon_s`` at the latest."""
    if learner.role == "evaluator":
        return False
    if state.open_version > state.delta.base_version:  # once it is answered, the next round comes after the next version
        return state.wants_answer and learner.work.unmerged(state)
    expected_step = _expected_step(learner, state)
    if not (expected_step is not None and step >= expected_step - 1) and not state.is_expected_by(soon_s):
        return False
    return not state.sending and not state.pending and learner.work.unmerged(state)


def _activity(learner: Learner, *, finished: bool, stop: bool, wait: bool, behind: bool) -> Activity:
    if finished:
        return "finished"
    if learner.leaving:
        return "leaving"
    if behind:
        return "recovering"
    return "closing" if stop else "waiting" if wait else "stepping"
