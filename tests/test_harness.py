"""What `make test` and `make stress` say: the pace, the number of workers, each failure once with what to do about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import pace
from tests.harness import gate, outcomes, stress, workers
from tests.harness.gate import Target
from tests.harness.outcomes import Failure, Outcomes

ROOT = Path(__file__).parents[1]
MEBIBYTE = 1 << 20

FAILING = """
import subprocess, sys
import pytest

@pytest.fixture(scope="module")
def broken():
    raise RuntimeError("no server came up")

def test_first(broken): pass
def test_second(broken): pass
def test_third(broken): pass

def test_wrong(tmp_path):
    (tmp_path / "service.log").write_text("what the service said")
    assert 1 + 1 == 3

def test_right(tmp_path):
    (tmp_path / "large").write_text("gone when the test has passed")

def test_starts_a_process():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


def test_bounds_follow_the_pace_and_never_fall_below_the_usual() -> None:
    assert pace.factor(None) == pace.factor("") == 1.0
    assert pace.factor("2.5") == 2.5
    assert pace.factor("0.4") == 1.0  # a fast machine does not need shorter bounds
    for wrong in ("slow", "0", "-1", "nan", "1e9"):
        with pytest.raises(ValueError, match=f"DILOCO_TEST_PACE={wrong}: expected a number above 0"):
            pace.factor(wrong)


def machine(root: Path, available: int, **files: str) -> Path:
    """A root folder as of a machine with so much memory available, in MiB; control groups' files besides."""
    stated = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available * 1024} kB\n", **files}
    for name, text in stated.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_workers_follow_free_memory(tmp_path: Path) -> None:
    cores = workers.cores()
    assert workers.workers(2, machine(tmp_path / "large", 1_000_000)) == 2 * cores
    assert workers.workers(2, machine(tmp_path / "small", 2_000)) == 1
    assert workers.workers(2, machine(tmp_path / "tiny", 100)) == 1  # one there always is
    assert workers.workers(1, tmp_path / "unknown") == cores  # a system that states neither


@pytest.mark.parametrize(
    ("files", "free"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/box\n",
                "sys/fs/cgroup/box/memory.max": f"{2048 * MEBIBYTE}\n",
                "sys/fs/cgroup/box/memory.current": f"{1000 * MEBIBYTE}\n",
                "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {200 * MEBIBYTE}\nactive_file {52 * MEBIBYTE}\n",
            },
            1300,
            id="version 2: 2048 - 1000 MiB, and 252 MiB of files that can be dropped",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/box/inner\n",
                "sys/fs/cgroup/box/inner/memory.max": "max\n",
                "sys/fs/cgroup/box/memory.max": f"{512 * MEBIBYTE}\n",
                "sys/fs/cgroup/box/memory.current": f"{12 * MEBIBYTE}\n",
            },
            500,
            id="the limit of a group around it",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu:/\n4:memory:/box\n0::/\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{300 * MEBIBYTE}\n",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{100 * MEBIBYTE}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            200,
            id="version 1",
        ),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8000, id="no group with a limit"),
    ],
)
def test_control_groups_limit_memory(files: Mapping[str, str], free: int, tmp_path: Path) -> None:
    assert workers.free_bytes(machine(tmp_path, 8000, **files)) == free * MEBIBYTE


def test_a_quota_of_processors_counts(tmp_path: Path) -> None:
    group = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "100000 100000\n"}
    assert workers.cores(machine(tmp_path, 8000, **group)) == 1


@pytest.mark.tool
def test_a_failure_is_said_once_with_its_logs_and_how_to_repeat_it(tmp_path: Path) -> None:
    tests, written = tmp_path / "test_failing.py", tmp_path / "outcomes.json"
    tests.write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tests)]
    command += [f"--basetemp={tmp_path / 'logs'}", "-c", str(ROOT / "pyproject.toml")]
    environment = os.environ | {outcomes.VARIABLE: str(written), "DILOCO_TEST_PACE": "3"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    found = Outcomes.read(written)
    assert found is not None, ended.stdout + ended.stderr
    assert found.factor == 3
    # the fixture's one error is one failure, and the two other tests that want it say whose it is
    assert dict(found.counts) == {"passed": 2, "skipped": 2, "failed": 1, "errors": 2}
    assert [failure.test.rpartition("::")[2] for failure in found.failures] == [
        "test_first",
        "test_wrong",
        "test_starts_a_process",
    ]
    first, wrong, starts = found.failures
    assert "no server came up" in first.reason
    assert "its fixture failed in" in ended.stdout
    assert "assert (1 + 1) == 3" in wrong.reason
    assert (Path(wrong.logs) / "service.log").read_text() == "what the service said"
    assert "mark it `services`" in starts.reason
    assert not list((tmp_path / "logs").rglob("large"))  # what has passed leaves nothing
    last = ended.stdout.splitlines()[-13:-1]
    assert f"  logs:  {wrong.logs}" in last
    assert f"  again: .venv/bin/pytest '{wrong.test}'" in last


@pytest.mark.tool
def test_the_gate_s_last_lines_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    passing = tmp_path / "test_passing.py"
    passing.write_text("def test_right(): pass\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong(): assert 1 == 2\n")
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    monkeypatch.setenv("DILOCO_TEST_PACE", "2")
    monkeypatch.setenv("WORKERS", "1")
    monkeypatch.delenv(outcomes.VARIABLE, raising=False)
    monkeypatch.setitem(gate.TARGETS, "test", Target("", 1, options=options, tests=(str(passing),)))
    assert gate.main("test", []) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "1 worker; pace 2.00: tests wait 2.00 times as long as usual (DILOCO_TEST_PACE)"
    assert said[-1].startswith("make test: passed: 1 passed; 0:")
    assert said[-1].endswith("s of processor time")

    monkeypatch.setitem(gate.TARGETS, "test", Target("", 1, options=options, tests=(str(tmp_path),)))
    assert gate.main("test", []) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[-5].endswith("test_wrong.py::test_wrong")
    assert [line.split(":")[0].strip() for line in said[-4:-1]] == ["why", "logs", "again"]
    assert said[-1].startswith("make test: FAILED: 1 passed, 1 failed; ")


def test_modules_that_keep_no_promise_are_not_imported(tmp_path: Path) -> None:
    folder = tmp_path / "tests/services"
    folder.mkdir(parents=True)
    (folder / "test_kept.py").write_text('@pytest.mark.promise("it holds")\ndef test(): ...\n')
    (folder / "test_other.py").write_text("def test(): ...\n")
    (folder / "cluster.py").write_text("")
    assert gate.without_promise(tmp_path) == ["tests/services/test_other.py"]


def test_what_needs_an_optional_library_is_run_once_that_is_installed(tmp_path: Path) -> None:
    modules = tmp_path / "tests/learner"
    modules.mkdir(parents=True)
    (modules / "test_torch.py").write_text('torch = pytest.importorskip("torch")\n')
    (modules / "test_task.py").write_text("import pytest\n")
    assert gate.with_optional_libraries(tmp_path) == ("tests/learner/test_torch.py",)
    assert "tests/learner/test_torch_loop.py" in gate.with_optional_libraries()


@pytest.mark.tool
def test_stress_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, seeds = tmp_path / "stress.jsonl", list[int]()
    own = {"tests": "tests/test_x.py", "busy": 0, "commit": stress.commit()}
    failure = vars(Failure("tests/test_x.py::test_x", "/kept/logs", "assert 1 == 2"))

    def line(seed: int, failed: list[Any]) -> dict[str, Any]:
        made = {
            "seed": seed,
            "code": 1 if failed else 0,
            "wall_s": 1.0,
            "processor_s": 2.0,
            "pace": 1.0,
            "counts": {"passed": 5},
        }
        return made | {"failed": failed}

    before = [own | line(1, [failure]), own | {"commit": "another"} | line(1, []), own | {"busy": 4} | line(1, [])]
    file.write_text("".join(json.dumps(each) + "\n" for each in before) + '{"tests": "tests/te')  # the last one was cut off

    def run(selection: str, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return line(seed, [])

    monkeypatch.setattr(stress, "run", run)
    monkeypatch.setattr(
        sys, "argv", ["stress", "--tests", "tests/test_x.py", "--times", "3", "--busy", "0", "--file", str(file)]
    )
    assert stress.main() == 1
    assert seeds == [2, 3]
    said = capsys.readouterr().out.splitlines()
    assert said[-3:] == [
        "2 of 3 runs passed",
        "tests/test_x.py::test_x: failed in 1 of 3 runs",
        "  seed 1, logs /kept/logs: assert 1 == 2",
    ]
