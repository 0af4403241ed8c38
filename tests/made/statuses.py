"""Statuses as a coordinator may answer them."""

from __future__ import annotations

import math
import random
from typing import Any


def fake_status(learners: int = 4, shards: int = 2, progress: float = 0.63, **changed: Any) -> dict[str, Any]:
    """A status as it may look part of the way through a run of two minutes."""
    chance = random.Random(7)
    wall_s = 118.0 * progress
    states = ["stepping", "stepping", "sending", "stepping", "recovering", "gone"]

    def loss_at(time_s: float, noise: float) -> float:
        return 1.55 + 4.0 * math.exp(-time_s / 9) + 0.9 * math.exp(-time_s / 60) + chance.gauss(0, noise)

    return {
        "run": "run",
        "preset": "decoupled",
        "state": "training",
        "wall_s": wall_s,
        "eta_s": 118.0 - wall_s,
        "tokens_budget": 3_000_000,
        "tokens_processed": int(3_000_000 * progress),
        "tokens_merged": int(2_880_000 * progress),
        "versions": 402,
        "rounds": 408,
        "nats_url": "nats://127.0.0.1:4222",
        "parameters": 350_000,
        "units": "nats per byte",
        "learners": {
            f"learner-{m}": {
                "state": states[m % len(states)],
                "step": int(733 * progress) + m,
                "tokens": int(750_000 * progress),
                "tokens_per_s": 6_350.0 + 17 * m,
                "loss": 1.912 + 0.011 * m,
                "step_s": 0.161,
                "busy_fraction": 0.991 - 0.01 * m,
                "blocked_fraction": 0.004,
                "bytes_up": 12_310_000 + 9_000 * m,
                "bytes_down": 31_700_000,
                "rounds_merged": 398 - m,
                "rounds_missed": m,
                "seen_s_ago": 0.1,
            }
            for m in range(learners)
        },
        "shards": {
            f"syncer-{s}": {
                "fragments": 12,
                "rounds": 204,
                "versions": 201,
                "open": [
                    {"fragment": 3 + 7 * s, "answers": 2, "quorum": 1, "waited_s": 0.14},
                    {"fragment": 8 + s, "answers": 0, "quorum": 1, "waited_s": 0.02},
                ],
                "refused": 0,
                "bytes_in": 24_600_000,
                "bytes_out": 63_100_000,
                "seen_s_ago": 0.2,
            }
            for s in range(shards)
        },
        "fragments": [{"fragment": p, "version": 16, "tokens_merged": 1, "owner": f"syncer-{p % 2}"} for p in range(24)],
        "validation": [[t, t * 25_000, loss_at(t, 0)] for t in range(4, int(wall_s), 4)],
        "loss": {
            f"learner-{m}": [[t / 2, t * 12_000, loss_at(t / 2, 0.06)] for t in range(1, int(2 * wall_s))]
            for m in range(learners)
        },
    } | changed
