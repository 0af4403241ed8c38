"""Tokens that a loss counts: they are known ahead of a step, booked as counted, and weigh validation losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.made.trainer_script import FINISHED, NOTHING, SETTINGS, Script

from diloco.core.learner.accounts import STUCK_STEPS, StepDone
from diloco.core.tensors.fragments import build_map
from diloco.errors import SettingsError
from diloco.process.observe import get_logger
from diloco_learner.data.feed import Batch
from diloco_learner.jax.island import Island
from diloco_learner.run.trainer import Trainer
from diloco_learner.task import Aux

ROWS = 7


def rows_of(count: int, *, value: float = 1.0) -> dict[str, Any]:
    """Return a batch of which the first ``count`` rows count."""
    return {"x": np.full((ROWS, 4), value, np.float32), "mask": np.arange(ROWS) < count}


class Masked:
    """Loss: the mean of the rows' products with the parameters, over the rows that count; 0 / 0 where none does."""

    tokens_per_batch = ROWS

    def init(self, key: jax.Array) -> Any:
        return {"w": jnp.zeros(4)}

    def loss(self, params: Any, batch: Any) -> Any:
        each, mask = batch["x"] @ params["w"], batch["mask"]
        tokens = jnp.sum(mask)
        mean = jnp.sum(each * mask) / tokens
        return mean, Aux({"twice": 2 * mean}, tokens=tokens)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return itertools.repeat(rows_of(3))

    def validation(self) -> list[Any]:
        return [rows_of(6, value=1.0), rows_of(2, value=5.0), rows_of(0, value=100.0)]


def trained(island: Any, counts: list[int], *, ahead: bool = False) -> tuple[list[StepDone], list[StepDone | None]]:
    """Train on batches of which so many rows count; return the steps as they were booked, and as they were seen in flight."""
    script = Script(build_map(island.tensors(), 1), [NOTHING] * len(counts) + [FINISHED], unmerged=0)
    seen: list[StepDone | None] = []
    batches = (Batch(0, index, rows_of(count)) for index, count in enumerate(itertools.chain(counts, itertools.repeat(1))))
    Trainer(
        island,
        script,
        batches,
        SETTINGS,
        get_logger(),
        tokens_per_batch=ROWS,
        slow=1.0,
        leave_s=1.0,
        stopping=lambda: False,
        at_boundary=lambda: None,
        look_ahead=(lambda flight, batch: seen.append(flight)) if ahead else None,
    ).run()
    return [done for done in script.done if done is not None], seen


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_says_how_many_tokens_its_loss_has_counted(apart: bool, compiled: bool) -> None:
    island = Island(Masked(), SETTINGS, apart=apart)
    if compiled:
        island.check(rows_of(1))
        for program in island.trace(rows_of(1)):
            program.compile()
    outputs = [island.step(rows_of(count), 0.1) for count in (5, 1, 7, 2)]
    assert [output.tokens() for output in outputs] == [5, 1, 7, 2]


def test_what_counts_them_ahead_of_the_step_computes_no_model() -> None:
    step, count = (str(program.compile().as_text()) for program in Island(Masked(), SETTINGS).trace(rows_of(1)))
    assert "f32[7,4]" in step
    assert "f32" not in count, "the mask alone"


def test_a_task_that_does_not_count_has_no_program_more() -> None:
    class Whole(Masked):
        def loss(self, params: Any, batch: Any) -> Any:
            return super().loss(params, batch)[0]

    island = Island(Whole(), SETTINGS)
    assert len(island.trace(rows_of(3))) == 1
    assert island.step(rows_of(3), 0.1).tokens() is None


def test_a_count_may_depend_on_the_model() -> None:
    class Reached(Masked):
        def loss(self, params: Any, batch: Any) -> Any:
            loss, _ = super().loss(params, batch)
            return loss, Aux(tokens=jnp.sum(batch["x"] @ params["w"] > -0.3))

    island = Island(Reached(), SETTINGS)
    counts = [island.step(rows_of(7), 0.1).tokens() for _ in range(3)]
    assert counts == [7, 0, 0], "each of the 4 parameters falls by 0.1 in the first step, and none without tokens"


def test_a_first_batch_without_tokens_is_refused_before_a_run() -> None:
    with pytest.raises(SettingsError, match="counts no token in the first batch of share 0, by which a step is rehearsed"):
        Island(Masked(), SETTINGS).rehearse(rows_of(0))


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_without_tokens_changes_nothing(apart: bool) -> None:
    island = Island(Masked(), SETTINGS, apart=apart)
    island.step(rows_of(3), 0.1).wait()  # its momentum would go on
    before = island.state()
    output = island.step(rows_of(0), 0.1)
    assert math.isnan(output.wait())
    assert output.tokens() == 0
    for name, values in island.state().items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)

    class Finite(Masked):
        def loss(self, params: Any, batch: Any) -> Any:
            return jnp.sum(params["w"]) * 0, Aux(tokens=jnp.sum(batch["mask"]))

    finite = Island(Finite(), SETTINGS, apart=apart)
    finite.load_state(before)
    finite.step(rows_of(0), 0.1).wait()
    np.testing.assert_array_equal(finite.state()["params/w"], before["params/w"])


def test_the_trainer_books_what_was_counted_whether_looked_at_ahead_or_not() -> None:
    counts = [3, 7, 1, 0, 5]
    for ahead in (False, True):
        done, seen = trained(Island(Masked(), SETTINGS), counts, ahead=ahead)
        assert [(step.tokens, step.most_tokens, step.batch) for step in done] == [
            (3, 7, 0), (7, 7, 1), (1, 7, 2), (1, 7, 3), (5, 7, 4),
        ], "one without tokens counts as one, the least that the protocol has"  # fmt: skip
        assert [flight and flight.tokens for flight in seen] == ([None, 3, 7, 1, 1, 5] if ahead else [])
    losses = [step.loss for step in done]
    assert losses[-1] is not None
    assert math.isfinite(losses[-1]), "the loss of the step without tokens is shown nowhere"


def test_many_steps_without_tokens_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Island(Masked(), SETTINGS), [0] * (STUCK_STEPS + 3))
    said = capsys.readouterr()
    assert (said.out + said.err).count("steps_without_tokens") == 1


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (
            lambda mask: jnp.sum(mask) + 5,
            r"counted 8 tokens in batch 9 of share 2, .*0 to tokens_per_batch = 7: set .*line \d+",
        ),
        (lambda mask: -jnp.sum(mask), "counted -3 tokens in batch 9 of share 2"),
        (lambda mask: jnp.sum(mask) / 2, r"counted 1\.5 tokens in batch 9 of share 2"),
        (lambda mask: mask, r"returned Aux\(tokens\) as bool\[7\], expected one whole number, .*test_tokens\.py, line \d+"),
        (lambda mask: jnp.sum(mask, dtype=jnp.bfloat16), r"returned Aux\(tokens\) as bfloat16\[\], expected one whole number"),
        (lambda mask: "three", r"returned Aux\(tokens\) as a str, expected one whole number"),
    ],
)
def test_what_is_no_count_is_refused(tokens: Any, said: str) -> None:
    class Wrong(Masked):
        def loss(self, params: Any, batch: Any) -> Any:
            return super().loss(params, batch)[0], Aux(tokens=tokens(batch["mask"]))

    with pytest.raises(SettingsError, match=said):
        Island(Wrong(), SETTINGS).step(rows_of(3), 0.1, (2, 9)).tokens()


def test_a_validation_batch_counts_as_much_as_its_tokens() -> None:
    island = Island(Masked(), SETTINGS)
    island.load_state(island.state() | {"params/w": np.full(4, 0.25, np.float32)})  # so a row's product is its value
    found = island.evaluation()
    assert found.loss == pytest.approx((6 * 1 + 2 * 5) / 8)
    assert found.values == pytest.approx({"val/twice": 4.0})


def test_a_validation_set_without_a_token_is_refused() -> None:
    class Empty(Masked):
        def validation(self) -> Any:
            return {"seen": [rows_of(2)], "unseen": [rows_of(0)] * 2}

    with pytest.raises(SettingsError, match="the loss counts no token in validation set 'unseen': leave some of its labels"):
        Island(Empty(), SETTINGS).evaluation()
