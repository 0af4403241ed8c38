"""``make test`` and its siblings: checks and tests side by side, and last lines that say what to do.

``python -m tests.harness.gate TARGET [OPTIONS OF PYTEST]``. The tests' output is shown as it comes, a check's only where it
fails. The code is 0 if all passed, and 1 otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness import measuring, outcomes, workers
from tests.harness.measuring import VARIABLE
from tests.harness.outcomes import Outcomes
from tests.pace import factor

ROOT = Path(__file__).parents[2]
CHECKS = ("ruff", "types")  # targets of the Makefile
# optional libraries: `make test` and `make test-services` skip these tests where the libraries are missing
PROMISE = "mark.promise("
OPTIONAL = "pytest.importorskip("  # of a test that is skipped without an optional library


def with_optional_libraries(root: Path = ROOT) -> tuple[str, ...]:
    """Return the test modules of which some tests are skipped where an optional library is not installed."""
    modules = sorted((root / "tests").rglob("test_*.py"))
    return tuple(str(path.relative_to(root)) for path in modules if OPTIONAL in path.read_text())


@dataclass(frozen=True)
class Target:
    """What a target of the Makefile runs."""

    marks: str  # pytest's -m
    per_core: int  # workers: tests that start processes sleep most of their time
    checks: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    tests: tuple[str, ...] = ("tests",)
    promises: bool = False  # whether of services' tests only those run that keep a promise


TARGETS = {
    "test": Target("(not services or promise) and not slow and not compose", 2, CHECKS, promises=True),
    "test-services": Target("services and not slow and not compose", 2),
    "test-all": Target("not compose", 2, CHECKS, ("--hypothesis-profile=all",)),
    "test-extras": Target("not slow and not compose", 2, tests=with_optional_libraries()),
}


def without_promise(root: Path = ROOT) -> list[str]:
    """Return the modules of services' tests that keep no promise, which ``make test`` need not even import."""
    modules = sorted((root / "tests/services").glob("test_*.py"))
    return [str(path.relative_to(root)) for path in modules if PROMISE not in path.read_text()]


def main(name: str, options: Sequence[str]) -> int:
    """Run a target; print what failed and how to repeat it, and one last line."""
    target, began_s = TARGETS[name], time.monotonic()
    count = int(os.environ.get("WORKERS") or workers.workers(target.per_core))
    pace = factor(measuring.state_pace(count))
    print(f"{_workers(count)}; pace {pace:.2f}: tests wait {pace:.2f} times as long as usual ({VARIABLE})", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"diloco-{name}-"))
    checks = [_Check(check, folder) for check in target.checks]
    code, found = _run_tests(target, [*_spread(count), *options], folder)
    bad = [check for check in checks if not check.passed()]
    print(*_said(code, found, bad), sep="\n")
    passed = code == 0 and not bad
    wall_s = time.monotonic() - began_s
    tests = ", ".join(f"{number:,} {what}" for what, number in (found.counts if found else {}).items())
    used = f"{_clock(wall_s)} at pace {pace:.2f}, {measuring.processor_s():.0f} s of processor time"
    print(f"make {name}: {'passed' if passed else 'FAILED'}: {tests or 'no test'}; {used}")
    if passed:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if passed else 1


def _run_tests(target: Target, options: Sequence[str], folder: Path) -> tuple[int, Outcomes | None]:
    """Run pytest; its code, and what it tells of itself if it came to its end."""
    written = Path(os.environ.get(outcomes.VARIABLE) or folder / "outcomes.json")
    command = [sys.executable, "-m", "pytest", "-m", target.marks, f"--basetemp={folder / 'logs'}", *target.options]
    if target.promises:
        command += [f"--ignore={module}" for module in without_promise()]
    command += [*target.tests, *options]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {outcomes.VARIABLE: str(written)}, check=False).returncode
    return code, Outcomes.read(written)


def _said(code: int, found: Outcomes | None, bad: Sequence[_Check]) -> list[str]:
    """Return what failed checks print, and then what to do about each failure."""
    lines = [f"\n{check.name}:\n{check.said()}" for check in bad] + [""]
    lines += [line for failure in (found.failures if found is not None else ()) for line in failure.lines]
    lines += [f"FAILED {check.name}\n  again: {check.command}" for check in bad]
    if found is None:
        lines.append(f"FAILED pytest ended with code {code} before it was done: see above")
    elif code and not found.failures:
        lines.append(f"FAILED pytest ended with code {code}: see above")
    return lines


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _spread(count: int) -> list[str]:
    """Return how pytest hands out tests; a single worker needs no second process."""
    return ["-n", str(count), "--dist", "loadscope", "--no-loadscope-reorder"] if count > 1 else ["-p", "no:xdist"]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class _Check:
    """A check that runs beside the tests."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.command, self._output = name, f"make {name}", folder / f"{name}.txt"
        # without the flags of the make that runs this: its job server is not for others
        environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                ["make", "--no-print-directory", name],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def passed(self) -> bool:
        """Wait for its end."""
        return self._process.wait() == 0

    def said(self) -> str:
        return self._output.read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
