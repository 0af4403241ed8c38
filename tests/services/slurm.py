"""A stand-in for Slurm's commands, for the one job of one machine: ``python slurm.py srun|scancel|scontrol ARGUMENTS``.

What it does is what their manuals say, as far as ``examples/slurm`` relies on it, and it refuses every other option. The
folder ``SLURM_STAND_IN`` has what Slurm would keep: the step's processes, and whether the job was requeued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

SRUN = {"--kill-on-bad-exit=0", "--wait=60"}
FOLDER = "SLURM_STAND_IN"
WAIT_S = "SLURM_STAND_IN_WAIT_S"  # what stands for the minute of --wait=60, for a machine as slow as this one


def install(folder: Path) -> None:
    """Put the commands into ``folder/bin``."""
    commands = folder / "bin"
    commands.mkdir(parents=True)
    for name in ("srun", "scancel", "scontrol"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        command.chmod(0o755)


def environment(folder: Path, tasks: int, job: int) -> dict[str, str]:
    """Return the environment of a batch script."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    from tests.pace import DEADLINE_S  # not at the top: the commands run this file by itself

    own["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{own['PATH']}"
    return own | {FOLDER: str(folder), WAIT_S: str(DEADLINE_S), "SLURM_NTASKS": str(tasks), "SLURM_JOB_ID": str(job)}


def processes(folder: Path) -> list[int]:
    """Return the pids of the step's tasks, by SLURM_PROCID; none before the first step."""
    file = folder / "step"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def requeued(folder: Path) -> bool:
    """Whether the job was requeued."""
    return (folder / "requeued").exists()


def srun(folder: Path, arguments: list[str]) -> int:
    """Start the tasks and wait for them: the highest exit code, or 128 and the signal's number."""
    while arguments[0].startswith("-"):
        if arguments.pop(0) not in SRUN:
            sys.exit("srun: an option that this stand-in does not know")
    hosts = {"SLURM_STEP_NODELIST": "127.0.0.[1-9]"}
    tasks = [
        subprocess.Popen(arguments, env=os.environ | hosts | {"SLURM_PROCID": str(index)})
        for index in range(int(os.environ["SLURM_NTASKS"]))
    ]

    def kill(number: int, frame: FrameType | None) -> None:
        print("srun: forcing job termination", file=sys.stderr)
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, kill)
    written = folder / "step.new"
    written.write_text(" ".join(str(task.pid) for task in tasks))
    written.replace(folder / "step")
    first_s = None
    while any(task.poll() is None for task in tasks):
        if first_s is None and any(task.poll() is not None for task in tasks):
            first_s = time.monotonic()
        if first_s is not None and time.monotonic() - first_s > float(os.environ[WAIT_S]):
            kill(0, None)
        time.sleep(0.02)
    return max(code if code >= 0 else 128 - code for code in (task.wait() for task in tasks))


def scancel(folder: Path, arguments: list[str]) -> int:
    """Signal the step's tasks, and not the batch script."""
    if arguments != ["--signal=TERM", os.environ["SLURM_JOB_ID"]]:
        sys.exit(f"scancel: {arguments}")
    for pid in processes(folder):
        os.kill(pid, signal.SIGTERM)
    return 0


def scontrol(folder: Path, arguments: list[str]) -> int:
    """Note that the job is to be requeued."""
    if arguments != ["requeue", os.environ["SLURM_JOB_ID"]]:
        sys.exit(f"scontrol: {arguments}")
    (folder / "requeued").touch()
    return 0


if __name__ == "__main__":
    commands = {"srun": srun, "scancel": scancel, "scontrol": scontrol}
    sys.exit(commands[sys.argv[1]](Path(os.environ[FOLDER]), sys.argv[2:]))
