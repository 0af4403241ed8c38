"""Parts as child processes: each has a time limit, and what it has found so far is kept however it ends.

Nothing of the project is imported, nor anything that is installed: where that is missing, a part says so, and not this.

A child writes its result to stdout, again whenever it has found more, a JSON object a line. Its own children's output goes to
stderr. It is the leader of a process group, which is killed when it has ended. ``diloco up`` is in it, and whatever that has
begun ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

FAILED = "part failed: "  # begins the line in which a child says why
FULL = re.compile(r"RESOURCE_EXHAUSTED|out of memory|no room for a step", re.I)
KEPT_BYTES = 64_000  # of what a child writes to stderr
LEAVE_S = 5.0  # for a child that is asked to end; the processes of its run end with it, sooner or later
LOOK_S = 0.5
State = Literal["measured", "failed", "not measured"]


@dataclass
class Outcome:
    """How a part ended; ``why`` is one line, empty where all of it was measured."""

    state: State
    why: str = ""
    took_s: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    said: str = ""  # the end of stderr

    @property
    def full(self) -> bool:
        """Whether it failed since a device had no room."""
        return self.state == "failed" and FULL.search(self.said + self.why) is not None


def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Outcome:
    """Run a part, with a temporary folder of its own, and return how it ended, within ``limit_s`` and some seconds."""
    began_s = time.monotonic()
    try:
        folder = tempfile.mkdtemp(prefix="diloco-accelerator-")
    except OSError as error:
        return Outcome("failed", f"no temporary folder: {error}")
    try:
        with _started(command, {**environment, "TMPDIR": folder}) as (process, found, said):
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        outcome = _outcome(code, limit_s, _results(found), _text(said))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.took_s = time.monotonic() - began_s
    return outcome


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes], list[bytes]]]:
    """Start a child, give it with the lines of its stdout and its stderr, and end it and all that it has begun."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment), start_new_session=True
    )
    found: list[bytes] = []
    said: list[bytes] = []
    readers = [
        threading.Thread(target=_read, args=pair, daemon=True) for pair in ((process.stdout, found), (process.stderr, said))
    ]
    for reader in readers:
        reader.start()
    try:
        yield process, found, said
    finally:
        _end(process)
        for reader in readers:
            reader.join(LOOK_S)  # a process that holds the pipe is none of ours


def _read(stream: IO[bytes], lines: list[bytes]) -> None:
    with stream:
        for line in stream:
            lines.append(line[-KEPT_BYTES:])
            while len(lines) > 1 and sum(map(len, lines)) > KEPT_BYTES:
                del lines[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _results(lines: Sequence[bytes]) -> dict[str, Any]:
    """Return the last result of a child's lines, of which the last may be cut off."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            result: dict[str, Any] = json.loads(line)
            return result
    return {}


def _text(lines: Sequence[bytes]) -> str:
    return b"".join(lines)[-KEPT_BYTES:].decode(errors="replace")


def _outcome(code: int | None, limit_s: float, result: dict[str, Any], said: str) -> Outcome:
    if code == 0:
        return Outcome("measured", "", 0.0, result, said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)] or lines or ["it said nothing"]
    if code is None:
        why = f"ended after {limit_s:.0f} s, which were all that it had"
    elif code < 0:
        why = f"killed by signal {-code} ({signal.Signals(-code).name}), as the system does where memory is short: {words[-1]}"
    else:
        why = words[-1]
    return Outcome("failed", why[:300], 0.0, result, said)


def serve(work: Callable[[], Iterator[dict[str, Any]]]) -> int:
    """Be a child: write each result of ``work`` to stdout; say in one line why it failed, and return the exit code."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        for result in work():
            print(json.dumps(result), file=results, flush=True)
    except (Exception, SystemExit) as error:  # of any library that may be here
        text = str(error).strip().partition("\n")[0] or "nothing said"
        kind = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
        print(f"{FAILED}{kind}{text}", file=sys.stderr, flush=True)
        return 1
    return 0


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)
