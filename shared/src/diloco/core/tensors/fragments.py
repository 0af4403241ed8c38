"""Fragments of a model, cut alike in every service.

A *tensor* is named by its path. A *piece* is a tensor or a range of its rows (first axis). A *fragment* is a list of pieces
and, on a host, one flat float32 vector: the pieces' values one after another in C order. Fragments are disjoint and cover
the model.

Balanced fragmentation (Decoupled DiLoCo, arXiv 2604.21428; algorithm.md section 4): largest piece first into the currently
smallest of P bins, ties by path, first row, then bin index. Tensors larger than a fragment's even share are split by rows
first, since a scan-stacked model has few, huge tensors. Embedding-like tensors get fragments of their own, as many as is
their share of the parameters, because they are merged differently, and so does state that is merged.

The paper's alternatives have rougher traffic (its appendix C). ``layers``: all tensors outside the layers are the first
fragment, and the layers, in the order of their numbers, are strided over the others. ``tensors``: the same with the layers'
tensors one by one. ``layer`` and ``strided`` are earlier forms of them, which go on as they were: they deal layers, or tensors,
in the order of their paths, and keep only embedding-like tensors apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors import dealing
from diloco.core.tensors.arrangement import Arrangement
from diloco.errors import AdmissionError, FormatError, SettingsError
from diloco.settings.run import BY_LAYERS, Bits, FragmentSettings, Strategy

MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16
MAX_PATH_CHARACTERS = 512
MAX_PARAMETERS = 2**44
STATE_PATH = "state/"  # begins the paths of state that is merged
STATE_BITS: Bits = 32  # of bodies with state: a variance beside a large value of its block must not become negative

_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
_Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_PARAMETERS)]], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Axes = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=MAX_DIMENSIONS)]], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class _Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor in a packed map."""

    path: _Path
    shape: _Shape
    embedding: bool
    arrangement: tuple[_Shape, _Axes] | None = None
    state: bool = False
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARAMETERS)] = 0  # absent: it is not stacked


class _Fixed(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A fixed tensor in a packed map."""

    path: _Path
    dtype: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_PARAMETERS)]], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    hash: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Map(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A packed map."""

    tensors: Annotated[list[_Entry], msgspec.Meta(max_length=MAX_TENSORS)]
    count: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    strategy: Strategy
    fixed: Annotated[list[_Fixed], msgspec.Meta(max_length=MAX_TENSORS)] = []


_MAP_DECODER = msgspec.msgpack.Decoder(_Map)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model: path, shape in the log, and whether it is embedding-like (merged by ``merge.embedding``).

    ``arrangement``: the way of the model's own tensor in the log; None: the log has it as the model has it. ``state``: it is
    not trained; a version of it is the average of the learners' values. ``layers``: its rows in the log are those of so many
    layers, one layer after another, equally many of each; 0: it is not stacked.
    """

    path: str
    shape: tuple[int, ...]
    embedding: bool = False
    arrangement: Arrangement | None = None
    state: bool = False
    layers: int = 0

    @property
    def model_shape(self) -> tuple[int, ...]:
        """The shape that the model has the tensor in."""
        return self.shape if self.arrangement is None else self.arrangement.shape

    @property
    def size(self) -> int:
        """Parameters in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FixedSpec:
    """A tensor that all learners have alike and that is in no message: its path, type, shape, and BLAKE3 of its values."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    hash: bytes

    @classmethod
    def of(cls, path: str, dtype: str, shape: tuple[int, ...], values: memoryview | bytes) -> FixedSpec:
        """Return a fixed tensor by the bytes of its ``values`` in C order, little-endian."""
        return cls(path, dtype, shape, blake3(values, max_threads=blake3.AUTO).digest())


@dataclass(frozen=True)
class Piece:
    """Rows ``row_start`` to ``row_stop`` of a tensor, at ``offset`` in its fragment's vector. A scalar has one row.

    ``embedding``: the tensor is embedding-like.
    """

    path: str
    row_start: int
    row_stop: int
    shape: tuple[int, ...]
    offset: int
    embedding: bool

    @property
    def size(self) -> int:
        """Parameters in the piece."""
        return math.prod(self.shape)

    def row_segments(self) -> int:
        """Return the number of vectors along the last axis; a vector or scalar is one."""
        return max(1, self.size // self.shape[-1]) if len(self.shape) > 1 else 1


@dataclass(frozen=True)
class Fragment:
    """One unit of synchronisation; ``embedding``: all of its tensors are embedding-like; ``state``: they are state."""

    index: int
    pieces: tuple[Piece, ...]
    embedding: bool
    state: bool = False

    @cached_property
    def size(self) -> int:
        """Parameters, or values of state, in the fragment: the length of its vector."""
        return sum(piece.size for piece in self.pieces)

    def bits(self, usual: Bits) -> Bits:
        """Return the bits of a value in its offers and records, which are the ``usual`` ones unless it is state."""
        return STATE_BITS if self.state else usual

    def segments(self, granularity: Literal["row", "tensor"]) -> NDArray[np.int64]:
        """Return the boundaries of the norm groups of radial-directional averaging: int64 [groups + 1], from 0 to ``size``.

        ``tensor``: one group a piece; ``row``: one a vector along the last axis, which is one output unit where weights
        are stored (out, in).
        """
        bounds = [np.zeros(1, np.int64)]
        for piece in self.pieces:
            groups = _groups(piece, granularity)
            bounds.append(piece.offset + piece.size // groups * np.arange(1, groups + 1, dtype=np.int64))
        return np.concatenate(bounds)

    def embedding_groups(self, granularity: Literal["row", "tensor"]) -> NDArray[np.bool_]:
        """Return which of these groups are of embedding-like tensors: bool [groups].

        They share a fragment with others if the model is one fragment, or is cut by layers.
        """
        kinds = [piece.embedding for piece in self.pieces]
        return np.repeat(kinds, [_groups(piece, granularity) for piece in self.pieces])

    def gather(self, tensors: Mapping[str, NDArray[np.float32]], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Copy the fragment's values out of ``tensors``, float32 [their shapes], into one vector, float32 [size]."""
        vector = np.empty(self.size, np.float32) if out is None else out
        for piece in self.pieces:
            rows = np.asarray(tensors[piece.path], np.float32)
            rows = rows[piece.row_start : piece.row_stop] if rows.ndim else rows
            vector[piece.offset : piece.offset + piece.size] = rows.reshape(-1)
        return vector


@dataclass(frozen=True)
class FragmentMap:
    """All tensors of a model and the fragments they are cut into; ``fixed`` ones are in none.

    Only a ``strategy`` that goes by layers has the tensors' ``layers``, so that other maps are as they were before.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    strategy: Strategy
    fixed: tuple[FixedSpec, ...] = ()

    @cached_property
    def size(self) -> int:
        """Values in all fragments: parameters, and state that is merged."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Parameters in the model."""
        return self.size - self.state_values

    @cached_property
    def state_values(self) -> int:
        """Values of state that is merged."""
        return sum(tensor.size for tensor in self.tensors if tensor.state)

    @cached_property
    def fixed_digest(self) -> bytes:
        """BLAKE3 (32 bytes) of the fixed tensors: of their paths, types, shapes and the hashes of their values."""
        return blake3(msgspec.msgpack.encode([_fixed_entry(each) for each in self.fixed])).digest()

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 (32 bytes) of tensors and pieces: equal maps, equal digest."""
        return blake3(self.pack()).digest()

    def pack(self) -> bytes:
        """Return the tensors, fragment count and strategy as msgpack; the pieces follow from them."""
        tensors = [_entry(tensor) for tensor in self.tensors]
        fixed = [_fixed_entry(each) for each in self.fixed]
        return msgspec.msgpack.encode([tensors, len(self.fragments), self.strategy, *([fixed] if fixed else [])])

    def empty(self) -> dict[str, NDArray[np.float32]]:
        """Return zeroed tensors of the model by path, float32 [their shapes]."""
        return {tensor.path: np.zeros(tensor.shape, np.float32) for tensor in self.tensors}


def unpack_map(data: bytes) -> FragmentMap:
    """Return the map that :meth:`FragmentMap.pack` wrote.

    Raises:
        FormatError: the bytes are not a fragment map within its bounds.
    """
    try:
        found = _MAP_DECODER.decode(data)
        specs = [_spec(entry) for entry in found.tensors]
        fixed = [FixedSpec(each.path, each.dtype, tuple(each.shape), each.hash) for each in found.fixed]
        if sum(s.size for s in specs) > MAX_PARAMETERS:
            raise FormatError(f"fragment map: more than {MAX_PARAMETERS} parameters")
        if found.strategy not in BY_LAYERS and any(s.layers for s in specs):
            raise FormatError(f"fragment map: stacked layers are given, but the strategy {found.strategy!r} does not use them")
        return build_map(specs, found.count, found.strategy, fixed)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, SettingsError) as error:
        raise FormatError(f"fragment map: {error}") from None


def _fixed_entry(fixed: FixedSpec) -> list[object]:
    return [fixed.path, fixed.dtype, list(fixed.shape), fixed.hash]


def _entry(tensor: TensorSpec) -> list[object]:
    kept = tensor.arrangement
    arrangement = None if kept is None else [list(kept.shape), list(kept.outputs)]
    later = [(arrangement, None), (tensor.state, False), (tensor.layers, 0)]
    while later and later[-1][0] == later[-1][1]:  # the last elements are absent where they have their defaults
        later.pop()
    return [tensor.path, list(tensor.shape), tensor.embedding, *(value for value, _ in later)]


def _spec(entry: _Entry) -> TensorSpec:
    shape, kept = tuple(entry.shape), None
    if entry.arrangement is not None:
        kept = Arrangement(tuple(entry.arrangement[0]), tuple(entry.arrangement[1]))
        if not kept.is_sound or kept.stored_shape != shape:
            raise FormatError(
                f"fragment map: tensor {entry.path!r} of shape {shape} does not have the arrangement that the map states"
            )
    if entry.state and (entry.embedding or kept is not None):
        raise FormatError(
            f"fragment map: tensor {entry.path!r} is marked both as state and as a parameter (embedding-like, or arranged)"
        )
    if entry.layers and (entry.state or not shape or shape[0] % entry.layers):
        raise FormatError(f"fragment map: tensor {entry.path!r} of shape {shape} is not a stack of {entry.layers} layers")
    return TensorSpec(
        path=entry.path, shape=shape, embedding=entry.embedding, arrangement=kept, state=entry.state, layers=entry.layers
    )


def cut_model(tensors: Sequence[TensorSpec], settings: FragmentSettings, fixed: Sequence[FixedSpec] = ()) -> FragmentMap:
    """Cut ``tensors`` as a run's settings say, beside ``fixed`` ones.

    Raises: as :func:`build_map`.
    """
    return build_map(tensors, settings.count, settings.strategy, fixed, settings.layers)


def build_map(
    tensors: Sequence[TensorSpec],
    count: int,
    strategy: Strategy = "balanced",
    fixed: Sequence[FixedSpec] = (),
    layers: int = 1,
) -> FragmentMap:
    """Cut ``tensors`` into ``count`` fragments, beside ``fixed`` ones.

    A strategy that goes by layers makes fewer fragments if there are fewer layers, or their tensors, than that: one for every
    ``layers`` of them. Cutting again, into as many as were made, makes the same fragments.

    Raises:
        SettingsError: no trained tensors, two tensors with the same path, an empty tensor, more fragments than rows, one
            fragment for parameters and state, or a strategy by layers for a model without layers.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.path)
    if strategy not in BY_LAYERS:
        ordered = [replace(tensor, layers=0) for tensor in ordered]
    if all(tensor.state for tensor in ordered):
        raise SettingsError("fragments: the model has no tensors")
    paths = [tensor.path for tensor in tensors] + [each.path for each in fixed]
    for path, following in itertools.pairwise(sorted(paths)):
        if path == following:
            raise SettingsError(f"fragments: two tensors are named {path!r}")
    for tensor in ordered:
        if tensor.size == 0:
            raise SettingsError(f"fragments: tensor {tensor.path!r} of shape {tensor.shape} is empty")
    bins = dealing.deal(ordered, count, strategy, layers)
    fragments = tuple(_fragment(i, b) for i, b in enumerate(bins))
    return FragmentMap(tuple(ordered), fragments, strategy, tuple(sorted(fixed, key=lambda each: each.path)))


def build_whole(tensors: Sequence[TensorSpec]) -> FragmentMap:
    """Cut ``tensors`` into as few fragments as can be: one, and one of state if there is any.

    Raises: as :func:`build_map`.
    """
    return build_map(tensors, 1 + any(tensor.state for tensor in tensors))


def check_same_map(ours: FragmentMap, theirs: FragmentMap, run: str) -> None:
    """Refuse a model that is not the run's.

    Raises:
        AdmissionError: with the first tensor that differs, in the run and in this model.
    """
    if ours.digest == theirs.digest:
        return
    mine, run_s = (_by_path(each) for each in (ours, theirs))
    for path in sorted(mine.keys() | run_s.keys()):
        a, b = mine.get(path), run_s.get(path)
        if {type(a), type(b)} == {FixedSpec, type(None)}:
            lacks = "the run" if b is None else "this learner"
            raise AdmissionError(
                f"run {run!r}: {lacks} lacks tensor {path!r}, which is not trained: either all learners of a run list "
                "frozen tensors (tasks, and loops that pass a module), or none does (loops that pass trained tensors by "
                "name)"
            )
        if isinstance(a, FixedSpec) and isinstance(b, FixedSpec) and a != b:
            raise AdmissionError(
                f"run {run!r}: tensor {path!r}, which is not trained, differs from the founder's: the run has "
                f"{_describe(b)}, this learner {_describe(a)}; give all learners the same file, and create no values that "
                "depend on the machine"
            )
        if a != b:
            raise AdmissionError(
                f"run {run!r}: tensor {path!r} differs: the run has {_describe(b)}, this learner's model has {_describe(a)}; "
                "use the run's own task settings or another run name"
            )
    raise AdmissionError(
        f"run {run!r}: fragment map differs: the run has {len(theirs.fragments)} fragments by {theirs.strategy!r}, this "
        f"learner {len(ours.fragments)} by {ours.strategy!r}"
    )


def _by_path(model: FragmentMap) -> dict[str, TensorSpec | FixedSpec]:
    return {tensor.path: tensor for tensor in model.tensors} | {each.path: each for each in model.fixed}


def _describe(tensor: TensorSpec | FixedSpec | None) -> str:
    if tensor is None:
        return "no such tensor"
    if isinstance(tensor, FixedSpec):
        return f"a {tensor.dtype} of shape {tensor.shape}, not trained, with values of hash {tensor.hash.hex()[:16]}"
    kept = tensor.arrangement
    axes = "" if kept is None else f" with the output axes {', '.join(map(str, kept.outputs)) or 'none'}"
    kind = ", embedding-like" if tensor.embedding else ", state that is merged" if tensor.state else ""
    stacked = f", a stack of {tensor.layers} layers" if tensor.layers else ""
    return f"shape {tensor.model_shape}{axes}{kind}{stacked}"


def _fragment(index: int, members: Sequence[dealing.Rows]) -> Fragment:
    pieces, offset = [], 0
    for tensor, start, stop in sorted(members, key=lambda m: (m[0].path, m[1])):
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        pieces.append(
            Piece(path=tensor.path, row_start=start, row_stop=stop, shape=shape, offset=offset, embedding=tensor.embedding)
        )
        offset += pieces[-1].size
    return Fragment(index, tuple(pieces), all(piece.embedding for piece in pieces), members[0][0].state)


def _groups(piece: Piece, granularity: Literal["row", "tensor"]) -> int:
    return piece.row_segments() if granularity == "row" else 1
