"""A run as its views show it: what a coordinator answers, what members are heard to say, and what was stored before.

Pure: no clock, no network, no file. ``diloco top`` tells it all that comes; ``diloco up`` the answers alone. Without answers
it goes on with heartbeats and the log, so that a run is watched whose coordinator is gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.control.status import Span, activity, extend, of_learner, of_syncer
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.entries import Record
from diloco_ops.live.lanes import behind
from diloco_ops.live.shaping import shaped

SILENT_S = 3.0  # an answer comes twice a second; without one for so long, what is heard is shown
MAX_EVENTS = 1000
MAX_SPANS = 2000  # of one learner, seen since the history; that one has the older ones, thinned
MAX_MERGES = 2000  # of one fragment that are kept; the history has the older ones, thinned
MAX_NAMES = 4096  # learners of a run, and as many syncers
TOLD = ("recovering", "closing", "leaving", "left", "finished", "gone", "ejected", "quarantined", "unable")  # in events

Merge = tuple[float, int, tuple[str, ...]]  # seconds of the run, version, members


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run. ``at_s``: seconds since the run began. ``minor``: one of very many."""

    at_s: float
    who: str
    text: str
    minor: bool = False


@dataclass
class WatchedFragment:
    """A fragment as far as it is known; ``merges`` in the order of their versions."""

    version: int = 0
    owner: str = ""
    epoch: int | None = None
    parameters: int | None = None
    merges: list[Merge] = field(default_factory=list)


class Watched:
    """One run, as far as is known. ``now_s`` is always the time of one and the same clock, of any beginning."""

    def __init__(self, name: str, dead_s: float) -> None:
        """``dead_s``: silence after which a member is gone."""
        self.name, self.dead_s = name, dead_s
        self.units: str | None = None  # of the loss
        self.events: deque[RunEvent] = deque(maxlen=MAX_EVENTS)
        self.alerts: list[str] = []
        self.sample: tuple[float, int, str] | None = None  # of the global model: when it was drawn, its version, the text
        self.fragments: dict[int, WatchedFragment] = {}
        self.answered_s: float | None = None
        self._asked_s: float | None = None  # since when answers are awaited
        self._status: dict[str, Any] = {"run": name, "state": "waiting"}
        self._began_s: float | None = None  # by the clock, when the run began
        self._stored: dict[str, list[Span]] = {}  # by learner, of the history
        self._spans: dict[str, list[Span]] = {}  # by learner, seen since
        self._learners: dict[str, tuple[Heartbeat, float]] = {}
        self._shards: dict[str, tuple[ShardHeartbeat, float]] = {}
        self._past_s: float | None = None  # when the stored picture was made
        self._states: dict[str, str] = {}  # by member, as events have it
        self._changes: int | None = None
        self._silent = False

    # ---- input

    def answer(self, status: Mapping[str, Any] | None, now_s: float) -> None:
        """Take in a coordinator's answer; None: none came in time."""
        self._asked_s = now_s if self._asked_s is None else self._asked_s
        if status is None:
            if not self._silent and self.silent_s(now_s) > SILENT_S:
                self._silent = True
                self._tell(now_s, "coordinator", "no coordinator answers")
            return
        self._status = shaped(status)
        self.units = self._status.get("units")
        self._began_s = now_s - _number(self._status.get("wall_s"))
        if self._silent:
            self._tell(now_s, "coordinator", "a coordinator answers again")
        self._silent, self.answered_s = False, now_s
        self._note_states(self._status, now_s)
        self._note_fragments(self._status["fragments"])
        self._note_lanes(now_s)
        changes = self._status.get("changes")
        if isinstance(changes, int):
            if self._changes is not None and changes > self._changes:
                self._tell(now_s, "operator", f"change {changes} of the run is in force")
            self._changes = changes

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat of an admitted learner."""
        name = heartbeat.learner
        if name not in self._learners and len(self._learners) >= MAX_NAMES:
            return
        known = self._learners.get(name)
        seen_s = None if known is None or now_s - known[1] > self.dead_s else self.run_s(known[1])
        self._learners[name] = heartbeat, now_s
        spans = self._spans.setdefault(name, [])
        extend(spans, self.run_s(now_s), activity(heartbeat), seen_s)
        del spans[:-MAX_SPANS]

    def hear_shard(self, heartbeat: ShardHeartbeat, now_s: float) -> None:
        """Take in a syncer's heartbeat."""
        if heartbeat.syncer in self._shards or len(self._shards) < MAX_NAMES:
            self._shards[heartbeat.syncer] = heartbeat, now_s

    def entry(self, record: Record, now_s: float) -> None:
        """Take in an entry of the log that was committed while the run is watched."""
        known = self.fragments.setdefault(record.fragment, WatchedFragment())
        who, at = f"fragment {record.fragment}", self.run_s(now_s)
        if record.entry == "takeover":
            self._tell(now_s, who, f"{record.syncer} took it over, epoch {record.epoch}")
        elif record.entry == "close":
            self._tell(now_s, who, "closed: the budget is used up")
        known.owner, known.epoch = record.syncer, record.epoch
        if not record.makes_version or record.version <= (known.merges[-1][1] if known.merges else -1):
            return
        known.version = max(known.version, record.version)
        members = tuple(member.learner for member in record.members)
        known.merges.append((at, record.version, members))
        del known.merges[:-MAX_MERGES]
        if record.rolled_back is not None:
            self._tell(now_s, who, f"went back to version {record.rolled_back.to_version}, as version {record.version}")
            return
        late = [record.version - 1 - member.base_version for member in record.members]
        stale = f", up to {max(late)} versions late" if late and max(late) > 0 else ""
        merged = ", ".join(members) or "none"
        self._tell(now_s, who, f"version {record.version} of {merged}, round {record.round_s:.1f} s{stale}", minor=True)

    def past(self, picture: Mapping[str, Any], curves: Mapping[str, Any], age_s: float, now_s: float) -> None:
        """Take in the history that a coordinator stored ``age_s`` ago.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is damaged; nothing has changed.
        """
        facts = picture["facts"]
        wall_s = float(facts["wall_s"])
        stored = {
            str(name): [(float(a), float(b), str(state)) for a, b, state in learner["activity"]]
            for name, learner in curves["learners"].items()
        }
        merges: dict[int, list[Merge]] = {}
        for merge in curves["merges"]:
            made = (float(merge["wall_s"]), int(merge["version"]), tuple(str(member[0]) for member in merge["members"]))
            merges.setdefault(int(merge["fragment"]), []).append(made)
        rows = [(int(row["fragment"]), _fragment(row)) for row in facts["fragments"]]
        events = [RunEvent(float(each["at_s"]), "run", str(each["text"])) for each in picture["events"]]
        alerts = [str(alert["text"]) for alert in picture["alerts"]]
        drawn = [(float(at_s), int(version), str(text)) for at_s, _, version, text in curves.get("samples", ())]

        if self._began_s is None:
            self._began_s = now_s - age_s - wall_s
        if self._past_s is not None:
            events = [event for event in events if event.at_s > self._past_s]
        self._past_s, self.alerts, self._stored = wall_s, alerts, stored
        self.sample = drawn[-1] if drawn else None
        self._spans = {
            name: behind(spans, stored[name][-1][1]) if stored.get(name) else spans for name, spans in self._spans.items()
        }
        for index, row in rows:
            known = self.fragments.setdefault(index, WatchedFragment())
            if row.version >= known.version:
                known.version, known.owner, known.epoch = row.version, row.owner, row.epoch
            known.parameters = row.parameters
        for index, before in merges.items():
            known = self.fragments.setdefault(index, WatchedFragment())
            newest = before[-1][1]
            known.merges = before + [merge for merge in known.merges if merge[1] > newest]
        self._insert(events)
        if self.answered_s is None:
            self._status = shaped(facts)

    def tell(self, now_s: float, who: str, text: str) -> None:
        """Note an event that the watcher itself knows of."""
        self._tell(now_s, who, text)

    # ---- output

    def run_s(self, now_s: float) -> float:
        """Return the seconds since the run began, as far as is known when that was."""
        if self._began_s is None:
            self._began_s = now_s
        return max(0.0, now_s - self._began_s)

    def silent_s(self, now_s: float) -> float:
        """Return the time for which no coordinator has answered."""
        since_s = self._asked_s if self.answered_s is None else self.answered_s
        return 0.0 if since_s is None else now_s - since_s

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the status as a coordinator answers it: its newest answer, or without one what was heard since."""
        if self.silent_s(now_s) <= SILENT_S:
            return self._status
        seen = self._status
        learners = {name: dict(learner) for name, learner in seen["learners"].items()} if "learners" in seen else {}
        for name, (heartbeat, heard_s) in self._learners.items():
            learners[name] = (
                learners.get(name, {}) | of_learner(heartbeat, now_s - heard_s, self.dead_s) | {"tokens_per_s": None}
            )
        shards = {name: dict(shard) for name, shard in (seen.get("shards") or {}).items()}
        for name, (beat, heard_s) in self._shards.items():
            shards[name] = shards.get(name, {}) | of_syncer(beat, now_s - heard_s)
        tokens = sum(int(_number(learner.get("tokens"))) for learner in learners.values())
        versions = sum(fragment.version for fragment in self.fragments.values())
        made = {"wall_s": self.run_s(now_s), "tokens_processed": tokens, "versions": versions, "eta_s": None}
        state = "training" if any(learner.get("state") in ("stepping", "sending") for learner in learners.values()) else None
        status = seen | made | {"learners": learners, "shards": shards, "state": state or seen["state"]}
        self._note_states(status, now_s)
        return status

    def lane(self, learner: str) -> list[Span]:
        """Return what a learner did, in the order of time."""
        return self._stored.get(learner, []) + self._spans.get(learner, [])

    def events_of(self, name: str) -> list[RunEvent]:
        """Return the events that name a member or a fragment."""
        return [event for event in self.events if event.who == name or name in event.text.replace(",", " ").split()]

    # ---- own

    def _note_states(self, status: Mapping[str, Any], now_s: float) -> None:
        """Tell of members that came, went, or do something that is rare."""
        members = (
            {name: str(learner.get("state")) for name, learner in status["learners"].items()} if "learners" in status else {}
        )
        for name, shard in (status.get("shards") or {}).items():
            gone = _number(shard.get("seen_s_ago")) > self.dead_s and status.get("state") != "finished"
            members[name] = "gone" if gone else str(shard.get("state", "owner"))
        first = not self._states
        for name, state in members.items():
            before = self._states.get(name)
            if before is None and not first:
                self._tell(now_s, name, f"is heard: {state}")
            elif before is not None and before != state and (state in TOLD or before in TOLD):
                self._tell(now_s, name, state)
            self._states[name] = state

    def _note_lanes(self, now_s: float) -> None:
        """Continue the lanes of learners whose heartbeats are not heard here."""
        for name, row in self._status["learners"].items():
            ago_s = _number(row.get("seen_s_ago"))
            if name not in self._learners and ago_s <= self.dead_s:
                spans = self._spans.setdefault(name, [])
                last_s = spans[-1][1] if spans else 0.0
                at_s = self.run_s(now_s - ago_s)
                if at_s > last_s:
                    extend(spans, at_s, str(row.get("state")), last_s if at_s - last_s <= self.dead_s else None)
                    del spans[:-MAX_SPANS]

    def _note_fragments(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            index, version = row.get("fragment"), row.get("version")
            if not isinstance(index, int) or not isinstance(version, int):
                continue
            known = self.fragments.setdefault(index, WatchedFragment())
            if version >= known.version:
                known.version, known.owner = version, str(row.get("owner") or known.owner)
                known.epoch = row.get("epoch", known.epoch)

    def _insert(self, events: list[RunEvent]) -> None:
        """Put stored events where they belong by time."""
        known = {(event.at_s, event.text) for event in self.events}
        new = [event for event in events if (event.at_s, event.text) not in known]
        if new:
            self.events = deque(sorted([*self.events, *new], key=lambda event: event.at_s), maxlen=MAX_EVENTS)

    def _tell(self, now_s: float, who: str, text: str, *, minor: bool = False) -> None:
        self.events.append(RunEvent(self.run_s(now_s), who, text, minor))


def _fragment(row: Mapping[str, Any]) -> WatchedFragment:
    epoch, parameters = row.get("epoch"), row.get("parameters")
    return WatchedFragment(
        int(row["version"]),
        str(row["owner"]),
        None if epoch is None else int(epoch),
        None if parameters is None else int(parameters),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
