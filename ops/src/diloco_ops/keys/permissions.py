"""The rights of an identity at a NATS server: the subjects that its role needs, and no others.

A server holds the control store (the bucket, and all that is not stored), or a region's streams, or both. A run without
regions has one kind of server, which holds everything. :func:`permissions` is all there is to it: pure lists.

They would not do by themselves: :mod:`diloco_ops.keys.accounts` says why, and gives each identity an account of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diloco.control.whole import KEY
from diloco.nats.identity import Role
from diloco.wire.body import PART_BYTES
from diloco.wire.quarantines import outliers_key
from diloco.wire.refusals import refusals_key
from diloco.wire.subjects import Subjects, consumers, reader

CONTROL = "control"  # what a server serves that holds the control store; no region's name
API = "$JS.API"
READER_PAYLOAD_BYTES = 1 << 16  # of an observer's or evaluator's message: an evaluator's heartbeat of 4096 fragments
# of a learner's at a server without its streams: its heartbeat of 4096 fragments, with large numbers
CONTROL_PAYLOAD_BYTES = 3 << 16
# of a learner's where its streams are: a part of an offer or a loan, or all of a small one, with its fields
LEARNER_PAYLOAD_BYTES = PART_BYTES + (1 << 15)
COORDINATOR_PAYLOAD_BYTES = 1 << 19  # of a coordinator's: its status; the history has half
ANSWERS = "_R_.>"  # answers to others' requests are sent there; the server knows who asked


@dataclass(frozen=True)
class Who:
    """An identity as far as permissions go by it."""

    name: str
    role: Role
    region: str | None = None
    founder: bool = False  # a learner that may found the run, or a coordinator that may create it: until it has begun
    public_key: str | None = None  # of its nkey, when it has one
    processes: int = 1  # that share it: those of one learner

    @property
    def consumers(self) -> list[str]:
        """Names of its consumers of a stream."""
        own = reader(self.name, self.public_key)
        return [name for process in range(self.processes) for name in consumers(own, process)]


@dataclass(frozen=True)
class Allowed:
    """Subjects that may be published to, and subscribed to; everything else is refused."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    def __add__(self, other: Allowed) -> Allowed:
        publish, subscribe = self.publish + other.publish, self.subscribe + other.subscribe
        return Allowed(tuple(dict.fromkeys(publish)), tuple(dict.fromkeys(subscribe)))


@dataclass(frozen=True)
class _Granted:
    """The rights of a role at the control store, at its own region's streams, and at another region's."""

    control: Allowed
    home: Allowed
    elsewhere: Allowed = Allowed()


def is_known(who: Who, regions: Sequence[str], serves: Collection[str]) -> bool:
    """Whether a server that serves this has to know an identity: learners use no other region's."""
    if not regions or CONTROL in serves or who.role not in ("learner", "evaluator"):
        return True
    return who.region in serves


def most_payload_bytes(who: Who, regions: Sequence[str], serves: Collection[str]) -> int | None:
    """Return the bytes that a message of an identity may have at a server, headers included; None: as many as the server takes.

    Only offers, log entries, keyframes, states and a few keys of the bucket are large. What is larger than a server lets an
    identity send costs no listener anything: the server closes the connection, and logs the identity's key.
    """
    if who.role in ("observer", "evaluator"):
        return READER_PAYLOAD_BYTES
    if who.role == "coordinator":
        return COORDINATOR_PAYLOAD_BYTES
    if who.role == "learner" and not who.founder:  # a founder writes the map and keyframes
        return CONTROL_PAYLOAD_BYTES if regions and who.region not in serves else LEARNER_PAYLOAD_BYTES
    return None


def permissions(who: Who, run: str, regions: Sequence[str], serves: Collection[str]) -> Allowed:
    """Return the rights of ``who`` at a server of these regions, of the control store, or both; without regions, of all."""
    inbox = f"_INBOX_{who.name}.>"  # answers of the server come there, and what one sends oneself to measure a link
    allowed = Allowed((f"{API}.INFO", inbox), (inbox,))
    granted = _granted(who, Subjects(run), bool(regions))
    if not regions or CONTROL in serves:
        allowed += granted.control
    if not regions or (who.region in serves if who.region else bool(set(serves) & set(regions))):
        allowed += granted.home
    if regions and any(region in serves for region in regions if region != who.region):
        allowed += granted.elsewhere
    return allowed


def _granted(who: Who, names: Subjects, regional: bool) -> _Granted:
    match who.role:
        case "learner":
            return _learner(who, names)
        case "evaluator":
            return _Granted(
                Allowed((names.heartbeat(who.name), names.sample(who.name)), (names.round(), names.changed))
                + _read_bucket(names),
                _look(names.log_stream) + _follow(who, names.log_stream),
            )
        case "syncer":
            return _syncer(who, names, regional)
        case "coordinator":
            return _coordinator(who, names)
        case "operator":
            return _operator(who, names)
        case "observer":
            log = _look(names.log_stream, names.archive_stream) + _follow(who, names.log_stream)
            return _Granted(_watch(who, names), log)
    raise AssertionError(who.role)


def _learner(who: Who, names: Subjects) -> _Granted:
    offers = _bodies(names.offer("*", who.name), 1)
    heard = (names.heartbeat(), names.presence(), names.round(), names.marker, names.changed)
    control = Allowed((names.heartbeat(who.name), names.gauges(who.name), names.marker_answer(who.name)), heard)
    control += _read_bucket(names) + _keys(names, f"member.{who.name}", f"share.{who.name}")
    home = Allowed((*offers, names.state("*"), ANSWERS), (names.state(who.name), names.answers(who.name)))
    home += _look(names.log_stream) + _follow(who, names.log_stream)
    if who.founder:
        control += _keys(names, "map", "founder", "genesis")
        home += Allowed((names.genesis, *_bodies(names.keyframe("*"), 2)))
    return _Granted(control, home)


def _syncer(who: Who, names: Subjects, regional: bool) -> _Granted:
    sent = (names.shard(who.name), names.presence(who.name), names.sender_report(who.name), names.round(), names.changed)
    control = Allowed(sent)
    control += Allowed((), (names.shard(), names.heartbeat(), names.round(), names.marker, names.changed))
    control += _read_bucket(names) + _keys(names, "owners", refusals_key("*"), outliers_key(who.name))
    log = Allowed((*_bodies(names.record("*"), 2), *_bodies(names.keyframe("*"), 2)))
    log += _look(names.log_stream, names.offer_stream)
    log += _follow_some(who, names.log_stream) + _follow_some(who, names.offer_stream)
    home = log + Allowed((f"diloco.{names.run}.archive.>",)) + _look(names.archive_stream)
    home += _api("STREAM.PURGE", names.offer_stream)
    if regional:
        log += Allowed((names.commit_notice("*"),))
        home += Allowed((names.genesis, names.commit_notice("*"), *_bodies(names.regional_offer("*", who.name), 1))) + _make(
            names
        )
    return _Granted(control, home, log)


def _coordinator(who: Who, names: Subjects) -> _Granted:
    control = Allowed(
        (names.coordinator, ANSWERS, names.changed),
        (names.coordinator, names.status, names.heartbeat(), names.shard(), names.sample(), names.gauges(), names.changed),
    )
    control += Allowed((names.sender_report(who.name),), (names.sender_report(),))
    control += _read_bucket(names) + _keys(names, "coordinator", "history")
    if who.founder:  # no permission can be limited to setting a key once
        control += _keys(names, "protocol", "run")
    control += _api("STREAM.CREATE", _store(names))
    log = _make(names) + _look(names.log_stream) + _follow(who, names.log_stream)
    log += _api("STREAM.PURGE", names.log_stream)  # by subject, below a keyframe (diloco.log.shortening)
    return _Granted(control, log, log)


def _operator(who: Who, names: Subjects) -> _Granted:
    """Allow checkpoints and resuming, changes, repair of keys, the end of a run and of consumers; nothing that is merged."""
    streams = (names.log_stream, names.offer_stream, names.archive_stream)
    control = _watch(who, names) + Allowed((names.marker, names.changed), (names.marker_answer(),))
    control += _keys(names, "run", "changes", "protocol", "genesis", KEY) + _whole(_store(names))
    control += _api("STREAM.PURGE", _store(names)) + _clear(_store(names))
    log = _look(names.log_stream, names.archive_stream) + _follow(who, names.log_stream)
    log += _make(names) + _whole(*streams) + _clear(*streams)
    log += _api("STREAM.MSG.DELETE", names.log_stream)
    everywhere = Allowed((f"{API}.STREAM.LIST",))
    return _Granted(control + everywhere, log + everywhere, log + everywhere)


def _watch(who: Who, names: Subjects) -> Allowed:
    """Allow to hear all heartbeats, and to ask for the status."""
    heard = (names.heartbeat(), names.shard(), names.round(), names.coordinator, names.changed, names.answers(who.name))
    return Allowed((names.status,), heard) + _read_bucket(names)


def _bodies(head: str, tokens: int) -> tuple[str, str]:
    """Return subjects of heads and their parts, whose subjects end in so many tokens: an index, after an attempt or alone."""
    return head, head.removesuffix("head") + "part" + ".*" * tokens


def _store(names: Subjects) -> str:
    """Return the stream behind the bucket."""
    return f"KV_{names.bucket}"


def _keys(names: Subjects, *keys: str) -> Allowed:
    return Allowed(tuple(f"$KV.{names.bucket}.{key}" for key in keys))


def _read_bucket(names: Subjects) -> Allowed:
    """Allow reading values, which come wrapped in JSON, never as their writer's bytes."""
    return _api("STREAM.INFO", _store(names)) + _api("STREAM.MSG.GET", _store(names))


def _look(*streams: str) -> Allowed:
    """Allow to read single messages, one a request.

    A request to ``DIRECT.GET.<stream>`` itself is JSON, which may ask for the last messages of thousands of filters: a member
    kept a server busy with it. In the form with the subject of the message behind it, the server refuses such JSON.
    """
    allowed = _api("STREAM.INFO", *streams) + _api("STREAM.MSG.GET", *streams)
    return allowed + Allowed(tuple(f"{API}.DIRECT.GET.{stream}.>" for stream in streams))


def _follow(who: Who, stream: str) -> Allowed:
    """Allow a few consumers under the own name, of one filter each: matching thousands would keep a server busy."""
    calls = [f"{call}.{stream}.{name}" for name in who.consumers for call in ("CONSUMER.MSG.NEXT", "CONSUMER.DELETE")]
    made = [f"CONSUMER.CREATE.{stream}.{name}.>" for name in who.consumers]
    return Allowed(tuple(f"{API}.{call}" for call in (*made, *calls)))


def _follow_some(who: Who, stream: str) -> Allowed:
    """Allow as :func:`_follow`, and any number of filters: a syncer reads the fragments that it owns."""
    own = tuple(f"{API}.CONSUMER.CREATE.{stream}.{name}" for name in who.consumers)
    return Allowed(own) + _follow(who, stream)


def _clear(*streams: str) -> Allowed:
    """Allow to see all consumers, and to remove them."""
    return _api("CONSUMER.LIST", *streams) + Allowed(tuple(f"{API}.CONSUMER.DELETE.{stream}.*" for stream in streams))


def _make(names: Subjects) -> Allowed:
    """Allow to make the run's streams where they are missing, and to see that they are as they should be."""
    streams = (names.log_stream, names.offer_stream, names.archive_stream)
    return _api("STREAM.CREATE", *streams) + _api("STREAM.INFO", *streams)


def _whole(*streams: str) -> Allowed:
    """Allow to save streams, to restore them, and to delete them."""
    allowed = _api("STREAM.SNAPSHOT", *streams) + _api("STREAM.RESTORE", *streams) + _api("STREAM.DELETE", *streams)
    moved = tuple(f"$JS.SNAPSHOT.{what}.{stream}.>" for stream in streams for what in ("ACK", "RESTORE"))
    return allowed + Allowed(moved)


def _api(call: str, *streams: str) -> Allowed:
    return Allowed(tuple(f"{API}.{call}.{stream}" for stream in streams))
