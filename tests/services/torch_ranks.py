"""A loop of PyTorch of several ranks that joins a run: ``torch_ranks.py KIND URL RUN NAME OUT``, as torchrun starts it.

The first rank writes to OUT what came of it, as JSON, and beside it all parameters as ``.npz``. With ``--checkpoints FOLDER``
it saves itself every few steps, and goes on from there: by ``torch.save``, of several ranks by torch.distributed.checkpoint, or
with ``--by-rank`` by a file of each rank, which are put together.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import diloco

LEAVE_S = 300.0  # a loop that goes without the last versions ends with other parameters than the log's
STEP_S = {1: 0.04, 2: 0.01, 4: 0.01}  # by ranks, which share the cores: learners of one and of several are about as fast
SAVE_STEPS = 5
WIDTH, HIDDEN, ROWS = 9, 14, 16  # on two or four ranks these are uneven
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):  # type: ignore[misc]
    """A small regression with parameters of every number of axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(torch.tanh(self.first(x)))


def batches(share: int, shares: int, seed: int, start: int) -> Iterator[Batch]:
    """Yield whole batches of a share; ranks with data of their own take every so many rows."""
    truth = torch.from_numpy(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)).astype(np.float32))
    index = start
    while True:
        rng = np.random.default_rng((seed, share, index))
        x = torch.from_numpy(rng.normal(size=(ROWS, WIDTH)).astype(np.float32))
        yield x, torch.tanh(x @ truth)
        index += 1


def ddp(world: int) -> tuple[Net, nn.Module]:
    net = Net()
    return net, DistributedDataParallel(net)


def fsdp(world: int) -> tuple[Net, nn.Module]:
    net, mesh = Net(), init_device_mesh("cpu", (world,))
    for module in (net.first, net.second):
        fully_shard(module, mesh=mesh)
    return net, fully_shard(net, mesh=mesh, ignored_params={net.scale})


def hsdp(world: int) -> tuple[Net, nn.Module]:
    net, mesh = Net(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for module in (net.first, net.second):
        fully_shard(module, mesh=mesh)
    return net, net


def tensor_parallel(world: int) -> tuple[Net, nn.Module]:
    net, mesh = Net(), init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(net, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for module in (net.first, net.second):
        fully_shard(module, mesh=mesh["shard"])
    return net, net


def pipeline(world: int) -> tuple[Net, nn.Module]:
    """Return the first or the last of two stages, which has the other's parameters no more."""
    net = Net()
    for name in ("second", "scale") if distributed.get_rank() == 0 else ("first",):
        delattr(net, name)
    return net, net


def plain(world: int) -> tuple[Net, nn.Module]:
    net = Net()
    return net, net


KINDS: dict[str, Callable[[int], tuple[Net, nn.Module]]] = {
    "ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tensor": tensor_parallel, "pipeline": pipeline, "plain": plain,
}  # fmt: skip


def loss_and_gradients(kind: str, net: Net, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Go forward and back; return the loss, which ranks but the last stage of a pipeline have from that one."""
    x, y = batch
    if kind != "pipeline":
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss
    if distributed.get_rank() == 0:
        hidden = torch.tanh(net.first(x))
        distributed.send(hidden.detach(), 1)
        gradient, loss = torch.empty_like(hidden), torch.empty(())
        distributed.recv(gradient, 1)
        distributed.recv(loss, 1)
        hidden.backward(gradient)
        return loss
    hidden = torch.empty(len(x), HIDDEN)
    distributed.recv(hidden, 0)
    hidden.requires_grad_()
    loss = (net.scale * net.second(hidden) - y).square().mean()
    loss.backward()
    distributed.send(hidden.grad, 0)
    distributed.send(loss.detach(), 0)
    return loss


def of_all_ranks(kind: str, net: Net, losses: list[float], world: int) -> tuple[dict[str, Any], list[float]]:
    """Return all parameters, float32 by path, and the losses as means over the ranks."""
    own = {
        path.replace(".", "/"): (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy()
        for path, value in net.named_parameters()
    }
    if world == 1:
        return own, losses
    everything: list[Any] = [None] * world
    distributed.all_gather_object(everything, (own, losses))
    return (
        {path: value for values, _ in everything for path, value in values.items()},
        np.mean([its for _, its in everything], axis=0).tolist(),
    )


def own_rows(kind: str, batch: Batch, rank: int, world: int) -> Batch:
    """Return this rank's rows of a batch; tensor parallel ranks share them, and stages of a pipeline have all."""
    if kind == "tensor":
        rank, world = rank // (world // 2), 2
    if kind == "pipeline":
        return batch
    return batch[0][rank::world], batch[1][rank::world]


def average_plain(net: Net, world: int) -> None:
    """Average the gradients of parameters that no wrapper averages."""
    if not isinstance(net.scale.grad, DTensor) and net.scale.grad is not None:
        distributed.all_reduce(net.scale.grad)
        net.scale.grad /= world


def wait_for_others(own: Path, processes: int) -> None:
    """Wait until so many processes have come here; each makes a file of its own."""
    own.touch()
    while len(list(own.parent.glob("*.joined"))) < processes:
        time.sleep(0.01)


class Checkpoints:
    """A loop's own checkpoints of its model and its learner, of which the newest whole one counts. SGD has no state."""

    def __init__(self, folder: Path, world: int, rank: int, *, by_rank: bool, **parts: Any) -> None:
        self.folder, self.world, self.rank, self.by_rank, self.parts = folder, world, rank, by_rank, parts
        self._newest = folder / "newest"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        """Save all of it; a process that is killed meanwhile leaves the one before."""
        path = self.folder / f"{os.environ['MASTER_PORT']}-{step}"
        if self.by_rank:
            path.mkdir(exist_ok=True)
            torch.save({name: part.state_dict() for name, part in self.parts.items()}, path / str(self.rank))
            if self.world > 1:
                distributed.barrier()
        elif self.world > 1:
            checkpoint.save(self.parts, checkpoint_id=path)
        else:
            torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)
        if self.rank == 0:
            draft = self.folder / "draft"
            draft.write_text(str(path))
            draft.replace(self._newest)

    def load(self, *, partly: bool) -> None:
        """Load the newest one, if there is one; ``partly``: though it was saved by fewer ranks."""
        if not self._newest.exists():
            return
        path = Path(self._newest.read_text())
        if self.by_rank:
            files = [torch.load(file, weights_only=True) for file in sorted(path.iterdir())]
            self.parts["model"].load_state_dict(files[0]["model"])
            self.parts["run"].load_state_dict({key: value for file in files for key, value in file["run"].items()})
            return
        if path.is_dir():
            planner = checkpoint.DefaultLoadPlanner(allow_partial_load=partly)
            checkpoint.load(self.parts, checkpoint_id=path, planner=planner)
            return
        saved = torch.load(path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])


def main(
    kind: str,
    url: str,
    run_name: str,
    name: str,
    out: Path,
    *,
    own: bool,
    most_steps: int,
    tokens: int,
    abreast: int,
    checkpoints: Path | None,
    partly: bool,
    by_rank: bool,
) -> None:
    """Train, at most so many steps; ``own``: on data that the run does not deal; ``abreast``: processes that begin at once.

    ``checkpoints``: where it saves itself and goes on from; ``partly``: of what fewer ranks saved; ``by_rank``: in a file each.
    """
    torch.set_num_threads(1)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net, model = KINDS[kind](world)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses, slowest_s = list[float](), 0.0
    loss_and_gradients(kind, net, model, next(batches(0, 1, 0, 0)))  # ranks connect at their first collective
    optimizer.zero_grad()
    data: Any = "own" if own else "dealt"
    joining = diloco.join(url, run=run_name, name=name, params=net, tokens=tokens, data=data, leave_s=LEAVE_S)
    saver = None
    if checkpoints is not None:
        saver = Checkpoints(checkpoints, world, rank, by_rank=by_rank, model=net, run=joining)
        saver.load(partly=partly)
    with joining as run:
        wait_for_others(out.with_name(f"{name}-{rank}.joined"), abreast)
        for number, batch in enumerate(batches(99, 1, 0, 0) if own else run.batches(batches)):
            if run.over or number == most_steps:
                break
            optimizer.zero_grad()
            loss = loss_and_gradients(kind, net, model, own_rows(kind, batch, rank, world))
            if kind in ("fsdp", "hsdp", "tensor"):
                average_plain(net, world)
            optimizer.step()
            time.sleep(STEP_S[world])
            began_s = time.perf_counter()
            run.step(net, loss=loss)
            slowest_s = max(slowest_s, time.perf_counter() - began_s)
            losses.append(loss.item())
            if saver is not None and number % SAVE_STEPS == SAVE_STEPS - 1:
                saver.save(number)
            if number == 0:
                print("stepping", flush=True)
        steps = run.steps
    full, losses = of_all_ranks(kind, net, losses, world)
    if rank == 0:
        np.savez(out.with_suffix(".npz"), **full)
        out.write_text(json.dumps({"steps": steps, "losses": losses, "slowest_s": slowest_s}))
    if world > 1:
        distributed.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for what in ("kind", "url", "run_name", "name"):
        parser.add_argument(what)
    parser.add_argument("out", type=Path)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--abreast", type=int, default=0)
    parser.add_argument("--most-steps", type=int, default=-1)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--partly", action="store_true")
    parser.add_argument("--by-rank", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[ROWS], help="by rank, or one for all")
    parser.add_argument("--versions", nargs="+", default=[torch.__version__], help="of PyTorch, by rank, or one for all")
    return parser.parse_args()


if __name__ == "__main__":
    given = vars(_arguments())
    (tokens, versions), rank = (given.pop(what) for what in ("tokens", "versions")), int(os.environ["RANK"])
    torch.__version__ = versions[rank % len(versions)]
    main(**given, tokens=tokens[rank % len(tokens)])
