"""``--eval lm_eval:TASKS``: the newest model of a run, evaluated every so often by tasks of the library lm-evaluation-harness.

``python -m diloco_ops.finetune.harness --config FILE`` is a process of its own, which ``diloco up`` starts beside its services.
It exports the model, and has the library's own program evaluate it on the processor: learners' devices are not touched. Once
the run is over it evaluates the last model, and ends. Results are lines of ``evaluations.jsonl`` in the run's directory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from diloco.errors import BrokerError, DilocoError, RunError, SettingsError
from diloco.process import observe
from diloco.settings import folders
from diloco_ops.reading import run_reader
from diloco_report.units import decimal, share

MODULE, NAME = "diloco_ops.finetune.harness", "lm-eval"
RESULTS = "evaluations.jsonl"
LIBRARY = "lm_eval"  # begins the option's value, and is the program
EVERY_MINUTES = 30.0
LOOK_S = 5.0  # between two looks whether the run is over: each takes a connection and a few messages
NICENESS = 10  # learners that share the processor come first
OWNED = (
    "--tasks",
    "--model",
    "--model_args",
    "--device",
    "--output_path",
)  # arguments of the program that are given to it here

EvalTasks = Annotated[
    str | None,
    typer.Option("--eval", help=f"{LIBRARY}:TASK,TASK: evaluate the newest model by these tasks of lm-evaluation-harness."),
]
EvalEvery = Annotated[float, typer.Option("--eval-every", min=0.1, help="Minutes between two evaluations of --eval.")]
EvalArgs = Annotated[
    str | None, typer.Option("--eval-args", help="Further arguments of lm_eval, such as '--include_path tasks --limit 100'.")
]


@dataclass(frozen=True)
class HarnessRequest:
    """Tasks by which a run's model is evaluated. ``program``: of lm_eval. ``arguments``: further ones for it."""

    tasks: str
    every_s: float
    arguments: Sequence[str]
    program: str

    def values(self, directory: Path) -> dict[str, Any]:
        """Return the values of the process's file for a run in a directory; its role is to evaluate, so no service waits."""
        return asdict(self) | {"arguments": list(self.arguments), "directory": str(directory), "role": "evaluator"}


def asked(tasks: str | None, every_minutes: float, arguments: str | None) -> HarnessRequest | None:
    """Return what the options ask for; None: no evaluation.

    Raises:
        SettingsError: they have another form.
        DilocoError: the library is not installed.
    """
    if tasks is None:
        if arguments is not None:
            raise SettingsError(f"--eval-args {arguments}: needs --eval {LIBRARY}:TASKS")
        return None
    library, _, named = tasks.partition(":")
    if library != LIBRARY or not named:
        raise SettingsError(f"--eval {tasks}: expected {LIBRARY}:TASK,TASK, such as {LIBRARY}:arc_easy")
    further = shlex.split(arguments or "")
    if taken := [each for each in further if each.partition("=")[0] in OWNED]:
        raise SettingsError(f"--eval-args {arguments}: {taken[0]} is given by diloco; leave it out")
    program = shutil.which(LIBRARY) or shutil.which(LIBRARY, path=str(Path(sys.executable).parent))
    if program is None:
        raise DilocoError(f"--eval {tasks}: not installed: {LIBRARY}; pip install {LIBRARY}, or have its program in PATH")
    return HarnessRequest(named, 60 * every_minutes, further, program)


def result_lines(directory: Path) -> list[str]:
    """Return the newest results of a run in its directory, a line for each task; none if it has none."""
    try:
        newest = json.loads((directory / RESULTS).read_text().splitlines()[-1])
        progress = share(min(1.0, newest["tokens"] / max(1, newest["budget"])))
        return [
            f"{LIBRARY} after {progress} of the tokens: {task} "
            + ", ".join(f"{name} {decimal(value)}" for name, value in found.items())
            for task, found in newest["results"].items()
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


class Harness:
    """Evaluates a run's newest model again and again, by programs that it starts one after another."""

    def __init__(self, request: HarnessRequest, directory: Path) -> None:
        self.request, self.directory = request, directory
        self.log = observe.get_logger()
        self._program: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Evaluate until the run is over, and then once more.

        Raises:
            DilocoError: the model cannot be exported, or the tasks cannot be evaluated.
        """
        self._check_tasks()
        due_s, seen = time.monotonic() + self.request.every_s, None
        while seen is None or not seen.over:
            time.sleep(LOOK_S)
            seen = asyncio.run(_progress(self.directory))
            if seen is not None and (seen.over or time.monotonic() >= due_s):
                self._evaluate(seen)
                due_s = time.monotonic() + self.request.every_s

    def stop(self, number: int, frame: FrameType | None) -> None:
        """End this process and the program that it has started, as a signal asks for."""
        if self._program is not None:
            self._program.kill()
        sys.exit(0)

    def _check_tasks(self) -> None:
        paths = list(_after("--include_path", self.request.arguments))
        included = ["--include_path", paths[-1]] if paths else []
        self._run([self.request.program, "validate", "--tasks", self.request.tasks, *included], "--eval: ")

    def _evaluate(self, seen: _Progress) -> None:
        with folders.temporary("diloco-eval-") as place:
            model, out = Path(place) / "model", Path(place) / "results"
            export = [sys.executable, "-m", "diloco_ops.cli", "export", str(self.directory), str(model), "--format", "hf"]
            self._run(export, "--eval: ")
            command = [
                self.request.program, "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks",
                self.request.tasks, "--device", "cpu", "--output_path", str(out), *self.request.arguments,
            ]  # fmt: skip
            self._run(command, f"--eval {LIBRARY}:{self.request.tasks}: ")
            found = json.loads(max(out.rglob("results_*.json")).read_text())
        about = {"versions": seen.versions, "tokens": seen.tokens, "budget": seen.budget, "at_s": round(time.time(), 1)}
        line = about | {"results": _numbers(found["results"])}
        with (self.directory / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.log.info("evaluated_by_tasks", **line)

    def _run(self, command: Sequence[str], source: str) -> None:
        """Run a program to its end.

        Raises:
            DilocoError: it failed; its last line is the message, behind its ``source``.
        """
        pipe, both = subprocess.PIPE, subprocess.STDOUT  # lm_eval says what is wrong on either
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        self._program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=both, text=True, env=environment
        )
        said, _ = self._program.communicate()
        if self._program.returncode:
            words = said.strip().splitlines() or [f"ended with code {self._program.returncode}"]
            raise DilocoError(f"{source}{words[-1].removeprefix('diloco: ')}")


@dataclass(frozen=True)
class _Progress:
    """The place of a run: whether it is over, the versions of its fragments, and the tokens that all of them have merged."""

    over: bool
    versions: list[int]
    tokens: int
    budget: int


async def _progress(directory: Path) -> _Progress | None:
    """Return the place of a run; None: it has not begun, or its server does not answer now."""
    try:
        async with run_reader.opened(directory) as seen:
            chains = await run_reader.read_chains(seen.log)
            if not chains:
                return None
            return _Progress(
                over=await seen.state() == "over",
                versions=[chain.version for chain in chains],
                tokens=min(chain.tokens_merged for chain in chains),
                budget=seen.run.created.tokens,
            )
    except (RunError, BrokerError):
        return None


def _numbers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by task the values of its metrics; the library's names have the filter behind a comma."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and "_stderr" not in name and name != "sample_len"
        }
        for task, found in results.items()
    }


def _after(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the values of an option among a program's arguments."""
    found = [each.partition("=")[2] for each in arguments if each.startswith(f"{option}=")]
    return found + [value for name, value in itertools.pairwise(arguments) if name == option]


def _main() -> int:
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--config", type=Path, required=True)
    values = tomllib.loads(parser.parse_args().config.read_text())
    directory, own = Path(values["directory"]), {name: values[name] for name in HarnessRequest.__dataclass_fields__}
    observe.configure(NAME, directory.name, file=directory / "logs" / f"{NAME}.jsonl")
    os.nice(NICENESS)
    harness = Harness(HarnessRequest(**own), directory)
    signal.signal(signal.SIGTERM, harness.stop)
    harness.run()
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco up --eval"))
