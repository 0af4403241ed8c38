"""A learner's protocol side as one state machine: no clock, network, thread or lock; times and messages are handed in.

Events change the state: :meth:`Learner.book` (inner steps), :meth:`Learner.queue` (the log), :meth:`Learner.hear` (rounds),
:meth:`Learner.submit` (snapshots), and so on. At a boundary between two steps, :func:`diloco.core.learner.boundary.decide` says
which versions are applied and what the trainer does next, and :func:`diloco.core.learner.boundary.apply` carries that out;
:func:`diloco.core.learner.boundary.pass_boundary` does both.

The caller serialises the calls. An event costs time by the one fragment that it concerns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from diloco import __version__
from diloco.core.learner import delta
from diloco.core.learner.accounts import Accounts, MemberTraffic, StepDone
from diloco.core.learner.delta import ERROR_BITS, DeltaState, DeltaValues, EncodedOffer, PendingDelta
from diloco.core.learner.fragment_state import (
    DueOffer,
    FragmentSnapshot,
    FragmentState,
    FragmentVersion,
    OfferEvent,
    Phase,
    Reader,
)
from diloco.core.learner.markers import Markers
from diloco.core.learner.quiet import QuietFragments
from diloco.core.learner.work import Work
from diloco.core.log.chain import Chain
from diloco.core.run import budget
from diloco.core.run.changes import Effective
from diloco.core.syncer import bandwidth
from diloco.core.tensors.fragments import STATE_BITS, Fragment
from diloco.errors import MessageError
from diloco.settings.run import Bits, RunSettings
from diloco.wire.control import Announcement, Heartbeat
from diloco.wire.fields import Range

Activity = Literal["starting", "stepping", "waiting", "recovering", "closing", "leaving", "left", "finished"]
Role = Literal["learner", "evaluator"]
Dump = tuple[dict[str, Any], dict[str, NDArray[Any]]]  # plain values, and arrays by name

MAX_AHEAD = 1_000_000  # versions, and takeovers, by which the log may be behind an announcement
ACCOUNTS = "accounts/"  # begins the names of a dump's arrays


class Learner:
    """The state of one learner (or evaluator) in one run."""

    def __init__(
        self,
        name: str,
        role: Role,
        region: str,
        incarnation: int,
        settings: RunSettings,
        error_bits: Bits = ERROR_BITS,
        keeps_single_step: bool = True,
    ) -> None:
        """Begin without fragments; ``settings`` are those that the run was created with.

        ``error_bits``: in which quantisation errors are kept (:class:`DeltaValues`). ``keeps_single_step``: as in
        :class:`DeltaState`; earlier versions kept none.
        """
        self.name, self.role, self.region, self.incarnation = name, role, region, incarnation
        self.error_bits, self.keeps_single_step = error_bits, keeps_single_step
        self.settings, self.in_force = settings, Effective(settings)
        self.in_lockstep = settings.round.lockstep and role == "learner"
        self.fragments: list[FragmentState] = []
        self.quiet = QuietFragments()
        self.accounts, self.work, self.markers = Accounts(), Work(), Markers()
        self.rounds_merged = self.rounds_missed = 0
        self.draining = False  # a closing round was announced
        self.leaving = False  # no further step is taken, and rounds are wanted that merge what is unmerged
        self.silent = False  # no round is answered any more
        self._joined = False  # every fragment has the log's state; no event takes one back to JOINING
        # as of the last boundary
        self.activity: Activity = "starting"  # until its first step boundary, or until a checkpoint is restored
        self.changes, self.budget = 0, settings.tokens
        self.stopped = False
        self.missing_since_s: float | None = None  # in lockstep: versions that are made without this learner

    # ---- joining

    def seat(self, version: FragmentVersion, *, state: bool = False) -> FragmentState:
        """Begin the next fragment with the log's state, which the first boundary applies; ``state``: it is of state."""
        chain, settings = version.chain, self.settings
        counts = DeltaState(self.name, self.incarnation, settings.carry.overlap, chain.version, chain.state_hash)
        counts.after, counts.state, counts.keeps_single_step = chain.cursor(self.name), state, self.keeps_single_step
        values = None
        if version.theta is not None:
            values = DeltaValues.of(version.theta, settings, self.error_bits, state=state)
        begun = FragmentState(len(self.fragments), counts, version, self.quiet, values)
        self.quiet.add()
        begun.pending.append(version)
        self.fragments.append(begun)
        return begun

    def seat_all(self, versions: Sequence[FragmentVersion], fragments: Sequence[Fragment]) -> None:
        """Begin all fragments with the log's states, in place of any before, and count on from the log."""
        self.fragments.clear()
        self.quiet.clear()
        for fragment, version in zip(fragments, versions, strict=True):
            self.seat(version, state=fragment.state)
        self.take_up_accounts()

    def take_up_accounts(self) -> None:
        """Count on from what the log says of this learner; work beyond that before a crash is not known here."""
        cursors = [state.newest.chain.cursors.get(self.name) for state in self.fragments]
        tokens = max(cursor.tokens + cursor.lost_tokens if cursor else 0 for cursor in cursors)
        self.accounts.tokens = self.accounts.earlier_tokens = tokens
        for state, cursor in zip(self.fragments, cursors, strict=True):
            state.delta.lost_tokens = tokens - (cursor.tokens if cursor else 0)

    @property
    def is_over(self) -> bool:
        """Whether the log of each fragment has the run's end."""
        return all(state.newest.chain.closed for state in self.fragments)

    @property
    def is_warming(self) -> bool:
        """Whether the learning rate still rises for an optimizer state that began fresh in a run under way."""
        warming = self.accounts.warming
        return warming is not None and warming < self.settings.inner.restart_warmup_steps

    def peers(self) -> list[str] | None:
        """Return the other learners of which the log has merged something, most tokens first; None: it has merged nothing."""
        merged: Counter[str] = Counter()
        for state in self.fragments:
            merged.update({name: cursor.tokens for name, cursor in state.newest.chain.cursors.items()})
        return [name for name, _ in merged.most_common() if name != self.name] if merged else None

    def ends(self) -> dict[int, int]:
        """Return by share how far the log has merged the data: in the fragment that is furthest."""
        ends: dict[int, int] = {}
        for state in self.fragments:
            for share, until in state.newest.chain.ends.items():
                ends[share] = max(until, ends.get(share, 0))
        return ends

    # ---- events

    def change(self, effective: Effective) -> None:
        """Take in what was changed of the run; the next boundary goes by it."""
        self.in_force = effective

    def book(self, done: StepDone) -> None:
        """Count inner steps that have ended."""
        self.accounts.book(done)
        if self.work.add(done.tokens, done.share, done.batch, done.steps):
            self.settle()

    def settle(self) -> None:
        """Have every fragment count all steps that were booked, for its ``delta`` to be read; events settle their own."""
        for state in self.fragments:
            self.work.settle(state)
        self.work.forget()

    def queue(self, index: int, version: FragmentVersion) -> None:
        """Have the next boundary apply a version that was folded, or loaded."""
        self.fragments[index].queue(version)

    def rewind(self, index: int, version: FragmentVersion) -> None:
        """Go back to what the log has of a fragment, after it lost entries."""
        self.fragments[index].rewind(version)
        self.markers.forget()

    def hear(self, announced: Announcement, now_s: float) -> bool:
        """Take in the announcement of a round; return whether it is the first one of a closing round.

        How far the run is, and that it ends, is believed as far as the fragment's log makes it possible: anyone with a syncer's
        rights can announce.

        Raises:
            MessageError: it does not fit the run; nothing has changed.
        """
        if announced.fragment >= len(self.fragments):
            raise MessageError(f"round of fragment {announced.fragment}, the run has {len(self.fragments)}")
        bits, state = self._checked_bits(announced), self.fragments[announced.fragment]
        chain = _checked_chain(announced, state.newest.chain)
        if announced.epoch < chain.epoch:
            return False  # from an owner that has been replaced, and does not know it yet
        closing = announced.closing and budget.in_reach(chain, self.in_force.settings.tokens)
        # an owner that knows of another `round.steps` than this learner is honest: its pace counts as far as it may be here
        most = bandwidth.steps_between(self.in_force.settings, bandwidth.slowest(self.in_force.settings))
        steps = min(announced.steps, most)
        # one that has stopped answers the last rounds of fragments that are behind, too
        closing_here = closing or (announced.closing and self.stopped)
        state.hear(announced, bits, steps, self.accounts.step, now_s, closing=closing_here)
        self.accounts.note_processed(min(announced.tokens_processed, budget.believable(chain)))
        begins = closing and not self.draining
        self.draining |= closing
        return begins

    def _checked_bits(self, announced: Announcement) -> Bits:
        """Return the bits of an answer from here.

        Raises:
            MessageError: the announcement asks for bits that the run's settings do not allow.
        """
        if self.fragments[announced.fragment].delta.state:
            return STATE_BITS
        settings, best = self.in_force.settings, self.settings.codec.offer_bits
        if not announced.offer_bits:
            return best  # as usual: links are not too slow
        allowed, asked = bandwidth.possible(best, settings), dict(announced.offer_bits)
        if not set(asked.values()) <= set(allowed):
            raise MessageError(f"round asks for offers of {asked} bits, the run has {allowed}")
        return asked.get(self.region, best)

    def reopen(self, index: int) -> None:
        """Have the fragment's open round answered again: the answer is gone."""
        self.fragments[index].reopen()

    def submit(self, index: int, reader: Reader | None) -> None:
        """Take a snapshot of a fragment as of this boundary, at most one; ``reader`` gives its values.

        With ``outer.optimizer = adamw`` it gives the gradients since the version applied last, not the values.
        """
        state = self.fragments[index]
        state.happen(OfferEvent.SNAPSHOT)
        self.work.settle(state)
        held = state.delta
        state.snapshot = FragmentSnapshot(reader, held.steps, held.tokens, held.data, self.accounts.step)

    def try_answer(self, index: int) -> DueOffer | None:
        """Answer the fragment's open round if that can be done now; return the offer to be made, if one is."""
        state = self.fragments[index]
        if not state.wants_answer or state.snapshot is None or self.silent or (state.closing and not self.stopped):
            return None
        if not self._joined:
            if any(other.phase is Phase.JOINING for other in self.fragments):
                return None  # a newcomer has nothing to say before it has the whole of the global model
            self._joined = True
        return state.answer()

    def encode(self, answer: DueOffer) -> EncodedOffer:
        """Read and quantise an offer.

        It takes time, and may run beside other events: until it is :meth:`encoded`, none touches its arrays.

        Raises:
            NonFiniteError: the values that were read hold NaN or infinity.
        """
        values, reader = self.fragments[answer.fragment].values, answer.snapshot.reader
        assert values is not None
        assert reader is not None
        return values.encode(reader(), answer.bits)

    def encoded(self, answer: DueOffer, encoded: EncodedOffer | None = None) -> PendingDelta:
        """Count an offer that was quantised (None: there are no arrays); it is sent next."""
        return self.fragments[answer.fragment].encoded(answer, encoded)

    def not_finite(self, index: int) -> None:
        """Give up an offer whose values are not finite; the next boundary begins again from the global model."""
        self.fragments[index].happen(OfferEvent.NOT_FINITE)

    def sent(self, index: int, sequence: int) -> None:
        """Note that the offer under way is stored, with its head at ``sequence`` of its stream."""
        state = self.fragments[index]
        state.happen(OfferEvent.SENT)
        state.sent = sequence

    # ---- what others are told, and what is saved

    @property
    def left(self) -> bool:
        """Whether nothing of this learner is unmerged."""
        return not any(self.work.unmerged(state) or state.sending or state.pending for state in self.fragments)

    def heartbeat(self, trained: list[Range], batch_tokens: int, traffic: MemberTraffic) -> Heartbeat:
        """Return the heartbeat: what others are told of this learner now."""
        self.settle()
        states, accounts = self.fragments, self.accounts
        return Heartbeat(
            learner=self.name,
            region=self.region,
            incarnation=self.incarnation,
            role=self.role,
            state=self.activity,
            sending=any(state.sending for state in states),
            step=accounts.step,
            tokens=accounts.tokens,
            step_s=accounts.step_average.get(),
            loss=accounts.loss,
            versions=[state.delta.base_version for state in states],
            steps=[state.delta.steps for state in states],
            fragment_tokens=[state.delta.tokens for state in states],
            lost_tokens=[max(0, state.delta.lost_tokens) for state in states],
            trained=trained,
            batch_tokens=batch_tokens,
            busy_s=accounts.busy_s,
            blocked_s=accounts.blocked_s,
            **traffic._asdict(),
            software=__version__,
            failure=accounts.failure,
        )

    @property
    def encoding(self) -> bool:
        """Whether an offer is being quantised."""
        return any(state.phase is Phase.ENCODING for state in self.fragments)

    @property
    def may_dump(self) -> bool:
        """Whether the state can be saved as it is: an offer that it does not hold could be merged all the same."""
        return not self.encoding and not any(state.phase is Phase.INVALID for state in self.fragments)

    def dump(self, positions: list[tuple[int, int]]) -> Dump:
        """Return the state as of the last boundary, for a checkpoint, with the learner's ``positions`` in the data.

        The arrays are not written to any more. Where there are none here, there are none in it.
        """
        self.settle()
        arrays: dict[str, NDArray[Any]] = {}
        fragments = []
        for state in self.fragments:
            fragments.append(delta.dump(state.delta))
            if state.values is not None:
                named = delta.dump_arrays(state.values, state.delta.pending)
                arrays |= {f"{ACCOUNTS}{state.index}/{name}": array for name, array in named.items()}
        accounts = self.accounts
        plain_state = {  # in this order: digests of states go by it
            "step": accounts.step,
            "tokens": accounts.tokens,
            "busy_s": accounts.busy_s,
            "blocked_s": accounts.blocked_s,
            "schedule": accounts.schedule,
            "positions": positions,
            "warming": accounts.warming,
            "version_steps": [state.version_step for state in self.fragments],
            "fragments": fragments,
        }
        return plain_state, arrays

    def unmerged(self, plain: Mapping[str, Any], bare: Collection[int] = ()) -> list[list[PendingDelta]]:
        """Return by fragment the offers whose fate is unknown as :meth:`restore` would take them over."""
        return [counts.pending for counts, _ in self._counts(plain, bare)]

    def _counts(self, plain: Mapping[str, Any], bare: Collection[int]) -> list[tuple[DeltaState, bool]]:
        """Return by fragment the counts of a :meth:`dump`, and whether the log stands as they do."""
        if len(plain["fragments"]) != len(self.fragments):
            raise ValueError(f"it has {len(plain['fragments'])} fragments, the run {len(self.fragments)}")
        found = []
        for state, values in zip(self.fragments, plain["fragments"], strict=True):
            counts = delta.load(state.delta, values)
            stays = bool(state.pending) and self._stands(state.pending[0], counts)
            if state.index in bare and (not stays or any(not offer.dropped for offer in counts.pending)):
                counts.lose()
                stays = False
            found.append((counts, stays))
        return found

    def _stands(self, loaded: FragmentVersion, counts: DeltaState) -> bool:
        """Whether the log, as it was loaded, is where a fragment's counts are."""
        chain = loaded.chain
        found = chain.version, chain.state_hash, chain.cursor(self.name)
        return loaded.record is None and found == (counts.base_version, counts.base_hash, counts.after)

    def restore(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], bare: Collection[int] = ()) -> None:
        """Take over a :meth:`dump`, its ``arrays`` any dtype [...] by name, before the first boundary.

        Displacement is kept where the log stands as the restored state does: the learner's value is right as it is then, to the
        last bit. It is lost otherwise, but for what :meth:`DeltaState.reload` keeps.

        ``bare`` fragments have no arrays any more, but those that the log has: what quantisation left over is gone, and where
        an offer is under way, or the log has gone on, so is the displacement.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: the checkpoint is not of this model; nothing has changed.
        """
        loaded: list[tuple[DeltaState, DeltaValues | None, bool]] = []
        version_steps = [int(step) for step in plain["version_steps"]]
        for state, (counts, stays), _ in zip(self.fragments, self._counts(plain, bare), version_steps, strict=True):
            held = state.values
            if held is not None and state.index not in bare:
                prefix = f"{ACCOUNTS}{state.index}/"
                named = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
                held = delta.load_arrays(held, counts.pending, named)
            loaded.append((counts, held, stays))
        accounts = self.accounts.restored(plain)
        self.accounts, self.activity = accounts, "recovering"  # from here on, the gate compares what heartbeats claim
        for state, (counts, held, stays), version_step in zip(self.fragments, loaded, version_steps, strict=True):
            state.delta, state.values = counts, held
            if stays:
                state.restored(version_step)


def _checked_chain(announced: Announcement, chain: Chain) -> Chain:
    """Return a fragment's log; refuse an announcement that no log can be so far behind.

    Raises:
        MessageError: it is of a version, or of an epoch, that cannot be.
    """
    for what, stated, known, most in (
        ("version", announced.version, chain.version, MAX_AHEAD),
        ("epoch", announced.epoch, chain.epoch, MAX_AHEAD * chain.epoch_step),
    ):
        if stated - known > most:
            raise MessageError(f"round of {what} {stated}, the log of fragment {announced.fragment} is at {known}")
    return chain
