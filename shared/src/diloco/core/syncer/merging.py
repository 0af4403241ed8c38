"""From the offers of a closed round to the next log entry of a fragment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from diloco.core.learner.schedule import scheduled_rate
from diloco.core.log.chain import Chain
from diloco.core.log.fold import Replica
from diloco.core.run import budget
from diloco.core.syncer import cutting, excess
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.compiled import kernels
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment
from diloco.core.tensors.merge import Accumulator
from diloco.core.tensors.weights import weight
from diloco.errors import MessageError, NonFiniteError, UnmergeableError
from diloco.settings.run import MAX_NAME, Bits, RunSettings
from diloco.wire import framing
from diloco.wire.body import Body, describe_body
from diloco.wire.entries import Record, Repaired, RolledBack
from diloco.wire.offers import MergeMember, RegionalMembers, RegionalOffer

Vector = NDArray[np.float32]
H = TypeVar("H", bound=RoundOffer)
ANY_NAME = MAX_NAME * "x"


def bases_of(fragment: Fragment, settings: RunSettings, held: Sequence[RoundOffer]) -> set[int]:
    """Return the versions whose values :func:`accumulate` needs for these offers; none unless ``merge.against`` is "current".

    The settings refuse "current" together with regional offers, whose members may have several bases.
    """
    if settings.merge.against == "base" or fragment.state:
        return set()
    return {item.offer.members[0].base_version for item in held}


def keep_bases(settings: RunSettings, bases: Mapping[int, Vector], version: int, theta: Vector) -> Mapping[int, Vector]:
    """Return ``bases`` with the newest version, float32 [size], and without those too old for an offer to be based on.

    They are as they were unless ``merge.against`` is "current", which alone needs them.
    """
    if settings.merge.against == "base":
        return bases
    oldest = version - settings.round.max_staleness_versions
    return {known: values for known, values in bases.items() if known >= oldest} | {version: theta.copy()}


@exact
def accumulate(
    fragment: Fragment, settings: RunSettings, held: Sequence[RoundOffer], bases: Mapping[int, Vector], theta: Vector
) -> Accumulator:
    """Return the weighted merge of outer gradients of one fragment, added in the order given.

    ``bases`` has the fragment at each version that :func:`bases_of` names, float32 [size], for ``merge.against = "current"``:
    there every outer gradient is taken against ``theta``, float32 [size], the newest version, however old the learner's base
    (Decoupled DiLoCo, arXiv 2604.21428). Embedding-like tensors are averaged (ibid.), unless ``merge.embedding`` says
    otherwise. A regional offer weighs as much as its members together. Offers of state are values, whatever their base; their
    average is one, too (:func:`merged`). Some outliers are cut (:mod:`diloco.core.syncer.cutting`), none if ``theta`` is
    empty: a region's aggregator does not have it.
    """
    against_current = bool(bases_of(fragment, settings, held))
    merge = Accumulator.of(fragment, settings.merge)
    cut = cutting.cut_rows(fragment, settings.quarantine, held, theta)
    for place, item in enumerate(held):
        offer, members = item.offer, item.offer.members
        share = sum(weight(member.tokens, member.steps, settings.merge.weights) for member in members)
        values = cutting.cut_values(item, fragment, cut[place]) if place in cut else None
        if against_current:
            moved = np.subtract(theta, bases[members[0].base_version])
            values = quantise.dequantise(item.body, fragment.size, offer.bits) if values is None else values
            merge.add_values(np.add(moved, values, out=moved), share)
        elif values is not None:
            merge.add_values(values, share)
        else:
            merge.add(item.body, offer.bits, share)
    return merge


@exact
def merged(
    fragment: Fragment, settings: RunSettings, held: Sequence[RoundOffer], bases: Mapping[int, Vector], theta: Vector
) -> Vector:
    """Return the merged outer gradient that an owner makes of offers, float32 [size]; arguments as of :func:`accumulate`.

    Of state it is ``theta`` less the average of the values. A version is ``theta`` less that, so it is negative nowhere where
    no value is: each of these operations rounds monotonically, and ``theta`` itself is a float32.
    """
    delta = accumulate(fragment, settings, held, bases, theta).result()
    return np.subtract(theta, delta, out=delta) if fragment.state else delta


@exact
def sound(
    fragment: Fragment,
    settings: RunSettings,
    merge: Merge,
    bases: Mapping[int, Vector],
    replica: Replica,
    live: Collection[str],
    run: bytes,
) -> Vector:
    """Return the merged outer gradient of a closed round, float32 [size], if a version can be made of it; nothing has changed.

    ``live``: the learners that take part; ``run``: the run's identity. Arguments else as of :func:`accumulate`.

    Raises:
        UnmergeableError: some offers cannot be in the version; it is to be made without them.
    """
    what = f"fragment {fragment.index}, version {merge.version}"
    breaking = unreadable(replica.chain, merge, settings, run)
    if breaking:
        names = _learners(breaking)
        raise UnmergeableError("merge_unreadable", names, f"{what}: the entry with offers of {_list(names)} cannot be read")

    def together(held: Sequence[RoundOffer]) -> Vector:
        return merged(fragment, settings, held, bases, replica.theta)

    delta, moved = together(merge.held), replica.optimizer.moved(replica.momentum)
    if moved and outer.norm(delta) <= excess.room(moved, merge.held, settings):
        return delta  # as nearly always; the fragment's own norm, another pass over it, would but give more room
    return within(together, merge.held, fragment.size, excess.usual(replica), live, settings, what)


@exact
def within(
    together: Callable[[Sequence[H]], Vector],
    held: Sequence[H],
    size: int,
    usual: float,
    live: Collection[str],
    settings: RunSettings,
    what: str,
) -> Vector:
    """Return the merge of all offers, float32 [size], where it is finite and moves no further than it may.

    Arguments as of :func:`diloco.core.syncer.excess.left_out`; ``what`` is what messages name.

    Raises:
        UnmergeableError: the offers to leave out are named.
    """
    delta, out = excess.left_out(together, held, size, usual, live, settings)
    if delta is not None and not out:
        return delta
    names, most = _learners(out), excess.room(usual, held, settings)
    norm = max(item.norm(size) for item in out)
    theirs = f"{what}: with offers of {_list(names)}, of norms up to {norm:.4g}, the merge"
    if outer.norm(together(held)) <= excess.LARGEST:
        raise UnmergeableError("merge_too_far", names, f"{theirs} has a norm above {most:.4g}, the most allowed")
    raise UnmergeableError("merge_not_finite", names, f"{theirs} is not finite")


def unreadable(chain: Chain, merge: Merge, settings: RunSettings, run: bytes) -> list[RoundOffer]:
    """Return the offers with which a version would not be readable: none, or those of the greatest claims that break it."""

    def is_readable(held: Sequence[RoundOffer]) -> bool:
        entry = version_record(
            chain,
            replace(merge, held=tuple(held)),
            settings,
            bits=settings.codec.record_bits,
            learning_rate=0.0,
            momentum=0.0,
            syncer=ANY_NAME,
            now_s=0.0,
            state_hash=bytes(32),
            body=Body(0, bytes(32), 0, bytes(8)),
        )
        try:
            chain.check(readable(entry, run))
        except MessageError:
            return False
        return True

    if not merge.held or is_readable(merge.held):
        return []
    kept: list[RoundOffer] = []
    for item in sorted(merge.held, key=lambda item: sum(m.tokens + m.lost_tokens for m in item.offer.members)):
        if is_readable([*kept, item]):
            kept.append(item)
    return [item for item in merge.held if item not in kept]


def readable(entry: Record, run: bytes, inline: bytes = b"") -> Record:
    """Return an entry as its readers will decode it; ``run``: the run's identity, ``inline``: the body in its head.

    Raises:
        FormatError: none of them could.
    """
    return framing.unpack(framing.pack(entry, run, inline), Record, run)[0]


def _learners(held: Sequence[RoundOffer]) -> tuple[str, ...]:
    return tuple(sorted(member.learner for item in held for member in item.offer.members))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")


@exact
def encode(delta: Vector, residual: Vector, settings: RunSettings, bits: Bits) -> NDArray[np.uint8]:
    """Return the content of a record for the merged outer gradient ``delta``, float32 [size], as uint8 [bytes].

    ``residual``, float32 [size], is added before and holds the error of quantisation after.
    """
    if not settings.codec.error_feedback:
        return quantise.quantise(delta, bits)
    residual += delta
    return quantise.quantise(residual, bits, error=residual)


def outer_rates(replica: Replica, settings: RunSettings) -> tuple[float, float]:
    """Return the learning rate and momentum of the next outer step of a fragment.

    Those of state are its rule's. Those of AdamW are the inner settings', after the tokens of all learners that count
    towards the budget; its momentum is beta1. Readers take both from the record: a cosine may have other bits elsewhere.
    """
    if isinstance(replica.optimizer, outer.Average):
        return replica.optimizer.rates
    if settings.outer.optimizer == "adamw":
        return scheduled_rate(settings.inner, budget.accounted(replica.chain), settings.tokens), settings.inner.beta1
    return settings.outer.learning_rate, settings.outer.momentum


@exact
def make_version(
    replica: Replica,
    residual: Vector,
    delta: Vector,
    merge: Merge,
    settings: RunSettings,
    *,
    bits: Bits,
    syncer: str,
    attempt: bytes,
    now_s: float,
) -> tuple[Record, bytes, list[bytes]]:
    """Turn the merged outer gradient ``delta``, float32 [size], into the next version.

    Return the record, the body bytes in its head, and its parts. The parameters and momentum of ``replica`` are folded; its
    chain advances once the record is stored. ``residual``, float32 [size], receives the error of quantisation. If the record
    cannot be stored, both are invalid.

    Raises:
        NonFiniteError: the merged outer gradient, a parameter or its momentum is not finite.
    """
    chain = replica.chain
    body = encode(delta, residual, settings, bits)
    learning_rate, momentum = outer_rates(replica, settings)
    step = replica.optimizer.at(chain.version + 1, learning_rate, momentum)
    state_hash = outer.fold(replica.theta, replica.momentum, body, bits, step)
    if not (np.isfinite(kernels.absmax(replica.theta)) and np.isfinite(kernels.absmax(replica.momentum))):
        raise NonFiniteError(
            f"fragment {chain.fragment}, version {chain.version + 1}: a parameter or its momentum is not finite"
        )
    packed = codec.pack(body, settings.codec.zstd_level)
    description, inline, parts = describe_body(packed, codec.content_hash(body), attempt)
    record = version_record(
        chain,
        merge,
        settings,
        bits=bits,
        learning_rate=learning_rate,
        momentum=momentum,
        syncer=syncer,
        now_s=now_s,
        state_hash=state_hash,
        body=description,
    )
    return record, inline, parts


def version_record(
    chain: Chain,
    merge: Merge,
    settings: RunSettings,
    *,
    bits: Bits,
    learning_rate: float,
    momentum: float,
    syncer: str,
    now_s: float,
    state_hash: bytes,
    body: Body,
) -> Record:
    """Return the entry after ``chain`` for a merge that has the state ``state_hash`` and the body ``body``."""
    offers = sorted((member for item in merge.held for member in item.offer.members), key=lambda member: member.learner)
    place = {offer.learner: i for i, offer in enumerate(offers)}
    combined = [item.offer for item in merge.held if isinstance(item.offer, RegionalOffer)]
    tokens_merged, tokens_lost = chain.totals_with((offer.learner, offer.tokens, offer.lost_tokens) for offer in offers)
    members = [MergeMember.of(offer, weight(offer.tokens, offer.steps, settings.merge.weights)) for offer in offers]
    return Record(
        fragment=chain.fragment,
        entry="version",
        version=chain.version + 1,
        epoch=chain.epoch,
        syncer=syncer,
        previous=chain.head,
        members=members,
        regional_offers=[
            RegionalMembers(offer.syncer, offer.incarnation, offer.number, [place[member.learner] for member in offer.members])
            for offer in combined
        ],
        bits=bits,
        learning_rate=learning_rate,
        momentum=momentum,
        tokens_merged=tokens_merged,
        tokens_lost=tokens_lost,
        state_hash=state_hash,
        closing=merge.closing,
        committed_at_s=now_s,
        quorum_s=merge.quorum_s,
        round_s=merge.round_s,
        body=body,
    )


def make_rollback(
    replica: Replica,
    residual: Vector,
    past: Replica,
    change: int,
    settings: RunSettings,
    *,
    repairs: int | None = None,
    syncer: str,
    attempt: bytes,
    now_s: float,
) -> tuple[Record, bytes, list[bytes]]:
    """Return the entry that takes a fragment back to ``past``, as ``change`` of the run asks; in parts as :func:`make_version`.

    ``repairs``: the message that the change names where it asks for a repair, which takes the ends of shares back, too.

    The momentum goes back with the parameters: it is of merges before the one to go back to, and later merges are gone from
    both. ``residual``, float32 [size], becomes zero: it is of versions that are no more.
    """
    chain, state = replica.chain, past.state()
    raw = state.view(np.uint8)
    replica.set_state(state)
    residual[:] = 0
    body, inline, parts = describe_body(codec.pack(raw, settings.codec.zstd_level), codec.content_hash(raw), attempt)
    marker = make_marker(replica, "takeover", settings, syncer=syncer, now_s=now_s, epoch=chain.epoch)
    rolled_back = RolledBack(change, past.chain.version, chain.version + 1)
    record = structs.replace(
        marker,
        entry="rollback" if repairs is None else "repair",
        version=rolled_back.version,
        bits=32,
        state_hash=past.chain.state_hash,
        body=body,
        rolled_back=rolled_back,
        repaired=None if repairs is None else Repaired(repairs, past.chain.keyframe_ends()),
    )
    return record, inline, parts


def make_marker(
    replica: Replica,
    entry: Literal["takeover", "close"],
    settings: RunSettings,
    *,
    syncer: str,
    now_s: float,
    epoch: int | None = None,
) -> Record:
    """Return an entry that makes no version: ``takeover``, to ``epoch`` or (None) the next one, or ``close``."""
    chain = replica.chain
    if epoch is None:
        epoch = chain.epoch + (entry == "takeover")
    learning_rate, momentum = outer_rates(replica, settings)
    return Record(
        fragment=chain.fragment,
        entry=entry,
        version=chain.version,
        epoch=epoch,
        syncer=syncer,
        previous=chain.head,
        members=[],
        regional_offers=[],
        bits=settings.codec.record_bits,
        learning_rate=learning_rate,
        momentum=momentum,
        tokens_merged=chain.tokens_merged,
        tokens_lost=chain.tokens_lost,
        state_hash=chain.state_hash,
        closing=entry == "close",
        committed_at_s=now_s,
        quorum_s=0.0,
        round_s=0.0,
        body=None,
    )
