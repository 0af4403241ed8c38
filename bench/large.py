"""One large model in a learner of two processes, beside which another learner joins: seconds and memory of each stage.

    python bench/large.py --parameters 2000000            # a minute
    python bench/large.py --parameters 250000000          # within 24 GiB, if nothing else takes much of them

``diloco up`` with a learner of two processes of one CPU device each (fsdp over both, AdamW), one syncer and the
coordinator. The task is that of ``bench/island.py``, whose step hardly computes. The stages follow one another:

* **founding**: from ``diloco up`` until both processes have joined, version 0 being in the log
* **rounds**: until each fragment has had a version
* **checkpoint**: until one counts that was begun after that
* **joining**: a learner of one process begins, until its first step has ended
* **both**: until each fragment has had two versions more
* **restart**: process 1 is killed (SIGKILL), until the learner steps again, from its checkpoint
* **end**: SIGINT to ``diloco up``: both learners save and leave; then ``diloco verify``

The allocator gives large buffers back, unlike by ``diloco up``'s own settings, with which steps of small models are faster.
Memory is resident memory by process, its peak in each stage (RSS; looked at once a second), and the peak of the sum, where
pages that several processes share count once (PSS). The page cache is not in it, in which NATS's files are. The evaluator is
stopped (SIGSTOP) before it reads anything: it would hold one more model. The bench ends where less than ``--spare`` of the
machine's memory is left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import script
import tomli_w
from restart import Watch
from up import Up, events, up, watching

from diloco_learner.run.process import LoopThread
from diloco_ops.up.environment import service_environment

LEADER, OTHER, JOINER = "learner-0", "learner-0-p1", "joiner"
NATS = "nats-server"
SAMPLE_S = 1.0
PATIENCE_S = 3000.0  # only ends what hangs
GIB, MB = 1 << 30, 10**6
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
                print(f"bench/large.py: {self.least_bytes / GIB:.1f} GiB of memory are left: ended", file=sys.stderr)
                os.kill(self.root, signal.SIGINT)
                return

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()

    def _found(self) -> Iterator[tuple[str, int]]:
        names = {script.read_pid(file): file.stem for file in (self.directory / "services").glob("*.pid")}
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
            own = tomllib.loads((self.running.directory / "services" / f"{LEADER}.toml").read_text())
            config = self.running.directory / "services" / f"{JOINER}.toml"
            config.write_text(tomli_w.dumps({name: own[name] for name in ("nats_url", "run", "state_dir")} | {"name": JOINER}))
            command = [sys.executable, "-m", "diloco_learner", "--config", str(config)]
            process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.DEVNULL)
            (self.running.directory / "services" / f"{JOINER}.pid").write_text(str(process.pid))
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
            os.kill(self.running.pid(OTHER), signal.SIGKILL)
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
        os.kill(self.running.pid("evaluator"), signal.SIGSTOP)

    def _until(self, reached: Callable[[], object], what: str) -> None:
        self.running.until(reached, what)

    def _events(self, service: str, *names: str) -> list[dict[str, Any]]:
        return self.running.events(service, *names)

    def _least_version(self) -> int:
        heard = self.watch.heartbeats.get(LEADER)
        return min(heard[-1][1].versions, default=0) if heard else 0

    def _step(self, learner: str) -> int:
        heard = self.watch.heartbeats.get(learner)
        return heard[-1][1].step if heard else 0

    def _gaps(self, since_s: float) -> list[float]:
        """Return the seconds between the ends of the leader's steps since then."""
        ends: dict[int, float] = {}
        for at_s, heartbeat in self.watch.heartbeats[LEADER]:
            ends.setdefault(heartbeat.step, at_s)
        times = sorted(ends.values())
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


def measure(asked: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Go through all stages; ``say`` is called with a line for each."""
    width = width_of(asked.parameters)
    sets = {
        "task.name": "island:make", "task.layers": TENSORS, "task.width": width, "round.steps": asked.round_steps,
        "fragments.count": asked.fragments, "inner.optimizer": "adamw", "inner.learning_rate": 0.0001,
    }  # fmt: skip
    options = ["--learners", "1", "--shards", "1", "--processes-per-learner", "2", "--devices-per-learner", "2"]
    options += ["--tokens", str(10**12)]
    own = {"PYTHONPATH": str(Path(__file__).parent), "BENCH_STEP_S": str(asked.step_s)}
    own |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles sooner; the step is a few products
    own |= {"MALLOC_MMAP_THRESHOLD_": str(ALONE_BYTES), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
    own |= {"DILOCO_CHECKPOINT_S": str(asked.checkpoint_s), "DILOCO_LEAVE_S": "5"}
    with script.folder(asked.folder) as folder:
        directory = folder / "run"
        load = os.getloadavg()[0]
        joiner: subprocess.Popen[bytes] | None = None
        with up(directory, options, sets, own, PATIENCE_S) as running:
            memory = Memory(directory, os.getpid(), asked.spare * GIB)
            memory.start()
            loop = LoopThread()
            stages = Stages(running, memory, loop.run(watching(running), lambda: False), say)
            try:
                stages.found()
                stages.rounds(1, "rounds")
                stages.checkpoint()
                joiner = stages.join(joiner_environment() | own)
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
                loop.close()
            end_s = time.monotonic() - began_s
        began_s = time.monotonic()
        verified = subprocess.run(
            [*script.DILOCO, "verify", str(directory), "--json"], capture_output=True, text=True, check=False
        )
        holds = verified.returncode == 0 and json.loads(verified.stdout)["holds"]
        verify_s = time.monotonic() - began_s
        say(f"end {end_s:.1f} s; verify {verify_s:.1f} s: {'holds' if holds else verified.stdout + verified.stderr}")
        problems = [
            f"{file.stem}: {event['event']} {event.get('reason', event.get('error', ''))}"
            for file in sorted((directory / "logs").glob("*.jsonl"))
            for event in events(directory, file.stem)
            if event["level"] in ("warning", "error", "critical")
        ]
        disk_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    return {
        "machine": script.machine(), "load": [load, os.getloadavg()[0]], "parameters": TENSORS * width**2,
        "stages": stages.rows, "end_s": end_s, "verify_s": verify_s, "holds": holds, "problems": problems,
        "least_bytes": memory.least_bytes, "disk_bytes": disk_bytes,
    }  # fmt: skip


def joiner_environment() -> dict[str, str]:
    """Return the environment of a learner that is begun by hand, of one thread of computation, as ``diloco up`` has it."""
    return service_environment() | {"JAX_NUM_CPU_DEVICES": "1"}


def show(result: dict[str, Any]) -> None:
    """Print what the lines of the stages do not say."""
    print(
        f"{result['parameters']:,} parameters; load {result['load'][0]:.0f} before and "
        f"{result['load'][1]:.0f} after; {result['disk_bytes'] / MB:.0f} MB on the disk at the end; at least "
        f"{result['least_bytes'] / GIB:.1f} GiB of the machine's memory were left"
    )
    print("\n".join(result["problems"]))


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=250_000_000)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--round-steps", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.5, help="a step sleeps so long")
    parser.add_argument("--checkpoint-s", type=float, default=20.0)
    parser.add_argument("--spare", type=float, default=2.0, help="GiB of the machine's memory that stay free")
    parser.add_argument("--folder", type=Path, help="the run's directory is made here and stays; by default it is temporary")
    arguments = parser.parse_args()
    result = measure(arguments, lambda line: None if arguments.json else print(line, flush=True))
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
