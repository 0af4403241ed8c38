"""Read and write the rows of a tensor where they lie: shard by shard, each by a program of its own device alone.

A ``dynamic_slice`` of a sharded tensor with a traced start gathers the whole tensor on every device (JAX 0.10), and explicit
axes refuse it. No device needs another one here: the host cuts a piece at the borders of the shards, each shard is read or
written by itself, and the tensor is put together again from its shards, without a copy. A piece may begin and end in the
middle of a shard. Only shards of this process are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.fragments import Fragment, Piece
from diloco.core.tensors.rows import FragmentRows, RowLayout, at

Where = tuple[slice, ...]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class _Overlap:
    """The rows of a piece that a shard has: ``rows`` from its own row ``start`` on, at ``where`` in the piece's array."""

    start: np.int32
    rows: int | None  # None: the tensor is a scalar
    where: Where


def read(tensor: jax.Array, piece: Piece) -> list[tuple[Where, jax.Array]]:
    """Queue a copy of a piece on the devices that have it; return its parts, each with its place in the piece's array."""
    parts = []
    for index, shard, replica in _shards(tensor):
        overlap = None if replica else _overlap(piece, tensor.shape, index)
        if overlap is not None:
            parts.append((overlap.where, _copy_rows(shard, overlap.start, rows=overlap.rows)))
    return parts


def overwrite(tensor: jax.Array, piece: Piece, theta: Values) -> jax.Array:
    """Queue the writing of a piece of ``theta``, float32 [size of its fragment]; return the tensor.

    The one that was given is donated: drop it.
    """
    return _rebuilt(tensor, piece, lambda shard, part: _overwrite_rows(shard, at(theta, piece, part.where), part.start))


def clear(tensor: jax.Array, piece: Piece) -> jax.Array:
    """Queue the writing of zeros, as :func:`overwrite` does."""
    zeros = np.zeros(piece.shape, np.float32)
    return _rebuilt(tensor, piece, lambda shard, part: _overwrite_rows(shard, zeros[part.where], part.start))


def mix(tensor: jax.Array, piece: Piece, theta: Values, reference: Baseline | Values | None, alpha: float) -> jax.Array:
    """Queue ``alpha * value + (1 - alpha) * kept`` of a piece, as :func:`overwrite` does.

    ``kept`` is ``theta + (value - reference)``, or ``theta`` without a reference; both are float32 [size of the fragment]. Of a
    reference the rows are computed that are here, once where several devices have them.
    """
    known: dict[str, Values] = {}

    def mixed(shard: jax.Array, part: _Overlap) -> jax.Array:
        where = str(part.where)
        if reference is not None and where not in known:
            known[where] = at(reference, piece, part.where)
        rows = at(theta, piece, part.where)
        written: jax.Array = _mix_rows(shard, rows, known.get(where), np.float32(alpha), part.start)
        return written

    return _rebuilt(tensor, piece, mixed)


def places(tensor: jax.Array, piece: Piece) -> list[tuple[int, Where, bool]]:
    """Return where a piece of a tensor lies: process, place in the piece's array, and whether it is its first copy.

    All processes of a mesh return the same, in the same order.
    """
    found: list[tuple[int, Where, bool]] = []
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    devices: Mapping[Any, Where | None] = tensor.sharding.devices_indices_map(tensor.shape)
    for device, index in devices.items():
        overlap = _overlap(piece, tensor.shape, index or ())
        key = tuple(part.indices(length) for part, length in zip(index or (), tensor.shape, strict=True))
        if overlap is not None:
            found.append((device.process_index, overlap.where, key not in seen))
        seen.add(key)
    return found


def _rebuilt(tensor: jax.Array, piece: Piece, change: Callable[[jax.Array, _Overlap], jax.Array]) -> jax.Array:
    shards = []
    for index, shard, _ in _shards(tensor):
        overlap = _overlap(piece, tensor.shape, index)
        shards.append(shard if overlap is None else change(shard, overlap))
    if _is_whole(tensor):
        return shards[0]
    return jax.make_array_from_single_device_arrays(tensor.shape, tensor.sharding, shards)


def _is_whole(tensor: jax.Array) -> bool:
    return len(tensor.sharding.device_set) == 1


def _shards(tensor: jax.Array) -> Iterator[tuple[Where, jax.Array, int]]:
    """Yield each shard's place in the tensor, the shard on its device, and the number of its replica, of this process."""
    if _is_whole(tensor):
        yield (slice(None),) * tensor.ndim, tensor, 0
        return
    for shard in tensor.addressable_shards:
        yield shard.index, shard.data, shard.replica_id


def _overlap(piece: Piece, shape: tuple[int, ...], index: Where) -> _Overlap | None:
    """Return the rows of a piece of a tensor of this shape that the shard at ``index`` has; None if there are none."""
    if not shape:
        return _Overlap(np.int32(0), None, ())
    begin, end, _ = index[0].indices(shape[0])
    first, stop = max(begin, piece.row_start), min(end, piece.row_stop)
    if first >= stop:
        return None
    where = (slice(first - piece.row_start, stop - piece.row_start), *index[1:])
    return _Overlap(np.int32(first - begin), stop - first, where)


# One compilation for each device and pair of shapes of shard and rows: where the rows begin is traced.


def _copy(tensor: jax.Array, start: jax.Array, *, rows: int | None) -> jax.Array:
    # the copy keeps jit from handing the tensor itself back, which the next step would take away
    return jnp.copy(tensor) if rows is None else jnp.copy(jax.lax.dynamic_slice_in_dim(tensor, start, rows))


def _put(tensor: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    return values if tensor.ndim == 0 else jax.lax.dynamic_update_slice_in_dim(tensor, values, start, 0)


def _mix(tensor: jax.Array, theta: jax.Array, reference: jax.Array | None, alpha: jax.Array, start: jax.Array) -> jax.Array:
    value = tensor if tensor.ndim == 0 else jax.lax.dynamic_slice_in_dim(tensor, start, theta.shape[0])
    kept = theta if reference is None else theta + (value - reference)
    return _put(tensor, alpha * value + (1 - alpha) * kept, start)


_copy_rows = jax.jit(_copy, static_argnames=("rows",))
_overwrite_rows = jax.jit(_put, donate_argnums=0, keep_unused=True)  # a scalar is not read, but says which device it is on
_mix_rows = jax.jit(_mix, donate_argnums=0)


def layout(fragment: Fragment, leaf: Callable[[str], jax.Array], processes: int) -> RowLayout:
    """Return which rows of a fragment each of so many processes has; ``leaf`` gives a tensor's array by its path."""
    read: list[list[tuple[Piece, Where]]] = [[] for _ in range(processes)]
    held: list[dict[tuple[Piece, str], Where]] = [{} for _ in range(processes)]
    for piece in fragment.pieces:
        for process, where, first in places(leaf(piece.path), piece):
            held[process].setdefault((piece, str(where)), where)  # replicas in one process have the same rows
            if first:
                read[process].append((piece, where))
    whole = [tuple((piece, where) for (piece, _), where in its.items()) for its in held]
    return RowLayout([FragmentRows(tuple(its)) for its in read], [FragmentRows(its) for its in whole])
