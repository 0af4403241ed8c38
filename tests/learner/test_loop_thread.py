"""While the protocol's thread is there, Python's lock is handed over soon; afterwards the process has its own setting again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from diloco_learner.run.process import LOCK_WAIT_S, LoopThread


@pytest.fixture
def own() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("before_s", "within_s"), [(0.005, LOCK_WAIT_S), (LOCK_WAIT_S / 4, LOCK_WAIT_S / 4)])
def test_the_lock_is_handed_over_soon(before_s: float, within_s: float) -> None:
    sys.setswitchinterval(before_s)
    thread = LoopThread()
    try:
        assert sys.getswitchinterval() == pytest.approx(within_s, abs=2e-6)
    finally:
        thread.close()
    assert sys.getswitchinterval() == pytest.approx(before_s, abs=2e-6)
