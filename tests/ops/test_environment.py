"""The environment of services: the user's own values stay, and learners are dealt the machine's devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_ops.up import environment, pages
from diloco_ops.up.environment import (
    check_least,
    dealt,
    learner_environment,
    mesh_of,
    metrics_addresses,
    per_process,
    service_environment,
)

OURS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Begin with nothing set, on a machine without GPUs."""
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "DILOCO_MESH", "PJRT_NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    monkeypatch.setattr(environment, "NVIDIA_GPUS", tmp_path)
    monkeypatch.setattr(environment, "DEVICES", tmp_path / "dev")


def test_users_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_environment()["XLA_FLAGS"] == OURS
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/dumps --xla_cpu_multi_thread_eigen=true")
    monkeypatch.setenv("PJRT_NPROC", "8")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    values = learner_environment(0, 2, 2)
    assert values["XLA_FLAGS"] == "--xla_dump_to=/dumps --xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=1"
    assert (values["PJRT_NPROC"], values["JAX_NUM_CPU_DEVICES"]) == ("8", "4")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    values = learner_environment(0, 2, 2)
    assert values["XLA_FLAGS"] == f"--xla_force_host_platform_device_count=4 {OURS}"
    assert "JAX_NUM_CPU_DEVICES" not in values


def test_devices_of_a_learner_are_divided_by_its_processes() -> None:
    assert per_process(4, 2) == 2
    assert per_process(None, 2) is None
    with pytest.raises(SettingsError, match="--devices-per-learner 3: not divisible by 2 processes"):
        per_process(3, 2)


def test_a_learner_that_shrinks_has_a_replica_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mesh_of(4, replicas=2) == {"data": 2, "fsdp": 2}
    assert mesh_of(None, replicas=3) == {"data": 3}
    check_least(1, 2, 4)
    check_least(2, 3, None)
    with pytest.raises(SettingsError, match=r"--least-processes 3: expected 1 to 2, .* \(--processes-per-learner\)"):
        check_least(3, 2, 2)
    monkeypatch.setenv("DILOCO_MESH", '{"data": 2, "fsdp": 2}')
    check_least(2, 4, 4)
    with pytest.raises(SettingsError, match=r"--least-processes 1 of 4: mesh.data = 2 \(DILOCO_MESH\) cannot shrink so far"):
        check_least(1, 4, 4)


def test_a_cpu_is_divided_as_asked() -> None:
    assert learner_environment(0, 2, 3)["JAX_NUM_CPU_DEVICES"] == "3"
    assert "JAX_NUM_CPU_DEVICES" not in learner_environment(0, 2, None)


def test_learners_alone_are_handed_what_all_of_them_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_CHECKPOINT_S", "DILOCO_NAME"):
        monkeypatch.setenv(name, "7")
    assert not {name for name in service_environment() if name.startswith("DILOCO_")}
    assert {name for name in learner_environment(0, 1, None) if name.startswith("DILOCO_")} == {"DILOCO_CHECKPOINT_S"}


@pytest.mark.parametrize(
    ("gpus", "learners", "devices", "expected"),
    [
        (8, 4, 2, [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["0", "1"]]),  # the last is the evaluator's
        (8, 2, None, [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["0", "1", "2", "3"]]),
        (3, 2, None, [["0"], ["1"], ["2"]]),
        (1, 2, None, [["0"], ["0"], ["0"]]),
        (2, 3, 1, [["0"], ["1"], ["0"], ["1"]]),
        (2, 1, 4, [["0", "1"], ["0", "1"]]),  # too few: its mesh does not fit, which it says
    ],
)
def test_gpus_are_dealt(gpus: int, learners: int, devices: int | None, expected: list[list[str]]) -> None:
    names = [str(number) for number in range(gpus)]
    assert [dealt(names, index, learners, devices) for index in range(learners + 1)] == expected


def test_each_learner_sees_its_gpus_of_those_that_the_user_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in learner_environment(0, 2, None)
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    assert [learner_environment(index, 2, 1)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == ["0", "1", "2"]
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in learner_environment(0, 2, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert [learner_environment(index, 2, 1)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == ["5", "7", "5"]
    assert learner_environment(0, 2, 1)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"  # the evaluator shares one
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert learner_environment(0, 2, 1)["CUDA_VISIBLE_DEVICES"] == "5, 7"


def test_a_container_that_does_not_see_the_drivers_folder_has_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    environments = [learner_environment(index, 2, None) for index in range(3)]
    assert [values["CUDA_VISIBLE_DEVICES"] for values in environments] == ["0", "0", "0"]
    # or the first of them would take three quarters of the memory, and the others find none
    assert {values["XLA_PYTHON_CLIENT_PREALLOCATE"] for values in environments} == {"false"}


def test_the_mesh_is_the_users_or_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mesh_of(None) is None
    assert mesh_of(4) == {"fsdp": 4}
    monkeypatch.setenv("DILOCO_MESH", '{"data": 2}')
    assert mesh_of(None) == {"data": 2, "tensor": 1}
    assert mesh_of(4) == {"data": 2, "fsdp": 2, "tensor": 1}
    for text, says in (("2x2", "DILOCO_MESH = '2x2': expected JSON such as"), ('{"fsdb": 2}', "no setting 'fsdb'.*'fsdp'")):
        monkeypatch.setenv("DILOCO_MESH", text)
        with pytest.raises(SettingsError, match=says):
            mesh_of(4)


def test_each_service_of_up_has_a_port_of_its_own_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_METRICS_ADDRESS", raising=False)
    assert metrics_addresses(3) == []
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "127.0.0.1:0")
    assert metrics_addresses(2) == ["127.0.0.1:0", "127.0.0.1:0"]
    monkeypatch.setattr(pages, "is_free", lambda host, port: port != 9466)
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "[::1]:9464")
    assert metrics_addresses(2) == ["[::1]:9464", "[::1]:9465"]
    with pytest.raises(SettingsError, match="the run's 3 services take ports 9464 to 9466, and 9466 is in use"):
        metrics_addresses(3)
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "127.0.0.1:65535")
    with pytest.raises(SettingsError, match="2 services need a port each from there on, and 65535 is the last one"):
        metrics_addresses(2)
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "nowhere")
    with pytest.raises(SettingsError, match="expected HOST:PORT"):
        metrics_addresses(2)


def test_telemetry_is_handed_to_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_TELEMETRY", "{}")
    monkeypatch.setenv("DILOCO_METRICS_ADDRESS", "127.0.0.1:1")
    assert service_environment()["DILOCO_TELEMETRY"] == "{}"
    assert "DILOCO_METRICS_ADDRESS" not in service_environment()
