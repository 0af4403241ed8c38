"""Weights by hand."""

from __future__ import annotations

import pytest

from diloco.core.tensors.weights import weight


def test_quality_is_tokens_squared_over_steps() -> None:
    # 6000 tokens in 3 steps: 6000 * 2000
    assert weight(6000, 3, "quality") == 12_000_000
    # twice the tokens in the same steps count four times, the same tokens in twice the steps half
    assert weight(12_000, 3, "quality") == 4 * weight(6000, 3, "quality")
    assert weight(6000, 6, "quality") == weight(6000, 3, "quality") / 2
    # equal batches: quality is in proportion to the steps taken, as tokens are
    assert weight(2048 * 30, 30, "quality") / weight(2048 * 10, 10, "quality") == 3


def test_tokens_count_whatever_the_steps() -> None:
    assert weight(6000, 3, "tokens") == weight(6000, 600, "tokens") == 6000


def test_equal_is_one() -> None:
    assert weight(1, 1, "equal") == weight(10**12, 7, "equal") == 1


@pytest.mark.parametrize("rule", ["quality", "tokens", "equal"])
@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (0, 5), (5, 0)])
def test_who_did_nothing_counts_nothing(tokens: int, steps: int, rule: str) -> None:
    assert weight(tokens, steps, rule) == 0  # type: ignore[arg-type]


def test_large_counts_are_exact() -> None:
    # the product is taken in whole numbers: 10**18 * 10**18 / 10**17
    assert weight(10**18, 10**17, "quality") == 1e19
