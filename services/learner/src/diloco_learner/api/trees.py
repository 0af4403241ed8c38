"""The parameters of a user's own loop as a pytree of arrays, JAX's or NumPy's."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import FixedSpec, Fragment, TensorSpec
from diloco.errors import SettingsError
from diloco_learner.api.model import FINGERPRINT_VALUES, fingerprint_of
from diloco_learner.api.overlap import MemorySpan, check_apart
from diloco_learner.jax.island import IslandReading
from diloco_learner.jax.leaves import Leaf, path_of, read_rows, write_rows
from diloco_learner.tensors import trained

Vector = NDArray[np.float32]


class Tree:
    """A pytree of float32 arrays, JAX's or NumPy's, whose fragments are read and written.

    Raises:
        SettingsError: there is no array, or one of another type or kind; or two share memory, or have one path.
    """

    def __init__(self, params: Any) -> None:
        keyed, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._paths = [path_of(path) for path, _ in keyed]
        self._index = {path: at for at, path in enumerate(self._paths)}
        for first, second in itertools.pairwise(sorted(self._paths)):
            if first == second:
                raise SettingsError(
                    f"two parameters are both {first!r} in the run's log, where / joins keys: rename one of them"
                )
        self._leaves = [_checked(path, leaf) for path, (_, leaf) in zip(self._paths, keyed, strict=True)]
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._arrangements: list[Arrangement | None] = [None] * len(self._leaves)
        if not self._leaves:
            raise SettingsError("join: params have no arrays: pass the model's parameters, a pytree of float32 arrays")
        self._check_apart(self._leaves, [_buffer(leaf) for leaf in self._leaves])

    @property
    def ranked(self) -> None:
        """Nothing: a loop of JAX is one process."""

    @property
    def tree(self) -> Any:
        """The parameters, as they were handed over."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def tensors(self, said: object) -> list[TensorSpec]:
        """Return each array as the log has it, in which it is read and written from now on.

        Raises:
            SettingsError: ``said``, by its ``tensor``, says of one what cannot be.
        """
        specs = []
        for at, (path, shape) in enumerate(zip(self._paths, self._shapes, strict=True)):
            tensor = trained(said, path, shape, "a loop expresses by not passing it")
            specs.append(tensor.spec(path, shape))
            self._arrangements[at] = specs[-1].arrangement
        return specs

    def fixed(self) -> list[FixedSpec]:
        """Return nothing: a loop hands over what it trains."""
        return []

    def take(self, params: Any) -> None:
        """Take over the values of the same model.

        Raises:
            SettingsError: an array is missing, new, of another shape or type, or shares memory with another one.
        """
        keyed, structure = jax.tree_util.tree_flatten_with_path(params)
        if str(structure) != str(self._structure):
            came = {path_of(path) for path, _ in keyed}
            differ = sorted(came ^ set(self._paths)) or ["another kind of container"]
            raise SettingsError(f"step: params differ from those at join: {', '.join(differ[:3])}: pass the same pytree")
        leaves = []
        for at, (_, leaf) in enumerate(keyed):
            checked = _checked(self._paths[at], leaf)
            if checked.shape != self._shapes[at]:
                raise SettingsError(
                    f"step: parameter {self._paths[at]!r} has shape {checked.shape}, expected {self._shapes[at]} as at join"
                )
            leaves.append(checked)
        if not all(map(operator.is_, leaves, self._leaves)):
            self._check_apart(leaves, list(map(id, leaves)))
        self._leaves = leaves

    def swapped(self, values: Any) -> NoReturn:
        """Refuse: a loop evaluates any tree as it is.

        Raises:
            SettingsError: always.
        """
        raise SettingsError("averaged: parameters are arrays of JAX or NumPy: evaluate the averaged ones as they are")

    def fingerprint(self) -> str:
        """Return a hash of the first values of each array."""
        firsts = [
            leaf[(0,) * (leaf.ndim - 1)][:FINGERPRINT_VALUES] if leaf.ndim else leaf for leaf in self._leaves if leaf.size
        ]
        return fingerprint_of(np.asarray(first) for first in firsts)

    def shown(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array, any dtype [...]."""
        return array

    def rests(self) -> dict[str, Any]:
        """Return nothing: all arrays are float32."""
        return {}

    def put_rests(self, rests: Mapping[str, Any]) -> None:
        """Check that there is nothing to take over.

        Raises:
            SettingsError: there is.
        """
        if rests:
            raise SettingsError(
                f"load_state_dict: parameter {min(rests)!r} was bfloat16 when the state was taken: join with the same ones"
            )

    def sample(self) -> Any:
        """Return the sum of the smallest array that has a value; it is NaN once a model is.

        The loss's gradients carry NaN to all arrays.
        """
        return min(self._leaves, key=lambda leaf: leaf.size or math.inf).sum()

    def number(self, scalar: Any) -> Callable[[], float]:
        """Return a function that waits for a scalar of any framework and returns it."""
        # of PyTorch without what it was computed from, which would be kept for a step
        return partial(float, scalar.detach() if hasattr(scalar, "detach") else scalar)

    def snapshot(self, fragment: Fragment) -> IslandReading:
        """Queue a copy of a fragment's values."""
        return IslandReading(
            fragment, tuple(read_rows(self._stored(self._index[piece.path]), piece) for piece in fragment.pieces)
        )

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Write a fragment, as :func:`~diloco_learner.jax.leaves.write_rows` does; vectors: float32 [its size]."""
        for piece in fragment.pieces:
            at = self._index[piece.path]
            written, kept = write_rows(self._stored(at), piece, theta, reference, alpha), self._arrangements[at]
            leaf = self._leaves[at]
            if kept is None or isinstance(leaf, jax.Array):
                self._leaves[at] = written if kept is None else kept.restored(written)
            else:
                leaf[...] = kept.restored(written)

    def _check_apart(self, leaves: Sequence[Leaf], buffers: Sequence[int]) -> None:
        """Check that no two arrays share memory: one would be donated twice, or written into by the other's versions.

        Arrays of which ``buffers`` has the same number are one.

        Raises:
            SettingsError: two do.
        """
        places: dict[int, str] = {}
        for path, buffer in zip(self._paths, buffers, strict=True):
            first = places.setdefault(buffer, path)
            if first != path:
                raise SettingsError(
                    f"parameters {first!r} and {path!r} are one array, which run.step takes over: pass it once, or pass a copy"
                )
        of_host = zip(self._paths, leaves, strict=True)
        check_apart({path: _span(leaf) for path, leaf in of_host if isinstance(leaf, np.ndarray)})

    def _stored(self, at: int) -> Leaf:
        """Return an array as the log has it."""
        kept = self._arrangements[at]
        return self._leaves[at] if kept is None else kept.stored(self._leaves[at])


def _buffer(leaf: Leaf) -> int:
    """Return where an array lies, for arrays of JAX that are several names of one buffer; it may wait for the device."""
    if isinstance(leaf, jax.Array) and leaf.size and len(leaf.sharding.device_set) == 1:
        return hash((str(leaf.sharding.device_set), leaf.unsafe_buffer_pointer()))
    return id(leaf)


def _span(array: NDArray[np.float32]) -> MemorySpan:
    return MemorySpan("", array.ctypes.data, array.itemsize, array.shape, array.strides)


def _checked(path: str, leaf: Any) -> Leaf:
    """Return a leaf that can be read and written: a NumPy array that cannot be written to as a copy.

    Raises:
        SettingsError: it is of another type or kind.
    """
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise SettingsError(
            f"parameter {path!r} is a {type(leaf).__name__}, expected an array of JAX or NumPy: for PyTorch pass the "
            "module, or its tensors by name in one dictionary"
        )
    if leaf.dtype != np.float32:
        raise SettingsError(
            f"parameter {path!r} is {leaf.dtype}, expected float32: keep float32 masters, and cast them in the loss"
        )
    if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
        return leaf.copy()
    return leaf
