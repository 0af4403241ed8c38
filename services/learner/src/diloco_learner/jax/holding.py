"""An island's arrays as chunks: read from the shards where they lie, and written to them, each by a program of one device.

A process reads and writes the shards on its own devices, of replicas one. So a process finds all that its devices need in what
it has saved itself. What several processes lend they have once among them: of replicas the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from diloco.core.tensors.chunks import Chunk
from diloco.states.state import Content
from diloco_learner.api.model import COPY_BYTES
from diloco_learner.jax.leaves import path_of

Values = NDArray[Any]
AHEAD = 2  # chunks on their way to the host while one is written


def content(arrays: Mapping[str, jax.Array], *, firsts: bool = False) -> Content:
    """Return the values of arrays that this process has; they are copied to the host when they are asked for.

    ``firsts``: no replicas of what another process, or this one, has first.
    """
    found: dict[Chunk, jax.Array] = {}
    for name in sorted(arrays):
        for whole, shard, replica in _shards(name, arrays[name]):
            if replica == 0 or not firsts:
                found.setdefault(whole, shard)
    parts = [(chunk, whole, shard) for whole, shard in found.items() for chunk in whole.cut()]
    return Content([chunk for chunk, _, _ in parts], _values(parts))


def settled(arrays: Mapping[str, jax.Array]) -> Content:
    """Return the same as :func:`content`, read without a program: each shard is copied to the host whole, and cut there."""
    found: dict[Chunk, jax.Array] = {}
    for name in sorted(arrays):
        for whole, shard, _ in _shards(name, arrays[name]):
            found.setdefault(whole, shard)

    def values() -> Iterator[Values]:
        for whole, shard in found.items():
            copied = np.asarray(_alias(shard))
            yield from (np.ascontiguousarray(copied[chunk.within(whole)]) for chunk in whole.cut())

    return Content([chunk for whole in found for chunk in whole.cut()], values())


def owners(arrays: Mapping[str, jax.Array]) -> dict[str, list[tuple[int, Chunk]]]:
    """Return by array which process has which chunk first."""
    return {name: list(_owners(name, array)) for name, array in arrays.items()}


def _owners(name: str, array: jax.Array) -> Iterator[tuple[int, Chunk]]:
    dtype, seen = np.dtype(array.dtype).name, set[Chunk]()
    places: Mapping[Any, tuple[slice, ...] | None] = array.sharding.devices_indices_map(array.shape)
    for device, index in places.items():
        ends = [part.indices(length)[:2] for part, length in zip(index or (), array.shape, strict=True)]
        start, stop = tuple(first for first, _ in ends), tuple(last for _, last in ends)
        chunk = Chunk(name, tuple(array.shape), dtype, start, stop)
        if chunk not in seen:
            seen.add(chunk)
            yield device.process_index, chunk


def wanted(arrays: Mapping[str, jax.Array]) -> list[Chunk]:
    """Return the chunks that the shards of this process's devices are made of, each once, whatever their number of replicas."""
    wholes = (whole for name in sorted(arrays) for whole, _, _ in _shards(name, arrays[name]))
    return [chunk for whole in dict.fromkeys(wholes) for chunk in whole.cut()]


def write(array: jax.Array, chunk: Chunk, values: Values) -> jax.Array:
    """Queue the writing of a chunk of :func:`wanted`, ``values`` of any dtype [its lengths]; return the array.

    The one that was given may be donated: drop it.
    """
    if _is_alone(array) and chunk.is_whole:
        alone: jax.Array = jnp.array(values)
        return alone  # and not committed to its device, which would compile the step once more
    shards: list[jax.Array] = []
    for whole, shard, _ in _shards(chunk.name, array):
        if whole == chunk:
            shards.append(jax.device_put(values, SingleDeviceSharding(_device(shard)), may_alias=False))
        elif whole.overlap(chunk) == chunk:
            shards.append(_put_box(shard, values, _starts(chunk, whole)))
        else:
            shards.append(shard)
    if _is_alone(array):
        return shards[0]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def written(kind: str, tree: Any, chunk: Chunk, values: Values) -> Any:
    """Return a tree of arrays with a chunk written, any dtype [its lengths]; ``kind`` begins the arrays' names."""

    def of(path: Any, array: jax.Array) -> jax.Array:
        return write(array, chunk, values) if f"{kind}/{path_of(path)}" == chunk.name else array

    return jax.tree_util.tree_map_with_path(of, tree)


def fits(arrays: Sequence[jax.Array]) -> bool:
    """Whether this process's devices have room for a copy of arrays beside all that they needed at a time until now.

    A device of which JAX does not say how much memory it has, a CPU for one, is taken to have :data:`COPY_BYTES` to spare.
    """
    needed: dict[jax.Device, int] = {}
    for array in arrays:
        for _, shard, _ in _shards("", array):
            needed[_device(shard)] = needed.get(_device(shard), 0) + shard.nbytes
    return all(size_bytes <= _spare_bytes(device) for device, size_bytes in needed.items())


def _spare_bytes(device: jax.Device) -> int:
    said: dict[str, int] = device.memory_stats() or {}
    return max(COPY_BYTES, said.get("bytes_limit", 0) - said.get("peak_bytes_in_use", 0))


def _values(parts: Iterable[tuple[Chunk, Chunk, jax.Array]]) -> Iterator[Values]:
    """Yield the chunks' values, with the next ones on their way to the host meanwhile; nothing of them is kept."""
    queue: list[jax.Array] = []
    rest = iter(parts)
    while True:
        for chunk, whole, shard in itertools.islice(rest, AHEAD - len(queue)):
            copied = _alias(shard) if chunk == whole else _copy_box(shard, _starts(chunk, whole), sizes=chunk.lengths)
            copied.copy_to_host_async()
            queue.append(copied)
            del shard, copied
        if not queue:
            return
        yield np.asarray(queue.pop(0))


def _shards(name: str, array: jax.Array) -> Iterator[tuple[Chunk, jax.Array, int]]:
    """Yield each shard of this process: its place in the array, the shard on its device, and the number of its replica."""
    dtype = np.dtype(array.dtype).name
    if _is_alone(array):
        yield Chunk.whole(name, array.shape, dtype), array, 0
        return
    for shard in array.addressable_shards:
        ends = [part.indices(length)[:2] for part, length in zip(shard.index, array.shape, strict=True)]
        start, stop = tuple(first for first, _ in ends), tuple(last for _, last in ends)
        yield Chunk(name, tuple(array.shape), dtype, start, stop), shard.data, shard.replica_id


def _is_alone(array: jax.Array) -> bool:
    return len(array.sharding.device_set) == 1


def _device(shard: jax.Array) -> jax.Device:
    return next(iter(shard.devices()))


def _alias(shard: jax.Array) -> jax.Array:
    """Return the same values as an array of its own: JAX keeps what it has copied to the host for as long as an array lives."""
    return jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])


def _starts(chunk: Chunk, whole: Chunk) -> tuple[np.int32, ...]:
    return tuple(np.int32(place.start) for place in chunk.within(whole))


def _copied(shard: jax.Array, starts: tuple[jax.Array, ...], *, sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)


def _put(shard: jax.Array, values: jax.Array, starts: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, values, starts)


_copy_box = jax.jit(_copied, static_argnames=("sizes",))
_put_box = jax.jit(_put, donate_argnums=0)
