"""Loops book steps in the ways that training code has: by its optimizer, with tokens that vary, by the run's own schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from diloco.errors import RunError, SettingsError
from diloco.testing import VirtualRun

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
TOKENS = 16


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_an_optimizer_books_the_steps_that_it_takes_and_no_others() -> None:
    """Two batches are accumulated for each step, and every fifth step is skipped, as a scaler of gradients does."""
    module, taken = model(), list[int]()
    optimizer = torch.optim.SGD(module.parameters(), 0.05)

    def loop(run: Any) -> None:
        for batch in range(1, 81):
            if run.over:
                break
            loss = module(torch.ones(4, 3)).square().mean()
            loss.backward()
            run.note_loss(loss)
            if batch % 2 == 0:
                if batch % 10 != 0:
                    optimizer.step()
                optimizer.zero_grad()
        taken.append(run.steps)

    with VirtualRun({"tokens": 4096, "learners": 1}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: module, data="own", optimizer=optimizer, tokens=TOKENS)
        virtual.advance(until=lambda: bool(taken))
        assert taken == [32]
        assert virtual.accounts("ann").tokens == 32 * TOKENS
        assert virtual.accounts("ann").loss is not None
    optimizer.step()  # the run was left, and is told of it no more


def test_tokens_of_a_step_may_be_fewer_than_at_join() -> None:
    stated, ended = [16, 3, 1, 16, 0, 9, 5], list[int]()

    def loop(run: Any) -> None:
        for tokens in stated:
            run.step(run.params, loss=1.0, tokens=tokens)
        with pytest.raises(SettingsError, match=r"step: tokens = 17: expected 0 to 16, the tokens of diloco\.join"):
            run.step(run.params, tokens=17)
        with pytest.raises(SettingsError, match="step: tokens = -1: expected 0 to 16"):
            run.step(run.params, tokens=-1)
        ended.append(run.steps)

    with VirtualRun({"tokens": 4096, "learners": 1}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(8, np.float32)}, data="own", tokens=TOKENS)
        virtual.advance(until=lambda: bool(ended))
        assert ended == [len(stated)]
        assert virtual.accounts("ann").tokens == sum(stated) + 1  # the step without tokens is booked as one token


def test_batches_that_the_run_deals_may_count_fewer_than_at_join() -> None:
    counted: list[int] = []

    def loop(run: Any) -> None:
        for number in run.batches(lambda share, shares, seed, start: iter(range(start, 1000))):
            with pytest.raises(SettingsError, match="step: tokens = 17: expected 0 to 16"):
                run.step(run.params, tokens=17)
            counted.append(TOKENS if number % 3 == 0 else number % 3)
            run.step(run.params, tokens=None if number % 3 == 0 else number % 3)

    with VirtualRun({"tokens": 1024, "learners": 1}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(8, np.float32)}, tokens=TOKENS)
        virtual.advance()
        assert virtual.accounts("ann").tokens == sum(counted)
        assert 1024 <= sum(counted) < 1024 + TOKENS, "the budget is used up by what was counted"


def test_a_loop_follows_the_schedule_of_the_run_and_not_of_its_own_steps() -> None:
    seen: dict[str, list[tuple[float, float]]] = {"ann": [], "bob": []}

    def loop_of(name: str) -> Any:
        def loop(run: Any) -> None:
            while not run.over:
                seen[name].append((run.progress, run.learning_rate_factor))
                run.step(run.params, loss=1.0)

        return loop

    with VirtualRun({"tokens": 8192, "inner.warmup_fraction": 0.1, "inner.final_fraction": 0.2}) as virtual:
        for name in seen:
            virtual.add_loop(name, loop_of(name), params=lambda: {"w": np.zeros(64, np.float32)}, data="own", tokens=TOKENS)
        virtual.advance()
    for name, moments in seen.items():
        progress, factors = zip(*moments, strict=True)
        assert progress[0] == 0.0
        assert factors[0] == 0.0, "the warm-up begins at 0"
        assert max(factors) == pytest.approx(1.0, abs=0.02)
        assert progress[-1] > 0.9, f"{name} took half of the steps, and the run is nearly over"
        assert factors[-1] == pytest.approx(0.2, abs=0.03)
        assert list(progress) == sorted(progress)


def test_a_loop_hears_when_its_parameters_were_written() -> None:
    changed: list[tuple[bool, bool]] = []

    def loop(run: Any) -> None:
        while not run.over:
            mine = run.params["w"] + np.float32(1)
            after = run.step({"w": mine.copy()}, loss=1.0)["w"]
            changed.append((run.changed, not np.array_equal(after, mine)))

    with VirtualRun({"tokens": 4096, "outer.learning_rate": 0.5}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(64, np.float32)}, data="own", tokens=TOKENS)
        virtual.add_toy("bob", founds=False)
        virtual.advance()
    assert any(said for said, _ in changed)
    assert all(said for said, written in changed if written)


def test_a_loop_that_goes_without_the_last_versions_says_so() -> None:
    def loop(run: Any) -> None:
        while not run.over:
            run.step(run.params, loss=1.0)
        virtual.cut("ann")

    with VirtualRun({"tokens": 1024, "learners": 1}) as virtual, capture_logs() as logs:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(64, np.float32)}, data="own", tokens=TOKENS)
        virtual.advance(until=lambda: any(entry["event"] == "last_versions_missing" for entry in logs))
    [said] = [entry for entry in logs if entry["event"] == "last_versions_missing"]
    assert said["waited_s"] == 30.0


def test_an_optimizer_that_is_none_is_refused() -> None:
    import diloco

    with pytest.raises(SettingsError, match=r"join: optimizer is a str, expected a torch\.optim\.Optimizer"):
        diloco.join("nats://127.0.0.1:9", run="x", params=model(), tokens=1, optimizer="adam")


def in_a_loop(loop: Any, params: Any) -> None:
    """Call ``loop(run)`` in a run that this loop alone trains."""
    called = list[bool]()

    def whole(run: Any) -> None:
        loop(run)
        called.append(True)

    with VirtualRun({"tokens": 4096, "learners": 1}) as virtual:
        virtual.add_loop("ann", whole, params=lambda: params, data="own", tokens=TOKENS)
        virtual.advance(until=lambda: bool(called))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("named", [False, True])
def test_averaged_weights_are_in_the_module_for_an_evaluation_alone(dtype: Any, named: bool) -> None:
    module = model().to(dtype)
    average = torch.optim.swa_utils.AveragedModel(model())
    for parameter in average.parameters():
        parameter.data.fill_(7)
    weights = dict(average.module.named_parameters()) if named else average

    def loop(run: Any) -> None:
        run.step(module, loss=1.0)
        own = {name: value.clone() for name, value in module.named_parameters()}
        with run.averaged(weights):
            assert all(bool((value == 7).all()) for value in module.parameters())
            with pytest.raises(RunError, match=r"averaged weights are swapped in: end the with statement of run\.averaged"):
                run.step(module)
            with pytest.raises(RunError, match="averaged weights are swapped in"):
                run.state_dict()
        assert all(torch.equal(own[name], value) for name, value in module.named_parameters())
        with pytest.raises(ZeroDivisionError), run.averaged(weights):
            raise ZeroDivisionError
        assert all(torch.equal(own[name], value) for name, value in module.named_parameters())
        run.step(module, loss=1.0)

    in_a_loop(loop, module)


def test_weights_that_are_not_those_of_the_parameters_are_refused() -> None:
    module = model()

    def loop(run: Any) -> None:
        for weights, said in (
            ({"weight": module.weight}, "averaged: parameter 'bias' is missing: give the averaged weights of all parameters"),
            (torch.nn.Linear(4, 2), r"averaged: parameter 'weight' has shape \(2, 4\), expected \(2, 3\)"),
            (3, "averaged: weights are a int, expected a module with the same parameters, or tensors by name"),
        ):
            with pytest.raises(SettingsError, match=said), run.averaged(weights):
                pass
        run.step(module)

    in_a_loop(loop, module)


def test_averaged_arrays_of_numpy_need_no_swapping() -> None:
    def loop(run: Any) -> None:
        with pytest.raises(SettingsError, match="averaged: parameters are arrays of JAX or NumPy"), run.averaged({}):
            pass

    in_a_loop(loop, {"w": np.zeros(8, np.float32)})


def test_a_validation_loss_is_one_number() -> None:
    def loop(run: Any) -> None:
        run.report(val_loss=torch.tensor(1.5))
        run.report(val_loss=float("nan"))  # which nobody is shown
        for wrong, said in (("low", "is a str"), (np.zeros(2), r"is an array of shape \(2,\)"), (None, "is None")):
            with pytest.raises(SettingsError, match=f"report: val_loss {said}, expected one number"):
                run.report(val_loss=wrong)

    in_a_loop(loop, {"w": np.zeros(8, np.float32)})
