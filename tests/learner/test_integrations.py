"""What the callbacks for trainers refuse, and which optimizer they find within a trainer's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.errors import SettingsError
from diloco.integrations import torchtitan
from diloco.integrations.joined_trainer import JoinedTrainer, inner_optimizer


def test_steps_are_booked_by_the_optimizer_that_trainers_have_wrapped() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    adam = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    assert inner_optimizer(SimpleNamespace(optimizer=SimpleNamespace(optimizer=adam))) is adam
    with pytest.raises(SettingsError, match=r"the trainer's optimizer is a SimpleNamespace, expected one of torch\.optim"):
        inner_optimizer(SimpleNamespace(optimizer=SimpleNamespace()))


class StandInRun:
    """A run that a trainer joins, which notes why it was left."""

    learning_rate_factor = 0.5

    def __init__(self) -> None:
        self.left: list[BaseException | None] = []

    def __enter__(self) -> StandInRun:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.left.append(error)


def test_the_first_step_has_the_run_s_rate_though_trainers_ask_for_it_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    from torch.optim.lr_scheduler import LambdaLR

    monkeypatch.setattr("diloco.join", lambda *given, **named: StandInRun())
    joined = JoinedTrainer("nats://127.0.0.1:9", run="x", tokens=1)
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": rate} for rate in (0.2, 0.4)]
    optimizer = torch.optim.SGD(groups)
    schedule = LambdaLR(optimizer, [joined.learning_rate_factor, lambda step: 0.25])
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]
    joined.begin({}, optimizer, schedules=[SimpleNamespace(scheduler=schedule)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]  # a group with another schedule keeps its rate


def test_a_trainer_that_trains_again_after_an_exception_leaves_the_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    runs = [StandInRun(), StandInRun()]
    coming = iter(runs)
    monkeypatch.setattr("diloco.join", lambda *given, **named: next(coming))
    joined, optimizer = JoinedTrainer("nats://127.0.0.1:9"), torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    joined.begin({}, optimizer)
    joined.begin({}, optimizer)
    assert [str(error) for error in runs[0].left] == ["the training before has ended by an exception"]
    assert (joined.run, runs[1].left) == (runs[1], [])
    joined.end()
    assert runs[1].left == [None]


def test_a_trainer_that_would_put_other_weights_in_place_of_the_run_s_is_refused() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make torch")
    from diloco.integrations.transformers import DilocoCallback

    arguments: Any = SimpleNamespace(load_best_model_at_end=True)
    nothing: Any = None
    with pytest.raises(SettingsError, match="load_best_model_at_end would replace the run's weights by those of this"):
        DilocoCallback("nats://127.0.0.1:9", run="x", tokens=1).on_train_begin(arguments, nothing, nothing)


def test_several_stages_of_a_pipeline_in_one_rank_are_refused() -> None:
    trainer: Any = SimpleNamespace(model_parts=[object(), object()])
    with (
        pytest.raises(SettingsError, match="this rank has 2 parts of the model, expected one: choose a pipeline schedule"),
        torchtitan.join(trainer, "nats://127.0.0.1:9", run="x", tokens=1),
    ):
        pass


def test_a_trainer_that_torchtitan_s_join_has_left_goes_on_as_before() -> None:
    def goes_on() -> bool:
        return False

    trainer: Any = SimpleNamespace(model_parts=[object()], should_continue_training=goes_on)
    with torchtitan.join(trainer, "nats://127.0.0.1:9", run="x", tokens=1):
        assert trainer.should_continue_training is not goes_on
    assert trainer.should_continue_training is goes_on


def test_a_rank_loads_its_own_part_or_all_parts_of_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make torch")
    from diloco.integrations.transformers import load_parts, save_part

    assert load_parts(tmp_path / "none", 0, 1) is None
    for rank in range(3):
        save_part(tmp_path, rank, 3, {f"rank-{rank}": ({"rank": rank}, {})})
    assert load_parts(tmp_path, 1, 3) == {"rank-1": ({"rank": 1}, {})}
    assert load_parts(tmp_path, 0, 1) == {f"rank-{rank}": ({"rank": rank}, {}) for rank in range(3)}
    assert load_parts(tmp_path, 3, 4) == load_parts(tmp_path, 0, 1)
    save_part(tmp_path, 0, 1, {"rank-0": ({"rank": 0}, {})})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["diloco-rank-0.pt"], "parts of more ranks are gone"


def test_what_to_do_with_a_state_of_another_run_is_said() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    module = torch.nn.Linear(2, 2)
    with pytest.raises(SettingsError, match=r"the state has no accounts .* with keeps_state=False the callback joins as new"):
        JoinedTrainer("nats://127.0.0.1:9", run="x", tokens=1).begin(module, torch.optim.SGD(module.parameters(), 0.1), {})
