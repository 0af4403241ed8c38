"""A rank that reads and writes DTensors of many shapes and placements, and compares with ``full_tensor()``.

``sharded_tensors.py CASES`` in the environment of torchrun; it prints how many cases were right.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from tests.made.rank_rows import put_together
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from diloco.core.tensors.boxes import Box, row_layouts
from diloco.core.tensors.fragments import Fragment, build_map
from diloco.core.tensors.rows import carriers
from diloco_learner.pytorch.parameters import TorchParameters


def gathered(rank: int, params: TorchParameters, fragments: list[Fragment]) -> list[NDArray[np.float32]]:
    """Return each fragment as its carrier puts it together of what all ranks hand over."""
    world = distributed.get_world_size()
    boxes: list[dict[str, Box]] = [{}] * world
    distributed.all_gather_object(boxes, params.boxes())
    layouts = row_layouts(fragments, boxes, carriers([fragment.size for fragment in fragments], world))
    params.deal(layouts)
    return put_together(fragments, layouts, rank, lambda fragment: params.snapshot(fragment).to_host())


def values_of(tensors: dict[str, torch.Tensor], fragment: Fragment) -> NDArray[np.float32]:
    full = {
        path: (each.full_tensor() if isinstance(each, DTensor) else each).detach().numpy() for path, each in tensors.items()
    }
    parts = [
        full[piece.path][piece.row_start : piece.row_stop] if full[piece.path].ndim else full[piece.path]
        for piece in fragment.pieces
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def check(rank: int, rng: random.Random, meshes: list[DeviceMesh]) -> None:
    tensors: dict[str, torch.Tensor] = {"scalar": torch.tensor(rng.random()), "whole": torch.arange(6.0)}
    for number in range(3):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        mesh = rng.choice(meshes)
        placements = [rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]
        full = torch.from_numpy(np.random.default_rng(rng.randrange(1000)).normal(size=shape).astype(np.float32))
        tensors[f"tensor{number}"] = distribute_tensor(full, mesh, placements)
    params = TorchParameters(tensors)
    fragments = list(build_map(params.tensors(None), 3).fragments)
    before = [values_of(tensors, fragment) for fragment in fragments]
    for found, expected in zip(gathered(rank, params, fragments), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    for fragment, old in zip(fragments, before, strict=True):
        theta = np.arange(fragment.size, dtype=np.float32)
        params.write(fragment, theta, old, 0.5)
        np.testing.assert_allclose(values_of(tensors, fragment), 0.5 * old + 0.5 * theta, rtol=1e-6)
        params.write(fragment, theta)
        np.testing.assert_array_equal(values_of(tensors, fragment), theta)


def main(cases: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    meshes = [init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))]
    for case in range(cases):
        check(rank, random.Random(case), meshes)  # all ranks draw the same
    print(f"{cases} right", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
