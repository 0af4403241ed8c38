"""Processes that a launcher answers for: begun again when a signal killed them, ended in order, and none outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import DilocoError, EjectedError, IslandError
from diloco.process.observe import Logger

STOP_TIMEOUT_S = 20.0  # leaving learners wait 10 s for their last work (leave_s), and begin to save
STOP_LOOK_S = 0.05  # the command's end waits for it
RETRY_S = 0.5  # the first pause before a service that keeps dying
RETRY_MAX_S = 10.0  # the longest one
STEADY_S = 20.0  # a process that lived so long was well
QUICK_DEATHS = 10  # in a row, and the process is taken to be unable to live
OURS = re.compile(r"diloco[a-z -]*: ")  # begins a line of one of our programs
GROUP_S = 15.0  # a learner's other processes notice within `processes.silent_s` that one is gone; a frozen one is killed then


class OrphanGuard:
    """A shell that waits for lines of process ids, and kills those of the last line when its owner is gone."""

    # the owner's forks, such as workers of a data loader, hold its end of the pipe open: the guard's end is a line of its own
    SCRIPT = 'while read -r line; do [ "$line" = end ] && exit; pids="$line"; done; [ -z "$pids" ] || kill -KILL $pids'

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self.SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pids: Iterable[int]) -> None:
        """End these processes with this one, and no others."""
        self._tell(" ".join(map(str, pids)))

    def release(self) -> None:
        """Watch nothing any more, and end."""
        if self._shell.returncode is None:
            self._tell("end")
            self._shell.communicate()

    def _tell(self, line: str) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(f"{line}\n".encode())
            self._shell.stdin.flush()


class ServiceFailed(DilocoError):
    """A service ended with an error; its exit code becomes the command's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.code if self.code > 0 else 1


@dataclass
class Service:
    """One process of a run, and how it is begun again."""

    name: str
    module: str
    config: Path
    environment: Mapping[str, str]
    cores: Collection[int] | None  # that it is kept to, where the system can
    process: subprocess.Popen[bytes]
    began_s: float
    endless: bool = False  # it serves the others, and ends when it is told to
    restarts: int = 0

    @property
    def errors(self) -> Path:
        return self.config.with_suffix(".stderr")

    @property
    def pid_file(self) -> Path:
        return self.config.with_suffix(".pid")


@dataclass
class ServiceGroup:
    """Services that begin and end together: the processes of one learner, or a single one."""

    services: list[Service] = field(default_factory=list)
    dispensable: bool = False  # no service waits for it: the run goes on without it once it has failed
    failure: ServiceFailed | None = None  # of one that is dispensable
    quick_deaths: int = 0  # in a row
    due_s: float | None = None  # when they are begun again; None while they run or have ended by themselves
    lost_s: float | None = None  # since when some are missed


class Supervisor:
    """The services of one run.

    A service that a signal killed is begun again with its own configuration: at once, and later and later if it keeps dying.
    One that ends with an error code ends the run, since wrong settings would only fail again; a learner that was ejected is
    begun again and waits. One that ends with 0 is done. Processes of one group are begun again together, once all have ended.
    Where one that is dispensable fails, the run goes on without it.
    """

    def __init__(self, log: Logger, tell: Callable[[str, str], None] = lambda name, text: None) -> None:
        """``tell``: is called with the name of a service, and what happened to it."""
        self.log, self._tell = log, tell
        self.groups: dict[str, ServiceGroup] = {}
        self._guard = OrphanGuard()

    @property
    def services(self) -> list[Service]:
        """All services."""
        return [service for group in self.groups.values() for service in group.services]

    def start(
        self,
        name: str,
        module: str,
        config: Path,
        environment: Mapping[str, str],
        cores: Collection[int] | None = None,
        *,
        endless: bool = False,
        dispensable: bool = False,
        group: str = "",
    ) -> None:
        """Begin ``python -m module --config FILE``; its pid is in the file of the same name with the ending ``.pid``.

        ``group``: the learner that it is a process of; a service of its own has none.
        """
        process = _begin(module, config, environment, cores)
        service = Service(
            name=name,
            module=module,
            config=config,
            environment=environment,
            cores=cores,
            process=process,
            began_s=time.monotonic(),
            endless=endless,
        )
        self.groups.setdefault(group or name, ServiceGroup(dispensable=dispensable)).services.append(service)
        self._watch()

    def tend(self) -> bool:
        """Begin killed services again. Return whether every service has ended by itself, but for those that never do.

        Raises:
            ServiceFailed: a service ended with an error, what it said is the message; or was killed again and again.
        """
        now_s = time.monotonic()
        going_on = [group for group in self.groups.values() if group.failure is None]
        for group in going_on:
            try:
                self._tend_group(group, now_s)
            except ServiceFailed as failure:
                if not group.dispensable:
                    raise
                group.failure = failure
                self.log.error("service_failed", failed=group.services[0].name, code=failure.code, reason=str(failure))
        return all(service.endless or service.process.poll() == 0 for group in going_on for service in group.services)

    @property
    def failures(self) -> dict[str, ServiceFailed]:
        """The errors of services without which the run goes on, by name."""
        return {name: group.failure for name, group in self.groups.items() if group.failure is not None}

    def _tend_group(self, group: ServiceGroup, now_s: float) -> None:
        failed = [(service, code) for service in group.services if (code := service.process.poll())]
        for service, code in failed:
            if code > 0 and code not in (EjectedError.exit_code, IslandError.exit_code):
                raise ServiceFailed(f"{service.name}: {last_words(service.errors.read_text(errors='replace'), code)}", code)
        if not failed:
            return
        alive = [service for service in group.services if service.process.poll() is None]
        if alive:
            group.lost_s = group.lost_s or now_s
            if now_s - group.lost_s >= GROUP_S:
                for service in alive:
                    service.process.kill()
        elif group.due_s is None and any(code == EjectedError.exit_code for _, code in failed):  # waits until it is readmitted
            self.log.warning("service_ejected", ejected=group.services[0].name)
            group.due_s = now_s
        elif group.due_s is None:
            killed, code = min(failed, key=lambda each: each[1])  # one that a signal killed, rather than those that missed it
            self._note_death(group, killed, code, now_s)
        elif now_s >= group.due_s:
            group.due_s = group.lost_s = None
            for service in group.services:
                self._begin_again(service, now_s)

    def _note_death(self, group: ServiceGroup, killed: Service, code: int, now_s: float) -> None:
        signal_name = _signal_name(-code) if code < 0 else None
        group.quick_deaths = group.quick_deaths + 1 if now_s - killed.began_s < STEADY_S else 0
        if group.quick_deaths >= QUICK_DEATHS:
            end = f"killed by {signal_name}" if signal_name else f"ended with code {code}"
            raise ServiceFailed(
                f"{killed.name}: {end} {QUICK_DEATHS} times in a row, each time within {STEADY_S:g} s; see "
                f"{killed.errors} and the system's log; memory may be short",
                1,
            )
        pause_s = 0.0 if group.quick_deaths < 2 else min(RETRY_MAX_S, RETRY_S * 2.0 ** (group.quick_deaths - 2))
        group.due_s = now_s + pause_s
        again = "is started again" if not pause_s else f"is started again in {pause_s:g} s"
        self._tell(
            killed.name, f"was killed ({signal_name}) and {again}" if signal_name else f"ended with code {code} and {again}"
        )
        self.log.warning("service_killed", killed=killed.name, signal=signal_name or f"exit code {code}", pause_s=pause_s)

    def _begin_again(self, service: Service, now_s: float) -> None:
        service.process = _begin(service.module, service.config, service.environment, service.cores)
        service.began_s = now_s
        service.restarts += 1
        self._watch()
        self.log.warning("service_restarted", restarted=service.name, restarts=service.restarts, pid=service.process.pid)

    def end(self, *orders: Sequence[str], writing: Callable[[], int] = lambda: 0) -> None:
        """End the services in order: those of one sequence of modules when those of the one before have ended.

        One that does not end is killed, but not while ``writing`` says another number of bytes from time to time: a large
        state takes its time to be saved.
        """
        for modules in orders:
            group = [service for service in self.services if service.module in modules]
            for service in group:
                if service.process.poll() is None:
                    service.process.terminate()
                    service.process.send_signal(signal.SIGCONT)  # a frozen one would not hear it
            written, deadline_s = writing(), time.monotonic() + STOP_TIMEOUT_S
            while any(service.process.poll() is None for service in group) and time.monotonic() < deadline_s:
                time.sleep(STOP_LOOK_S)
                if written != (written := writing()):
                    deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for service in group:
                if service.process.poll() is None:
                    service.process.kill()
                    service.process.wait()
        self._guard.release()
        for service in self.services:
            service.pid_file.unlink(missing_ok=True)

    def _watch(self) -> None:
        self._guard.watch(service.process.pid for service in self.services if service.process.poll() is None)


def _begin(module: str, config: Path, environment: Mapping[str, str], cores: Collection[int] | None) -> subprocess.Popen[bytes]:
    with config.with_suffix(".stderr").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is the launcher's to hand on, in order
        )
    config.with_suffix(".pid").write_text(f"{process.pid}\n")
    if cores is not None and sys.platform == "linux":
        with contextlib.suppress(ProcessLookupError):  # it may be dead already
            os.sched_setaffinity(process.pid, cores)
    return process


def last_words(said: str, code: int) -> str:
    """Return the last line of ours that a process wrote to stderr, or else its last one, without its program's name.

    A user's code, and libraries, may write more at its end.
    """
    lines = said.strip().splitlines()
    ours = [line for line in lines if OURS.match(line)]
    last = (ours or lines)[-1] if lines else f"ended with code {code}, see the logs of the run"
    return last.partition(": ")[2] or last


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
