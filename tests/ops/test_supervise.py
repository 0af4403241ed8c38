"""The supervisor, with small programs that die in various ways."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
from tests.pace import DEADLINE_S
from tests.services.cluster import Events

from diloco.errors import EjectedError, IslandError
from diloco.process import files
from diloco.process.observe import Logger
from diloco_ops.up import supervise
from diloco_ops.up.supervise import OrphanGuard, ServiceFailed, Supervisor

pytestmark = pytest.mark.services

# counts its lives in a file, and ends each as the configuration says: a signal, a code, or never; or after another one began
MORTAL = """
import os, pathlib, signal, sys, time
config = pathlib.Path(sys.argv[2])
lives = config.with_suffix(".lives")
lives.write_text(str(int(lives.read_text()) + 1 if lives.exists() else 1))
fate, _, other = config.read_text().split(",")[int(lives.read_text()) - 1].partition(" after ")
while other and not config.with_name(f"{other}.lives").exists():
    time.sleep(0.01)
if fate == "lives":
    time.sleep(3600)
if fate == "saves":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config.with_suffix(".ready").touch()
    while not config.with_suffix(".whole").exists():
        time.sleep(0.01)
    config.with_suffix(".whole").replace(config.with_suffix(".saved"))
    sys.exit(0)
if fate.startswith("-"):
    os.kill(os.getpid(), -int(fate))
print("mortal: it was my fate", file=sys.stderr)
sys.exit(int(fate))
"""


class Mortals:
    """Programs under one supervisor."""

    def __init__(self, folder: Path) -> None:
        (folder / "mortal.py").write_text(MORTAL)
        self.folder, self.events = folder, Events()
        self.supervisor = Supervisor(cast(Logger, self.events))

    def start(self, name: str, *fates: str, group: str = "", dispensable: bool = False) -> None:
        config = self.folder / f"{name}.toml"
        config.write_text(",".join(fates))
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        self.supervisor.start(name, "mortal", config, environment, group=group, dispensable=dispensable)

    def lives(self, name: str) -> int:
        file = self.folder / f"{name}.lives"
        text = file.read_text() if file.exists() else ""
        return int(text) if text else 0

    def pid(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())

    def tend_until(self, predicate: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not predicate():
            assert time.monotonic() < ends_s
            self.supervisor.tend()
            time.sleep(0.01)


@pytest.fixture
def mortals(tmp_path: Path) -> Iterator[Mortals]:
    made = Mortals(tmp_path)
    yield made
    made.supervisor.end(["mortal"])


def test_a_learner_that_was_ejected_is_begun_again_to_wait_and_ends_nothing(mortals: Mortals) -> None:
    mortals.start("a", str(EjectedError.exit_code), "0")
    mortals.start("b", "0")
    mortals.tend_until(mortals.supervisor.tend)
    assert (mortals.lives("a"), mortals.lives("b")) == (2, 1)
    assert [(event, values["ejected"]) for _, event, values in mortals.events.entries if "ejected" in values] == [
        ("service_ejected", "a")
    ]


def test_what_a_signal_killed_is_begun_again(mortals: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RETRY_S", 0.05)
    mortals.start("a", "-9", "-11", "-6", "0")
    mortals.tend_until(mortals.supervisor.tend)
    assert mortals.lives("a") == 4
    killed = [values["signal"] for _, event, values in mortals.events.entries if event == "service_killed"]
    assert killed == ["SIGKILL", "SIGSEGV", "SIGABRT"]
    restarted = [values for _, event, values in mortals.events.entries if event == "service_restarted"]
    assert [(values["restarted"], values["restarts"]) for values in restarted] == [("a", 1), ("a", 2), ("a", 3)]


LOST = str(IslandError.exit_code)


def test_processes_of_a_learner_are_begun_again_together_once_all_have_ended(mortals: Mortals) -> None:
    mortals.start("a", LOST, "0", group="ann")
    mortals.start("a-p1", "-9", "0", group="ann")
    mortals.start("b", "0")
    mortals.tend_until(mortals.supervisor.tend)
    assert [mortals.lives(name) for name in ("a", "a-p1", "b")] == [2, 2, 1]
    killed = [values for _, event, values in mortals.events.entries if event == "service_killed"]
    assert [(values["killed"], values["signal"]) for values in killed] == [("a-p1", "SIGKILL")]


def test_a_process_that_is_still_there_long_after_another_one_is_killed(
    mortals: Mortals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GROUP_S", 0.3)
    mortals.start("a", "lives", "0", group="ann")
    mortals.start("a-p1", "-9 after a", "0", group="ann")
    mortals.tend_until(mortals.supervisor.tend)
    assert (mortals.lives("a"), mortals.lives("a-p1")) == (2, 2)


def test_wrong_settings_of_one_process_end_the_run_whatever_becomes_of_the_others(mortals: Mortals) -> None:
    mortals.start("a", LOST, group="ann")
    mortals.start("a-p1", "2", group="ann")
    with pytest.raises(ServiceFailed, match="a-p1: it was my fate") as failed:
        mortals.tend_until(mortals.supervisor.tend)
    assert failed.value.exit_code == 2


def test_the_pid_of_a_running_service_is_in_its_file(mortals: Mortals) -> None:
    mortals.start("a", "lives", "lives")
    first = mortals.pid("a")
    mortals.tend_until(lambda: mortals.lives("a") == 1)
    os.kill(first, signal.SIGKILL)
    mortals.tend_until(lambda: mortals.lives("a") == 2)
    assert mortals.pid("a") != first
    assert psutil.Process(mortals.pid("a")).is_running()
    mortals.supervisor.end(["mortal"])
    assert not (mortals.folder / "a.pid").exists()


def test_an_error_code_ends_the_run_with_what_the_service_said(mortals: Mortals) -> None:
    mortals.start("a", "lives")
    mortals.start("b", "2")
    with pytest.raises(ServiceFailed, match="b: it was my fate") as failed:
        mortals.tend_until(lambda: False)
    assert failed.value.exit_code == 2
    assert mortals.lives("b") == 1


@pytest.mark.parametrize(
    ("fates", "lives", "said", "code"),
    [(["2"], 1, "a: it was my fate", 2), (["-9"] * 10, 3, "a: killed by SIGKILL 3 times in a row", 1)],
)
def test_a_run_goes_on_without_a_service_that_is_dispensable(
    mortals: Mortals, monkeypatch: pytest.MonkeyPatch, fates: list[str], lives: int, said: str, code: int
) -> None:
    monkeypatch.setattr(supervise, "RETRY_S", 0.01)
    monkeypatch.setattr(supervise, "QUICK_DEATHS", 3)
    mortals.start("a", *fates, dispensable=True)
    mortals.start("b", "-9", "0")
    mortals.tend_until(mortals.supervisor.tend)
    assert (mortals.lives("a"), mortals.lives("b")) == (lives, 2)  # what it waits for is done as ever
    [(name, failure)] = mortals.supervisor.failures.items()
    assert (name, str(failure).startswith(said), failure.exit_code) == ("a", True, code)
    assert [values["failed"] for _, event, values in mortals.events.entries if event == "service_failed"] == ["a"]


def test_a_service_that_cannot_live_ends_the_run(mortals: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RETRY_S", 0.01)
    monkeypatch.setattr(supervise, "QUICK_DEATHS", 3)
    mortals.start("a", *["-9"] * 10)
    with pytest.raises(ServiceFailed, match="a: killed by SIGKILL 3 times in a row"):
        mortals.tend_until(lambda: False)
    assert mortals.lives("a") == 3


def test_ending_also_ends_what_is_frozen(mortals: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    mortals.start("a", "lives")
    mortals.tend_until(lambda: mortals.lives("a") == 1)
    os.kill(mortals.pid("a"), signal.SIGSTOP)
    monkeypatch.setattr(supervise, "STOP_TIMEOUT_S", DEADLINE_S)
    mortals.supervisor.end(["mortal"])
    [service] = mortals.supervisor.services
    assert service.process.returncode == -signal.SIGTERM, "it heard what it was told, and was not killed for its silence"


class Looks:
    """A clock that goes only while the supervisor sleeps: how often it looks decides, not how slow the machine is."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        time.sleep(0.001)


@pytest.mark.parametrize("grows", [True, False])
def test_one_that_still_saves_is_not_killed(mortals: Mortals, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draft grows at every look, and is whole after three times as long as one that does not grow is given."""
    looks, draft = Looks(), mortals.folder / "a.draft"
    mortals.start("a", "saves")
    mortals.tend_until(lambda: (mortals.folder / "a.ready").exists())
    monkeypatch.setattr(supervise, "time", looks)

    def written() -> int:
        if grows and looks.now_s < 3 * supervise.STOP_TIMEOUT_S:
            draft.write_text("x" * round(looks.now_s / supervise.STOP_LOOK_S + 1))
        elif draft.exists():
            draft.replace(draft.with_suffix(".whole"))
            ends_s = time.monotonic() + DEADLINE_S
            while not (mortals.folder / "a.saved").exists():
                assert time.monotonic() < ends_s
                time.sleep(0.01)
        return files.drafted_bytes(mortals.folder)

    mortals.supervisor.end(["mortal"], writing=written)
    assert (mortals.folder / "a.saved").exists() == grows


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.ops.test_supervise import Mortals
mortals = Mortals(Path(sys.argv[1]))
mortals.start("a", "lives")
mortals.start("b", "-9", "lives")
mortals.tend_until(lambda: mortals.lives("b") == 2)
print("ready", flush=True)
time.sleep(3600)
"""


def test_no_service_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        services = [psutil.Process(int((tmp_path / f"{name}.pid").read_text())) for name in ("a", "b")]
        services[0].suspend()  # a frozen one too
    finally:
        launcher.kill()
        launcher.communicate()
    _, alive = psutil.wait_procs(services, timeout=DEADLINE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_guard_ends_though_a_fork_of_its_owner_lives() -> None:
    """A fork, such as a worker of a data loader, holds the owner's end of the guard's pipe open."""
    guard = OrphanGuard()
    assert guard._shell.stdin is not None
    held = os.dup(guard._shell.stdin.fileno())
    try:
        with subprocess.Popen(["sleep", "600"]) as watched:
            guard.watch([watched.pid])
            guard.release()
            assert guard._shell.returncode == 0
            assert watched.poll() is None, "what it has watched is left alone"
            watched.kill()
    finally:
        os.close(held)
