"""A test's schedules in blocks, each a test of its own, so that several workers play them."""

from __future__ import annotations

import pytest


def in_blocks(schedules: int, size: int, now: int = 1) -> pytest.MarkDecorator:
    """Give a test its ``seeds``, so many at once; ``make test`` plays the first ``now`` blocks, ``make test-all`` all."""
    return pytest.mark.parametrize(
        "seeds",
        [
            pytest.param(
                range(begin, begin + size), id=f"from-{begin}", marks=[pytest.mark.slow] if begin >= now * size else []
            )
            for begin in range(0, schedules, size)
        ],
    )
