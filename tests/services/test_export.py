"""``diloco export``: the weights of a run, as others read them, while it goes on and when it is over."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco, Launch
from tests.made.fragment_vectors import scatter
from tests.services.cluster import Cluster, small

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.errors import RunError, SettingsError
from diloco.service.rundir import RunDirectory
from diloco.weights_files import naming
from diloco.weights_files.naming import Names, Naming
from diloco_ops.reading import run_reader
from diloco_ops.weights.export import in_one_file, write
from diloco_ops.weights.orbax_weights import orbax
from diloco_ops.weights.weights_file import Precision, hugging_face, one_file

Tensors = Mapping[str, NDArray[np.float32]]

SPECS = [TensorSpec("embed", (50, 8), embedding=True), TensorSpec("w", (33, 4)), TensorSpec("b", (7,)), TensorSpec("scale", ())]


def written(path: Path, precision: str, values: Tensors, names: Mapping[str, str] | None = None) -> Path:
    fragment_map = build_map(SPECS, 5)
    named = Naming(fragment_map.tensors, Names(names or {}, "--names"))
    with one_file(path, named, precision, {"of": "a test"}) as weights:  # type: ignore[arg-type]
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


def fused() -> tuple[FragmentMap, Tensors, dict[str, Any]]:
    """A model of which each tensor lies in files of others in its own way; fragments cut all of them."""
    specs = [TensorSpec("qkv", (12, 5)), TensorSpec("kernel", (9, 4)), TensorSpec("layers", (3, 2, 6)), TensorSpec("b", (7,))]
    rng = np.random.default_rng(5)
    values = {spec.path: rng.normal(size=spec.shape).astype(np.float32) for spec in specs}
    names = {
        "qkv": {"rows": {"q.weight": 6, "k.weight": 2, "v.weight": 4}},
        "kernel": {"transposed": "dense.weight"},
        "layers": {"stacked": ["0.weight", "1.weight", "2.weight"]},
    }
    return build_map(specs, 7), values, names


def check_fused(read: Mapping[str, NDArray[Any]], values: Tensors) -> None:
    assert read.keys() == {"q.weight", "k.weight", "v.weight", "dense.weight", "0.weight", "1.weight", "2.weight", "b"}
    assert np.array_equal(np.concatenate([read[f"{name}.weight"] for name in "qkv"]), values["qkv"])
    assert np.array_equal(read["dense.weight"], values["kernel"].T)
    assert all(np.array_equal(read[f"{layer}.weight"], values["layers"][layer]) for layer in range(3))
    assert np.array_equal(read["b"], values["b"])


def test_fused_transposed_and_stacked_tensors_are_written_as_others_have_them(tmp_path: Path) -> None:
    fragment_map, values, names = fused()
    with one_file(tmp_path / "a", Naming(fragment_map.tensors, Names(names, "--names")), "float32", {}) as weights:
        for fragment in reversed(fragment_map.fragments):
            weights.put(fragment, fragment.gather(values))
    check_fused(load_file(tmp_path / "a"), values)


def test_a_folder_of_several_files_has_an_index_of_them(tmp_path: Path) -> None:
    fragment_map, values, names = fused()
    named = Naming(fragment_map.tensors, Names(names, "--names"))
    with hugging_face(tmp_path, named, "float32", {"format": "pt"}, {"model_type": "mine"}, shard_bytes=144) as weights:
        for fragment in fragment_map.fragments:
            weights.put(fragment, fragment.gather(values))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(array.size for array in values.values())
    # in the order of paths: 28 bytes; 144, which is more than the rest; three of 48; 120; 40 and 80
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00005.safetensors" for n in (1, 2, 3, 4, 5)]
    assert all(sum(a.nbytes for a in load_file(file).values()) <= 144 for file in tmp_path.glob("model-*"))
    check_fused({name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}, values)
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "mine"}


def orbax_s() -> Any:
    return pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed: make extras")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_orbax_checkpoint_is_restored_by_orbax(precision: Precision, tmp_path: Path) -> None:
    ocp = orbax_s()
    fragment_map, values, names = fused()
    named = Naming(fragment_map.tensors, Names(names | {"b": "layer/0/bias"}, "--names"))
    with orbax(tmp_path / "o", named, precision, {"diloco_run": "mine"}) as weights:
        for fragment in reversed(fragment_map.fragments):
            weights.put(fragment, fragment.gather(values))
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore((tmp_path / "o").absolute())
    read["b"] = read.pop("layer")["0"]["bias"]
    assert {str(array.dtype) for array in read.values()} == {precision}
    check_fused(read, {path: array.astype(read["b"].dtype) for path, array in values.items()})


def test_an_orbax_checkpoint_that_was_not_finished_is_refused_by_orbax(tmp_path: Path) -> None:
    orbax_s()
    fragment_map, values, names = fused()
    with orbax(tmp_path / "o", Naming(fragment_map.tensors, Names(names, "--names")), "float32", {}) as weights:
        for fragment in fragment_map.fragments[1:]:
            weights.put(fragment, fragment.gather(values))
    # in a process of its own: Orbax leaves the reads of its other arrays to themselves, and their errors to whatever runs next
    restore = "import sys, orbax.checkpoint as ocp\nwith ocp.StandardCheckpointer() as read: read.restore(sys.argv[1])"
    ended = subprocess.run([sys.executable, "-c", restore, str(tmp_path / "o")], capture_output=True, text=True, check=False)
    assert ended.returncode
    assert re.search("ValueError: .*missing", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"b": "qkv/b"}, "tensor 'qkv/b' would lie within another tensor"),
        ({"b": "a/b", "qkv": "a.b"}, "tensor 'a/b' would have the place of 'a.b'"),
    ],
)
def test_names_that_are_no_tree(names: dict[str, str], said: str, tmp_path: Path) -> None:
    orbax_s()
    with (
        pytest.raises(SettingsError, match=said),
        orbax(tmp_path / "o", Naming(fused()[0].tensors, Names(names, "")), "float32", {}),
    ):
        pass


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_tensor_that_the_log_has_turned_is_written_as_the_model_has_it(tmp_path: Path, precision: Precision) -> None:
    kinds = {"kernel": Arrangement((5, 6), (1,)), "experts": Arrangement((3, 4, 5), (0, 2)), "row": Arrangement((2, 3), ())}
    specs = [TensorSpec(path, kept.stored_shape, arrangement=kept) for path, kept in kinds.items()]
    model = {path: np.arange(math.prod(kept.shape), dtype=np.float32).reshape(kept.shape) for path, kept in kinds.items()}
    there = build_map(specs, 7)
    with one_file(tmp_path / "a", Naming(there.tensors, Names({}, "--names")), precision, {}) as weights:
        for fragment in there.fragments:
            weights.put(fragment, fragment.gather({path: kept.stored(model[path]) for path, kept in kinds.items()}))
    for path, values in load_file(tmp_path / "a").items():
        np.testing.assert_array_equal(np.asarray(values, np.float32), model[path])


def test_a_turned_matrix_may_be_transposed_and_others_keep_their_axes(tmp_path: Path) -> None:
    kept, cube = Arrangement((5, 6), (1,)), Arrangement((3, 4, 5), (0, 2))
    specs = [TensorSpec(path, each.stored_shape, arrangement=each) for path, each in (("kernel", kept), ("cube", cube))]
    model = {
        path: np.arange(math.prod(each.shape), dtype=np.float32).reshape(each.shape)
        for path, each in (("kernel", kept), ("cube", cube))
    }
    there = build_map(specs, 5)
    with one_file(
        tmp_path / "a", Naming(there.tensors, Names({"kernel": {"transposed": "w"}}, "--names")), "float32", {}
    ) as weights:
        for fragment in there.fragments:
            weights.put(fragment, fragment.gather({"kernel": kept.stored(model["kernel"]), "cube": cube.stored(model["cube"])}))
    read = load_file(tmp_path / "a")
    np.testing.assert_array_equal(read["w"], model["kernel"].T)
    np.testing.assert_array_equal(read["cube"], model["cube"])
    with pytest.raises(SettingsError, match=r"'cube' of shape \(3, 4, 5\): its entry is .*expected \"NAME\": its output axes"):
        Naming(there.tensors, Names({"cube": {"transposed": "w"}}, "--names"))


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
    with pytest.raises(RunError, match=r"tensor 'b': 3e\+38 exceeds the range of float16; export it as bfloat16"):
        written(tmp_path / "h", "float16", values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "--names: expected a JSON object"),
        ("{", "cannot be read"),
        ('{"w": 3}', r"tensor 'w' of shape \(33, 4\): its entry is 3, expected "),
        ('{"w": {"transposed": "x", "rows": 3}}', "its entry is "),
        ('{"b": {"transposed": "x"}}', "'b' of shape .7,.: only a tensor of two axes can be transposed"),
        ('{"w": {"rows": {"x": 30, "y": 2}}}', "its parts have 32 rows in all, expected 33"),
        ('{"b": {"stacked": ["x", "y"]}}', "2 are stacked in it, expected 7"),
        ('{"scale": {"stacked": ["x"]}}', "1 are stacked in it, expected an axis"),
        ('{\n "b": "b",\n "ww": "x"}', r"--names, line 3: the model has no tensor 'ww' \(did you mean 'w'\?\)"),
        ('{"b": "c", "w":\n"c"}', "--names, line 1: 'c' is the name of '.' and of '.'"),
        ('{"b": {"rows": {"b": 7}},\n\n"scale": ["}"]}', "--names, line 3: tensor 'scale' of shape"),
        ('{ "b" : "x" ,\n"b" : "y" }', "--names, line 2: 'b' is already in line 1"),
        ('{"w": "__metadata__"}', "the file's own table"),
    ],
)
def test_names_that_fit_no_model(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        Naming(SPECS, naming.read_names(path, "--names"))


def test_names_of_pytorch_are_those_of_its_state_dict() -> None:
    tensors = [
        TensorSpec("blocks/0/weight", (3, 2)),
        TensorSpec("state/norm/mean", (2,), state=True),
        TensorSpec("state/w", (2,)),
    ]
    named = naming.torch_names(tensors, "--names torch")
    assert Naming(tensors, named).shapes == {"blocks.0.weight": (3, 2), "norm.mean": (2,), "state.w": (2,)}
    twice = [TensorSpec("a/b", (2,)), TensorSpec("a.b", (2,))]
    with pytest.raises(SettingsError, match=r"--names torch: 'a\.b' is the name of 'a/b' and of 'a\.b'"):
        Naming(twice, naming.torch_names(twice, "--names torch"))


async def tensors_at(cluster: Cluster, version: int) -> Tensors:
    async with run_reader.opened(cluster.directory) as seen:
        found = seen.map.empty()
        for fragment in seen.map.fragments:
            replica = await seen.log.reader.state_at(fragment.index, version, seen.genesis, seen.genesis_check)
            scatter(fragment, replica.theta, found)
        return found


@pytest.mark.promise("weights are exported during a run and after it")
async def test_weights_of_a_run_that_goes_on_and_of_one_that_is_over(launch: Launch, diloco: Diloco, tmp_path: Path) -> None:
    cluster = launch(small(log__keep_keyframes=1000))
    cluster.learners(**cluster.answers_held)
    await cluster.begin(until_step=0)
    RunDirectory(cluster.directory, cluster.name, cluster.url, None, cluster.settings).save()
    await cluster.step_to_version(3)
    async with run_reader.opened(cluster.directory) as seen:
        with in_one_file(seen, tmp_path / "live.safetensors") as weights:
            versions = await write(seen, weights, None, 1)
    assert min(versions) >= 3
    cluster.gate.open()
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

    half = await asyncio.to_thread(diloco, "export", run, str(tmp_path / "half.safetensors"), "--version", "50%")
    [percent] = re.findall(r"merged tokens \((\d+\.\d) %\)$", half.out, re.MULTILINE)
    assert 50 <= float(percent) < 100

    for wrong, code, said in (
        (["--version", "101%"], 2, "--version '101%': expected at most 100%"),
        (["--version", "9999"], 5, "version 9999 is not in the log, whose newest version is"),
        (
            ["--version", "2", "--average", "4"],
            5,
            "a mean of 4 versions up to 2 would begin before version 0; ask for at most 3",
        ),
        (["--version", "newest"], 2, "--version 'newest': expected a number, a percentage such as 50%, or latest"),
    ):
        refused = await asyncio.to_thread(diloco, "export", run, str(tmp_path / "none.safetensors"), *wrong)
        assert refused.code == code, refused
        assert said in refused.err
    written = {path.name for path in tmp_path.glob("*safetensors*")}  # noqa: ASYNC240
    assert written == {file.name, at_3.name, mean.name, "half.safetensors", "live.safetensors"}
