"""The trainer's loop with a scripted member: what is booked, what is written when, and how time is accounted for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.core.accounts import Accounts, StepDone
from diloco.core.delta import Apply
from diloco.core.fragments import FragmentMap, build_map
from diloco.core.schedule import Moment
from diloco.member.member import Boundary, Member
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner import trainer
from diloco_learner.feed import Batch
from diloco_learner.island import Island
from diloco_learner.trainer import Trainer

TOKENS = 7
NOTHING = Boundary(applies=[], reads=[], stop=False, wait=False, finished=False)
FINISHED = Boundary(applies=[], reads=[], stop=True, wait=False, finished=True)
SETTINGS: RunSettings = run_settings(overrides={"inner.weight_decay": 0.0, "inner.warmup_fraction": 0.0})


class Slope:
    """Loss: the sum of the parameters times the batch, so that AdamW takes steps of the learning rate, all down."""

    tokens_per_batch = TOKENS

    def init(self, key: jax.Array) -> Any:
        return {"x": jnp.zeros(4)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return cast(jax.Array, jnp.sum(params["x"]) * batch)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[np.float32]:
        return itertools.repeat(np.float32(1))

    def validation(self) -> Sequence[np.float32]:
        return []

    def is_embedding(self, path: str) -> bool:
        return False


class Script:
    """Plays a member: gives one boundary after the other, and notes what it is told."""

    def __init__(self, fragments: FragmentMap, boundaries: Iterable[Boundary], unmerged: int) -> None:
        self.map = fragments
        self.boundaries = iter(boundaries)
        self.done: list[StepDone | None] = []
        self.readers: list[Callable[[], Any]] = []
        self.step = 0
        self.leaves_at: int | None = None  # boundaries played when it was told that the trainer leaves
        self.leave_by_s: float | None = None
        self.unmerged = unmerged  # boundaries from then on until all is merged

    def boundary(self, done: StepDone | None) -> Boundary:
        self.unmerged -= self.leaves_at is not None
        self.done.append(done)
        self.step += done is not None
        in_time = self.leave_by_s is None or time.perf_counter() < self.leave_by_s
        return replace(next(self.boundaries), ended=self.leaves_at is not None and (self.unmerged <= 0 or not in_time))

    def submit(self, fragment: int, reader: Callable[[], Any]) -> None:
        self.readers.append(reader)

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.05)

    def moment(self) -> Moment:
        return Moment(0, 1)

    def leave(self, within_s: float) -> None:
        self.leaves_at, self.leave_by_s = len(self.done), time.perf_counter() + within_s


@pytest.fixture
def island() -> Island:
    return Island(Slope(), SETTINGS)


def train(
    island: Any,
    boundaries: Iterable[Boundary],
    batches: Iterator[Any] | None = None,
    stopping: Callable[[], bool] = lambda: False,
    slow: float = 1.0,
    leave_s: float = 10.0,
    unmerged: int = 1,
    settings: RunSettings = SETTINGS,
) -> tuple[Script, bool]:
    tensors = island.tensors() if isinstance(island, Island) else island.fragments().tensors
    fragments = build_map(tensors, 1)
    script = Script(fragments, boundaries, unmerged)
    loop = Trainer(
        island,
        cast(Member, script),
        (Batch(0, index, data) for index, data in enumerate(batches or itertools.repeat(np.float32(1)))),
        settings,
        get_logger(),
        tokens_per_batch=TOKENS,
        slow=slow,
        leave_s=leave_s,
        stopping=stopping,
        at_boundary=lambda: None,
    )
    return script, loop.run()


def test_every_step_is_booked_once_and_the_last_loss_is_told(island: Island) -> None:
    script, finished = train(island, [NOTHING] * 5 + [FINISHED])
    assert finished
    assert [None if done is None else done.tokens for done in script.done] == [None] + [TOKENS] * 5
    losses = [done.loss for done in script.done if done is not None]
    assert losses[0] is None  # the first step is still in flight, or was not looked at yet
    assert losses[-1] is not None
    assert losses[-1] < 0  # down from 0


def test_a_version_is_between_the_steps_around_its_boundary(island: Island) -> None:
    theta = np.full(4, 10, np.float32)
    write = Boundary([(0, Apply(theta, None))], [0], stop=False, wait=False, finished=False)
    script, _ = train(island, [NOTHING, NOTHING, write, NOTHING, FINISHED])
    # two steps before the boundary were overwritten, what was read is the version, two came after it
    np.testing.assert_array_equal(script.readers[0](), theta)
    rate = SETTINGS.inner.learning_rate
    np.testing.assert_allclose(np.asarray(island.params()["x"]), 10 - 2 * rate, rtol=1e-5)


def test_steps_of_two_programs_do_as_those_of_one_and_nothing_of_a_boundary_is_begun_before_the_first_has_ended() -> None:
    theta, measured = np.full(4, 10, np.float32), list[bool]()
    write = Boundary([(0, Apply(theta, None))], [0], stop=False, wait=False, finished=False)

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
    write = Boundary([(0, Apply(np.full(4, 10, np.float32), None, reset=reset))], [0], stop=False, wait=False, finished=False)
    script, _ = train(island, [write, FINISHED], settings=mixing)
    np.testing.assert_array_equal(script.readers[0](), np.full(4, value, np.float32))  # it was 0


def test_a_process_that_is_asked_to_end_books_the_step_in_flight(island: Island) -> None:
    asked = iter([False, False, True])
    script, finished = train(island, [NOTHING] * 3, stopping=lambda: next(asked))
    assert not finished
    assert [done is not None for done in script.done] == [False, True, True]
    assert script.leaves_at == 2


def test_it_ends_when_its_last_work_is_merged_and_takes_no_step_until_then(island: Island) -> None:
    asked = itertools.chain([False, False], itertools.repeat(True))
    stop = Boundary([], [0], stop=True, wait=False, finished=False)
    script, finished = train(island, [NOTHING, NOTHING, stop, stop, stop], stopping=lambda: next(asked), unmerged=3)
    assert not finished
    assert [done is not None for done in script.done] == [False, True, True, False, False]
    assert len(script.readers) == 3  # rounds are answered all the while
    np.testing.assert_allclose(np.asarray(island.params()["x"]), -2 * SETTINGS.inner.learning_rate, rtol=1e-5)


def test_it_ends_in_time_whatever_is_unmerged(island: Island) -> None:
    asked = itertools.chain([False, False], itertools.repeat(True))
    stop = Boundary([], [], stop=True, wait=False, finished=False)
    boundaries = itertools.chain([NOTHING, NOTHING], itertools.repeat(stop))
    began_s = time.perf_counter()
    _, finished = train(island, boundaries, stopping=lambda: next(asked), unmerged=10**9, leave_s=0.3)
    assert not finished
    assert 0.3 <= time.perf_counter() - began_s < 5


def test_waiting_for_a_version_is_blocked_time_and_time_after_the_budget_is_not(island: Island) -> None:
    wait = Boundary([], [], stop=False, wait=True, finished=False)
    stop = Boundary([], [], stop=True, wait=False, finished=False)
    script, _ = train(island, [NOTHING, NOTHING, wait, NOTHING, NOTHING, FINISHED])
    assert sum(done.blocked_s for done in script.done if done is not None) > 0.05
    script, _ = train(island, [NOTHING, stop, NOTHING, NOTHING, FINISHED])
    assert sum(done.blocked_s for done in script.done if done is not None) < 0.05


class Clock:
    """A clock that stands still but where something is said to take time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


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

    class Output:
        def wait(self) -> float:
            clock.now_s += device_s
            return 1.0

        def metric_values(self) -> dict[str, float]:
            return {}

    class Device(Island):
        def begin_step(self, batch: Any, learning_rate: float, at: tuple[int, int] = (0, 0)) -> Any:
            clock.now_s += dispatch_s
            return Output()

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
    script, _ = train(Device(Slope(), SETTINGS), boundaries(), batches())
    done = [done for done in script.done if done is not None]
    # five steps were taken, of which four have been accounted for: 12 s, with three batches and three boundaries between them
    assert (sum(d.busy_s for d in done), sum(d.blocked_s for d in done), sum(d.data_s for d in done)) == (12.0, 0.75, 1.5)


def test_a_slow_learner_is_busy_all_the_time(island: Island) -> None:
    island.step(np.float32(1), 0.0).wait()  # compiled
    began_s = time.perf_counter()
    script, _ = train(island, [NOTHING] * 20 + [FINISHED], slow=50.0)
    # it is asleep for 49 parts of 50, and none of them is the system's fault
    assert sum(done.busy_s for done in script.done if done) > 0.5 * (time.perf_counter() - began_s)


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
