"""What is known of a run: built from pulses and log entries, given the time; answers as the status and as the report's series.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.core import ranges
from diloco.core.changes import Effective
from diloco.core.fragments import FragmentMap
from diloco.core.leases import Shares, Steward
from diloco.core.ledger import Ledger
from diloco.core.pace import Average
from diloco.settings import RunSettings
from diloco.wire.messages import Pulse, Record, ShardPulse
from diloco_coordinator.presence import Absence, Presence

GONE_S = 10.0
MAX_POINTS = 2000
STATUS_POINTS = 120
RATE_WINDOW_S = 5.0


@dataclass
class _Learner:
    pulse: Pulse
    seen_s: float
    points: list[tuple[float, int, int, float]] = field(default_factory=list)  # time, run's tokens, step, loss
    activity: list[tuple[float, float, str]] = field(default_factory=list)  # from, to, state
    rate: Average = field(default_factory=lambda: Average(0.3))
    rate_mark: tuple[float, int] = (0.0, 0)


class Monitor:
    """The coordinator's picture of a run; ``now_s`` is always seconds since the run began."""

    def __init__(self, name: str, settings: RunSettings, fragment_map: FragmentMap, nats_url: str) -> None:
        self.name, self.map, self.nats_url = name, fragment_map, nats_url
        self.now = Effective(settings)
        self.learners: dict[str, _Learner] = {}
        self.past: dict[str, dict[str, Any]] = {}  # what an earlier process of this run knew of its learners
        self.merged: dict[str, dict[int, tuple[int, int]]] = {}  # by learner and fragment: versions and tokens
        self.shards: dict[str, tuple[ShardPulse, float]] = {}
        self.presence = Presence(settings.regions.names, settings.regions.away_s)
        self.places: dict[str, str] = {}  # by learner and syncer: its region, in a run with regions
        # by a syncer's process, for it counts from nothing: by other region, bytes sent there and received from there
        self.crossing: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        self.validation: list[tuple[float, int, float]] = []
        self.merges: list[dict[str, Any]] = []
        self.rollbacks: dict[int, dict[str, Any]] = {}  # by the number of the change that asked for it
        self.versions = [0] * len(fragment_map.fragments)
        self.tokens = [0] * len(fragment_map.fragments)
        self.owners = [""] * len(fragment_map.fragments)
        self.closed: set[int] = set()
        self.ledger = Ledger(len(fragment_map.fragments))
        self.steward = Steward(settings.learners, settings.liveness.lease_s)
        self.ends: dict[int, int] = {}  # by share of the data: the batch after the last one merged
        self._drawn: set[tuple[int, int]] = set()  # merges of an earlier process: (fragment, version)

    @property
    def settings(self) -> RunSettings:
        """Those that are in force."""
        return self.now.settings

    # ---- what comes in

    def change(self, now: Effective) -> None:
        """Go by what is in force now."""
        self.now = now
        self.steward.lease_s, self.presence.away_s = now.settings.liveness.lease_s, now.settings.regions.away_s

    def hear(self, pulse: Pulse, now_s: float) -> None:
        """Take in a learner's or an evaluator's pulse."""
        self.presence.hear(pulse.region, now_s)
        if pulse.role == "evaluator":
            if pulse.loss is not None and (not self.validation or self.validation[-1][2] != pulse.loss):
                self.validation.append((now_s, self.tokens_merged(), pulse.loss))
            return
        self.ledger.train((pulse.learner, pulse.incarnation), pulse.trained, pulse.batch_tokens)
        if pulse.learner not in self.now.ejected:  # its data is for others
            self.steward.hear(pulse, now_s)
        self._place(pulse.learner, pulse.region)
        known = self.learners.get(pulse.learner)
        if known is None:
            known = self.learners[pulse.learner] = _Learner(pulse, now_s, rate_mark=(now_s, pulse.tokens))
            past = self.past.pop(pulse.learner, None)
            if past is not None:
                known.points, known.activity = _points(past), _activity_of(past)
        elif (pulse.incarnation, pulse.step, pulse.tokens) < (known.pulse.incarnation, known.pulse.step, known.pulse.tokens):
            return
        _extend(known.activity, now_s, _activity(pulse), known.seen_s)
        fresh = pulse.step != known.pulse.step or pulse.incarnation != known.pulse.incarnation
        known.pulse, known.seen_s = pulse, now_s
        if fresh and pulse.loss is not None:
            known.points.append((now_s, self.tokens_processed(), pulse.step, pulse.loss))
            if len(known.points) > MAX_POINTS:
                known.points = known.points[::2]
        since_s, since_tokens = known.rate_mark
        if now_s - since_s >= 1.0:
            known.rate.add(max(0, pulse.tokens - since_tokens) / (now_s - since_s))
            known.rate_mark = (now_s, pulse.tokens)

    def hear_shard(self, pulse: ShardPulse, now_s: float) -> None:
        """Take in a syncer's pulse."""
        self.shards[pulse.syncer] = (pulse, now_s)
        self.presence.hear(pulse.region, now_s)
        self._place(pulse.syncer, pulse.region)
        if pulse.crossing and pulse.syncer in self.places:
            others = {to: (sent, received) for to, sent, received in pulse.crossing if to in self.presence.regions}
            self.crossing[pulse.syncer, pulse.incarnation] = others

    def _place(self, member: str, region: str) -> None:
        if region in self.presence.regions:
            self.places[member] = region

    def entry(self, record: Record, now_s: float) -> None:
        """Take in a log entry."""
        index = record.fragment
        self.owners[index] = record.syncer
        if record.closing:
            self.closed.add(index)
        if not record.makes_version or record.version <= self.versions[index]:
            return
        self.versions[index], self.tokens[index] = record.version, record.tokens_merged
        if record.rolled_back is not None:  # of its fragments the first
            change, version = record.rolled_back.change, record.rolled_back.to_version
            told = {"wall_s": round(now_s, 3), "tokens": self.tokens_processed(), "change": change, "to_version": version}
            self.rollbacks.setdefault(change, told)
            return
        self.ledger.merge(record)
        self.ends = ranges.ends((held for member in record.members for held in member.data), self.ends)
        for member in record.members:
            versions, tokens = self.merged.setdefault(member.learner, {}).get(index, (0, 0))
            self.merged[member.learner][index] = (versions + 1, tokens + member.tokens)
        if (index, record.version) in self._drawn:
            return
        total = sum(member.weight for member in record.members)
        self.merges.append(
            {
                "wall_s": round(now_s, 3),
                "fragment": index,
                "version": record.version,
                "syncer": record.syncer,
                "members": [
                    [m.learner, m.weight / total if total else 0.0, record.version - 1 - m.base_version, m.steps]
                    for m in record.members
                ],
                "quorum_s": round(record.quorum_s, 4),
                "duration_s": round(record.round_s, 4),
            }
        )

    # ---- what follows from it

    def assign(self, table: Shares, now_s: float) -> Shares | None:
        """What is to become of who holds which share of the data, if anything."""
        return self.steward.look(table, self.ends, now_s) if self.state == "training" else None

    def heard(self, now_s: float) -> frozenset[str]:
        """Members that have been heard within the last ``GONE_S``."""
        seen = {name: learner.seen_s for name, learner in self.learners.items()}
        seen |= {name: seen_s for name, (_, seen_s) in self.shards.items()}
        return frozenset(name for name, seen_s in seen.items() if now_s - seen_s <= GONE_S)

    def tokens_processed(self) -> int:
        past = sum(int(learner["tokens"]) for learner in self.past.values())
        return past + sum(learner.pulse.tokens for learner in self.learners.values())

    def tokens_per_s(self, now_s: float) -> float:
        """The rate of all learners that have been heard lately."""
        return sum(learner.rate.get() for learner in self.learners.values() if now_s - learner.seen_s < GONE_S)

    def live(self, now_s: float) -> list[Pulse]:
        """The last pulses of learners that have been heard lately and have not left."""
        recent = [learner.pulse for learner in self.learners.values() if now_s - learner.seen_s < GONE_S]
        return [pulse for pulse in recent if pulse.state not in ("left", "finished")]

    def busy_fraction(self, now_s: float) -> float | None:
        """The share of the live learners' time in which a step was in flight; None: there is no time yet."""
        busy_s = sum(pulse.busy_s for pulse in self.live(now_s))
        alive_s = busy_s + sum(pulse.blocked_s for pulse in self.live(now_s))
        return busy_s / alive_s if alive_s > 0 else None

    def tokens_merged(self) -> int:
        """Mean over fragments, weighted by parameters."""
        return self._mean(dict(enumerate(self.tokens)))

    def borders(self) -> dict[tuple[str, str], int]:
        """Payload bytes by border (from one region to another), as the syncers on both sides of it count theirs."""
        sizes: dict[tuple[str, str], int] = {}
        for (syncer, _), others in self.crossing.items():
            home = self.places[syncer]
            for other, (sent, received) in others.items():
                sizes[home, other] = sizes.get((home, other), 0) + sent
                sizes[other, home] = sizes.get((other, home), 0) + received
        return sizes

    @property
    def state(self) -> str:
        if len(self.closed) == len(self.map.fragments):
            return "finished"
        if self.tokens_processed() >= self.settings.tokens:
            return "closing"
        return "training" if any(learner.pulse.step for learner in self.learners.values()) else "waiting"

    def status(self, now_s: float) -> dict[str, Any]:
        """The status as ``docs/report.md`` describes it."""
        processed = self.tokens_processed()
        rate = self.tokens_per_s(now_s)
        left = max(0, self.settings.tokens - processed)
        return {
            "run": self.name,
            "preset": self.settings.preset,
            "state": self.state,
            "wall_s": now_s,
            "tokens_budget": self.settings.tokens,
            "tokens_processed": processed,
            "tokens_merged": self.tokens_merged(),
            "parameters": self.map.parameters,
            "versions": sum(self.versions),
            "rounds": sum(pulse.rounds for pulse, _ in self.shards.values()),
            "eta_s": left / rate if rate > 0 else None,
            "nats_url": self.nats_url,
            "changes": self.now.number,
            "ejected": {name: change.label for name, change in sorted(self.now.ejected.items())},
            "quarantined": {name: change.label for name, change in sorted(self.now.quarantined.items())},
            "learners": {name: self._learner(learner, now_s) for name, learner in sorted(self.learners.items())},
            "shards": {name: _shard(pulse, now_s - seen_s) for name, (pulse, seen_s) in sorted(self.shards.items())},
            "fragments": [
                {"fragment": i, "version": self.versions[i], "tokens_merged": self.tokens[i], "owner": self.owners[i]}
                for i in range(len(self.versions))
            ],
            "regions": self._regions(now_s),
            "validation": [_rounded(*point) for point in _thin(self.validation, STATUS_POINTS)],
            "loss": {
                name: [_rounded(at, tokens, loss) for at, tokens, _, loss in _thin(learner.points, STATUS_POINTS)]
                for name, learner in sorted(self.learners.items())
            },
        }

    def series(self, now_s: float) -> dict[str, Any]:
        """What the report is drawn from and the log does not hold."""
        return {
            "wall_s": now_s,
            "rounds": sum(pulse.rounds for pulse, _ in self.shards.values()),
            "learners": self.past
            | {
                name: {
                    **self._learner(learner, now_s),
                    "lost_tokens": self._mean(dict(enumerate(learner.pulse.lost_tokens))),
                    "points": [list(point) for point in learner.points],
                    "activity": [list(span) for span in learner.activity],
                }
                for name, learner in sorted(self.learners.items())
            },
            "shards": {name: _shard(pulse, now_s - seen_s) for name, (pulse, seen_s) in sorted(self.shards.items())},
            "validation": [list(point) for point in self.validation],
            "merges": self.merges,
            "rollbacks": list(self.rollbacks.values()),
            "places": self.places,
            "absences": [[absence.region, absence.from_s, absence.to_s] for absence in self.presence.absences()],
            "crossing": [
                [syncer, incarnation, to, sent, received]
                for (syncer, incarnation), regions in self.crossing.items()
                for to, (sent, received) in regions.items()
            ],
            "ledger": self.ledger.dump(),
        }

    def resume(self, series: Mapping[str, Any]) -> None:
        """Go on from the series that an earlier process of this run wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are damaged; nothing of them is taken over.
        """
        ledger = Ledger.load(len(self.versions), series["ledger"])
        validation = [(float(a), int(b), float(c)) for a, b, c in series["validation"]]
        past, merges = dict(series["learners"]), list(series["merges"])
        for learner in past.values():  # what is damaged is to be noticed now, not when the learner is heard
            int(learner["tokens"])
            _points(learner)
            _activity_of(learner)
        # those that an older version wrote know of none
        rollbacks = {int(told["change"]): dict(told) for told in series.get("rollbacks", ())}
        places = {str(member): str(region) for member, region in series["places"].items()}
        absences = [Absence(str(region), float(a), None if b is None else float(b)) for region, a, b in series["absences"]]
        crossing: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        for syncer, incarnation, to, sent, received in series["crossing"]:
            crossing.setdefault((str(syncer), int(incarnation)), {})[str(to)] = (int(sent), int(received))
            places[str(syncer)]  # where it is, or the series are damaged
        self._drawn = {(merge["fragment"], merge["version"]) for merge in merges}
        self.presence.resume(absences, float(series["wall_s"]))
        self.places, self.crossing, self.rollbacks = places, crossing, rollbacks
        self.ledger, self.validation, self.past, self.merges = ledger, validation, past, merges

    def _learner(self, learner: _Learner, now_s: float) -> dict[str, Any]:
        pulse, alive_s = learner.pulse, max(learner.pulse.busy_s + learner.pulse.blocked_s, 1e-9)
        merged = self.merged.get(pulse.learner, {})
        rounds_merged = sum(versions for versions, _ in merged.values())
        gone = now_s - learner.seen_s > GONE_S and pulse.state != "finished"
        by_kind = (("ejected", self.now.ejected), ("quarantined", self.now.quarantined))
        barred = next((kind for kind, learners in by_kind if pulse.learner in learners), None)
        return {
            "state": barred or ("gone" if gone else _activity(pulse)),
            "region": pulse.region or None,
            "step": pulse.step,
            "tokens": pulse.tokens,
            "tokens_merged": self._mean({index: tokens for index, (_, tokens) in merged.items()}),
            "tokens_per_s": learner.rate.get(),
            "loss": pulse.loss,
            "step_s": pulse.step_s,
            "busy_fraction": pulse.busy_s / alive_s,
            "blocked_fraction": pulse.blocked_s / alive_s,
            "bytes_up": pulse.bytes_up,
            "bytes_down": pulse.bytes_down,
            "rounds_merged": rounds_merged,
            "rounds_missed": sum(self.versions) - rounds_merged,
            "seen_s_ago": now_s - learner.seen_s,
            "software": pulse.software,
        }

    def _regions(self, now_s: float) -> dict[str, Any]:
        heard, away, borders = self.heard(now_s), self.presence.away(), self.borders()
        regions = {}
        for name in self.presence.regions:
            members = {member for member, region in self.places.items() if region == name}
            regions[name] = {
                "members": len(members),
                "heard": len(members & heard),
                "away_s": now_s - away[name] if name in away else None,
                "fragments": sum(self.places.get(owner) == name for owner in self.owners),
                "bytes_in": sum(size for (_, to), size in borders.items() if to == name),
                "bytes_out": sum(size for (source, _), size in borders.items() if source == name),
            }
        return regions

    def _mean(self, tokens: Mapping[int, int]) -> int:
        weighted = sum(tokens.get(f.index, 0) * f.size for f in self.map.fragments)
        return round(weighted / self.map.parameters)


def _points(learner: Mapping[str, Any]) -> list[tuple[float, int, int, float]]:
    return [(float(a), int(b), int(c), float(d)) for a, b, c, d in learner["points"]]


def _activity_of(learner: Mapping[str, Any]) -> list[tuple[float, float, str]]:
    return [(float(a), float(b), str(c)) for a, b, c in learner["activity"]]


def _activity(pulse: Pulse) -> str:
    return "sending" if pulse.sending and pulse.state == "stepping" else pulse.state


def _extend(spans: list[tuple[float, float, str]], now_s: float, state: str, seen_s: float) -> None:
    """Continue the last span, or begin one; silence longer than a few pulses is a gap."""
    if spans and spans[-1][2] == state and now_s - seen_s < GONE_S:
        spans[-1] = (spans[-1][0], now_s, state)
    else:
        spans.append((seen_s if spans and now_s - seen_s < GONE_S else now_s, now_s, state))


def _shard(pulse: ShardPulse, ago_s: float) -> dict[str, Any]:
    return {
        "state": pulse.state,
        "region": pulse.region or None,
        "fragments": len(pulse.fragments),
        "rounds": pulse.rounds,
        "versions": pulse.versions,
        "open": [
            {"fragment": fragment, "answers": answers, "quorum": quorum, "waited_s": waited_s}
            for fragment, answers, quorum, waited_s in pulse.open
        ],
        "refused": pulse.refused,
        "bytes_in": pulse.bytes_down,
        "bytes_out": pulse.bytes_up,
        "record_bits": pulse.record_bits,
        "pace": pulse.pace,
        "offer_bits": dict(pulse.offer_bits),
        "seen_s_ago": ago_s,
        "software": pulse.software,
    }


def _rounded(at_s: float, tokens: int, loss: float) -> list[float]:
    """A point as the status has it, which is asked for often and over thin links."""
    return [round(at_s, 2), tokens, round(loss, 5)]


def _thin(points: list[Any], limit: int) -> list[Any]:
    """At most about ``limit`` of the points, evenly, with the last one."""
    if len(points) <= limit:
        return points
    step = -(-len(points) // limit)
    return [*points[:-1][::step], points[-1]]
