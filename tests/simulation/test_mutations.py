"""The simulation has teeth: each of these defects, put into the services on purpose, is found by an invariant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.simulation.invariants import Violation
from tests.simulation.play import play
from tests.simulation.transport import SimulatedTransport

from diloco.core import leases, merging
from diloco.core.books import Apply, Books
from diloco.core.chain import Chain
from diloco.core.round import Round
from diloco.log import Log
from diloco.member import Member
from diloco.wire.messages import Cursor, Offer, Record
from diloco_syncer import shard
from diloco_syncer.shard import Shard

SCHEDULES = 500

Patch = pytest.MonkeyPatch


def no_fence(patch: Patch) -> None:
    """Entries are appended whoever has appended meanwhile."""
    append = Log._append

    async def unfenced(self: Log, head: str, frame: bytes, parts: Any, attempt: bytes, fence: Any, *stream: Any) -> int:
        return await append(self, head, frame, parts, attempt, None if ".fragment." in head else fence, *stream)

    patch.setattr(Log, "_append", unfenced)


def cursors_unchecked(patch: Patch) -> None:
    """An offer is merged without asking whether its learner knows what of it was merged last."""
    unfit = Round._unfit

    def careless(self: Round, offer: Offer) -> str | None:
        merged = self.chain.cursor(offer.learner)
        return unfit(self, replace(offer, after=merged, incarnation=max(offer.incarnation, merged[0] + 1)))

    patch.setattr(Round, "_unfit", careless)


def epoch_not_raised(patch: Patch) -> None:
    """Who takes a fragment over goes on in its predecessor's epoch."""
    make, check = merging.make_marker, Chain.check

    def marker(replica: Any, *others: Any, **named: Any) -> Record:
        return replace(make(replica, *others, **named), epoch=replica.chain.epoch)

    def unchecked(self: Chain, record: Record) -> None:
        check(self, replace(record, epoch=self.epoch + (record.entry == "takeover")))

    patch.setattr(merging, "make_marker", marker)
    patch.setattr(Chain, "check", unchecked)


def restored_displacement_kept(patch: Patch) -> None:
    """A learner goes on from its checkpoint's displacement though the log has merged of it meanwhile."""
    reload = Books.reload

    def trusting(self: Books, chain: Chain, theta: Any, **spoilt: Any) -> Apply:
        if chain.cursor(self.learner) != self.after:
            self.after = chain.cursor(self.learner)
            self.outstanding.clear()
        return reload(self, chain, theta, **spoilt)

    patch.setattr(Books, "reload", trusting)


def merged_displacement_kept(patch: Patch) -> None:
    """A learner goes on as if its merged offer had come too late."""

    def kept(self: Books, version: int, theta: Any, identity: tuple[int, int], answered: int) -> Apply:
        self.after = identity
        self.outstanding.clear()
        return self._missed(version, theta)

    patch.setattr(Books, "_merged", kept)


def identifiers_without_incarnation(patch: Patch) -> None:
    """A learner that has come back calls its first offers what it called them before: the duplicate window hides them."""
    append = SimulatedTransport.append

    async def forgetful(self: SimulatedTransport, subject: str, data: bytes, *, message_id: str, **others: Any) -> int:
        learner, *rest = message_id.split("/")
        message_id = "/".join([learner, *rest[1:]]) if rest else message_id
        return await append(self, subject, data, message_id=message_id, **others)

    patch.setattr(SimulatedTransport, "append", forgetful)


def takeover_without_record(patch: Patch) -> None:
    """A syncer goes on where another one was, without a word in the log."""
    append = Shard._append

    async def silent(self: Shard, owned: Any, record: Record, inline: bytes, parts: list[bytes]) -> None:
        if record.entry != "takeover":
            await append(self, owned, record, inline, parts)

    patch.setattr(Shard, "_append", silent)


def own_parameters_trusted(patch: Patch) -> None:
    """A newcomer counts the difference between the model that it came with and the run's as its own work."""
    reload = Books.reload

    def trusting(self: Books, chain: Chain, theta: Any, **spoilt: Any) -> Apply:
        applied = reload(self, chain, theta, **spoilt)
        return Apply(theta, theta, 1.0) if applied.reference is None else applied

    patch.setattr(Books, "reload", trusting)


def lost_tokens_forgotten(patch: Patch) -> None:
    """What a learner drops is not counted."""
    keep = Books._keep

    def forgetful(self: Books, theta: Any, reference: Any, factor: float) -> Apply:
        lost = self.lost_tokens
        applied = keep(self, theta, reference, factor)
        self.lost_tokens = lost
        return applied

    patch.setattr(Books, "_keep", forgetful)


def keyframe_without_cursors(patch: Patch) -> None:
    """A keyframe does not say what of each learner is merged."""

    def none(self: Chain) -> list[Cursor]:
        return []

    patch.setattr(Chain, "keyframe_cursors", none)


def late_founders(patch: Patch) -> None:
    """Version 0 of a founder that comes late is stored behind the keyframes of the run."""
    append = Log.append_keyframe

    async def unfenced(self: Log, replica: Any, residual: Any, fence: Any) -> int:
        return await append(self, replica, residual, None if residual is None else fence)

    patch.setattr(Log, "append_keyframe", unfenced)


def restored_over_another_incarnation(patch: Patch) -> None:
    """A learner goes on from its checkpoint though an offer of a process after it was merged."""
    reload = Books.reload

    def trusting(self: Books, chain: Chain, theta: Any, **spoilt: Any) -> Apply:
        merged = chain.cursor(self.learner)
        if merged[0] != self.after[0] and merged[0] not in {offer.incarnation for offer in self.outstanding}:
            self.after = merged
            self.outstanding.clear()
        return reload(self, chain, theta, **spoilt)

    patch.setattr(Books, "reload", trusting)


def positions_forgotten(patch: Patch) -> None:
    """A share of the data is freed where it was leased, not where its learner has come to."""
    patch.setattr(leases, "_freed", lambda lease, positions: replace(lease, holder=None))


def purged_too_far(patch: Patch) -> None:
    """Nothing but the newest keyframe stays."""
    patch.setattr(shard, "keyframes_kept", lambda settings, parameters, moments: 1)


def newcomer_carries_over(patch: Patch) -> None:
    """A learner whose log goes back before it has taken over anything carries over what it was initialised with."""
    missed = Books._missed

    def carried(self: Books, version: int, theta: Any) -> Apply:
        applied = missed(self, version, theta)
        return applied if self.tokens else Apply(theta, self.base, self.carry.late)

    patch.setattr(Books, "_missed", carried)


def marks_not_waited_for(patch: Patch) -> None:
    """A learner applies versions beyond a mark before its state has been copied."""
    take = Member._take_pending

    def eager(self: Member, state: Any) -> Any:
        self._held_back = None
        return take(self, state)

    patch.setattr(Member, "_take_pending", eager)


def not_archived(patch: Patch) -> None:
    """Of the offers of a merge only the first is kept."""
    archive = Shard._archive

    async def careless(self: Shard, merge: Any) -> None:
        await archive(self, dataclasses.replace(merge, held=merge.held[:1]))

    patch.setattr(Shard, "_archive", careless)


def made_before_a_rollback(patch: Patch) -> None:
    """What was offered before a rollback is merged after it."""
    patch.setattr(Chain, "floor", 0)


def kept_over_a_rollback(patch: Patch) -> None:
    """A learner carries what it has done over a rollback."""
    patch.setattr(Books, "_begin_again", lambda self, theta: self._missed(self.base_version + 1, theta))


def rolled_back_again(patch: Patch) -> None:
    """An order is carried out again by whoever does not remember it."""
    check = Chain.check

    def lenient(self: Chain, record: Record) -> None:
        known, self.rolled_back = self.rolled_back, None
        try:
            check(self, record)
        finally:
            self.rolled_back = known

    patch.setattr(Chain, "check", lenient)
    patch.setattr(Chain, "change", 0)


ROLLBACK_MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (made_before_a_rollback, "made on .* before the rollback"),
    (kept_over_a_rollback, "holds steps from before the rollback"),
    (rolled_back_again, "again, or after"),
]
MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (no_fence, "does not follow|never taken the fragment over|is closed|is not over"),
    (cursors_unchecked, "merged before|made without knowing|merged twice"),
    (epoch_not_raised, "expected version and epoch"),
    (restored_displacement_kept, "merged twice|states .* holds|tokens processed|for the mark"),
    (merged_displacement_kept, "merged twice|states .* holds|tokens processed|for the mark"),
    (identifiers_without_incarnation, "names two messages"),
    (takeover_without_record, "never taken the fragment over"),
    (own_parameters_trusted, "holds"),
    (lost_tokens_forgotten, "tokens processed"),
    (keyframe_without_cursors, "cursors"),
    (late_founders, "after genesis"),
    (restored_over_another_incarnation, "merged twice|states .* holds|tokens processed|for the mark"),
    (positions_forgotten, "is freed at batch"),
    (purged_too_far, "keyframes are left|were dropped"),
    (newcomer_carries_over, "holds"),
    (marks_not_waited_for, "for the mark"),
    (not_archived, "not in the archive"),
]


@pytest.mark.parametrize(("mutate", "found"), MUTATIONS + ROLLBACK_MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_defect_is_found(mutate: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    for seed in range(SCHEDULES):
        error = play(seed, rollbacks=mutate in dict(ROLLBACK_MUTATIONS)).error
        if error is not None:
            with pytest.raises(Violation, match=found):
                raise error
            return
    pytest.fail(f"{mutate.__doc__} was not noticed in {SCHEDULES} schedules")
