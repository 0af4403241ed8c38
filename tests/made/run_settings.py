"""Settings of a run for tests: a small run of a kind, with changes."""

from __future__ import annotations

from typing import Any

from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings

# rounds of three learners and one fragment, H = 4; liveness ends after 5 s
ROUNDS: dict[str, Any] = {
    "learners": 3,
    "shards": 1,
    "fragments.count": 1,
    "round.steps": 4,
    "tokens": 1000,
    "task.name": "tests:round",
}
# merges of one fragment that can be done by hand
MERGES: dict[str, Any] = {
    "shards": 1,
    "fragments.count": 1,
    "outer.learning_rate": 0.5,
    "outer.momentum": 0.0,
    "codec.record_bits": 32,
    "merge.weights": "tokens",
}
# a learner's state machine over two fragments
WORLD: dict[str, Any] = {
    "tokens": 10**9,
    "round.steps": 4,
    "fragments.count": 2,
    "learners": 2,
    "codec.offer_bits": 8,
}
# claims of a learner of the built-in task
CLAIMS: dict[str, Any] = {"learners": 3, "tokens": 1_000_000}


def settings_of(kind: dict[str, Any], preset: str = "decoupled", /, **changes: Any) -> RunSettings:
    """Return the settings of a kind of run, with changes such as ``round__steps=8`` or ``**{"round.steps": 8}``."""
    return run_settings(preset, kind | {name.replace("__", "."): value for name, value in changes.items()})
