"""The layout: `diloco` holds what services need at run time, and the testing kit; test modules share `tests/made` alone.

`make lint` checks who imports whom among the distributions.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "diloco": ROOT / "shared/src",
    "diloco_learner": ROOT / "services/learner/src",
    "diloco_syncer": ROOT / "services/syncer/src",
    "diloco_coordinator": ROOT / "services/coordinator/src",
}
SERVICES = (
    "diloco_learner.service",
    "diloco_learner.pytorch.service",
    "diloco_syncer.service",
    "diloco_coordinator.service",
    "diloco_coordinator.server_watch.service",
)
# of `diloco replay`, `diloco up`, `diloco eval`, `diloco data`, `diloco doctor` and `import diloco`, which find them by
# name; of frameworks; and of tasks (`diloco up --model`)
ENTRY_POINTS = tuple(
    f"diloco_learner.{name}"
    for name in (
        *("replay", "check", "evaluate", "examine", "fit", "hugging_face", "joining", "kernels", "mix.describe"),
        *("chats.describe", "chats.tiny"),
        *("jax_framework", "torch_framework"),
        *("causal_lm.lm_task", "causal_lm.merging"),
    )
)
PROGRAMS = ("__main__",)
TESTS = ROOT / "tests"


def modules() -> dict[str, Path]:
    found = {}
    for source in SOURCES.values():
        for path in source.rglob("*.py"):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & known.keys()


def test_every_shared_module_is_reached_by_a_service() -> None:
    known = modules()
    reached: set[str] = set()
    programs = {name for name in known if name.endswith(PROGRAMS)}
    waiting = [*SERVICES, *ENTRY_POINTS, *programs]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported(known[name], known)
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    kit = {name for name in known if name.startswith("diloco.testing.")} | {"diloco_syncer.virtual"}  # for users' tests
    kit |= {name for name in known if name.startswith("diloco.integrations.")}  # for users' trainers
    kit.add("diloco_learner.chats.tiny")  # for users' projects of `diloco init --template sft`
    assert known.keys() - reached - packages - kit == set()


@pytest.mark.tool
def test_commands_import_neither_the_kernels_nor_jax() -> None:
    program = "import sys, diloco_ops.api; print(*{'numba', 'jax', 'torch'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


@pytest.mark.tool
def test_a_learner_of_a_fixed_size_loads_nothing_elastic() -> None:
    elastic = "name.startswith(('diloco.elastic', 'diloco.core.learner.roll'))"
    program = f"import sys, diloco_learner.jax.together; print(*(name for name in sys.modules if {elastic}))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []


@pytest.mark.parametrize("folder", ["member", "processes", "elastic", "weights_files"])
def test_a_folder_has_few_enough_modules_to_be_read_as_a_plan(folder: str) -> None:
    found = [path.stem for path in (SOURCES["diloco"] / "diloco" / folder).glob("*.py")]
    assert len(found) - 1 <= 20, found


def test_no_module_imports_a_test_module_or_a_conftest() -> None:
    """What test modules share is in `tests/made`: a test module can be moved, split or dropped by itself."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in TESTS.rglob("*.py")}
    alone = {name: path for name, path in paths.items() if path.name == "conftest.py" or path.name.startswith("test_")}
    assert len(alone) > 200
    found = {name: sorted(names) for name, path in paths.items() if (names := imported(path, alone))}
    assert not found, "move what they share to tests/made"
