"""A short siege of each role: a few hundred actions of the long one (``python -m tests.services.siege``).

:meth:`tests.services.siege.Siege.run` demands that a version of every fragment is made after the last action, and none is lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.services.forking import Nursery
from tests.services.siege import ROLES, besiege

ACTIONS = 400


@pytest.mark.slow
@pytest.mark.parametrize("regions", [False, True], ids=["", "regions"])
@pytest.mark.parametrize("role", ROLES)
async def test_an_insider_ends_nothing_and_loses_nothing(nursery: Nursery, tmp_path: Path, role: str, regions: bool) -> None:
    outcome = await besiege(nursery, tmp_path, role, actions=ACTIONS, rate=200, seed=3, base_s=1.0, regions=regions)
    assert sum(outcome.sent.values()) >= ACTIONS
    assert (outcome.silent, outcome.keys_changed, outcome.logs_damaged) == ([], [], []), outcome.row
    assert outcome.refused > 0  # what it does to the pace, the long siege measures
