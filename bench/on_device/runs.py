"""Whole runs on one device: pace, a killed learner, training done again, both frameworks, and a large model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import large
import pace
import psutil
import script
from restart import Watch
from up import Up, up, watching

from diloco_learner.run.process import LoopThread
from on_device.plan import Plan, parameters
from on_device.task import NOTES, noted

Result = dict[str, Any]
PATIENCE_S = 400.0  # only ends what hangs
MANY = 10**12  # tokens: a budget that no run here reaches
KILLED, OTHER = "learner-1", "learner-0"
SLOWED = 30  # all steps that the other one takes during the killed learner's return are taken again by replay
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
MIXED_ROUNDS = 3  # of each fragment, in which both learners take steps
VERSIONS = 3  # of each fragment of the large model
HOST_BYTES, DISK_BYTES, DEVICE_BYTES = 45, 50, 24  # of a parameter of the large model, with all services on one machine
SPARE_GIB = 2.0


@contextmanager
def _place() -> Iterator[Path]:
    """Give a folder, with one for notes of devices' memory in it, which all processes find."""
    with script.folder(None) as folder:
        notes = folder / "notes"
        notes.mkdir()
        os.environ[NOTES] = str(notes)
        yield folder


def paced(plan: Plan, framework: str, learners: int) -> Iterator[Result]:
    """Yield the pace of so many learners beside as many bare loops, and the peaks of both on the device."""
    plan = plan if learners == 1 else plan.of_two()
    sets = [f"{name}={value}" for name, value in plan.sets(framework, learners=learners).items()]
    with _place() as folder:
        found = asyncio.run(pace.measure([*sets, *pace.PATIENT], plan.turns, plan.turn_s, evaluator=False))
        peaks = noted(folder / "notes")
    turns = found["turns"]
    result = script.ratio([turn["bare_step_s"] for turn in turns], [turn["step_s"] for turn in turns])
    result |= {name: statistics.median(turn[name] for turn in turns) for name in ("step_s", "bare_step_s", "blocked")}
    result["host_s"] = statistics.median(turn["cpu"] * turn["step_s"] for turn in turns)
    result["bare_host_s"] = statistics.median(turn["bare_cpu"] * turn["bare_step_s"] for turn in turns)
    tokens = learners * plan.tokens
    result |= {"tokens_per_s": tokens / result["step_s"], "bare_tokens_per_s": tokens / result["bare_step_s"]}
    yield result | {
        "batch": plan.batch,
        "peak_bytes": peaks.get("learner"),
        "bare_peak_bytes": peaks.get("bare"),
        "turns": turns,
    }


def returned(plan: Plan) -> Iterator[Result]:
    """Yield what a learner's SIGKILL and return take, its checkpoint, and whether all steps made again have the same bits."""
    yield from _returned(plan, "")


def deterministic(plan: Plan) -> Iterator[Result]:
    """Yield the same with the flag of XLA by which its operations on a GPU are deterministic."""
    yield from _returned(plan, DETERMINISTIC)


def _returned(plan: Plan, flag: str) -> Iterator[Result]:
    options = ["--learners", "2", "--shards", "1", "--tokens", str(MANY), "--page", "none"]
    options += [part for name in (OTHER, KILLED) for part in ("--slow", f"{name}={SLOWED}")]
    sets = plan.sets("jax", task_batch=max(1, plan.batch // 4))
    own = {"DILOCO_CHECKPOINT_S": "1", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
    found: Result = {"flag": flag}
    with _place() as folder:
        directory = folder / "run"
        with up(directory, options, sets, own, PATIENCE_S) as running, _watched(running) as watch:
            running.until(
                lambda: len(_steps(watch)) == 2 and min(_steps(watch).values()) >= plan.replayed_steps // 5,
                "steps of both learners",
            )
            saved = directory / "checkpoints" / f"{KILLED}.safetensors"
            running.until(saved.exists, f"a checkpoint of {KILLED}")
            found["checkpoint_bytes"] = saved.stat().st_size
            beats, begun = watch.heartbeats[KILLED], time.monotonic()
            incarnation, batch_tokens = beats[-1][1].incarnation, beats[-1][1].batch_tokens
            os.kill(running.pid(KILLED), signal.SIGKILL)

            def again() -> bool:
                """Whether a step has ended since it steps again: before, its state is not loaded."""
                steps = {beat.step for _, beat in beats if beat.incarnation > incarnation and beat.state == "stepping"}
                return len(steps) > 1

            running.until(again, f"a step of {KILLED} after its death")
            found["return_s"] = time.monotonic() - begun
            yield found
            running.finish(lambda: _tokens(watch), batch_tokens * plan.replayed_steps // 5)
        found |= {"verified": _command("verify", directory)["holds"]}
        yield found
        replay = _command("replay", directory, "--learners")
        lives = replay["learners"]
        found["replayed_steps"] = sum(life["steps"] for life in lives)
        found["replay_s"] = sum(life["wall_s"] for life in lives)
        found["same_bits"] = all(not life["wrong"] for life in lives)
        found["differs"] = next((life["wrong"] for life in lives if life["wrong"]), "")
        found["unchecked"] = next((life["unchecked"] for life in lives if life["unchecked"]), "")
        yield found


@contextmanager
def _watched(running: Up) -> Iterator[Watch]:
    loop = LoopThread()
    try:
        yield loop.run(watching(running), lambda: False)
    finally:
        loop.close()


def _command(name: str, directory: Path, *options: str) -> Mapping[str, Any]:
    """Return what a command says as JSON.

    Raises:
        SystemExit: it says none.
    """
    command = [*script.DILOCO, name, str(directory), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        said: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip() or "nothing said").rpartition("\n")[2]
        raise SystemExit(f"diloco {name}: code {done.returncode}: {last}") from None
    return said


def mixed(plan: Plan) -> Iterator[Result]:
    """Yield the share of versions that a learner of JAX and one of PyTorch are in, in one run on one device."""
    options = ["--learners", "2", "--shards", "1", "--page", "none", "--tokens", str(MANY)]
    options += ["--torch", f"{KILLED}=on_device.task:make_torch"]
    with _place() as folder:
        directory = folder / "run"
        with up(directory, options, plan.sets("jax"), {}, PATIENCE_S) as running, _watched(running) as watch:
            running.until(lambda: len(_steps(watch)) == 2, "steps of both learners")
            begun, wanted = _steps(watch), MIXED_ROUNDS * plan.interval

            def reached() -> bool:
                steps = _steps(watch)
                return all(steps.get(name, 0) >= first + wanted for name, first in begun.items())

            running.until(reached, f"{wanted} steps of both learners")
            code = running.finish(lambda: _tokens(watch), plan.tokens)
        if code:
            raise SystemExit(f"diloco up: code {code}: its last words are on stderr")
        report = json.loads((directory / "report.json").read_text())
        shares = {name: its["rounds_merged"] / report["versions"] for name, its in report["learners"].items()}
        yield {"jax": shares[OTHER], "torch": shares[KILLED], "peak_bytes": noted(folder / "notes").get("learner")}


def _steps(watch: Watch) -> dict[str, int]:
    """Return the steps of the learners that step."""
    last = {name: heard[-1][1] for name, heard in list(watch.heartbeats.items())}
    return {name: beat.step for name, beat in last.items() if beat.state == "stepping"}


def _tokens(watch: Watch) -> int:
    """Return the tokens that all learners have used."""
    return sum(heard[-1][1].tokens for heard in list(watch.heartbeats.values()))


def large_model(plan: Plan) -> Iterator[Result]:
    """Yield seconds and peaks of founding, versions and a checkpoint of the largest model that there is room for."""
    layers, why = choose(plan)
    found: Result = {"parameters": parameters(layers, plan.large_width), "smaller_because": why}
    yield found
    sizes = {"task_layers": layers, "task_width": plan.large_width, "task_heads": plan.large_heads}
    sets = plan.sets("jax", task_batch=plan.large_batch, **sizes)
    options = ["--learners", "1", "--shards", "1", "--tokens", str(MANY), "--page", "none"]
    own = {"DILOCO_CHECKPOINT_S": "5", "DILOCO_LEAVE_S": "5"}
    with _place() as folder, up(folder / "run", options, sets, own, PATIENCE_S) as running:
        memory = large.Memory(folder / "run", os.getpid(), SPARE_GIB * large.GIB)
        memory.start()
        try:
            with _watched(running) as watch:
                stages = large.Stages(running, memory, watch, lambda line: None, (large.LEADER,))
                for stage in (stages.found, lambda: stages.rounds(VERSIONS, "rounds"), stages.checkpoint):
                    stage()
                    found |= {"stages": stages.rows, "peak_bytes": noted(folder / "notes").get("learner")}
                    yield found
        finally:
            memory.close()
            running.process.kill()  # its services end with it at once: they would save a large state


def choose(plan: Plan) -> tuple[int, str]:
    """Return the layers of the largest model that memory and disk have room for, and why it is no larger one.

    Raises:
        SystemExit: none has room.
    """
    why = ""
    for layers in plan.large:
        lacks = _lacks(parameters(layers, plan.large_width), plan.device_bytes)
        if not lacks:
            return layers, why
        why = why or lacks
    raise SystemExit(f"no room for {parameters(plan.large[-1], plan.large_width):,} parameters: {lacks}")


def _lacks(count: int, device_bytes: int) -> str:
    place = tempfile.gettempdir()
    rooms = {
        f"disk in {place}": (DISK_BYTES, shutil.disk_usage(place).free),
        "memory": (HOST_BYTES, psutil.virtual_memory().available),
    }
    if device_bytes:
        rooms["device memory"] = DEVICE_BYTES, device_bytes
    for name, (each, room_bytes) in rooms.items():
        if each * count > room_bytes:
            need, have = (f"{size_bytes / large.GIB:.1f} GiB" for size_bytes in (each * count, room_bytes))
            return f"{count:,} parameters need {need} of {name}, and {have} are free"
    return ""
