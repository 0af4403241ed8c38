"""Ranks of PyTorch, as torchrun starts them, all on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from diloco.processes.meeting import free_port

# programs of tests import what tests share
PATH = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))


def rank_environments(world: int, **shared: str) -> list[dict[str, str]]:
    """Return the environment of each of so many ranks."""
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, **shared,
    }  # fmt: skip
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def ranks(world: int, *command: str, **shared: str) -> list[tuple[int, str, str]]:
    """Run a program in so many ranks; return their exit codes and what they printed, on stdout and stderr."""
    processes = [
        subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in rank_environments(world, **shared)
    ]
    return [(process.returncode, *said) for process in processes for said in [process.communicate()]]
