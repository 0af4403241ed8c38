"""The simulation has teeth: each of these defects, put into the services on purpose, is found by an invariant."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.made.mutations import Patch, lost_tokens_forgotten
from tests.simulation.invariants import Violation
from tests.simulation.play import play

from diloco.core.learner.delta import ApplyOutcome, DeltaState, DeltaValues, VersionWrite
from diloco.core.learner.learner import Learner
from diloco.core.learner.markers import Markers
from diloco.core.log.chain import Chain
from diloco.core.run import leases
from diloco.core.run.pace import first_due_steps
from diloco.core.syncer import claims, excess, merging
from diloco.core.syncer.claims import StepBounds
from diloco.core.syncer.offer_fit import MissedOffer
from diloco.core.syncer.round import Round
from diloco.core.tensors import outer
from diloco.log import shortening
from diloco.log.shortening import RunShortener
from diloco.log.writer import Writer
from diloco.settings.run import RunSettings
from diloco.testing.virtual_transport import VirtualTransport
from diloco.wire.entries import Cursor, Record
from diloco.wire.offers import Offer
from diloco_syncer.owning.owner import FragmentOwner

SCHEDULES = 500


def no_fence(patch: Patch) -> None:
    """Entries are appended though another process has appended meanwhile."""
    append = Writer.append

    async def unfenced(self: Writer, head: str, frame: bytes, parts: Any, attempt: bytes, fence: Any, *stream: Any) -> int:
        return await append(self, head, frame, parts, attempt, None if ".fragment." in head else fence, *stream)

    patch.setattr(Writer, "append", unfenced)


def cursors_unchecked(patch: Patch) -> None:
    """An offer is merged without asking whether its learner knows what of it was merged last."""
    unfit = Round._unfit

    def careless(self: Round, offer: Offer, *, tried: bool = False) -> MissedOffer | None:
        merged = self.chain.cursor(offer.learner)
        at_once = replace(offer, after=merged, incarnation=max(offer.incarnation, merged[0] + 1))
        return unfit(self, at_once, tried=tried)

    patch.setattr(Round, "_unfit", careless)


def epoch_not_raised(patch: Patch) -> None:
    """A new owner goes on in its predecessor's epoch."""
    make, check = merging.make_marker, Chain.check

    def marker(replica: Any, *others: Any, **named: Any) -> Record:
        return replace(make(replica, *others, **named), epoch=replica.chain.epoch)

    def unchecked(self: Chain, record: Record) -> None:
        check(self, replace(record, epoch=self.epoch + (record.entry == "takeover")))

    patch.setattr(merging, "make_marker", marker)
    patch.setattr(Chain, "check", unchecked)


def _kept(state: DeltaState, chain: Chain) -> ApplyOutcome:
    """Take over the log's state, and keep all that has been done since the base."""
    state.after = chain.cursor(state.learner)
    state.pending.clear()
    state.base_version, state.base_hash = chain.version, chain.state_hash
    return ApplyOutcome(state.tokens > 0, reset=True)


def restored_displacement_kept(patch: Patch) -> None:
    """A learner goes on from its checkpoint's displacement though the log has merged of it meanwhile."""
    reload = DeltaState.reload

    def trusting(self: DeltaState, chain: Chain, **invalid: Any) -> ApplyOutcome:
        return _kept(self, chain) if chain.cursor(self.learner) != self.after else reload(self, chain, **invalid)

    patch.setattr(DeltaState, "reload", trusting)


def merged_displacement_kept(patch: Patch) -> None:
    """A learner keeps the displacement of an offer that was merged."""

    def kept(self: DeltaState, version: int, identity: tuple[int, int], **_: bool) -> ApplyOutcome:
        self.after = identity
        self.pending.clear()
        return self._keep()

    patch.setattr(DeltaState, "_merged", kept)


def identifiers_begin_again(patch: Patch) -> None:
    """A learner that has come back calls its first offers what it called them before: the duplicate window hides them."""
    append = VirtualTransport.append
    numbers: dict[VirtualTransport, dict[str, int]] = {}

    async def forgetful(self: VirtualTransport, subject: str, data: bytes, *, message_id: str, **others: Any) -> int:
        if ".delta." in subject:
            mine = numbers.setdefault(self, {})
            message_id = f"{subject}/{mine.setdefault(message_id, len(mine))}"
        return await append(self, subject, data, message_id=message_id, **others)

    patch.setattr(VirtualTransport, "append", forgetful)


def takeover_without_record(patch: Patch) -> None:
    """A syncer goes on where another one was, without a word in the log."""
    append = FragmentOwner.append

    async def silent(self: FragmentOwner, record: Record, inline: bytes, parts: list[bytes]) -> None:
        if record.entry != "takeover":
            await append(self, record, inline, parts)

    patch.setattr(FragmentOwner, "append", silent)


def own_parameters_trusted(patch: Patch) -> None:
    """A newcomer counts the difference between the model that it came with and the run's as its own work."""
    apply = DeltaValues.apply

    def trusting(self: DeltaValues, carried: ApplyOutcome, pending: Any, theta: Any) -> VersionWrite:
        applied = apply(self, carried, pending, theta)
        return VersionWrite(theta, theta) if carried.reset and applied.reference is None else applied

    patch.setattr(DeltaValues, "apply", trusting)


def keyframe_without_cursors(patch: Patch) -> None:
    """A keyframe does not say what of each learner is merged."""

    def none(self: Chain) -> list[Cursor]:
        return []

    patch.setattr(Chain, "keyframe_cursors", none)


def late_founders(patch: Patch) -> None:
    """Version 0 of a founder that comes late is stored behind the keyframes of the run."""
    append = Writer.append_keyframe

    async def unfenced(self: Writer, replica: Any, residual: Any, fence: Any) -> int:
        return await append(self, replica, residual, None if residual is None else fence)

    patch.setattr(Writer, "append_keyframe", unfenced)


def restored_over_another_incarnation(patch: Patch) -> None:
    """A learner goes on from its checkpoint though an offer of a process after it was merged."""
    reload = DeltaState.reload

    def trusting(self: DeltaState, chain: Chain, **invalid: Any) -> ApplyOutcome:
        merged = chain.cursor(self.learner)
        known = {self.after[0], *(offer.stated.incarnation for offer in self.pending)}
        return reload(self, chain, **invalid) if merged[0] in known else _kept(self, chain)

    patch.setattr(DeltaState, "reload", trusting)


def positions_forgotten(patch: Patch) -> None:
    """A share of the data is freed where it was leased, not where its learner has come to."""
    revised = leases.revised

    def forgetful(*args: Any, free: Any = (), positions: Any, **values: Any) -> Any:
        return revised(*args, free=free, positions={} if free else positions, **values)

    patch.setattr(leases, "revised", forgetful)


def purged_too_far(patch: Patch) -> None:
    """Nothing but the newest keyframe stays, whether any learner has folded its state or not."""

    def believe(self: RunShortener, record: Record) -> None:
        self.judged[record.fragment] = sys.maxsize

    patch.setattr(shortening, "keyframes_kept", lambda settings, parameters, moments: 1)
    patch.setattr(RunShortener, "note", believe)


def dropped_work_offered(patch: Patch) -> None:
    """A learner whose work a version does not hold writes that version, and counts its work as lost, over its own value."""
    missed = DeltaState._missed

    def carried_over(self: DeltaState) -> ApplyOutcome:
        return dataclasses.replace(missed(self), keeps=True)

    patch.setattr(DeltaState, "_missed", carried_over)


def marks_not_waited_for(patch: Patch) -> None:
    """A learner applies versions beyond a marker before its state has been copied."""
    patch.setattr(Markers, "may_apply", lambda self, version, fragments: True)


def not_archived(patch: Patch) -> None:
    """Of the offers of a merge only the first is kept."""
    archive = FragmentOwner.archive

    async def careless(self: FragmentOwner, merge: Any, attempt: bytes) -> None:
        await archive(self, dataclasses.replace(merge, held=merge.held[:1]), attempt)

    patch.setattr(FragmentOwner, "archive", careless)


def made_before_a_rollback(patch: Patch) -> None:
    """Offers from before a rollback are merged after it."""
    patch.setattr(Chain, "floor", 0)


def kept_over_a_rollback(patch: Patch) -> None:
    """A learner carries what it has done over a rollback."""
    patch.setattr(DeltaState, "_begin_again", lambda self: self._keep())


def rolled_back_again(patch: Patch) -> None:
    """An order is carried out again by a process that does not remember it."""
    check = Chain.check

    def lenient(self: Chain, record: Record) -> None:
        known, self.rolled_back = self.rolled_back, None
        try:
            check(self, record)
        finally:
            self.rolled_back = known

    patch.setattr(Chain, "check", lenient)
    patch.setattr(Chain, "change", 0)


def islands_of_one_batch(patch: Patch) -> None:
    """Learners whose batch is twice the task's are refused."""

    def bounds(settings: RunSettings, fragments: object) -> StepBounds:
        return StepBounds(1, settings.task.batch * settings.task.context)

    patch.setattr(claims, "step_bounds", bounds)


def slow_learners_alone(patch: Patch) -> None:
    """Learners that take their steps as fast as they were granted are refused."""
    patch.setattr(claims, "most_steps", lambda elapsed_s, grant=None: elapsed_s / 0.2)


def less_than_was_granted(patch: Patch) -> None:
    """Learners whose steps have as many tokens as they were granted are refused."""
    patch.setattr(claims, "step_tokens", lambda bounds, grant=None: 10**9 if grant is None else grant.batch_tokens - 1)


def merges_of_the_usual_norm(patch: Patch) -> None:
    """A merge may be no longer than those before it."""
    patch.setattr(excess, "room", lambda usual, held, settings: usual)


def progress_kept_in_state(patch: Patch) -> None:
    """A learner adds what it has done since its offer to a version of state, too."""

    def kept(self: DeltaState, merged: Any = None) -> ApplyOutcome:
        return ApplyOutcome(self.tokens > 0, merged)

    patch.setattr(DeltaState, "_keep", kept)


def displacement_of_state(patch: Patch) -> None:
    """A learner offers its displacement where its values are asked for."""
    make = DeltaValues.of

    def displaced(theta: Any, settings: Any, *others: Any, state: bool) -> DeltaValues:
        return make(theta, settings, *others, state=False)

    patch.setattr(DeltaValues, "of", displaced)


def state_rounded(patch: Patch) -> None:
    """Offers of state have the bits of any other."""
    patch.setattr(Learner, "_checked_bits", lambda self, announced: self.settings.codec.offer_bits)


def outer_step_on_state(patch: Patch) -> None:
    """An owner takes the outer step of the settings on state."""
    patch.setattr(outer.Average, "rates", (0.7, 0.9))


def phase_from_first_hearing(patch: Patch) -> None:
    """An owner counts the steps to a fragment's next round from when it first heard the version, and keeps no slots."""

    def due(self: Round, now_s: float, steps: int) -> bool:
        if self.opened_at_s is not None or self.chain.closed:
            return False
        needed = steps if self.chain.version else first_due_steps(self.settings.round, self.chain.fragment, self.fragments)
        at_once = self._used_up(now_s) or bool(self._leavers(now_s))
        return at_once or self._are_enough(self._ready(now_s, needed), now_s)

    patch.setattr(Round, "due", due)


ROLLBACK_MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (made_before_a_rollback, "made on .* before the rollback"),
    (kept_over_a_rollback, "holds steps from before the rollback"),
    (rolled_back_again, "again, or after"),
]
STATE_MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (progress_kept_in_state, "steps since version .* states|holds a step taken on version|holds .* where its version has"),
    (displacement_of_state, "holds .* where its version has"),
    (state_rounded, "has 4 bits"),
    (outer_step_on_state, "learning rate 0.7 and momentum 0.9"),
]
EVEN_MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (phase_from_first_hearing, "versions in one step, long after the last fault"),
]
MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (no_fence, "does not follow|never taken the fragment over|is closed|is not over|no version of the log"),
    (cursors_unchecked, "merged before|made without knowing|merged twice|cannot be read"),
    (epoch_not_raised, "expected version and epoch"),
    (restored_displacement_kept, "merged twice|states .* holds|tokens processed|for the marker"),
    (merged_displacement_kept, "merged twice|states .* holds|tokens processed|for the marker"),
    (identifiers_begin_again, "names two messages"),
    (takeover_without_record, "never taken the fragment over"),
    (own_parameters_trusted, "holds"),
    (lost_tokens_forgotten, "tokens processed|for the marker|cannot be read"),
    (keyframe_without_cursors, "cursors"),
    (late_founders, "after genesis"),
    (restored_over_another_incarnation, "merged twice|states .* holds|tokens processed|for the marker"),
    (positions_forgotten, "is freed at batch"),
    (purged_too_far, "keyframes are left|were dropped"),
    (dropped_work_offered, "holds"),
    (marks_not_waited_for, "for the marker"),
    (not_archived, "not in the archive"),
    (islands_of_one_batch, "an honest learner is refused: .* is impossible"),
    (slow_learners_alone, "an honest learner is refused: .* (steps since genesis|the end of its batches)"),
    (less_than_was_granted, "an honest learner is refused: .* tokens in its steps"),
    (merges_of_the_usual_norm, "an honest learner is refused: .* has a norm above"),
]


# those that no early schedule finds, with one that does, which is played first
FOUND_BY: dict[Callable[[Patch], None], int] = {
    no_fence: 24,
    restored_displacement_kept: 14,
    late_founders: 26,
    marks_not_waited_for: 12,
    identifiers_begin_again: 12,
    restored_over_another_incarnation: 20,
    positions_forgotten: 16,
}


ALL = MUTATIONS + ROLLBACK_MUTATIONS + STATE_MUTATIONS + EVEN_MUTATIONS


@pytest.mark.parametrize(("mutate", "found"), ALL, ids=lambda value: getattr(value, "__name__", ""))
def test_the_defect_is_found(mutate: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    kinds = {"rollbacks": ROLLBACK_MUTATIONS, "state": STATE_MUTATIONS, "even": EVEN_MUTATIONS}
    kind = {name: True for name, mutations in kinds.items() if mutate in dict(mutations)}
    for seed in (FOUND_BY.get(mutate, 0), *range(SCHEDULES)):
        error = play(seed, **kind).error
        if error is not None:
            with pytest.raises(Violation, match=found):
                raise error
            return
    pytest.fail(f"{mutate.__doc__} was not noticed in {SCHEDULES} schedules")
