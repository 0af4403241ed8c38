"""Real processes of an account that has no home directory, and cannot write the installation."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.made.fixtures import Ended
from tests.made.up_command import TINY_GPT
from tests.pace import DEADLINE_S

import diloco
from diloco_ops.broker.server import Server

SCRIPTS = Path(sys.executable).parent
USER_ID = "12345"  # without an account
OTHER_USER = ["unshare", "--user", f"--map-user={USER_ID}", f"--map-group={USER_ID}"]
HOMES = ("unset", "missing", "read-only")
READ_ONLY = 0o555
POLL_S = 0.05


@dataclass(frozen=True)
class Homeless:
    """An account without a home directory that it can write; ``folder`` is where its processes run."""

    folder: Path
    environment: dict[str, str]

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command as this account."""
        return subprocess.Popen(
            [*OTHER_USER, *command],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **environment: str) -> Ended:
        """Run a command as this account to its end, which leaves no folder named ``~``."""
        process = self.start(*command, **environment)
        try:
            out, err = process.communicate(timeout=2 * DEADLINE_S)
        finally:
            process.kill()
        assert not (self.folder / "~").exists()
        return Ended(process.returncode, out, err)


Account = Callable[[str], Homeless]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package ``diloco`` that its owner cannot write."""
    if shutil.which("unshare") is None or subprocess.run([*OTHER_USER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare(1) and permission to make user namespaces")
    folder = tmp_path_factory.mktemp("installation")
    shutil.copytree(Path(diloco.__file__).parent, folder / "diloco", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(READ_ONLY)
    yield folder
    for path in folders:
        path.chmod(0o755)


@pytest.fixture
def account(installation: Path, tmp_path: Path) -> Account:
    """``account(home)``: one whose home directory is ``unset``, ``missing`` or ``read-only``."""
    (tmp_path / "read-only").mkdir(mode=READ_ONLY)
    homes = {"unset": {}, "missing": {"HOME": "/proc/missing"}, "read-only": {"HOME": str(tmp_path / "read-only")}}
    common = {"PATH": f"{SCRIPTS}:{os.defpath}", "PYTHONPATH": str(installation), "JAX_PLATFORMS": "cpu"}
    return lambda home: Homeless(tmp_path, common | homes[home])


def kernels_in(folder: Path) -> dict[str, int]:
    """The files of compiled kernels below a folder, with the time of their last change."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "kernels").rglob("*.nbc")}


def events(log: Path) -> list[str]:
    """The events in a service's log so far."""
    return [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("home", HOMES)
def test_commands_need_no_home(account: Account, home: str) -> None:
    user = account(home)
    helped = user.run("diloco", "--help")
    assert (helped.code, helped.err) == (0, "")
    assert "status" in helped.out
    asked = user.run("diloco", "status", "runs/none")
    assert (asked.code, asked.err) == (5, "diloco: runs/none: not a run's directory (it has no run.json)\n")


@pytest.mark.parametrize("home", HOMES)
def test_a_learner_without_a_folder_names_the_setting(account: Account, home: str) -> None:
    refused = account(home).run("diloco-learner", DILOCO_NAME="ann")
    says = {
        "unset": "cache_dir (DILOCO_CACHE_DIR) = ~/.cache/diloco/jax: no home directory is known for ~ (HOME is not set",
        "missing": "cache_dir: /proc/missing/.cache/diloco/jax cannot be written: No such file or directory; set cache_dir",
        "read-only": "read-only/.cache/diloco/jax cannot be written: Permission denied; set cache_dir (DILOCO_CACHE_DIR) to",
    }
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("diloco-learner: cache_dir")
    assert refused.err.count("\n") == 1
    assert says[home] in refused.err


def serve(user: Homeless, state: Path, url: str) -> None:
    """Run a syncer until it waits for its run, and ask it to end."""
    settings = {"DILOCO_NAME": "syncer", "DILOCO_STATE_DIR": str(state), "DILOCO_NATS_URL": url, "DILOCO_RUN": "none"}
    process, log = user.start("diloco-syncer", **settings), state / "logs" / "syncer.jsonl"
    before = events(log).count("waiting_for_run")
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while events(log).count("waiting_for_run") == before and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=DEADLINE_S) == ("", "")
    finally:
        process.kill()
    assert events(log).count("waiting_for_run") == before + 1
    assert process.returncode == 0


def test_a_syncer_keeps_its_kernels_below_state_dir(account: Account, nats_server: Server, tmp_path: Path) -> None:
    user, state = account("missing"), tmp_path / "state"
    serve(user, state, nats_server.url)
    compiled = kernels_in(state)
    assert compiled
    serve(user, state, nats_server.url)
    assert kernels_in(state) == compiled  # loaded, not compiled again


def test_without_any_folder_kernels_are_compiled_in_memory(account: Account) -> None:
    program = """
        import numpy
        from diloco.core.tensors.compiled import kernels
        print(kernels.absmax(numpy.array([1, -3], numpy.float32)))
    """
    computed = account("unset").run(sys.executable, "-c", textwrap.dedent(program))
    assert (computed.code, computed.out, computed.err) == (0, "3.0\n", "")


def test_a_run_needs_no_home_where_cache_dir_is_set(account: Account, tmp_path: Path) -> None:
    sets = [f"--set={name}={value}" for name, value in TINY_GPT.items()]
    arguments = ["up", "--run-dir=run", "--learners=1", "--shards=1", "--tokens=2000", *sets]
    refused = account("unset").run("diloco", *arguments)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "cache_dir (DILOCO_CACHE_DIR) = ~/.cache/diloco/jax: no home directory is known" in refused.err
    assert not (tmp_path / "run").exists()
    done = account("unset").run("diloco", *arguments, DILOCO_CACHE_DIR="cache")
    assert done.code == 0, done
    assert kernels_in(tmp_path / "cache")
    assert list((tmp_path / "cache").glob("jit_*"))
    verified = account("unset").run("diloco", "verify", "run", DILOCO_CACHE_DIR="cache")
    assert verified.code == 0, verified
