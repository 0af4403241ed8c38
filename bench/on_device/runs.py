"""Whole runs on one device: pace, a killed learner, training done again, both frameworks, and a large model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import islands
import pace
import psutil
from harness import console
from harness.host import GIB
from harness.intervals import ratio
from harness.live_run import Watch, asked, up, watched

from on_device.plan import Plan, parameters
from on_device.task import NOTES, noted

Result = dict[str, Any]
PATIENCE_S = 400.0  # only ends what hangs
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
    with console.folder() as folder:
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
    result = ratio([turn["bare_step_s"] for turn in turns], [turn["step_s"] for turn in turns])
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
    options = ["--learners", "2", "--shards", "1", "--page", "none"]
    options += [part for name in (OTHER, KILLED) for part in ("--slow", f"{name}={SLOWED}")]
    sets = plan.sets("jax", task_batch=max(1, plan.batch // 4))
    own = {"DILOCO_CHECKPOINT_S": "1", "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
    found: Result = {"flag": flag}
    with _place() as folder:
        directory = folder / "run"
        with (
            up(directory, *options, sets=sets, environment=own, patience_s=PATIENCE_S) as running,
            watched(running) as watch,
        ):
            running.until(
                lambda: len(_steps(watch)) == 2 and min(_steps(watch).values()) >= plan.replayed_steps // 5,
                "steps of both learners",
            )
            saved = directory / "checkpoints" / f"{KILLED}.safetensors"
            running.until(saved.exists, f"a checkpoint of {KILLED}")
            found["checkpoint_bytes"] = saved.stat().st_size
            beats, begun = watch.heartbeats[KILLED], time.monotonic()
            incarnation, batch_tokens = beats[-1][1].incarnation, beats[-1][1].batch_tokens
            running.signal(signal.SIGKILL, KILLED)

            def again() -> bool:
                """Whether a step has ended since it steps again: before, its state is not loaded."""
                steps = {beat.step for _, beat in beats if beat.incarnation > incarnation and beat.state == "stepping"}
                return len(steps) > 1

            running.until(again, f"a step of {KILLED} after its death")
            found["return_s"] = time.monotonic() - begun
            yield found
            running.finish(watch.tokens, batch_tokens * plan.replayed_steps // 5)
        found |= {"verified": asked("verify", str(directory))["holds"]}
        yield found
        replay = asked("replay", str(directory), "--learners")
        lives = replay["learners"]
        found["replayed_steps"] = sum(life["steps"] for life in lives)
        found["replay_s"] = sum(life["wall_s"] for life in lives)
        found["same_bits"] = all(not life["wrong"] for life in lives)
        found["differs"] = next((life["wrong"] for life in lives if life["wrong"]), "")
        found["unchecked"] = next((life["unchecked"] for life in lives if life["unchecked"]), "")
        yield found


def mixed(plan: Plan) -> Iterator[Result]:
    """Yield the share of versions that a learner of JAX and one of PyTorch are in, in one run on one device."""
    options = ["--learners", "2", "--shards", "1", "--page", "none"]
    options += ["--torch", f"{KILLED}=on_device.task:make_torch"]
    with _place() as folder:
        directory = folder / "run"
        with up(directory, *options, sets=plan.sets("jax"), patience_s=PATIENCE_S) as running, watched(running) as watch:
            running.until(lambda: len(_steps(watch)) == 2, "steps of both learners")
            begun, wanted = _steps(watch), MIXED_ROUNDS * plan.interval

            def reached() -> bool:
                steps = _steps(watch)
                return all(steps.get(name, 0) >= first + wanted for name, first in begun.items())

            running.until(reached, f"{wanted} steps of both learners")
            code = running.finish(watch.tokens, plan.tokens)
        if code:
            raise SystemExit(f"diloco up: code {code}: {running.said()}")
        report = json.loads((directory / "report.json").read_text())
        shares = {name: its["rounds_merged"] / report["versions"] for name, its in report["learners"].items()}
        yield {"jax": shares[OTHER], "torch": shares[KILLED], "peak_bytes": noted(folder / "notes").get("learner")}


def _steps(watch: Watch) -> dict[str, int]:
    """Return the steps of the learners that step."""
    return {beat.learner: beat.step for beat in watch.learners() if beat.state == "stepping"}


def large_model(plan: Plan) -> Iterator[Result]:
    """Yield seconds and peaks of founding, versions and a checkpoint of the largest model that there is room for."""
    layers, why = choose(plan)
    found: Result = {"parameters": parameters(layers, plan.large_width), "smaller_because": why}
    yield found
    sizes = {"task_layers": layers, "task_width": plan.large_width, "task_heads": plan.large_heads}
    sets = plan.sets("jax", task_batch=plan.large_batch, **sizes)
    options = ["--learners", "1", "--shards", "1", "--page", "none"]
    own = {"DILOCO_CHECKPOINT_S": "5", "DILOCO_LEAVE_S": "5"}
    with _place() as folder, up(folder / "run", *options, sets=sets, environment=own, patience_s=PATIENCE_S) as running:
        memory = islands.Memory(folder / "run", os.getpid(), SPARE_GIB * GIB)
        memory.start()
        try:
            with watched(running) as watch:
                stages = islands.Stages(running, memory, watch, lambda line: None, (islands.LEADER,))
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
            need, have = (f"{size_bytes / GIB:.1f} GiB" for size_bytes in (each * count, room_bytes))
            return f"{count:,} parameters need {need} of {name}, and {have} are free"
    return ""
