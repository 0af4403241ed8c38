"""Meshes and partitions: what fits, what is refused, and islands of four devices in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from tests.pace import LONG_TEST_S

from diloco.core.run import tape
from diloco.errors import RunError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.service import MeshSettings
from diloco_learner.jax.mesh import default_partition, make_mesh, partition_of
from diloco_learner.replay import Redo

FOUR = {"data": 1, "fsdp": 4, "tensor": 1}
TWO_BY_TWO = {"data": 1, "fsdp": 2, "tensor": 2}


@pytest.mark.services
@pytest.mark.timeout(LONG_TEST_S)  # all of four_devices.py
def test_an_island_of_four_devices(tmp_path: Path) -> None:
    flags = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"  # which compiles in half the time
    flags += f" --xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_(_copy|_put|_mix|step)"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": flags, "PJRT_NPROC": "1", "DUMP": str(tmp_path)}
    file = Path(__file__).with_name("four_devices.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", str(file)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LONG_TEST_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 64), P("fsdp")),
        ((64, 4096), P(None, "fsdp")),
        ((128, 128), P("fsdp")),  # the first of equal ones
        ((4097, 64), P(None, "fsdp")),  # the largest that divides
        ((3, 64, 512), P(None, None, "fsdp")),
        ((4097, 63), P()),  # none does
        ((63, 64), P()),  # 4032 values: too small
        ((64, 64), P("fsdp")),
        ((), P()),
    ],
)
def test_a_tensor_is_split_along_its_largest_axis_that_divides(shape: tuple[int, ...], expected: P) -> None:
    assert default_partition(shape, FOUR) == expected


def test_a_task_says_how_a_tensor_is_split() -> None:
    for said in (P("fsdp", "tensor"), P(("fsdp", "tensor")), P(None, "tensor"), P()):
        assert partition_of("w", (128, 64), said, TWO_BY_TWO) == said
    assert partition_of("w", (128, 64), None, TWO_BY_TWO) == P("fsdp")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            P("model"),
            r"task: the partition of 'a/w' is .*'model'.*: it names 'model', which is not an axis of the mesh: name data, "
            r"fsdp, tensor or",
        ),
        (P("fsdp", "fsdp"), r"it names 'fsdp', more than once"),
        (P(None, None, "fsdp"), r"at most 2 axes, as the tensor of shape \(6, 8\) has"),
        ("fsdp", r"is 'fsdp', expected None or a jax.sharding.PartitionSpec"),
        (P("fsdp"), r"its axis 0 has 6 entries, which mesh.fsdp = 4 does not divide: name None for this axis"),
    ],
)
def test_a_partition_that_does_not_fit_is_named(said: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        partition_of("a/w", (6, 8), said, FOUR)


def test_a_partition_over_two_axes_that_does_not_fit_is_named() -> None:
    with pytest.raises(SettingsError, match=r"axis 1 has 6 entries, which mesh.fsdp = 2 and mesh.tensor = 2 does not divide"):
        partition_of("a/w", (8, 6), P(None, ("fsdp", "tensor")), TWO_BY_TWO)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"fsdp": 3},
            r"mesh\.data = 1, mesh\.fsdp = 3 and mesh\.tensor = 1 are 3 devices, and JAX gives .* 4 \(cpu\)",
        ),
        ({"data": 3}, r"mesh\.data = 3, mesh\.fsdp = 1 \(by default as many as are left\) .* are 3 devices"),
        ({"tensor": 8}, r"mesh\.tensor = 8 are 8 devices, .*JAX_NUM_CPU_DEVICES"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make_mesh(MeshSettings(**settings), 4 * jax.devices())


def test_one_device_is_no_mesh() -> None:
    assert make_mesh(MeshSettings(), jax.devices()[:1]) is None


def test_training_on_a_mesh_is_not_replayed_on_fewer_devices() -> None:
    with pytest.raises(RunError, match=r"a mesh of 4 devices, but there are 1 here: .*JAX_NUM_CPU_DEVICES=4"):
        Redo(run_settings(overrides={"task.layers": 1, "task.width": 16}), None, tape.Mesh(2, 2, 1), False)
