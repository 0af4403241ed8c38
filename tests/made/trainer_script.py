"""A trainer's loop with a scripted member, on a task small enough to follow by hand."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.schedule import Moment
from diloco.core.tensors.fragments import FragmentMap, build_map
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.process.observe import get_logger
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.data.feed import Batch
from diloco_learner.jax.island import Island
from diloco_learner.run.trainer import Trainer

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


def check_that_every_step_is_booked_once_and_the_last_loss_is_told(island: Any) -> None:
    script, finished = train(island, [NOTHING] * 5 + [FINISHED])
    assert finished
    assert [None if done is None else done.tokens for done in script.done] == [None] + [TOKENS] * 5
    losses = [done.loss for done in script.done if done is not None]
    assert losses[0] is None  # the first step is still in flight, or was not looked at yet
    assert losses[-1] is not None
    assert losses[-1] < 0  # down from 0


def check_that_a_process_that_is_asked_to_end_books_the_step_in_flight(island: Any) -> None:
    asked = iter([False, False, True])
    script, finished = train(island, [NOTHING] * 3, stopping=lambda: next(asked))
    assert not finished
    assert [done is not None for done in script.done] == [False, True, True]
    assert script.leaves_at == 2


def check_that_it_ends_in_time_whatever_is_unmerged(island: Any) -> None:
    asked = itertools.chain([False, False], itertools.repeat(True))
    stop = Boundary([], [], stop=True, wait=False, finished=False)
    boundaries = itertools.chain([NOTHING, NOTHING], itertools.repeat(stop))
    began_s = time.perf_counter()
    _, finished = train(island, boundaries, stopping=lambda: next(asked), unmerged=10**9, leave_s=0.3)
    assert not finished
    assert time.perf_counter() - began_s >= 0.3  # and it has ended, though not all is ever merged


def check_that_waiting_for_a_version_is_blocked_time_and_time_after_the_budget_is_not(island: Any) -> None:
    wait = Boundary([], [], stop=False, wait=True, finished=False)
    stop = Boundary([], [], stop=True, wait=False, finished=False)
    script, _ = train(island, [NOTHING, NOTHING, wait, NOTHING, NOTHING, FINISHED])
    assert sum(done.blocked_s for done in script.done if done is not None) > 0.05
    script, _ = train(island, [NOTHING, stop, NOTHING, NOTHING, FINISHED])
    assert sum(done.blocked_s for done in script.done if done is not None) < 0.05


# what holds of any island, whatever it computes with
TRAINER_RULES = (
    check_that_every_step_is_booked_once_and_the_last_loss_is_told,
    check_that_a_process_that_is_asked_to_end_books_the_step_in_flight,
    check_that_it_ends_in_time_whatever_is_unmerged,
    check_that_waiting_for_a_version_is_blocked_time_and_time_after_the_budget_is_not,
)
