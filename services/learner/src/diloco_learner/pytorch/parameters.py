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
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco.core.learner.delta import Baseline
from diloco.core.tensors.fragments import FixedSpec, Fragment, TensorSpec
from diloco.errors import SettingsError
from diloco_learner.api.model import Vector
from diloco_learner.api.overlap import MemorySpan, check_apart
from diloco_learner.pytorch.frozen import check_dense, fixed_specs
from diloco_learner.pytorch.names import (
    ModuleTensor,
    buffers_of,
    by_path,
    contents_of,
    convolutions,
    looks_at_buffers,
    parameters_of,
    plain_path,
)
from diloco_learner.pytorch.tensors import TensorRows, Views, on_host, shown
from diloco_learner.task_api import STATE
from diloco_learner.tensors import Tensor


@dataclass(frozen=True)
class TorchFragmentCopy:
    """A fragment's values as of when it was read: a copy, on the device still."""

    values: torch.Tensor

    def to_host(self, out: Vector | None = None) -> Vector:
        """Wait for the values, and return them as float32 [size of the fragment], in ``out`` if given. From any thread."""
        return on_host(self.values, out)


class TorchParameters:
    """Float32 tensors on any device; of a module also the buffers that are averaged, and the parameters that are frozen.

    Raises:
        SettingsError: there is no tensor, or one of another type or kind; two share memory; or the loop is one of several
            processes.
    """

    def __init__(self, params: Any) -> None:
        _check_alone()
        found = _find(params)
        if not found.trained:
            raise SettingsError("join: the module has no parameter that requires a gradient, so there is nothing to train")
        self._joined, self._fixed = found, frozenset[FixedSpec]()
        self._rows, self._state = TensorRows(_views(found.trained)), TensorRows(_views(found.state))
        self.tree, self._watch = params, _Watch(params, found)

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
                was frozen is to be trained, or has other values.
        """
        _check_alone()
        if not self._watch.sees_no_change(params):
            found = _find(params, self._joined.trained.keys())
            self._check_same(found)
            self._watch = _Watch(params, found)
            self._rows = self._rows.moved(_views(found.trained))
            self._state = self._state.moved(_views(found.state)) if found.whole else self._state
        self.tree = params

    def sample(self) -> torch.Tensor:
        """Return the sum of the smallest tensor that has a value; it is NaN once a model is.

        The loss's gradients carry NaN to all tensors.
        """
        return min(self._rows.views.values(), key=lambda tensor: tensor.numel() or math.inf).sum()

    def snapshot(self, fragment: Fragment) -> TorchFragmentCopy:
        """Queue a copy of a fragment's values."""
        return TorchFragmentCopy(self._rows_of(fragment).read(fragment))

    def write(self, fragment: Fragment, theta: Vector, reference: Baseline | Vector | None = None, alpha: float = 0.0) -> None:
        """Write a fragment, as :class:`diloco_learner.api.model.SharedParameters` says; vectors are float32 [its size]."""
        self._rows_of(fragment).write(fragment, theta, reference, alpha)

    def _rows_of(self, fragment: Fragment) -> TensorRows:
        return self._state if fragment.state else self._rows

    def _check_same(self, found: _Found) -> None:
        joined = self._joined
        for path in found.trained.keys() & joined.frozen.keys():
            raise SettingsError(
                f"step: parameter {path!r} requires a gradient, but was frozen when this loop joined: join with it "
                "unfrozen, and set its learning rate to 0 until training of it begins"
            )
        differ = found.trained.keys() ^ joined.trained.keys()
        if found.whole and joined.whole:
            differ |= (found.state.keys() ^ joined.state.keys()) | (found.frozen.keys() ^ joined.frozen.keys())
        if differ:
            first = ", ".join(sorted(differ)[:3])
            later = " (register a buffer that comes later with persistent=False)" if differ & found.state.keys() else ""
            raise SettingsError(f"step: params are not those that joined: {first}: hand over the same tensors{later}")
        for path, tensor in (found.trained | (found.state if joined.whole else {})).items():
            expected = (joined.trained | joined.state)[path].shape
            if tensor.shape != expected:
                raise SettingsError(
                    f"step: parameter {path!r} has shape {tuple(tensor.shape)}, expected {tuple(expected)} as at join"
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
        return self.trained | self.state | {path: tensor for path, tensor in frozen.items() if _is_plain(tensor)}


class _Watch:
    """Tells at a step whether all tensors are where they were, in 0.1 ms for 300 of them (``bench/frameworks.py watching``).

    A view that was detached from a tensor keeps the memory that the tensor had. ``is_set_to`` compares memory, shape and
    strides of both, and with them the type. All loops over tensors run in C.
    """

    def __init__(self, params: Any, found: _Found) -> None:
        watched = found.watched
        self._params, self._tensors, self._names = params, list(watched.values()), None if found.whole else list(params)
        self._views = _views(watched)
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
        return path in self._views and _is_set_to(tensor, self._views[path])

    def _present(self) -> Iterable[object]:
        """Yield all that the module has now: submodules and parameters, an end that shows new ones, and watched buffers.

        Buffers come last: where names before them differ, none may be left to look at.
        """
        return itertools.chain(itertools.chain.from_iterable(self._places), map(operator.call, self._buffers))

    def _are_in_place(self, tensors: Iterable[Any]) -> bool:
        try:
            return all(map(_is_set_to, tensors, self._all))
        except TypeError:  # something else than a tensor
            return False


_END = object()
_is_set_to = torch.Tensor.is_set_to
_requires_gradient = operator.attrgetter("requires_grad")
_nbytes = operator.attrgetter("nbytes")


def _check_alone() -> None:
    """Find out that this process is the whole of its loop, without asking the others.

    Raises:
        SettingsError: it is one of several.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and (world := distributed.get_world_size()) > 1:
        raise SettingsError(
            f"join: this is rank {distributed.get_rank()} of a process group of {world}, but a loop that joins must be a "
            "single process, otherwise the ranks would have different models: make each process a separate learner, with "
            "its own name and without a process group (torch.distributed.destroy_process_group() ends it)"
        )


def _find(params: Any, joined: Collection[str] = ()) -> _Found:
    """Return the tensors of a module, or those handed over by name, if they can be those of a learner.

    Parameters are trained if they require a gradient, or are of the ``joined`` ones, by path.

    Raises:
        SettingsError: one cannot be.
    """
    if not isinstance(params, torch.nn.Module):
        found = _Found(by_path((str(name), plain_path(str(name)), tensor) for name, tensor in params.items()))
    else:
        held = parameters_of(params)
        paths = by_path((each.name, each.path, each) for each in held)
        trained = [each for each in held if each.tensor.requires_grad or each.path in joined]
        frozen = [each for each in held if not (each.tensor.requires_grad or each.path in joined)]
        for each in held:  # before types and sizes are asked of any, which some tensors cannot say
            _check(f"parameter {each.path!r}", each.tensor)
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
            _check(f"parameter {path!r}", tensor)
        _check_type(path, tensor)
    watched = found.watched
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
    _check(f"buffer {buffer.path!r}", buffer.tensor)
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


def _check(what: str, tensor: Any) -> None:
    """Find out that a tensor has values that can be read and written, and all of them here; ``what`` it is begins the sentence.

    Raises:
        SettingsError: it has not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SettingsError(f"{what} is a {type(tensor).__name__}, expected a tensor like the others")
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only once it is imported
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise SettingsError(
            f"{what} is a DTensor, which is spread over processes: join with the whole module in one process, "
            "without fully_shard and parallelize_module"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise SettingsError(f"{what} has no shape yet: call the module once on a batch, and join then")
    if tensor.is_meta:
        raise SettingsError(
            f"{what} is on the meta device, so it has no values: give it some (module.to_empty, then its initialisation), "
            "and join then"
        )
    check_dense(what, tensor)
    if tensor.is_inference():
        raise SettingsError(
            f"{what} was made under torch.inference_mode(), so it can be neither trained nor written: make it without, or "
            "hand over a copy that is made outside (copy.deepcopy)"
        )


def _check_type(path: str, tensor: torch.Tensor) -> None:
    """Find out that a trained tensor is float32, in memory of its own.

    Raises:
        SettingsError: it is not.
    """
    if not _is_plain(tensor):
        raise SettingsError(
            f"parameter {path!r} is a {type(tensor).__name__}, which consists of other tensors, expected a plain dense "
            "tensor: freeze it, and train float32 tensors beside it, such as adapters"
        )
    if tensor.dtype == torch.float32:
        return
    if tensor.is_floating_point():
        do = "keep float32 masters (module.float(), or copies of yours by name), and compute in other types by autocast"
    elif tensor.is_complex():
        do = "pass torch.view_as_real(parameter) by name"
    else:
        do = "leave out what is not trained"
    raise SettingsError(f"parameter {path!r} is {shown(tensor.dtype)}, expected float32: {do}")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, with a place for each value."""
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _views(tensors: Views) -> Views:
    return {path: tensor.detach() for path, tensor in tensors.items()}


def _span(tensor: torch.Tensor) -> MemorySpan:
    item = tensor.element_size()
    strides = tuple(item * stride for stride in tensor.stride())
    return MemorySpan(str(tensor.device), tensor.data_ptr(), item, tuple(tensor.shape), strides)
