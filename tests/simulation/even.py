"""Clusters of eight fragments, a round of one of them due in each step: whatever went wrong, rounds are even again soon after.

From two cycles after the last fault on, few versions are made in any step of the learner whose steps the cycle is counted in.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from functools import cache
from typing import Any

from tests.simulation.invariants import demand
from tests.simulation.learner import STEPS, Step
from tests.simulation.world import SMALL, World

from diloco.core.learner.slots import LIKE
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire import subjects

FRAGMENTS = 8
BATCH_TOKENS = 8
STEP_S = (0.1, 0.1, 0.2)
STEPS_OF_ALL = 320
MOST = 4  # versions in a step with a fragment a slot; a syncer that makes up for all that is overdue makes eight


@cache
def _map(fragments: int) -> FragmentMap:
    return build_map([TensorSpec(f"tensor-{index}", (STEPS,)) for index in range(fragments)], fragments, "balanced")


class EvenWorld(World):
    """A cluster in which it is looked how evenly versions are made once all is well; ``changes`` of its settings."""

    def __init__(self, seed: int, *, verbose: bool = False, preset: str = "decoupled", **changes: Any) -> None:
        ours = {"shards": 1, "fragments.count": FRAGMENTS, "round.steps": FRAGMENTS, "tokens": STEPS_OF_ALL * BATCH_TOKENS}
        self._settings = run_settings(
            preset, SMALL | ours | {name.replace("__", "."): value for name, value in changes.items()}
        )
        self.versions_s: list[tuple[float, int]] = []  # when a version was made, and of which fragment
        self.disturbed_s = 0.0  # when a process began, or a fragment had another owner
        self.steps_s: dict[str, list[float]] = {}  # by learner: when its steps began
        super().__init__(seed, verbose=verbose)

    def _make_map(self, *, state: bool) -> FragmentMap:
        return _map(self._settings.fragments.count)

    def _variant(self, number: int, regions: bool, merged: bool) -> RunSettings:
        return self._settings

    def draw_step_s(self, rng: random.Random) -> float:
        self.disturbed_s = self.now_s
        return rng.choice(STEP_S)

    def draw_tokens(self) -> int:
        return BATCH_TOKENS

    def take_step(self, step: Step, must_pass: dict[int, int]) -> int:
        self.steps_s.setdefault(step.learner, []).append(self.now_s)
        return super().take_step(step, must_pass)

    def stored(self, region: str, stream: str, subject: str, data: bytes, sequence: int) -> None:
        versions, takeovers = self.reference.versions_made, self.reference.takeovers
        super().stored(region, stream, subject, data, sequence)
        if self.reference.versions_made > versions:
            fragment = subjects.fragment_of(subject)
            assert fragment is not None
            self.versions_s.append((self.now_s, fragment))
        if self.reference.takeovers > takeovers:
            self.disturbed_s = self.now_s

    def settled(self) -> list[float]:
        """Return when steps of the reference began, from two cycles after the last fault on, until rounds are due at once."""
        since_s = max(self.disturbed_s, self.chaos.until_s)
        until_s = min(times[-1] for times in self.steps_s.values())
        return self._steps_of_reference(since_s, until_s)[2 * self.settings.round.steps :]

    def versions_in(self, steps: list[float]) -> list[tuple[int, int]]:
        """Return the versions made in these steps of the reference: the number of the step, and the fragment."""
        within = ((at_s, fragment) for at_s, fragment in self.versions_s if steps[0] < at_s <= steps[-1])
        return [(bisect_left(steps, at_s), fragment) for at_s, fragment in within]

    def _check_end(self) -> None:
        super()._check_end()
        steps = self.settled()
        if len(steps) < self.settings.round.steps or self.settings.round.learners_wait:
            return
        each = Counter(step for step, _ in self.versions_in(steps))
        most = max(each.values(), default=0)
        slot = -(-len(self.map.fragments) // self.settings.round.steps)  # fragments in one: all of it are due at once
        demand(most <= MOST + slot - 1, f"{most} versions in one step, long after the last fault: {sorted(each.items())}")
        self.stats["evenness looked at"] += 1
        self.stats[f"evenness: at most {most} versions in a step"] += 1

    def _steps_of_reference(self, since_s: float, until_s: float) -> list[float]:
        """Return when steps began of the first learner by name of those that are about as fast as the fastest."""
        steps_s = {name: [at_s for at_s in times if since_s <= at_s <= until_s] for name, times in sorted(self.steps_s.items())}
        taken = max(map(len, steps_s.values()))
        return next(times for times in steps_s.values() if len(times) * LIKE >= taken)
