"""The memory that learners of a model take, estimated from the heads of its files, before any of it is loaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.service.rundir import RunDirectory
from diloco.storage.model_folder import ModelFolder, open_model
from diloco_ops.doctor.machine import available_bytes
from diloco_ops.finetune.elsewhere import model_of
from diloco_ops.up.environment import gpus
from diloco_report.units import count, size

HOST_BYTES = 14.7  # of a trained value, at most, for offers and versions (docs/maintainers.md, A learner's arrays)
FOLDED_BYTES = 12  # of a trained value in an evaluator, and once in all syncers together: values, momentum, a residual
EVERY_LINEAR = "all-linear"  # as a target: every layer except the head
SMI_S = 10.0  # nvidia-smi answers in a second unless its driver hangs
STEP_BYTES = 16  # of a trained value in a step: value, gradient and two moments of AdamW, each float32
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "4bit": 0.56}  # of a value; 4 bits with the scales of their blocks


@dataclass(frozen=True)
class MemoryNeed:
    """An estimate in bytes. Activations come on top; they grow with batch and context.

    ``base_bytes``: weights that are not trained. ``step_bytes``: trained values, gradients and optimizer, where steps are
    computed. ``host_bytes``: of the protocol, in each learner.
    """

    trained: int
    base_bytes: int
    step_bytes: int
    host_bytes: int
    learners: int

    @property
    def device_bytes(self) -> int:
        """Of a learner, where its steps are computed."""
        return self.base_bytes + self.step_bytes

    @property
    def machine_bytes(self) -> int:
        """Of all learners, the evaluator and the syncers, on one machine that computes on its processor."""
        watching = self.base_bytes + (4 + 2 * FOLDED_BYTES) * self.trained
        return self.learners * (self.device_bytes + self.host_bytes) + watching


def estimate(folder: ModelFolder, options: Mapping[str, Any], learners: int) -> MemoryNeed:
    """Return what so many learners take that train a model with these options of its task.

    Raises:
        SettingsError: its files cannot be read.
    """
    values, rank = folder.stored().values, int(options.get("lora", 0))
    dtype = str(options.get("dtype", "float32"))
    if not rank:
        rounded = 2 if dtype == "bfloat16" else 0  # beside float32 masters
        return MemoryNeed(values, 0, (STEP_BYTES + rounded) * values, int(HOST_BYTES * values), learners)
    targets = [each for each in options.get("lora_targets", ()) if each != EVERY_LINEAR]
    trained = folder.adapter_values(rank, targets)
    base = int(WEIGHT_BYTES[dtype] * values)
    return MemoryNeed(trained, base, STEP_BYTES * trained, int(HOST_BYTES * trained), learners)


def say(directory: RunDirectory, *, quiet: bool) -> None:
    """Print what the learners of a run that is to begin here take, if its task trains a model of transformers."""
    task = directory.settings.task
    model = model_of(task)
    if model is None or quiet or not directory.starts_learners:
        return
    need = estimate(open_model(model), task.options, len(directory.learner_names))
    print("\n".join(memory_lines(need, os.environ)), flush=True)


def gpu_bytes() -> int | None:
    """Return the memory of this machine's smallest GPU; None: unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SMI_S).stdout
        return min(int(line) for line in said.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _gpu_lines(need: MemoryNeed, count: int) -> list[str]:
    """Return what is said of the memory of so many GPUs, which learners share where they are fewer."""
    sharing = -(-need.learners // count)
    wanted, there = sharing * need.device_bytes, gpu_bytes()
    of = "" if there is None else f" of {size(there)}"
    shared = f" for {sharing} learners" if sharing > 1 else ""
    lines = [f"memory: a GPU needs {size(wanted)}{of}{shared}, and room for activations"]
    if there is not None and wanted > there:
        lines.append(
            "warning: that is more than a GPU has: train an adapter (--lora, or --qlora), start fewer learners, or take a "
            "smaller model"
        )
    return lines


def memory_lines(need: MemoryNeed, environment: Mapping[str, str]) -> list[str]:
    """Return what is said of memory before a run, and a warning where more is needed than there is."""
    base = f"{size(need.base_bytes)} of frozen weights, " if need.base_bytes else ""
    own = f"{base}{size(need.step_bytes)} of trained weights, gradients and optimizer"
    lines = [f"memory: {count(need.trained)} trained values; a learner takes {own}, and {size(need.host_bytes)} on the host"]
    if found := gpus(environment):
        return lines + _gpu_lines(need, len(found))
    free = available_bytes()
    together = f"all processes here take about {size(need.machine_bytes)}, and activations"
    lines.append(f"memory: {together}" + ("" if free is None else f"; {size(free)} are free"))
    if free is not None and need.machine_bytes > free:
        lines.append(
            "warning: that is more than this machine has free: train an adapter (--lora), start fewer learners, or take a "
            "smaller model"
        )
    return lines
