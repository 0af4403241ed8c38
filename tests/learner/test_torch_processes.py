"""A torch task on several processes: they train the model of one, and what cannot be spread over them is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.rank_processes import ranks

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.service import MeshSettings, ProcessesSettings, TorchLearnerSettings

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
pytest.importorskip("torch", "2.15", reason="PyTorch is older than what a task on several processes needs")

from diloco_learner.pytorch.inner import matrices_of  # noqa: E402
from diloco_learner.pytorch.island import TorchIsland  # noqa: E402
from diloco_learner.pytorch.processes import batches  # noqa: E402
from diloco_learner.pytorch.processes.fake_mesh import examine_processes  # noqa: E402
from diloco_learner.pytorch.processes.process_mesh import check_version  # noqa: E402
from diloco_learner.pytorch.processes.together import mesh_sizes  # noqa: E402

PROGRAM = str(Path(__file__).with_name("spread_learner.py"))
CASES = {
    2: ("adamw", "muon", "uneven", "masked", "replicas", "tensor", "partly", "rounded", "own", "turned", "states", "normed"),
    4: ("adamw", "muon", "uneven", "masked", "hybrid", "tensor", "states"),
}


def test_an_older_pytorch_is_refused_for_several_processes_alone() -> None:
    for version in ("2.15.0+cpu", "2.15.1", "3.0.0a0"):
        check_version(version, 2)
    check_version("2.8.0+cpu", 1)
    with pytest.raises(SettingsError, match=r"needs PyTorch 2\.15 or newer, and 2\.14\.1 is installed here"):
        check_version("2.14.1", 2)


@pytest.mark.tool
@pytest.mark.parametrize("count", [2, 4])
def test_processes_together_train_the_model_of_one(count: int) -> None:
    for code, out, err in ranks(count, PROGRAM, *CASES[count]):
        assert code == 0, err
        assert out.split("\n")[:-1] == [f"{case} right" for case in CASES[count]]


class Layers:
    """Four layers, and a scalar, which stays whole."""

    tokens_per_batch = 8

    def module(self) -> Any:
        module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        module.scale = torch.nn.Parameter(torch.ones(()))
        return module

    def loss(self, module: Any, batch: Any) -> Any:
        return (module(torch.from_numpy(batch)) * module.scale).square().mean()

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return itertools.repeat(np.ones((8, 64), np.float32))


SETTINGS = run_settings(overrides={"fragments.count": 2, "shards": 1, "task.name": "own:make", "inner.optimizer": "adamw"})


def examined(task: Any, count: int = 4, rows: int = 8, **mesh: int) -> Any:
    return examine_processes(task, SETTINGS, MeshSettings(**mesh), count, np.ones((rows, 64), np.float32))


def test_a_check_on_a_fake_mesh_says_what_a_process_has() -> None:
    found = examined(Layers())
    values = 4 * (64 * 64 + 64) // 4 + 1  # a quarter of all layers, and the scalar
    assert found.parameters_bytes == 4 * values
    assert found.optimizer_bytes == 2 * 4 * values + 4 * 9  # AdamW's two moments, and a count for each of 9 tensors
    assert (found.rows, found.batch_rows, found.whole) == (2, 8, ["scale"])
    assert found.mesh == {"data": 1, "fsdp": 4, "tensor": 1}
    assert not torch.distributed.is_initialized()


def test_of_replicas_each_process_has_all() -> None:
    found = examined(Layers(), data=4)
    assert found.parameters_bytes == 4 * (4 * (64 * 64 + 64) + 1)
    assert len(found.whole) == 9


class _Nothing(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        return None


class _Fails(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        return module[7]


class _Renamed(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        return torch.nn.Sequential(module)


class _Reshaped(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        module[0].weight = torch.nn.Parameter(torch.zeros(32, 64))
        return module


class _Added(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        module.more = torch.nn.Parameter(torch.zeros(3))
        return module


class _Flat(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        kind = type("FullyShardedDataParallel", (torch.nn.Module,), {})
        kind.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
        wrapper = kind()
        wrapper.inner = module
        return wrapper


class _TensorOverRows(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        return parallelize_module(module, mesh, {"0": ColwiseParallel()})


class _HalfOfTheRows(Layers):
    def parallelize(self, module: Any, mesh: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        return fully_shard(module, mesh=mesh["fsdp"], ignored_params={module.scale})


class _Layers(Layers):
    def loss(self, module: Any, batch: Any) -> Any:
        return torch.nn.functional.linear(torch.from_numpy(batch), module[0].weight).square().mean()


class _SeveralDevices(Layers):
    def module(self) -> Any:
        module = super().module()
        module[0].to("meta")
        return module


@pytest.mark.parametrize(
    ("task", "mesh", "said"),
    [
        (_Nothing, {}, r"parallelize\(\) returned a NoneType, expected the module.*test_torch_processes\.py, line \d+"),
        (_Fails, {}, r"IndexError: index 7 is out of range .*test_torch_processes\.py, line \d+"),
        (_Renamed, {}, r"parallelize\(\) left the module without parameter '\S+': keep the names .*line \d+"),
        (
            _Reshaped,
            {},
            r"parallelize\(\) made parameter '0.weight' float32 \[32, 64\], but module\(\) made it float32 \[64, 64\]",
        ),
        (_Added, {}, r"parallelize\(\) added parameter 'more': make all parameters in module\(\)"),
        (_Flat, {}, r"is sharded by FSDP1 \(FullyShardedDataParallel\)"),
        (_TensorOverRows, {}, r"spread parameter '0\.\w+' over processes that take different rows .* not by fully_shard"),
        (_HalfOfTheRows, {"data": 2}, r"spread parameter '\S+' over 2 of the 4 processes that take rows of a batch"),
        (_Layers, {}, r"loss\(\) call the module, or a block that is sharded.*test_torch_processes\.py, line \d+"),
        (_SeveralDevices, {}, r"the module is on several devices \(cpu, meta\), and each process of a learner has one"),
        (Layers, {"tensor": 2}, r"mesh.tensor = 2: the task has no parallelize\(module, mesh\) that uses these processes"),
        (Layers, {"data": 3}, r"mesh.data = 3, mesh.fsdp = 1, mesh.tensor = 1 are 3 processes, and a torch learner of 4"),
    ],
)
def test_what_cannot_be_spread_is_refused(task: type[Layers], mesh: dict[str, int], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        examined(task(), **mesh)
    assert not torch.distributed.is_initialized()


def test_more_processes_than_rows_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"a batch has 3 rows .*, and 4 processes of the learner each take some: make batches"
    ):
        examined(Layers(), rows=3)


def learner(**values: Any) -> TorchLearnerSettings:
    processes = ProcessesSettings(count=4, address="127.0.0.1:1", **values.pop("processes", {}))
    return TorchLearnerSettings(name="ann", processes=processes, **values)


def test_settings_of_a_torch_learner_of_several() -> None:
    assert mesh_sizes(learner()) == {"data": 1, "fsdp": 4, "tensor": 1}
    assert mesh_sizes(learner(mesh=MeshSettings(data=2))) == {"data": 2, "fsdp": 2, "tensor": 1}
    with pytest.raises(SettingsError, match="an evaluator is one process"):
        mesh_sizes(learner(role="evaluator"))
    with pytest.raises(SettingsError, match=re.escape("processes.least = 2: a torch learner has a fixed number")):
        mesh_sizes(learner(processes={"least": 2}))


class Tied(Layers):
    """An embedding that a head is tied to, another head, and a matrix."""

    def module(self) -> Any:
        module = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 8, bias=False), "words": torch.nn.Embedding(8, 4)})
        module["head"].weight = module["words"].weight
        module["other"] = torch.nn.Linear(4, 8, bias=False)
        return module


class Said(Tied):
    def matrices(self, path: str) -> int:
        return 1


@pytest.mark.parametrize(("task", "matrices"), [(Tied, {"other/weight"}), (Said, {"head/weight", "other/weight"})])
def test_embeddings_and_heads_tied_to_them_are_no_matrices_unless_the_task_says_so(task: Any, matrices: set[str]) -> None:
    model = TorchIsland(task(), run_settings(overrides={"fragments.count": 1, "shards": 1}))
    found = {spec.path for spec in model.specs() if matrices_of(task(), spec.path, spec.shape, model.tables)}
    assert found == matrices


def test_rows_are_cut_from_all_arrays_that_have_them() -> None:
    batch: dict[str, Any] = {"x": np.arange(12).reshape(6, 2), "pair": (torch.arange(6), np.ones(3)), "rate": 0.5}
    assert batches.rows_of(object(), batch) == 6
    found = batches.cut(batch, 6, range(2, 4))
    np.testing.assert_array_equal(found["x"], [[4, 5], [6, 7]])
    assert found["pair"][0].tolist() == [2, 3]
    assert (found["pair"][1].tolist(), found["rate"]) == ([1, 1, 1], 0.5)
    assert batch["x"].shape == (6, 2), "the batch itself stays whole"
