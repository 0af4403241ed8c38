"""State of a run as its coordinator sees it, built from heartbeats and log entries: the status and the report's series.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.control.status import activity, extend, of_learner, of_syncer
from diloco.core.run.changes import Effective
from diloco.core.run.ledger import Ledger, fragment_mean
from diloco.core.run.pace import MovingAverage
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import FormatError
from diloco.settings.run import RunSettings
from diloco.transport import Room
from diloco.wire.control import Heartbeat, Sample, ShardHeartbeat
from diloco.wire.entries import Record
from diloco.wire.fields import MAX_SYNCERS
from diloco_coordinator.crossing import Crossing
from diloco_coordinator.goodput import TrainedTime, goodput
from diloco_coordinator.long_rounds import SlowFragments
from diloco_coordinator.merges import Merges
from diloco_coordinator.presence import Absence, RegionPresence
from diloco_coordinator.shown.gauges import GaugeCurves, note_validation
from diloco_coordinator.shown.samples import Samples
from diloco_coordinator.shown.sender_reports import MemberReports
from diloco_coordinator.spikes import Spike
from diloco_coordinator.thinning import evenly, halved
from diloco_coordinator.time_left import RecentPace
from diloco_coordinator.traffic import TrafficTotals

MAX_POINTS = 2000  # of a learner's loss; every second one goes when there are more
STATUS_POINTS = 120  # as many as a terminal's chart can show
MAX_FAILURES = 16  # of so many evaluators
MAX_TRAINED = 4096  # ranges that one learner's processes trained: one more for each break in the order of their batches
IDLE = ("gone", "left", "finished", "ejected", "quarantined")  # states of learners that have no rate
RATE_EVERY_S = 1.0  # a shorter time between two heartbeats says little about a rate
EJECTED_SHOWN_S = 600.0  # an ejected learner that is silent for longer does not come back, or not soon
SYNCER_SHOWN_S = 3600.0  # a syncer that owns nothing and is silent for longer was taken out, or has another name now


@dataclass
class _Learner:
    heartbeat: Heartbeat
    seen_s: float
    points: list[tuple[float, int, int, float]] = field(default_factory=list)  # time, run's tokens, step, loss
    activity: list[tuple[float, float, str]] = field(default_factory=list)  # from, to, state
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(0.3))
    rate_mark: tuple[float, int] = (0.0, 0)
    began_at: int = 0  # versions of the run when it was heard first
    spike: Spike = field(default_factory=Spike)


class Monitor:
    """The coordinator's picture of a run; ``now_s`` is always seconds since the run began."""

    def __init__(self, name: str, settings: RunSettings, fragment_map: FragmentMap, nats_url: str) -> None:
        self.name, self.map, self.nats_url = name, fragment_map, nats_url
        self.now = Effective(settings)
        self.learners: dict[str, _Learner] = {}
        self.past: dict[str, dict[str, Any]] = {}  # by learner: its series of an earlier process of this run
        self.times: dict[str, TrainedTime] = {}  # by learner
        self.merged: dict[str, dict[int, tuple[int, int]]] = {}  # by learner and fragment: versions and tokens
        self.shards: dict[str, tuple[ShardHeartbeat, float]] = {}
        self.slow_fragments = SlowFragments()
        self.presence = RegionPresence(settings.regions.names, settings.regions.away_s)
        self.crossing = Crossing(settings.regions.names, len(fragment_map.fragments))
        self.traffic = TrafficTotals()
        self.pace = RecentPace()
        self.validation: list[tuple[float, int, float]] = []
        self.failures: dict[str, str] = {}  # by member: why what it does is in vain, as it says
        self.samples, self.gauges, self.reports = Samples(), GaugeCurves(), MemberReports()
        self.merges = Merges(len(fragment_map.fragments))
        self.rollbacks: dict[int, dict[str, Any]] = {}  # by the number of the change that orders it
        self.versions = [0] * len(fragment_map.fragments)
        self.tokens = [0] * len(fragment_map.fragments)
        self.accounted = 0  # tokens merged or lost, in the fragment whose log is furthest
        self.owners = [""] * len(fragment_map.fragments)
        self.closed: set[int] = set()
        self.ledger = Ledger(len(fragment_map.fragments))
        self._ranges: Counter[str] = Counter()  # by learner: of its processes, in the ledger
        self.epochs = [0] * len(fragment_map.fragments)
        self.last_merges: dict[int, tuple[float, list[str]]] = {}  # by fragment: when, and of whom
        self.resumed_s = 0.0  # when an earlier process wrote what this one continues
        self.rooms: list[Room] = []  # of streams that have a bound, as their server said last

    @property
    def settings(self) -> RunSettings:
        """Settings in force."""
        return self.now.settings

    @property
    def gone_s(self) -> float:
        """Silence after which a member is gone; no round waits for such a learner either."""
        return self.settings.liveness.dead_s

    # ---- input

    def change(self, now: Effective) -> None:
        """Take over the settings and exclusions in force."""
        self.now = now
        self.presence.away_s = now.settings.regions.away_s

    def hear_evaluator(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat that says that it is an evaluator's: nothing but a loss, or an error, that is shown."""
        self._note_failure(heartbeat)
        if any(own < its for own, its in zip(self.versions, heartbeat.versions, strict=False)):
            return  # the log is not read so far, and with it the tokens of the model: a later heartbeat says the same loss
        if heartbeat.loss is not None and (not self.validation or self.validation[-1][2] != heartbeat.loss):
            note_validation(self.validation, heartbeat.loss, self.tokens_merged(), now_s)

    def hear_sample(self, sample: Sample, now_s: float) -> None:
        """Take in text of an evaluator's, to be shown.

        Raises:
            FormatError: it is of another number of fragments than the run has.
        """
        if len(sample.versions) != len(self.versions):
            raise FormatError(f"sample of {len(sample.versions)} fragments, the run has {len(self.versions)}")
        self.samples.note(sample.versions, sample.text, self.tokens_merged(), now_s)

    def hear(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in the heartbeat of an admitted learner."""
        self.presence.hear(heartbeat.region, now_s)
        self._train(heartbeat)
        self.crossing.place(heartbeat.learner, heartbeat.region)
        self.traffic.hear(heartbeat.learner, heartbeat.incarnation, heartbeat.bytes_up, heartbeat.bytes_down, now_s)
        known = self.learners.get(heartbeat.learner)
        if known is None:
            known = self.learners[heartbeat.learner] = _Learner(
                heartbeat, now_s, rate_mark=(now_s, heartbeat.tokens), began_at=sum(self.versions)
            )
            past = self.past.pop(heartbeat.learner, None)
            if past is not None:
                known.points, known.activity = _points(past), _activity_of(past)
                for *_, loss in known.points:
                    known.spike.note(loss)
        elif (heartbeat.incarnation, heartbeat.step, heartbeat.tokens) < (
            known.heartbeat.incarnation,
            known.heartbeat.step,
            known.heartbeat.tokens,
        ):
            return
        extend(known.activity, now_s, activity(heartbeat), known.seen_s if now_s - known.seen_s < self.gone_s else None)
        if len(known.activity) > MAX_POINTS:  # a learner may say another state in each heartbeat: of two spans one is kept
            known.activity[:] = halved(known.activity)
        self.times.setdefault(heartbeat.learner, TrainedTime(now_s, now_s)).hear(heartbeat, now_s)
        fresh = heartbeat.step != known.heartbeat.step or heartbeat.incarnation != known.heartbeat.incarnation
        known.heartbeat, known.seen_s = heartbeat, now_s
        if self.pace.is_due(now_s):
            self.pace.note(self.tokens_processed(), now_s)
        self._note_failure(heartbeat)
        if fresh and heartbeat.loss is not None:
            known.points.append((now_s, self.tokens_processed(), heartbeat.step, heartbeat.loss))
            known.spike.note(heartbeat.loss)
            if len(known.points) > MAX_POINTS:
                known.points = known.points[::2]
        since_s, since_tokens = known.rate_mark
        if now_s - since_s >= RATE_EVERY_S:
            known.rate.add(max(0, heartbeat.tokens - since_tokens) / (now_s - since_s))
            known.rate_mark = (now_s, heartbeat.tokens)

    def hear_shard(self, heartbeat: ShardHeartbeat, now_s: float) -> None:
        """Take in a syncer's heartbeat."""
        if heartbeat.syncer not in self.shards and len(self.shards) >= MAX_SYNCERS:
            return
        self.shards[heartbeat.syncer] = (heartbeat, now_s)
        self.presence.hear(heartbeat.region, now_s)
        self.crossing.place(heartbeat.syncer, heartbeat.region)
        self.crossing.hear(heartbeat)
        self.crossing.mark(now_s)
        self.slow_fragments.hear(heartbeat, self.settings, self.live(now_s))

    def _note_failure(self, heartbeat: Heartbeat) -> None:
        if heartbeat.failure is None:
            self.failures.pop(heartbeat.learner, None)
        elif heartbeat.learner in self.failures or len(self.failures) < MAX_FAILURES:
            self.failures[heartbeat.learner] = heartbeat.failure

    def _train(self, heartbeat: Heartbeat) -> None:
        """Enter what a learner trained, up to a bound for all its processes: it may begin again as often as it likes."""
        process, ranges_of = (heartbeat.learner, heartbeat.incarnation), self._ranges
        if ranges_of[heartbeat.learner] < MAX_TRAINED:
            before = len(self.ledger.trained.get(process, ()))
            tokens = None if heartbeat.state == "starting" else heartbeat.tokens  # its checkpoint is not restored yet
            self.ledger.train(process, heartbeat.trained, heartbeat.batch_tokens, tokens)
            ranges_of[heartbeat.learner] += max(1, len(self.ledger.trained[process]) - before)

    def entry(self, record: Record, now_s: float) -> None:
        """Take in a log entry."""
        index = record.fragment
        self.owners[index], self.epochs[index] = record.syncer, record.epoch
        if record.closing:
            self.closed.add(index)
        self.accounted = max(self.accounted, record.tokens_merged + record.tokens_lost)
        if not record.makes_version or record.version <= self.versions[index]:
            return
        self.versions[index], self.tokens[index] = record.version, record.tokens_merged
        self.merges.note(record, now_s)
        if record.rolled_back is not None:  # the first fragment that goes back counts
            change, version = record.rolled_back.change, record.rolled_back.to_version
            rollback = {"wall_s": round(now_s, 3), "tokens": self.tokens_processed(), "change": change, "to_version": version}
            self.rollbacks.setdefault(change, rollback)
            return
        self.ledger.merge(record)
        for member in record.members:
            versions, tokens = self.merged.setdefault(member.learner, {}).get(index, (0, 0))
            self.merged[member.learner][index] = (versions + 1, tokens + member.tokens)
        self.last_merges[index] = (now_s, [member.learner for member in record.members])

    # ---- output

    def heard(self, now_s: float) -> frozenset[str]:
        """Return the names of members that are not gone."""
        seen = {name: learner.seen_s for name, learner in self.learners.items()}
        seen |= {name: seen_s for name, (_, seen_s) in self.shards.items()}
        return frozenset(name for name, seen_s in seen.items() if now_s - seen_s <= self.gone_s)

    def unowned(self, now_s: float) -> set[int]:
        """Return the fragments that no syncer heard of late says it owns; none once the run is over, when syncers leave."""
        if self.state == "finished":
            return set()
        owned = {index for name in self.heard(now_s) & self.shards.keys() for index in self.shards[name][0].fragments}
        return set(range(len(self.versions))) - owned

    def tokens_processed(self) -> int:
        past = sum(int(learner["tokens"]) for learner in self.past.values())
        heard = past + sum(learner.heartbeat.tokens for learner in self.learners.values())
        return max(heard, self.tokens_merged())  # heartbeats are rarer than versions where these come often

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate of all learners that are not gone."""
        return sum(learner.rate.get() for learner in self._recent(now_s))

    def live(self, now_s: float) -> list[Heartbeat]:
        """Return the last heartbeats of learners that are not gone and have not left."""
        recent = [learner.heartbeat for learner in self._recent(now_s)]
        return [heartbeat for heartbeat in recent if heartbeat.state not in ("left", "finished")]

    def _recent(self, now_s: float) -> list[_Learner]:
        return [learner for learner in self.learners.values() if now_s - learner.seen_s <= self.gone_s]

    def busy_fraction(self, now_s: float) -> float | None:
        """Return the share of the live learners' time with a step in flight, or None before there is any time."""
        busy_s = sum(heartbeat.busy_s for heartbeat in self.live(now_s))
        alive_s = busy_s + sum(heartbeat.blocked_s for heartbeat in self.live(now_s))
        return busy_s / alive_s if alive_s > 0 else None

    def goodput(self, now_s: float) -> float | None:
        """Return the share of all learners' time in which a step was in flight, as :func:`goodput` does."""
        return goodput(self.times.values(), now_s)

    def tokens_merged(self) -> int:
        """Return the mean over fragments, weighted by parameters."""
        return _mean(self.map, dict(enumerate(self.tokens)))

    @property
    def state(self) -> str:
        if len(self.closed) == len(self.map.fragments):
            return "finished"
        if self.closed or self.accounted >= self.settings.tokens:
            return "closing"
        return "training" if any(learner.heartbeat.step for learner in self.learners.values()) else "waiting"

    def status(self, now_s: float, points: int = STATUS_POINTS) -> dict[str, Any]:
        """Return the status as in ``docs/report.md``, with about so many ``points`` of each curve."""
        return self.facts(now_s) | {
            "validation": [_rounded(*point) for point in evenly(self.validation, points)],
            "loss": {
                name: [_rounded(at, tokens, loss) for at, tokens, _, loss in evenly(learner.points, points)]
                for name, learner in sorted(self.learners.items())
            },
        }

    def facts(self, now_s: float) -> dict[str, Any]:
        """Return the status without its curves."""
        processed = self.tokens_processed()
        left, removed = max(0, self.settings.tokens - processed), _removed(self, now_s)
        return {
            "run": self.name,
            "preset": self.settings.preset,
            "state": self.state,
            "wall_s": now_s,
            "tokens_before": self.settings.tokens_before,
            "tokens_budget": self.settings.tokens,
            "tokens_processed": processed,
            "tokens_merged": self.tokens_merged(),
            "epochs": self.settings.epochs(self.tokens_merged()),
            **_sizes(self.map, self.settings),
            "versions": sum(self.versions),
            "rounds": sum(heartbeat.rounds for heartbeat, _ in self.shards.values()),
            "eta_s": self.pace.left_s(left),
            "nats_url": self.nats_url,
            "changes": self.now.number,
            "ejected": {name: change.label for name, change in sorted(self.now.ejected.items())},
            "failures": dict(sorted(self.failures.items())),
            "quarantined": self.now.quarantines(),
            "learners": {
                name: self._learner(learner, now_s) for name, learner in sorted(self.learners.items()) if name not in removed
            },
            "shards": {name: shard for name, shard in _syncers(self, now_s).items() if name not in removed},
            "fragments": [
                {"fragment": i, "version": self.versions[i], "tokens_merged": self.tokens[i], "owner": self.owners[i]}
                for i in range(len(self.versions))
            ],
            "own_data": self.ledger.own_tokens([fragment.size for fragment in self.map.fragments]),
            "regions": self._regions(now_s),
        }

    def series(self, now_s: float) -> dict[str, Any]:
        """Return the report's data that the log does not hold."""
        return self.curves(now_s) | {"ledger": self.ledger.dump()}

    def curves(self, now_s: float) -> dict[str, Any]:
        """Return the series without the ledger. Lists are copies: a picture may be drawn of them in another thread."""
        return {
            "wall_s": now_s,
            "rounds": sum(heartbeat.rounds for heartbeat, _ in self.shards.values()),
            "learners": self.past
            | {
                name: {
                    **self._learner(learner, now_s),
                    "points": learner.points[:],
                    "activity": learner.activity[:],
                    "bytes_counted": self.traffic.of(name)["bytes_counted"],
                    "trained_time": self.times[name].dump(),
                }
                for name, learner in sorted(self.learners.items())
            },
            "shards": _syncers(self, now_s),
            "validation": self.validation[:],
            "samples": self.samples.dump(),
            "gauges": self.gauges.dump(),
            "traffic": self.traffic.until(now_s),
            **self.merges.dump(),
            "rollbacks": list(self.rollbacks.values()),
            "absences": [[absence.region, absence.from_s, absence.to_s] for absence in self.presence.absences()],
            **self.crossing.dump(),
        }

    def resume(self, series: Mapping[str, Any]) -> None:
        """Continue the series that an earlier process of this run wrote; without a ledger, if another machine's kept it.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: they are damaged; nothing has changed.
        """
        fragments = len(self.versions)
        ledger = Ledger.load(fragments, series["ledger"]) if "ledger" in series else Ledger(fragments)
        validation = [(float(a), int(b), float(c)) for a, b, c in series["validation"]]
        past, merges = dict(series["learners"]), Merges.load(fragments, series)
        for learner in past.values():  # so that damage is noticed now, not when the learner is heard
            int(learner["tokens"])
            _points(learner)
            _activity_of(learner)
        times = {name: TrainedTime.load(learner) for name, learner in past.items()}
        samples, gauges = Samples(series.get("samples", ())), GaugeCurves.load(series.get("gauges", {}))
        traffic = TrafficTotals.resumed(series.get("traffic", ()), past)  # an older version writes neither, nor rollbacks
        rollbacks = {int(rollback["change"]): dict(rollback) for rollback in series.get("rollbacks", ())}
        crossing = Crossing.load(self.presence.regions, fragments, series)
        absences = [Absence(str(region), float(a), None if b is None else float(b)) for region, a, b in series["absences"]]
        self.resumed_s = float(series["wall_s"])
        self.presence.resume(absences, self.resumed_s)
        self.crossing, self.rollbacks, self.traffic = crossing, rollbacks, traffic
        self.samples, self.gauges, self.times = samples, gauges, times
        self.ledger, self.validation, self.past, self.merges = ledger, validation, past, merges
        for (learner, _), trained in ledger.trained.items():
            self._ranges[learner] += max(1, len(trained))

    def _learner(self, learner: _Learner, now_s: float) -> dict[str, Any]:
        heartbeat = learner.heartbeat
        merged = self.merged.get(heartbeat.learner, {})
        rounds_merged = sum(versions for versions, _ in merged.values())
        said = of_learner(heartbeat, now_s - learner.seen_s, self.gone_s) | self.gauges.places.get(heartbeat.learner, {})
        by_kind = (("ejected", self.now.ejected), ("quarantined", self.now.excluded))
        excluded = next((kind for kind, learners in by_kind if heartbeat.learner in learners), None)
        state, sent = excluded or said["state"], self.traffic.of(heartbeat.learner)
        return said | {
            **{key: sent[key] for key in ("bytes_up", "bytes_down")},
            "state": state,
            "steps": self.ledger.steps(heartbeat.learner, heartbeat.tokens, heartbeat.step),
            "tokens_merged": _mean(self.map, {index: tokens for index, (_, tokens) in merged.items()}),
            "lost_tokens": _mean(self.map, dict(enumerate(heartbeat.lost_tokens))),
            "tokens_per_s": None if state in IDLE else learner.rate.get(),
            "rounds_merged": rounds_merged,
            "rounds_missed": sum(self.versions) - rounds_merged,
        }

    def _regions(self, now_s: float) -> dict[str, Any]:
        heard, away, borders = self.heard(now_s), self.presence.away(), self.crossing.borders()
        not_counted = _removed(self, now_s) | self.now.ejected.keys()
        regions = {}
        for name in self.presence.regions:
            members = {member for member, region in self.crossing.places.items() if region == name} - not_counted
            regions[name] = {
                "members": len(members),
                "heard": len(members & heard),
                "away_s": now_s - away[name] if name in away else None,
                "fragments": sum(self.crossing.places.get(owner) == name for owner in self.owners),
                "bytes_in": sum(size for (_, to), size in borders.items() if to == name),
                "bytes_out": sum(size for (source, _), size in borders.items() if source == name),
            }
        return regions


def _sizes(fragment_map: FragmentMap, settings: RunSettings) -> dict[str, Any]:
    """Return the sizes of a run's model, by the keys of the status."""
    found = {"parameters": fragment_map.parameters, "state_values": fragment_map.state_values}
    return found | {"frozen": _frozen(fragment_map, settings)}


def _frozen(fragment_map: FragmentMap, settings: RunSettings) -> dict[str, Any] | None:
    """Return what all learners have alike and no message has, such as the base of an adapter; None: there is nothing."""
    if not fragment_map.fixed:
        return None
    values = sum(math.prod(each.shape) for each in fragment_map.fixed)
    return {
        "model": settings.task.options.get("model"), "tensors": len(fragment_map.fixed), "values": values,
        "hash": fragment_map.fixed_digest.hex(),
    }  # fmt: skip


def _mean(fragment_map: FragmentMap, tokens: Mapping[int, int]) -> int:
    """Return tokens by fragment as a mean over the parameters."""
    fragments = fragment_map.fragments
    return round(fragment_mean([tokens.get(each.index, 0) for each in fragments], [each.size for each in fragments]))


def _syncers(made: Monitor, now_s: float) -> dict[str, dict[str, Any]]:
    """Return what syncers say of themselves. One that is gone has the fragments that no other syncer has taken over."""
    found = {}
    for name, (heartbeat, seen_s) in sorted(made.shards.items()):
        found[name] = of_syncer(heartbeat, now_s - seen_s)
        if now_s - seen_s > made.gone_s:
            found[name]["fragments"] = sum(made.owners[index] == name for index in heartbeat.fragments)
    return found


def _removed(made: Monitor, now_s: float) -> set[str]:
    """Return members that an operator has taken out for good, by ejection, or by the revocation of a syncer."""
    ejected = made.learners.keys() & made.now.ejected.keys()
    learners = {name for name in ejected if now_s - made.learners[name].seen_s > EJECTED_SHOWN_S}
    syncers = {name for name, (_, seen_s) in made.shards.items() if now_s - seen_s > SYNCER_SHOWN_S}
    if now_s - made.resumed_s > SYNCER_SHOWN_S:  # members that only an earlier process heard
        syncers |= made.crossing.places.keys() - made.learners.keys() - made.shards.keys()
    return learners | syncers.difference(made.owners)


def _points(learner: Mapping[str, Any]) -> list[tuple[float, int, int, float]]:
    return [(float(a), int(b), int(c), float(d)) for a, b, c, d in learner["points"]]


def _activity_of(learner: Mapping[str, Any]) -> list[tuple[float, float, str]]:
    return [(float(a), float(b), str(c)) for a, b, c in learner["activity"]]


def _rounded(at_s: float, tokens: int, loss: float) -> list[float]:
    """Return a short point for the status, which travels often, and over thin links."""
    return [round(at_s, 2), tokens, round(loss, 5)]
