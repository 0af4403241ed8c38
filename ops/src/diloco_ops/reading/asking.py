"""Questions that need a run's task: a process of the distribution diloco-learner answers, as a command does not import JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from diloco.errors import DilocoError
from diloco_ops.up.supervise import ServiceFailed, last_words

LEARNER = "diloco_learner"


def ask(module: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Send a request to a module of the learner, and return its answer. Both are JSON; the task may print other lines.

    Raises:
        DilocoError: the learner is not installed, or the task ended its process.
        ServiceFailed: it ended with an error; the message and the exit code are a learner's.
    """
    if find_spec(LEARNER) is None:
        raise DilocoError("not installed: diloco-learner, which makes the task; pip install 'diloco[all]'")
    command = [sys.executable, "-m", f"{LEARNER}.{module}"]
    ended = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, env=dict(environment), check=False
    )
    if ended.returncode:
        raise ServiceFailed(last_words(ended.stderr, ended.returncode), ended.returncode)
    for line in reversed(ended.stdout.splitlines()):
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    raise DilocoError(f"{LEARNER}.{module} ended without an answer: the task ended the process, for example by os._exit")
