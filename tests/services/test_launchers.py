"""Real learners of two processes, begun by ``examples/slurm`` and ``deploy/kubernetes/island``; and when a job of Slurm ends.

The Job of Kubernetes itself is looked at in ``tests/deploy/test_island.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.made.fixtures import Launch
from tests.made.island_checks import check_left, stepping
from tests.made.island_pods import LEFT, POD_SCRIPT, pod_environment
from tests.pace import DEADLINE_S
from tests.services import slurm
from tests.services.cluster import Cluster, small

from diloco.settings.cluster import SLURM_PORTS
from diloco_ops.broker.server import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
SCRIPT = EXAMPLE / "learner.sbatch"
PATIENCE_S = 3 * DEADLINE_S  # two processes import JAX, meet and compile, and the first ones must end before


# ---- the script alone


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


class Job:
    """The batch script with a program in a learner's place: each line of ``lives`` is what one generation does."""

    def __init__(self, folder: Path, lives: list[str]) -> None:
        self.folder = folder
        slurm.install(folder)
        learner = folder / "bin" / "diloco-learner"
        chosen = "\n".join(f"  {number}) {life} ;;" for number, life in enumerate(lives))
        learner.write_text(
            f'#!/bin/bash\ncd "{folder}"\nwhile [ -e begun.$SLURM_PROCID.$((n)) ]; do n=$((n + 1)); done\n'
            f'touch begun.$SLURM_PROCID.$((n))\ncase "$((n))" in\n{chosen}\nesac\n'
        )
        learner.chmod(0o755)
        self.process = subprocess.Popen(
            ["bash", SCRIPT], env=slurm.environment(folder, 2, 7), cwd=folder, stderr=subprocess.PIPE, text=True
        )

    @property
    def generations(self) -> int:
        return len(list(self.folder.glob("begun.1.*")))

    def ended(self) -> tuple[int, bool, int]:
        """Wait for the job's end: its code, whether it was requeued, and how many generations there were."""
        self.said = self.process.communicate(timeout=PATIENCE_S)[1]
        return self.process.returncode, slurm.requeued(self.folder), self.generations


@pytest.mark.parametrize(
    ("lives", "ended"),
    [
        (["exit 0"], (0, False, 1)),  # the run is over
        (["exit 2"], (2, False, 1)),  # wrong settings: they would be wrong again
        (["[ $SLURM_PROCID = 0 ] && exit 11; kill -9 $$", "exit 0"], (0, False, 2)),  # one is killed, the other misses it
        (["exit 11", "exit 11", "exit 5"], (5, False, 3)),
        (["exit 11"] * 3, (0, True, 3)),  # it gets nowhere on these hosts
    ],
)
def test_a_job_begins_again_where_processes_were_lost(tmp_path: Path, lives: list[str], ended: tuple[int, bool, int]) -> None:
    assert Job(tmp_path, lives).ended() == ended


UNTIL_ASKED = "trap 'exit 0' TERM; touch ready.$SLURM_PROCID; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("number", "requeued"),
    [(signal.SIGUSR1, True), (signal.SIGTERM, False)],
    ids=["notice of preemption or of the time limit", "scancel"],
)
def test_a_job_with_notice_waits_until_its_processes_have_left(tmp_path: Path, number: signal.Signals, requeued: bool) -> None:
    job = Job(tmp_path, [UNTIL_ASKED])
    until(lambda: len(list(tmp_path.glob("ready.*"))) == 2 and len(slurm.processes(tmp_path)) == 2)
    job.process.send_signal(number)
    assert job.ended() == (0, requeued, 1)
    assert "forcing job termination" not in job.said


def until(reached: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


# ---- a real learner


def free_job() -> int:
    """Return the number of a job whose port is free; processes that ask at once begin to look at different ones."""
    first, ports = SLURM_PORTS
    for job in ((os.getpid() + offset) % ports for offset in range(ports)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first + job))
            except OSError:
                continue
            return job
    pytest.skip(f"none of the ports from {first} on is free, which jobs of Slurm meet at")


def submit(settings: Path, said: Path) -> subprocess.Popen[bytes]:
    """Start the batch script as Slurm does, in a session of its own; the stand-in is beside the settings."""
    environment = slurm.environment(settings.parent, 2, free_job()) | {"OPENBLAS_NUM_THREADS": "1"}
    with said.open("wb") as output:
        return subprocess.Popen(
            ["bash", SCRIPT, settings], env=environment, cwd=said.parent, stdout=output, stderr=output, start_new_session=True
        )


async def island_run(launch: Launch) -> Cluster:
    """Return a run that goes on until its learner is ended; it has all but the learner."""
    task: dict[str, Any] = {"name": "gpt", "layers": 1, "width": 64, "heads": 2, "context": 16, "batch": 4}
    named = {f"task__{key}": value for key, value in task.items()}
    cluster = launch(small(tokens=10**9, learners=1, inner__optimizer="adamw", **named))
    cluster.coordinator()
    cluster.syncer(0)
    await cluster.link()
    return cluster


@pytest.mark.slow
async def test_a_slurm_job_that_loses_a_process_goes_on_and_leaves_with_notice(launch: Launch, tmp_path: Path) -> None:
    cluster = await island_run(launch)
    own = {"run": cluster.name, "nats_url": cluster.url, "state_dir": str(cluster.directory)}
    settings = tmp_path / "learner.toml"
    settings.write_text(tomli_w.dumps(tomllib.loads((EXAMPLE / "learner.toml").read_text()) | own))
    slurm.install(tmp_path)
    said = tmp_path / "job.out"
    job = submit(settings, said)
    try:
        await cluster.until(lambda: stepping(cluster, 30), "the learner trains", PATIENCE_S)
        first = slurm.processes(tmp_path)
        os.kill(first[1], signal.SIGKILL)
        await cluster.until(lambda: slurm.processes(tmp_path) != first, "all processes restart", PATIENCE_S)
        cluster.heartbeats.clear()
        await cluster.until(lambda: stepping(cluster, 30), "the next generation trains", PATIENCE_S)
        assert [len(cluster.events("processes_met", name)) for name in ("learner-0", "learner-0-p1")] == [2, 2]
        os.kill(job.pid, signal.SIGUSR1)
        assert await asyncio.to_thread(job.wait, PATIENCE_S) == 0, said.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert slurm.requeued(tmp_path)
    assert said.read_text().count("learner.sbatch: srun ended with 137: the processes of learner-0 begin again") == 1
    assert "forcing job termination" not in said.read_text()
    check_left(cluster)


def pods(cluster: Cluster, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the processes of the two pods of a Job, each as its container would."""
    leader = f"127.0.0.1:{free_port()}"
    own = {"DILOCO_RUN": cluster.name, "DILOCO_NATS_URL": cluster.url, "DILOCO_STATE_DIR": str(cluster.directory)}
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
    changed = {"LEADER": leader, "PROCESSES": "2", "DILOCO_MESH": "{}", "DILOCO_METRICS_ADDRESS": "", "DILOCO_LOG_TO": "file"}

    def environment(index: int) -> dict[str, str]:
        told = pod_environment(index, BEGUN=str(folder / f"begun-{index}"), **own, **changed)
        del told["DILOCO_IDENTITY"]  # the server of most tests asks for none; test_shared_identity.py has one that does
        return os.environ | here | told

    return [subprocess.Popen(["sh", POD_SCRIPT], env=environment(index), start_new_session=True) for index in range(2)]


@pytest.mark.slow
async def test_all_pods_of_a_kubernetes_job_are_to_be_replaced_when_one_is_evicted(launch: Launch, tmp_path: Path) -> None:
    cluster = await island_run(launch)
    started = pods(cluster, tmp_path)
    try:
        await cluster.until(lambda: stepping(cluster, 30), "the learner trains", PATIENCE_S)
        started[1].send_signal(signal.SIGTERM)
        codes = [await asyncio.to_thread(pod.wait, PATIENCE_S) for pod in started]
    finally:
        for pod in started:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
    assert codes == [LEFT, LEFT]
    check_left(cluster)
