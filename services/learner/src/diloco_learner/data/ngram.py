"""Byte n-gram models, with which a run's validation loss is compared.

Interpolated by Witten and Bell's method C ("The zero-frequency problem", IEEE Trans. Inf. Theory 37(4), 1991): a context h
that was followed ``N(h)`` times by ``T(h)`` different bytes gives

    P(c | h) = (N(h c) + T(h) * P(c | h without its first byte)) / (N(h) + T(h))

down to the unigram model, which is interpolated with the uniform one. Contexts never seen leave the shorter one's value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diloco.errors import DataError

Bytes = NDArray[np.uint8]
LONGEST = 4  # bytes that fit into the codes below
BYTE = np.uint32(8)  # bits


def ngram_losses(training: Bytes, held_out: Bytes, orders: Sequence[int] = (1, 2, 4)) -> dict[int, float]:
    """Return the mean nats a byte of the held-out text, by the order of the model (1: no context, 4: three bytes of it).

    Both texts are uint8 [bytes].

    Raises:
        DataError: a text is shorter than the longest order.
    """
    longest = max(orders)
    if not 1 <= min(orders) <= longest <= LONGEST:
        raise ValueError(f"orders {orders}: expected 1 to {LONGEST}")
    for name, text in (("training", training), ("held-out", held_out)):
        if text.size < longest:
            raise DataError(f"n-gram models: {text.size} bytes of {name} text, at least {longest} are needed")
    probability = np.full(held_out.size, 1 / 256)
    losses = {}
    for order in range(1, longest + 1):
        # the first bytes have no full context; they keep the shorter one's value
        probability[order - 1 :] = _interpolate(probability[order - 1 :], training, held_out, order)
        if order in orders:
            losses[order] = float(-np.log(probability).mean())
    return losses


def _interpolate(shorter: NDArray[np.float64], training: Bytes, held_out: Bytes, order: int) -> NDArray[np.float64]:
    """Return P by the context of ``order - 1`` bytes, for each held-out byte that has one, from that by one byte less."""
    grams, gram_counts = np.unique(_codes(training, order), return_counts=True)
    contexts, first, kinds = np.unique(grams >> BYTE, return_index=True, return_counts=True)
    context_counts = np.add.reduceat(gram_counts, first)
    codes = _codes(held_out, order)
    gram_count = _look_up(grams, gram_counts, codes)
    context_count = _look_up(contexts, context_counts, codes >> BYTE)
    kind_count = _look_up(contexts, kinds, codes >> BYTE)
    seen = np.maximum(context_count + kind_count, 1)
    return np.where(context_count > 0, (gram_count + kind_count * shorter) / seen, shorter)


def _codes(text: Bytes, order: int) -> NDArray[np.uint32]:
    """Return each run of ``order`` bytes as a number, uint32 [runs], the first byte highest."""
    length = text.size - order + 1
    codes = np.zeros(length, np.uint32)
    for i in range(order):
        codes = (codes << BYTE) | text[i : i + length]
    return codes


def _look_up(keys: NDArray[np.uint32], values: NDArray[np.int64], wanted: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the value of each wanted key, int64 [wanted]; 0 where it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[at] == wanted, values[at], 0)
