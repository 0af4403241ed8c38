"""A process of a learner makes its rows of a batch alone, where the task can, and they are those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco_learner.data.feed import Streams
from diloco_learner.jax.agreement import rows_to_make
from diloco_learner.jax.mesh import AXES, ROWS, place, rows_alone
from diloco_learner.task import Task, makes_rows

SETTINGS = RunSettings(learners=2, seed=7)


class Whole:
    """A task whose batches have rows, and a temperature that is no row's."""

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        for number in range(start, 1000):
            x = np.random.default_rng((seed, share, number)).normal(size=(8, 3))
            yield {"x": x, "mask": x[:, 0] > 0, "temperature": np.float32(number)}


class Rows(Whole):
    """The same, which makes rows alone."""

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[Any]:
        for batch in super().batches(share, shares, seed, start):
            yield batch if rows is None else rows_alone(batch, rows, 8)


class Shifted(Whole):
    """Its rows alone are others."""

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[Any]:
        for batch in super().batches(share, shares, seed, start):
            yield batch if rows is None else rows_alone(batch, range(rows.start - 1, rows.stop - 1), 8)


def first(task: Whole) -> Any:
    return next(task.batches(0, 2, 7, 0))


def test_a_task_that_knows_no_rows_makes_whole_batches() -> None:
    assert not makes_rows(cast(Task, Whole()))
    assert rows_to_make(cast(Task, Whole()), SETTINGS, first(Whole()), range(4, 8)) is None
    batch = Streams(cast(Task, Whole()), SETTINGS, None).batch(0, 5)
    assert batch["x"].shape == (8, 3)


def test_a_task_that_knows_rows_is_asked_for_them_from_any_batch_on() -> None:
    own = rows_to_make(cast(Task, Rows()), SETTINGS, first(Rows()), range(4, 8))
    assert own == range(4, 8)
    whole, alone = (Streams(cast(Task, Rows()), SETTINGS, rows) for rows in (None, own))
    for share, index in ((0, 5), (0, 6), (1, 2), (3, 9)):  # share 3 is a further lap over share 1
        expected, batch = whole.batch(share, index), alone.batch(share, index)
        assert {name: values.tobytes() for name, values in batch.items()} == {
            "x": expected["x"][4:].tobytes(),
            "mask": expected["mask"][4:].tobytes(),
            "temperature": expected["temperature"].tobytes(),
        }


def test_rows_that_are_not_those_of_the_whole_batch_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"batches\(\.\.\., rows=range\(4, 8\)\) gives other rows than the whole batch has"):
        rows_to_make(cast(Task, Shifted()), SETTINGS, first(Shifted()), range(4, 8))


def test_what_is_neither_whole_nor_the_own_rows_is_named() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)
    split, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec())
    path = (jax.tree_util.DictKey("x"),)
    shape = jax.ShapeDtypeStruct((8, 3), np.float32)
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    np.testing.assert_array_equal(place(path, values, shape, split, own=range(8)), values)
    for sharding, wrong in ((split, values[:5]), (whole, values[4:]), (split, values[:, :2])):
        with pytest.raises(SettingsError, match=r"batches\(\) gave x as \[.*\], expected \[8, 3\], or rows 4 to 7 of it"):
            place(path, wrong, shape, sharding, own=range(4, 8))
