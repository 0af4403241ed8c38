"""What is expected of a learner of several processes."""

from __future__ import annotations

from tests.services.cluster import Cluster


def stepping(cluster: Cluster, steps: int) -> bool:
    """Whether the learner's present generation has taken so many steps."""
    heartbeats = cluster.heartbeats.get("learner-0", [])
    last = heartbeats[-1:]
    return any(beat.state == "stepping" and beat.step - heartbeats[0].step >= steps for beat in last)


def check_left(cluster: Cluster) -> None:
    """Check that both processes ended as asked, with nothing unmerged."""
    assert [len(cluster.events("stopped", name)) for name in ("learner-0", "learner-0-p1")] == [1, 1]
    last = cluster.heartbeats["learner-0"][-1]
    assert (last.state, sum(last.steps)) == ("left", 0), "all of its work was merged"
