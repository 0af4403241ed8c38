"""The tensors of a module by name, in loops and in tasks alike: without the parts that wrappers put into names.

``torch.compile(module)`` has the module that a user wrote as ``_orig_mod``, and every name begins with that; other wrappers do
likewise. A run's log has the names of the module that was wrapped, so that learners with and without a wrapper are learners of
one run. Wrappers are told by their type, never by a name: an honest submodule may be called ``module``.

Types are compared by name, since importing ``torch._dynamo`` takes nine seconds of processor time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from diloco.errors import SettingsError
from diloco_learner.tensors import Tensor

T = TypeVar("T")

# by the wrapper's type: the attribute that has what was wrapped
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}
# by the type of a wrapper, or of a parameter, that keeps parameters in a form of its own
NOT_SUPPORTED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP1 (FullyShardedDataParallel)",
    "torch.distributed.fsdp._flat_param.FlatParameter": "FSDP1 (FullyShardedDataParallel)",
    "deepspeed.runtime.engine.DeepSpeedEngine": "DeepSpeed",
}
CONVOLUTIONS = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d,
)  # fmt: skip
# A dictionary has names without types. These parts of a name are reserved by PyTorch, so no user's submodule has them.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


class ModuleTensor(NamedTuple):
    """A tensor of a module: its name without wrappers, and the place that holds it."""

    name: str
    tensor: torch.Tensor
    owner: torch.nn.Module
    key: str

    @property
    def path(self) -> str:
        """The path in the log."""
        return self.name.replace(".", "/")

    @property
    def persistent(self) -> bool:
        """Whether ``state_dict`` has this buffer."""
        return _is_persistent(self.owner, self.key)

    def conv_axis(self) -> int | None:
        """Return the axis of the output units of a convolution's weight; None: it is none."""
        if self.key != "weight" or not isinstance(self.owner, CONVOLUTIONS):
            return None
        # (in, out / groups, ...): with groups no axis has the output units, or the first one where each is a group
        return 1 if self.owner.transposed and self.owner.groups == 1 else 0


def refuse_sharding_wrappers(module: torch.nn.Module) -> None:
    """Check that a module's parameters are what they seem, and no flat or empty stand-ins of a wrapper.

    Raises:
        SettingsError: they are those of FSDP1 or of DeepSpeed.
    """
    for prefix, owner in _modules(module, "", set()):
        kinds = [*type(owner).__mro__, *(kind for each in vars(owner)["_parameters"].values() for kind in type(each).__mro__)]
        found = next((NOT_SUPPORTED[name] for name in map(_type_name, kinds) if name in NOT_SUPPORTED), None)
        if found is None and any(hasattr(each, "ds_id") for each in vars(owner)["_parameters"].values()):
            found = "DeepSpeed ZeRO-3"
        if found is not None:
            raise SettingsError(
                f"module {prefix.rstrip('.') or type(owner).__name__!r} is sharded by {found}, whose parameters cannot be read "
                "in place: shard it by FSDP2 (torch.distributed.fsdp.fully_shard), or use DistributedDataParallel"
            )


def parameters_of(module: torch.nn.Module) -> list[ModuleTensor]:
    """Return the parameters of a module, each once, in the order of ``named_parameters``."""
    return _each_once(ModuleTensor(prefix + key, one, owner, key) for prefix, owner, key, one in _held(module, "_parameters"))


def buffers_of(module: torch.nn.Module) -> list[ModuleTensor]:
    """Return the buffers of a module, each once, in the order of ``named_buffers``."""
    return _each_once(ModuleTensor(prefix + key, one, owner, key) for prefix, owner, key, one in _held(module, "_buffers"))


def contents_of(module: torch.nn.Module) -> Iterator[Collection[object]]:
    """Yield what a module and all below it have now and later: submodules, parameters, and names of buffers.

    Of an empty container too, which may be filled later. Of buffers the names, since many modules replace one in each step.
    """
    for _, owner in _modules(module, "", set()):
        held = vars(owner)
        yield from (held["_modules"].values(), held["_parameters"].values(), held["_buffers"].keys())


def looks_at_buffers(module: torch.nn.Module) -> list[Callable[[], object]]:
    """Return for each persistent buffer that holds floats, or nothing yet, what returns that which its place holds.

    It raises KeyError once the module has no such buffer.
    """
    return [
        partial(operator.getitem, vars(owner)["_buffers"], key)
        for _, owner in _modules(module, "", set())
        for key, tensor in vars(owner)["_buffers"].items()
        if _is_persistent(owner, key) and (tensor is None or tensor.is_floating_point())
    ]


def convolutions(held: Iterable[ModuleTensor]) -> dict[str, Tensor]:
    """Return by path what a run takes the weights of convolutions for, if a task or loop says nothing of its tensors."""
    axes = {each.path: each.conv_axis() for each in held}
    return {path: Tensor(kind="head", output_axis=axis) for path, axis in axes.items() if axis is not None}


def tables(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's embeddings, and of parameters that are tied to one."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = {id(one) for _, owner, _, one in _held(module, "_parameters") if isinstance(owner, kinds)}
    return {each.name for each in parameters_of(module) if id(each.tensor) in found}


def plain_path(name: str) -> str:
    """Return the path in the log of a tensor that a loop hands over by name: without the parts that only wrappers make.

    ``module`` stays: a submodule may be called so, and a dictionary does not say whose it is.
    """
    return "/".join(part for part in name.replace(".", "/").split("/") if part not in WRAPPED)


def by_path(named: Iterable[tuple[str, str, T]]) -> dict[str, T]:
    """Return tensors by their path in the log; each comes with name, path and tensor.

    Raises:
        SettingsError: two names are one path.
    """
    found: dict[str, tuple[str, T]] = {}
    for name, path, tensor in named:
        if path in found:
            first = found[path][0]
            raise SettingsError(
                f"parameters {first!r} and {name!r} have the same path {path!r} in the run's log: rename one of them"
            )
        found[path] = name, tensor
    return {path: tensor for path, (_, tensor) in found.items()}


def _modules(module: torch.nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    wrapped = next((WRAPPERS[name] for name in map(_type_name, type(module).__mro__) if name in WRAPPERS), None)
    for key, child in vars(module)["_modules"].items():
        if child is not None:
            yield from _modules(child, prefix if key == wrapped else f"{prefix}{key}.", seen)


def _is_persistent(owner: torch.nn.Module, key: str) -> bool:
    return key not in vars(owner)["_non_persistent_buffers_set"]


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _held(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor]]:
    for prefix, owner in _modules(module, "", set()):
        for key, tensor in vars(owner)[kind].items():
            if tensor is not None:
                yield prefix, owner, key, tensor


def _each_once(held: Iterable[ModuleTensor]) -> list[ModuleTensor]:
    seen: dict[int, ModuleTensor] = {}
    for each in held:
        seen.setdefault(id(each.tensor), each)
    return list(seen.values())
