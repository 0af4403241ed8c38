"""One fragment of a learner: which offer is under way, which round is open, which versions wait to be applied.

The offer under way is an explicit machine of :class:`Phase` and :class:`OfferEvent`; :data:`TRANSITIONS` has every pair.
Whether a round is open for this learner follows from version numbers (:attr:`FragmentState.wants_answer`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import ApplyOutcome, DeltaState, DeltaValues, EncodedOffer, PendingDelta
from diloco.core.learner.quiet import NOW, QuietFragments
from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.run.pace import MovingAverage
from diloco.core.tensors import ranges
from diloco.wire.control import Announcement
from diloco.wire.entries import Record
from diloco.wire.fields import Bits, Range

Vector = NDArray[np.float32]
Reader = Callable[[], Vector]
How = Literal["version", "reload", "reset"]  # reset: a reload that keeps nothing of the learner's value


@dataclass(frozen=True)
class HostReader:
    """A reader of values that are on the host already, so that it waits for no device."""

    read: Reader

    def __call__(self) -> Vector:
        """Return the values, float32 [size]."""
        return self.read()


class Phase(StrEnum):
    """The offer that is under way, if any."""

    JOINING = "joining"  # the log's state has not been applied: there is nothing to offer yet
    READY = "ready"  # no offer is under way
    ENCODING = "encoding"  # an offer is being quantised: versions wait for the boundary after it
    SENDING = "sending"  # an offer is quantised, and not known to be stored
    INVALID = "invalid"  # the learner's value is not finite: it begins again from the global one


class OfferEvent(StrEnum):
    """An event in the life of a fragment's offer."""

    ANNOUNCED = "announced"  # a round is open
    REOPENED = "reopened"  # the answer to the open round is gone
    QUEUED = "queued"  # the log has an entry more, or was loaded again
    REWOUND = "rewound"  # the log has lost entries
    RESTORED = "restored"  # a checkpoint stands where the log does
    APPLIED = "applied"  # a version is written into the model
    RESET = "reset"  # likewise, and nothing of the learner's value is kept
    SNAPSHOT = "snapshot"  # the value can be read as of this boundary
    DECLINED = "declined"  # the open round is answered by nothing: no step was taken
    OFFERED = "offered"  # the open round is answered by an offer, which is quantised now
    ENCODED = "encoded"  # it is quantised
    NOT_FINITE = "not finite"  # it cannot be quantised
    SENT = "sent"  # it is stored


_J, _R, _E, _S, _I = Phase
_ROWS: dict[OfferEvent, tuple[Phase | None, ...]] = {  # in the order of Phase: the next one; None: this cannot happen
    OfferEvent.ANNOUNCED: (_J, _R, _E, _S, _I),
    OfferEvent.REOPENED: (_J, _R, _E, _S, _I),
    OfferEvent.QUEUED: (_J, _R, _E, _S, _I),
    OfferEvent.REWOUND: (_J, _R, _E, _S, _I),
    OfferEvent.RESTORED: (_R, None, None, None, None),
    OfferEvent.APPLIED: (_R, _R, None, _S, None),
    OfferEvent.RESET: (_R, _R, None, None, _R),
    OfferEvent.SNAPSHOT: (None, _R, None, None, None),
    OfferEvent.DECLINED: (None, _R, None, None, None),
    OfferEvent.OFFERED: (None, _E, None, None, None),
    OfferEvent.ENCODED: (None, None, _S, None, None),
    OfferEvent.NOT_FINITE: (None, None, _I, None, None),
    OfferEvent.SENT: (None, None, None, _R, None),
}
TRANSITIONS: dict[tuple[Phase, OfferEvent], Phase | None] = {
    (phase, event): after for event, row in _ROWS.items() for phase, after in zip(Phase, row, strict=True)
}


@dataclass(frozen=True)
class FragmentVersion:
    """A fragment after an entry of its log; several learners may share it.

    ``record`` made it (None: the log was loaded). ``chain`` is the log's head then, and does not go on; ``theta``,
    float32 [size of the fragment], is None where there are no arrays.
    """

    record: Record | None
    chain: Chain
    theta: Vector | None = None

    @classmethod
    def of(cls, replica: Replica, record: Record | None = None) -> FragmentVersion:
        """Return the present state of ``replica``, which may not be folded meanwhile."""
        return cls(record, replace(replica.chain, cursors=dict(replica.chain.cursors)), replica.theta)

    @cached_property
    def ends(self) -> Mapping[int, int]:
        """Return by share how far its data go: those that its record merges, or, once loaded, all that were merged."""
        if self.record is None:
            return self.chain.ends
        return ranges.ends(held for member in self.record.members for held in member.data)

    @property
    def merges(self) -> bool:
        """Whether a round made it: the log was not loaded with it, nor rolled back, nor closed."""
        return self.record is not None and self.record.entry == "version"

    @property
    def how(self) -> How:
        """How it is applied by a learner whose value is valid: nothing is kept beside the end of a log."""
        if self.record is None:
            return "reload"
        return "reset" if self.record.entry == "close" else "version"


@dataclass(frozen=True)
class Application:
    """A version to be applied, by reference."""

    fragment: int
    version: int
    how: How


@dataclass(frozen=True)
class FragmentSnapshot:
    """A fragment as of the last boundary. ``reader`` gives its values, float32 [size]; None where there are none."""

    reader: Reader | None
    steps: int
    tokens: int
    data: list[Range]
    step: int  # of the learner's own, after which it was taken

    @property
    def is_on_host(self) -> bool:
        """Whether the values can be read without waiting for a device."""
        return isinstance(self.reader, HostReader)


@dataclass(frozen=True)
class DueOffer:
    """An offer to be made: of a snapshot, to the round that makes ``version``, with so many bits."""

    fragment: int
    version: int
    bits: Bits
    snapshot: FragmentSnapshot


@dataclass
class FragmentState:
    """A learner's knowledge of one fragment. ``delta`` counts, ``values`` (None where there are no arrays) goes along."""

    index: int
    delta: DeltaState
    newest: FragmentVersion  # folded last
    quiet: QuietFragments = field(repr=False, compare=False)  # of all fragments of the learner
    values: DeltaValues | None = None
    pending: deque[FragmentVersion] = field(default_factory=deque)  # in the log's order
    phase: Phase = Phase.JOINING
    snapshot: FragmentSnapshot | None = None
    sent: int = 0  # stream sequence of the newest offer's head
    version_step: int = 0  # own step at which the base was applied
    settled_step: int = 0  # own step up to which ``delta`` has counted
    last: FragmentVersion | None = None  # applied
    last_is_whole: bool = False  # all that its log has merged was taken over, and not the version alone
    # the newest round announced
    open_version: int = 0
    epoch: int = 0  # of its owner
    closing: bool = False
    steps_between: int = 0  # two rounds, as its owner said last
    bits: Bits = 32  # of an answer to it
    answered: int = 0  # version of the newest round answered
    answer_step: int | None = None  # own step with whose value it was answered first, or could have been; None: none ended yet
    awaited: bool = False  # a step may wait for its version: its owner is the one that announced it first
    opened_at_s: float | None = None  # when it was first heard of
    opened_step: int | None = None  # own steps taken by then
    period: MovingAverage = field(default_factory=MovingAverage)  # seconds from round to round

    def happen(self, event: OfferEvent) -> None:
        """Go to the next phase.

        Raises:
            ValueError: this cannot happen in this phase.
        """
        after = TRANSITIONS[self.phase, event]
        if after is None:
            raise ValueError(f"fragment {self.index}: {event.value} while {self.phase.value}")
        self.phase = after
        self.quiet.wake(self.index)

    def accepts(self, event: OfferEvent) -> bool:
        """Whether an event can happen in this phase."""
        return TRANSITIONS[self.phase, event] is not None

    @property
    def sending(self) -> bool:
        """Whether an offer is under way."""
        return self.phase in (Phase.ENCODING, Phase.SENDING)

    @property
    def ends(self) -> Mapping[int, int]:
        """By share, how far the data of the version applied last go."""
        if self.last is None:
            return {}
        return self.last.chain.ends if self.last_is_whole else self.last.ends

    def quiet_until(self) -> tuple[float, float]:
        """Return the own step and the time before which a boundary finds nothing to do here, unless something happens.

        No version waits, no round is open, and none is expected. Where learners wait for rounds this does not hold.
        """
        is_busy = self.pending or self.phase is not Phase.READY or self.open_version != self.delta.base_version
        if is_busy or self.snapshot is not None or self.opened_step is None or self.newest.chain.closed:
            return NOW, NOW
        expected_s = math.inf
        if self.opened_at_s is not None and self.period.value is not None:
            expected_s = self.opened_at_s + self.period.value
        return self.opened_step + self.steps_between - 1, expected_s

    def is_expected_by(self, at_s: float) -> bool:
        """Return whether the next round should be open at a time, by the usual distance of the rounds before."""
        return self.opened_at_s is not None and self.period.value is not None and at_s >= self.opened_at_s + self.period.value

    @property
    def wants_answer(self) -> bool:
        """Whether a round is open that this learner could answer, had it a snapshot."""
        return (
            self.open_version == self.delta.base_version + 1
            and self.answered < self.open_version
            and not self.pending
            and not self.sending
        )

    def copy(self) -> FragmentState:
        """Return a state of which versions can be applied by themselves; it shares the arrays, and writes none."""
        copied = copy(self)  # a tenth of the time of dataclasses.replace
        copied.delta, copied.values, copied.pending = self.delta.copy(), None, self.pending.copy()
        return copied

    # ---- the log

    def restored(self, version_step: int) -> None:
        """Take the learner's value for the version that waits, which was applied after ``version_step`` steps."""
        self.happen(OfferEvent.RESTORED)
        self.last = replace(self.pending.popleft(), theta=None)  # the checkpoint has its own
        self.version_step = version_step

    def queue(self, version: FragmentVersion) -> None:
        """Have a later boundary apply ``version``, unless its entry changes no value."""
        self.happen(OfferEvent.QUEUED)
        self.newest = version
        if version.record is None or version.record.entry != "takeover":
            self.pending.append(version)

    def rewind(self, version: FragmentVersion) -> None:
        """Go back to what the log has; rounds of versions that are gone are forgotten."""
        self.happen(OfferEvent.REWOUND)
        self.pending.clear()
        self.queue(version)
        self.open_version = self.answered = self.epoch = 0
        self.closing, self.opened_at_s, self.opened_step = False, None, None
        self.answer_step, self.awaited = None, False

    def apply(self, application: Application, step: int) -> tuple[FragmentVersion, ApplyOutcome]:
        """Take over the version that ``application`` names; return it, and how much of the displacement stays.

        Raises:
            ValueError: it is not the next version that waits.
        """
        reset = application.how == "reset"
        version = self._next(reset)
        found = version and ("reset" if reset else version.how, version.chain.version)
        if version is None or found != (application.how, application.version):
            raise ValueError(f"fragment {self.index}: asked to apply {application}, but the next one is {found}")
        self.happen(OfferEvent.RESET if reset else OfferEvent.APPLIED)
        if reset or version.record is None:
            carried = self.delta.reload(version.chain, invalid=reset)
        else:
            carried = self.delta.apply(version.record)
        self.last, self.last_is_whole = version, reset
        self.version_step = step
        return version, carried

    def _next(self, reset: bool) -> FragmentVersion | None:
        if not reset:
            return self.pending.popleft() if self.pending else None
        while self.pending and self.pending[0].chain.sequence <= self.newest.chain.sequence:
            self.pending.popleft()
        return self.newest

    # ---- rounds

    def hear(self, announced: Announcement, bits: Bits, steps: int, step: int, now_s: float, *, closing: bool) -> None:
        """Take in the announcement of a round, to which answers of ``bits`` are wanted here, after own step ``step``.

        ``steps``, between two rounds, and ``closing`` are as believed.
        """
        self.happen(OfferEvent.ANNOUNCED)
        # by the log alone: one that announced a greater epoch may have lost its takeover entry with a server's last writes
        if announced.epoch > self.epoch:
            # a new owner, or the same again after a fence, may have nothing of what its predecessor was sent
            self.epoch, self.answered, self.awaited = announced.epoch, 0, False
        next_version = self.newest.chain.version + 1  # its round is open whatever was announced: a log may go back
        if announced.version > self.open_version or announced.version == next_version != self.open_version:
            if self.opened_at_s is not None and 0 < self.open_version < announced.version:
                self.period.add((now_s - self.opened_at_s) / (announced.version - self.open_version))
            self.opened_at_s, self.opened_step = now_s, step
            self.open_version, self.closing = announced.version, False
            self.answer_step, self.awaited = None, True
        # announcements may overtake one another: an earlier one does not make it a round like any other again
        if closing and announced.version == self.open_version and not self.closing:
            self.closing, self.answered = True, 0  # whatever was answered before is not all there is
        if announced.version == self.open_version:
            self.bits, self.steps_between = bits, steps

    def reopen(self) -> None:
        """Answer the open round again: its answer is gone."""
        self.happen(OfferEvent.REOPENED)
        self.answered = 0

    def answer_again(self, refused: int) -> None:
        """Answer the open round again if it was answered by offer ``refused``, which no merge will have."""
        if refused == self.delta.next_number - 1 and not self.sending:
            self.reopen()

    def answer(self) -> DueOffer | None:
        """Answer the open round with the snapshot; None if it holds no step."""
        self.answered = self.open_version
        if self.answer_step is None and self.snapshot is not None:
            self.answer_step = self.snapshot.step
        if self.snapshot is None or not self.snapshot.steps:
            self.happen(OfferEvent.DECLINED)
            return None
        return self.offer(self.open_version, self.bits)

    def offer(self, round_version: int, bits: Bits) -> DueOffer:
        """Begin to make an offer of the snapshot to a round."""
        self.happen(OfferEvent.OFFERED)
        assert self.snapshot is not None
        answer, self.snapshot = DueOffer(self.index, round_version, bits, self.snapshot), None
        return answer

    def encoded(self, answer: DueOffer, encoded: EncodedOffer | None) -> PendingDelta:
        """Count the offer that was quantised."""
        self.happen(OfferEvent.ENCODED)
        snapshot = answer.snapshot
        pending = self.delta.offer(snapshot.steps, snapshot.tokens, snapshot.data, answer.version, answer.bits)
        if self.values is not None and encoded is not None:
            self.values.hold(pending.identity, encoded)
        return pending
