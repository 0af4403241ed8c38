"""The settings that the links between sites have room for.

A link is looked at in both directions, each a :class:`LinkWay`. In a cycle of H steps it carries offers of the fragments that
the other end's syncers own, and versions of those that its own do, as the product sends them between regions (docs/regions.md).
Two things are asked of it: that versions come in time, for which :mod:`diloco_lab.bandwidth` gives the compute utilisation, and
that it is not so full that the run would give way by itself (:mod:`diloco.core.syncer.bandwidth`).

Not in the model: that fragments are not quite evenly owned, loss of packets, what zstd takes off, a second sending of combined
offers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from diloco.core.syncer.bandwidth import FULL
from diloco.core.tensors.quantise import body_bytes
from diloco.settings.presets import run_settings
from diloco.settings.run import Bits
from diloco_lab import bandwidth
from diloco_lab.bandwidth import MOST_STEPS, ModelJob, Schedule, least_settings
from diloco_lab.simulator.network import MEMBER_BYTES, OFFER_BYTES, RECORD_BYTES

PRESET = run_settings()
# what may be given up for a thin link, from what costs nothing that was measured (bits) to what costs most (steps)
PRECISIONS: tuple[Bits, ...] = (16, 8, 4)
FRAGMENTS = tuple(times * PRESET.fragments.count for times in (1, 4, 16, 64))
OVERLAPS = tuple(times * PRESET.round.overlap_steps for times in (1, 2, 4))
# docs/performance.md: beside the bodies, headers of TCP/IP and heartbeats
OVERHEAD = 1.07


@dataclass(frozen=True)
class ChosenSettings:
    """The settings that follow from the links."""

    bits: Bits = PRESET.codec.offer_bits
    steps: int = PRESET.round.steps
    overlap_steps: float = PRESET.round.overlap_steps
    fragments: int = PRESET.fragments.count
    merge: bool = False


@dataclass(frozen=True)
class LinkWay:
    """One direction of a link, and the learners at its ends. ``regions``: sites in all; ``step_s``: of the fastest learner."""

    bits_per_s: float
    delay_s: float
    parameters: int
    regions: int
    learners: int
    from_learners: int
    to_learners: int
    step_s: float

    def _fragment_bytes(self, choice: ChosenSettings, learners: int) -> float:
        """Return a fragment's bytes over the link one way: half of the fragments' offers, and half of their versions."""
        body = body_bytes(math.ceil(self.parameters / choice.fragments), choice.bits)
        offers = 1 if choice.merge else learners
        return OVERHEAD * (offers * (body + OFFER_BYTES) + body + RECORD_BYTES + MEMBER_BYTES * self.learners) / 2

    def cycle_bytes(self, choice: ChosenSettings) -> float:
        """Return the bytes of a cycle: offers of the other end's fragments, versions of this end's. All sites own as many."""
        return 2 * choice.fragments / self.regions * self._fragment_bytes(choice, self.from_learners)

    def load(self, choice: ChosenSettings) -> float:
        """Share of a cycle that its bytes keep the link busy."""
        return 8 * self.cycle_bytes(choice) / (self.bits_per_s * choice.steps * self.step_s)

    def _job(self, choice: ChosenSettings) -> tuple[ModelJob, Schedule]:
        """Return two datacenters between which as many bits pass each way.

        A fragment's version is in time if its offers and the version itself, which goes the other way, come over one after the
        other within the overlap: what the other way takes is taken off it.
        """
        fragments = max(1, round(2 * choice.fragments / self.regions))
        back_s = 8 * self._fragment_bytes(choice, self.to_learners) / self.bits_per_s + 2 * self.delay_s
        slack = choice.overlap_steps - back_s / self.step_s
        late_bits = fragments * max(0.0, -slack) * self.step_s * self.bits_per_s
        values = math.ceil((8 * self.cycle_bytes(choice) + late_bits) / choice.bits)
        overlap_steps = min(max(0.0, slack), choice.steps)
        return ModelJob(values, self.step_s, 2), Schedule(choice.bits, choice.steps, fragments, overlap_steps)

    def utilisation(self, choice: ChosenSettings) -> float:
        """Share of its time that a learner would compute if it waited for each version that is late."""
        return bandwidth.utilisation(*self._job(choice), self.bits_per_s)

    def fits(self, choice: ChosenSettings, wanted: float) -> bool:
        """Whether versions come in time, and the link is not so full that a run would give way."""
        return self.load(choice) <= FULL and self.utilisation(choice) >= wanted

    def least_steps(self, choice: ChosenSettings, wanted: float) -> int | None:
        """Return the smallest H, at least ``choice.steps``, that fits."""
        steps = max(choice.steps, math.ceil(choice.steps * self.load(choice) / FULL))
        if steps > MOST_STEPS:
            return None
        found = least_settings(*self._job(replace(choice, steps=steps)), self.bits_per_s, wanted, (choice.bits,))
        return found[0].steps if found else None


def settle(ways: Collection[LinkWay], wanted: float) -> ChosenSettings | None:
    """Return the settings that every way has room for, and that give up least; None if there are none.

    The smallest H first, of an equal H the smallest overlap, then the fewest fragments, then no merging in regions, then the
    most bits: int4 was measured to be as good as bf16 (algorithm.md section 1), so bits are given up before anything else.
    """
    if not ways:
        return ChosenSettings()
    ways = sorted(set(ways), key=lambda way: way.bits_per_s)  # what does not fit is found out soonest
    best: ChosenSettings | None = None
    for choice in _choices(several=any(way.from_learners > 1 for way in ways)):
        if best is not None and not all(way.fits(replace(choice, steps=best.steps - 1), wanted) for way in ways):
            continue
        steps: int | None = choice.steps
        for way in ways:
            steps = None if steps is None else way.least_steps(replace(choice, steps=steps), wanted)
        if steps is not None:
            best = replace(choice, steps=steps)
            if steps == PRESET.round.steps:
                break
    return best


def _choices(*, several: bool) -> Iterator[ChosenSettings]:
    for overlap_steps in OVERLAPS:
        for fragments in FRAGMENTS:
            for merge in (False, True) if several else (False,):
                for bits in PRECISIONS:
                    yield ChosenSettings(bits, PRESET.round.steps, overlap_steps, fragments, merge)


def needed_bits_per_s(way: LinkWay, choice: ChosenSettings, wanted: float) -> float | None:
    """Return the least rate at which settings fit a way, to three digits; None if no rate is enough."""
    low, high = way.bits_per_s, way.bits_per_s
    while not replace(way, bits_per_s=high).fits(choice, wanted):
        low, high = high, 2 * high
        if high > way.bits_per_s * 2**40:
            return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if replace(way, bits_per_s=middle).fits(choice, wanted) else (middle, high)
    return high
