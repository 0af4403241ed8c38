"""Read and write the rows of one parameter, wherever it is kept: on JAX devices, or in a NumPy array of the host.

A JAX array is read and written by programs of its devices, which are queued behind the step in flight (:mod:`.shards`), and
writing gives another array. A NumPy array is read and written at once, and stays the same one: it may be a view of a tensor of
another framework.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.fragments import Piece
from diloco.core.tensors.rows import at
from diloco_learner.jax import shards
from diloco_learner.jax.shards import Where

Leaf: TypeAlias = jax.Array | NDArray[np.float32]
Values: TypeAlias = NDArray[np.float32]


def path_of(keys: tuple[Any, ...]) -> str:
    """Return the path of an array in a pytree, as protocol.md (section 6) names tensors; empty: it is the tree itself."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def types_of(tree: Any) -> dict[str, str]:
    """Return types and shapes of a tree's arrays by their paths."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(keys): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for keys, leaf in keyed}


def difference(expected: Any, came: Any) -> tuple[str, str, str] | None:
    """Return the first path at which two trees' arrays differ in type or shape, and both there; None: they are alike."""
    wanted, found = types_of(expected), types_of(came)
    for path in sorted(wanted.keys() | found.keys()):
        if wanted.get(path) != found.get(path):
            return path, wanted.get(path, "nothing"), found.get(path, "nothing")
    return None


def read_rows(leaf: Leaf, piece: Piece) -> list[tuple[Where, Any]]:
    """Return a copy of a piece, which may be on devices still, in parts: float32 arrays, each with its place in the piece's."""
    if isinstance(leaf, jax.Array):
        return list(shards.read(leaf, piece))
    return [((slice(None),) * leaf.ndim, _rows(leaf, piece).copy())]


def write_rows(leaf: Leaf, piece: Piece, theta: Values, reference: Baseline | Values | None, alpha: float) -> Leaf:
    """Write ``alpha * value + (1 - alpha) * kept`` of a piece; return the leaf, and drop the one that was given.

    ``kept`` is ``theta + (value - reference)``, or ``theta`` without a reference; both are float32 [size of the fragment]. With
    neither ``reference`` nor ``alpha`` the value becomes ``theta`` whatever it was, NaN too.
    """
    plain = reference is None and alpha == 0
    if isinstance(leaf, jax.Array):
        return shards.overwrite(leaf, piece, theta) if plain else shards.mix(leaf, piece, theta, reference, alpha)
    rows = _rows(leaf, piece)
    new = at(theta, piece)
    if plain:
        rows[...] = new
    else:
        kept = new if reference is None else new + (rows - at(reference, piece))
        rows[...] = np.float32(alpha) * rows + np.float32(1 - alpha) * kept
    return leaf


def _rows(leaf: Values, piece: Piece) -> Values:
    """Return the rows of a piece as a view of the leaf."""
    return leaf[piece.row_start : piece.row_stop] if leaf.ndim else leaf
