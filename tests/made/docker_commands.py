"""Commands of docker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.pace import DEADLINE_S

ROOT = Path(__file__).parents[2]
BASES = ("python:3.11-slim-bookworm", "nats:2-alpine")
POLL_S = 1.0
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()
except OSError as error:
    print(type(error).__name__)
else:
    print("connected")
"""


def docker(*arguments: str, timeout_s: float = DEADLINE_S, **environment: str) -> str:
    """A docker command's stdout; it must succeed."""
    ended = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ | environment
    )
    assert ended.returncode == 0, f"docker {' '.join(arguments)}: {ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout


def docker_works(*arguments: str, timeout_s: float = DEADLINE_S) -> bool:
    """Whether a docker command succeeds."""
    try:
        return subprocess.run(["docker", *arguments], capture_output=True, timeout=timeout_s, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
