"""A plain loop of PyTorch on a device: the cost of what ``run.step`` reads and writes, and whether later steps tear it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import numpy as np
import torch
from harness.intervals import ratio
from islands import BLOCK_STEPS, block_s

from diloco.core.tensors.fragments import build_map
from diloco_learner.pytorch.parameters import TorchParameters
from diloco_learner.pytorch.transfers import Transfers
from diloco_learner.task_api import first_batch
from on_device import trace
from on_device.loops import FLAT_BYTES, RATE, Begin, Result, load_task_of, traced
from on_device.plan import Plan
from on_device.task import torch_memory


class Loop:
    """A plain training loop; :meth:`step` is one of it alone, and :meth:`joined_step` one with what a boundary has it do."""

    def __init__(self, plan: Plan) -> None:
        settings, loaded = load_task_of(plan, "torch")
        self.task, self.module, self.batch = loaded.task, loaded.task.module(), first_batch(loaded.task, settings)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), RATE, fused=True)
        self.transfers = Transfers()
        self.parameters = TorchParameters(self.module, self.transfers)
        self.fragments = build_map(self.parameters.tensors(None), plan.interval).fragments
        self.boundaries_s = list[float]()  # time of the loop's thread

    def _train(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.task.loss(self.module, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def step(self, number: int) -> Callable[[], object]:
        """Begin a step; return how to wait for it."""
        return self.transfers.number(self._train())

    def joined_step(self, host: Executor) -> Begin:
        """Return a step that has a fragment written and another one read, which ``host`` brings to the host."""
        thetas = [self.parameters.snapshot(fragment).to_host().copy() for fragment in self.fragments]

        def step(number: int) -> Callable[[], object]:
            loss, began_s, at = self._train(), time.perf_counter(), number % len(thetas)
            self.parameters.take(self.module)
            self.parameters.write(self.fragments[at], thetas[at], thetas[at])
            copy = self.parameters.snapshot(self.fragments[at - len(thetas) // 2])
            wait = self.parameters.number(loss)
            self.boundaries_s.append(time.perf_counter() - began_s)
            host.submit(copy.to_host)
            return wait

        return step

    def torn(self) -> int:
        """Return the values that are not those of their boundary: of fragments that are read while steps change them."""
        wrong = 0
        for fragment in self.fragments:
            expected = self.parameters.snapshot(fragment).to_host().copy()
            for _ in range(4):  # which the device is behind with
                self._train()
            self.parameters.write(fragment, expected)
            copy = self.parameters.snapshot(fragment)
            self._move(1.0)
            wrong += int(np.count_nonzero(copy.to_host() != expected))
            self._move(-1.0)
        return wrong

    def _move(self, by: float) -> None:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += by


def loop(plan: Plan) -> Iterator[Result]:
    """Yield the pace, the loop's own time and the copies of steps with a fragment written and one read, beside bare steps."""
    its = Loop(plan)
    block_s(its.step)
    found: Result = {"fragments": len(its.fragments), "bare_step_s": block_s(its.step), "bare_peak_bytes": _peak_bytes()}
    found["fragment_bytes"] = FLAT_BYTES * max(fragment.size for fragment in its.fragments)
    yield found
    with ThreadPoolExecutor(1) as host:
        joined = its.joined_step(host)
        block_s(joined)
        its.boundaries_s.clear()
        pairs = [(block_s(its.step), block_s(joined)) for _ in range(plan.blocks)]
        found |= ratio(*zip(*pairs, strict=True))
        found |= {"boundary_s": statistics.median(its.boundaries_s), "peak_bytes": _peak_bytes()}
        yield found
        for name, begin in (("bare_trace", its.step), ("trace", joined)):
            found[name] = trace.summary(traced("torch", begin), BLOCK_STEPS)
        yield found
    yield found | {"torn": its.torn()}


def _peak_bytes() -> int:
    return torch_memory()["peak_bytes"]
