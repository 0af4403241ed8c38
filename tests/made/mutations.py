"""Faults that are put into the code on purpose, for more than one simulation to find."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.core.learner.delta import ApplyOutcome, DeltaState

Patch = pytest.MonkeyPatch


def lost_tokens_forgotten(patch: Patch) -> None:
    """Tokens that a learner drops are not counted."""
    drop = DeltaState._drop

    def forgetful(self: DeltaState, **how: Any) -> ApplyOutcome:
        lost = self.lost_tokens
        carried = drop(self, **how)
        self.lost_tokens = lost
        return carried

    patch.setattr(DeltaState, "_drop", forgetful)
