"""Check that a file of tokens has the form that its table states: by its header, or else by its values.

A file of another form often fits: every pair of bytes is a ``uint16``. What is looked at is a sample of ``SAMPLED`` tokens
from the beginning, the middle and the end.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLED = 1 << 16  # tokens at each of three places
LEAST = 1 << 10  # of fewer tokens nothing can be said
FEW = 4  # values that the upper halves of 32-bit ids have at most: vocabularies end below FEW * 65,536
MANY = 32  # values that the lower halves have at least
MARGIN_BITS = 1.0  # of entropy, by which the upper byte of an id differs from its lower one

# the first bytes of files that are no bare tokens, and what to do with each
KINDS = {
    b"\x93NUMPY": "a NumPy file (.npy): write only its values, with array.tofile(path)",
    b"PK\x03\x04": "a zip archive (.npz): write only the array's values, with array.tofile(path)",
    b"\x1f\x8b\x08\x00": "compressed with gzip: unpack it",
    b"\x1f\x8b\x08\x08": "compressed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"PAR1": "a Parquet file: use kind = 'parquet'",
    b"\x89HDF": "an HDF5 file: write only the array's values",
    b"MMIDIDX": "the index of a Megatron data set: name its .bin",
}
LLM_C = {20240520: "uint16", 20240801: "uint32"}  # first int32 of a header of 256 of them, and the type of what follows
LLM_C_BYTES = 1024


def fault(path: Path, dtype: str, vocabulary: int) -> str | None:
    """Return what is wrong with the form of a file of ``dtype`` (uint16 or uint32) and what to do, or None."""
    if vocabulary > 1 << 16 and dtype == "uint16":
        return f"uint16 holds ids below 65,536 and the vocabulary has {vocabulary:,}: set dtype = 'uint32'"
    with path.open("rb") as file:
        head = file.read(8)
    for magic, kind in KINDS.items():
        if head.startswith(magic):
            return f"is {kind}"
    first = int.from_bytes(head[:4], "little")
    if first in LLM_C and int.from_bytes(head[4:8], "little") < 100 and path.stat().st_size >= LLM_C_BYTES:
        return f"begins with llm.c's header of {LLM_C_BYTES} bytes, before tokens of {LLM_C[first]}: write the file without it"
    return _fault_of_values(_sample(np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")), dtype, vocabulary)


def _sample(tokens: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return tokens of three places, [at most 3 * SAMPLED], each beginning at an even position."""
    middle, end = tokens.size // 4 * 2, max(0, tokens.size - SAMPLED) // 2 * 2
    return np.concatenate([tokens[begin : begin + SAMPLED] for begin in sorted({0, middle, end})])


def _fault_of_values(tokens: NDArray[np.unsignedinteger], dtype: str, vocabulary: int) -> str | None:
    if tokens.size < LEAST:
        return None
    if dtype == "uint16":
        even, odd = np.unique(tokens[: tokens.size // 2 * 2 : 2]).size, np.unique(tokens[1::2]).size
        if odd <= FEW and even >= MANY:
            return f"every second token is one of {odd} values: these are ids of uint32, read as uint16; set dtype = 'uint32'"
    swapped = tokens.byteswap()
    places = tokens.astype(f"<u{tokens.itemsize}").view(np.uint8).reshape(-1, tokens.itemsize)
    lowest, highest = _entropy_bits(places[:, 0]), _entropy_bits(places[:, -1])
    if int(swapped.max()) < vocabulary and lowest + MARGIN_BITS < highest:
        return (
            f"its ids look big-endian: the lowest byte of each holds {lowest:.1f} bits, the highest {highest:.1f}; write the "
            f"file little-endian, with array.astype('<u{tokens.itemsize}').tofile(path)"
        )
    return None


def _entropy_bits(values: NDArray[np.uint8]) -> float:
    """Return the entropy of the distribution of byte values, in bits: -sum p log2 p."""
    counts = np.bincount(values, minlength=256)
    share = counts[counts > 0] / values.size
    return float(-(share * np.log2(share)).sum())
