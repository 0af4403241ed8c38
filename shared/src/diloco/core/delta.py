"""One fragment's pending delta: what a learner has done, what it has offered, and what of that the log holds.

The learner's displacement is its value minus its base, the version it last applied. An offer states the displacement as of a
snapshot; a record then says whether it was merged, and :meth:`DeltaState.apply` decides what stays (protocol.md, section 11):

================================================  ==========================================================
the version                                       the learner's value becomes
================================================  ==========================================================
merges the offer that answered its own round      Theta + (since the offer), without ``carry.overlap`` Theta
is any other                                      Theta
================================================  ==========================================================

Steps, tokens and batches follow: they are merged, or stay with the displacement, or are lost. An offer whose displacement was
dropped may still be merged by a later version; its tokens are counted back then. Quantisation errors of merged offers are added
to the next offer, and live apart from the parameters, where they measured worse.

:class:`DeltaState` holds the counts and decides; it needs no arrays (the simulator has none). :class:`DeltaValues` holds the
arrays and carries out the decision. All of it is pure; the caller serialises the calls for one fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core import quantise, ranges
from diloco.core.chain import Chain
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.fields import Bits, Range
from diloco.wire.offers import Answer, Offer

Vector = NDArray[np.float32]
_PLAIN = ("base_version", "after", "steps", "tokens", "lost_tokens", "data")
_PLAIN_OFFER = ("bits", "dropped")


@dataclass(frozen=True)
class Apply:
    """How to write a version into the model: ``theta + (value - reference)``, or plainly ``theta`` without a reference.

    ``theta`` and ``reference`` are float32 [size of the fragment].
    """

    theta: Vector
    reference: Vector | None
    reset: bool = False  # the log was loaded or rolled back: nothing of the value is to be mixed in (apply.alpha)


@dataclass
class PendingDelta:
    """An offer whose fate is unknown; ``stated`` is what others know of it."""

    stated: Answer
    bits: Bits
    dropped: bool = False  # its displacement is in the learner's value no more, and its tokens are counted as lost

    @property
    def identity(self) -> tuple[int, int]:
        """Incarnation and number."""
        return self.stated.incarnation, self.stated.number

    def message(self, fragment: int, body: Body) -> Offer:
        """Return the offer as it is sent."""
        return Offer(fragment=fragment, bits=self.bits, body=body, **msgspec.structs.asdict(self.stated))


class Unmerged(Protocol):
    """An offer whose fate is unknown, as far as its arrays are concerned (:class:`PendingDelta`)."""

    @property
    def identity(self) -> tuple[int, int]:
        """Incarnation and number."""

    @property
    def bits(self) -> Bits:
        """Of a quantised value."""

    @property
    def dropped(self) -> bool:
        """Whether nothing of it is."""


@dataclass(frozen=True)
class Carried:
    """The outcome of applying a version: whether progress is kept, since the offer that it merges or else since the base."""

    keeps: bool
    merged: Unmerged | None = None  # the own offer that the version merges
    forgotten: bool = False  # an own offer was merged that is not pending here: it was made before a restart, or was void
    cleared: bool = False  # neither displacement nor quantisation error stays
    reset: bool = False  # the log was loaded or rolled back


@dataclass
class DeltaState:
    """The counts of one fragment's pending delta."""

    learner: str
    incarnation: int
    overlap: bool  # ``carry.overlap``
    base_version: int
    base_hash: bytes
    after: tuple[int, int] = (0, 0)  # own offer last known merged
    steps: int = 0  # not merged yet
    tokens: int = 0
    lost_tokens: int = 0
    data: list[Range] = field(default_factory=list)  # batches that the displacement holds; never changed in place
    next_number: int = 1
    pending: list[PendingDelta] = field(default_factory=list)

    def step(self, tokens: int, share: int, batch: int, steps: int = 1) -> None:
        """Count inner steps on consecutive batches of a share of the data; ``tokens`` are those of all of them."""
        self.steps += steps
        self.tokens += tokens
        if self.data:
            last_share, first, count = self.data[-1]
            if (last_share, first + count) == (share, batch):  # as usual: on from where it was
                self.data = [*self.data[:-1], (share, first, count + steps)]
                return
        self.data = ranges.normal([*self.data, (share, batch, steps)])

    def less(self, tokens: int, share: int, batch: int) -> DeltaState:
        """Return the counts without the step that was counted last."""
        data = ranges.subtract(self.data, [(share, batch, 1)])
        return replace(self, steps=self.steps - 1, tokens=self.tokens - tokens, data=data)

    def lose(self) -> None:
        """Give up all that is not merged, as where its arrays are gone; offers may be merged yet, and count then."""
        self._missed()

    def copy(self) -> DeltaState:
        """Return a state that goes on by itself."""
        return replace(self, pending=[replace(offer) for offer in self.pending])

    def offer(self, steps: int, tokens: int, data: list[Range], round_version: int, bits: Bits) -> PendingDelta:
        """Count an offer of ``steps``, ``tokens`` and ``data``, this fragment's when the snapshot was taken."""
        stated = Answer(
            learner=self.learner,
            incarnation=self.incarnation,
            number=self.next_number,
            after=self.after,
            round=round_version,
            base_version=self.base_version,
            base_hash=self.base_hash,
            steps=steps,
            tokens=tokens,
            lost_tokens=self.lost_tokens,
            data=data,
        )
        offer = PendingDelta(stated, bits)
        self.next_number += 1
        self.pending.append(offer)
        return offer

    def apply(self, record: Record) -> Carried:
        """Take over the version that ``record`` makes."""
        mine = next((member for member in record.members if member.learner == self.learner), None)
        if record.rolled_back is not None:
            carried = replace(self._begin_again(), reset=True)
        elif mine is None:
            carried = self._missed()
        else:
            carried = self._merged(record.version, (mine.incarnation, mine.number))
        self.base_version, self.base_hash = record.version, record.state_hash
        return carried

    def reload(self, chain: Chain, *, invalid: bool = False) -> Carried:
        """Take over the log's state without the versions in between (a restart, a long absence, an invalid value).

        At the version of the base all stays as it is, if the log has merged nothing of this learner meanwhile and its value is
        not ``invalid``. Else the displacement is dropped, but for the steps since an offer that the log's version has merged.
        """
        merged = chain.cursor(self.learner)
        if merged != self.after:
            carried = self._merged(chain.version, merged)
        elif chain.version == self.base_version:
            carried = self._keep()
        else:
            carried = self._missed()
        if invalid or self.base_version < chain.floor:
            carried = replace(self._begin_again(), forgotten=carried.forgotten)
        self.base_version, self.base_hash = chain.version, chain.state_hash
        return replace(carried, reset=True)

    def _missed(self) -> Carried:
        for offer in self.pending:
            offer.dropped = True
        return self._drop()

    def _merged(self, version: int, identity: tuple[int, int]) -> Carried:
        offer = next((o for o in self.pending if o.identity == identity), None)
        self.after = identity
        self.pending.clear()  # newer offers state an older `after`: they will never be merged
        if offer is None:  # made before a restart, or void: what has been done since belongs to no known base
            return self._drop(forgotten=True, cleared=True)
        stated = offer.stated
        if offer.dropped:  # all that is in the value came after it, to no version's round
            self.lost_tokens -= stated.tokens
            return self._drop(merged=offer)
        self.steps, self.tokens = self.steps - stated.steps, self.tokens - stated.tokens
        self.data = ranges.subtract(self.data, stated.data)
        return self._keep(offer) if self.overlap and stated.round == version else self._drop(merged=offer)

    def _begin_again(self) -> Carried:
        """Keep nothing: neither the displacement nor what was left over of merged offers, and wait for no offer's fate."""
        self.pending.clear()
        return self._drop(cleared=True)

    def _keep(self, merged: PendingDelta | None = None) -> Carried:
        # without tokens there is nothing to keep: what differs from the base may be what a newcomer began with
        return Carried(self.tokens > 0, merged)

    def _drop(self, *, merged: PendingDelta | None = None, forgotten: bool = False, cleared: bool = False) -> Carried:
        self.lost_tokens += self.tokens
        self.steps, self.tokens, self.data = 0, 0, []
        return Carried(False, merged, forgotten, cleared)


@dataclass(frozen=True)
class Encoded:
    """The arrays of an offer: ``body``, uint8 [bytes], and ``rest``, float32 [size], which quantisation left over."""

    body: NDArray[np.uint8]
    rest: Vector


@dataclass
class DeltaValues:
    """The arrays of one fragment's pending delta; ``base`` and ``error`` are float32 [size of the fragment].

    Snapshots are the learner's values; with ``gradients`` they are the gradients of its steps since the base, which its value
    need not hold: ``theta - (theta - g)`` would round a small ``g`` to the precision of ``theta``.

    ``base`` is never written to; it may be shared with the replica that folds the log. Kept of a pending offer, until it is
    dropped, are its body and what quantisation left over of it: that becomes the error as it is, and the displacement follows
    from both. A dropped offer that is merged after all leaves no error.
    """

    base: Vector
    error_feedback: bool
    gradients: bool
    error: Vector | None = None
    held: dict[tuple[int, int], Encoded] = field(default_factory=dict)  # by incarnation and number of an offer

    def encode(self, snapshot: Vector, bits: Bits) -> Encoded:
        """Quantise the outer gradient of ``snapshot``, float32 [size], which is overwritten.

        Raises:
            NonFiniteError: the snapshot holds NaN or infinity.
        """
        gradient = snapshot if self.gradients else np.subtract(self.base, snapshot, out=snapshot)
        if self.error is not None:
            gradient += self.error
        return Encoded(quantise.quantise(gradient, bits, error=gradient), gradient)

    def hold(self, identity: tuple[int, int], encoded: Encoded) -> None:
        """Keep the arrays of an offer, named by incarnation and number, until its fate is known, or it is dropped."""
        self.held[identity] = encoded

    def apply(self, carried: Carried, pending: Iterable[Unmerged], theta: Vector) -> Apply:
        """Carry out what the counts have just decided; ``pending`` are the offers whose fate is unknown after it.

        ``theta``, float32 [size], becomes the base.
        """
        prepared = self.prepare(carried, theta)
        self.commit(carried, pending, theta)
        return prepared

    def prepare(self, carried: Carried, theta: Vector) -> Apply:
        """Return how a version, ``theta`` float32 [size], is written into the model; nothing changes here."""
        reference: Vector | None = None
        if carried.keeps:
            reference = self.base if carried.merged is None else np.add(self.base, self._displacement(carried.merged))
        return Apply(theta, reference, carried.reset)

    def commit(self, carried: Carried, pending: Iterable[Unmerged], theta: Vector) -> None:
        """Take over a version that was written, ``theta`` float32 [size], as the base."""
        merged = carried.merged
        if carried.cleared:
            self.error = None
        elif merged is not None and self.error_feedback:
            self.error = None if merged.dropped else self.held[merged.identity].rest
        self.held = {offer.identity: self.held[offer.identity] for offer in pending if not offer.dropped}
        self.base = theta

    def _displacement(self, offer: Unmerged) -> Vector:
        """Return an offer's displacement, float32 [size]."""
        encoded = self.held[offer.identity]
        moved = quantise.dequantise(encoded.body, encoded.rest.size, offer.bits)
        moved += encoded.rest
        if self.error is None:
            np.negative(moved, out=moved)
        else:
            np.subtract(self.error, moved, out=moved)
        return moved


def dump(state: DeltaState) -> dict[str, Any]:
    """Return the counts as plain values, for a checkpoint."""
    plain: dict[str, Any] = {name: getattr(state, name) for name in _PLAIN} | {"base_hash": state.base_hash.hex()}
    plain["pending"] = []
    for offer in state.pending:
        stated = msgspec.structs.asdict(offer.stated) | {"base_hash": offer.stated.base_hash.hex()}
        del stated["learner"]
        plain["pending"].append(stated | {name: getattr(offer, name) for name in _PLAIN_OFFER})
    return plain


def dump_arrays(values: DeltaValues, pending: Sequence[Unmerged]) -> dict[str, NDArray[Any]]:
    """Return the arrays by name, float32 [size] and (bodies) uint8 [bytes], for a checkpoint.

    ``pending`` are the offers whose fate is unknown, by whose order they are named.
    """
    arrays: dict[str, NDArray[Any]] = {"base": values.base}
    if values.error is not None:
        arrays["error"] = values.error
    for i, offer in enumerate(pending):
        if not offer.dropped:
            encoded = values.held[offer.identity]
            arrays[f"offer/{i}/body"], arrays[f"offer/{i}/rest"] = encoded.body, encoded.rest
    return arrays


def load(state: DeltaState, plain: Mapping[str, Any]) -> DeltaState:
    """Return counts as :func:`dump` gave them, for the process that begins with ``state``; its incarnation stays.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: something is missing, or no number.
    """
    offers = []
    for values_of in plain["pending"]:
        named = {name: values_of[name] for name in Answer.__struct_fields__ if name != "learner"}
        stated = Answer(learner=state.learner, **named | _typed(values_of))
        offers.append(PendingDelta(stated, **{name: values_of[name] for name in _PLAIN_OFFER}))
    return replace(state, **{name: plain[name] for name in _PLAIN} | _typed(plain), pending=offers)


def load_arrays(values: DeltaValues, pending: Sequence[Unmerged], arrays: Mapping[str, NDArray[Any]]) -> DeltaValues:
    """Return ``arrays`` as :func:`dump_arrays` gave them, for a process that begins with ``values``.

    They are float32 [size] and (bodies) uint8 [bytes]; ``pending`` is as it was then.

    Raises:
        LookupError, ValueError: an array is missing, or of another size.
    """
    size = values.base.size
    wrong = [name for name, array in arrays.items() if not name.endswith("/body") and array.shape != values.base.shape]
    if wrong:
        raise ValueError(f"a fragment of {arrays[wrong[0]].size} parameters, expected {size}")
    restored = replace(values, base=arrays["base"], error=arrays.get("error"), held={})
    for i, offer in enumerate(pending):
        if not offer.dropped:
            restored.hold(offer.identity, Encoded(arrays[f"offer/{i}/body"], arrays[f"offer/{i}/rest"]))
    return restored


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that JSON gives in another type."""
    incarnation, number = plain["after"]
    data = ranges.normal((int(share), int(first), int(count)) for share, first, count in plain["data"])
    return {"after": (int(incarnation), int(number)), "base_hash": bytes.fromhex(plain["base_hash"]), "data": data}
