"""``diloco doctor`` without options: this machine, a line for each thing that a run needs or may use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_ops.doctor import doctor_command as command
from diloco_ops.doctor import machine, this_machine
from diloco_ops.doctor.check import Check
from diloco_ops.doctor.machine import WritableFolder

GB = 10**9


def verdict(check: Check) -> tuple[str, str]:
    return check.verdict, check.text()


@pytest.mark.tool
def test_a_machine_without_a_config_is_examined_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("DILOCO_NAME", raising=False)
    assert command.doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    needed = ["python", "diloco", "cores", "memory", "disk", "cache", "open files", "ports", "gpu", "broker"]
    assert [line[8:24].strip() for line in lines[:-1]] == [*needed, *this_machine.OPTIONAL]
    assert lines[-1].endswith("skipped")
    assert " 0 failed, " in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    command.doctor(json_=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name", "verdict", "found", "needed", "remedy"} == found[0].keys()


def test_a_service_that_the_environment_names_is_examined_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "Not A Name")
    with pytest.raises(SettingsError, match="name = 'Not A Name'"):
        command.doctor()


def test_python_and_services() -> None:
    assert this_machine.python((3, 11, 4)).verdict == "ok"
    assert this_machine.python((3, 10, 9)).verdict == "failed"
    there = dict.fromkeys(this_machine.MODULES, True)
    assert this_machine.services(there).found.endswith("; learner, syncer, coordinator, lab")
    assert this_machine.services(there | {"diloco_lab": False}).verdict == "ok"
    assert verdict(this_machine.services(there | {"diloco_syncer": False})) == (
        "failed", f"{this_machine.services(there | {'diloco_syncer': False}).found}; pip install 'diloco[all]'"
    )  # fmt: skip
    assert "not installed: syncer" in this_machine.services(there | {"diloco_syncer": False}).found


def test_cores_and_memory() -> None:
    assert this_machine.cores(2.0, 4).verdict == "ok"
    assert verdict(this_machine.cores(1.5, 4)) == (
        "warning",
        "1.5 for 4 learners by default; needed: 2 or more; a run works, slowly; take fewer learners: diloco up --learners 2",
    )
    # a learner and the evaluator 0.45 GB each, two syncers and a coordinator 0.25 GB each: 4 * 0.45 + 0.45 + 0.75 = 3
    assert this_machine.memory(3 * GB, 4).verdict == "ok"
    assert this_machine.memory(3 * GB - 1, 4).remedy == "take fewer learners: diloco up --learners 3"
    assert this_machine.memory(GB, 4).verdict == "failed"
    assert this_machine.memory(None, 4).verdict == "skipped"


def test_disk_and_ports() -> None:
    assert this_machine.disk(Path("/runs"), WritableFolder(GB, 2 * GB, 0.004)).found == "/runs: 1.00 GB free, a sync takes 4 ms"
    assert this_machine.disk(Path("/runs"), WritableFolder(GB // 3, 2 * GB, 0.004)).verdict == "failed"
    assert this_machine.disk(Path("/runs"), WritableFolder(GB, 2 * GB, 0.2)).verdict == "warning"
    assert this_machine.ports("", "").verdict == "ok"
    assert "127.0.0.1:8420 cannot be opened (Address already in use)" in this_machine.ports("", "Address already in use").found
    assert this_machine.ports("Operation not permitted", "").verdict == "failed"


def test_a_gpu_needs_a_plugin_of_jax() -> None:
    assert this_machine.gpu([], [], "0.10.2").verdict == "skipped"
    assert verdict(this_machine.gpu(["0", "1"], [], "0.10.2")) == (
        "warning", "2, which JAX 0.10.2 cannot use; needed: JAX's plugin for CUDA; pip install 'diloco[cuda12]'"
    )  # fmt: skip
    assert this_machine.gpu(["0"], ["jax-cuda12-plugin"], "0.10.2").found == "1, used by JAX 0.10.2, jax-cuda12-plugin"


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("nats-server: v2.15.1\n", ("ok", "v2.15.1")),
        ("nats-server: v2.14.0-RC.1\n", ("ok", "v2.14.0-RC.1")),
        ("nats-server: v2.10.3\n", ("failed", "v2.10.3")),
        ("", ("failed", "no version")),
    ],
)
def test_broker_is_new_enough(stated: str, expected: tuple[str, str]) -> None:
    check = this_machine.broker(Path("/bin/nats-server"), stated)
    assert (check.verdict, check.found) == (expected[0], f"/bin/nats-server: {expected[1]}")


def test_cores_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert machine.cores(tmp_path) == 4.0
    for quota, cores in (("max 100000", 4.0), ("150000 100000", 1.5), ("800000 100000", 4.0), ("rubbish", 4.0)):
        (tmp_path / "cpu.max").write_text(quota)
        assert machine.cores(tmp_path) == cores
