"""Costs of a learner's framework, and what it keeps: examples, looks at tensors, loops, mixed frameworks, bfloat16, and data.

python bench/frameworks.py examples            # all of them, in about six minutes on two cores that do nothing else
python bench/frameworks.py examples flax_nnx lora --pairs 32 --json
python bench/frameworks.py watching            # 300 tensors; ten seconds; needs PyTorch
python bench/frameworks.py stepping --pin      # a joined loop of PyTorch beside a bare one; two minutes
python bench/frameworks.py mixed --tokens 200000 --seeds 2
python bench/frameworks.py bfloat16
python bench/frameworks.py data                # needs the extra `data`
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import ml_dtypes
import numpy as np
import optax
from harness.console import Bench, Result, Script, folder, say
from harness.host import machine
from harness.intervals import T95, ratio, spread
from harness.live_run import ENDLESS
from numpy.typing import NDArray

from diloco.process import observe
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner.frameworks import LoadedTask, load
from diloco_learner.jax.island import Island
from diloco_learner.task import GptTask, load_task, named
from diloco_learner.task_api import first_batch
from diloco_learner.text import text_files

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

# ---- examples

EXAMPLES = (
    "own_model", "classifier", "flax_nnx", "equinox_mlp", "haiku_resnet", "vision_transformer", "mixture_of_experts", "lora",
    "llama", "torch_gpt",
)  # fmt: skip

TARGET, RATE = 0.98, 1e-3
STEP_S, TURN_S = 0.05, 0.5
LARGEST = 1 << 14  # batches that are put together: a loss that takes no time has to end somewhere
KEPT = 4  # batches that a loop goes over
Take = Callable[[Any], float]


def bare(task: Any) -> Take:
    """Return a step of a plain loop in JAX: it takes a batch, and returns its loss."""
    key, wanted = jax.random.key(0), named(task, "loss")
    fixed = {"constants": jax.device_put(task.constants())} if "constants" in wanted else {}
    transformation = task.optimizer(lambda count: RATE) if hasattr(task, "optimizer") else optax.adamw(RATE)
    others = {"train": True} if "train" in wanted else {}

    def loss_of(params: Any, batch: Any, index: Any, fixed: Any) -> Any:
        drawn = {"key": jax.random.fold_in(key, index)} if "key" in wanted else {}
        returned = task.loss(params, batch, **drawn, **others, **fixed)
        return returned[0] if isinstance(returned, tuple) else returned

    def step(params: Any, state: Any, batch: Any, index: Any, fixed: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch, index, fixed)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(lambda leaf: jax.numpy.array(leaf), task.init(key))
    values = [params, transformation.init(params), 0]

    def take(batch: Any) -> float:
        values[0], values[1], loss = compiled(values[0], values[1], batch, np.uint32(values[2]), fixed)
        values[2] += 1
        return float(loss)

    return take


def bare_torch(task: Any) -> Take:
    """Return a step of a plain loop in PyTorch."""
    import torch

    module = task.module()
    optimizer = torch.optim.AdamW(module.parameters(), RATE)

    def take(batch: Any) -> float:
        optimizer.zero_grad()
        returned = task.loss(module, batch)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return take


def island_of(name: str, loaded: LoadedTask) -> Take:
    """Return a step of the task's island."""
    inner = {"inner.optimizer": "adamw", "inner.clip_norm": 1e9, "fragments.count": 8, "task.name": f"{name}:make"}
    island, count = loaded.framework.make_model(loaded.task, run_settings(overrides=inner), None), [0]

    def take(batch: Any) -> float:
        count[0] += 1
        output = island.begin_step(batch, RATE, (0, count[0]))
        island.finish_step()
        loss: float = output.wait()
        return loss

    return take


def together(batches: Iterator[Any], count: int) -> list[Any]:
    """Return batches of so many of a task's, along the first axis."""
    return [jax.tree.map(lambda *leaves: np.concatenate(leaves), *[next(batches) for _ in range(count)]) for _ in range(KEPT)]


def seconds(take: Take, batches: list[Any], steps: int) -> float:
    """Return the seconds that a step takes, in the mean of so many."""
    began_s = time.perf_counter()
    for index in range(steps):
        take(batches[index % len(batches)])
    return (time.perf_counter() - began_s) / steps


def fitted(take: Take, batches: Iterator[Any]) -> tuple[list[Any], int, float]:
    """Return batches whose step takes :data:`STEP_S`, of how many of the task's each is, and what a step takes."""
    count = 1
    while True:
        kept = together(batches, count)
        take(kept[0])  # compiles
        step_s = min(seconds(take, kept, 4) for _ in range(2))
        if step_s >= STEP_S or count >= LARGEST:
            return kept, count, step_s
        count = min(LARGEST, max(2 * count, math.ceil(1.2 * count * STEP_S / step_s)))


def beside_bare(name: str, pairs: int) -> Result:
    """Compare the two loops of an example."""
    settings = run_settings(overrides={"task.name": f"{name}:make", "fragments.count": 8})
    loaded = load(settings.task, None, Path())
    loops = {
        "bare": bare_torch(loaded.task) if loaded.framework.name == "torch" else bare(loaded.task),
        "island": island_of(name, loaded),
    }
    kept, count, step_s = fitted(loops["bare"], loaded.task.batches(0, 1, 0, 0))
    steps = max(1, round(TURN_S / step_s))
    for take in loops.values():
        seconds(take, kept, 2)  # the island compiles
    took: dict[str, list[float]] = {each: [] for each in loops}
    for turn in range(pairs):
        for each in sorted(loops, reverse=turn % 2 == 1):
            took[each].append(seconds(loops[each], kept, steps))
    found = ratio(took["bare"], took["island"])
    about = {"example": name, "batches": count, "steps_a_turn": steps}
    times = {f"{each}_ms": 1000 * statistics.median(values) for each, values in took.items()}
    say(f"{name} measured")
    return about | times | found | {"reached": found["ratio"] >= TARGET}


def examples(
    names: Annotated[Sequence[str], EXAMPLES, "all by default"] = EXAMPLES, *, pairs: Annotated[int, tuple(T95)] = 16
) -> Result:
    """Compare an island's steps a second with those of a bare training loop, for each task in ``examples/``.

    An example's own batch gives steps of a millisecond, of which a percentage says little: batches are put together until the
    plain loop's step takes 50 ms. Both loops wait for each step, and both have AdamW without clipping, unless the task has its
    own optimizer. They take turns of about half a second, whose order changes with each pair, so that what else the machine
    does hits both. The result is the mean over pairs of the logarithm of bare time by island time, with its interval of 95 %
    (Student's t).
    """
    return machine() | {"pairs": pairs, "rows": [beside_bare(name, pairs) for name in names]}


def show_examples(result: Result) -> None:
    print(f"{result['cpu']}, {result['cores']} cores, {result['pairs']} pairs each; target {TARGET:.0%} of the bare loop")
    for row in result["rows"]:
        print(
            f"  {row['example']:<20} {100 * row['ratio']:6.1f} % ({100 * row['low']:.1f} to {100 * row['high']:.1f}); bare "
            f"{row['bare_ms']:.1f} ms, island {row['island_ms']:.1f} ms a step of {row['batches']} batches"
            f"{'' if row['reached'] else '; not reached'}"
        )


# ---- watching

LOOK_TARGET_S = 0.0001  # of 300 tensors
FROZEN_BYTES = 1 << 30


def median_s(work: Callable[[], object], times: int) -> float:
    """Return how long a piece of work usually takes."""
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def watching(*, tensors: int = 300, times: int = 400) -> Result:
    """Measure the look that a joined loop of PyTorch has at all its tensors at each step: that none was swapped.

    *module*, *named*: the median of a look at a module, or at its tensors by name, where nothing has changed; target at most
    0.1 ms for 300 tensors. *swapped*: the same where one tensor has other memory, so that all are taken over. *hashed*: a
    gigabyte of frozen parameters, when the loop joins.
    """
    import torch
    from torch import nn

    from diloco_learner.pytorch.parameters import TorchParameters

    torch.set_num_threads(1)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(tensors // 4)))
    own = dict(module.named_parameters())
    of_module, of_named = TorchParameters(module), TorchParameters(own)
    weight = next(module.parameters())

    def swapped() -> None:
        weight.data = weight.data.clone()
        of_module.take(module)

    frozen = nn.Linear(FROZEN_BYTES // 4096, 1024, bias=False).requires_grad_(False)
    based = TorchParameters(nn.ModuleList([frozen, nn.Linear(1, 1)]))
    found = {
        "module": median_s(lambda: of_module.take(module), times),
        "named": median_s(lambda: of_named.take(own), times),
        "swapped": median_s(swapped, max(1, times // 20)),
        "hashed": median_s(based.fixed, 1),
    }
    return found | {"of_target": found["module"] / (LOOK_TARGET_S * tensors / 300)}


def show_watching(result: Result) -> None:
    for what in ("module", "named", "swapped", "hashed"):
        print(f"{what:8} {1000 * result[what]:9.3f} ms")
    print(f"a look at a module takes {result['of_target']:.2f} of its target")


# ---- stepping

REACHED_S = 5.0  # before the first pair: the rounds have found their times
PATIENT_S = 600.0  # who is stopped is not dead


def stepping(
    *,
    step_s: float = 0.036,
    parameters: int = 860_000,
    fragments: int = 24,
    steps: int = 20,
    learners: int = 2,
    pairs: Annotated[int, tuple(T95)] = 4,
    turn_s: float = 6.0,
    asleep: Annotated[bool, "no loop computes: steps take their time without a processor"] = False,
    pin: Annotated[bool, "both loops' threads at core 0, and everything else at core 1"] = False,
) -> Result:
    """Measure the time in `run.step` of a joined PyTorch loop, and the pace of the loop relative to one that does not join.

    The run has a server, a syncer and a coordinator, and its other learners are asleep in their steps. In a turn one of the two
    loops goes on, and all processes of the other side are stopped. *call*: the time in `run.step` by the clock (mean, median,
    99th percentile of a turn's steps), and the processor time of the loop's thread in it, which other work on the machine moves
    less. *blocked*: the share of a step that is in `run.step`. *pace*: the bare loop's time of a step over the joined one's.
    What a step takes by the clock beyond the processor time of its thread was spent waiting, most of it for Python's lock.
    """
    from harness.loops import sides

    given = {
        "learners": learners, "shards": 1, "tokens": ENDLESS, "fragments.count": fragments, "round.steps": steps,
        "liveness.dead_s": PATIENT_S, "liveness.lease_s": PATIENT_S,
    }  # fmt: skip
    settings = run_settings("decoupled", given)
    with sides(settings, learners=learners, parameters=parameters, step_s=step_s, asleep=asleep, pin=pin) as both:
        time.sleep(REACHED_S + steps * step_s)
        turns = [both.turn(turn_s, run_first=pair % 2 == 0) for pair in range(pairs)]
    pace = ratio([turn["bare_step_s"] for turn in turns], [turn["step_s"] for turn in turns])
    return machine() | {"pairs": pairs, "pin": pin, "asleep": asleep, "turns": turns, "pace": pace}


def show_stepping(result: Result) -> None:
    print(f"{result['cpu']}, {result['cores']} cores, {result['pairs']} pairs: median (least to most)")
    names = (
        "bare_step_s", "bare_step_cpu_s", "step_s", "step_cpu_s", "call_mean_s", "call_median_s", "call_p99_s", "call_cpu_s",
    )  # fmt: skip
    for name in names:
        found = spread([1000 * turn[name] for turn in result["turns"]])
        print(f"  {name:15} {found['median']:7.3f} ms ({found['least']:.3f} to {found['most']:.3f})")
    blocked, pace = spread([100 * turn["blocked"] for turn in result["turns"]]), result["pace"]
    print(f"  blocked        {blocked['median']:7.2f} %  ({blocked['least']:.2f} to {blocked['most']:.2f})")
    print(f"  pace           {100 * pace['ratio']:7.1f} %  ({100 * pace['low']:.1f} to {100 * pace['high']:.1f}, 95 %)")


# ---- mixed

TASK = "torch_gpt:make"

MIXES = (("jax", "jax"), ("jax", "torch"), ("torch", "torch"))

VIRTUAL_STEP_S = 0.1


def play(settings: RunSettings, mix: tuple[str, str]) -> tuple[float, list[float]]:
    """Return the validation loss at the end, and by learner the share of versions that it is in."""
    from diloco_lab.paces.times import Paces, steady
    from diloco_lab.trial import Trial
    from diloco_learner.pytorch.island import TorchIsland, TorchStepOutput
    from diloco_learner.pytorch.task import load_task as load_torch

    class OfTorch(TorchIsland):
        """An island of PyTorch with the calls that a trial makes."""

        def step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> TorchStepOutput:
            return self.begin_step(batch, learning_rate, at)

    frameworks: Iterator[str] = iter(mix)
    own = settings.model_copy(update={"task": settings.task.model_copy(update={"name": TASK})})

    class Mixed(Island):
        """Its twins are of the frameworks, in turn."""

        def twin(self) -> Any:
            if next(frameworks) == "jax":
                return super().twin()
            other = OfTorch(load_torch(own.task, None), own)
            other.rehearse(first_batch(self.task, settings))
            for fragment in self.fragments().fragments:
                other.write(fragment, self.read(fragment).to_host())
            return other

    paces = Paces([steady(VIRTUAL_STEP_S) for _ in mix])
    played = Trial(settings, load_task(settings.task, None), paces, island=Mixed).play()
    return played.loss, played.shares


def mixed(*, tokens: int = 200_000, seeds: int = 2) -> None:
    """Compare the loss at which a run of two learners ends, by the frameworks of these.

    Trials in virtual time (docs/lab.md): the services' own code, equal steps, and no learner begins later than the other, which
    moves the loss of a run this short by more than its seed does. All three begin with the same values.
    """
    observe.configure("bench", "frameworks", level="error")
    for mix in MIXES:
        losses = []
        for seed in range(seeds):
            settings = run_settings(overrides={"learners": 2, "seed": seed, "tokens": tokens})
            loss, shares = play(settings, mix)
            losses.append(loss)
            print(f"{' and '.join(mix)}, seed {seed}: loss {loss:.4f}; versions with each: {shares}", flush=True)
        print(f"{' and '.join(mix)}: mean {np.mean(losses):.4f}, from {min(losses):.4f} to {max(losses):.4f}", flush=True)


# ---- bfloat16

Vector = NDArray[np.float32]

ROUNDS, STEPS, VALUES = 50, 20, 20_000


def bfloat16(*, width: int = 512, layers: int = 4) -> None:
    """Compare parameters in bfloat16 with float32: bytes a parameter on a device, and what becomes of small updates.

    Bytes are XLA's `memory_analysis()` of the built-in model's step: its arguments are all that an island keeps between steps,
    the temporaries are the rest. With the small batch, a single sequence, these are mostly gradients and rounded parameters.

    Updates are drawn with a trend of a third of their deviation, and added to parameters of 0.02, round by round, in two forms:
    masters in float32, as an island has them; and bfloat16 alone, where parameters are rounded after each step and a
    displacement is measured from the version rounded. Each round's displacement goes into the log as it is. `arrives` is the
    share of the updates' sum that a displacement holds (a regression), `error` the root mean square of the rest, relative to
    the sum's.
    """
    for form, made in {"masters in float32": masters, "bfloat16 alone": alone}.items():
        for size in (1e-4, 1e-5):
            arrives, error = displaced(made, size)
            print(f"{form:18} updates of {size:.0e}: arrives {arrives:6.3f}, error {error:6.3f}")
    for dtype in ("float32", "bfloat16"):
        print_memory(dtype, layers, width)


def displaced(form: Callable[[Vector, Vector], tuple[Vector, Vector]], size: float) -> tuple[float, float]:
    """Return how much of the updates' sum displacements hold, and the size of the rest."""
    rng = np.random.default_rng(0)
    log = rng.normal(0, 0.02, VALUES).astype(np.float32)
    found, wanted = [], []
    for _ in range(ROUNDS):
        updates = rng.normal(size / 3, size, (STEPS, VALUES)).astype(np.float32)
        base, value = form(log, updates)
        found.append(value - base)
        wanted.append(updates.sum(0))
        log = log + found[-1]
    had, sums = np.array(found, np.float64), np.array(wanted, np.float64)
    arrives = np.sum(had * sums) / np.sum(sums**2)
    return float(arrives), float(np.sqrt(np.mean((had - arrives * sums) ** 2) / np.mean(sums**2)))


def rounded(values: Vector) -> Vector:
    """Return the nearest bfloat16."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def masters(log: Vector, updates: Vector) -> tuple[Vector, Vector]:
    """Return what a displacement is measured from, and to: floats of 32 bits."""
    value = log.copy()
    for update in updates:
        value += update
    return log, value


def alone(log: Vector, updates: Vector) -> tuple[Vector, Vector]:
    """Return the same of parameters that are rounded after each step, and had begun as the version rounded."""
    value = rounded(log)
    for update in updates:
        value = rounded(value + update)
    return rounded(log), value


def print_memory(dtype: str, layers: int, width: int) -> None:
    """Print the bytes a parameter that a step keeps and needs."""
    values: Result = {"task.dtype": dtype, "task.layers": layers, "task.width": width, "task.batch": 1, "task.context": 8}
    settings = run_settings(overrides=values | {"inner.optimizer": "adamw"})
    task = load_task(settings.task, None)
    island = Island(task, settings)
    count = sum(leaf.size for leaf in jax.tree.leaves(island.params()))
    memory = island.trace(first_batch(task, settings))[0].compile().memory_analysis()
    assert memory is not None
    kept, needed = memory.argument_size_in_bytes / count, memory.temp_size_in_bytes / count
    print(f"{dtype:8} {count / 1e6:.1f}M parameters: {kept:.1f} bytes a parameter kept, {needed:.1f} more in a step")


# ---- data

TRAIN = "[tokenizer]\ntrain = { vocabulary = 2048 }\n"
STEPS_OF_MODEL = 10


def data(*, batches: int = 2000, turns: int = 5) -> None:
    """Measure tokens a second of a mix of data, by kind of source, beside those that the default model trains on.

    The sources have the text of Python's standard library. A core's tokens a second are by processor time, the prefetching
    thread's included.
    """
    from diloco_learner.mix.mix import Mix

    settings = TaskSettings()
    print(f"windows of {settings.context} tokens, {settings.batch} a batch; load {os.getloadavg()[0]:.1f}; best of {turns}")
    with folder() as root:
        for name, toml in sources(root, settings).items():
            (root / "mix.toml").write_text(toml)
            began_s, used_s = time.perf_counter(), time.process_time()
            mix = Mix(settings, str(root / "mix.toml"), root / "cache")
            made_s, made_cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
            core, wall = (max(each) for each in zip(*(rate(mix, batches) for _ in range(turns)), strict=True))
            tokens = sum(source.stored.training.size for source in mix.sources.values())
            print(
                f"{name:22}  {core / 1e6:6.2f}M tokens/s a core, {wall / 1e6:6.2f}M on the clock; "
                f"{tokens / 1e6:.1f}M tokens made in {made_s:.1f} s, {made_cpu_s:.1f} s of processor time",
                flush=True,
            )
        best = max(model_rate(settings, root) for _ in range(turns))
        print(f"the default model       {best / 1e6:6.3f}M tokens/s on the clock")


def sources(root: Path, settings: TaskSettings) -> dict[str, str]:
    """Write the texts as files of all kinds, and return the mix of each."""
    import datasets
    import pyarrow
    from pyarrow import parquet

    from diloco_learner.mix.mix import Mix

    texts = [path.read_text(errors="replace") for path, _ in text_files(None)]
    parquet.write_table(pyarrow.table({"text": texts}), root / "texts.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(root / "saved"))
    (root / "mix.toml").write_text(TRAIN + '[sources.a]\nkind = "text"\n')
    tokens = Mix(settings, str(root / "mix.toml"), root / "first cache").sources["a"].stored.training
    for dtype in ("uint16", "uint32"):
        tokens.astype(dtype).tofile(root / f"{dtype}.bin")
    found = {
        "text, bytes": '[sources.a]\nkind = "text"\n',
        "text, BPE": TRAIN + '[sources.a]\nkind = "text"\n',
        "Parquet, BPE": TRAIN + '[sources.a]\nkind = "parquet"\npath = "texts.parquet"\n',
        "Hugging Face, BPE": TRAIN + '[sources.a]\nkind = "huggingface"\npath = "saved"\n',
    }
    for dtype in ("uint16", "uint32"):
        found[f"bin, {dtype}"] = f'vocabulary = 2048\n[sources.a]\nkind = "bin"\npath = "{dtype}.bin"\ndtype = "{dtype}"\n'
    found["four, by weight"] = TRAIN + "".join(
        f'[sources.{kind}]\nkind = "{kind}"\n{path}weight = {weight}\n'
        for weight, (kind, path) in enumerate(
            {
                "text": "",
                "parquet": 'path = "texts.parquet"\n',
                "huggingface": 'path = "saved"\n',
                "bin": 'path = "uint16.bin"\n',
            }.items(),
            1,
        )
    )
    return found


def rate(mix: Any, count: int) -> tuple[float, float]:
    """Return the tokens of a share that are read in a second: by processor time, and by the clock."""
    batches = mix.batches(0, 4, 0, 0)
    next(batches)
    began_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    tokens = count * mix.batch * mix.context
    return tokens / (time.process_time() - used_s), tokens / (time.perf_counter() - began_s)


def model_rate(settings: TaskSettings, root: Path) -> float:
    """Return tokens a second of processor time of the built-in model's loss and gradients on bytes, its fastest case."""
    task = GptTask(settings, None, root)
    params = task.init(jax.random.key(0))
    step: Any = jax.jit(jax.grad(task.loss))
    batch = np.asarray(next(task.batches(0, 4, 0, 0)))
    jax.block_until_ready(step(params, batch))
    used_s = time.process_time()
    for _ in range(STEPS_OF_MODEL):
        jax.block_until_ready(step(params, batch))
    return STEPS_OF_MODEL * task.tokens_per_batch / (time.process_time() - used_s)


BENCHES = (
    Bench(examples, show_examples),
    Bench(watching, show_watching),
    Bench(stepping, show_stepping),
    Bench(mixed),
    Bench(bfloat16),
    Bench(data),
)
SCRIPT = Script(__doc__, *BENCHES)

if __name__ == "__main__":
    SCRIPT.run()
