"""Training again, as ``diloco replay --learners`` does it, beside the processes that trained first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.made.training_process import SETTINGS, moments
from tests.pace import DEADLINE_S

from diloco.core.run.lives import Life
from diloco.core.run.tape import Machine, Mesh, Start
from diloco.errors import RunError
from diloco.processes.meeting import free_port
from diloco_ops.audit.retraining import Retraining

START = Start(0, 1, (0, 0))
FLAGS = "--xla_backend_optimization_level=0"  # compiling is most of the work
PROCESSES = Path(__file__).parents[1] / "made" / "training_process.py"


def trained(processes: int, devices: int, mesh: Mesh) -> tuple[str, Machine]:
    """Train in so many processes of so many devices each; return the digest of the parameters, and the leader's machine."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": FLAGS, "PJRT_NPROC": "1"}
    shape = [str(number) for number in (mesh.data, mesh.fsdp, mesh.tensor)]
    commands = [[sys.executable, str(PROCESSES), address, str(processes), str(place), *shape] for place in range(processes)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=2 * DEADLINE_S)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    digest, text, flags = said[0].splitlines()[-3:]
    return digest, Machine(text, flags)


@pytest.mark.services
@pytest.mark.parametrize(
    ("processes", "devices", "mesh"),
    [(3, 1, Mesh(3, 1, 1)), pytest.param(2, 2, Mesh(2, 2, 1), marks=pytest.mark.slow)],
)
def test_training_of_several_processes_is_repeated_to_the_last_bit(processes: int, devices: int, mesh: Mesh) -> None:
    digest, machine = trained(processes, devices, mesh)
    life = Life(START, machine=machine, mesh=mesh, processes=processes, apart=True)
    with Retraining() as make:
        model = make(SETTINGS, None, life)
        for step, at in enumerate(moments()):
            model.step(0, step, at)
        assert model.parameters_digest().hex() == digest
        assert model.machine == machine, "the devices of all processes, and their threads"


@pytest.mark.slow
def test_a_process_that_dies_while_it_trains_again_is_named_and_the_next_life_is_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The task of this life kills its process, as a machine does that has no memory left."""
    (tmp_path / "fatal.py").write_text(FATAL)
    monkeypatch.syspath_prepend(tmp_path)
    fatal: Any = SETTINGS.model_copy(update={"task": SETTINGS.task.model_copy(update={"name": "fatal:make"})})
    with Retraining() as make:
        with pytest.raises(RunError, match=r"has died \(exit code -9; .* machine without memory left\)"):
            make(fatal, None, Life(START))
        with pytest.raises(RunError, match=r"a mesh of 64 devices, but there are 1 here: .*JAX_NUM_CPU_DEVICES=64"):
            make(SETTINGS, None, Life(START, mesh=Mesh(64, 1, 1)))
        assert make(SETTINGS, None, Life(START)).tokens_per_batch == 12 * 16


FATAL = """
import os, signal

def make(settings, data):
    os.kill(os.getpid(), signal.SIGKILL)
"""
