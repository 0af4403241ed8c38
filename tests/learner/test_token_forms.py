"""Files of tokens of another form that happen to fit: they are refused with what to do, and those of the right form are not."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from diloco_learner.mix.forms import fault

DRAW = np.random.default_rng(0)
# ids as texts have them: few are frequent, and those are the low ones
WIDE = np.minimum(DRAW.zipf(1.3, 400_000) % 128_256, 128_255)
NARROW = WIDE % 50_000


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def npy(path: Path, values: NDArray[np.int64]) -> bytes:
    np.save(path, values.astype("<u2"))
    return path.with_suffix(".npy").read_bytes()


def llm_c(values: NDArray[np.int64]) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, values.size
    return header.tobytes() + values.astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("raw", "dtype", "vocabulary", "said"),
    [
        (WIDE.astype("<u4").tobytes(), "uint16", 128_256, "uint16 holds ids below 65,536 and the vocabulary has 128,256"),
        (WIDE.astype("<u4").tobytes(), "uint16", 65_536, "ids of uint32, read as uint16; set dtype = 'uint32'"),
        (NARROW.astype("<u4").tobytes(), "uint16", 50_000, "ids of uint32, read as uint16; set dtype = 'uint32'"),
        (NARROW.astype(">u2").tobytes(), "uint16", 65_536, "look big-endian"),
        (WIDE.astype(">u4").tobytes(), "uint32", 128_256, "look big-endian"),
        (llm_c(NARROW), "uint16", 65_536, "begins with llm.c's header of 1024 bytes, before tokens of uint16"),
        (gzip.compress(NARROW.astype("<u2").tobytes()), "uint16", 65_536, "compressed with gzip: unpack it"),
    ],
)
def test_another_form_is_named(raw: bytes, dtype: str, vocabulary: int, said: str, tmp_path: Path) -> None:
    found = fault(written(tmp_path / "b.bin", raw), dtype, vocabulary)
    assert found is not None
    assert said in found


def test_an_array_s_file_is_named(tmp_path: Path) -> None:
    found = fault(written(tmp_path / "b.bin", npy(tmp_path / "array", NARROW)), "uint16", 65_536)
    assert found == "is a NumPy file (.npy): write only its values, with array.tofile(path)"


BYTES = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int64)


@pytest.mark.parametrize(
    ("values", "dtype", "vocabulary"),
    [
        pytest.param(NARROW, "uint16", 50_000, id="as texts have them"),
        pytest.param(WIDE, "uint32", 128_256, id="wide"),
        pytest.param(NARROW, "uint32", 50_000, id="wider than needed"),
        pytest.param(BYTES, "uint16", 256, id="bytes"),
        pytest.param(np.arange(65_536), "uint16", 65_536, id="each once"),
        pytest.param(DRAW.integers(0, 50_000, 100_000), "uint16", 50_000, id="uniform"),
        pytest.param(DRAW.integers(0, 3, 100_000), "uint16", 3, id="few"),
        pytest.param(np.zeros(100_000, np.int64), "uint16", 2, id="one"),
    ],
)
def test_the_form_that_is_stated_is_taken(values: NDArray[np.int64], dtype: str, vocabulary: int, tmp_path: Path) -> None:
    assert fault(written(tmp_path / "b.bin", values.astype(f"<{np.dtype(dtype).str[1:]}").tobytes()), dtype, vocabulary) is None


@given(st.integers(0, 2**32), st.integers(2, 65_536), st.floats(1.05, 3.0))
def test_ids_of_any_steepness_are_taken(
    tmp_path_factory: pytest.TempPathFactory, seed: int, vocabulary: int, steep: float
) -> None:
    values = np.random.default_rng(seed).zipf(steep, 5000) % vocabulary
    path = tmp_path_factory.mktemp("steep") / "b.bin"
    assert fault(written(path, values.astype("<u2").tobytes()), "uint16", vocabulary) is None
