"""Looks at a run that goes on: who owns what, what its learners have applied, what its log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.services.cluster import Cluster, Folded, small
from tests.services.toy import SAMPLES, Toy

from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.wire.control import Heartbeat


def owned(cluster: Cluster, name: str) -> set[int]:
    """By a syncer's own word."""
    return set(cluster.shard_heartbeats[name].fragments) if name in cluster.shard_heartbeats else set()


async def until_owned_by(cluster: Cluster, *names: str) -> None:
    everything = set(range(cluster.settings.fragments.count))

    def so() -> bool:
        parts = [owned(cluster, name) for name in names]
        return all(parts) and sum(map(len, parts)) == len(everything) and set.union(*parts) == everything

    await cluster.until(so, f"{names} own all fragments")


WAITS: dict[str, Any] = {"round__learners_wait": True, "round__quorum": "all"}  # so that the pace makes no difference


def waiting_settings(steps: int = 200, **changes: Any) -> RunSettings:
    return small(**({"tokens": 3 * steps * SAMPLES} | WAITS | changes))


def has_whole_rounds(toy: Toy) -> bool:
    """Whether a learner has taken all steps of a round: one that is slower than others would answer with fewer."""
    member = toy.member
    return member is not None and member.step % member.run.created.round.steps == 0


def save_directory(cluster: Cluster) -> Path:
    """Make the cluster's directory that of a run, as ``diloco up`` does, so that commands find it; return it."""
    RunDirectory(cluster.directory, cluster.name, cluster.url, None, cluster.settings).save()
    return cluster.directory


def newest_applied(cluster: Cluster) -> list[int]:
    """By fragment: the version that all learners have applied."""
    heard = [heartbeats[-1].versions for heartbeats in cluster.heartbeats.values()]
    versions: list[int] = np.min(heard, axis=0).tolist()
    return versions


def rollbacks(folded: list[Folded]) -> dict[int, list[tuple[int, int]]]:
    """By fragment: number of the change and version gone back to."""
    return {
        log.index: [(e.rolled_back.change, e.rolled_back.to_version) for e in log.entries if e.rolled_back] for log in folded
    }


def merged_of(heartbeat: Heartbeat) -> list[int]:
    """A learner's tokens that are in versions, by fragment, as far as it knows."""
    unmerged = zip(heartbeat.lost_tokens, heartbeat.fragment_tokens, strict=True)
    return [heartbeat.tokens - lost - outstanding for lost, outstanding in unmerged]
