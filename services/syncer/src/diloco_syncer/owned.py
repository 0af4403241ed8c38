"""What a syncer has of a fragment that it owns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco.core import fold
from diloco.core.fold import Replica
from diloco.core.fragments import Fragment
from diloco.core.outliers import Norms
from diloco.core.round import Round
from diloco_syncer.replication import Replication

Vector = NDArray[np.float32]


@dataclass(eq=False)
class Owned:
    """A fragment's replica, its rounds, and the encoder's residual."""

    fragment: Fragment
    replica: Replica
    residual: Vector
    round: Round
    keyframe_sequence: int
    keyframe_version: int
    fence: int  # sequence of the last message on the head subject
    log_bytes: int  # of records since the keyframe
    refused: tuple[int, ...] = ()  # sequences of newer keyframes, which are not whole: another one is due
    replication: Replication | None = None  # in a run with regions
    checked_at_s: float = -math.inf  # when the fence was last known to be right
    announced_at_s: float = -math.inf
    busy: bool = False  # a version is being made, or the fragment handed over
    failed_change: int = 0  # number of the newest change that was to roll it back, and for which the log has no state any more
    keyframes: list[int] = field(default_factory=list)  # sequences of all that stay, the oldest first; empty: not known yet
    norms: Norms = field(default_factory=Norms)  # of its offers
    older: dict[int, Vector] = field(default_factory=dict)  # parameters by version, where merges need them

    @property
    def keyframe_bytes(self) -> int:
        """Size of a keyframe's content."""
        return fold.keyframe_bytes(self.fragment.size, self.replica.optimizer.moments)
