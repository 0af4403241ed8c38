"""Services that are forked instead of started, which saves each its imports, and that can be made to die at a durable action.

``python -m tests.services.forking`` is the parent of all of them: it has everything imported, reads requests from its
standard input as JSON lines, and ends with its children when that is closed. It never connects, never starts a thread.

A service's durable actions are counted where all of them pass: its transport and its bucket (:mod:`diloco.transport`), and
:func:`diloco.process.files.replace`. The kill is a real one: SIGKILL by the process itself, before the action or after it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from tests.pace import DEADLINE_S

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
When = Literal["before", "after"]
DURABLE = ("append", "purge", "ensure_stream")
DURABLE_KEYS = ("create", "update", "put")
# imported when the first of these is to be forked, since it takes seconds, and few tests want one
LATER = {
    "diloco_learner": ("jax", "diloco_learner.service", "diloco_learner.run.evaluator", "diloco_learner.run.trainer"),
    # torch._dynamo is imported by optimizers
    "diloco_learner.pytorch": ("diloco_learner.pytorch.service", "torch._dynamo", "tests.services.torch_toy"),
}


class Actions:
    """Counts a process's durable actions, notes each in a file, and kills the process at the chosen one."""

    def __init__(self, notes: Path, when: When, number: int) -> None:
        self.notes, self.when, self.number = notes, when, number
        self.count = 0

    def begin(self, what: str) -> int:
        """Call before an action; gives what :meth:`end` wants."""
        self.count += 1
        with self.notes.open("a") as file:
            file.write(what + "\n")
        self._kill_at(self.count, "before")
        return self.count

    def end(self, number: int) -> None:
        """Call after the action, before anybody learns that it is done."""
        self._kill_at(number, "after")

    def _kill_at(self, number: int, when: When) -> None:
        if number == self.number and when == self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, what: str, action: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def call(*arguments: Any, **named: Any) -> T:
            number = self.begin(f"{what} {arguments[0] if arguments else ''}")
            try:
                return await action(*arguments, **named)
            finally:
                self.end(number)  # also of one that was refused: the service has not learnt it yet

        return call


class Counted:
    """A transport or a bucket whose durable actions are counted."""

    def __init__(self, inner: Any, actions: Actions, names: tuple[str, ...]) -> None:
        self._inner, self._actions, self._names = inner, actions, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._actions.counted(name, found) if name in self._names else found

    async def bucket(self, name: str, *, create: bool, **named: Any) -> Counted:
        number = self._actions.begin(f"bucket {name}") if create else 0
        opened = await self._inner.bucket(name, create=create, **named)
        if number:
            self._actions.end(number)
        return Counted(opened, self._actions, DURABLE_KEYS)


def _count_actions(actions: Actions) -> None:
    """Put the counter where all durable actions of this process pass."""
    from diloco.process import files
    from diloco.service import skeleton as service

    connect, replace = service.connect, files.replace

    async def counted_connect(*arguments: Any) -> Any:
        return Counted(await connect(*arguments), actions, DURABLE)

    def counted_replace(path: Path, write: Callable[[Path], None], previous: Path | None = None) -> None:
        number = actions.begin(f"replace {path.name}")
        replace(path, write, previous)
        actions.end(number)

    service.connect = counted_connect  # type: ignore[assignment]
    files.replace = counted_replace


def _child(request: Mapping[str, Any]) -> None:
    """What a forked process does; it never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [request["module"], "--config", request["config"]]
        if request["notes"]:
            _count_actions(Actions(Path(request["notes"]), request["when"], request["number"]))
        sys.modules.pop(request["module"], None)  # a module is not to be run twice, says runpy
        runpy.run_module(request["module"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _parent() -> None:
    import tests.services.toy  # noqa: F401

    import diloco_coordinator.service
    import diloco_syncer.service
    from diloco.core.tensors.compiled import kernels

    kernels.load()  # a second of processor time, which no import brings with it
    running: set[int] = set()
    print(json.dumps({"ready": [diloco_coordinator.__name__, diloco_syncer.__name__]}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if pid else None
            running.discard(pid)
            print(json.dumps({"code": code}), flush=True)
            continue
        for name in LATER.get(request["module"], ()):
            importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            _child(request)
        running.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


class Nursery:
    """The parent process, as a test sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.forking"],
            cwd=ROOT,
            env=dict(os.environ) | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert "ready" in json.loads(self._process.stdout.readline())

    def start(
        self,
        module: str,
        config: Path,
        output: Path,
        environment: Mapping[str, str],
        notes: Path | None = None,
        kill_at: tuple[When, int] = ("before", 0),
    ) -> Forked:
        """``python -m module --config config``; it may have to die at the n-th action that it ``notes``."""
        when, number = kill_at
        answer = self.ask(
            module=module,
            config=str(config),
            output=str(output),
            environment=dict(environment),
            notes=str(notes or ""),
            when=when,
            number=number,
        )
        return Forked(self, answer["pid"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, and its answer."""
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer

    def close(self) -> None:
        """End it, and all that it forked."""
        self._process.communicate(timeout=DEADLINE_S)


class Forked:
    """A forked process: as much of ``subprocess.Popen`` as tests want."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)  # can be read once the process has ended

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self.returncode = self.nursery.ask(poll=self.pid)["code"]
            os.close(self._end)
        return self.returncode

    def wait(self, timeout: float = DEADLINE_S) -> int:
        ends_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > ends_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    _parent()
