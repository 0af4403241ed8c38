"""A process of a torch learner of several that trains beside a model of one process, and compares: ``spread_learner.py CASE``.

In the environment of torchrun; each rank has the model of one process itself. It prints ``right``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.made.rank_rows import put_together
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from diloco.core.tensors.chunks import Chunk
from diloco.core.tensors.rows import carriers
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.pytorch import Aux
from diloco_learner.pytorch.island import TorchIsland
from diloco_learner.pytorch.processes.process_mesh import ProcessMesh

WORDS, WIDTH, HIDDEN, STEPS = 11, 6, 10, 20  # on two or four processes some are uneven


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):  # type: ignore[misc]
    """Matrices, vectors, an embedding that the head is tied to, a frozen tensor, and one that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.fixed = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.fixed
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.temperature


class Words:
    """A task of predicting the next of a few words; ``rows`` of each batch."""

    tokens_per_batch = 16
    dtype = torch.float32

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def module(self) -> nn.Module:
        return Net().to(self.dtype)

    def loss(self, module: Any, batch: Any) -> Any:
        tokens = torch.from_numpy(batch["tokens"])
        scores = module(tokens[:, :-1]).flatten(0, 1).float()
        right = (scores.argmax(-1) == tokens[:, 1:].flatten()).float().mean()
        return nn.functional.cross_entropy(scores, tokens[:, 1:].flatten()) * batch["scale"], Aux({"right": right})

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for number in itertools.count(start):
            rng = np.random.default_rng((seed, share, number))
            first = rng.integers(WORDS, size=(self.rows, 1))
            yield {"tokens": (first + np.arange(4) * 3) % WORDS, "scale": 1.0}


class ParallelBlocks(Words):
    """Blocks are split over ``tensor``, and all is sharded over the other axis."""

    def parallelize(self, module: Any, mesh: Any) -> nn.Module:
        names = mesh.mesh_dim_names
        for block in module.blocks:
            if "tensor" in names:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if "fsdp" in names:
                fully_shard(block, mesh=mesh["fsdp"])
        return module


class PartlyWhole(Words):
    """Blocks alone are sharded, so that gradients of the others are averaged by the learner."""

    def parallelize(self, module: Any, mesh: Any) -> nn.Module:
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        return module


class Rounded(Words):
    dtype = torch.bfloat16


class Own(Words):
    """An optimizer of the task's own, whose state is spread as its parameters are."""

    def optimizer(self, parameters: Any, rate: float) -> Any:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, foreach=False)


class Turned(Words):
    """Two tensors have other names, and the kernels of the last layers another layout in the log."""

    def tensors(self, module: Any) -> dict[str, torch.Tensor]:
        found = {name.replace(".", "/"): one for name, one in module.named_parameters() if one.requires_grad}
        kernel = found.pop("blocks/1/down/weight")
        return found | {"last/kernel": kernel.T}


class Normed(Words):
    """Statistics of batches, which the learner averages over its processes."""

    def module(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=True), nn.Linear(5, 1))

    def loss(self, module: Any, batch: Any) -> Any:
        return module(torch.from_numpy(batch["tokens"]).float()).square().mean()


class Masked(Words):
    """The first row's words count, and of each further row one fewer: processes have unequal counts, and the last one none."""

    def loss(self, module: Any, batch: Any) -> Any:
        tokens, mask = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["mask"]).flatten()
        scores = module(tokens[:, :-1]).flatten(0, 1).float()
        each = nn.functional.cross_entropy(scores, tokens[:, 1:].flatten(), reduction="none")
        right, counted = (scores.argmax(-1) == tokens[:, 1:].flatten()).float(), mask.sum()
        least = counted.clamp(min=1)
        return (each * mask).sum() / least, Aux({"right": (right * mask).sum() / least}, tokens=counted)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for batch in super().batches(share, shares, seed, start):
            yield batch | {"mask": np.arange(3) < 3 - np.arange(self.rows)[:, None]}


class Undivided(Masked):
    """Its loss is 0 / 0 where nothing counts."""

    def loss(self, module: Any, batch: Any) -> Any:
        loss, aux = super().loss(module, batch)
        return loss * aux.tokens.clamp(min=1) / aux.tokens, aux


def settings_of(**overrides: Any) -> RunSettings:
    given = {"fragments.count": 3, "inner.learning_rate": 0.02, "inner.clip_norm": 0.5, "task.name": "own:make"}
    return run_settings(overrides=given | {key.replace("__", "."): value for key, value in overrides.items()})


def gathered(island: TorchIsland, place: int) -> NDArray[np.float32]:
    """Return the model as the carriers of its fragments put it together of what all processes hand over."""
    world, fragments = distributed.get_world_size(), island.fragments().fragments
    dealt = carriers([fragment.size for fragment in fragments], world)
    layouts = island.deal_rows(fragments, dealt)
    return np.concatenate(put_together(fragments, layouts, place, lambda fragment: island.read(fragment).to_host()))


def values_of(island: TorchIsland) -> NDArray[np.float32]:
    return np.concatenate([island.read(fragment).to_host() for fragment in island.fragments().fragments])


class Pair:
    """The same task on all processes, and on this one alone."""

    def __init__(self, task: Words, settings: RunSettings, sizes: dict[str, int]) -> None:
        self.place = distributed.get_rank()
        self.many, self.one = TorchIsland(task, settings, ProcessMesh(sizes, self.place)), TorchIsland(task, settings)
        assert self.many.fragments().digest == self.one.fragments().digest
        self.batches = task.batches(0, 1, 0, 0)
        first = next(self.batches)
        self.many.rehearse(first)
        self.one.rehearse(first)
        self.many.exchange_parts()

    def train(self, steps: int, within: float) -> None:
        for number, batch in enumerate(itertools.islice(self.batches, steps)):
            ours, theirs = (each.begin_step(batch, 0.02, (0, number)) for each in (self.many, self.one))
            assert abs(ours.wait() - theirs.wait()) < within, (number, ours.wait(), theirs.wait())
            assert ours.metric_values().keys() == theirs.metric_values().keys()
            for name, value in ours.metric_values().items():
                assert abs(value - theirs.metric_values()[name]) < 0.02 + within
            assert abs(ours.gradient_norm() - theirs.gradient_norm()) < within * (1 + theirs.gradient_norm())
        self.compare(within)

    def compare(self, within: float) -> None:
        np.testing.assert_allclose(gathered(self.many, self.place), values_of(self.one), atol=within)


def _chunks(island: TorchIsland, *, optimizer_only: bool = False) -> list[tuple[Chunk, NDArray[Any]]]:
    content = island.capture(optimizer_only=optimizer_only).content
    return [(chunk, np.array(values)) for chunk, values in zip(content.chunks, content.values, strict=True)]


def _whole(island: TorchIsland) -> dict[str, NDArray[Any]]:
    return _put_together(_chunks(island))


def _put_together(parts: list[tuple[Chunk, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for chunk, values in parts:
        found.setdefault(chunk.name, np.full(chunk.shape, 77, values.dtype))[chunk.where] = values
    return found


def _together(island: TorchIsland) -> dict[str, NDArray[Any]]:
    said: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, _chunks(island))
    return _put_together([part for its in said for part in its])


def check_states(pair: Pair) -> None:
    """Parts of all processes are the state of one; each goes on from the other's, and a loan has each value once."""
    many, one = _together(pair.many), _whole(pair.one)
    assert many.keys() == one.keys()
    for name, values in one.items():
        np.testing.assert_allclose(many[name], values, atol=1e-5, err_msg=name)
    for chunk in pair.many.wanted():
        pair.many.put(chunk, one[chunk.name][chunk.where])
    many = _together(pair.many)
    for name, values in one.items():
        np.testing.assert_array_equal(many[name], values, err_msg=name)
    pair.train(3, 1e-5)
    said: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, [chunk for chunk, _ in _chunks(pair.many, optimizer_only=True)])
    lent = [chunk for its in said for chunk in its]
    assert sum(chunk.size_bytes for chunk in lent) == pair.many.optimizer_layout().size_bytes
    owned = {(place, chunk) for its in pair.many.optimizer_owners().values() for place, chunk in its}
    assert owned == {(place, chunk) for place, its in enumerate(said) for chunk in its}
    pair.many.forget_optimizer()
    pair.one.forget_optimizer()
    pair.train(2, 1e-5)


def trained(task: Words, optimizer: str = "adamw", within: float = 1e-5, steps: int = STEPS, **sizes: int) -> Pair:
    world = distributed.get_world_size()
    mesh = {"data": 1, "fsdp": 1, "tensor": 1} | (sizes or {"fsdp": world})
    pair = Pair(task, settings_of(inner__optimizer=optimizer), mesh)
    pair.train(steps, within)
    return pair


def uneven() -> None:
    trained(Words(rows=distributed.get_world_size() * 2 - 1), "muon")


def masked() -> None:
    """Six words of the whole batch count, of unequal parts; one process alone has the same gradient."""
    world = distributed.get_world_size()
    for sizes in ({"fsdp": world}, {"data": world}):
        pair = trained(Masked(), **sizes)
        batch = next(pair.batches)
        assert [each.begin_step(batch, 0.02).tokens() for each in (pair.many, pair.one)] == [6, 6]
        nothing = batch | {"mask": np.zeros_like(batch["mask"])}
        assert [each.begin_step(nothing, 0.02).tokens() for each in (pair.many, pair.one)] == [0, 0]
        pair.train(1, 1e-5)
    many = TorchIsland(Undivided(), settings_of(), ProcessMesh({"data": 1, "fsdp": world, "tensor": 1}, distributed.get_rank()))
    output, counts = many.begin_step(batch, 0.02), distributed.get_rank() < world / 2
    with nullcontext() if counts else pytest.raises(SettingsError, match="divide by at least one token"):
        assert np.isnan(output.wait()), "the whole step is in vain"


def states() -> None:
    check_states(trained(Words(), "muon", steps=3))
    check_states(trained(Own(), steps=3))


def normed() -> None:
    """All processes have the same statistics, of which the mean is that of the whole batch."""
    pair = Pair(Normed(), settings_of(), {"data": 1, "fsdp": distributed.get_world_size(), "tensor": 1})
    batch = next(pair.batches)
    for each in (pair.many, pair.one):
        each.begin_step(batch, 0.0).wait()
    said: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, _whole(pair.many))
    names = [f"buffers/1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    for name in names:
        for other in said[1:]:
            np.testing.assert_array_equal(other[name], said[0][name], err_msg=name)
    for name in names[:2]:
        np.testing.assert_allclose(said[0][name], _whole(pair.one)[name], atol=1e-6, err_msg=name)


CASES: dict[str, Callable[[], object]] = {
    "adamw": lambda: trained(Words()),
    "muon": lambda: trained(Words(), "muon"),
    "uneven": uneven,
    "masked": masked,
    "replicas": lambda: trained(Words(), "muon", data=distributed.get_world_size()),
    "hybrid": lambda: trained(Words(), "muon", data=2, fsdp=distributed.get_world_size() // 2),
    "tensor": lambda: trained(ParallelBlocks(), "muon", fsdp=distributed.get_world_size() // 2, tensor=2),
    "partly": lambda: trained(PartlyWhole(), "muon"),
    "rounded": lambda: trained(Rounded(), "muon", within=0.02),
    "own": lambda: trained(Own()),
    "turned": lambda: trained(Turned(), "muon"),
    "states": states,
    "normed": normed,
}


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    for case in cases:
        CASES[case]()
        print(f"{case} right", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
