"""An island for one's model and devices: mesh, fragments, and the memory, bytes and seconds of each device and host.

Pure arithmetic. Bytes a parameter are those of docs/islands.md. The default rates were measured on two busy cores
(docs/performance.md), so a host of one's own is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from diloco.core.tensors.quantise import body_bytes
from diloco.errors import SettingsError
from diloco.settings.presets import run_settings

PRESET = run_settings()
Optimizer = Literal["adamw", "muon"]
STATE_BYTES: dict[Optimizer, int] = {"adamw": 16, "muon": 12}  # a parameter: value, gradient, moments
MOMENT_BYTES: dict[Optimizer, int] = {"adamw": 8, "muon": 4}
VALUE_BYTES, GRADIENT_BYTES = 4, 4
IN_TURN_BYTES, AT_ONCE_BYTES = 12, 16  # a parameter of a learner's hosts, by how many rounds are under way
ACCOUNT_BYTES = 7  # of a checkpoint: base, error, and an offer with its error
KEYFRAME_BYTES = 8  # a joiner reads value and momentum, and not the residual
STATE_SHARE = 0.6  # of a device: activations, a fragment's rows and XLA's own need the rest
FRAGMENTS = (PRESET.fragments.count, 96, 384, 1536)
FRAGMENT_BYTES = 1 << 30  # the most that one fragment may have, as the host's float32 vector
DISK_BYTES_PER_S = 80e6  # 23 MiB in 0.3 s: bench/islands.py checkpoints
JOIN_BYTES_PER_S = 66e6  # keyframes over 1 Gbit/s and 80 ms: bench/log_readers.py joining


@dataclass(frozen=True)
class Hardware:
    """The devices of one learner, evenly on its hosts; rates are of one host."""

    devices: int
    memory_bytes: float  # of a device
    hosts: int = 1
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    join_bytes_per_s: float = JOIN_BYTES_PER_S


@dataclass(frozen=True)
class IslandPlan:
    """The mesh and fragments of an island, and the needs that follow.

    Attributes:
        state_bytes: of a device: parameters, gradients and optimizer state; activations come on top.
        copy_fits: whether a device has room for a checkpoint's copy too; else steps wait while one is written.
        host_bytes: of a host, with rounds in turn; ``host_most_bytes`` with all rounds at once.
        sent_bytes: that a host sends to NATS in a cycle of ``round.steps`` steps; as much comes back.
        rows_bytes: that a host sends to the others in a cycle at most: rows of snapshots and versions.
        checkpoint_s, join_s: of each host, all at the same time.
    """

    parameters: int
    optimizer: Optimizer
    hardware: Hardware
    data: int
    fsdp: int
    fragments: int
    state_bytes: float
    copy_fits: bool
    fragment_bytes: float
    host_bytes: float
    host_most_bytes: float
    sent_bytes: float
    rows_bytes: float
    checkpoint_bytes: float
    checkpoint_s: float
    join_bytes: float
    join_s: float


def island(parameters: int, hardware: Hardware, optimizer: Optimizer = "adamw") -> IslandPlan:
    """Return the island of a model: as few devices share a replica as have room for it, the others are further replicas.

    Raises:
        SettingsError: hosts do not divide the devices, or the model does not fit them.
    """
    devices, hosts = hardware.devices, hardware.hosts
    if devices % hosts:
        raise SettingsError(
            f"--hosts {hosts}: {devices} devices are not divisible by them; all hosts must have equal numbers of devices"
        )
    needed = STATE_BYTES[optimizer] * parameters
    fsdp = fewest_shards(needed, hardware)
    if fsdp is None:
        enough = math.ceil(needed / (STATE_SHARE * hardware.memory_bytes))
        raise SettingsError(
            f"--parameters {parameters:.3g}: {needed / 1e9:.3g} GB of parameters, gradients and optimizer state do not "
            f"fit into {STATE_SHARE:.0%} of {devices} devices of {hardware.memory_bytes / 1e9:.3g} GB: use {enough} "
            "devices or more, or larger ones"
        )
    fragments = next((count for count in FRAGMENTS if VALUE_BYTES * parameters / count <= FRAGMENT_BYTES), FRAGMENTS[-1])
    fragment_bytes = VALUE_BYTES * parameters / fragments
    kept = VALUE_BYTES + MOMENT_BYTES[optimizer]
    checkpoint_bytes = (kept + ACCOUNT_BYTES) * parameters / hosts
    join_bytes = (KEYFRAME_BYTES + MOMENT_BYTES[optimizer]) * parameters / hosts
    return IslandPlan(
        parameters=parameters,
        optimizer=optimizer,
        hardware=hardware,
        data=devices // fsdp,
        fsdp=fsdp,
        fragments=fragments,
        state_bytes=needed / fsdp,
        copy_fits=(needed + kept * parameters + fragment_bytes) / fsdp <= hardware.memory_bytes,
        fragment_bytes=fragment_bytes,
        host_bytes=IN_TURN_BYTES * parameters / hosts,
        host_most_bytes=AT_ONCE_BYTES * parameters / hosts,
        sent_bytes=body_bytes(parameters, PRESET.codec.offer_bits) / hosts,
        rows_bytes=rows_bytes(parameters, hosts, min(1.0, devices / hosts / fsdp)),
        checkpoint_bytes=checkpoint_bytes,
        checkpoint_s=checkpoint_bytes / hardware.disk_bytes_per_s,
        join_bytes=join_bytes,
        join_s=join_bytes / hardware.join_bytes_per_s,
    )


def fewest_shards(needed_bytes: float, hardware: Hardware) -> int | None:
    """Return ``mesh.fsdp``: of the devices' divisors the least with room for the state of a learner; None: there is none."""
    room_bytes = STATE_SHARE * hardware.memory_bytes
    divisors = (count for count in range(1, hardware.devices + 1) if hardware.devices % count == 0)
    return next((count for count in divisors if needed_bytes / count <= room_bytes), None)


def rows_bytes(parameters: int, hosts: int, share: float) -> float:
    """Return the bytes that a host sends to the others in a cycle at most; each has this share of the model's rows.

    Of a version that it carries each other host gets the rows that it has; of an offer its carrier gets those that it lacks.
    """
    versions = VALUE_BYTES * parameters / hosts * share * (hosts - 1)
    return versions + VALUE_BYTES * parameters / hosts * (1 - share)


EXAMPLES = (  # the table of docs/islands.md
    (10**9, Hardware(8, 80e9)),
    (8 * 10**9, Hardware(16, 80e9, 2)),
    (70 * 10**9, Hardware(128, 80e9, 16)),
)
