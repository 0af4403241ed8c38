"""One fragment's pending delta: what a learner has done, what it has offered, and what of that the log holds.

The learner's displacement is its value minus its base, the version it last applied. An offer states the displacement as of a
snapshot; a record then says whether it was merged, and :meth:`DeltaState.apply` decides what stays (protocol.md, section 11):

================================================  ==========================================================
the version                                       the learner's value becomes
================================================  ==========================================================
merges the offer that answered its own round      Theta + (since the offer), without ``carry.overlap`` Theta
is any other, after a single step                 Theta + (since the base), without ``carry.overlap`` Theta
is any other                                      Theta
================================================  ==========================================================

A single step since the base, no part of which is in an offer, ended at the boundary that applies the version: no boundary came
at which it could have been offered. Where a fragment has a round in each step, or a step takes as long as a cycle, a learner
that dropped it would have nothing to offer in the middle of its next step, drop that one too, and never be merged again.

Steps, tokens and batches follow: they are merged, or stay with the displacement, or are lost. An offer whose displacement was
dropped may still be merged by a later version; its tokens are counted back then. Quantisation errors of merged offers are added
to the next offer, and live apart from the parameters, where they measured worse.

State that is merged is Theta after either: an average of values, and progress since an offer is no difference to be added to
another one. Its counts are those of a parameter.

:class:`DeltaState` holds the counts and decides; it needs no arrays (the simulator has none). :class:`DeltaValues` holds the
arrays and carries out the decision. All of it is pure; the caller serialises the calls for one fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core.log.chain import Chain
from diloco.core.tensors import quantise, ranges
from diloco.core.tensors.compiled import BLOCK, kernels
from diloco.core.tensors.float_mode import exact
from diloco.settings.run import RunSettings
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.fields import Bits, Range
from diloco.wire.offers import Answer, Offer

Vector = NDArray[np.float32]
Raw = NDArray[np.uint8]
ERROR_BITS: Bits = 8  # of the quantisation errors that a learner keeps
PLAIN_BITS: Bits = 32  # of those of earlier versions, in their states and on their tapes
CHUNK = 1 << 16  # values made at a time, so that they are still in the cache for the next pass
_NO_ERROR = np.empty(0, np.uint8)
_PLAIN = ("base_version", "after", "steps", "tokens", "lost_tokens", "data")
_PLAIN_OFFER = ("bits", "dropped")


@dataclass(frozen=True)
class EncodedOffer:
    """The arrays of an offer: ``body``, and ``rest``, the body of its quantisation error; both uint8 [bytes]."""

    body: Raw
    rest: Raw


@dataclass(frozen=True)
class Offered:
    """The displacement that a pending offer states, as far as what is kept of it tells: ``error`` less body and rest.

    ``bits`` are the body's, ``error_bits`` those of ``encoded.rest`` and ``error``, the error before the offer, uint8 [bytes].
    """

    encoded: EncodedOffer
    bits: Bits
    error: Raw | None
    error_bits: Bits


@dataclass(frozen=True)
class Baseline:
    """The value that a learner's progress is counted from: ``base``, float32 [size of the fragment], plus what was offered.

    A slice of it is made where it is asked for, so that the whole takes no memory. Its arrays are never written to.
    """

    base: Vector
    offered: Offered | None = None

    @exact
    def __getitem__(self, where: slice) -> Vector:
        """Return a slice of consecutive values, float32 [its length], which must not be written to."""
        if self.offered is None:
            return self.base[where]
        start, stop, step = where.indices(self.base.size)
        assert step == 1
        out = np.empty(stop - start, np.float32)
        begin = start - start % BLOCK
        scratch = np.empty((2, min(CHUNK, stop - begin)), np.float32)
        for first in range(begin, stop, CHUNK):
            last = min(first + CHUNK, stop)
            moved, more = scratch[:, : last - first]
            self._displacement(self.offered, first, moved, more)
            known = max(first, start)
            np.add(self.base[known:last], moved[known - first :], out=out[known - start : last - start])
        return out

    def keep_progress(self, values: Vector, theta: Vector, start: int, alpha: float) -> None:
        """Write ``theta + (values - reference)`` over values that begin at ``start`` of the fragment, in one pass.

        The bits are those of the operations one by one. ``values`` is float32 [any length], and ``theta`` float32 [size of the
        fragment]. With ``alpha`` the values become ``alpha * values + (1 - alpha) * new``.

        Raises:
            ValueError: the reference is the base itself.
        """
        offered = self.offered
        if offered is None:
            raise ValueError("nothing was offered")
        encoded = offered.encoded.body, offered.encoded.rest, _NO_ERROR if offered.error is None else offered.error
        bits = offered.bits, offered.error_bits
        kernels.keep_progress(values, theta, self.base, start, encoded, bits, (alpha, 1 - alpha))

    def _displacement(self, offered: Offered, start: int, out: Vector, scratch: Vector) -> None:
        """Compute the displacement from ``start``, a multiple of the block, into ``out``; ``scratch`` is of its size."""
        size, encoded, bits = self.base.size, offered.encoded, offered.error_bits
        quantise.dequantise(encoded.body, size, offered.bits, out, start=start)
        out += quantise.dequantise(encoded.rest, size, bits, scratch, start=start)
        if offered.error is None:
            np.negative(out, out=out)
        else:
            np.subtract(quantise.dequantise(offered.error, size, bits, scratch, start=start), out, out=out)


@dataclass(frozen=True)
class VersionWrite:
    """How to write a version into the model: ``theta + (value - reference)``, or plainly ``theta`` without a reference.

    ``theta`` is float32 [size of the fragment], and so is the reference.
    """

    theta: Vector
    reference: Baseline | Vector | None
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
class ApplyOutcome:
    """The outcome of applying a version: whether progress is kept, since the offer that it merges or else since the base.

    It is since the base too where that offer was dropped.
    """

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
    state: bool = False  # of state that is merged: counts go on as ever, and each version replaces the value
    keeps_single_step: bool = False  # where no version merges it, and ``overlap`` is kept

    def step(self, tokens: int, share: int | None, batch: int, steps: int = 1) -> None:
        """Count inner steps on consecutive batches of a share of the data; ``tokens`` are those of all of them.

        Without a share they were on data of the learner's own, of which no range is kept.
        """
        self.steps += steps
        self.tokens += tokens
        if share is None:
            return
        if self.data:
            last_share, first, count = self.data[-1]
            if (last_share, first + count) == (share, batch):  # as usual: on from where it was
                self.data = [*self.data[:-1], (share, first, count + steps)]
                return
        self.data = ranges.normal([*self.data, (share, batch, steps)])

    def lose(self) -> None:
        """Give up all that is not merged, as where its arrays are gone; offers may be merged yet, and count then."""
        self._missed()

    def copy(self) -> DeltaState:
        """Return a state that goes on by itself."""
        copied = copy(self)
        copied.pending = [copy(offer) for offer in self.pending]
        return copied

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

    def apply(self, record: Record) -> ApplyOutcome:
        """Take over the version that ``record`` makes."""
        mine = next((member for member in record.members if member.learner == self.learner), None)
        unoffered = self.steps == 1 and all(offer.dropped for offer in self.pending)
        overlaps = self.overlap and not record.closing  # no version follows a closing one, which could merge what is kept
        keeps = unoffered and overlaps and self.keeps_single_step
        if record.rolled_back is not None:
            carried = replace(self._begin_again(), reset=True)
        elif mine is not None:
            identity = mine.incarnation, mine.number
            carried = self._merged(record.version, identity, overlaps=overlaps, keeps_dropped=keeps)
        else:
            carried = self._keep() if keeps else self._missed()
        self.base_version, self.base_hash = record.version, record.state_hash
        return carried

    def reload(self, chain: Chain, *, invalid: bool = False) -> ApplyOutcome:
        """Take over the log's state without the versions in between (a restart, a long absence, an invalid value).

        At the version of the base all stays as it is, if the log has merged nothing of this learner meanwhile and its value is
        not ``invalid``. Else the displacement is dropped, but for the steps since an offer that the log's version has merged.
        """
        merged = chain.cursor(self.learner)
        if merged != self.after:
            carried = self._merged(chain.version, merged, overlaps=self.overlap and not chain.closed)
        elif chain.version == self.base_version and not chain.closed:
            carried = self._keep()
        else:
            carried = self._missed()
        if invalid or self.base_version < chain.floor:
            carried = replace(self._begin_again(), forgotten=carried.forgotten)
        self.base_version, self.base_hash = chain.version, chain.state_hash
        return replace(carried, reset=True)

    def _missed(self) -> ApplyOutcome:
        for offer in self.pending:
            offer.dropped = True
        return self._drop()

    def _merged(self, version: int, identity: tuple[int, int], *, overlaps: bool, keeps_dropped: bool = False) -> ApplyOutcome:
        offer = next((o for o in self.pending if o.identity == identity), None)
        self.after = identity
        self.pending.clear()  # newer offers state an older `after`: they will never be merged
        if offer is None:  # made before a restart, or void: what has been done since belongs to no known base
            return self._drop(forgotten=True, cleared=True)
        stated = offer.stated
        if offer.dropped:  # all that is in the value came after it, to no version's round
            self.lost_tokens -= stated.tokens
            return self._keep(offer) if keeps_dropped else self._drop(merged=offer)
        self.steps, self.tokens = self.steps - stated.steps, self.tokens - stated.tokens
        self.data = ranges.subtract(self.data, stated.data)
        return self._keep(offer) if overlaps and stated.round == version else self._drop(merged=offer)

    def _begin_again(self) -> ApplyOutcome:
        """Keep nothing: neither the displacement nor what was left over of merged offers, and wait for no offer's fate."""
        self.pending.clear()
        return self._drop(cleared=True)

    def _keep(self, merged: PendingDelta | None = None) -> ApplyOutcome:
        # without tokens there is nothing to keep: what differs from the base may be what a newcomer began with
        return ApplyOutcome(self.tokens > 0 and not self.state, merged)

    def _drop(self, *, merged: PendingDelta | None = None, forgotten: bool = False, cleared: bool = False) -> ApplyOutcome:
        self.lost_tokens += self.tokens
        self.steps, self.tokens, self.data = 0, 0, []
        return ApplyOutcome(False, merged, forgotten, cleared)


@dataclass
class DeltaValues:
    """The arrays of one fragment's pending delta: ``base``, float32 [size of the fragment], and ``error``, uint8 [bytes].

    Snapshots are the learner's values. With ``as_read`` they are offered as they are: state, or the gradients of steps since
    the base, which its value need not hold (``theta - (theta - g)`` would round a small ``g`` to the precision of ``theta``).

    ``base`` is never written to; it may be shared with the replica that folds the log. Kept of a pending offer, until it is
    dropped, are its body and its quantisation error: that becomes the error as it is, and the displacement follows from both.
    A dropped offer that is merged after all leaves no error.

    Quantisation errors are quantised themselves, to ``error_bits``. Where a version merges an offer and keeps the progress
    since, nothing is lost thereby: the reference is made of the same error, so the difference stays in the learner's value,
    and goes with the next offer. Else it is lost: with 8 bits at most 1/254 of the largest error of its block.
    """

    base: Vector
    error_feedback: bool
    as_read: bool
    error_bits: Bits = ERROR_BITS
    error: Raw | None = None
    held: dict[tuple[int, int], EncodedOffer] = field(default_factory=dict)  # by incarnation and number of an offer

    @classmethod
    def of(cls, base: Vector, settings: RunSettings, error_bits: Bits = ERROR_BITS, *, state: bool) -> DeltaValues:
        """Return those of a fragment that begins with ``base``, float32 [size]; ``state``: of state that is merged."""
        return cls(base, settings.codec.error_feedback, state or settings.offers_gradients, error_bits)

    @exact
    def encode(self, snapshot: Vector, bits: Bits) -> EncodedOffer:
        """Quantise the outer gradient of ``snapshot``, float32 [size], which is overwritten.

        Raises:
            NonFiniteError: the snapshot holds NaN or infinity.
        """
        gradient = snapshot if self.as_read else np.subtract(self.base, snapshot, out=snapshot)
        if self.error is not None:
            _add(self.error, self.error_bits, gradient)
        body = quantise.quantise(gradient, bits, error=gradient)
        return EncodedOffer(body, quantise.quantise(gradient, self.error_bits))

    def hold(self, identity: tuple[int, int], encoded: EncodedOffer) -> None:
        """Keep the arrays of an offer, named by incarnation and number, until its fate is known, or it is dropped."""
        self.held[identity] = encoded

    def apply(self, carried: ApplyOutcome, pending: Iterable[Unmerged], theta: Vector) -> VersionWrite:
        """Carry out what the counts have just decided; ``pending`` are the offers whose fate is unknown after it.

        ``theta``, float32 [size], becomes the base.
        """
        prepared = self.prepare(carried, theta)
        self.commit(carried, pending, theta)
        return prepared

    def prepare(self, carried: ApplyOutcome, theta: Vector) -> VersionWrite:
        """Return how a version, ``theta`` float32 [size], is written into the model; nothing changes here."""
        merged, offered = carried.merged, None
        if not carried.keeps:
            return VersionWrite(theta, None, carried.reset)
        if merged is not None and not merged.dropped:
            offered = Offered(self.held[merged.identity], merged.bits, self.error, self.error_bits)
        return VersionWrite(theta, Baseline(self.base, offered), carried.reset)

    def commit(self, carried: ApplyOutcome, pending: Iterable[Unmerged], theta: Vector) -> None:
        """Take over a version that was written, ``theta`` float32 [size], as the base."""
        merged = carried.merged
        if carried.cleared:
            self.error = None
        elif merged is not None and self.error_feedback:
            self.error = None if merged.dropped else self.held[merged.identity].rest
        self.held = {offer.identity: self.held[offer.identity] for offer in pending if not offer.dropped}
        self.base = theta


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
    """Return the arrays by name for a checkpoint: ``base``, float32 [size]; bodies and quantisation errors, uint8 [bytes].

    Quantisation errors of 32 bits are float32 [size], as in states of earlier versions. ``pending`` are the offers whose fate
    is unknown, by whose order they are named.
    """

    def shown(error: Raw) -> NDArray[Any]:
        return error.view(np.float32) if values.error_bits == PLAIN_BITS else error

    arrays: dict[str, NDArray[Any]] = {"base": values.base}
    if values.error is not None:
        arrays["error"] = shown(values.error)
    for i, offer in enumerate(pending):
        if not offer.dropped:
            encoded = values.held[offer.identity]
            arrays[f"offer/{i}/body"], arrays[f"offer/{i}/rest"] = encoded.body, shown(encoded.rest)
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

    Those of an earlier version, whose quantisation errors are float32 [size], serve too. ``pending`` is as it was then.

    Raises:
        LookupError, ValueError: an array is missing, or of another size.
        NonFiniteError: a quantisation error of an earlier version is NaN or infinite.
    """
    size, bits = values.base.size, values.error_bits
    if arrays["base"].shape != values.base.shape:
        raise ValueError(f"a fragment of {arrays['base'].size} parameters, expected {size}")

    def taken(name: str) -> Raw:
        array = arrays[name]
        if array.dtype == np.float32 and array.shape == values.base.shape:
            return quantise.quantise(array, bits)
        if array.dtype != np.uint8 or array.shape != (quantise.body_bytes(size, bits),):
            raise ValueError(f"array {name!r} is {array.dtype} {array.shape}, expected {size} values in {bits} bits")
        return array

    restored = replace(values, base=arrays["base"], error=taken("error") if "error" in arrays else None, held={})
    for i, offer in enumerate(pending):
        if not offer.dropped:
            restored.hold(offer.identity, EncodedOffer(arrays[f"offer/{i}/body"], taken(f"offer/{i}/rest")))
    return restored


def _add(error: Raw, bits: Bits, out: Vector) -> None:
    """Add a quantisation error, uint8 [bytes], to ``out``, float32 [size]."""
    scratch = np.empty(min(CHUNK, out.size), np.float32)
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        part += quantise.dequantise(error, out.size, bits, scratch[: part.size], start=start)


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that JSON gives in another type."""
    incarnation, number = plain["after"]
    data = ranges.normal((int(share), int(first), int(count)) for share, first, count in plain["data"])
    return {"after": (int(incarnation), int(number)), "base_hash": bytes.fromhex(plain["base_hash"]), "data": data}
