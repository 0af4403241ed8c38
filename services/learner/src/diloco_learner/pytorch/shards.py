"""Local parts of tensors that PyTorch spreads over the ranks of a loop or the processes of a learner.

An operation on a DTensor may be a collective, and a collective that a single rank calls never ends. So a rank reads and writes
its local tensor. The placements say where in the whole tensor it lies.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diloco.core.tensors.boxes import Box
from diloco.errors import SettingsError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LocalShard:
    """The part of a tensor of this ``shape`` that a rank has."""

    shape: Shape
    box: Box


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, be it a replica."""
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only once it is imported
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank has of a DTensor, in its own memory; another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # or it would be an operation that gradients go through
        return tensor.to_local()


def spread_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, ``local``, as a DTensor that is spread as ``tensor`` is, if that is one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return local
    found: torch.Tensor = distributed.DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return found


def shards_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, LocalShard]:
    """Return by path what this rank has of the DTensors among tensors.

    Raises:
        SettingsError: one has placements of which no rows are its own.
    """
    return {path: _shard(path, tensor) for path, tensor in tensors.items() if is_sharded(tensor)}


def _shard(path: str, tensor: Any) -> LocalShard:
    shape = tuple(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise SettingsError(
            f"parameter {path!r} is a DTensor with the placements {tensor.placements}, which are partial sums: "
            "redistribute it to Shard or Replicate"
        )
    found = tensor.__create_chunk_list__()  # as torch.distributed.checkpoint asks for it
    if len(found) != 1:
        raise SettingsError(
            f"parameter {path!r} is a DTensor with the placements {tensor.placements}, of which a rank has {len(found)} "
            "separate parts: choose a mesh whose sizes divide its first axis"
        )
    return LocalShard(shape, Box(tuple(found[0].offsets), tuple(found[0].sizes)))
