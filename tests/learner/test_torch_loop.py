"""The tensors of a training loop of one's own in PyTorch: what is taken over at a step, and what is refused."""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import diloco
from diloco.core.learner.delta import Baseline, EncodedOffer, Offered
from diloco.core.tensors.fragments import build_map, check_same_map
from diloco.core.tensors.quantise import quantise
from diloco.errors import AdmissionError, SettingsError
from diloco_learner.tensors import Tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")

from torch import nn  # noqa: E402

from diloco.settings.presets import run_settings  # noqa: E402
from diloco_learner.pytorch.island import TorchIsland  # noqa: E402
from diloco_learner.pytorch.parameters import TorchParameters  # noqa: E402


def linear(columns: int = 4) -> Any:
    return nn.Sequential(nn.Linear(columns, 4), nn.Linear(4, 4))


def adapted() -> Any:
    """A module whose first layer is frozen."""
    module = linear()
    module[0].requires_grad_(False)
    return module


class Joined:
    """Parameters that have joined, in a run of one fragment."""

    def __init__(self, params: Any, tensor: Any = None, count: int = 1) -> None:
        self.parameters = TorchParameters(params)
        said = None if tensor is None else types.SimpleNamespace(tensor=tensor)
        self.map = build_map(self.parameters.tensors(said), count, fixed=self.parameters.fixed())

    def values(self, fragment: int = 0) -> Any:
        return self.parameters.snapshot(self.map.fragments[fragment]).to_host()

    def write(self, value: float, fragment: int = 0) -> None:
        cut = self.map.fragments[fragment]
        self.parameters.write(cut, np.full(cut.size, value, np.float32))


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("has_error", [False, True])
def test_progress_is_kept_alike_wherever_a_tensor_lies(alpha: float, has_error: bool) -> None:
    rng = np.random.default_rng(0)
    values, base, theta, moved = (rng.normal(0, 1, 70 * 130).astype(np.float32) for _ in range(4))
    block = torch.from_numpy(values.copy().reshape(70, 130))
    strided = torch.from_numpy(values.reshape(70, 130).T.copy()).T
    for tensor in (block, strided):
        version = tensor._version
        joined = Joined({"a": tensor}, count=3)
        for fragment in joined.map.fragments:
            [piece] = fragment.pieces
            rows = slice(130 * piece.row_start, 130 * piece.row_stop)
            encoded = EncodedOffer(quantise(moved[rows], 4), quantise(0.1 * moved[rows], 8))
            error = quantise(0.01 * moved[rows], 8) if has_error else None
            reference = Baseline(base[rows], Offered(encoded, 4, error, 8))
            joined.parameters.write(fragment, theta[rows], reference, alpha)
        assert tensor._version > version  # a backward pass that needs the values before is refused
    assert not strided.is_contiguous()
    np.testing.assert_array_equal(block.numpy().view(np.uint32), strided.contiguous().numpy().view(np.uint32))
    assert not np.array_equal(block.numpy().reshape(-1), values)


def test_versions_too_fine_for_bfloat16_add_up() -> None:
    """Near 1 neighbours in bfloat16 are 2**-7 apart: each of these versions moves the value by a 32nd of that."""
    tensor = torch.ones(4, 4, dtype=torch.bfloat16)
    joined = Joined({"a": tensor})
    for number in range(1, 33):
        joined.write(1 + number * 2**-12)
        assert (joined.values() == 1 + number * 2**-12).all(), "what is offered is the version, and no rounded one"
    assert (tensor.float() == 1 + 2**-7).all()


def test_what_an_optimizer_adds_in_bfloat16_is_all_of_the_next_offer() -> None:
    tensor = torch.ones(4, 4, dtype=torch.bfloat16)
    joined = Joined({"a": tensor})
    joined.write(1 + 3 * 2**-10)  # nearer to 1 than to its neighbour
    assert (tensor == 1).all()
    tensor += 2**-7
    joined.parameters.take({"a": tensor})
    assert (joined.values() == np.float32(1 + 3 * 2**-10 + 2**-7)).all()
    fragment, size = joined.map.fragments[0], joined.map.fragments[0].size
    before, after = np.full(size, 1 + 3 * 2**-10, np.float32), np.full(size, 1.5 + 2**-12, np.float32)
    joined.parameters.write(fragment, after, before, 0.0)  # a version that keeps what was added since the one before
    assert (joined.values() == np.float32(1.5 + 2**-12 + 2**-7)).all()
    moved = tensor.clone()
    joined.parameters.take({"a": moved})
    assert (joined.values() == np.float32(1.5 + 2**-12 + 2**-7)).all(), "the rest goes along with a tensor that is swapped"


def paths(params: Any) -> list[str]:
    return [each.path for each in TorchParameters(params).tensors(None)]


def assign(module: Any) -> None:
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()}, assign=True)


def swap_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = 2 * parameter.data


def replace_parameter(module: Any) -> None:
    module[1].weight = nn.Parameter(2 * module[1].weight.detach())


def replace_layer(module: Any) -> None:
    module[1] = nn.Linear(4, 4)


def from_vector(module: Any) -> None:
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(module.parameters()).detach(), module.parameters())


def move(module: Any) -> None:
    module.to(torch.float64).to(torch.float32)  # as a move to another device: other memory behind the same parameters


@pytest.mark.parametrize("swap", [assign, swap_data, replace_parameter, replace_layer, from_vector, move])
def test_what_a_loop_swaps_is_read_and_written_from_the_next_step_on(swap: Callable[[Any], None]) -> None:
    module = linear()
    joined = Joined(module)
    swap(module)
    joined.parameters.take(module)
    named = sorted(module.named_parameters())
    assert joined.values().tolist() == [value for _, one in named for value in one.flatten().tolist()]
    joined.write(7)
    assert all(bool((one == 7).all()) for one in module.parameters())


def test_tensors_by_name_may_be_other_ones_at_each_step() -> None:
    joined = Joined({"a": torch.zeros(3), "b": torch.zeros(2)})
    after = {"a": torch.ones(3), "b": torch.ones(2)}
    joined.parameters.take(after)
    joined.write(7)
    assert after["a"].tolist() == [7] * 3
    after["b"].data = torch.zeros(2)
    joined.parameters.take(after)
    assert joined.values().tolist() == [7, 7, 7, 0, 0]


def test_averaged_weights_that_are_swapped_in_between_two_steps_leave_no_trace() -> None:
    module = linear()
    joined = Joined(module)
    trained = {name: one.data for name, one in module.named_parameters()}
    for one in module.parameters():  # for an evaluation, say
        one.data = torch.full_like(one, 100.0)
    for name, one in module.named_parameters():
        one.data = trained[name]
    joined.parameters.take(module)
    assert joined.values().max() < 100
    joined.write(7)
    assert all(bool((one == 7).all()) for one in module.parameters())


def unfreeze(module: Any) -> None:
    module[0].requires_grad_(True)


def another_base(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def one_more(module: Any) -> None:
    module.append(nn.Linear(4, 4))


def one_less(module: Any) -> None:
    del module[1]


def wider(module: Any) -> None:
    module[1].weight = nn.Parameter(torch.zeros(5, 4))


def rounded(module: Any) -> None:
    module.to(torch.bfloat16)


def tied(module: Any) -> None:
    module[1].bias = nn.Parameter(module[1].weight.detach()[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            unfreeze,
            "parameter '0/(bias|weight)' requires a gradient, but was frozen when this loop joined: join with it unfr",
        ),
        (another_base, "frozen parameter '0/weight' changed its values or type since this loop joined"),
        (one_more, "params differ from those at join: 2/bias, 2/weight"),
        (one_less, "params differ from those at join: 1/bias, 1/weight"),
        (wider, r"parameter '1/weight' has shape \(5, 4\), expected \(4, 4\) as at join"),
        (rounded, "parameter '1/weight' is bfloat16, expected float32 as at join"),
        (tied, "parameters '1/bias' and '1/weight' share memory"),
    ],
)
def test_a_change_that_no_run_can_follow_is_named_at_the_next_step(change: Callable[[Any], None], said: str) -> None:
    module = adapted()
    joined = Joined(module)
    change(module)
    with pytest.raises(SettingsError, match=said):
        joined.parameters.take(module)


def test_a_frozen_base_may_move_and_a_trained_tensor_may_be_frozen_later() -> None:
    module = adapted()
    joined = Joined(module)
    move(module)
    module[1].requires_grad_(False)
    joined.parameters.take(module)
    joined.write(7)
    assert bool((module[1].weight == 7).all())


def test_another_module_of_the_same_tensors_is_taken_over_and_one_on_another_base_is_not() -> None:
    module, other = adapted(), adapted()
    joined = Joined(module)
    with pytest.raises(SettingsError, match=r"frozen parameter '0/.*' changed its values or type since this loop joined"):
        joined.parameters.take(other)
    other.load_state_dict(module.state_dict())
    joined.parameters.take(other)
    joined.write(7)
    assert bool((other[1].weight == 7).all())
    assert not bool((module[1].weight == 7).any())


class Growing(nn.Module):  # type: ignore[misc]
    """A module with empty places that may be filled later."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layers, self.scales, self.child = nn.Linear(4, 4), nn.ModuleDict(), nn.ParameterDict(), nn.Module()
        self.register_buffer("unset", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def fill_layers(module: Any) -> None:
    module.layers["a"] = nn.Linear(4, 4)


def fill_scales(module: Any) -> None:
    module.scales["a"] = torch.zeros(2)


def fill_child(module: Any) -> None:
    module.child.scale = nn.Parameter(torch.zeros(2))


def fill_child_with_frozen(module: Any) -> None:
    module.child.scale = nn.Parameter(torch.zeros(2), requires_grad=False)


def new_buffer(module: Any) -> None:
    module.child.register_buffer("mean", torch.zeros(2))


def set_buffer(module: Any) -> None:
    module.unset = torch.zeros(2)


def fill_buffer(module: Any) -> None:
    module.empty = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fill_layers, "params differ from those at join: layers/a/bias, layers/a/weight"),
        (fill_scales, "params differ from those at join: scales/a: pass the same tensors"),
        (fill_child, "params differ from those at join: child/scale"),
        (fill_child_with_frozen, "params differ from those at join: child/scale"),
        (new_buffer, r"at join: state/child/mean: .* \(register a buffer that comes later with persistent=False\)"),
        (set_buffer, "params differ from those at join: state/unset"),
        (fill_buffer, "params differ from those at join: state/empty"),
    ],
)
def test_what_comes_into_an_empty_place_is_named_at_the_next_step(change: Callable[[Any], None], said: str) -> None:
    module = Growing()
    joined = Joined(module)
    change(module)
    with pytest.raises(SettingsError, match=said):
        joined.parameters.take(module)


def test_buffers_that_are_each_learner_s_own_may_be_replaced_and_come_later() -> None:
    module = Growing()
    joined = Joined(module)
    module.cache, module.count = torch.ones(2), module.count + 1
    module.unset = torch.zeros(2, dtype=torch.int64)
    module.register_buffer("later", torch.zeros(2), persistent=False)
    del module.empty
    joined.parameters.take(module)
    joined.write(7)
    assert bool((module.body.weight == 7).all())


X = torch.zeros(8, 4)


def beside(tensor: Any) -> Any:
    """A module with a frozen parameter beside the trained ones."""
    module = linear()
    module.register_parameter("base", nn.Parameter(tensor, requires_grad=False))
    return module


def buffered(tensor: Any) -> Any:
    module = linear()
    module.register_buffer("mean", tensor)
    return module


def alike(*, frozen: bool) -> Any:
    """A module of which a parameter has the path of a buffer."""
    module = buffered(torch.zeros(2))
    module.add_module("state", nn.ParameterDict({"mean": nn.Parameter(torch.zeros(2), requires_grad=not frozen)}))
    return module


def trained_and_frozen_alike() -> Any:
    module = nn.ModuleDict({"x/y": linear(), "x": nn.ModuleDict({"y": linear()})})
    module["x"].requires_grad_(False)
    return module


def made_for_inference(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()


def unusual(make: Callable[[], Any]) -> Any:
    """A tensor of a kind that PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def nested() -> Any:
    return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)])


def quantized() -> Any:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"a": X, "b": X}, "parameters 'a' and 'b' share memory, so that a version of one would overwrite the other"),
        ({"a": X, "b": X[:2]}, "parameters 'a' and 'b' share memory"),
        ({"a": X[:, :3], "b": X.T[2:]}, "parameters 'a' and 'b' share memory"),
        (
            {"a": torch.zeros(1, 4).expand(5, 4)},
            r"parameter 'a' has several elements in one place of memory, as after expand\(\)",
        ),
        (
            {"a/b.c": X, "a.b.c": X.clone()},
            "parameters 'a/b.c' and 'a.b.c' have the same path 'a/b/c' in the run's log",
        ),
        ({"_orig_mod.a": X, "a": X.clone()}, "parameters '_orig_mod.a' and 'a' have the same path 'a'"),
        (
            {"a": X.to(torch.float16)},
            r"'a' is float16, expected float32 or bfloat16: keep float32 masters \(module.float\(\), or",
        ),
        (
            {"a": X.to(torch.complex64)},
            r"'a' is complex64, expected float32 or bfloat16: pass torch.view_as_real\(parameter\) by name",
        ),
        ({"a": X.to(torch.int64)}, "'a' is int64, expected float32 or bfloat16: leave out what is not trained"),
        ({"a": X.to_sparse()}, "'a' is a Tensor of layout sparse_coo, expected a plain dense tensor"),
        ({"a": torch.zeros(3, device="meta")}, r"'a' is on the meta device, so it has no memory: call module.to_empty\(dev"),
        (nn.Sequential(nn.LazyLinear(4)), "'0/weight' has no shape yet: call the module once on a batch, and join then"),
        (
            beside(X.to_sparse()),
            "parameter 'base' is a Parameter of layout sparse_coo, expected a plain dense tensor: pass",
        ),
        (beside(unusual(torch.eye(2).to_sparse_csr)), "parameter 'base' is a Parameter of layout sparse_csr"),
        (
            beside(unusual(nested)),
            "parameter 'base' is a Parameter that is nested, expected",
        ),
        (beside(unusual(quantized)), "parameter 'base' is a Parameter that is quantized, expected"),
        (buffered(X.to_sparse()), "buffer 'mean' is a Tensor of layout sparse_coo, expected a plain dense tensor"),
        (buffered(torch.zeros(3, device="meta")), "buffer 'mean' is on the meta device"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)),
            "buffer '1/running_mean' has no shape yet: call the module once on a batch, and join then",
        ),
        (made_for_inference(linear), r"parameter '0/weight' was made under torch.inference_mode\(\), .*: make it outside, or"),
        ({"a": made_for_inference(X.clone)}, "parameter 'a' was made under torch.inference_mode"),
        (buffered(made_for_inference(X.clone)), "buffer 'mean' was made under torch.inference_mode"),
        (
            alike(frozen=False),
            "parameter 'state.mean' and buffer 'mean' have the same path 'state/mean' in the run's log.* register",
        ),
        (alike(frozen=True), "parameter 'state.mean' and buffer 'mean' have the same path 'state/mean' in the run's log"),
        (
            trained_and_frozen_alike(),
            "parameters 'x/y.0.weight' and 'x.y.0.weight' have the same path 'x/y/0/weight'",
        ),
        (linear().requires_grad_(False), "the module has no parameter that requires a gradient"),
    ],
)
def test_tensors_that_no_version_can_be_written_into_are_refused_by_name(params: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        diloco.join("nats://127.0.0.1:9", run="x", params=params, tokens=1)


def test_parts_of_one_tensor_that_have_no_value_in_common_are_apart() -> None:
    whole = torch.zeros(4, 6)
    joined = Joined({"q": whole[:, :3], "k": whole[:, 3:], "t": torch.zeros(3, 2).T})
    joined.write(7)
    assert bool((whole == 7).all())


def wrapped() -> dict[str, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = linear()
    return {
        "compiled": torch.compile(inner, backend="eager"),
        "checkpointed": nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4)),
        "in parallel": nn.DataParallel(inner),
        "compiled twice": torch.compile(nn.DataParallel(torch.compile(inner, backend="eager")), backend="eager"),
        "by name": dict(torch.compile(inner, backend="eager").named_parameters()),
    }


@pytest.mark.slow  # imports PyTorch's compiler
def test_a_wrapper_leaves_no_trace_in_the_log() -> None:
    class Slope:
        tokens_per_batch = 1

        def module(self) -> Any:
            return torch.compile(linear(), backend="eager")

        def loss(self, module: Any, batch: Any) -> Any:
            return module(torch.ones(4)).sum()

        def batches(self, *where: int) -> Any:
            return itertools.repeat(0)

    expected = paths(linear())
    assert {what: paths(params) for what, params in wrapped().items()} == dict.fromkeys(wrapped(), expected)
    island = TorchIsland(Slope(), run_settings(overrides={"fragments.count": 1, "shards": 1}))
    assert [each.path for each in island.specs()] == expected


def test_an_honest_submodule_may_be_called_as_a_wrapper_calls_its_own() -> None:
    assert paths(nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})) == ["module/weight"]
    assert paths({"module.weight": torch.zeros(2)}) == ["module/weight"]


def test_learners_on_another_frozen_base_are_not_admitted() -> None:
    torch.manual_seed(0)
    founder, same, other = (adapted() for _ in range(3))
    same.load_state_dict(founder.state_dict())
    theirs = Joined(founder).map
    assert [(each.path, each.dtype, each.shape) for each in theirs.fixed] == [
        ("0/bias", "float32", (4,)),
        ("0/weight", "float32", (4, 4)),
    ]
    check_same_map(Joined(same).map, theirs, "mine")
    with pytest.raises(
        AdmissionError, match=r"tensor '0/bias', which is not trained, differs from the founder's: .* same file"
    ):
        check_same_map(Joined(other).map, theirs, "mine")
    adapter = Joined({"1.weight": same[1].weight, "1.bias": same[1].bias}).map
    assert not adapter.fixed
    for ours, run_s, lacks in ((adapter, theirs, "this learner"), (theirs, adapter, "the run")):
        with pytest.raises(AdmissionError, match=f"{lacks} lacks tensor '0/bias', which is not trained: either all learners"):
            check_same_map(ours, run_s, "mine")


def test_a_frozen_base_is_hashed_in_its_own_type() -> None:
    import ml_dtypes

    from diloco.core.tensors.fragments import FixedSpec

    module = adapted()
    module[0].to(torch.bfloat16)
    values = module[0].weight.detach().float().numpy().astype(ml_dtypes.bfloat16)
    expected = FixedSpec.of("0/weight", values.dtype.name, values.shape, values.tobytes())  # as of a task of JAX
    assert expected in Joined(module).map.fixed


def test_a_frozen_view_is_hashed_by_its_values() -> None:
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert Joined(beside(turned)).map.fixed == Joined(beside(turned.resolve_conj().clone())).map.fixed


def test_a_task_with_a_frozen_tensor_that_cannot_be_compared_is_refused() -> None:
    task = types.SimpleNamespace(module=lambda: beside(X.to_sparse()), loss=None, batches=None, tokens_per_batch=1)
    island = TorchIsland(task, run_settings(overrides={"fragments.count": 1, "shards": 1}))
    with pytest.raises(SettingsError, match="parameter 'base', which is not trained, is a Tensor of layout sparse_coo"):
        island.fragments()


def test_a_module_that_is_not_finite_is_seen_beside_an_empty_tensor() -> None:
    assert TorchParameters({"a": torch.zeros(0), "b": torch.full((2,), torch.nan)}).sample().isnan()


def test_a_task_states_the_same_frozen_parameters_and_kernels_as_a_loop_with_its_module() -> None:
    class Convolved:
        tokens_per_batch = 1

        def module(self) -> Any:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
            module[2].requires_grad_(False)
            return module

        def loss(self, module: Any, batch: Any) -> Any:
            return module(torch.ones(1, 3, 4, 4)).sum()

        def batches(self, *where: int) -> Any:
            return itertools.repeat(0)

    task = Convolved()
    island = TorchIsland(task, run_settings(overrides={"fragments.count": 3, "shards": 1}))
    assert island.fragments().digest == Joined(task.module(), count=3).map.digest


def test_buffers_are_averaged_as_a_task_s_are() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    joined = Joined(module, count=2)
    assert [each.path for each in joined.map.tensors if each.state] == ["state/1/running_mean", "state/1/running_var"]
    [state] = [each.index for each in joined.map.fragments if each.state]
    module[1].running_mean.fill_(3)
    assert joined.values(state).tolist() == [3, 3, 3, 3, 1, 1, 1, 1]
    module.to(torch.float64).to(torch.float32)
    joined.parameters.take(module)
    joined.write(7, state)
    assert module[1].running_var.tolist() == [7] * 4
    module[1].running_mean = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(SettingsError, match="buffer '1/running_mean' is float64, expected float32, since learners average"):
        joined.parameters.take(module)


@pytest.mark.parametrize(
    ("module", "rows", "axis"),
    [
        (nn.Conv2d(3, 8, 3), (8, 27), 0),
        (nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), (8, 27), 0),
        (nn.Conv1d(3, 8, 2), (8, 6), 0),
        (nn.ConvTranspose2d(3, 8, 2), (8, 12), 1),
        (nn.ConvTranspose2d(6, 6, 2, groups=6), (6, 4), 0),
    ],
)
def test_rows_of_a_convolution_are_its_output_units(module: Any, rows: tuple[int, int], axis: int) -> None:
    joined = Joined(module, count=2)
    [weight] = [each for each in joined.map.tensors if each.path == "weight"]
    assert (weight.shape, weight.model_shape) == (rows, tuple(module.weight.shape))
    for fragment in joined.map.fragments:
        for piece in fragment.pieces:
            if piece.path == "weight":
                units = module.weight.detach().movedim(axis, 0)[piece.row_start : piece.row_stop].flatten().tolist()
                assert joined.values(fragment.index)[piece.offset : piece.offset + piece.size].tolist() == units
    before = module.weight.detach().clone()
    for fragment in joined.map.fragments:
        joined.parameters.write(fragment, joined.values(fragment.index) + 1)
    assert torch.equal(module.weight.detach(), before + 1)


def test_of_tensors_by_name_the_shape_says_what_they_are_or_the_loop_does() -> None:
    kernel = {"weight": torch.zeros(8, 3, 3, 3)}
    assert Joined(kernel).map.tensors[0].shape == (8, 3, 3, 3)
    said = Joined(kernel, lambda path, shape: Tensor(kind="matrix"))
    assert said.map.digest == Joined(nn.Conv2d(3, 8, 3, bias=False)).map.digest


@pytest.mark.parametrize("module", [linear(), nn.Embedding(5, 3), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))])
def test_maps_of_models_of_matrices_are_as_before(module: Any) -> None:
    named = {name: one.detach() for name, one in module.named_parameters()}
    assert Joined(module).map.digest == Joined(named).map.digest
    assert all(each.arrangement is None for each in Joined(module).map.tensors)
