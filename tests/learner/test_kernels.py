"""Tensors of Flax, Haiku and Equinox by the names that these libraries give them; shapes are those of their own models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diloco_learner import kernels
from diloco_learner.tensors import Tensor


@pytest.mark.parametrize(
    ("library", "path", "shape", "kind", "stored"),
    [
        (kernels.flax, "dense/kernel", (3, 4), "matrix", (4, 3)),
        (kernels.flax, "dense/kernel/value", (3, 4), "matrix", (4, 3)),
        (kernels.flax, "conv/kernel", (3, 3, 8, 16), "matrix", (16, 72)),
        (kernels.flax, "attention/query/kernel", (32, 4, 8), "matrix", (32, 32)),
        (kernels.flax, "attention/out/kernel", (4, 8, 32), "matrix", (32, 32)),
        (kernels.flax, "attention/query/bias", (4, 8), "vector", (1, 32)),
        (kernels.flax, "lm_head/kernel", (32, 100), "head", (100, 32)),
        (kernels.flax, "embed/embedding", (100, 32), "embedding", None),
        (kernels.flax, "norm/scale", (32,), "vector", None),
        (kernels.haiku, "mlp/~/linear_0/w", (3, 4), "matrix", (4, 3)),
        (kernels.haiku, "conv2_d_transpose/w", (3, 3, 16, 8), "matrix", (16, 72)),
        (kernels.haiku, "embed/embeddings", (100, 32), "embedding", None),
        (kernels.haiku, "linear/b", (4,), "vector", None),
        (kernels.equinox, "layers/0/weight", (4, 3), "matrix", None),
        (kernels.equinox, "conv/weight", (16, 8, 3, 3), "matrix", (16, 72)),
        (kernels.equinox, "embedding/weight", (100, 32), "embedding", None),
        (kernels.equinox, "head/weight", (10, 32), "head", None),
        (kernels.equinox, "norm/weight", (32,), "vector", None),
    ],
)
def test_a_parameter_is_known_by_its_name(
    library: Callable[[str, tuple[int, ...]], Tensor],
    path: str,
    shape: tuple[int, ...],
    kind: str,
    stored: tuple[int, ...] | None,
) -> None:
    said = library(path, shape)
    kept = said.arrangement(shape)
    assert (said.kind, None if kept is None else kept.stored_shape) == (kind, stored)
