"""A model of PyTorch as a learner's: against the same model in JAX, and what a trainer and a checkpoint want of it."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.trainer_script import FINISHED, NOTHING, TRAINER_RULES, train
from tests.pace import DEADLINE_S

from diloco.core.learner.delta import VersionWrite
from diloco.errors import RunError, SettingsError
from diloco.member.arrays import Boundary
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner.jax.island import Island
from diloco_learner.task import GptTask

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")

from diloco_learner.pytorch import Aux  # noqa: E402
from diloco_learner.pytorch.inner import TorchAdamW  # noqa: E402
from diloco_learner.pytorch.island import TorchIsland, spare_bytes  # noqa: E402
from diloco_learner.pytorch.task import checked, load_task  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {"task.layers": 1, "task.width": 32, "task.heads": 2, "task.context": 16, "task.batch": 4, "fragments.count": 3}
PLAIN: RunSettings = run_settings(
    overrides={"inner.optimizer": "adamw", "inner.weight_decay": 0.0, "inner.clip_norm": 1e6, "fragments.count": 1, "shards": 1}
)


class Slope:
    """Loss: the sum of the parameters times the batch, so that AdamW takes steps of the learning rate, all down."""

    tokens_per_batch = 7
    dtype = torch.float32

    def module(self) -> Any:
        module = torch.nn.Module()
        module.x = torch.nn.Parameter(torch.zeros(4, dtype=self.dtype))
        return module

    def loss(self, module: Any, batch: Any) -> Any:
        return module.x.float().sum() * float(batch)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return itertools.repeat(np.float32(1))


def island(task: Any = None, settings: RunSettings = PLAIN) -> TorchIsland:
    made = TorchIsland(Slope() if task is None else task, settings)
    made.rehearse(np.float32(1))
    return made


def values(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([model.read(fragment).to_host() for fragment in model.fragments().fragments])


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_steps_are_those_of_the_same_model_in_jax(monkeypatch: pytest.MonkeyPatch, optimizer: str, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "text").write_text("".join(f"{number} squared is {number**2}.\n" for number in range(4000)))
    settings = run_settings(overrides=TINY | {"inner.optimizer": optimizer})
    named = settings.task.model_copy(update={"name": "torch_gpt:make"})
    task = GptTask(settings.task, str(tmp_path / "text"))
    ours, theirs = TorchIsland(load_task(named, str(tmp_path / "text")), settings), Island(task, settings)
    assert ours.fragments().digest == theirs.fragments().digest
    batches = task.batches(0, settings.learners, settings.seed, 0)
    ours.rehearse(next(batches))
    for fragment in theirs.fragments().fragments:
        ours.write(fragment, theirs.read(fragment).to_host())
    for number, batch in enumerate(itertools.islice(batches, 4)):
        loss = ours.begin_step(batch, 0.01, (0, number)).wait()
        assert loss == pytest.approx(theirs.step(batch, 0.01, (0, number)).wait(), abs=2e-5)
    np.testing.assert_allclose(values(ours), values(theirs), atol=5e-5)


def test_adamw_takes_the_steps_of_torch_s_own_to_the_bit() -> None:
    draw = np.random.default_rng(0).normal
    begun, gradients = draw(size=(3, 5, 2)).astype(np.float32), draw(size=(4, 3, 5, 2)).astype(np.float32)
    ours, theirs = ([torch.nn.Parameter(torch.from_numpy(one.copy())) for one in begun] for _ in range(2))
    groups = [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}]
    pair = (
        TorchAdamW([(ours[:2], 0.1), (ours[2:], 0.0)], 0.01, 0.9, 0.95),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True),
    )
    for step in gradients:
        for params, optimizer in zip((ours, theirs), pair, strict=True):
            for parameter, gradient in zip(params, step, strict=True):
                parameter.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert {key: value.tolist() for key, value in pair[0].state[mine].items()} == {
            key: value.tolist() for key, value in pair[1].state[other].items()
        }


@pytest.mark.tool
def test_the_built_in_optimizers_load_no_compiler() -> None:
    steps = """
import sys, torch
from diloco_learner.pytorch.inner import Muon, TorchAdamW
weight = torch.nn.Parameter(torch.eye(3))
weight.grad = torch.ones(3, 3)
TorchAdamW([([weight], 0.0)], 0.01, 0.9, 0.95).step()
Muon([weight], [(3,)], 0.01, 0.0).step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", steps], check=True)


def test_a_version_is_written_in_place_as_its_carry_says() -> None:
    model = island()
    (fragment,) = model.fragments().fragments
    model.write(fragment, np.full(4, 2, np.float32))
    model.write(fragment, np.full(4, 10, np.float32), np.full(4, 1, np.float32))
    np.testing.assert_array_equal(values(model), np.full(4, 11))  # 10 + (2 - 1)
    model.write(fragment, np.full(4, 3, np.float32), None, 0.5)
    np.testing.assert_array_equal(values(model), np.full(4, 7))  # half of 11, half of 3


def test_views_of_parameters_have_the_layout_of_another_framework() -> None:
    class Transposed(Slope):
        def module(self) -> Any:
            return torch.nn.Linear(3, 2)

        def tensors(self, module: Any) -> Any:
            return {"dense/kernel": module.weight.T, "dense/bias": module.bias}

        def loss(self, module: Any, batch: Any) -> Any:
            return module(torch.ones(3)).sum()

    task = Transposed()
    model = island(task)
    assert [(tensor.path, tensor.shape) for tensor in model.fragments().tensors] == [
        ("dense/bias", (2,)),
        ("dense/kernel", (3, 2)),
    ]
    (fragment,) = model.fragments().fragments
    given = np.arange(8, dtype=np.float32)
    model.write(fragment, given)
    np.testing.assert_array_equal(values(model), given)
    kernel = next(piece for piece in fragment.pieces if piece.path == "dense/kernel")
    wanted = given[kernel.offset : kernel.offset + kernel.size].reshape(3, 2).T
    np.testing.assert_array_equal(model._module.weight.detach().numpy(), wanted)


def test_what_is_not_finite_changes_nothing() -> None:
    model = island()
    assert model.begin_step(np.float32(1), 0.1).wait() == 0
    before = values(model)
    assert math.isnan(model.begin_step(np.float32(math.nan), 0.1).wait())
    np.testing.assert_array_equal(values(model), before)
    assert model.begin_step(np.float32(1), 0.1).wait() == pytest.approx(before.sum())


def test_a_state_goes_on_as_the_one_that_it_was_captured_of() -> None:
    first, second = island(), island()
    for _ in range(3):
        first.begin_step(np.float32(2), 0.1).wait()
    capture = first.capture()
    later = first.begin_step(np.float32(1), 0.1)  # the capture is of before
    for chunk, given in zip(capture.content.chunks, list(capture.content.values), strict=True):
        second.put(chunk, given)
    assert second.begin_step(np.float32(1), 0.1).wait() == later.wait()
    np.testing.assert_array_equal(values(first), values(second))
    wholes = {chunk.name: chunk for chunk in capture.content.chunks}
    second.check_state(wholes)
    with pytest.raises(RunError, match="array 'optimizer/x/step' is missing"):
        second.check_state({name: chunk for name, chunk in wholes.items() if not name.endswith("step")})
    second.forget_optimizer()
    assert [array.any() for array in second.capture(optimizer_only=True).content.values] == [False] * 3


def test_buffers_are_part_of_the_state_and_a_rehearsal_leaves_them() -> None:
    class Normed(Slope):
        def module(self) -> Any:
            return torch.nn.BatchNorm1d(2)

        def loss(self, module: Any, batch: Any) -> Any:
            return module(float(batch) * torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum()

    model = island(Normed())
    names = [chunk.name for chunk in model.wanted()]
    assert {"buffers/running_mean", "buffers/num_batches_tracked"} <= set(names)
    assert int(model._module.num_batches_tracked) == 0
    model.begin_step(np.float32(1), 0.1).wait()
    assert int(model._module.num_batches_tracked) == 1


def test_updates_too_small_for_bfloat16_are_kept_in_masters() -> None:
    class Rounded(Slope):
        dtype = torch.bfloat16

    model = island(Rounded())
    (fragment,) = model.fragments().fragments
    model.write(fragment, np.ones(4, np.float32))
    for _ in range(8):
        model.begin_step(np.float32(1), 1e-4).wait()
    np.testing.assert_allclose(values(model), 1 - 8e-4, rtol=1e-5)  # bfloat16 has nothing between 1 and 0.996


def test_the_trainer_writes_a_version_between_the_steps_around_its_boundary() -> None:
    model = island()
    theta = np.full(4, 10, np.float32)
    write = Boundary([(0, VersionWrite(theta, None))], [0], stop=False, wait=False, finished=False)
    settings = run_settings(overrides={"inner.weight_decay": 0.0, "inner.warmup_fraction": 0.0})
    script, _ = train(model, [NOTHING, NOTHING, write, NOTHING, FINISHED], settings=settings)
    np.testing.assert_array_equal(script.readers[0](), theta)
    np.testing.assert_allclose(values(model), 10 - 2 * settings.inner.learning_rate, rtol=1e-5)
    assert [done is not None for done in script.done] == [False, True, True, True, True]


@pytest.mark.parametrize("rule", TRAINER_RULES)
def test_a_trainers_rules_hold_as_with_jax(rule: Callable[[Any], None]) -> None:
    rule(island())


def test_no_call_of_a_boundary_waits_for_the_step_in_flight() -> None:
    held = threading.Event()

    class Held(Slope):
        def loss(self, module: Any, batch: Any) -> Any:
            if held_up:
                assert held.wait(DEADLINE_S)
            return super().loss(module, batch)

    held_up = False
    model = island(Held())
    (fragment,) = model.fragments().fragments
    held_up = True
    step = model.begin_step(np.float32(1), 0.1)
    snapshot = model.snapshot(fragment)
    model.write(fragment, np.full(4, 5, np.float32))
    capture = model.capture()
    following = model.begin_step(np.float32(1), 0.1)
    assert not step.outcome.done()  # all of it was queued behind the step
    held.set()
    assert (step.wait(), following.wait()) == (0, 20)
    np.testing.assert_allclose(snapshot.to_host(), np.full(4, -0.1), rtol=1e-5)
    named = dict(zip([chunk.name for chunk in capture.content.chunks], capture.content.values, strict=True))
    np.testing.assert_array_equal(named["params/x"], np.full(4, 5))


class _Half(Slope):
    dtype = torch.float16


class _Frozen(Slope):
    def module(self) -> Any:
        return super().module().requires_grad_(False)


class _Copy(Slope):
    def tensors(self, module: Any) -> Any:
        return {"x": module.x.detach().clone()}


class _Part(Slope):
    def tensors(self, module: Any) -> Any:
        return {"x": module.x[:3]}


class _Vector(Slope):
    def loss(self, module: Any, batch: Any) -> Any:
        return module.x * 2


class _Metrics(Slope):
    def loss(self, module: Any, batch: Any) -> Any:
        return module.x.sum(), Aux({"Wrong Name": 1.0})


class _Fails(Slope):
    def loss(self, module: Any, batch: Any) -> Any:
        return torch.nn.functional.linear(torch.ones(3), module.x)


class _Detached(Slope):
    def loss(self, module: Any, batch: Any) -> Any:
        return super().loss(module, batch).detach()


class _Lazy(Slope):
    def module(self) -> Any:
        return torch.nn.LazyLinear(3)


class _Late(Slope):
    def loss(self, module: Any, batch: Any) -> Any:
        module.y = getattr(module, "y", None) or torch.nn.Parameter(torch.zeros(()))
        return super().loss(module, batch) + module.y


class _Growing(Slope):
    def optimizer(self, parameters: Any, rate: float) -> Any:
        class Growing(torch.optim.SGD):  # type: ignore[name-defined,misc]
            def step(self, closure: Any = None) -> None:
                state = self.state[parameters[0]]
                state["seen"] = torch.zeros(1 + len(state.get("seen", ())))

        return Growing(parameters, rate)


class _GrowingLater(Slope):
    def optimizer(self, parameters: Any, rate: float) -> Any:
        class Growing(torch.optim.SGD):  # type: ignore[name-defined,misc]
            steps = 0

            def step(self, closure: Any = None) -> None:
                self.steps += 1
                self.state[parameters[0]]["seen"] = torch.zeros(1 + (self.steps > 3))

        return Growing(parameters, rate)


class _OthersOptimizer(Slope):
    def optimizer(self, parameters: Any, rate: float) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], rate)


class _OtherValidation(Slope):
    def validation(self) -> Any:
        return [np.zeros(3, np.float32)]


class _NoOptimizer(Slope):
    def optimizer(self, parameters: Any, rate: float) -> Any:
        return "adam"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (_Half, "parameter 'x' is float16, expected float32 or bfloat16"),
        (_Frozen, "no parameter that requires a gradient"),
        (_Copy, r"tensors\(\) has 'x', which shares no memory with a trained parameter: .*\(.*test_torch\.py, line \d+\)"),
        (_Part, "tensors\\(\\) lacks 1 of the values of parameter 'x'"),
        (_Vector, r"loss\(\) returned float32\[4\], expected a float32 scalar.*test_torch.py, line \d+"),
        (_Metrics, "metric named 'Wrong Name'"),
        (_Fails, r"RuntimeError: .*\(.*test_torch\.py, line \d+\)"),
        (_Detached, r"RuntimeError: element 0 of tensors does not require grad .*\(.*test_torch\.py, line \d+\)"),
        (_Lazy, r"ValueError: Attempted to use an uninitialized parameter .*\(.*test_torch\.py, line \d+\)"),
        (_Late, r"parameter 'y' came with the first step: make all of them in module\(\), .*\(.*test_torch\.py, line \d+\)"),
        (_Growing, r"its state has x/seen of shape \[2\], expected \[1\], as before the step \(.*test_torch\.py, line \d+\)"),
        (
            _OthersOptimizer,
            r"optimizer\(\) has a parameter of shape \[3\], which is not one of the parameters .*\(.*test_torch\.py, line",
        ),
        (_OtherValidation, r"TypeError: only .*\(.*test_torch\.py, line \d+\)"),
        (_NoOptimizer, "optimizer\\(\\) returned a str, expected a torch.optim.Optimizer"),
    ],
)
def test_a_task_that_is_none_is_refused(task: type[Slope], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        checked_and_rehearsed(task())


def checked_and_rehearsed(task: Slope) -> TorchIsland:
    """A model as it is before a run, after all that ``diloco up`` looks at."""
    model = TorchIsland(task, PLAIN)
    model.check(np.float32(1))
    model.rehearse(np.float32(1))
    model.check_evaluation()
    return model


def test_a_step_waits_for_its_device_no_more_once_its_optimizer_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, item, step = island(), list[str](), torch.Tensor.item, TorchAdamW.step

    def noted_item(tensor: Any) -> Any:
        asked.append("device")
        return item(tensor)

    def noted_step(optimizer: Any) -> None:
        step(optimizer)
        asked.append("queued")

    monkeypatch.setattr(torch.Tensor, "item", noted_item)
    monkeypatch.setattr(TorchAdamW, "step", noted_step)
    model.begin_step(np.float32(1), 0.1).wait()
    assert asked == ["device", "device", "queued"]  # loss and norm


@pytest.mark.parametrize(("own", "copied"), [(False, 0), (True, 2)])
def test_parameters_are_copied_for_a_check_and_a_rehearsal_only_where_a_step_may_move_them(
    monkeypatch: pytest.MonkeyPatch, own: bool, copied: int
) -> None:
    class Own(Slope):
        def optimizer(self, parameters: Any, rate: float) -> Any:
            return torch.optim.SGD(parameters, 0.5)

    model, clones, clone = TorchIsland(Own() if own else Slope(), PLAIN), [0], torch.Tensor.clone

    def counted(tensor: Any, *arguments: Any, **named: Any) -> Any:
        clones[0] += tensor.shape == (4,)
        return clone(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    model.check(np.float32(1))
    model.rehearse(np.float32(1))
    model.measured(np.float32(1))
    assert clones[0] == copied
    np.testing.assert_array_equal(values(model), np.zeros(4, np.float32))


@pytest.mark.parametrize(("free_bytes", "spare"), [(40 << 30, 41 << 30), (0, 1 << 30), (-(1 << 30), 1 << 28)])
def test_a_gpu_has_to_spare_what_is_free_and_what_steps_leave_of_what_pytorch_holds(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, spare: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 << 30)
    assert spare_bytes(torch.device("cuda", 0)) == spare
    assert spare_bytes(torch.device("cpu")) == 1 << 28


def test_two_steps_show_that_a_task_is_fit_and_leave_nothing() -> None:
    class Counted(Slope):
        taken = 0

        def loss(self, module: Any, batch: Any) -> Any:
            self.taken += 1
            return super().loss(module, batch)

    task = Counted()
    model = checked_and_rehearsed(task)
    assert task.taken == 2
    held = list(model.capture().content.values)  # parameters that begin at zero, and AdamW's state
    assert len(held) > 1
    assert not any(array.any() for array in held)


class _Replaced(Slope):
    replaces = False

    def loss(self, module: Any, batch: Any) -> Any:
        if self.replaces:
            module.x = torch.nn.Parameter(module.x.detach().clone())
        return super().loss(module, batch)


def test_a_parameter_that_a_task_replaces_in_mid_run_is_named() -> None:
    task = _Replaced()
    model = checked_and_rehearsed(task)
    task.replaces = True
    with pytest.raises(
        SettingsError, match=r"parameter 'x' was replaced after module\(\) created it.*\(.*test_torch\.py, line \d+\)"
    ):
        model.begin_step(np.float32(1), 0.1).wait()


def test_an_optimizer_whose_state_changes_its_shape_in_mid_run_is_named() -> None:
    model = island(_GrowingLater())
    for _ in range(3):
        model.begin_step(np.float32(1), 0.1).wait()
    list(model.capture().content.values)
    model.begin_step(np.float32(1), 0.1).wait()
    with pytest.raises(SettingsError, match=r"state has x/seen of shape \[2\], expected \[1\], as before .* \(.*line \d+\)"):
        list(model.capture().content.values)


def test_an_evaluation_that_fails_leaves_the_model_to_be_trained() -> None:
    class Fails(Slope):
        def evaluate(self, module: Any) -> Any:
            raise OSError("gone")

    model = island(Fails())
    with pytest.raises(SettingsError, match=r"OSError: gone \(.*test_torch\.py, line \d+\)"):
        model.check_evaluation()
    assert math.isfinite(model.begin_step(np.float32(1), 0.1).wait())


def test_a_task_of_another_framework_is_told_from_one_of_this() -> None:
    class OfJax:
        tokens_per_batch, init, loss, batches = 1, print, print, print

    said = "what make returns is a task of jax, and this process is a learner of torch: name a task of torch, or start"
    with pytest.raises(SettingsError, match=said):
        checked(OfJax(), TaskSettings(name="own:make"))
    with pytest.raises(SettingsError, match="lacks tokens_per_batch, module, loss, batches"):
        checked(object(), TaskSettings(name="own:make"))


@pytest.mark.tool
def test_a_torch_task_is_checked_and_examined_without_jax(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
import itertools, torch

class Mine:
    tokens_per_batch = 1
    def module(self): return torch.nn.Linear(3, 2)
    def loss(self, module, batch): return module(torch.ones(3)).sum() * batch
    def batches(self, share, shares, seed, start): return itertools.count(1.0)

def make(settings, data): return Mine()
"""
    )
    program = """
import sys
from diloco.settings.presets import run_settings
from diloco_learner.examine import examine
seen = examine(run_settings(overrides={"shards": 1, "fragments.count": 2, "task.name": "mine:make"}), None)
print(seen.framework, bool(seen.devices), "jax" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout.split() == ["torch", "True", "False"]


def test_random_numbers_of_a_step_follow_from_its_batch() -> None:
    class Dropped(Slope):
        def loss(self, module: Any, batch: Any) -> Any:
            return module.x.sum() + torch.rand(()).item()

    first, second = island(Dropped()), island(Dropped())
    torch.manual_seed(1)
    losses = [model.begin_step(np.float32(0), 0.0, (1, 5)).wait() for model in (first, second)]
    assert losses[0] == losses[1] != first.begin_step(np.float32(0), 0.0, (1, 6)).wait()
