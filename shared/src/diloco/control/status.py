"""Members as a status shows them, by their last heartbeats: in a coordinator's answer, and in the views of a run.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from typing import Any

from diloco.wire.control import Heartbeat, ShardHeartbeat

Span = tuple[float, float, str]  # from, to, state; seconds of the run


def activity(heartbeat: Heartbeat) -> str:
    """Return the state of a learner, of which sending is one."""
    return "sending" if heartbeat.sending and heartbeat.state == "stepping" else heartbeat.state


def of_learner(heartbeat: Heartbeat, ago_s: float, dead_s: float) -> dict[str, Any]:
    """Return what a learner says of itself, heard so long ago; after ``dead_s`` it is gone, unless it has finished."""
    alive_s = max(heartbeat.busy_s + heartbeat.blocked_s, 1e-9)
    gone = ago_s > dead_s and heartbeat.state != "finished"
    return {
        "state": "gone" if gone else activity(heartbeat),
        "region": heartbeat.region or None,
        "step": heartbeat.step,
        "tokens": heartbeat.tokens,
        "loss": heartbeat.loss,
        "step_s": heartbeat.step_s,
        # both are counted since the same moment, by a restored learner too
        "mean_step_s": (heartbeat.busy_s + heartbeat.blocked_s) / heartbeat.step if heartbeat.step else None,
        "busy_fraction": heartbeat.busy_s / alive_s,
        "blocked_fraction": heartbeat.blocked_s / alive_s,
        "bytes_up": heartbeat.bytes_up,
        "bytes_down": heartbeat.bytes_down,
        "seen_s_ago": ago_s,
        "software": heartbeat.software,
    }


def of_syncer(heartbeat: ShardHeartbeat, ago_s: float) -> dict[str, Any]:
    """Return what a syncer says of itself, heard so long ago."""
    return {
        "state": heartbeat.state,
        "region": heartbeat.region or None,
        "fragments": len(heartbeat.fragments),
        "rounds": heartbeat.rounds,
        "versions": heartbeat.versions,
        "open": [
            {"fragment": fragment, "answers": answers, "quorum": quorum, "waited_s": waited_s}
            for fragment, answers, quorum, waited_s in heartbeat.open
        ],
        "refused": heartbeat.refused,
        "bytes_in": heartbeat.bytes_down,
        "bytes_out": heartbeat.bytes_up,
        "record_bits": heartbeat.record_bits,
        "pace": heartbeat.pace,
        "offer_bits": dict(heartbeat.offer_bits),
        "seen_s_ago": ago_s,
        "software": heartbeat.software,
    }


def extend(spans: list[Span], now_s: float, state: str, seen_s: float | None) -> None:
    """Continue the last span, or begin one when the learner was heard last (``seen_s``); at ``now_s`` after a gap (None)."""
    if spans and spans[-1][2] == state and seen_s is not None:
        spans[-1] = (spans[-1][0], now_s, state)
    else:
        spans.append((now_s if seen_s is None or not spans else seen_s, now_s, state))
