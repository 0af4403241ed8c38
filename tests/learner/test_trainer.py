"""The trainer's loop with a scripted member: what is booked, what is written when, and how time is accounted for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from tests.made.trainer_script import FINISHED, NOTHING, SETTINGS, TRAINER_RULES, Slope, train

from diloco.core.learner.accounts import Accounts
from diloco.core.learner.delta import VersionWrite
from diloco.member.arrays import Boundary
from diloco.settings.presets import run_settings
from diloco_learner.jax.island import Island
from diloco_learner.run import trainer


@pytest.fixture
def island() -> Island:
    return Island(Slope(), SETTINGS)


@pytest.mark.parametrize("rule", TRAINER_RULES)
def test_rules_of_a_trainer_hold(rule: Callable[[Any], None], island: Island) -> None:
    rule(island)


def test_a_version_is_between_the_steps_around_its_boundary(island: Island) -> None:
    theta = np.full(4, 10, np.float32)
    write = Boundary([(0, VersionWrite(theta, None))], [0], stop=False, wait=False, finished=False)
    script, _ = train(island, [NOTHING, NOTHING, write, NOTHING, FINISHED])
    # two steps before the boundary were overwritten, what was read is the version, two came after it
    np.testing.assert_array_equal(script.readers[0](), theta)
    rate = SETTINGS.inner.learning_rate
    np.testing.assert_allclose(np.asarray(island.params()["x"]), 10 - 2 * rate, rtol=1e-5)


def test_steps_of_two_programs_do_as_those_of_one_and_nothing_of_a_boundary_is_begun_before_the_first_has_ended() -> None:
    theta, measured = np.full(4, 10, np.float32), list[bool]()
    write = Boundary([(0, VersionWrite(theta, None))], [0], stop=False, wait=False, finished=False)

    class Watched(Island):
        def finish_step(self) -> None:
            if self._begun is not None:
                gradients: list[Any] = self._begun[0]
                measured.append(all(gradient.is_ready() for gradient in gradients))
            super().finish_step()

    island = Watched(Slope(), SETTINGS, apart=True)
    script, _ = train(island, [NOTHING, NOTHING, write, NOTHING, FINISHED])
    np.testing.assert_array_equal(script.readers[0](), theta)
    rate = SETTINGS.inner.learning_rate
    np.testing.assert_allclose(np.asarray(island.params()["x"]), 10 - 2 * rate, rtol=1e-5)
    assert measured == [True] * 4


@pytest.mark.parametrize(("reset", "value"), [(False, 5.0), (True, 10.0)])
def test_a_version_is_mixed_into_the_value_but_a_loaded_one_replaces_it(island: Island, reset: bool, value: float) -> None:
    mixing = run_settings(overrides={"apply.alpha": 0.5})
    write = Boundary(
        [(0, VersionWrite(np.full(4, 10, np.float32), None, reset=reset))], [0], stop=False, wait=False, finished=False
    )
    script, _ = train(island, [write, FINISHED], settings=mixing)
    np.testing.assert_array_equal(script.readers[0](), np.full(4, value, np.float32))  # it was 0


def test_it_ends_when_its_last_work_is_merged_and_takes_no_step_until_then(island: Island) -> None:
    asked = itertools.chain([False, False], itertools.repeat(True))
    stop = Boundary([], [0], stop=True, wait=False, finished=False)
    script, finished = train(island, [NOTHING, NOTHING, stop, stop, stop], stopping=lambda: next(asked), unmerged=3)
    assert not finished
    assert [done is not None for done in script.done] == [False, True, True, False, False]
    assert len(script.readers) == 3  # rounds are answered all the while
    np.testing.assert_allclose(np.asarray(island.params()["x"]), -2 * SETTINGS.inner.learning_rate, rtol=1e-5)


class Clock:
    """A clock that stands still but where something is said to take time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def device(self, dispatch_s: float, device_s: float) -> Island:
        """Return an island whose steps take so long, in their call and after it."""
        clock = self

        class Output:
            def wait(self) -> float:
                clock.now_s += device_s
                return 1.0

            def metric_values(self) -> dict[str, float]:
                return {}

            def gradient_norm(self) -> float:
                return 1.0

        class Device(Island):
            def begin_step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> Any:
                clock.now_s += dispatch_s
                return Output()

        return Device(Slope(), SETTINGS)


class AtOnce:
    """An executor whose jobs are done when they have been submitted."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(job(*arguments))
        return future


@pytest.mark.parametrize(("dispatch_s", "device_s"), [(3.0, 0.0), (0.0, 3.0), (2.0, 1.0)])
def test_a_step_is_busy_from_its_call_whether_dispatch_or_device_is_late(
    monkeypatch: pytest.MonkeyPatch, dispatch_s: float, device_s: float
) -> None:
    """A boundary takes 0.25 s, a batch 0.5 s and a step 3 s, inside its dispatch, after it, or some of both."""
    clock = Clock()

    def batches() -> Iterator[Any]:
        while True:
            clock.now_s += 0.5
            yield np.float32(1)

    def boundaries() -> Iterator[Boundary]:
        for boundary in [NOTHING] * 5 + [FINISHED]:
            clock.now_s += 0.25
            yield boundary

    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer, "ThreadPoolExecutor", AtOnce)
    script, _ = train(clock.device(dispatch_s, device_s), boundaries(), batches())
    done = [done for done in script.done if done is not None]
    # five steps were taken, of which four have been accounted for: 12 s, with three batches and three boundaries between them
    assert (sum(d.busy_s for d in done), sum(d.blocked_s for d in done), sum(d.data_s for d in done)) == (12.0, 0.75, 1.5)


def test_a_slow_learner_is_busy_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(trainer, "ThreadPoolExecutor", AtOnce)
    script, _ = train(clock.device(0.0, 1.0), [NOTHING] * 20 + [FINISHED], slow=50.0)
    # it is asleep for 49 parts of 50, and none of them is the system's fault; the last step has not been accounted for
    assert (clock.now_s, sum(done.busy_s for done in script.done if done)) == (20 * 50.0, 19 * 50.0)


def test_a_step_that_is_not_finite_is_counted_and_not_taken_and_its_loss_stays_out_of_the_accounts(island: Island) -> None:
    batches = iter([np.float32(1), np.float32(np.nan), *[np.float32(1)] * 5])
    script, _ = train(island, [NOTHING] * 4 + [FINISHED], batches)
    accounts = Accounts()
    for done in filter(None, script.done):
        accounts.book(done)
        assert accounts.loss is None or np.isfinite(accounts.loss)
    assert accounts.done.not_finite == 1
    assert accounts.loss is not None
    assert script.step == 4
    rate = SETTINGS.inner.learning_rate
    np.testing.assert_allclose(np.asarray(island.params()["x"]), -3 * rate, rtol=1e-5)
