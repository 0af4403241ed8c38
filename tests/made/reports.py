"""Reports of runs, as they may be written."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

from diloco.settings.run import RunSettings

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def fake_report(learners: int = 4, fragments: int = 24, wall_s: float = 118.0, **changed: Any) -> dict[str, Any]:
    """A report as a run of two minutes may write it; the last learner is slow, the second was away for a while."""
    chance = random.Random(3)
    names = [f"learner-{m}" for m in range(learners)]

    def loss(at_s: float, noise: float) -> float:
        return 1.5 + 4.0 * math.exp(-at_s / 9) + 0.8 * math.exp(-at_s / 60) + chance.gauss(0, noise)

    activity: dict[str, list[list[Any]]] = {}
    for m, name in enumerate(names):
        at_s, spans = 1.0 + 0.2 * m, [[0.0, 1.0 + 0.2 * m, "starting"]]
        while at_s < wall_s - 2:
            length_s = chance.uniform(0.5, 3)
            if m == 1 and 50 < at_s < 58:
                at_s = 58.0
                spans.append([at_s, at_s + 3, "recovering"])
                at_s += 3
            spans.append([at_s, min(wall_s - 2, at_s + length_s), "stepping"])
            spans.append([at_s + length_s, min(wall_s - 2, at_s + length_s + 0.15), "sending"])
            at_s += length_s + 0.15
        spans.append([wall_s - 2, wall_s, "closing"])
        activity[name] = spans
    merges = []
    for version in range(1, 29):
        for fragment in range(fragments):
            at_s = (version + fragment / fragments) * wall_s / 30
            slow, away = learners - 1 if learners > 1 and version % 5 else None, 1 if 50 < at_s < 61 else None
            there = [name for m, name in enumerate(names) if m not in (slow, away)]
            weights = [chance.uniform(0.8, 1.2) for _ in there]
            merges.append(
                {
                    "wall_s": at_s,
                    "fragment": fragment,
                    "version": version,
                    "members": [
                        [name, weight / sum(weights), 4 if name == names[-1] else 0, 24]
                        for name, weight in zip(there, weights, strict=True)
                    ],
                    "quorum_s": 0.06,
                    "duration_s": 0.21,
                }
            )
    return {
        "format": 1,
        "run": "run",
        "preset": "decoupled",
        "wall_s": wall_s,
        "parameters": 347_000,
        "val_loss": 1.6213,
        "val_loss_initial": 5.561,
        "tokens_budget": 3_000_000,
        "tokens_processed": 3_001_344,
        "tokens_merged": 2_861_000,
        "rounds": 676,
        "versions": 672,
        "baselines": {"unigram": 3.297, "bigram": 2.513, "4-gram": 1.802},
        "learners": {
            name: {
                "steps": 733 - 9 * m,
                "tokens_processed": 750_336,
                "tokens_merged": 731_000 - 9_000 * m,
                "tokens_lost": 0,
                "busy_fraction": 0.991,
                "blocked_fraction": 0.0042 - 0.0003 * m,
                "bytes_up": 19_400_000,
                "bytes_down": 21_700_000 + 100_000 * m,
                "rounds_merged": 670 - 40 * m,
                "rounds_missed": 2 + 40 * m,
                "step_s": 0.161,
            }
            for m, name in enumerate(names)
        },
        "fragments": [
            {
                "fragment": p,
                "parameters": 14_400,
                "embedding": p == 0,
                "owner": f"syncer-{p % 2}",
                "versions": 28,
                "tokens_merged": 2_861_000,
                "tokens_lost": 0,
                "state_hash": hashlib.sha256(bytes([p])).hexdigest(),
            }
            for p in range(fragments)
        ],
        "data": {
            "batch_tokens": 2048,
            "shares": [
                {"share": m, "learners": [name], "trained": 731, "merged": 712, "lost": 3, "repeated": 4}
                for m, name in enumerate(names)
            ],
            "errors": [],
        },
        "traffic": {"bytes_up": 77_600_000, "bytes_down": 87_400_000, "bytes_data_parallel": 6_060_000_000, "ratio": 36.7},
        "settings": RunSettings().model_dump(),
        "sample": "def test_read(self):\n"
        "    self.assertEqual(len(value), 2)\n    for name in self.names:\n        yield <name> & 1\n",
        "series": {
            "learners": {
                name: [[t * wall_s / 700, t * 4286, t, loss(t * wall_s / 700, 0.07)] for t in range(1, 700)] for name in names
            },
            "global": [[t, t * 24_000, loss(t, 0)] for t in range(3, int(wall_s), 4)],
            "activity": activity,
            "merges": merges,
        },
    } | changed


def report_with_regions(**changed: Any) -> dict[str, Any]:
    """A report of a run in three regions: eu, with two learners, was away for 20 s, and brought its work along."""
    report = fake_report(learners=4, fragments=2)
    for merged in report["series"]["merges"]:
        away = 40 < merged["wall_s"] < 60
        merged["syncer"] = "syncer-us" if away or merged["fragment"] == 0 else "syncer-eu"
        late = 60 <= merged["wall_s"] < 64
        merged["members"] = [
            [f"learner-{m}", 0.25, 0, 100 if late and m in (1, 2) else 24] for m in range(4) if m not in (1, 2) or not away
        ]
    link = {"control_bytes": 1_500, "bulk_bytes": 2_500_000, "header_bytes_estimated": 90_000}
    regions: dict[str, Any] = {
        "us": {"learners": ["learner-0"], "syncers": ["syncer-us"], "fragments": 1, "absences": []},
        "eu": {"learners": ["learner-1", "learner-2"], "syncers": ["syncer-eu"], "fragments": 1, "absences": [[40.0, 60.0]]},
        "ap": {"learners": ["learner-3"], "syncers": ["syncer-ap"], "fragments": 0, "absences": [[110.0, None]]},
    }
    learners = [name for region in regions.values() for name in region["learners"]]
    periods = [
        {"from_s": 0.0, "to_s": 40.0, "away": [], "versions": 24, "learners": learners, "together": [[24] * 4] * 4},
        {"from_s": 40.0, "to_s": 60.0, "away": ["eu"], "versions": 5, "learners": learners, "together": [[5, 0, 0, 5]] * 4},
    ]
    borders = [
        {"from": "us", "to": "eu", "payload_bytes": 2_400_000, "link": link},
        {"from": "us", "to": "control", "payload_bytes": None, "link": link | {"bulk_bytes": 0}},
    ]
    traffic = report["traffic"] | {"borders": borders}
    return report | {"regions": regions, "together": periods, "traffic": traffic} | changed
