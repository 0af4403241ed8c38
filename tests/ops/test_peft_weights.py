"""A run's tensors in the files of peft: their names, and what no file of peft can have."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco_ops.weights.peft_weights import adapter_naming

CONFIG = {"peft_type": "LORA", "r": 2, "target_modules": ["q"], "modules_to_save": None, "bias": "none", "rank_pattern": {}}
A, B = "base_model/model/q/lora_A/default/weight", "base_model/model/q/lora_B/default/weight"


def specs(**more: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(A, (2, 4)), TensorSpec(B, (3, 2)), *(TensorSpec(path, shape) for path, shape in more.items())]


class Net:
    """Makes a module of every kind that LoRA adapts, with norms and a head beside them."""

    def __call__(self, torch: Any) -> Any:
        nn = torch.nn
        layers = {"embed": nn.Embedding(7, 6), "q": nn.Linear(6, 6), "conv": nn.Conv1d(6, 5, 3), "norm": nn.LayerNorm(5)}
        return nn.ModuleDict(layers | {"head": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))})


@pytest.mark.filterwarnings("ignore:Adapter .* have invalid shape")  # peft takes the bias of lora_B for a shard
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q"]},
        {"target_modules": ["q", "embed", "conv"], "modules_to_save": ["head"]},
        {"target_modules": "q|conv", "use_dora": True},
        {"target_modules": ["q"], "bias": "all", "lora_bias": True},
        {"target_modules": ["q", "conv"], "rank_pattern": {"conv": 5}, "bias": "lora_only"},
        {"target_modules": "all-linear"},
    ],
)
def test_names_are_those_that_peft_itself_gives(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
    from diloco_learner.pytorch.parameters import TorchParameters

    config = peft.LoraConfig(r=2, **options)
    model = peft.get_peft_model(Net()(torch), config, adapter_name="mine")
    tensors = TorchParameters(model).tensors(None)
    naming = adapter_naming(tensors, config.to_dict() | {"target_modules": options["target_modules"]}, "--config c")
    expected = peft.get_peft_model_state_dict(model, adapter_name="mine")
    assert naming.shapes == {name: tuple(value.shape) for name, value in expected.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (
            specs(),
            {"peft_type": "IA3"},
            "--config c: peft_type is 'IA3', expected 'LORA': for another kind export it with --names",
        ),
        (specs(), {"peft_type": None}, "--config c: peft_type is None"),
        (specs(), {"r": 4}, "--config c: r is 4, but '.*lora_A/default/weight' of the run has the rank 2"),
        (specs(), {"target_modules": ["v"]}, "--config c: target_modules does not have 'q', whose '.*' the run trains"),
        (specs(), {"target_modules": "v.*"}, "--config c: target_modules does not have 'q'"),
        (specs(), {"target_modules": "*"}, r"--config c: target_modules is '\*', which is not a regular expression"),
        (specs(), {"target_modules": None}, "--config c: target_modules does not have 'q'"),
        (specs(), {"target_modules": 3, "rank_pattern": 3}, "--config c: target_modules does not have 'q'"),
        (
            specs(**{"base_model/model/q/base_layer/bias": (3,)}),
            {},
            "--config c: bias is 'none', but the run trains 'base_model",
        ),
        (
            specs(**{"base_model/model/norm/weight": (3,)}),
            {},
            "the run has 'base_model.model.norm.weight', which is not a tensor",
        ),
        (
            specs(**{"base_model/model/head/modules_to_save/default/weight": (3,)}),
            {},
            "--config c: modules_to_save does not have 'head'",
        ),
        (
            specs(**{A.replace("default", "other"): (2, 4)}),
            {},
            "the run trains the adapters default, other, expected one adapter",
        ),
        ([TensorSpec("a/bias", (3,))], {"bias": "all"}, "the run trains no adapter: its first tensor is 'a/bias'"),
    ],
)
def test_what_peft_would_not_load_is_refused(tensors: list[TensorSpec], config: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        adapter_naming(tensors, CONFIG | config, "--config c")


def test_buffers_of_the_base_have_no_place_in_an_adapter() -> None:
    with pytest.raises(
        SettingsError, match=r"the run has 'base_model.model.norm.running_mean', which is not a tensor of a LoRA adapter"
    ):
        adapter_naming([*specs(), TensorSpec("state/base_model/model/norm/running_mean", (3,), state=True)], CONFIG, "")
