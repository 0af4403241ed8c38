"""Islands on CPU devices: their pace beside a bare loop, steps of two programs, checkpoints, and one large model.

python bench/islands.py bare --devices 4 --step-s 0.05
python bench/islands.py apart --step-s 0.05 0.11
python bench/islands.py checkpoints                           # 32M parameters, a step of 0.2 s, checkpoints for 120 s
python bench/islands.py checkpoints --parameters 1000000 --seconds 20 --json
python bench/islands.py large --parameters 2000000            # a minute
python bench/islands.py large --parameters 250000000          # within 24 GiB, if nothing else takes much of them
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import psutil
from harness.console import Bench, Keep, Result, Script, folder, say
from harness.host import GIB, MB, MIB, machine, peak_rss_bytes, reset_peak
from harness.live_run import Up, Watch, asked, asleep, events, read_pid, up, watched

from diloco_ops.up.environment import service_environment

BLOCK_STEPS = 20
RATE = 1e-3
Begin = Callable[[int], Callable[[], object]]  # of a step, by its number: begins it, and returns how to wait for it


# ---- steps of an island beside others, in turns


def load_asleep(step_s: float, data: int, layers: int, width: int, kind: str = "make") -> tuple[Any, Any, Any]:
    """Return settings, task and mesh of steps that sleep."""
    os.environ["BENCH_STEP_S"] = str(step_s)
    from diloco.settings.presets import run_settings
    from diloco.settings.service import MeshSettings
    from diloco_learner.jax.mesh import make_mesh
    from diloco_learner.task import load_task

    sizes = {"task.layers": layers, "task.width": width, "inner.optimizer": "adamw"}
    settings = run_settings(overrides={"task.name": f"harness.asleep:{kind}"} | sizes)
    return settings, load_task(settings.task, None), make_mesh(MeshSettings(data=data))


def pace_of(ones: Begin, others: Begin, blocks: int) -> tuple[float, float, str]:
    """Return the median seconds of a step of both, which take turns, and the pace of the others in that of the ones."""
    block_s(ones), block_s(others)
    pairs = [(block_s(ones), block_s(others)) for _ in range(blocks)]
    paces = sorted(one_s / other_s for one_s, other_s in pairs)
    tenth = len(paces) // 10
    text = f"{statistics.median(paces):.3f} ({paces[tenth]:.3f} to {paces[-1 - tenth]:.3f}, {len(paces)} pairs)"
    one_s, other_s = (statistics.median(its) for its in zip(*pairs, strict=True))
    return one_s, other_s, text


def step_with_fragments(model: Any, fragments: Sequence[Any], thetas: Sequence[Any], batch: Any, host: Executor) -> Begin:
    """Return a step that writes a fragment and reads another one, which ``host`` copies to the host.

    So does a learner's step where a round has as many steps as there are fragments.
    """

    def step(number: int) -> Callable[[], object]:
        model.finish_step()
        at = number % len(fragments)
        model.write(fragments[at], thetas[at], thetas[at])
        reading = model.read(fragments[at - len(fragments) // 2])
        output = model.begin_step(batch, RATE)
        host.submit(reading.to_host)
        if model.apart:
            output.wait()
        wait: Callable[[], object] = output.wait
        return wait

    return step


def block_s(step: Begin) -> float:
    """Return the seconds a step takes of a block of them; ``step`` begins one, and returns how to wait for it."""
    began_s = time.perf_counter()
    wait: Callable[[], object] = int
    for number in range(BLOCK_STEPS):
        following = step(number)
        wait()
        wait = following
    wait()
    return (time.perf_counter() - began_s) / BLOCK_STEPS


def bare_step(task: Any, settings: Any, island: Any, batch: Any) -> Begin:
    """Return a plain sharded step of the island's task and optimizer, on copies of its parameters."""
    import jax
    import jax.numpy as jnp

    from diloco_learner.jax.inner import optimizer

    inner = optimizer(settings, [])
    state = {"params": jax.tree.map(jnp.copy, island.params())}
    state["optimizer"] = inner.init(jax.tree.leaves(state["params"]))

    def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(task.loss)(params, batch)
        leaves, structure = jax.tree.flatten(params)
        updates, optimizer_state = inner.update(jax.tree.leaves(gradients), optimizer_state, leaves)
        moved = [leaf - RATE * update for leaf, update in zip(leaves, updates, strict=True)]
        return jax.tree.unflatten(structure, moved), optimizer_state, loss

    shardings = jax.tree.map(lambda array: array.sharding, state["params"])
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings, None, None))

    def begin(number: int) -> Callable[[], object]:
        state["params"], state["optimizer"], loss = jitted(state["params"], state["optimizer"], batch)
        return lambda: float(loss)

    return begin


def print_memory(island: Any, devices: int) -> None:
    """Print the bytes of all that an island keeps, and the most that a device has of them."""
    arrays = island.arrays().values()
    held: dict[Any, int] = {}
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    whole, most = sum(array.nbytes for array in arrays), max(held.values())
    share = most * devices / whole
    print(f"parameters and optimizer state {whole / 1e6:.2f} MB, a device {most / 1e6:.2f} MB: {share:.3f} of its share")


def bare(
    *,
    devices: int = 4,
    data: Annotated[int, "replicas among them"] = 1,
    step_s: float = 0.05,
    tensors: int = 24,
    width: int = 192,
    fragments: int = 20,
    blocks: int = 15,
) -> None:
    """Measure an island on a mesh of CPU devices: its pace beside the same step in a bare JAX loop, and a device's memory.

    The task is that of ``harness/asleep.py``, whose step takes a set time and hardly any processor. The bare loop is optax and
    ``jax.jit`` on arrays of the same shardings. The island also writes a fragment and reads one at every step, as a learner
    does that has as many fragments as steps in a round. Both have a step queued while one is in flight. They take turns, a
    block of steps each; the ratio of their times is one sample.
    """
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    from diloco.core.tensors.fragments import build_map
    from diloco_learner.jax.island import Island
    from diloco_learner.task_api import first_batch

    settings, task, mesh = load_asleep(step_s, data, tensors, width)
    island, batch = Island(task, settings, mesh), first_batch(task, settings)
    pieces = build_map(island.tensors(), fragments).fragments
    thetas = [island.read(piece).to_host() for piece in pieces]
    with ThreadPoolExecutor(1) as host:
        with_fragments = step_with_fragments(island, pieces, thetas, batch, host)
        bare_s, _, pace = pace_of(bare_step(task, settings, island, batch), with_fragments, blocks)
    print(f"mesh {dict(mesh.shape) if mesh else 'of one device'}, {sum(theta.size for theta in thetas) / 1e6:.2f}M parameters")
    print(f"bare step {1e3 * bare_s:.1f} ms")
    print(f"pace {pace} of it")
    print_memory(island, devices)


def apart(*, devices: int = 2, step_s: Sequence[float] = (0.05, 0.11), blocks: int = 30) -> None:
    """Measure a step of two programs beside one of one: an island of replicas on CPU devices, as one that is elastic has it.

    The task is that of ``harness/asleep.py``, whose step takes a set time and hardly any processor. At every step a fragment is
    written and one is read. A step of one program is queued while the one before is in flight. Of one of two, writes, reads and
    the next first program follow once the first program has ended. They take turns, a block of steps each; the ratio of their
    times is one sample.
    """
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    from diloco.core.tensors.fragments import build_map
    from diloco_learner.jax.island import Island
    from diloco_learner.task_api import first_batch

    for each_s in step_s:
        settings, task, mesh = load_asleep(each_s, devices, 24, 192)
        islands = [Island(task, settings, mesh, apart=apart) for apart in (False, True)]
        batch = first_batch(task, settings)
        pieces = build_map(islands[0].tensors(), 20).fragments
        thetas = [islands[0].read(piece).to_host() for piece in pieces]
        with ThreadPoolExecutor(1) as host:
            whole, two = (step_with_fragments(island, pieces, thetas, batch, host) for island in islands)
            one_s, two_s, pace = pace_of(whole, two, blocks)
        size = sum(theta.size for theta in thetas)
        print(f"data {devices}, {size / 1e6:.2f}M parameters: {1e3 * one_s:.1f} ms, apart {1e3 * two_s:.1f} ms")
        print(f"pace {pace}", flush=True)


# ---- checkpoints


def checkpoints(*, parameters: int = 32_000_000, step_s: float = 0.2, seconds: float = 120.0) -> Result:
    """Measure a learner's checkpoints: what they cost its steps, the memory that one takes, how fast it is written and read.

    A real island and its keeper take steps of ``harness/asleep.py``, and save all that a learner saves: parameters, the state
    of AdamW, and 12 bytes a parameter of accounts. Steps are taken without any checkpoint at first, for the memory that they
    need; then with one every second, or as often as :mod:`diloco_learner.run.pacing` allows. Cost is how much longer steps
    took, in the mean, while a checkpoint was being made than between two: what was measured a minute ago says nothing on a busy
    machine. Memory is the peak of resident memory above that of steps alone, of which a step's own arrays are a part.
    """
    with folder() as place:
        return keep_states(parameters, step_s, seconds, place)


def keep_states(parameters: int, step_s: float, seconds: float, folder: Path) -> Result:
    """Take steps without and with checkpoints in ``folder``, and read one of these again."""
    import jax
    import numpy as np

    from diloco.process.observe import get_logger
    from diloco.settings.service import LearnerSettings
    from diloco.states import state
    from diloco.states.statefolder import StateFolder
    from diloco_learner.jax.island import Island
    from diloco_learner.run.checkpoint import CheckpointKeeper
    from diloco_learner.task_api import first_batch

    width = 1024 if parameters >= 1 << 22 else 128
    layers = max(1, parameters // width**2)
    settings, task, _ = load_asleep(step_s, 1, layers, width, "make_unstopped")
    island, batch = Island(task, settings), first_batch(task, settings)
    island.rehearse(batch)
    count = sum(leaf.size for leaf in jax.tree.leaves(island.params()))
    accounts = {f"accounts/0/{name}": np.ones(count, np.float32) for name in ("base", "error", "offer/0/rest")}
    saved: list[bytes] = []
    member: Any = SimpleNamespace(
        step=0,
        run=SimpleNamespace(identity=bytes(8)),
        admission=SimpleNamespace(incarnation=1),
        lender=SimpleNamespace(wanted=False),
        marker_due=lambda: None,
        dump=lambda: ({"step": member.step}, accounts),
        note_saved=saved.append,
    )
    stated = LearnerSettings(name="bench", state_dir=folder, checkpoint_s=1.0)
    keeper = CheckpointKeeper(island, member, stated, get_logger())

    def step() -> None:
        island.step(batch, 1e-3).wait()
        member.step += 1

    for _ in range(5):
        step()
    reset_peak(os.getpid())
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds / 4:
        step()
    usual_bytes = peak_rss_bytes(os.getpid())
    quiet_s: list[float] = []
    saving_s: list[float] = []
    began_s = time.perf_counter()
    while (step_began_s := time.perf_counter()) - began_s < seconds:
        saves = keeper.saver.is_busy()
        step()
        keeper.at_boundary()
        saves |= keeper.saver.is_busy()
        (saving_s if saves else quiet_s).append(time.perf_counter() - step_began_s)
    keeper.close()
    usual_s, steps = sum(quiet_s) / len(quiet_s), len(quiet_s) + len(saving_s)
    peak_bytes = peak_rss_bytes(os.getpid()) - usual_bytes
    path, _ = StateFolder(folder, "bench").generations()
    began_s = time.perf_counter()
    loaded = state.load(path, bytes(8), "bench")
    for chunk in island.wanted():
        island.put(chunk, loaded.read(chunk))
    read_s = time.perf_counter() - began_s
    return {
        "parameters": count,
        "usual_step_s": usual_s,
        "steps": steps,
        "checkpoints": len(saved),
        "cost_share": (sum(saving_s) - len(saving_s) * usual_s) / sum(quiet_s + saving_s),
        "checkpoint_bytes": path.stat().st_size,
        "peak_bytes": peak_bytes,
        "bytes_a_parameter": peak_bytes / count,
        "read_s": read_s,
        "held": island.capture().held,
    }


def show_checkpoints(result: Result) -> None:
    """Print a result as text."""
    how = "steps wait while a state is read" if result["held"] else "a state is copied first"
    print(f"{result['parameters'] / 1e6:.1f}M parameters, steps of {1e3 * result['usual_step_s']:.0f} ms; {how}")
    print(f"{result['checkpoints']} checkpoints of {result['checkpoint_bytes'] / MIB:.0f} MiB in {result['steps']} steps")
    print(f"cost {100 * result['cost_share']:.1f} % of the steps' time")
    print(f"peak {result['peak_bytes'] / MIB:.0f} MiB above steps alone, {result['bytes_a_parameter']:.2f} bytes a parameter")
    print(f"checked, and its model read, in {result['read_s']:.2f} s")


# ---- large

LEADER, OTHER, JOINER = "learner-0", "learner-0-p1", "joiner"
NATS = "nats-server"
SAMPLE_S = 1.0
PATIENCE_S = 3000.0  # only ends what hangs
ALONE_BYTES = 1 << 20  # larger buffers go back to the kernel when they are freed: a CPU's device memory is the host's
TENSORS = 24  # of the model: each takes its time to compile


class Memory(threading.Thread):
    """Peaks of resident memory of a run's processes, by stage and service; ``sum``: of all together."""

    def __init__(self, directory: Path, root: int, spare_bytes: float) -> None:
        super().__init__(daemon=True)
        self.directory, self.root, self.spare_bytes = directory, root, spare_bytes
        self.stage = "founding"
        self.peaks: dict[str, dict[str, int]] = {}
        self.least_bytes = psutil.virtual_memory().available  # of the machine's memory that was left
        self._over = threading.Event()

    def run(self) -> None:
        """Look at all processes again and again."""
        while not self._over.wait(SAMPLE_S):
            found = dict(self._found())
            peaks = self.peaks.setdefault(self.stage, {})
            for name, used_bytes in found.items():
                peaks[name] = max(peaks.get(name, 0), used_bytes)
            self.least_bytes = min(self.least_bytes, psutil.virtual_memory().available)
            if self.least_bytes < self.spare_bytes:
                print(f"{self.least_bytes / GIB:.1f} GiB of memory are left: ended", file=sys.stderr)
                os.kill(self.root, signal.SIGINT)
                return

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()

    def _found(self) -> Iterator[tuple[str, int]]:
        names = {read_pid(file): file.stem for file in (self.directory / "services").glob("*.pid")}
        total_bytes = 0
        try:
            processes = psutil.Process(self.root).children(recursive=True)
        except psutil.Error:
            return
        for process in processes:
            try:
                used = process.memory_full_info()
                name = names.get(process.pid) or (NATS if NATS in process.name() else "others")
            except psutil.Error:  # it has ended
                continue
            total_bytes += used.pss
            yield name, used.rss
        yield "sum", total_bytes


class Stages:
    """The stages of a run, one after another, as they are measured."""

    def __init__(
        self,
        running: Up,
        memory: Memory,
        watch: Watch,
        say: Callable[[str], None],
        services: Sequence[str] = (LEADER, OTHER),
    ) -> None:
        self.running, self.memory, self.watch, self.say, self.services = running, memory, watch, say, services
        self.rows: dict[str, dict[str, Any]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure a stage; what it finds besides is put into the value that is given."""
        self.memory.stage, began_s = name, time.monotonic()
        row: dict[str, Any] = {}
        try:
            yield row
            time.sleep(SAMPLE_S)
        finally:
            row |= {"s": time.monotonic() - began_s, "peak_bytes": dict(self.memory.peaks.get(name, {}))}
            self.rows[name] = row
            self.say(line_of(name, row))

    def found(self) -> None:
        """Wait until the run is founded, and both processes have loaded it."""
        with self.stage("founding") as row:
            self._stop_evaluator()
            for service in self.services:
                self._until(lambda service=service: self._events(service, "joined"), f"{service} joined")  # type: ignore[misc]
            times = {event["event"]: event["time"] for event in self._events(LEADER, "compiled", "founding", "joined")}
            row["founded_s"] = (times["joined"] - times["founding"]).total_seconds()
            row["compiled_s"] = max(self._events(service, "compiled")[0]["compile_s"] for service in self.services)

    def rounds(self, versions: int, name: str) -> None:
        """Wait for so many versions of each fragment more than the least of them has."""
        with self.stage(name) as row:
            wanted, began_s = self._least_version() + versions, time.time()
            self._until(lambda: self._least_version() >= wanted, f"version {wanted} of every fragment")
            row["step_s"] = statistics.median(self._gaps(began_s) or [0.0])

    def checkpoint(self) -> None:
        """Wait for a checkpoint that is of later than now."""
        with self.stage("checkpoint") as row:
            files = self._parts()
            before = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]

            def written() -> bool:
                return all(file.exists() and file.stat().st_mtime_ns > at for file, at in zip(files, before, strict=True))

            began_s = time.time()
            self._until(written, "a checkpoint")
            step = self._step(LEADER)
            self._until(lambda: self._step(LEADER) > step, "a step after the checkpoint")
            row["written_bytes"] = sum(file.stat().st_size for file in files)
            row["longest_step_s"] = max(self._gaps(began_s))

    def join(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Begin a learner of one process, and wait until it steps."""
        with self.stage("joining") as row:
            process = self.running.add_learner(JOINER, LEADER, environment)
            self._until(lambda: process.poll() is not None or self._step(JOINER) > 0, "the joiner's first step")
            seen = self._events(JOINER, "compiled", "joined", "state_from_peer", "state_fresh", "state_not_lent")
            first = seen[0]["time"]
            row["events"] = {event["event"]: round((event["time"] - first).total_seconds(), 1) for event in seen}
            row["read_bytes"] = self.watch.heartbeats[JOINER][-1][1].bytes_down
        return process

    def restart(self) -> None:
        """Kill one process, and wait until the learner steps again."""
        with self.stage("restart") as row:
            restored = len(self._events(LEADER, "checkpoint_restored", "state_fresh"))
            self.running.signal(signal.SIGKILL, OTHER)
            self._until(
                lambda: len(self._events(LEADER, "checkpoint_restored", "state_fresh")) > restored, "a new generation's start"
            )
            seen = self._events(LEADER, "checkpoint_restored", "state_fresh", "checkpoint_refused")[restored:]
            row["events"] = [event["event"] for event in seen]
            step = self._step(LEADER)
            self._until(lambda: self._step(LEADER) > step, "a step of the new generation")

    def _stop_evaluator(self) -> None:
        file = self.running.directory / "services" / "evaluator.pid"
        self._until(file.exists, "the evaluator's beginning")
        self.running.signal(signal.SIGSTOP, "evaluator")

    def _until(self, reached: Callable[[], object], what: str) -> None:
        self.running.until(reached, what)

    def _events(self, service: str, *names: str) -> list[dict[str, Any]]:
        return self.running.events(service, *names)

    def _least_version(self) -> int:
        return min(self.watch.last(LEADER).versions, default=0) if LEADER in self.watch.heartbeats else 0

    def _step(self, learner: str) -> int:
        return self.watch.last(learner).step if learner in self.watch.heartbeats else 0

    def _gaps(self, since_s: float) -> list[float]:
        """Return the seconds between the ends of the leader's steps since then."""
        times = sorted(self.watch.step_ends_s(LEADER).values())
        return [later - sooner for sooner, later in itertools.pairwise(times) if later >= since_s]

    def _parts(self) -> list[Path]:
        folder = self.running.directory / "checkpoints"
        return [
            folder / f"{LEADER}.safetensors",
            *(folder / f"{LEADER}.part-{i}.safetensors" for i in range(1, len(self.services))),
        ]


def line_of(name: str, row: Mapping[str, Any]) -> str:
    """Return a stage as a line of text."""
    peaks = "  ".join(f"{service} {used / GIB:.2f}" for service, used in sorted(row["peak_bytes"].items()))
    more = {key: value for key, value in row.items() if key not in ("s", "peak_bytes")}
    return f"{name:12}{row['s']:8.1f} s  GiB: {peaks}  {more if more else ''}"


def width_of(parameters: int) -> int:
    """Return the width, a multiple of 8, with which the model's square tensors have about so many parameters together."""
    return 8 * max(1, round(math.sqrt(parameters / TENSORS) / 8))


def large(
    *,
    parameters: int = 250_000_000,
    fragments: int = 24,
    round_steps: int = 6,
    step_s: Annotated[float, "a step sleeps so long"] = 0.5,
    checkpoint_s: float = 20.0,
    spare: Annotated[float, "GiB of the machine's memory that stay free"] = 2.0,
    keep: Keep = None,
) -> Result:
    """Measure one large model in a learner of two processes, beside which another joins: seconds and memory of each stage.

    ``diloco up`` with a learner of two processes of one CPU device each (fsdp over both, AdamW), one syncer and the
    coordinator. The task is that of ``harness/asleep.py``, whose step hardly computes. The stages follow one another:

    * **founding**: from ``diloco up`` until both processes have joined, version 0 being in the log
    * **rounds**: until each fragment has had a version
    * **checkpoint**: until one counts that was begun after that
    * **joining**: a learner of one process begins, until its first step has ended
    * **both**: until each fragment has had two versions more
    * **restart**: process 1 is killed (SIGKILL), until the learner steps again, from its checkpoint
    * **end**: SIGINT to ``diloco up``: both learners save and leave; then ``diloco verify``

    The allocator gives large buffers back, unlike by ``diloco up``'s own settings, with which steps of small models are faster.
    Memory is resident memory by process, its peak in each stage (RSS; looked at once a second), and the peak of the sum, where
    pages that several processes share count once (PSS). The page cache is not in it, in which NATS's files are. The evaluator
    is stopped (SIGSTOP) before it reads anything: it would hold one more model. The bench ends where the machine has less than
    ``--spare`` of memory left.
    """
    width = width_of(parameters)
    sets = {
        "task.name": "harness.asleep:make", "task.layers": TENSORS, "task.width": width, "round.steps": round_steps,
        "fragments.count": fragments, "inner.optimizer": "adamw", "inner.learning_rate": 0.0001,
    }  # fmt: skip
    options = ["--learners", "1", "--shards", "1", "--processes-per-learner", "2", "--devices-per-learner", "2"]
    own = asleep(step_s) | {"DILOCO_CHECKPOINT_S": str(checkpoint_s), "DILOCO_LEAVE_S": "5"}
    own |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles sooner; the step is a few products
    own |= {"MALLOC_MMAP_THRESHOLD_": str(ALONE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
    with folder(keep) as place:
        directory, load = place / "run", os.getloadavg()[0]
        joiner: subprocess.Popen[bytes] | None = None
        with up(directory, *options, sets=sets, environment=own, patience_s=PATIENCE_S) as running:
            memory = Memory(directory, os.getpid(), spare * GIB)
            memory.start()
            try:
                with watched(running) as watch:
                    stages = Stages(running, memory, watch, say)
                    stages.found()
                    stages.rounds(1, "rounds")
                    stages.checkpoint()
                    # of one thread of computation, as ``diloco up`` has it
                    joiner = stages.join(service_environment() | {"JAX_NUM_CPU_DEVICES": "1"} | own)
                    stages.rounds(2, "both")
                    stages.restart()
            finally:
                memory.stage, began_s = "end", time.monotonic()
                if joiner is not None:
                    joiner.terminate()
                    joiner.wait()
                running.process.send_signal(signal.SIGINT)
                running.process.wait()
                memory.close()
        end_s, began_s = time.monotonic() - began_s, time.monotonic()
        holds = asked("verify", str(directory))["holds"]
        verify_s = time.monotonic() - began_s
        problems = [
            f"{file.stem}: {event['event']} {event.get('reason', event.get('error', ''))}"
            for file in sorted((directory / "logs").glob("*.jsonl"))
            for event in events(directory, file.stem)
            if event["level"] in ("warning", "error", "critical")
        ]
        disk_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return {
        "machine": machine(), "load": [load, os.getloadavg()[0]], "parameters": TENSORS * width**2,
        "stages": stages.rows, "end_s": end_s, "verify_s": verify_s, "holds": holds, "problems": problems,
        "least_bytes": memory.least_bytes, "disk_bytes": disk_bytes,
    }  # fmt: skip


def show_large(result: Result) -> None:
    """Print what the lines of the stages do not say."""
    print(
        f"{result['parameters']:,} parameters; load {result['load'][0]:.0f} before and "
        f"{result['load'][1]:.0f} after; {result['disk_bytes'] / MB:.0f} MB on the disk at the end; at least "
        f"{result['least_bytes'] / GIB:.1f} GiB of the machine's memory were left"
    )
    verified = "holds" if result["holds"] else "DOES NOT HOLD"
    print(f"end {result['end_s']:.1f} s; verify {result['verify_s']:.1f} s: {verified}")
    print("\n".join(result["problems"]))


BENCHES = Bench(bare), Bench(apart), Bench(checkpoints, show_checkpoints), Bench(large, show_large)
SCRIPT = Script(__doc__, *BENCHES)

if __name__ == "__main__":
    SCRIPT.run()
