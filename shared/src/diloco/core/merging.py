"""From the offers of a closed round to the next log entry of a fragment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from diloco.core import codec, kernels, outer, quantise
from diloco.core.chain import Chain
from diloco.core.fold import Replica
from diloco.core.fragments import Fragment
from diloco.core.merge import Accumulator
from diloco.core.round import Held, Merge
from diloco.core.schedule import scheduled_rate
from diloco.core.weights import weight
from diloco.errors import NonFiniteError
from diloco.settings import Bits, RunSettings
from diloco.wire.messages import Body, Combination, Combined, Member, Record, RolledBack, describe_body

Vector = NDArray[np.float32]


def accumulate(
    fragment: Fragment, settings: RunSettings, held: Sequence[Held], theta_at: Callable[[int], Vector | None], theta: Vector
) -> Accumulator:
    """The merge of outer gradients of one fragment, weighted, in the order given.

    ``theta_at`` gives the fragment at an older version, for ``merge.against = "current"``: there every outer gradient is
    taken against ``theta``, the newest version, however old the learner's base (Decoupled DiLoCo, arXiv 2604.21428).
    Embedding-like fragments are averaged (ibid.). A combined offer weighs as much as its members together.
    """
    method = "average" if fragment.embedding else settings.merge.method
    merge = Accumulator(fragment.size, fragment.segments(settings.merge.granularity), method)
    for item in held:
        offer, members = item.offer, item.offer.members
        share = sum(weight(member.tokens, member.steps, settings.merge.weights) for member in members)
        # the settings refuse this together with combined offers, whose members may have several bases
        base = theta_at(members[0].base_version) if settings.merge.against == "current" else None
        if base is None:
            merge.add(item.body, offer.bits, share)
        else:
            moved = np.subtract(theta, base)
            merge.add_values(np.add(moved, quantise.dequantise(item.body, fragment.size, offer.bits), out=moved), share)
    return merge


def encode(delta: Vector, residual: Vector, settings: RunSettings, bits: Bits) -> NDArray[np.uint8]:
    """A record's content for a merged outer gradient; ``residual`` becomes what quantisation left over this time."""
    if not settings.codec.error_feedback:
        return quantise.quantise(delta, bits)
    residual += delta
    return quantise.quantise(residual, bits, error=residual)


def outer_rates(settings: RunSettings, tokens_done: int) -> tuple[float, float]:
    """Learning rate and momentum of the outer step after ``tokens_done`` of all learners, merged or lost.

    AdamW's are the inner settings'; its momentum is beta1. Readers take both from the record: a cosine may have other bits
    elsewhere.
    """
    if settings.outer.optimizer == "adamw":
        return scheduled_rate(settings.inner, tokens_done, settings.tokens), settings.inner.beta1
    return settings.outer.learning_rate, settings.outer.momentum


def make_version(
    replica: Replica,
    residual: Vector,
    accumulator: Accumulator,
    merge: Merge,
    settings: RunSettings,
    *,
    bits: Bits,
    syncer: str,
    attempt: bytes,
    now_s: float,
) -> tuple[Record, bytes, list[bytes]]:
    """Turn a merge into the next version: the record, the body bytes in its head, and its parts.

    ``replica``'s parameters and momentum are folded, its chain is not advanced: that is for when the record is stored.
    ``residual`` receives what quantisation left over. If the record cannot be stored, both are spoilt.

    Raises:
        NonFiniteError: the merged outer gradient, or what follows from it, is not finite.
    """
    chain = replica.chain
    body = encode(accumulator.result(), residual, settings, bits)
    learning_rate, momentum = outer_rates(settings, chain.tokens_merged + chain.tokens_lost)
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
    """The entry after ``chain`` for a merge that has the state ``state_hash`` and the body ``body``."""
    offers = sorted((member for item in merge.held for member in item.offer.members), key=lambda member: member.learner)
    place = {offer.learner: i for i, offer in enumerate(offers)}
    combined = [item.offer for item in merge.held if isinstance(item.offer, Combined)]
    tokens_merged, tokens_lost = chain.totals_with((offer.learner, offer.tokens, offer.lost_tokens) for offer in offers)
    members = [
        Member(
            learner=offer.learner,
            incarnation=offer.incarnation,
            number=offer.number,
            round=offer.round,
            base_version=offer.base_version,
            steps=offer.steps,
            tokens=offer.tokens,
            lost_tokens=offer.lost_tokens,
            weight=weight(offer.tokens, offer.steps, settings.merge.weights),
            data=offer.data,
        )
        for offer in offers
    ]
    return Record(
        fragment=chain.fragment,
        entry="version",
        version=chain.version + 1,
        epoch=chain.epoch,
        syncer=syncer,
        previous=chain.head,
        members=members,
        combined=[
            Combination(offer.syncer, offer.incarnation, offer.number, [place[member.learner] for member in offer.members])
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
    syncer: str,
    attempt: bytes,
    now_s: float,
) -> tuple[Record, bytes, list[bytes]]:
    """The entry that takes a fragment back to what it was at ``past``, as ``change`` of the run asks; as :func:`make_version`.

    The momentum goes back with the parameters: it is of merges before the one to go back to, and what came after is gone from
    both. Nothing is left over of what quantisation took from versions that are no more.
    """
    chain, state = replica.chain, past.state()
    raw = state.view(np.uint8)
    replica.set_state(state)
    residual[:] = 0
    body, inline, parts = describe_body(codec.pack(raw, settings.codec.zstd_level), codec.content_hash(raw), attempt)
    marker = make_marker(replica, "takeover", settings, syncer=syncer, now_s=now_s, epoch=chain.epoch)
    rolled_back = RolledBack(change, past.chain.version, chain.version + 1)
    record = replace(
        marker,
        entry="rollback",
        version=rolled_back.version,
        bits=32,
        state_hash=past.chain.state_hash,
        body=body,
        rolled_back=rolled_back,
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
    """An entry that makes no version: ``takeover``, to ``epoch`` or (None) the next one, or ``close``."""
    chain = replica.chain
    if epoch is None:
        epoch = chain.epoch + (entry == "takeover")
    learning_rate, momentum = outer_rates(settings, chain.tokens_merged + chain.tokens_lost)
    return Record(
        fragment=chain.fragment,
        entry=entry,
        version=chain.version,
        epoch=epoch,
        syncer=syncer,
        previous=chain.head,
        members=[],
        combined=[],
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
