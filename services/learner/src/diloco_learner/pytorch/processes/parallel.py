"""A task's module spread over the processes of a learner: by the task's ``parallelize(module, mesh)``, or by FSDP2.

What comes of it is looked at before anything is trained: the parameters are those of before by name, shape and type, and each
process knows which part of them it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.pytorch import names
from diloco_learner.pytorch.names import ModuleTensor
from diloco_learner.pytorch.shards import is_sharded, shards_of
from diloco_learner.pytorch.tensors import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SHARDED = "fsdp"  # the axis of a mesh whose processes share the tensors and take rows
TENSOR = "tensor"  # the axis of a mesh whose processes take the same rows
MIXED = "mixed torch.Tensor and DTensor"  # in torch's error where a part meets a whole tensor


def shard_blocks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a module by FSDP2: each block of a list or sequence by itself, so that one is whole at a time, then the rest.

    A block that shares a parameter with the rest is not one by itself. Scalars, which FSDP2 does not take, stay whole, and on a
    mesh of replicas alone all of the module does.
    """
    if SHARDED not in mesh.mesh_dim_names:
        return module
    from torch.distributed.fsdp import fully_shard  # a learner of one process does not need it

    scalars, owners = {one for one in module.parameters() if not one.ndim}, _owners(module)
    for block in _blocks(module):
        own = _owners(block)
        if own and all(owners[one] == count for one, count in own.items()):
            fully_shard(block, mesh=mesh, ignored_params=scalars)
    return fully_shard(module, mesh=mesh, ignored_params=scalars)


def _owners(module: nn.Module) -> Counter[int]:
    """Return how many modules have each parameter, by its identity."""
    held = (vars(owner)["_parameters"].values() for owner in module.modules())
    return Counter(id(one) for ones in held for one in ones if one is not None)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the outermost lists and sequences below a module."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child.children()
        else:
            yield from _blocks(child)


def spread(task: Any, module: nn.Module, mesh: DeviceMesh, row_ranks: Collection[int], source: str) -> nn.Module:
    """Return a module, whole in this process, spread over a mesh. Errors begin with the ``source``.

    ``row_ranks``: the ranks that take other rows of a batch than this one does, and this one.

    Raises:
        SettingsError: the task's ``parallelize`` returned something else than the same model; a parameter is spread in a way
            that a learner cannot train.
    """
    made_at = members.place(task.module)
    before = {each.name: _about(each) for each in names.parameters_of(module)}
    own = getattr(task, "parallelize", None)
    if own is None and TENSOR in mesh.mesh_dim_names:
        raise SettingsError(
            f"{source}: mesh.tensor = {mesh[TENSOR].size()}: the task has no parallelize(module, mesh) that uses these "
            f"processes, so they would repeat each other's work: add one, or leave mesh.tensor out{made_at}"
        )
    returned = shard_blocks(module, mesh) if own is None else own(module, mesh)
    where = made_at if own is None else members.place(own)
    if not isinstance(returned, nn.Module):
        raise SettingsError(
            f"{source}: parallelize() returned a {type(returned).__name__}, expected the module, sharded in place{where}"
        )
    names.refuse_sharding_wrappers(returned)
    found = names.parameters_of(returned)
    _check_same(before, {each.name: _about(each) for each in found}, f"{source}: parallelize()", where)
    _check_spread(returned, found, row_ranks, f"{source}: parallelize()", where)
    return returned


def _about(each: ModuleTensor) -> str:
    trained = "" if each.tensor.requires_grad else ", frozen"
    return f"{shown(each.tensor.dtype)} {list(each.tensor.shape)}{trained}"


def device_of(module: nn.Module, source: str, where: str) -> torch.device:
    """Return the device that a module is on.

    Raises:
        SettingsError: it is on several, or has no values.
    """
    devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise SettingsError(
            f"{source}: the module is on several devices ({named}), and each process of a learner has one: put all of it on "
            f"one in module(); parallelize() spreads it over the processes{where}"
        )
    [device] = devices
    if device.type == "meta":
        raise SettingsError(f"{source}: module() made parameters on the meta device: give them values there{where}")
    return device


def ranks_of(tensor: Any) -> set[int]:
    """Return the ranks that a DTensor is spread over."""
    return {int(rank) for rank in tensor.device_mesh.mesh.flatten()}


def _check_same(before: dict[str, str], after: dict[str, str], source: str, where: str) -> None:
    for name in before.keys() - after.keys():
        raise SettingsError(
            f"{source} left the module without parameter {name!r}: keep the names that module() gave, which the run's "
            f"log has{where}"
        )
    for name, about in after.items():
        if name not in before:
            raise SettingsError(f"{source} added parameter {name!r}: make all parameters in module(){where}")
        if before[name] != about:
            raise SettingsError(
                f"{source} made parameter {name!r} {about}, but module() made it {before[name]}: keep both alike{where}"
            )


def _check_spread(
    module: nn.Module, held: Collection[ModuleTensor], row_ranks: Collection[int], source: str, where: str
) -> None:
    """Check that gradients can be averaged: where processes of other rows share a tensor, FSDP2 does so."""
    shards_of({each.name: each.tensor for each in held})
    managed = set(_managed_by_fsdp(module))
    for each in held:
        if not is_sharded(each.tensor):
            continue
        shared = set(row_ranks) & ranks_of(each.tensor)
        if len(shared) == 1:
            continue
        if len(shared) < len(row_ranks):
            raise SettingsError(
                f"{source} spread parameter {each.name!r} over {len(shared)} of the {len(row_ranks)} processes that take rows "
                f"of a batch: call fully_shard with all axes of the mesh other than 'tensor'{where}"
            )
        if id(each.owner) not in managed:
            raise SettingsError(
                f"{source} spread parameter {each.name!r} over processes that take different rows of a batch, but not by "
                "fully_shard, which averages their gradients: use fully_shard there, and parallelize_module over "
                f"mesh['tensor'] alone{where}"
            )
    for buffer in names.buffers_of(module):
        if is_sharded(buffer.tensor):
            raise SettingsError(f"{source} made buffer {buffer.name!r} a DTensor: leave buffers whole{where}")


def _managed_by_fsdp(module: nn.Module) -> Iterator[int]:
    """Yield the identities of all modules whose parameters FSDP2 gathers."""
    from torch.distributed.fsdp import FSDPModule

    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            yield from map(id, owner.modules())
