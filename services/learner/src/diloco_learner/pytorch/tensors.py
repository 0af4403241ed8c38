"""The tensors of a module that a run trains: their paths, and reading and writing of their rows, in place.

A parameter's path is its name with ``/`` for ``.``. A run that others train with JAX has the names and layouts of their task:
a task's ``tensors(module)`` gives for each path a view of a parameter, such as its transpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.boxes import Box
from diloco.core.tensors.fragments import Fragment, Piece, TensorSpec
from diloco.core.tensors.rows import FragmentRows, Where, at
from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.api.model import Vector
from diloco_learner.pytorch import names
from diloco_learner.pytorch.shards import LocalShard
from diloco_learner.pytorch.transfers import CopyEvent, Transfers
from diloco_learner.task_api import STATE, is_merged
from diloco_learner.tensors import Tensor, trained

Views = dict[str, torch.Tensor]
FLOATS = (torch.float32, torch.bfloat16)
NO_SHARDS: Mapping[str, LocalShard] = MappingProxyType({})


def paths_of(module: torch.nn.Module) -> Views:
    """Return the trained parameters of a module by their paths."""
    return {each.path: each.tensor.detach() for each in names.parameters_of(module) if each.tensor.requires_grad}


def merged_buffers(task: object, buffers: Views, named: Mapping[str, Any], source: str) -> Views:
    """Return the buffers of a module that are merged, by their paths in the log.

    ``buffers`` are those that are saved, by name; ``named`` are the task's ``tensors``, of which some may be views of buffers.
    Errors begin with the ``source``.

    Raises:
        SettingsError: a view is of no such buffer, or the task has one averaged that is not float32.
    """
    paths = {buffer.data_ptr(): name.replace(".", "/") for name, buffer in buffers.items()}
    for path, view in named.items():
        if not isinstance(view, torch.Tensor) or view.data_ptr() not in paths or view.ndim > 1:
            raise SettingsError(
                f"{source}: tensors() has {path!r}, which begins with {STATE!r}, but is not a buffer of the module with "
                f"at most one axis: give the buffer itself, such as module.norm.running_mean{members.place(task.tensors)}"  # type: ignore[attr-defined]
            )
        paths[view.data_ptr()] = path.removeprefix(STATE)
    found = {}
    for buffer in buffers.values():
        path = paths[buffer.data_ptr()]
        if is_merged(task, path, shown(buffer.dtype), members.place(task.module)):  # type: ignore[attr-defined]
            found[STATE + path] = buffer
    return found


def check_module(module: Any, source: str, place: str) -> None:
    """Check that a task's ``module`` is one, that it has trained parameters, and that each is float32 or bfloat16.

    ``source`` begins the sentence, and the ``place`` where the module is made ends it.

    Raises:
        SettingsError: it is none, it has none, or one is of another type.
        ValueError: one has no shape yet.
    """
    if not isinstance(module, torch.nn.Module):
        raise SettingsError(f"{source}: module() returned a {type(module).__name__}, expected a torch.nn.Module{place}")
    named = [(each.name, each.tensor) for each in names.parameters_of(module) if each.tensor.requires_grad]
    if not named:
        raise SettingsError(
            f"{source}: the module has no parameter that requires a gradient, so there is nothing to train{place}"
        )
    for name, tensor in named:
        if tensor.dtype not in FLOATS:
            raise SettingsError(
                f"{source}: parameter {name!r} is {shown(tensor.dtype)}, expected float32 or bfloat16: use "
                f"module.float(), and compute in other types with autocast{place}"
            )
        tensor.numel()


def check_views(views: Any, module: torch.nn.Module, source: str, place: str) -> Views:
    """Return a mapping of paths to views of a module's trained parameters, if they are all of them, each once.

    ``source`` begins an error, and the ``place`` where the views are made ends it.

    Raises:
        SettingsError: a view is no tensor, or shares no memory with a parameter; or a parameter has no view, or two.
    """
    if not isinstance(views, Mapping):
        raise SettingsError(
            f"{source}: tensors() returned a {type(views).__name__}, expected views of parameters by path{place}"
        )
    held = names.parameters_of(module)
    places = {each.tensor.untyped_storage().data_ptr(): each.name for each in held}
    missing = {each.name: each.tensor.numel() for each in held if each.tensor.requires_grad}
    for path, view in views.items():
        if not isinstance(view, torch.Tensor):
            raise SettingsError(
                f"{source}: tensors() has {path!r} as a {type(view).__name__}, expected a view of a parameter{place}"
            )
        name = places.get(view.untyped_storage().data_ptr(), "")
        if name not in missing:
            raise SettingsError(
                f"{source}: tensors() has {path!r}, which shares no memory with a trained parameter: give a view of a "
                f"parameter, such as parameter.T, not a copy{place}"
            )
        missing[name] -= view.numel()
    for name, left in missing.items():
        if left:
            said = f"lacks {left} of the values of" if left > 0 else "repeats values of"
            raise SettingsError(f"{source}: tensors() {said} parameter {name!r}: each value must occur once{place}")
    return {path: view.detach() for path, view in views.items()}


@dataclass(frozen=True)
class TorchFragmentCopy:
    """A fragment's values as of when they were read: all of them, in one part, or the ``rows`` that a rank hands over.

    ``parts`` are copies, each float32 [its size], where the tensors are, or on their way to the host, and there behind the
    ``event``.
    """

    fragment: Fragment
    rows: FragmentRows | None
    parts: Sequence[torch.Tensor]
    event: CopyEvent | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether the values are on the host already."""
        return self.event is None and all(map(is_on_host, self.parts))

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them in their places, float32 [size of the fragment], in ``out`` if given.

        From any thread. The vector may be written to.
        """
        if self.event is not None:
            self.event.synchronize()
        if self.rows is None and out is None:
            [values] = self.parts
            whole: Vector = values.cpu().numpy()
            return whole
        vector = np.empty(self.fragment.size, np.float32) if out is None else out
        if self.rows is None:
            vector[...] = self.parts[0].cpu().numpy()
            return vector
        for (piece, where), part in zip(self.rows.parts, self.parts, strict=True):
            target = at(vector, piece, where)
            target[...] = part.cpu().numpy().reshape(target.shape)
        return vector


@dataclass(frozen=True)
class _HostRows:
    """Rows of one fragment as NumPy arrays that share their memory: float32 [values], each with its offset in the fragment.

    ``parts`` is empty where a row is not on the host, is not float32 or is not contiguous.
    """

    fragment: Fragment
    tensors: list[torch.Tensor]
    parts: list[tuple[Vector, int]]

    @classmethod
    def of(cls, fragment: Fragment, rows: list[torch.Tensor]) -> _HostRows:
        if not rows or not all(is_on_host(each) and each.dtype == torch.float32 and each.is_contiguous() for each in rows):
            return cls(fragment, [], [])
        arrays = [each.numpy().reshape(-1) for each in rows]
        return cls(fragment, rows, [(values, piece.offset) for values, piece in zip(arrays, fragment.pieces, strict=True)])


class TensorRows:
    """Rows of named tensors, float32 or bfloat16 on any device, which are read and written at once, where they lie.

    Of a tensor that is spread over ranks, ``shards`` says by path which part is here. The value of a tensor in bfloat16 is
    what lies there and a rest, float32, that rounding has left over of the last version: no version is rounded away.
    """

    def __init__(
        self, views: Views, shards: Mapping[str, LocalShard] = NO_SHARDS, *, transfers: Transfers | None = None
    ) -> None:
        """Begin; ``transfers``: from and to devices, which may be shared with other rows."""
        self.views = views
        self._shards, self._transfers = shards, Transfers() if transfers is None else transfers
        self._arrangements: dict[str, Arrangement] = {}
        self._stored = views  # as the log has them, output units first
        self._rests = {path: torch.zeros_like(view, dtype=torch.float32) for path, view in views.items() if is_rounded(view)}
        self._stored_rests = self._rests
        self.boxes: dict[str, Box] = {}  # of these, what is here
        self._host: dict[int, _HostRows] = {}  # by fragment, from its first use on

    def specs(
        self, said: object, frozen: str, convolutions: Mapping[str, Tensor] = MappingProxyType({}), *, optimized: bool = True
    ) -> list[TensorSpec]:
        """Return every tensor as the log has it, in which it is read and written from now on.

        A task or loop has ``said`` what each is; where it says nothing, the weights of ``convolutions``, by path, are what
        their modules' types say. ``frozen`` is how it says of one so. ``optimized``: by us, as matrices of the model's shape.

        Raises:
            SettingsError: it says of one what cannot be.
        """
        specs = []
        for path, view in self.views.items():
            shape = self._shards[path].shape if path in self._shards else tuple(view.shape)
            tensor = trained(said, path, shape, frozen)
            if path in convolutions and not hasattr(said, "tensor") and tensor.kind != "embedding":
                tensor = convolutions[path]
            kept = tensor.arrangement(shape)
            if kept is not None and (len(kept.outputs) > 1 or (optimized and tensor.kind == "matrix")):
                raise SettingsError(
                    f"task: tensor({path!r}, {shape}) must have its output axes first: give a view that has them first, "
                    "such as parameter.T; a task does so in tensors(module), a loop in the tensors that it passes"
                )
            if kept is not None:
                self._arrangements[path] = kept
            specs.append(tensor.spec(path, shape))
        self._stored, self._stored_rests, self._host = self._as_stored(self.views), self._as_stored(self._rests), {}
        self.boxes = {spec.path: self._box(spec) for spec in specs}
        return specs

    def _box(self, spec: TensorSpec) -> Box:
        shard = self._shards.get(spec.path)
        return Box.whole(spec.shape) if shard is None else shard.box.stored(spec)

    def moved(self, views: Views) -> TensorRows:
        """Return the rows of other tensors, of the same paths, shapes and shards, as the log has them."""
        rows = TensorRows(views, self._shards, transfers=self._transfers)
        rows._arrangements, rows._stored, rows.boxes = self._arrangements, self._as_stored(views), self.boxes
        rows._rests = {path: rest.to(views[path].device) for path, rest in self._rests.items()}
        rows._stored_rests = self._as_stored(rows._rests)
        return rows

    @property
    def rests(self) -> Views:
        """By path, float32 [shape of the view], what rounding to bfloat16 has left over of the last version."""
        return self._rests

    def device_of(self, fragment: Fragment) -> torch.device:
        """Return the device of the first of a fragment's tensors that is here, on which it is copied."""
        return next(self.views[piece.path].device for piece in fragment.pieces if piece.path in self.views)

    def read(self, fragment: Fragment) -> TorchFragmentCopy:
        """Queue a copy of a fragment's values, on the device of the first of them."""
        device = self.device_of(fragment)
        if self._transfers.serves(device):
            return self._fetch(fragment, None, fragment.pieces, device)
        values = torch.cat([self._value(piece).reshape(-1).to(device) for piece in fragment.pieces])
        return TorchFragmentCopy(fragment, None, [values])

    def read_rows(self, fragment: Fragment, rows: FragmentRows) -> TorchFragmentCopy:
        """Queue a copy of rows of a fragment, each part on its own device, or with the first part on its device."""
        pieces = [piece for piece, _ in rows.parts]
        if pieces and self._transfers.serves(self.views[pieces[0].path].device):
            return self._fetch(fragment, rows, pieces, self.views[pieces[0].path].device)
        return TorchFragmentCopy(fragment, rows, [self._value(piece).reshape(-1).clone() for piece in pieces])

    def _fetch(
        self, fragment: Fragment, rows: FragmentRows | None, pieces: Sequence[Piece], device: torch.device
    ) -> TorchFragmentCopy:
        sizes = [self._part(piece, self._stored).numel() for piece in pieces]

        def fill(values: torch.Tensor) -> None:
            for piece, target in zip(pieces, values.split(sizes), strict=True):
                value = self._value(piece)
                target.view(value.shape).copy_(value)

        found = self._transfers.fetch(sum(sizes), device, fill)
        parts = [found.values] if rows is None else list(found.values.split(sizes))
        return TorchFragmentCopy(fragment, rows, parts, found.event)

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None, alpha: float) -> None:
        """Write a fragment, as :class:`diloco_learner.api.model.SharedParameters` says; vectors are float32 [its size]."""
        shared = self._on_host(fragment)
        if shared is not None and isinstance(reference, Baseline) and reference.offered is not None:
            for values, start in shared.parts:
                reference.keep_progress(values, theta, start, alpha)
            increment_version(shared.tensors)  # as any write in place does: a backward pass may need the values before
            return
        with torch.no_grad(), self._transfers.computing():
            for piece in fragment.pieces:
                where = self._where(piece)
                if where is None:
                    continue
                value = self._value(piece)
                new = self._sent(theta, piece, where, value)
                if reference is not None:
                    new = new + (value - self._sent(reference, piece, where, value))
                self._set(piece, new if alpha == 0 else alpha * value + (1 - alpha) * new)

    def _sent(self, vector: Baseline | Vector, piece: Piece, where: Where, rows: torch.Tensor) -> torch.Tensor:
        """Return values of a fragment's vector as the ``rows`` of a piece are: of their shape, on their device."""
        values = at(vector, piece, where)
        if self._transfers.serves(rows.device):
            return self._transfers.send(values, rows.device).reshape(rows.shape)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).to(rows.device).reshape(rows.shape)

    def _value(self, piece: Piece) -> torch.Tensor:
        """Return what is here of a piece, float32: a view, or of a tensor in bfloat16 a copy."""
        rows = self._part(piece, self._stored)
        return rows.float() + self._part(piece, self._stored_rests) if piece.path in self._rests else rows

    def _set(self, piece: Piece, new: torch.Tensor) -> None:
        rows = self._part(piece, self._stored)
        rows.copy_(new)
        if piece.path in self._rests:
            self._part(piece, self._stored_rests).copy_(new - rows)

    def _where(self, piece: Piece) -> Where | None:
        """Return where what is here of a piece is in it; None if nothing is."""
        if not self._shards:
            return () if piece.path in self._stored else None
        box = self.boxes.get(piece.path)
        return None if box is None else box.overlap(piece)

    def _part(self, piece: Piece, stored: Views) -> torch.Tensor:
        """Return what is here of a piece: a view."""
        view = stored[piece.path]
        if not view.ndim:
            return view
        whole = piece.path not in self._shards
        return view[slice(piece.row_start, piece.row_stop) if whole else self.boxes[piece.path].rows(piece)]

    def _on_host(self, fragment: Fragment) -> _HostRows | None:
        """Return the rows of a fragment, if all of them are blocks of float32 in the host's memory."""
        found = self._host.get(fragment.index)
        if found is None or found.fragment is not fragment:
            held = all(piece.path in self._stored and piece.path not in self._shards for piece in fragment.pieces)
            rows = [self._part(piece, self._stored) for piece in fragment.pieces] if held else []
            found = _HostRows.of(fragment, [] if any(self._transfers.serves(each.device) for each in rows) else rows)
            self._host[fragment.index] = found
        return found if found.parts else None

    def _as_stored(self, views: Views) -> Views:
        return {path: _outputs_first(view, self._arrangements.get(path)) for path, view in views.items()}


def _outputs_first(view: torch.Tensor, kept: Arrangement | None) -> torch.Tensor:
    """Return a view whose first axis is the rows of the log; its other axes are the log's columns, in C order."""
    if kept is None:
        return view
    return view.movedim(kept.outputs[0], 0) if kept.outputs else view[None]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the host's memory."""
    kind: str = tensor.device.type
    return kind == "cpu"


def is_rounded(tensor: torch.Tensor) -> bool:
    """Whether a tensor has fewer digits than the log."""
    rounded: bool = tensor.dtype == torch.bfloat16
    return rounded


def shown(dtype: torch.dtype) -> str:
    """Return a type as people name it."""
    return str(dtype).removeprefix("torch.")
