"""What an identity may do at a NATS server: the subjects that its role needs, and no others.

A server holds the control store (the bucket, and all that is not stored), or a region's streams, or both. A run without
regions has one kind of server, which holds everything. :func:`permissions` is all there is to it: pure lists.

They would not do by themselves. nats-server checks no permission on the subject that it is to answer to, and answers with the
rights of its own: whoever may ask for a message that does not exist could have the empty answer sent to
``$JS.API.STREAM.DELETE`` of any stream. So streams are in one account, ``RUN``, with those who make versions, and everybody
else is in another one, ``MEMBERS``, from which nothing leads there but the subjects of :func:`crossing`; answers stay in the
account of who asked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diloco.identity import Role
from diloco.wire.subjects import Subjects

CONTROL = "control"  # what a server serves that holds the control store; no region's name
API = "$JS.API"
ANSWERS = "_R_.>"  # where who answers somebody of the other account sends it; the server knows where that leads
MEMBERS: tuple[Role, ...] = ("learner", "evaluator", "observer")  # roles of the account without streams


@dataclass(frozen=True)
class Who:
    """An identity as far as permissions go by it."""

    name: str
    role: Role
    region: str | None = None
    founder: bool = False


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
    """What a role may do where the control store is, where its own region's streams are, and where another region's are."""

    control: Allowed
    home: Allowed
    elsewhere: Allowed = Allowed()


@dataclass(frozen=True)
class Crossing:
    """The subjects that lead from one account of a server to the other."""

    services: tuple[str, ...]  # asked by members, or stored for them, with an answer
    up: tuple[str, ...]  # heard from members
    down: tuple[str, ...]  # heard by members


def crossing(run: str, regions: Sequence[str], serves: Collection[str]) -> Crossing:
    """What leads from account to account: what any member may do, but for what members do among themselves."""
    names, allowed = Subjects(run), Allowed()
    for role in MEMBERS:
        for region in (None, *regions):
            if is_known(Who("*", role, region), regions, serves):
                allowed += permissions(Who("*", role, region, founder=True), run, regions, serves)
    among = {"_INBOX_*.>", names.state("*"), names.answers("*")}
    up = [subject for subject in allowed.publish if subject in (names.pulse(), names.marked())]
    services = [subject for subject in allowed.publish if subject not in among and subject not in up]
    down = [subject for subject in allowed.subscribe if subject not in among and subject not in up]
    return Crossing(tuple(services), tuple(up), tuple(down))


def is_known(who: Who, regions: Sequence[str], serves: Collection[str]) -> bool:
    """Whether a server that serves this has to know an identity: learners use no other region's."""
    if not regions or CONTROL in serves or who.role not in ("learner", "evaluator"):
        return True
    return who.region in serves


def permissions(who: Who, run: str, regions: Sequence[str], serves: Collection[str]) -> Allowed:
    """What ``who`` may do at a server that serves these regions, the control store, or both. Without regions: everything."""
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
                Allowed((names.pulse(who.name),), (names.round(), names.changed)) + _read_bucket(names),
                _read(names.log_stream),
            )
        case "syncer":
            return _syncer(who, names, regional)
        case "coordinator":
            return _coordinator(names)
        case "operator":
            return _operator(who, names)
        case "observer":
            return _Granted(_watch(who, names), _read(names.log_stream, names.archive_stream))
    raise AssertionError(who.role)


def _learner(who: Who, names: Subjects) -> _Granted:
    offers = _bodies(names.offer("*", who.name), 1)
    control = Allowed((names.pulse(who.name), names.marked(who.name)), (names.round(), names.mark, names.changed))
    control += _read_bucket(names) + _keys(names, f"member.{who.name}", "shares")
    home = Allowed((*offers, names.state("*"), names.answers("*")), (names.state(who.name), names.answers(who.name)))
    home += _read(names.log_stream)
    if who.founder:
        control += _keys(names, "map", "founder", "genesis")
        home += Allowed((names.genesis, *_bodies(names.keyframe("*"), 2)))
    return _Granted(control, home)


def _syncer(who: Who, names: Subjects, regional: bool) -> _Granted:
    control = Allowed((names.shard(who.name), names.round(), names.changed))
    control += Allowed((), (names.shard(), names.pulse(), names.round(), names.mark, names.changed))
    control += _read_bucket(names) + _keys(names, "owners", "changes")
    log = Allowed((*_bodies(names.record("*"), 2), *_bodies(names.keyframe("*"), 2)))
    log += _read(names.log_stream, names.offer_stream)
    home = log + Allowed((f"diloco.{names.run}.archive.>",)) + _read(names.archive_stream)
    home += _api("STREAM.PURGE", names.log_stream, names.offer_stream)
    if regional:
        log += Allowed((names.notice("*"),))
        home += Allowed((names.genesis, names.notice("*"), *_bodies(names.combined("*", who.name), 1))) + _make(names)
    return _Granted(control, home, log)


def _coordinator(names: Subjects) -> _Granted:
    control = Allowed(
        (names.coordinator, names.answers("*"), ANSWERS, names.changed),
        (names.coordinator, names.status, names.pulse(), names.shard(), names.changed),
    )
    control += _read_bucket(names) + _keys(names, "protocol", "run", "coordinator", "shares")
    control += _api("STREAM.CREATE", _store(names))
    log = _make(names) + _read(names.log_stream)
    return _Granted(control, log, log)


def _operator(who: Who, names: Subjects) -> _Granted:
    """Checkpoints and what goes on from them, changes of settings, and the end of a run; but nothing that is merged."""
    streams = (names.log_stream, names.offer_stream, names.archive_stream)
    control = _watch(who, names) + Allowed((names.mark, names.changed), (names.marked(),))
    control += _keys(names, "run", "changes") + _whole(_store(names)) + _api("STREAM.PURGE", _store(names))
    log = _read(names.log_stream, names.archive_stream) + _make(names) + _whole(*streams)
    log += _api("STREAM.MSG.DELETE", names.log_stream)
    everywhere = Allowed((f"{API}.STREAM.LIST",))
    return _Granted(control + everywhere, log + everywhere, log + everywhere)


def _watch(who: Who, names: Subjects) -> Allowed:
    """Hear all signs of life, and ask for the status."""
    heard = (names.pulse(), names.shard(), names.round(), names.coordinator, names.changed, names.answers(who.name))
    return Allowed((names.status,), heard) + _read_bucket(names)


def _bodies(head: str, tokens: int) -> tuple[str, str]:
    """Heads and their parts, whose subjects end in so many tokens: an index, after an attempt or alone."""
    return head, head.removesuffix("head") + "part" + ".*" * tokens


def _store(names: Subjects) -> str:
    """The stream behind the bucket."""
    return f"KV_{names.bucket}"


def _keys(names: Subjects, *keys: str) -> Allowed:
    return Allowed(tuple(f"$KV.{names.bucket}.{key}" for key in keys))


def _read_bucket(names: Subjects) -> Allowed:
    """Values come wrapped in JSON, never as their writer's bytes."""
    return _api("STREAM.INFO", _store(names)) + _api("STREAM.MSG.GET", _store(names))


def _read(*streams: str) -> Allowed:
    """Single messages and consumers, whose names the server makes up and nobody else learns."""
    allowed = _api("STREAM.INFO", *streams) + _api("STREAM.MSG.GET", *streams) + _api("DIRECT.GET", *streams)
    for stream in streams:
        following = (f"CONSUMER.CREATE.{stream}", f"CONSUMER.MSG.NEXT.{stream}.*", f"DIRECT.GET.{stream}.>")
        allowed += Allowed(tuple(f"{API}.{call}" for call in following))
    return allowed


def _make(names: Subjects) -> Allowed:
    """Make the run's streams where they are missing, and see that they are as they should be."""
    streams = (names.log_stream, names.offer_stream, names.archive_stream)
    return _api("STREAM.CREATE", *streams) + _api("STREAM.INFO", *streams)


def _whole(*streams: str) -> Allowed:
    """Save streams, restore them, and delete them."""
    allowed = _api("STREAM.SNAPSHOT", *streams) + _api("STREAM.RESTORE", *streams) + _api("STREAM.DELETE", *streams)
    moved = tuple(f"$JS.SNAPSHOT.{what}.{stream}.>" for stream in streams for what in ("ACK", "RESTORE"))
    return allowed + Allowed(moved)


def _api(call: str, *streams: str) -> Allowed:
    return Allowed(tuple(f"{API}.{call}.{stream}" for stream in streams))
