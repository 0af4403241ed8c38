"""The versions that a carrier has folded and not applied yet."""

from __future__ import annotations

import numpy as np

from diloco.core.learner.delta import DeltaValues
from diloco.processes.carrier import _Carried


def test_a_version_that_is_applied_after_the_log_went_back_takes_none_of_the_lower_numbers_with_it() -> None:
    thetas = {version: np.full(4, version, np.float32) for version in (4, 5, 6)}
    carried = _Carried(DeltaValues(thetas[4], error_feedback=False, as_read=False), version=4)
    decided = thetas[6]
    carried.thetas = {5: np.full(4, 50, np.float32)}  # the log lost versions 5 and 6, and another 5 was folded
    carried.version = 6
    carried.forget(decided)
    assert list(carried.thetas) == [5]


def test_a_version_that_is_applied_is_forgotten_with_those_folded_before_it() -> None:
    carried = _Carried(DeltaValues(np.zeros(4, np.float32), error_feedback=False, as_read=False), version=4)
    carried.thetas = {version: np.full(4, version, np.float32) for version in (5, 6, 7)}
    carried.forget(carried.thetas[6])
    assert list(carried.thetas) == [7]
