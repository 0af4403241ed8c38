"""The script for a day with an accelerator: it goes on whatever fails, and says so, and what was measured is on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.pace import DEADLINE_S

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = BENCH / "accelerator.py"
sys.path.insert(0, str(BENCH))

import accelerator  # noqa: E402
from accelerator import PARTS, Session  # noqa: E402
from harness import intervals  # noqa: E402
from on_device import child, page, trace  # noqa: E402
from on_device.child import Outcome  # noqa: E402
from on_device.plan import DRY, FULL, Plan, parameters  # noqa: E402
from on_device.trace import Work  # noqa: E402

GPU = {"version": "1", "platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "count": 1}
MACHINE = {"driver": "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1", "jax": GPU, "torch": GPU}
FULL_MEMORY = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


class Children:
    """In the place of child processes: an outcome for each part, and what they were given."""

    def __init__(self, **outcomes: list[Outcome] | Outcome) -> None:
        self._outcomes = {name.replace("_", "-"): its if isinstance(its, list) else [its] for name, its in outcomes.items()}
        self.begun: list[tuple[str, Plan, float]] = []

    def run(self, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Outcome:
        asked = dict(zip(command[2::2], command[3::2], strict=True))
        self.begun.append((asked["--part"], Plan.load(asked["--plan"]), limit_s))
        found = self._outcomes.get(asked["--part"], [Outcome("measured", result={"batch": 8, "limit_bytes": 10})])
        return found.pop(0) if len(found) > 1 else found[0]


def session(
    monkeypatch: pytest.MonkeyPatch, out: Path, children: Children, plan: Plan = FULL, minutes: float = 60.0
) -> dict[str, Any]:
    """Run all parts; return the results that were written."""
    monkeypatch.setattr(child, "run", children.run)
    running = Session(out, minutes, plan, {"parts": {}})
    for part in PARTS:
        running.run(part)
    written: dict[str, Any] = json.loads((out / "accelerator.json").read_bytes())
    return written


def test_a_part_that_fails_or_has_no_room_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children = Children(
        machine=Outcome("measured", result=MACHINE),
        jax_fit=Outcome("measured", result={"batch": 64, "limit_bytes": 80 << 30}),
        jax_pace=[Outcome("failed", FULL_MEMORY), Outcome("measured", result={"ratio": 0.99})],
        jax_device=Outcome("failed", "ModuleNotFoundError: No module named 'nats'", said="Traceback ..."),
        torch_two=Outcome("failed", "ended after 150 s, all that it had", result={"ratio": 1.0}),
        replay=Outcome("measured", result={"same_bits": False}),
    )
    written = session(monkeypatch, tmp_path, children)
    states = {name: (part["state"], part["why"], part["batch"]) for name, part in written["parts"].items()}
    assert list(states) == [part.name for part in PARTS]
    # the part whose device had no room was measured with half of the batch, as were all behind it
    assert states["jax-pace"] == ("measured", "", 32)
    assert [plan.batch for name, plan, _ in children.begun if name in ("jax-pace", "torch-pace")] == [64, 32, 32]
    assert states["jax-device"] == ("failed", "ModuleNotFoundError: No module named 'nats'", 32)
    assert (tmp_path / "jax-device.log").read_text() == "Traceback ..."
    assert written["parts"]["torch-two"]["result"] == {"ratio": 1.0}
    assert states["replay-deterministic"][0] == "measured"  # since replay had other bits
    assert children.begun[-1][1].device_bytes == 80 << 30
    text = (tmp_path / "accelerator.md").read_text()
    assert "| jax-device | failed | 0 | ModuleNotFoundError: No module named 'nats' |" in text
    assert "| tokens/s of a learner, of the bare loop | at least 98 % | 99.00 % | not measured |" in text


def test_what_is_missing_is_said_in_one_line_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = "driver 470.1"
    without = {"driver": old, "jax": GPU | {"platform": "cpu"}, "torch": GPU}
    children = Children(machine=Outcome("measured", result=without))
    parts = session(monkeypatch, tmp_path, children)["parts"]
    assert parts["jax-pace"]["why"] == parts["mixed"]["why"] == f"JAX has no GPU; the driver says: {old}"
    assert parts["replay-deterministic"]["state"] == "not measured"
    assert {name for name, _, _ in children.begun} == {
        "machine",
        "torch-pace",
        "torch-device",
        "torch-loop",
        "torch-two",
        "host",
        "torch-plain",
    }
    assert not children.begun[-1][1].dry
    half = {"driver": old, "jax": GPU, "torch": {"missing": "ModuleNotFoundError: No module named 'torch'"}}
    parts = session(monkeypatch, tmp_path, Children(machine=Outcome("measured", result=half)))["parts"]
    assert parts["torch-pace"]["why"] == "PyTorch is not there: ModuleNotFoundError: No module named 'torch'"
    assert parts["jax-pace"]["state"] == "measured"
    assert "PyTorch: ModuleNotFoundError: No module named 'torch'." in (tmp_path / "accelerator.md").read_text()


def test_without_any_gpu_everything_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    none = {"driver": "no driver: nvidia-smi", "jax": GPU | {"platform": "cpu"}, "torch": {"missing": "ImportError: libcuda"}}
    children = Children(machine=Outcome("measured", result=none))
    parts = session(monkeypatch, tmp_path, children)["parts"]
    assert parts["machine"]["why"].startswith("no GPU for JAX or PyTorch, so everything is small; the driver says: no driver")
    assert all(plan == DRY for name, plan, _ in children.begun if name != "machine")
    assert "**Everything is small" in (tmp_path / "accelerator.md").read_text()


def test_nothing_begins_that_cannot_end_in_its_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now_s)
    children = Children(machine=Outcome("measured", result=MACHINE))

    def run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Outcome:
        clock.now_s += min(limit_s, 40.0)  # a part that has had all of its time leaves what its end takes
        return Children.run(children, command, environment, limit_s)

    children.run = run  # type: ignore[method-assign]
    parts = session(monkeypatch, tmp_path, children, minutes=2.0)["parts"]
    # of 120 s: 40, 40, and what is left of 40 is less than the 45 of a pace, but enough for a part without a run
    assert [(name, limit_s) for name, _, limit_s in children.begun] == [("machine", 90), ("jax-fit", 74), ("jax-device", 34)]
    assert parts["jax-pace"]["why"] == "34 s are left, and it needs 45"
    assert parts["host"]["why"] == "0 s are left, and it needs 5"


def test_results_that_cannot_be_written_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "run", Children(machine=Outcome("measured", result=MACHINE)).run)
    session_ = Session(tmp_path / "gone", 6.0, FULL, {"parts": {}})
    session_.run(PARTS[0])
    said = capsys.readouterr()
    assert "accelerator.json cannot be written: No such file or directory: free some room; it goes on" in said.err
    assert json.loads(said.out.splitlines()[0])["parts"]["machine"]["result"] == MACHINE


def test_a_large_model_is_as_large_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = pytest.importorskip("on_device.runs")
    plan = Plan.load(FULL.dump())
    assert [round(parameters(layers, 2048) / 1e6) for layers in plan.large] == [1009, 505, 253]
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda _: SimpleNamespace(free=30 << 30))
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 30))
    layers, why = runs.choose(plan)
    assert layers == 10  # 505M parameters need 50 bytes each
    assert why.startswith("1,009,")
    assert "need 47.0 GiB of disk" in why
    assert why.endswith("30.0 GiB are free")
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with pytest.raises(SystemExit, match=r"no room for 253,\d+,\d+ parameters: .* GiB of memory, and 1.0 GiB are free"):
        runs.choose(plan)


def test_the_batch_leaves_room_for_all_that_share_the_device() -> None:
    loops = pytest.importorskip("on_device.loops")
    fixed = 6 * FULL.parameters
    # 100 bytes a sequence: 32 of them and what is there whatever the batch is
    assert loops.batch_that_fits(FULL, 1000, fixed + 3200, 1000 + fixed + 4900) == 48
    assert loops.batch_that_fits(FULL, 1000, fixed + 3200, 10.0) == 8
    assert loops.batch_that_fits(FULL, 1000, fixed + 3200, 1e12) == loops.MOST_BATCH


def test_copies_beside_kernels_and_idle_time() -> None:
    assert trace.union([(2, 3), (0, 1), (0.5, 1.5), (3, 4)]) == [(0, 1.5), (2, 4)]
    assert trace.covered_s([(0, 2), (3, 5)], [(1, 4)]) == 2
    work = [
        Work("fusion.1", 0.0, 4.0),
        Work("MemcpyD2H", 3.0, 5.0, "kind_src:device kind_dst:pageable size:21"),
        Work("MemcpyH2D", 4.5, 5.0, "pinned"),
        Work("fusion.2", 6.0, 10.0),
    ]
    found = trace.summary(work, 2)
    assert found is not None
    assert (found["step_s"], found["idle"], found["idle_s"]) == (5.0, pytest.approx(0.2), 1.0)
    assert (found["to_host_s"], found["to_host_beside_kernels"]) == (1.0, 0.5)
    assert found["to_host_about"] == "kind_src:device kind_dst:pageable size:21"
    assert (found["to_device_s"], found["to_device_beside_kernels"]) == (0.25, 0.0)
    assert trace.summary([], 2) is None


def test_a_trace_of_pytorch_is_read(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 500.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 900.0, "dur": 50.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "ts": 1200.0, "dur": 100.0},
        {"cat": "kernel", "name": "gone", "ts": 1.0},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    work = trace.of_torch(file)
    assert [each.name for each in work] == ["gemm", "Memcpy DtoH (Device -> Pageable)"]
    found = trace.summary(work, 1)
    assert found is not None
    assert found["to_host_s"] == pytest.approx(1e-4)
    assert found["to_host_beside_kernels"] == pytest.approx(1.0)


def test_a_ratio_of_times_has_an_interval() -> None:
    found = intervals.ratio([1.1, 0.9], [1.0, 1.0])
    # logarithms 0.09531 and -0.10536: mean -0.00503, error 12.706 * 0.14190 / sqrt(2)
    assert {name: round(value, 4) for name, value in found.items()} == {"ratio": 0.995, "low": 0.2781, "high": 3.5603}
    assert page.interval(found) == "0.995 (0.278 to 3.560)"
    assert page.interval(intervals.ratio([3.0], [2.0])) == "1.500"


def test_operations_of_the_model() -> None:
    assert parameters(3, 96) == 3 * (4 * 96**2 + 3 * 96 * 256 + 2 * 96) + 2 * 256 * 96 + 96
    assert round(FULL.parameters / 1e6) == 127
    plan = {"layers": 10, "width": 1024, "context": 512}
    a_token = 6 * FULL.parameters + 12 * 10 * 1024 * 512
    assert page.utilisation(plan, 0.5 * 989e12 / a_token, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)
    assert page.utilisation(plan, 1e6, "a device of tomorrow") is None
    assert page.peak_flops("NVIDIA H100 PCIe") == 756e12


@pytest.mark.tool  # in a process of its own: the parts import frameworks, which must not be in other tests' process
@pytest.mark.parametrize("name", [part.name for part in PARTS[1:]])
def test_each_part_has_a_function(name: str) -> None:
    module, function, arguments = accelerator.FUNCTIONS[name]
    if module == "torch_loop":
        pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
    program = f"import inspect, on_device.{module} as found; print(len(inspect.signature(found.{function}).parameters))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.stderr, done.stdout) == ("", f"{1 + len(arguments)}\n")


@pytest.mark.tool
def test_both_files_are_there_even_if_there_is_no_time(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry", "--minutes", "0.05", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parts = json.loads((tmp_path / "out" / "accelerator.json").read_bytes())["parts"]
    assert list(parts) == [part.name for part in PARTS]
    assert all(part["state"] == "not measured" for part in parts.values())
    assert "0 s are left, and it needs 9" in (tmp_path / "out" / "accelerator.md").read_text()


SERVES = """
import os, signal, sys
from on_device.child import serve
def work():
    yield {{"a": 1}}
    {body}
sys.exit(serve(work))
"""
KILLED = "killed by signal 9 (SIGKILL), as the system does where memory is short"
HANGS = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('{"a": 1}', flush=True)
other = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(600)
"""


@pytest.mark.tool
@pytest.mark.parametrize(
    ("text", "state", "result", "why", "full"),
    [
        (SERVES.format(body="print('noise of a library'); yield {'a': 2}"), "measured", {"a": 2}, "", False),
        (SERVES.format(body="raise ValueError('no\\nuse')"), "failed", {"a": 1}, "ValueError: no", False),
        (SERVES.format(body="raise SystemExit('half of it')"), "failed", {"a": 1}, "half of it", False),
        (SERVES.format(body=f"raise RuntimeError('{FULL_MEMORY}')"), "failed", {"a": 1}, f"RuntimeError: {FULL_MEMORY}", True),
        ("import nats_of_no_wheel", "failed", {}, "ModuleNotFoundError: No module named 'nats_of_no_wheel'", False),
        ("import os; os.kill(os.getpid(), 9)", "failed", {}, f"{KILLED}: it said nothing", False),
    ],
)  # fmt: skip
def test_a_child_says_in_one_line_why_it_failed(text: str, state: str, result: Any, why: str, full: bool) -> None:
    found = child.run([sys.executable, "-c", text], {**os.environ, "PYTHONPATH": str(BENCH)}, DEADLINE_S)
    assert (found.state, found.result, found.why, found.full) == (state, result, why, full)


@pytest.mark.tool
def test_a_child_that_hangs_is_ended_with_all_that_it_began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(child, "LEAVE_S", 0.1)
    found = child.run([sys.executable, "-c", HANGS, str(tmp_path / "pid")], os.environ, 2.0)
    assert (found.state, found.result, found.why) == ("failed", {"a": 1}, "ended after 2 s, which were all that it had")
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.services
def test_parts_are_measured_in_small_and_a_kill_in_the_middle_leaves_them(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry", "--minutes", "30", "--out", str(tmp_path), "--only", "host", "jax-device"]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline().startswith("machine: measured in ")
    begun = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert not psutil.wait_procs(begun, DEADLINE_S)[1]  # none outlives the script
    written = json.loads((tmp_path / "accelerator.json").read_bytes())
    assert list(written["parts"]) == ["machine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout
    parts = json.loads((tmp_path / "accelerator.json").read_bytes())["parts"]
    assert list(parts) == ["machine", "jax-device", "host"]
    assert parts["host"]["result"]["encode_s"] > 0
    assert parts["jax-device"]["result"]["fragments"] == DRY.interval
    assert parts["jax-device"]["result"]["trace"] is None  # a CPU has no streams
    assert "no device in the trace" in (tmp_path / "accelerator.md").read_text()


@pytest.mark.services
@pytest.mark.slow
def test_everything_is_measured_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry", "--minutes", "60", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * DEADLINE_S, check=False)
    parts = json.loads((tmp_path / "accelerator.json").read_bytes())["parts"]
    assert {name: part["why"] for name, part in parts.items() if part["state"] == "failed"} == {}, done.stderr
    assert done.returncode == 0
    assert parts["replay"]["result"]["same_bits"]
