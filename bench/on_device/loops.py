"""Steps of a learner on a device, measured in one process without a run, and the host's share of the work."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import core
import numpy as np
from harness.intervals import ratio
from harness.parties import model as model_of
from islands import BLOCK_STEPS, bare_step, block_s, step_with_fragments

from diloco.core.learner.delta import Baseline, EncodedOffer, Offered
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import build_map
from diloco.settings import folders
from diloco.settings.presets import run_settings
from diloco_learner.frameworks import LoadedTask, load
from diloco_learner.task_api import first_batch
from on_device import trace
from on_device.plan import MULTIPLE, ONE, Plan
from on_device.task import jax_memory, torch_memory

RATE = 1e-4
FLAT_BYTES = 4  # of a value in float32
Begin = Callable[[int], Callable[[], object]]
Result = dict[str, Any]


def fit(plan: Plan) -> Iterator[Result]:
    """Yield the batch that fills the device with a learner, a bare loop and an evaluator, by XLA's word on a step's memory."""
    import jax

    from diloco_learner.jax.island import Island

    settings, loaded = load_task_of(plan, "jax")
    island = Island(loaded.task, settings)
    needed = island.trace(first_batch(loaded.task, settings))[0].compile().memory_analysis()
    assert needed is not None
    limit_bytes = jax_memory()["limit_bytes"] if jax.default_backend() != "cpu" else 0
    kept, temporary = needed.argument_size_in_bytes, needed.temp_size_in_bytes
    yield {
        "batch": batch_that_fits(plan, kept, temporary, limit_bytes / ONE) if limit_bytes else plan.batch,
        "kept_bytes": kept, "temporary_bytes": temporary, "limit_bytes": limit_bytes,
    }  # fmt: skip


MOST_BATCH = 256


def batch_that_fits(plan: Plan, kept_bytes: float, temporary_bytes: float, room_bytes: float) -> int:
    """Return a batch, a multiple of :data:`MULTIPLE`, whose step needs so much room.

    Of the ``temporary_bytes``, which are those of the plan's batch, gradients in float32 and rounded parameters are there
    whatever the batch is.
    """
    fixed = min(temporary_bytes, 6.0 * plan.parameters)
    a_sequence = max(1.0, (temporary_bytes - fixed) / plan.batch)
    return max(MULTIPLE, min(MOST_BATCH, int((room_bytes - kept_bytes - fixed) / a_sequence) // MULTIPLE * MULTIPLE))


def device(plan: Plan, framework: str) -> Iterator[Result]:
    """Yield what writing and reading a fragment at each step costs beside bare steps: time, memory, copies, idle time."""
    memory = {"jax": jax_memory, "torch": torch_memory}[framework]
    settings, loaded = load_task_of(plan, framework)
    model, batch = loaded.framework.make_model(loaded.task, settings, None), first_batch(loaded.task, settings)
    bare = _own_step(model, batch)
    began_s = time.perf_counter()
    model.check(batch)
    bare(0)()
    found: Result = {"first_step_s": time.perf_counter() - began_s}
    block_s(bare)
    found |= {"bare_step_s": block_s(bare), "bare_peak_bytes": memory()["peak_bytes"]}
    yield found
    fragment_map = model.fragments()
    fragments = fragment_map.fragments
    began_s = time.perf_counter()
    if hasattr(model, "prepare"):
        model.prepare(fragment_map)
    found |= {"prepare_s": time.perf_counter() - began_s, "fragments": len(fragments)}
    found["fragment_bytes"] = FLAT_BYTES * max(fragment.size for fragment in fragments)
    thetas = [model.read(fragment).to_host() for fragment in fragments]
    found["to_host_s"] = statistics.median(_timed(lambda at=at: model.read(at).to_host()) for at in fragments)  # type: ignore[misc]
    found |= _boundary(model, fragments, thetas)
    yield found
    with ThreadPoolExecutor(1) as host:
        steps = step_with_fragments(model, fragments, thetas, batch, host)
        block_s(steps)
        found["peak_bytes"] = memory()["peak_bytes"]
        pairs = [(block_s(bare), block_s(steps)) for _ in range(plan.blocks)]
        found |= ratio(*zip(*pairs, strict=True))
        yield found
        kinds: tuple[tuple[str, Begin], ...] = (("bare_trace", bare), ("trace", steps))
        for name, begin in kinds:
            found[name] = trace.summary(traced(framework, begin), BLOCK_STEPS)
        yield found


def _boundary(model: Any, fragments: Any, thetas: Any) -> Result:
    """Return the seconds in which the trainer's thread queues the writing of a version beside kept progress, and a reading."""
    took_s = []
    for fragment, theta in zip(fragments, thetas, strict=True):
        moved = np.random.default_rng(0).normal(0, 1e-4, fragment.size).astype(np.float32)
        encoded = EncodedOffer(quantise.quantise(moved, 4), quantise.quantise(moved / 16, 8))
        reference = Baseline(theta, Offered(encoded, 4, None, 8))

        def boundary(fragment: Any = fragment, theta: Any = theta, reference: Any = reference) -> Any:
            model.write(fragment, theta, reference)
            return model.read(fragment)

        began_s = time.perf_counter()
        reading = boundary()
        took_s.append(time.perf_counter() - began_s)
        reading.to_host()
    return {"boundary_s": statistics.median(took_s)}


def traced(framework: str, begin: Begin) -> list[trace.Work]:
    """Return the device's work in a block of steps."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name)
        if framework == "jax":
            import jax

            with jax.profiler.trace(str(folder)):
                block_s(begin)
            return trace.of_jax(folder)
        from torch import profiler

        with profiler.profile() as profile:
            block_s(begin)
        profile.export_chrome_trace(str(folder / "trace.json"))
        return trace.of_torch(folder / "trace.json")


def host(plan: Plan) -> Iterator[Result]:
    """Yield seconds of processor time that encoding and folding take in a step, of the parameters by the steps of a round."""
    pieces = build_map(model_of(core.FRAGMENTS * plan.values), core.FRAGMENTS).fragments
    fragment = max((each for each in pieces if not each.embedding), key=lambda each: each.size)
    rows = {row.name: row for row in core.measure_bits(fragment, 4, 3 if plan.dry else 7)}
    a_step = plan.parameters / plan.interval
    yield {"values": fragment.size} | {
        f"{name}_s": a_step * rows[row].median_s / rows[row].values for name, row in (("encode", "encode"), ("fold", "fold"))
    }


def plain(plan: Plan, framework: str) -> Iterator[Result]:
    """Yield a plain loop's steps beside those of a learner, in turns: optax and jit, or PyTorch's data-parallel module."""
    settings, loaded = load_task_of(plan, framework)
    model, batch = loaded.framework.make_model(loaded.task, settings, None), first_batch(loaded.task, settings)
    model.check(batch)
    other = _plain_jax(loaded, settings, batch) if framework == "jax" else _plain_torch(loaded, settings, batch)
    own = _own_step(model, batch)
    for begin in (other, own):
        block_s(begin)
    pairs = [(block_s(other), block_s(own)) for _ in range(plan.blocks)]
    yield {"plain_step_s": statistics.median(each for each, _ in pairs)} | ratio(*zip(*pairs, strict=True))


class _Masters:
    """The task with float32 parameters, which its loss rounds to the types that it has them in."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def init(self, key: Any) -> Any:
        import jax

        drawn = self._task.init(key)
        self._types = jax.tree.map(lambda leaf: leaf.dtype, drawn)
        return jax.tree.map(lambda leaf: leaf.astype(np.float32), drawn)

    def loss(self, params: Any, batch: Any) -> Any:
        import jax

        return self._task.loss(jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, self._types), batch)


def _plain_jax(loaded: LoadedTask, settings: Any, batch: Any) -> Begin:
    from diloco_learner.jax.island import Island

    masters: Any = _Masters(loaded.task)
    return bare_step(masters, settings, Island(masters, settings), batch)


def _plain_torch(loaded: LoadedTask, settings: Any, batch: Any) -> Begin:
    import torch
    from torch import distributed

    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder:
        on_gpu = torch.cuda.is_available()
        store = f"file://{folder}/store"
        distributed.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=0, world_size=1)
    module = torch.nn.parallel.DistributedDataParallel(loaded.task.module())
    inner = settings.inner
    optimizer = torch.optim.AdamW(module.parameters(), RATE, (inner.beta1, inner.beta2), fused=on_gpu)

    def begin(number: int) -> Callable[[], object]:
        optimizer.zero_grad()
        loss = loaded.task.loss(module, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), inner.clip_norm)
        optimizer.step()
        return lambda: float(loss.detach())

    return begin


def _own_step(model: Any, batch: Any) -> Begin:
    """Return the step of a learner's model alone."""

    def begin(number: int) -> Callable[[], object]:
        output = model.begin_step(batch, RATE)
        model.finish_step()
        wait: Callable[[], object] = output.wait
        return wait

    return begin


def load_task_of(plan: Plan, framework: str) -> tuple[Any, LoadedTask]:
    """Return the settings of a plan, and the task that they name."""
    settings = run_settings("decoupled", dict(plan.sets(framework)))
    if framework == "jax":
        from diloco_learner.jax import programs

        programs.keep_if_possible(folders.cache_dir())
    return settings, load(settings.task, None, folders.cache_dir())


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
