"""A run's needs of the machines and links of its services: bytes on disk, in memory, and over a link in a cycle.

A *cycle* is ``round.steps`` inner steps, in which every fragment has a round. Figures a parameter are those that
``docs/operations.md`` and ``docs/performance.md`` give. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco.core.log.fold import keyframe_bytes
from diloco.core.log.retention import keyframes_kept
from diloco.core.syncer.bandwidth import FULL, Level, levels
from diloco.core.tensors.fragments import FragmentMap
from diloco.core.tensors.outer import NESTEROV, AdamW
from diloco.core.tensors.quantise import body_bytes
from diloco.settings.run import Bits, RunSettings
from diloco_ops.doctor.check import Role

# of processes that have no model yet: imports, compiled kernels and, of a learner, JAX (measured: 0.23 and 0.39 GB)
IDLE_BYTES: dict[Role, int] = {
    "learner": 450_000_000,
    "evaluator": 450_000_000,
    "syncer": 250_000_000,
    "coordinator": 250_000_000,
}
LEARNER_BYTES, ONE_FRAGMENT_BYTES = 17, 26  # a parameter on the host; where all fragments have their rounds at once
OWNED_BYTES, FOLLOWED_BYTES = 16, 8  # of a syncer
# parameters, two moments, base, error and what is left of an offer; the newest, the one before, and the one being written
CHECKPOINT_BYTES, CHECKPOINTS = 25, 3
LOGS_BYTES = 200_000_000  # a tape and a log
CONTROL_BYTES = 10_000_000  # of the store that spans the regions: settings, members, who owns what


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a run's model."""

    size: int  # values: parameters, and state that is merged
    largest: int  # values of the largest fragment

    @classmethod
    def of(cls, fragment_map: FragmentMap) -> ModelSizes:
        """Return the sizes of a fragment map."""
        return cls(fragment_map.size, max(fragment.size for fragment in fragment_map.fragments))


@dataclass(frozen=True)
class ServiceWay:
    """One direction between a service and a server: the values that pass it in a cycle, and the fewest bits lost on them."""

    values: int
    best: Bits

    def bytes(self, level: Level) -> int:
        """Return the bytes of a cycle at a level, before zstd."""
        return body_bytes(self.values, level.bits)


def region_learners(settings: RunSettings) -> int:
    """Return the learners of one region, if they are spread evenly."""
    return math.ceil(settings.learners / max(1, len(settings.regions.names)))


def storage_bytes(settings: RunSettings, values: int) -> dict[str, int]:
    """Return the room that a server needs for a run's streams, in bytes by stream; of the log, before zstd."""
    moments = AdamW.moments if settings.outer.optimizer == "adamw" else NESTEROV.moments
    keyframe = keyframe_bytes(values, moments)
    cycle_bytes = keyframe * (1 + settings.log.keyframe_factor)
    kept = keyframes_kept(settings.log, values, moments)
    combined = 1 if settings.regions.merge else 0
    offers = (region_learners(settings) + combined) * body_bytes(values, settings.codec.offer_bits)
    # a keyframe is stored before the oldest goes
    found = {"log": math.ceil(kept * cycle_bytes) + keyframe, "offers": offers}
    return found | ({"archive": settings.log.archive_bytes} if settings.log.archive else {})


def memory_bytes(role: Role, settings: RunSettings, values: int) -> tuple[int, int]:
    """Return a service's memory on its host in bytes: as things should be, and at worst."""
    idle = IDLE_BYTES[role]
    if role == "coordinator":
        return idle, idle
    if role != "syncer":
        each = ONE_FRAGMENT_BYTES if settings.fragments.count == 1 else LEARNER_BYTES
        return idle + each * values, idle + ONE_FRAGMENT_BYTES * values
    # two learners' offers are counted in
    further = max(0, settings.learners - 2) * body_bytes(values, settings.codec.offer_bits)
    owned = 1 / settings.shards
    usual = owned * (OWNED_BYTES * values + further) + (1 - owned) * FOLLOWED_BYTES * values
    # the others are gone, and it owns everything
    return idle + math.ceil(usual), idle + OWNED_BYTES * values + further


def disk_bytes(role: Role, values: int, checkpoints: bool) -> int:
    """Return the bytes that a service's ``state_dir`` needs."""
    return LOGS_BYTES + (CHECKPOINTS * CHECKPOINT_BYTES * values if role == "learner" and checkpoints else 0)


def ways(role: Role, settings: RunSettings, values: int, *, far: bool) -> tuple[ServiceWay, ServiceWay]:
    """Return the ways to a server and from it. ``far``: it is another region's."""
    codec = settings.codec
    owned = math.ceil(values / settings.shards)
    learners = 1 if settings.regions.merge and far else region_learners(settings)
    if role == "learner":
        return ServiceWay(values, codec.offer_bits), ServiceWay(values, codec.record_bits)
    if role != "syncer":
        return ServiceWay(0, codec.offer_bits), ServiceWay(values, codec.record_bits)
    return ServiceWay(owned, codec.record_bits), ServiceWay(owned * learners, codec.offer_bits)


def fits(way: ServiceWay, settings: RunSettings, bytes_per_s: float, step_s: float) -> Level | None:
    """Return the best level at which a way keeps a link busy for at most ``FULL`` of a cycle; None: none does."""
    cycle_s = settings.round.steps * step_s
    found = (level for level in levels(way.best, settings) if way.bytes(level) <= FULL * bytes_per_s * cycle_s * level.pace)
    return next(found, None)


def needed_bytes_per_s(way: ServiceWay, settings: RunSettings, step_s: float) -> float:
    """Return the rate at which a way fits at its best level."""
    best = levels(way.best, settings)[0]
    return way.bytes(best) / (FULL * settings.round.steps * step_s)


def round_s(settings: RunSettings, model: ModelSizes, rtt_s: float, up_bytes_per_s: float, down_bytes_per_s: float) -> float:
    """Return the least time from opening a round of the largest fragment to its version's arrival, behind this link.

    The announcement, the offer and the record each go one way, and the record waits for the acknowledgement of one.
    """
    offer = body_bytes(model.largest, settings.codec.offer_bits) / up_bytes_per_s
    return 2 * rtt_s + offer + body_bytes(model.largest, settings.codec.record_bits) / down_bytes_per_s
