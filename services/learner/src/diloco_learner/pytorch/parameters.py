"""The parameters of a joined PyTorch loop: a module, or its tensors by name. They are read and written in place.

A loop may have other tensors after a step than before it: ``parameter.data = ...``, ``module.to(device)`` and
``load_state_dict(assign=True)`` swap the memory behind a parameter, and others replace the parameter. So each step begins with
a look at all of them (:class:`_Watch`), and takes over what came. Its values count as the loop's own, like those of a step: the
difference to the values before is part of what this learner offers next. What a run cannot take over is refused by name.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.boxes import Box
from diloco.core.tensors.fragments import FixedSpec, Fragment, TensorSpec
from diloco.core.tensors.rows import FragmentRows, RowLayout
from diloco.errors import DilocoError, SettingsError
from diloco_learner.api.model import FINGERPRINT_VALUES, Vector, fingerprint_of
from diloco_learner.api.overlap import MemorySpan, check_apart
from diloco_learner.pytorch.frozen import fixed_specs
from diloco_learner.pytorch.names import (
    ModuleTensor,
    buffers_of,
    by_path,
    contents_of,
    convolutions,
    looks_at_buffers,
    parameters_of,
    plain_path,
    refuse_sharding_wrappers,
)
from diloco_learner.pytorch.ranks import TorchRanks, ranks_of_loop
from diloco_learner.pytorch.shards import is_sharded, local_of, shards_of, spread_as
from diloco_learner.pytorch.swapping import check_rests, swapped
from diloco_learner.pytorch.tensor_checks import check_present, check_type, is_plain
from diloco_learner.pytorch.tensors import TensorRows, TorchFragmentCopy, Views, shown
from diloco_learner.pytorch.transfers import Transfers
from diloco_learner.task_api import STATE
from diloco_learner.tensors import Tensor

FLOAT_BYTES = 4  # of a value in a copy


class TorchParameters:
    """Tensors in float32 or bfloat16 on any device; of a module also buffers that are averaged, and parameters that are frozen.

    In a process group they are what one rank has of the parameters.

    Raises:
        SettingsError: there is no tensor, or one of another type or kind; or two share memory.
    """

    def __init__(self, params: Any, transfers: Transfers | None = None) -> None:
        """Begin; ``transfers``: from and to devices."""
        found = _find(params)
        place = ranks_of_loop()
        if not found.trained and place[1] == 1:
            raise SettingsError("join: the module has no parameter that requires a gradient, so there is nothing to train")
        self._place, self._ranks = place, TorchRanks(*place) if place[1] > 1 else None
        self._joined, self._fixed = found, frozenset[FixedSpec]()
        self._shards = shards_of(found.trained)
        self._transfers = Transfers() if transfers is None else transfers
        self._rows = TensorRows(_views(found.trained), self._shards, transfers=self._transfers)
        self._state = TensorRows(_views(found.state), transfers=self._transfers)
        self._devices = self._served()
        self.tree, self._watch = params, _Watch(params, found)
        self._read: list[FragmentRows] | None = None  # by fragment: what this rank hands over; None: all

    @property
    def ranked(self) -> TorchParameters | None:
        """These, if they are what one rank of several has; else None."""
        return None if self._ranks is None else self

    @property
    def ranks(self) -> TorchRanks:
        """The ranks of the loop, of several."""
        assert self._ranks is not None, "the loop is one process"
        return self._ranks

    def boxes(self) -> dict[str, Box]:
        """Return by path what this rank has of the tensors in the log."""
        return self._rows.boxes | {path: Box.whole(tuple(view.shape)) for path, view in self._state.views.items()}

    def deal(self, layouts: Sequence[RowLayout]) -> None:
        """Hand over, from now on, only what the layouts, by fragment, deal to this rank."""
        self._read = [layout.read[self._place[0]] for layout in layouts]

    def tensors(self, said: object) -> list[TensorSpec]:
        """Return each tensor as the log has it, state that is averaged among them.

        Raises:
            SettingsError: ``said``, by its ``tensor``, says of one what cannot be.
        """
        trained = self._rows.specs(said, "a loop expresses by not passing it", self._joined.convolutions, optimized=False)
        return [*trained, *(TensorSpec(path, tuple(view.shape), state=True) for path, view in self._state.views.items())]

    def fixed(self) -> list[FixedSpec]:
        """Return the frozen parameters of a module with their hashes, which takes half a second a gigabyte."""
        specs = fixed_specs(self._joined.frozen.values())
        self._fixed = frozenset(specs)
        return specs

    def take(self, params: Any) -> None:
        """Take over the values of the same model: those of the module that joined, or tensors of the same names.

        Raises:
            SettingsError: a tensor is missing, new, of another shape or type, or shares memory with another one; or one that
                was frozen is to be trained, or has other values; or a CUDA graph is being captured.
        """
        if ranks_of_loop() != self._place:
            raise SettingsError(
                f"step: this loop joined as rank {self._place[0]} of {self._place[1]}, and is rank {ranks_of_loop()[0]} of "
                f"{ranks_of_loop()[1]} now: make the process group before diloco.join, and keep it until the run is left"
            )
        if not self._watch.sees_no_change(params):
            found = _find(params, self._joined.trained.keys())
            self._check_same(found)
            self._watch = _Watch(params, found)
            self._rows = self._rows.moved(_views(found.trained))
            self._state = self._state.moved(_views(found.state)) if found.whole else self._state
            self._devices = self._served()
        if self._devices:
            self._transfers.attach(self._devices)
        self.tree = params

    def swapped(self, values: Any) -> AbstractContextManager[None]:
        """Return a ``with`` statement in which the trained tensors hold the values of a module, or of tensors by name.

        Raises:
            SettingsError: a tensor is missing, or of another shape.
        """
        self.take(self.tree)
        return swapped(self._rows.views, values)

    def fingerprint(self) -> str:
        """Return a hash of the first values that are here of each trained tensor."""
        views = [view for view in self._rows.views.values() if view.numel()]
        return fingerprint_of(_first_row(view)[:FINGERPRINT_VALUES].float().cpu().numpy() for view in views)

    def shown(self, array: NDArray[Any]) -> torch.Tensor:
        """Return an array of the host, any dtype [...], as a tensor in the same memory."""
        return torch.from_numpy(array)

    def rests(self) -> Views:
        """Return by path what rounding to bfloat16 has left over of each tensor, float32, spread as the tensor is."""
        return {path: spread_as(self._joined.trained[path], rest) for path, rest in self._rows.rests.items()}

    def put_rests(self, rests: Mapping[str, Any]) -> None:
        """Take over what :meth:`rests` gave.

        Raises:
            SettingsError: it is of other tensors, or spread in another way.
        """
        own = self.rests()
        check_rests(own, rests)
        for path, rest in own.items():
            local_of(rest).copy_(local_of(rests[path]))

    def sample(self) -> torch.Tensor:
        """Return the sum of the smallest tensor that has a value; it is NaN once a model is.

        The loss's gradients carry NaN to all tensors.
        """
        return min(self._rows.views.values(), key=lambda tensor: tensor.numel() or math.inf).sum()

    def number(self, scalar: Any) -> Callable[[], float]:
        """Queue a copy of a scalar of any framework to the host; return a function that waits for it and returns it."""
        return self._transfers.number(scalar)

    def snapshot(self, fragment: Fragment) -> TorchFragmentCopy:
        """Queue a copy of a fragment's values; a rank copies the rows that it hands over.

        Raises:
            DilocoError: there is no room for it.
        """
        rows = self._rows_of(fragment)
        try:
            if self._read is None:
                return rows.read(fragment)
            return rows.read_rows(fragment, self._read[fragment.index])
        except RuntimeError as error:
            if not _is_lack_of_memory(error):
                raise
            raise DilocoError(
                f"fragment {fragment.index}: {rows.device_of(fragment)} has no room for a copy of its {fragment.size:,} values "
                f"({FLOAT_BYTES * fragment.size >> 20} MiB), of which an offer is made: take a smaller batch, spread the "
                "model over more devices, or make a run with more fragments (fragments.count)"
            ) from error

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Write a fragment, as :class:`diloco_learner.api.model.SharedParameters` says; vectors are float32 [its size]."""
        self._rows_of(fragment).write(fragment, theta, reference, alpha)

    def _rows_of(self, fragment: Fragment) -> TensorRows:
        return self._state if fragment.state else self._rows

    def _served(self) -> list[torch.device]:
        """Return the devices of the tensors in the log whose copies the loop does not wait for."""
        views = itertools.chain(self._rows.views.values(), self._state.views.values())
        return [device for device in {view.device for view in views} if self._transfers.serves(device)]

    def _check_same(self, found: _Found) -> None:
        joined = self._joined
        for path in found.trained.keys() & joined.frozen.keys():
            raise SettingsError(
                f"step: parameter {path!r} requires a gradient, but was frozen when this loop joined: join with it "
                "unfrozen, and set its learning rate to 0 until training of it begins"
            )
        for path, shard in (shards_of(found.trained) | self._shards).items():
            if path in found.trained and is_sharded(found.trained[path]) != (path in self._shards):
                raise SettingsError(
                    f"step: parameter {path!r} {'is whole' if path in self._shards else 'is sharded'}, but was not when this "
                    "loop joined: after an evaluation call module.reshard() of FSDP2, and shard a module before diloco.join"
                )
            if path in found.trained and shard != self._shards[path]:
                raise SettingsError(f"step: parameter {path!r} is sharded in another way than when this loop joined")
        differ = found.trained.keys() ^ joined.trained.keys()
        if found.whole and joined.whole:
            differ |= (found.state.keys() ^ joined.state.keys()) | (found.frozen.keys() ^ joined.frozen.keys())
        if differ:
            first = ", ".join(sorted(differ)[:3])
            later = " (register a buffer that comes later with persistent=False)" if differ & found.state.keys() else ""
            raise SettingsError(f"step: params differ from those at join: {first}: pass the same tensors{later}")
        joined_tensors, views = joined.trained | joined.state, self._rows.views | self._state.views
        for path, tensor in (found.trained | (found.state if joined.whole else {})).items():
            expected = joined_tensors[path].shape
            if tensor.shape != expected:
                raise SettingsError(
                    f"step: parameter {path!r} has shape {tuple(tensor.shape)}, expected {tuple(expected)} as at join"
                )
            if tensor.dtype != views[path].dtype:  # the views are of the memory before: a module changes its tensors' own types
                raise SettingsError(
                    f"step: parameter {path!r} is {shown(tensor.dtype)}, expected {shown(views[path].dtype)} as at join"
                )
        moved = [each for path, each in found.frozen.items() if not self._watch.holds(path, each.tensor)]
        for spec in fixed_specs(moved) if self._fixed else ():
            if spec not in self._fixed:
                raise SettingsError(
                    f"step: frozen parameter {spec.path!r} changed its values or type since this loop joined, but must be "
                    "equal in all learners of a run: leave it unchanged, or join a new run"
                )


@dataclass(frozen=True)
class _Found:
    """The tensors that a loop has handed over, by path."""

    trained: Views
    whole: bool = False  # a module, and not its trained tensors by name
    state: Views = field(default_factory=dict)  # buffers that are averaged
    frozen: dict[str, ModuleTensor] = field(default_factory=dict)
    convolutions: dict[str, Tensor] = field(default_factory=dict)

    @property
    def watched(self) -> Views:
        """All tensors that have memory of their own."""
        frozen = {path: each.tensor for path, each in self.frozen.items()}
        return self.trained | self.state | {path: tensor for path, tensor in frozen.items() if is_plain(tensor)}


class _Watch:
    """Tells at a step whether all tensors are where they were, in 0.1 ms for 300 of them (``bench/frameworks.py watching``).

    A view that was detached from a tensor keeps the memory that the tensor had. ``is_set_to`` compares memory, shape and
    strides of both, and with them the type. All loops over tensors run in C.
    """

    def __init__(self, params: Any, found: _Found) -> None:
        watched = found.watched
        self._params, self._tensors, self._names = params, list(watched.values()), None if found.whole else list(params)
        self._views, sharded = _views(watched), list(map(is_sharded, self._tensors))
        self._sharded = sharded if any(sharded) else None
        self._all = list(self._views.values())
        self._frozen = [each.tensor for each in found.frozen.values()]
        if found.whole:
            contents = list(contents_of(params))
            self._places = [*filter(len, contents), (_END,)]
            self._empty = [each for each in contents if not each]  # apart, as it takes half as long
            self._buffers = looks_at_buffers(params)
            self._objects = list(self._present())

    def sees_no_change(self, params: Any) -> bool:
        """Whether all tensors are the ones that they were; a change of values is none."""
        if self._names is not None:
            return isinstance(params, Mapping) and list(params) == self._names and self._are_in_place(params.values())
        return (
            params is self._params
            and not any(self._empty)
            and all(map(operator.is_, self._present(), self._objects))
            and self._are_in_place(self._tensors)
            and not any(map(_requires_gradient, self._frozen))
        )

    def holds(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is where the one of this path was."""
        return path in self._views and _is_set_to(local_of(tensor), self._views[path])

    def _present(self) -> Iterable[object]:
        """Yield all that the module has now: submodules and parameters, an end that shows new ones, and watched buffers.

        Buffers come last: where names before them differ, none may be left to look at.
        """
        return itertools.chain(itertools.chain.from_iterable(self._places), map(operator.call, self._buffers))

    def _are_in_place(self, tensors: Iterable[Any]) -> bool:
        try:
            if self._sharded is not None:
                tensors = [
                    _local_tensor(each) if sharded else each for each, sharded in zip(tensors, self._sharded, strict=True)
                ]
            return all(map(_is_set_to, tensors, self._all))
        except (TypeError, AttributeError):  # something else than a tensor, or than a DTensor
            return False


_END = object()
_is_set_to = torch.Tensor.is_set_to
_requires_gradient = operator.attrgetter("requires_grad")
_nbytes = operator.attrgetter("nbytes")
_local_tensor = operator.attrgetter("_local_tensor")


def _find(params: Any, joined: Collection[str] = ()) -> _Found:
    """Return the tensors of a module, or those handed over by name, if they can be those of a learner.

    Parameters are trained if they require a gradient, or are of the ``joined`` ones, by path.

    Raises:
        SettingsError: one cannot be.
    """
    if not isinstance(params, torch.nn.Module):
        found = _Found(by_path((str(name), plain_path(str(name)), tensor) for name, tensor in params.items()))
    else:
        refuse_sharding_wrappers(params)
        held = parameters_of(params)
        paths = by_path((each.name, each.path, each) for each in held)
        trained = [each for each in held if each.tensor.requires_grad or each.path in joined]
        frozen = [each for each in held if not (each.tensor.requires_grad or each.path in joined)]
        for each in held:  # before types and sizes are asked of any, which some tensors cannot say
            check_present(f"parameter {each.path!r}", each.tensor)
        state = [each for each in buffers_of(params) if each.persistent and _is_averaged(each)]
        found = _Found(
            {each.path: each.tensor for each in trained},
            True,
            _by_state_path(state, paths),
            {each.path: each for each in frozen},
            convolutions(held),
        )
    for path, tensor in found.trained.items():
        if not found.whole:
            check_present(f"parameter {path!r}", tensor)
        check_type(path, tensor)
    watched = {path: local_of(tensor) for path, tensor in found.watched.items()}
    if not _lie_apart(list(watched.values())):
        spans = {path: _span(tensor) for path, tensor in watched.items()}
        check_apart({path: spans.pop(path) for path in [*found.trained, *found.state]}, spans)
    return found


def _lie_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are contiguous and each lies behind the one before, which is usual and found out fast."""
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        return False
    places = sorted(zip(map(torch.Tensor.data_ptr, tensors), map(_nbytes, tensors), strict=True))
    return all(begin + size <= following for (begin, size), (following, _) in itertools.pairwise(places))


def _is_averaged(buffer: ModuleTensor) -> bool:
    """Whether a buffer is averaged between learners, as those of a task are: each that holds float32.

    Raises:
        SettingsError: it would be, if it were float32.
    """
    if not buffer.tensor.is_floating_point():
        return False
    check_present(f"buffer {buffer.path!r}", buffer.tensor)
    if is_sharded(buffer.tensor):
        raise SettingsError(
            f"buffer {buffer.path!r} is a DTensor, and learners average their buffers: make it a plain tensor, or register it "
            "with persistent=False, and each learner keeps its own"
        )
    if not buffer.tensor.numel():
        return False
    if buffer.tensor.dtype != torch.float32:
        raise SettingsError(
            f"buffer {buffer.path!r} is {shown(buffer.tensor.dtype)}, expected float32, since learners average their "
            "buffers: make it float32, or register it with persistent=False, and each learner keeps its own"
        )
    return True


def _by_state_path(state: Iterable[ModuleTensor], parameters: Mapping[str, ModuleTensor]) -> Views:
    """Return averaged buffers by their path in the log, which none of the ``parameters`` of the module has.

    Raises:
        SettingsError: one has it, or two buffers have one.
    """
    found: dict[str, ModuleTensor] = {}
    for each in state:
        path = STATE + each.path
        kind, other = ("parameter", parameters[path]) if path in parameters else ("buffer", found.setdefault(path, each))
        if other is not each:
            raise SettingsError(
                f"{kind} {other.name!r} and buffer {each.name!r} have the same path {path!r} in the run's log: rename one "
                "of them, or register the buffer with persistent=False, so that each learner keeps its own"
            )
    return {path: each.tensor for path, each in found.items()}


def _is_lack_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch has found no room for a tensor; its error for the host's memory has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _first_row(view: torch.Tensor) -> torch.Tensor:
    """Return the first values of a tensor with some, [any length]."""
    while view.ndim > 1:
        view = view[0]
    return view.reshape(-1)


def _views(tensors: Views) -> Views:
    return {path: local_of(tensor).detach() for path, tensor in tensors.items()}


def _span(tensor: torch.Tensor) -> MemorySpan:
    item = tensor.element_size()
    strides = tuple(item * stride for stride in tensor.stride())
    return MemorySpan(str(tensor.device), tensor.data_ptr(), item, tuple(tensor.shape), strides)
