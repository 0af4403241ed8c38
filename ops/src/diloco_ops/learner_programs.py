"""How learners of each framework are started: by entry points of the group ``diloco.frameworks`` of other distributions."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol

from diloco.errors import RunError
from diloco.service.rundir import RunDirectory

EVALUATOR = "evaluator"
GROUP = "diloco.frameworks"
UNSAID = "jax"  # framework of a run whose run.json does not say it, as before version 0.3
TORCH = "torch"  # framework of the learners that the option --torch names


class LearnerProgram(Protocol):
    """A program that is a learner or an evaluator, as ``diloco_learner.frameworks.Framework`` describes it.

    Attributes:
        module: runs by ``python -m``.
        one_process: its learners are a single process each, or of PyTorch as many as --torch-processes says, and no process
            has a mesh of devices.
    """

    module: str
    one_process: bool


def program_of(framework: str) -> LearnerProgram:
    """Return the program of the learners of a framework.

    Raises:
        RunError: no distribution that is installed has this framework, or its entry point cannot be imported.
    """
    points = entry_points(group=GROUP)
    for point in points.select(name=framework):
        try:
            program: LearnerProgram = point.load()
        except (Exception, SystemExit) as error:  # the module of another distribution may do anything wrong
            raise RunError(
                f"framework {framework!r}: its entry point {point.value} cannot be imported: {type(error).__name__}: {error}: "
                "install what it lacks"
            ) from None
        return program
    raise RunError(
        f"framework {framework!r}: no installed distribution provides it (installed: {', '.join(sorted(points.names))}): "
        f"install the one that the run was started with, which has an entry point of this name in the group {GROUP}"
    )


def programs_of(directory: RunDirectory) -> dict[str, LearnerProgram]:
    """Return the programs of the learners that a run starts and of its evaluator, by name; raise as :func:`program_of` does."""
    torch = directory.torch or {}
    names = [*directory.learner_names, EVALUATOR] if directory.starts_learners else []
    frameworks = {name: TORCH if name in torch else directory.framework or UNSAID for name in names}
    found = {framework: program_of(framework) for framework in set(frameworks.values())}
    return {name: found[framework] for name, framework in frameworks.items()}


def processes_of(directory: RunDirectory) -> dict[str, int]:
    """Return the number of processes of the learners that a run starts and of its evaluator, by name; raise likewise."""
    found, torch = dict.fromkeys(programs_of(directory), 1), directory.torch or {}
    for name, program in programs_of(directory).items():
        if name == EVALUATOR:
            continue
        if not program.one_process:
            found[name] = directory.processes_per_learner or 1
        elif name in torch:
            found[name] = directory.torch_processes or 1
    return found
