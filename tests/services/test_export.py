"""``diloco export``: the weights of a run, as others read them, while it goes on and when it is over."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.services.cluster import Cluster, small, some_versions
from tests.services.conftest import Diloco, Launch
from tests.tensors import scatter

from diloco.core.arrangement import Arrangement
from diloco.core.fragments import TensorSpec, build_map
from diloco.errors import RunError, SettingsError
from diloco.service.rundir import RunDirectory
from diloco_ops import run_reader
from diloco_ops.export import write
from diloco_ops.weights_file import WeightsFile, names_in

Tensors = Mapping[str, NDArray[np.float32]]

SPECS = [TensorSpec("embed", (50, 8), embedding=True), TensorSpec("w", (33, 4)), TensorSpec("b", (7,)), TensorSpec("scale", ())]


def written(path: Path, precision: str, values: Tensors, names: Mapping[str, str] | None = None) -> Path:
    fragment_map = build_map(SPECS, 5)
    with WeightsFile(path, fragment_map.tensors, names or {}, precision, {"of": "a test"}) as weights:  # type: ignore[arg-type]
        for fragment in reversed(fragment_map.fragments):
            weights.put(fragment, fragment.gather(values))
    return path


def random_values() -> Tensors:
    rng = np.random.default_rng(4)
    return {spec.path: np.asarray(rng.normal(size=spec.shape), np.float32) for spec in SPECS}


def test_a_file_has_every_value_where_other_readers_look_for_it(tmp_path: Path) -> None:
    values = random_values()
    path = written(tmp_path / "a", "float32", values, {"w": "model.layer.weight"})
    read = load_file(path)
    assert read.keys() == {"embed", "model.layer.weight", "b", "scale"}
    for spec in SPECS:
        array = read["model.layer.weight" if spec.path == "w" else spec.path]
        assert array.shape == spec.shape
        assert np.array_equal(array, values[spec.path])
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"of": "a test"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_tensor_that_the_log_has_turned_is_written_as_the_model_has_it(tmp_path: Path, precision: str) -> None:
    kinds = {"kernel": Arrangement((5, 6), (1,)), "experts": Arrangement((3, 4, 5), (0, 2)), "row": Arrangement((2, 3), ())}
    specs = [TensorSpec(path, kept.stored_shape, arrangement=kept) for path, kept in kinds.items()]
    model = {path: np.arange(math.prod(kept.shape), dtype=np.float32).reshape(kept.shape) for path, kept in kinds.items()}
    there = build_map(specs, 7)
    with WeightsFile(tmp_path / "a", there.tensors, {}, precision, {}) as weights:  # type: ignore[arg-type]
        for fragment in there.fragments:
            weights.put(fragment, fragment.gather({path: kept.stored(model[path]) for path, kept in kinds.items()}))
    for path, values in load_file(tmp_path / "a").items():
        np.testing.assert_array_equal(np.asarray(values, np.float32), model[path])


def test_half_precision_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    values = dict(random_values())
    # 1 + 2^-8 is halfway between two bfloat16, 1 + 3 * 2^-8 too: to the even one, and to the one that is nearer
    values["b"] = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, -(1 + 2**-8), 0, 3e38, 1e-40], np.float32)
    data = written(tmp_path / "b", "bfloat16", values).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert (header["b"]["dtype"], header["b"]["shape"]) == ("BF16", [7])
    begin, end = (at + 8 + int.from_bytes(data[:8], "little") for at in header["b"]["data_offsets"])
    bits = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << np.uint32(16)
    expected = [1, 1 + 2**-6, 1 + 2**-7, -1, 0]
    assert bits.view(np.float32)[:5].tolist() == expected
    halves = load_file(written(tmp_path / "h", "float16", random_values()))
    assert np.array_equal(halves["w"], random_values()["w"].astype(np.float16))
    with pytest.raises(RunError, match=r"tensor 'b': 3e\+38 is more than float16 can be; export it as bfloat16"):
        written(tmp_path / "h", "float16", values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected an object"),
        ("{", "cannot be read"),
        ('{"w": 3}', "expected an object"),
        ('{"ww": "x"}', r"the model has no tensor 'ww' \(did you mean 'w'\?\)"),
        ('{"w": "b"}', "'b' is the name of '.' and of '.'"),
        ('{"w": "__metadata__"}', "the file's own table"),
    ],
)
def test_names_that_fit_no_model(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        names_in(path, SPECS)


async def tensors_at(cluster: Cluster, version: int) -> Tensors:
    async with run_reader.opened(cluster.directory) as seen:
        found = seen.map.empty()
        for fragment in seen.map.fragments:
            replica = await seen.log.reader.state_at(fragment.index, version, seen.genesis, seen.genesis_check)
            scatter(fragment, replica.theta, found)
        return found


async def test_weights_of_a_run_that_goes_on_and_of_one_that_is_over(launch: Launch, diloco: Diloco, tmp_path: Path) -> None:
    cluster = launch(small(log__keep_keyframes=1000))
    await cluster.begin()
    RunDirectory(cluster.directory, cluster.name, cluster.url, None, cluster.settings).save()
    with cluster.slowly():
        await some_versions(cluster)
        async with run_reader.opened(cluster.directory) as seen:
            versions = await write(seen, tmp_path / "live.safetensors", None, 1, "float32", {})
        assert min(versions) >= 1
    await cluster.ended()

    file, at_3, mean = tmp_path / "last.safetensors", tmp_path / "3.safetensors", tmp_path / "mean.safetensors"
    run = str(cluster.directory)
    ended = await asyncio.to_thread(diloco, "export", run, str(file))
    assert ended.code == 0, ended
    folded = await cluster.folded()
    expected = await cluster.tensors(folded)  # by the test's own fold
    read = load_file(file)
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[path], expected[path]) for path in expected)
    assert f"versions {min(len(f.versions) for f in folded)} to" in ended.out

    assert (await asyncio.to_thread(diloco, "export", run, str(at_3), "--version", "3")).code == 0
    assert (await asyncio.to_thread(diloco, "export", run, str(mean), "--version", "3", "--average", "3")).code == 0
    by_version = [await tensors_at(cluster, version) for version in (1, 2, 3)]
    for path, array in load_file(at_3).items():
        assert np.array_equal(array, by_version[2][path])
        np.testing.assert_allclose(load_file(mean)[path], np.mean([one[path] for one in by_version], axis=0), rtol=1e-6, atol=0)

    for wrong, code, said in (
        (["--version", "9999"], 5, "version 9999 is not in the log, which has those from 0 to"),
        (
            ["--version", "2", "--average", "4"],
            5,
            "a mean of 4 versions up to 2 would begin before version 0; ask for at most 3",
        ),
        (["--version", "newest"], 2, "--version 'newest': expected a number, or latest"),
    ):
        refused = await asyncio.to_thread(diloco, "export", run, str(tmp_path / "none.safetensors"), *wrong)
        assert refused.code == code, refused
        assert said in refused.err
    assert {path.name for path in tmp_path.glob("*safetensors*")} == {file.name, at_3.name, mean.name, "live.safetensors"}  # noqa: ASYNC240
