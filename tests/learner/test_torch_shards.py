"""Tensors of PyTorch that are spread over the ranks of a loop: each rank reads and writes what it has, and the first asks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.made.rank_processes import ranks

from diloco.core.tensors.boxes import Box
from diloco.core.tensors.fragments import FixedSpec, TensorSpec
from diloco.errors import SettingsError
from diloco_learner.run.loop_ranks import RankSaid, read_said, together

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from diloco_learner.pytorch.ranks import TorchRanks  # noqa: E402

HERE = Path(__file__).parent


@pytest.mark.tool
def test_rows_of_tensors_that_are_sharded_in_any_way_are_those_of_the_whole() -> None:
    found = ranks(4, str(HERE / "sharded_tensors.py"), "25")
    assert [code for code, _, _ in found] == [0] * 4, found[0][2]
    assert {out.splitlines()[-1] for _, out, _ in found} == {"25 right"}


def test_an_address_at_which_the_first_rank_cannot_listen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of no machine (RFC 5737)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SettingsError, match=r'MASTER_ADDR=192\.0\.2\.1: .* give diloco\.join address="HOST:PORT"'):
            TorchRanks(0, 2).address()
    finally:
        torch.distributed.destroy_process_group()


ALONE = """
import os, torch, torch.distributed as dist, diloco
if os.environ["RANK"] == "0":
    dist.init_process_group("gloo")
    diloco.join("nats://127.0.0.1:9", run="x", name="a", params=torch.nn.Linear(4, 4), tokens=1, within_s=0.5).__enter__()
else:
    dist.init_process_group("gloo")
    input()
"""


@pytest.mark.tool
def test_a_rank_that_does_not_come_is_named() -> None:
    code, _, said = ranks(2, "-c", ALONE)[0]
    assert code == 1
    assert re.search(r"IslandError: rank 0 of 2: rank 1 has not come to 'join' within 0\.5 s .*in all ranks", said)


OTHER_RUNS = """
import os, torch, torch.distributed as dist, diloco
dist.init_process_group("gloo")
rank = os.environ["RANK"]
diloco.join("nats://127.0.0.1:9", run="run-" + rank, name="a", params=torch.nn.Linear(4, 4), tokens=1).__enter__()
"""


@pytest.mark.tool
def test_ranks_that_join_other_runs_are_refused_before_they_look_for_them() -> None:
    for code, _, err in ranks(2, "-c", OTHER_RUNS):
        assert code == 1
        assert "SettingsError: join: rank 1 joins run 'run-1', but rank 0 joins run 'run-0': give all ranks the same" in err


def test_a_rank_of_another_version_is_named() -> None:
    older = msgspec.msgpack.encode({"address": "", "name": "a"})
    with pytest.raises(SettingsError, match=r"what rank 1 says cannot be read by diloco .* install the same version in all"):
        read_said([msgspec.msgpack.encode(said()), older])


def said(shape: tuple[int, ...] = (4, 2), digest: bytes = bytes(32), path: str = "w") -> RankSaid:
    return RankSaid(
        "run", "", "a", [TensorSpec(path, shape)], [FixedSpec("base", "float32", (1,), digest)], {path: Box.whole(shape)}
    )


def test_the_stages_of_a_pipeline_have_a_model_together() -> None:
    tensors, fixed = together([said(path="first"), said(path="second"), said(path="second")])
    assert [spec.path for spec in tensors] == ["first", "second"]
    assert [spec.path for spec in fixed] == ["base"]


def test_ranks_with_other_models_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"parameter 'w' has shape \(2, 4\) in rank 1, but \(4, 2\) in rank 0"):
        together([said(), said((2, 4))])
    with pytest.raises(SettingsError, match="frozen parameter 'base' has other values in rank 1 than in rank 0"):
        together([said(), said(digest=b"\1" * 32)])
    with pytest.raises(SettingsError, match="no rank has a parameter that requires a gradient"):
        together([RankSaid("run", "", "a", [], [], {})] * 2)


def flat() -> Any:
    kind = type("FullyShardedDataParallel", (torch.nn.Module,), {})
    kind.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    return kind()


def zero_3() -> Any:
    module = torch.nn.Linear(2, 2)
    module.weight.ds_id = 7
    return torch.nn.Sequential(module)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (flat, r"module .* is sharded by FSDP1 \(FullyShardedDataParallel\)"),
        (zero_3, "module '0' is sharded by DeepSpeed ZeRO-3"),
    ],
)
def test_wrappers_that_keep_parameters_in_another_form_are_refused_by_name(make: Callable[[], Any], named: str) -> None:
    from diloco_learner.pytorch.parameters import TorchParameters

    with pytest.raises(SettingsError, match=f"{named}, .*: shard it by FSDP2"):
        TorchParameters(make())
