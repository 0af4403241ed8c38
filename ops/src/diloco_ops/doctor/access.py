"""The access that a service needs at its servers, as far as it can be tried without leaving anything behind. Pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from diloco.wire.subjects import Subjects, consumers
from diloco_ops.doctor.check import Role

OTHER = "doctor"  # a process that there is not
# keys of the bucket that others write; without those that a founder, or a creator, may write until the run has begun
_MEMBERS = (f"member.{OTHER}", f"share.{OTHER}")
OTHERS_KEYS: dict[Role, tuple[str, ...]] = {
    "learner": (*_MEMBERS, "run", "owners", "changes"),
    "evaluator": (*_MEMBERS, "run", "owners", "changes", "map"),
    "syncer": (*_MEMBERS, "run", "map", "changes"),
    "coordinator": (*_MEMBERS, "owners", "changes", "map"),
}


@dataclass(frozen=True)
class RequiredAccess:
    """Subjects that a service listens to, such of streams that it writes to, and others that it sends to.

    ``excess`` are subjects that its role must not send to, and an older version of ``diloco keys`` let it. An empty message
    does nothing there. ``excess_stores`` are such of streams.
    """

    listens: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    excess: tuple[str, ...] = ()
    excess_stores: tuple[str, ...] = ()

    def __add__(self, other: RequiredAccess) -> RequiredAccess:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return RequiredAccess(*(ours + theirs for ours, theirs in pairs))

    @property
    def needed(self) -> int:
        """How many things are needed."""
        return len(self.listens) + len(self.stores) + len(self.sends)


def at_control(role: Role, run: str, name: str) -> RequiredAccess:
    """Return the access to the server of heartbeats and of the bucket."""
    subjects = Subjects(run)
    own = (f"member.{name}", f"share.{name}")
    keys = {"learner": own, "evaluator": (), "syncer": ("owners",), "coordinator": ("coordinator",)}
    stores, others = (tuple(f"$KV.{subjects.bucket}.{key}" for key in some) for some in (keys[role], OTHERS_KEYS[role]))
    # without summaries (`presence`) a learner goes by heartbeats, so an older auth.conf does
    listens = {
        "learner": (subjects.heartbeat(), subjects.round(), subjects.marker, subjects.changed),
        "evaluator": (subjects.round(), subjects.changed),
        "syncer": (subjects.heartbeat(), subjects.shard(), subjects.marker, subjects.changed),
        "coordinator": (subjects.heartbeat(), subjects.shard(), subjects.coordinator, subjects.status, subjects.changed),
    }
    access = RequiredAccess(listens[role], stores, excess_stores=others)
    return access + (_answering(subjects, name) if role == "coordinator" else RequiredAccess())


def at_bulk(role: Role, run: str, name: str, reader: str) -> RequiredAccess:
    """Return the access to the server of the streams of a service's own region; ``reader``: whose consumers it makes."""
    subjects = Subjects(run)
    if role == "learner":
        others = (subjects.offer(0, OTHER), subjects.record(0))
        own = RequiredAccess((subjects.state(name),), (subjects.offer(0, name),), excess_stores=others)
        return own + _answering(subjects, name) + _log(subjects, reader)
    if role == "syncer":
        pulled = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.archive_stream}.doctor"
        return other_region(run, reader) + RequiredAccess(excess=(pulled,), excess_stores=(subjects.offer(0, OTHER),))
    return _log(subjects, reader) + RequiredAccess(excess_stores=(subjects.offer(0, OTHER), subjects.record(0)))


def other_region(run: str, reader: str) -> RequiredAccess:
    """Return a syncer's access to the server of any region."""
    subjects = Subjects(run)
    return RequiredAccess((), (subjects.record(0), subjects.keyframe(0))) + _log(subjects, reader)


def shortened_region(run: str, reader: str) -> RequiredAccess:
    """Return a coordinator's access to the server of a region whose log it shortens."""
    return _log(Subjects(run), reader)


def _log(subjects: Subjects, reader: str) -> RequiredAccess:
    """Return the access of a reader of the log: consumers under its own name, and none without a name."""
    create = f"$JS.API.CONSUMER.CREATE.{subjects.log_stream}"
    excess = (create, f"$JS.API.DIRECT.GET.{subjects.log_stream}")
    return RequiredAccess(sends=(f"{create}.{consumers(reader)[0]}.{subjects.record_tree('*')}",), excess=excess)


def _answering(subjects: Subjects, name: str) -> RequiredAccess:
    """Return the access of a service that others ask: it answers where the server tells it to, and nowhere else."""
    return RequiredAccess(sends=("_R_.doctor",), excess=(subjects.answers(name, "doctor"),))
