"""Tokens that the loss of a torch task counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make torch")

from diloco_learner.pytorch import Aux  # noqa: E402
from diloco_learner.pytorch.island import TorchIsland  # noqa: E402
from diloco_learner.pytorch.transfers import Transfers  # noqa: E402

ROWS = 7
SETTINGS: RunSettings = run_settings(overrides={"fragments.count": 1, "shards": 1, "inner.optimizer": "adamw"})


def rows_of(count: int, *, value: float = 1.0) -> dict[str, Any]:
    """Return a batch of which the first ``count`` rows count."""
    return {"x": np.full((ROWS, 4), value, np.float32), "mask": np.arange(ROWS) < count}


class Masked:
    """Loss: the mean of the rows' products with the parameters, over the rows that count; 0 / 0 where none does."""

    tokens_per_batch = ROWS

    def module(self) -> Any:
        module = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(module.weight, 0.25)
        return module

    def loss(self, module: Any, batch: Any) -> Any:
        each, mask = module(torch.from_numpy(batch["x"]))[:, 0], torch.from_numpy(batch["mask"])
        tokens = mask.sum()
        return (each * mask).sum() / tokens, Aux(tokens=tokens)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return itertools.repeat(rows_of(3))

    def validation(self) -> list[Any]:
        return [rows_of(6, value=1.0), rows_of(2, value=5.0), rows_of(0, value=100.0)]


def made(task: Any = None) -> TorchIsland:
    island = TorchIsland(Masked() if task is None else task, SETTINGS)
    island.rehearse(rows_of(3))
    return island


def values(island: TorchIsland) -> Any:
    return island.read(island.fragments().fragments[0]).to_host()


def test_a_step_says_how_many_tokens_its_loss_has_counted() -> None:
    island = made()
    outputs = [island.begin_step(rows_of(count), 0.1) for count in (5, 1, 7)]
    assert [output.tokens() for output in outputs] == [5, 1, 7]

    class Whole(Masked):
        def loss(self, module: Any, batch: Any) -> Any:
            return super().loss(module, batch)[0]

    assert made(Whole()).begin_step(rows_of(5), 0.1).tokens() is None


def test_a_step_without_tokens_changes_nothing() -> None:
    island = made()
    island.begin_step(rows_of(3), 0.1).wait()
    before = values(island)
    output = island.begin_step(rows_of(0), 0.1)
    assert math.isnan(output.wait())
    assert output.tokens() == 0
    np.testing.assert_array_equal(values(island), before)
    assert math.isfinite(island.begin_step(rows_of(3), 0.1).wait())
    assert (values(island) != before).all()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (lambda mask: mask.sum() + 5, r"counted 8 tokens in batch 9 of share 2, .*0 to tokens_per_batch = 7: set .*line \d+"),
        (lambda mask: -mask.sum(), "counted -3 tokens in batch 9 of share 2"),
        (lambda mask: mask.sum() / 2, r"counted 1\.5 tokens in batch 9 of share 2"),
        (lambda mask: mask, r"returned Aux\(tokens\) as bool\[7\], expected one whole number, .*tokens\.py, line \d+"),
        (lambda mask: mask.sum().bfloat16(), r"returned Aux\(tokens\) as bfloat16\[\], expected one whole number"),
        (lambda mask: "three", r"returned Aux\(tokens\) as a str, expected one whole number"),
    ],
)
def test_what_is_no_count_is_refused(tokens: Any, said: str) -> None:
    class Wrong(Masked):
        def loss(self, module: Any, batch: Any) -> Any:
            return super().loss(module, batch)[0], Aux(tokens=tokens(torch.from_numpy(batch["mask"])))

    output = TorchIsland(Wrong(), SETTINGS).begin_step(rows_of(3), 0.1, (2, 9))
    for asked in (output.tokens, output.wait):
        with pytest.raises(SettingsError, match=said):
            asked()


def test_an_error_of_a_loss_is_also_that_of_who_waits_for_its_tokens() -> None:
    class Fails(Masked):
        def loss(self, module: Any, batch: Any) -> Any:
            raise ValueError("no loss today")

    with pytest.raises(SettingsError, match="no loss today"):
        TorchIsland(Fails(), SETTINGS).begin_step(rows_of(3), 0.1).tokens()


def test_a_validation_batch_counts_as_much_as_its_tokens() -> None:
    assert TorchIsland(Masked(), SETTINGS).evaluation().loss == pytest.approx((6 * 1 + 2 * 5) / 8)


def test_a_whole_number_keeps_all_its_digits_on_its_way_from_a_device() -> None:
    for number in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 24) + 1, (1 << 27) - 1):
        assert Transfers().whole_number(torch.tensor(number))() == number
