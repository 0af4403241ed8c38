"""How long a test may wait: one bound, in seconds, times how slow this machine is now.

A test waits for an event, a file or a state. The bound ends only what hangs, so it is generous, and no test measures time by
it. ``FACTOR`` is measured once when tests start (:mod:`tests.harness.measuring`) and handed to every process by the
environment variable ``DILOCO_TEST_PACE``; 1 is the pace of the idle machine that ``measuring.REFERENCE_S`` was taken on.
"""

from __future__ import annotations

import os

from tests.harness.measuring import VARIABLE


def factor(environment: str | None) -> float:
    """Return the factor that ``DILOCO_TEST_PACE`` states; at least 1, and 1 where nothing was measured.

    Raises ValueError where the variable is no positive number.
    """
    if not environment:
        return 1.0
    try:
        stated = float(environment)
    except ValueError:
        stated = 0.0
    if not 0 < stated < 1000:
        raise ValueError(f"{VARIABLE}={environment}: expected a number above 0 and below 1000, such as 2.5")
    return max(1.0, stated)


FACTOR = factor(os.environ.get(VARIABLE))
DEADLINE_S = 120.0 * FACTOR  # of one wait
TEST_S = 480.0 * FACTOR  # of one test, all its waits together
LONG_TEST_S = 1800.0 * FACTOR  # of a test that is marked slow or makes containers


def scaled_s(seconds: float) -> float:
    """Return a time by which services judge each other, such as ``liveness.dead_s``, for a machine as slow as this one.

    A member that is alive must not be taken for dead only because it got no processor time.
    """
    return seconds * FACTOR
