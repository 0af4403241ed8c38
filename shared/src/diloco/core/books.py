"""A learner's books: for one fragment, what it has done, what it has offered, and what of that the log holds.

The learner's displacement is its value minus its base, the version it last applied. An offer states the displacement as of a
snapshot; a record then says whether it was merged, and :meth:`Books.apply` decides what stays (design.md section 4):

=====================================================  ==========================================
the version                                            the learner's value becomes
=====================================================  ==========================================
merges the offer that answered its own round           Theta + carry.overlap * (since the offer)
merges an offer that came too late for its own round   Theta + carry.late * (since the offer)
merges none of this learner's                          Theta + carry.late * (all displacement)
is a rollback                                          Theta
=====================================================  ==========================================

Steps and tokens follow the same split; what is not kept is counted as lost, and counted back should a version still merge it.
So do the batches that the displacement was trained on: with a factor between 0 and 1 they stay, with fewer tokens to them, for
as long as a token of the displacement is left.
Quantisation errors of merged offers are added to the next offer, and live apart from the parameters, where they measured
worse.

Everything here is pure. The caller serialises calls of one fragment's books.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.core import quantise, ranges
from diloco.core.chain import Chain
from diloco.settings import CarrySettings
from diloco.wire.messages import Bits, Range, Record

Vector = NDArray[np.float32]
NOTHING = 1e-6  # a smaller share of a displacement is none: float32 cannot tell what it was a share of
_PLAIN = ("base_version", "after", "steps", "tokens", "lost_tokens", "data", "carried_since")
_PLAIN_OFFER = (
    "incarnation",
    "number",
    "round",
    "after",
    "base_version",
    "steps",
    "tokens",
    "lost_tokens",
    "bits",
    "held_steps",
    "held_tokens",
    "data",
    "kept",
)


@dataclass(frozen=True)
class Apply:
    """How to write a version into the model: ``theta + factor * (value - reference)``, plainly ``theta`` if factor is 0."""

    theta: Vector
    reference: Vector | None
    factor: float
    forgotten: bool = False  # an offer was merged that the books know nothing of: it was made before a restart
    anew: bool = False  # the log was loaded or rolled back: nothing of the value is to be mixed in (apply.alpha)


@dataclass
class Outstanding:
    """An offer whose fate is unknown.

    ``held_steps`` and ``held_tokens`` are what of it is still in the learner's value, and so is the share ``kept`` of its
    displacement: they shrink when a version is applied that did not merge the offer. Stored is what quantisation left over
    (``rest``, None once nothing is kept), which becomes the error as it is; the displacement, rarely needed, follows from it.
    """

    incarnation: int
    number: int
    round: int
    after: tuple[int, int]
    base_version: int
    base_hash: bytes
    steps: int
    tokens: int
    lost_tokens: int
    bits: Bits
    body: NDArray[np.uint8]
    held_steps: int
    held_tokens: int
    data: list[Range]  # the batches that its displacement was trained on
    rest: Vector | None
    kept: float = 1.0

    def displacement(self, error: Vector | None) -> Vector:
        """What of the displacement is in the learner's value; ``error`` is what was added to its outer gradient."""
        assert self.rest is not None, "nothing of it is kept"
        moved = quantise.dequantise(self.body, self.rest.size, self.bits)
        moved += self.rest
        if error is None:
            np.negative(moved, out=moved)
        else:
            np.subtract(error, moved, out=moved)
        if self.kept != 1:
            moved *= np.float32(self.kept)
        return moved


@dataclass
class Books:
    """One fragment's books. ``base`` is never written to; it may be shared with the replica that folds the log."""

    learner: str
    incarnation: int
    carry: CarrySettings
    error_feedback: bool
    base: Vector
    base_version: int
    base_hash: bytes
    after: tuple[int, int] = (0, 0)  # own offer last known merged
    steps: int = 0  # not merged yet
    tokens: int = 0
    lost_tokens: int = 0
    data: list[Range] = field(default_factory=list)  # batches that the displacement holds; never changed in place
    next_number: int = 1
    carried_since: int | None = None  # version from which displacement has been carried over
    error: Vector | None = None
    outstanding: list[Outstanding] = field(default_factory=list)

    def step(self, tokens: int, share: int, batch: int) -> None:
        """Count one inner step, on a batch of a share of the data."""
        self.steps += 1
        self.tokens += tokens
        self.data = ranges.add(self.data, share, batch)

    def offer(
        self, snapshot: Vector, steps: int, tokens: int, data: list[Range], round_version: int, bits: Bits
    ) -> Outstanding:
        """Quantise the displacement of ``snapshot`` (taken over: it is overwritten) as an answer to a round.

        ``steps``, ``tokens`` and ``data`` are this fragment's when the snapshot was taken.

        Raises:
            NonFiniteError: the snapshot holds NaN or infinity; the books are as before.
        """
        gradient = np.subtract(self.base, snapshot, out=snapshot)
        if self.error is not None:
            gradient += self.error
        body = quantise.quantise(gradient, bits, error=gradient)
        offer = Outstanding(
            incarnation=self.incarnation,
            number=self.next_number,
            round=round_version,
            after=self.after,
            base_version=self.base_version,
            base_hash=self.base_hash,
            steps=steps,
            tokens=tokens,
            lost_tokens=self.lost_tokens,
            bits=bits,
            body=body,
            held_steps=steps,
            held_tokens=tokens,
            data=data,
            rest=gradient,
        )
        self.next_number += 1
        self.outstanding.append(offer)
        return offer

    def apply(self, record: Record, theta: Vector) -> Apply:
        """Take over a version: ``theta`` is the fragment after ``record``, and becomes the base."""
        mine = next((member for member in record.members if member.learner == self.learner), None)
        if record.rolled_back is not None:
            applied = replace(self._begin_again(theta), anew=True)
        elif mine is None:
            applied = self._missed(record.version, theta)
        else:
            applied = self._merged(record.version, theta, (mine.incarnation, mine.number), mine.round)
        self.base, self.base_version, self.base_hash = theta, record.version, record.state_hash
        return applied

    def reload(self, chain: Chain, theta: Vector, *, spoilt: bool = False) -> Apply:
        """Take over the log's state without the versions in between (a restart, a long absence, a damaged value).

        The displacement is carried over if the log holds of this learner what these books say, with at most an offer that
        they still know of merged meanwhile; it is lost otherwise, or if the learner's value is ``spoilt``.
        """
        merged = chain.cursor(self.learner)
        if merged != self.after:
            applied = self._merged(chain.version, theta, merged, answered=0)
        elif chain.version == self.base_version:
            applied = self._keep(theta, self.base, 1.0 if self.tokens else 0.0)
        else:
            applied = self._missed(chain.version, theta)
        if spoilt or self.base_version < chain.floor:
            applied = replace(self._begin_again(theta), forgotten=applied.forgotten)
        self.base, self.base_version, self.base_hash = theta, chain.version, chain.state_hash
        return replace(applied, anew=True)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """All that a checkpoint needs: plain values, and arrays by name."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN} | {"base_hash": self.base_hash.hex()}
        arrays: dict[str, NDArray[Any]] = {"base": self.base}
        if self.error is not None:
            arrays["error"] = self.error
        plain["outstanding"] = []
        for i, offer in enumerate(self.outstanding):
            hashes = {"base_hash": offer.base_hash.hex()}
            plain["outstanding"].append({name: getattr(offer, name) for name in _PLAIN_OFFER} | hashes)
            arrays[f"offer/{i}/body"] = offer.body
            if offer.rest is not None:
                arrays[f"offer/{i}/rest"] = offer.rest
        return plain, arrays

    def load(self, plain: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what :meth:`dump` gave; the incarnation stays this process's own.

        Raises:
            LookupError, TypeError, ValueError, OverflowError: something is missing, of another size, or no number.
        """
        if arrays["base"].shape != self.base.shape:
            raise ValueError(f"a fragment of {arrays['base'].size} parameters, expected {self.base.size}")
        offers = []
        for i, values in enumerate(plain["outstanding"]):
            fields = {name: values[name] for name in _PLAIN_OFFER} | {"base_hash": bytes.fromhex(values["base_hash"])}
            fields["after"] = (int(values["after"][0]), int(values["after"][1]))
            fields["data"] = _ranges(values["data"])
            offers.append(Outstanding(**fields, body=arrays[f"offer/{i}/body"], rest=arrays.get(f"offer/{i}/rest")))
        for name in _PLAIN:
            setattr(self, name, plain[name])
        self.after = (int(plain["after"][0]), int(plain["after"][1]))
        self.data = _ranges(plain["data"])
        self.base_hash = bytes.fromhex(plain["base_hash"])
        self.base, self.error, self.outstanding = arrays["base"], arrays.get("error"), offers

    def _missed(self, version: int, theta: Vector) -> Apply:
        if self.carried_since is None:
            self.carried_since = self.base_version
        late = version - self.carried_since > self.carry.max_versions
        # without tokens there is nothing to carry over: what differs from the base may be what a newcomer began with
        holds = self.tokens > 0
        factor = 0.0 if late or not holds else self.carry.late
        applied = self._keep(theta, self.base, factor)
        for offer in self.outstanding:
            offer.held_steps, offer.held_tokens = int(factor * offer.held_steps), int(factor * offer.held_tokens)
            offer.kept *= factor
            if holds and offer.kept <= NOTHING:  # without tokens it holds an earlier error alone, which is never dropped
                offer.rest = None
        return applied

    def _merged(self, version: int, theta: Vector, identity: tuple[int, int], answered: int) -> Apply:
        offer = next((o for o in self.outstanding if (o.incarnation, o.number) == identity), None)
        self.after = identity
        self.outstanding.clear()  # newer offers state an older `after`: they will never be merged
        self.carried_since = None
        if offer is None:  # made before a restart, and forgotten: what has been done since belongs to no known base
            self.error = None
            return replace(self._keep(theta, self.base, 0.0), forgotten=True)
        self.steps -= offer.held_steps
        self.tokens -= offer.held_tokens
        self.data = ranges.subtract(self.data, offer.data)
        self.lost_tokens -= offer.tokens - offer.held_tokens
        factor = self.carry.overlap if answered == version else self.carry.late
        reference = self.base
        if offer.rest is None:  # dropped meanwhile: all that is in the value came after it
            factor = self.carry.late
        elif factor:
            reference = np.add(self.base, offer.displacement(self.error))
        if self.error_feedback:
            self.error = np.zeros_like(self.base) if offer.rest is None else offer.rest
        return self._keep(theta, reference, factor)

    def _begin_again(self, theta: Vector) -> Apply:
        """Keep nothing: neither the displacement nor what was left over of merged offers, and wait for no offer's fate."""
        self.outstanding.clear()
        self.error = None
        return self._keep(theta, self.base, 0.0)

    def _keep(self, theta: Vector, reference: Vector, factor: float) -> Apply:
        kept = int(factor * self.tokens)
        self.lost_tokens += self.tokens - kept
        self.steps, self.tokens = int(factor * self.steps), kept
        if not self.tokens:
            self.carried_since = None
            self.data = []
        return Apply(theta, reference if factor else None, factor)


def _ranges(values: Sequence[Sequence[int]]) -> list[Range]:
    return ranges.normal((int(share), int(first), int(count)) for share, first, count in values)
