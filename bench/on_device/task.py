"""The built-in GPT for ``bench/accelerator.py``, in JAX and in PyTorch, whose processes note their device's memory.

    PYTHONPATH=bench:examples diloco up --set task.name=on_device.task:make_jax
    PYTHONPATH=bench:examples diloco up --set task.name=on_device.task:make_torch

Where ``DEVICE_NOTES`` names a folder, each process that makes the task writes a file there, twice a second: the peak of its
device's memory as its framework's allocator counts it. A CPU has no such count: there it is the peak of resident memory.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.host import peak_rss_bytes

from diloco.core.tensors.built_in import BUILT_IN
from diloco.process import files
from diloco.settings.run import TaskSettings

NOTES = "DEVICE_NOTES"
EVERY_S = 0.5

Memory = Callable[[], dict[str, int]]


def jax_memory() -> dict[str, int]:
    """Return the bytes in use, their peak and the limit of this process's first device."""
    import jax

    device = jax.local_devices()[0]
    said: dict[str, int] = (None if device.platform == "cpu" else device.memory_stats()) or {}
    found = {"peak_bytes": said.get("peak_bytes_in_use", 0), "limit_bytes": said.get("bytes_limit", 0)}
    return found if said else _resident()


def torch_memory() -> dict[str, int]:
    """Return the peak of allocated bytes and the size of this process's first device."""
    import torch

    if not torch.cuda.is_available():
        return _resident()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "limit_bytes": torch.cuda.get_device_properties(0).total_memory}


def _resident() -> dict[str, int]:
    return {"peak_bytes": peak_rss_bytes(os.getpid()), "limit_bytes": 0}


def note(memory: Memory) -> None:
    """Write this process's device memory, again and again until it ends, if a folder is named for it."""
    folder, over = os.environ.get(NOTES), threading.Event()
    if not folder:
        return
    file = Path(folder) / f"{own_name(sys.argv)}-{os.getpid()}.json"

    def write() -> None:
        while not over.wait(EVERY_S):
            files.replace_text(file, json.dumps(memory()))

    threading.Thread(target=write, name="device-notes", daemon=True).start()
    atexit.register(over.set)


def own_name(arguments: list[str]) -> str:
    """Return the name of a service, by the file of its settings; ``bare`` for a bare loop, ``other`` for other processes."""
    if "--config" in arguments:
        return Path(arguments[arguments.index("--config") + 1]).stem
    return "bare" if "--bare" in arguments else "other"


def noted(folder: Path) -> dict[str, int]:
    """Return the largest peaks of a folder's notes in bytes, by the name of service, without the number of a learner."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.json")):
        name = file.stem.partition("-")[0]
        found[name] = max(found.get(name, 0), json.loads(file.read_bytes())["peak_bytes"])
    return found


def make_jax(settings: TaskSettings, data: str | None) -> Any:
    """Return the built-in task."""
    from diloco_learner.task import load_task

    note(jax_memory)
    return load_task(settings.model_copy(update={"name": BUILT_IN}), data)


def make_torch(settings: TaskSettings, data: str | None) -> Any:
    """Return the same model in PyTorch: on a GPU if there is one, matrix products in the type that the settings say."""
    import torch
    from torch_gpt import TorchGpt

    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = {"bfloat16": torch.bfloat16, "float32": torch.float32}[settings.dtype]

    class OnDevice(TorchGpt):
        def module(self) -> Any:
            return super().module().to(device)

        def loss(self, module: Any, windows: Any) -> Any:
            on_device = torch.as_tensor(windows, dtype=torch.int64).to(device, non_blocking=True)
            with torch.autocast(device, dtype=own, enabled=own is not torch.float32):
                return super().loss(module, on_device)

    note(torch_memory)
    return OnDevice(settings, data)
