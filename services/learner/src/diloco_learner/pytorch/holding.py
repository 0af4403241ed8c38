"""The arrays of a model's state by name: which part of each is in this process, read and written in chunks.

Of an array that is spread over processes each saves and loads its own part. What is lent they have once among them: of equal
parts the first process's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.core.tensors.chunks import Chunk
from diloco.member.peer import Layout
from diloco.states.state import Content
from diloco_learner.api.model import compare_states
from diloco_learner.pytorch.shards import local_of, shards_of

Arrays: TypeAlias = dict[str, torch.Tensor]
OPTIMIZER = "optimizer/"  # begins the names of an optimizer's arrays


class HeldState:
    """Arrays by name, of which ``arrays`` returns those of this moment; their shapes stay from :meth:`learn` on."""

    def __init__(self, arrays: Callable[[], Arrays]) -> None:
        self._arrays = arrays
        self._wholes: dict[str, Chunk] = {}
        self.parts: dict[str, Chunk] = {}  # of these, what is here
        self._place, self._of_all = 0, [self.parts]  # by process

    def learn(self) -> None:
        """Note which arrays there are, once a step was taken."""
        arrays = self._arrays()
        self._wholes = {name: _whole(name, array) for name, array in arrays.items()}
        shards = shards_of(arrays)
        self.parts = dict(self._wholes)
        for name, shard in shards.items():
            whole, box = self._wholes[name], shard.box
            stop = tuple(first + length for first, length in zip(box.start, box.lengths, strict=True))
            self.parts[name] = Chunk(name, whole.shape, whole.dtype, box.start, stop)
        self._place, self._of_all = 0, [self.parts]

    def note_parts(self, place: int, parts: Sequence[Mapping[str, Chunk]]) -> None:
        """Note what each process has; this one is at the ``place``."""
        self._place, self._of_all = place, [dict(its) for its in parts]

    def wanted(self, *, optimizer_only: bool = False) -> list[Chunk]:
        """Return the chunks of what is here, in the order of names."""
        return [chunk for name in self._names(optimizer_only) for chunk in _cut(self.parts[name])]

    def lent(self) -> list[Chunk]:
        """Return the chunks of the optimizer's arrays that this process is the first to have."""
        firsts = (part for name in self._names(True) for place, part in self._first(name) if place == self._place)
        return [chunk for part in firsts for chunk in _cut(part)]

    def owners(self) -> dict[str, list[tuple[int, Chunk]]]:
        """Return by array of the optimizer, which process is the first to have which part."""
        return {name: list(self._first(name)) for name in self._names(True)}

    def layout(self) -> Layout:
        """Return names, shapes and types of the optimizer's arrays."""
        return Layout(tuple((name, self._wholes[name].shape, self._wholes[name].dtype) for name in self._names(True)))

    def check(self, state: Mapping[str, Chunk]) -> None:
        """Check that a state of these arrays, by name, is one of this model.

        Raises:
            RunError: an array is missing, not known, or of another shape or type.
        """
        compare_states(self._wholes, state)

    def content(self, chunks: Sequence[Chunk], arrays: Callable[[], Mapping[str, torch.Tensor]]) -> Content:
        """Return chunks with their values, of the ``arrays`` here by name, which are asked for when the first one is read."""

        def values() -> Iterator[NDArray[Any]]:
            found = arrays()
            for chunk in chunks:
                yield np.asarray(_on_host(found[chunk.name][chunk.within(self.parts[chunk.name])]), order="C")

        return Content(list(chunks), values())

    def local(self, *, copied: bool) -> Arrays:
        """Return what is here of each array, by name."""
        found = {name: local_of(array) for name, array in self._arrays().items()}
        return {name: array.clone() for name, array in found.items()} if copied else found

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        """Write a chunk of :meth:`wanted`: ``values``, any dtype [its lengths]."""
        with torch.no_grad():
            array = local_of(self._arrays()[chunk.name])
            array[chunk.within(self.parts[chunk.name])].copy_(torch.from_numpy(np.array(values)))

    def _names(self, optimizer_only: bool) -> list[str]:
        return [name for name in sorted(self._wholes) if name.startswith(OPTIMIZER) or not optimizer_only]

    def _first(self, name: str) -> Iterator[tuple[int, Chunk]]:
        """Yield the parts of an array that are not empty, each with the first process that has it."""
        seen = set[Chunk]()
        for place, parts in enumerate(self._of_all):
            if parts[name] not in seen and _is_present(parts[name]):
                seen.add(parts[name])
                yield place, parts[name]


def _is_present(part: Chunk) -> bool:
    return part.is_whole or part.size_bytes > 0


def _cut(part: Chunk) -> Iterator[Chunk]:
    if _is_present(part):
        yield from part.cut()


def _whole(name: str, array: torch.Tensor) -> Chunk:
    empty = local_of(array)[(slice(0, 0),) * array.ndim]
    return Chunk.whole(name, tuple(array.shape), _on_host(empty).dtype.name)


def _on_host(array: torch.Tensor) -> NDArray[Any]:
    """Return values on the host; those of bfloat16, which NumPy does not have, as float32."""
    found: NDArray[Any] = (array.float() if array.dtype == torch.bfloat16 else array).detach().cpu().numpy()
    return found
