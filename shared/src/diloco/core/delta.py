"""One fragment's pending delta: what a learner has done, what it has offered, and what of that the log holds.

The learner's displacement is its value minus its base, the version it last applied. An offer states the displacement as of a
snapshot; a record then says whether it was merged, and :meth:`DeltaState.apply` decides what stays (design.md section 4):

=====================================================  ==========================================
the version                                            the learner's value becomes
=====================================================  ==========================================
merges the offer that answered its own round           Theta + carry.overlap * (since the offer)
merges an offer that came too late for its own round   Theta + carry.late * (since the offer)
merges none of this learner's                          Theta + carry.late * (all displacement)
is a rollback                                          Theta
=====================================================  ==========================================

Steps and tokens follow the same split; the rest is counted as lost, and counted back should a version still merge it. So do
the batches that the displacement was trained on: with a factor between 0 and 1 they stay, with fewer tokens to them, for as
long as a token of the displacement is left. Quantisation errors of merged offers are added to the next offer, and live apart
from the parameters, where they measured worse.

:class:`DeltaState` holds the counts and decides; it needs no arrays (the simulator has none). :class:`DeltaValues` holds the
arrays and carries out the decision. All of it is pure; the caller serialises the calls for one fragment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core import quantise, ranges
from diloco.core.chain import Chain
from diloco.settings.run import CarrySettings
from diloco.wire.body import Body
from diloco.wire.entries import Record
from diloco.wire.fields import Bits, Range
from diloco.wire.offers import Answer, Offer

Vector = NDArray[np.float32]
NOTHING = 1e-6  # a smaller share of a displacement is none: float32 cannot tell what it was a share of
_PLAIN = ("base_version", "after", "steps", "tokens", "lost_tokens", "data", "carried_since")
_PLAIN_OFFER = ("bits", "held_steps", "held_tokens", "kept")


@dataclass(frozen=True)
class Apply:
    """How to write a version into the model: ``theta + factor * (value - reference)``, plainly ``theta`` if factor is 0.

    ``theta`` and ``reference`` are float32 [size of the fragment].
    """

    theta: Vector
    reference: Vector | None
    factor: float
    reset: bool = False  # the log was loaded or rolled back: nothing of the value is to be mixed in (apply.alpha)


@dataclass
class PendingDelta:
    """An offer whose fate is unknown; ``stated`` is what others know of it.

    ``held_steps`` and ``held_tokens`` are what of it is still in the learner's value, and so is the share ``kept`` of its
    displacement: they shrink when a version is applied that did not merge the offer.
    """

    stated: Answer
    bits: Bits
    held_steps: int
    held_tokens: int
    kept: float = 1.0
    dropped: bool = False  # nothing of the displacement is in the learner's value any more

    @property
    def identity(self) -> tuple[int, int]:
        """Incarnation and number."""
        return self.stated.incarnation, self.stated.number

    def message(self, fragment: int, body: Body) -> Offer:
        """Return the offer as it is sent."""
        return Offer(fragment=fragment, bits=self.bits, body=body, **msgspec.structs.asdict(self.stated))


@dataclass(frozen=True)
class Carried:
    """The outcome of applying a version: ``factor`` times the displacement stays, since the base or since a merged offer."""

    factor: float
    merged: PendingDelta | None = None  # the own offer that the version merges
    forgotten: bool = False  # an own offer was merged that is not pending here: it was made before a restart, or was void
    cleared: bool = False  # neither displacement nor quantisation error stays
    reset: bool = False  # the log was loaded or rolled back


@dataclass
class DeltaState:
    """The counts of one fragment's pending delta."""

    learner: str
    incarnation: int
    carry: CarrySettings
    base_version: int
    base_hash: bytes
    after: tuple[int, int] = (0, 0)  # own offer last known merged
    steps: int = 0  # not merged yet
    tokens: int = 0
    lost_tokens: int = 0
    data: list[Range] = field(default_factory=list)  # batches that the displacement holds; never changed in place
    next_number: int = 1
    carried_since: int | None = None  # version from which displacement has been carried over
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
        offer = PendingDelta(stated, bits, held_steps=steps, held_tokens=tokens)
        self.next_number += 1
        self.pending.append(offer)
        return offer

    def apply(self, record: Record) -> Carried:
        """Take over the version that ``record`` makes."""
        mine = next((member for member in record.members if member.learner == self.learner), None)
        if record.rolled_back is not None:
            carried = replace(self._begin_again(), reset=True)
        elif mine is None:
            carried = self._missed(record.version)
        else:
            carried = self._merged(record.version, (mine.incarnation, mine.number), mine.round)
        self.base_version, self.base_hash = record.version, record.state_hash
        return carried

    def reload(self, chain: Chain, *, invalid: bool = False) -> Carried:
        """Take over the log's state without the versions in between (a restart, a long absence, an invalid value).

        The displacement is carried over if the log holds of this learner what is known here, with at most an offer that is
        pending merged meanwhile; it is lost otherwise, or if the learner's value is ``invalid``.
        """
        merged = chain.cursor(self.learner)
        if merged != self.after:
            carried = self._merged(chain.version, merged, answered=0)
        elif chain.version == self.base_version:
            carried = self._keep(1.0 if self.tokens else 0.0)
        else:
            carried = self._missed(chain.version)
        if invalid or self.base_version < chain.floor:
            carried = replace(self._begin_again(), forgotten=carried.forgotten)
        self.base_version, self.base_hash = chain.version, chain.state_hash
        return replace(carried, reset=True)

    def _missed(self, version: int) -> Carried:
        if self.carried_since is None:
            self.carried_since = self.base_version
        late = version - self.carried_since > self.carry.max_versions
        # without tokens there is nothing to carry over: what differs from the base may be what a newcomer began with
        holds = self.tokens > 0
        factor = 0.0 if late or not holds else self.carry.late
        carried = self._keep(factor)
        for offer in self.pending:
            offer.held_steps, offer.held_tokens = int(factor * offer.held_steps), int(factor * offer.held_tokens)
            offer.kept *= factor
            if holds and offer.kept <= NOTHING:  # without tokens it holds an earlier error alone, which is never dropped
                offer.dropped = True
        return carried

    def _merged(self, version: int, identity: tuple[int, int], answered: int) -> Carried:
        offer = next((o for o in self.pending if o.identity == identity), None)
        self.after = identity
        self.pending.clear()  # newer offers state an older `after`: they will never be merged
        self.carried_since = None
        if offer is None:  # made before a restart, or void: what has been done since belongs to no known base
            return self._keep(0.0, forgotten=True, cleared=True)
        self.steps -= offer.held_steps
        self.tokens -= offer.held_tokens
        self.data = ranges.subtract(self.data, offer.stated.data)
        self.lost_tokens -= offer.stated.tokens - offer.held_tokens
        # of a dropped offer nothing is in the value: all that is came after it
        in_time = answered == version and not offer.dropped
        return self._keep(self.carry.overlap if in_time else self.carry.late, merged=offer)

    def _begin_again(self) -> Carried:
        """Keep nothing: neither the displacement nor what was left over of merged offers, and wait for no offer's fate."""
        self.pending.clear()
        return self._keep(0.0, cleared=True)

    def _keep(
        self, factor: float, *, merged: PendingDelta | None = None, forgotten: bool = False, cleared: bool = False
    ) -> Carried:
        kept = int(factor * self.tokens)
        self.lost_tokens += self.tokens - kept
        self.steps, self.tokens = int(factor * self.steps), kept
        if not self.tokens:
            self.carried_since = None
            self.data = []
        return Carried(factor, merged, forgotten, cleared)


@dataclass(frozen=True)
class Encoded:
    """The arrays of an offer: ``body``, uint8 [bytes], and ``rest``, float32 [size], which quantisation left over.

    ``rest`` is None once the offer is dropped.
    """

    body: NDArray[np.uint8]
    rest: Vector | None


@dataclass
class DeltaValues:
    """The arrays of one fragment's pending delta; ``base`` and ``error`` are float32 [size of the fragment].

    Snapshots are the learner's values; with ``gradients`` they are the gradients of its steps since the base, which its value
    need not hold: ``theta - (theta - g)`` would round a small ``g`` to the precision of ``theta``.

    ``base`` is never written to; it may be shared with the replica that folds the log. Kept of a pending offer are its
    body and, until it is dropped, what quantisation left over of it: that becomes the error as it is; the displacement, rarely
    needed, follows from both.
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

    def hold(self, offer: PendingDelta, encoded: Encoded) -> None:
        """Keep the arrays of an offer until its fate is known."""
        self.held[offer.identity] = encoded

    def apply(self, carried: Carried, state: DeltaState, theta: Vector) -> Apply:
        """Carry out what ``state`` has just decided; ``theta``, float32 [size], becomes the base."""
        reference: Vector | None = self.base if carried.factor else None
        merged = carried.merged
        if carried.cleared:
            self.error = None
        elif merged is not None:
            if carried.factor and not merged.dropped:
                reference = np.add(self.base, self._displacement(merged))
            if self.error_feedback:
                rest = self.held[merged.identity].rest
                self.error = np.zeros_like(self.base) if rest is None else rest
        held, self.held = self.held, {}
        for offer in state.pending:
            encoded = held[offer.identity]
            self.held[offer.identity] = Encoded(encoded.body, None) if offer.dropped else encoded
        self.base = theta
        return Apply(theta, reference, carried.factor, carried.reset)

    def _displacement(self, offer: PendingDelta) -> Vector:
        """Return how much of an offer's displacement is in the learner's value, float32 [size]."""
        encoded = self.held[offer.identity]
        assert encoded.rest is not None, "nothing of it is kept"
        moved = quantise.dequantise(encoded.body, encoded.rest.size, offer.bits)
        moved += encoded.rest
        if self.error is None:
            np.negative(moved, out=moved)
        else:
            np.subtract(self.error, moved, out=moved)
        if offer.kept != 1:
            moved *= np.float32(offer.kept)
        return moved


def dump(state: DeltaState, values: DeltaValues) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return all that a checkpoint needs: plain values, and arrays by name, float32 [size] and (bodies) uint8 [bytes]."""
    plain: dict[str, Any] = {name: getattr(state, name) for name in _PLAIN} | {"base_hash": state.base_hash.hex()}
    arrays: dict[str, NDArray[Any]] = {"base": values.base}
    if values.error is not None:
        arrays["error"] = values.error
    plain["pending"] = []
    for i, offer in enumerate(state.pending):
        stated = msgspec.structs.asdict(offer.stated) | {"base_hash": offer.stated.base_hash.hex()}
        del stated["learner"]
        plain["pending"].append(stated | {name: getattr(offer, name) for name in _PLAIN_OFFER})
        encoded = values.held[offer.identity]
        arrays[f"offer/{i}/body"] = encoded.body
        if encoded.rest is not None:
            arrays[f"offer/{i}/rest"] = encoded.rest
    return plain, arrays


def load(
    state: DeltaState, values: DeltaValues, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> tuple[DeltaState, DeltaValues]:
    """Return state and values as :func:`dump` gave them (arrays float32 [size], uint8 [bytes]).

    They are for the process that begins with ``state`` and ``values``; its incarnation stays.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: something is missing, of another size, or no number.
    """
    if arrays["base"].shape != values.base.shape:
        raise ValueError(f"a fragment of {arrays['base'].size} parameters, expected {values.base.size}")
    restored = replace(values, base=arrays["base"], error=arrays.get("error"), held={})
    offers = []
    for i, values_of in enumerate(plain["pending"]):
        named = {name: values_of[name] for name in Answer.__struct_fields__ if name != "learner"}
        stated = Answer(learner=state.learner, **named | _typed(values_of))
        offer = PendingDelta(stated, **{name: values_of[name] for name in _PLAIN_OFFER})
        encoded = Encoded(arrays[f"offer/{i}/body"], arrays.get(f"offer/{i}/rest"))
        offer.dropped = encoded.rest is None
        restored.hold(offer, encoded)
        offers.append(offer)
    return replace(state, **{name: plain[name] for name in _PLAIN} | _typed(plain), pending=offers), restored


def _typed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that JSON gives in another type."""
    incarnation, number = plain["after"]
    data = ranges.normal((int(share), int(first), int(count)) for share, first, count in plain["data"])
    return {"after": (int(incarnation), int(number)), "base_hash": bytes.fromhex(plain["base_hash"]), "data": data}
