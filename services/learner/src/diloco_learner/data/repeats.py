"""Passages of the held-out text that also occur in the training text. They are left out: a model may have memorised them.

A byte is *repeated* if it lies in 64 bytes in a row that the training text has somewhere, byte for byte. The held-out text is
cut into chunks of 1 KiB, and a chunk is left out if more than half of its bytes are repeated.

* 64 bytes are more than one line of most texts: a phrase or an import that two authors wrote alike does not count.
* A chunk is a passage. Single spans left out would cut lines in two. Whole files left out would take a file's own text
  along with the table that it shares with another file.
* Evaluated windows begin at multiples of the context. 1 KiB is a multiple of the usual contexts, so a window crosses a seam
  between two passages with its last byte at most. With another context some windows cross a seam, as some cross files' ends.

Spans are compared by polynomial hashes modulo 2^64 (Karp and Rabin, IBM J. Res. Dev. 31(2), 1987) of scattered byte values. Two
different spans have the same hash with a probability of about 2^-64; at worst, a chunk too many is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SPAN_BYTES = 64  # a power of two: hashes are made by doubling
CHUNK_BYTES = 1024
KEPT_AT_LEAST = 0.1  # of the held-out text; with less the texts are copies of each other
BLOCK_BYTES = 1 << 16  # of training text, hashed at once: a block's hashes stay in the processor's cache
FILTER_SLOTS = 16  # a held-out window: one training window in so many is looked up though no held-out window is like it
MODULUS = 1 << 64
BASE = 0x9E3779B97F4A7C15  # odd
# a byte's own value would be small, and so would sums of differences of similar spans
SCATTERED = np.random.Generator(np.random.PCG64(0)).integers(MODULUS, size=256, dtype=np.uint64, endpoint=False)


@dataclass(frozen=True)
class HeldOut:
    """The held-out text to evaluate on, uint8 [bytes].

    ``repeated_bytes`` are in chunks that the training text mostly has too. They are left out of ``text``, unless ``all_kept``:
    less than a tenth would be left, so both texts are repetitions of one text, and there is nothing else to evaluate on.
    """

    text: Bytes
    repeated_bytes: int
    all_kept: bool


def without_repeats(training: Bytes, held_out: Bytes) -> HeldOut:
    """Return the held-out text, uint8 [bytes], without the chunks that the training text mostly has too, the rest in order."""
    starts = np.arange(0, held_out.size, CHUNK_BYTES)
    covered = np.append(0, np.cumsum(repeated(training, held_out)))
    ends = np.minimum(starts + CHUNK_BYTES, held_out.size)
    kept = np.repeat(2 * (covered[ends] - covered[starts]) <= ends - starts, ends - starts)
    all_kept = bool(kept.sum() < KEPT_AT_LEAST * held_out.size)
    return HeldOut(held_out if all_kept else held_out[kept], int(held_out.size - kept.sum()), all_kept)


def repeated(training: Bytes, held_out: Bytes) -> NDArray[np.bool_]:
    """Return which held-out bytes lie in a span of 64 bytes that the training text has too, bool [bytes]."""
    spans = max(held_out.size - SPAN_BYTES + 1, 0)
    edges = np.zeros(held_out.size + 1, np.int32)  # by how much the number of known spans around a byte changes
    if spans:
        known = _known(training, _hashes(held_out))
        edges[:spans] += known
        edges[SPAN_BYTES:] -= known
    covered: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return covered


def _known(training: Bytes, wanted: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which of the hashes are one of a span of the training text, bool [hashes]. ``wanted`` is not empty."""
    keys, place = np.unique(wanted, return_inverse=True)
    found = np.zeros(keys.size, np.bool_)
    # a table by the hash's first bits rules out nearly all training spans, for a fraction of a search's time
    shift = np.uint64(64 - (FILTER_SLOTS * keys.size).bit_length())
    maybe = np.zeros(MODULUS >> int(shift), np.bool_)
    maybe[keys >> shift] = True
    for start in range(0, training.size - SPAN_BYTES + 1, BLOCK_BYTES):
        hashes = _hashes(training[start : start + BLOCK_BYTES + SPAN_BYTES - 1])
        hashes = hashes[maybe[hashes >> shift]]
        at = np.minimum(np.searchsorted(keys, hashes), keys.size - 1)
        found[at[keys[at] == hashes]] = True
    known: NDArray[np.bool_] = found[place]
    return known


def _hashes(text: Bytes) -> NDArray[np.uint64]:
    """Return the hash of each span of a text of at least 64 bytes, uint64 [bytes - 63]: ``sum value[i] * BASE ** (63 - i)``."""
    hashes, width, power = SCATTERED[text], 1, BASE
    while width < SPAN_BYTES:
        # of 2 w bytes from those of w: the first half's weighs by BASE ** w
        longer = hashes[:-width] * np.uint64(power)
        longer += hashes[width:]
        hashes, width, power = longer, 2 * width, power * power % MODULUS
    return hashes
