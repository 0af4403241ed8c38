"""The access that a service needs at its servers, as far as it can be tried without leaving anything behind. Pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from diloco.wire.subjects import Subjects, consumers
from diloco_ops.doctor.check import Role


@dataclass(frozen=True)
class RequiredAccess:
    """Subjects that a service listens to, such of streams that it writes to, and others that it sends to.

    ``excess`` are subjects that an older version of ``diloco keys`` let its role send to. An empty message does nothing there.
    """

    listens: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    excess: tuple[str, ...] = ()

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
    stores = tuple(f"$KV.{subjects.bucket}.{key}" for key in keys[role])
    listens = {
        "learner": (subjects.heartbeat(), subjects.round(), subjects.marker, subjects.changed),
        "evaluator": (subjects.round(), subjects.changed),
        "syncer": (subjects.heartbeat(), subjects.shard(), subjects.marker, subjects.changed),
        "coordinator": (subjects.heartbeat(), subjects.shard(), subjects.coordinator, subjects.status, subjects.changed),
    }
    return RequiredAccess(listens[role], stores) + (_answering(subjects, name) if role == "coordinator" else RequiredAccess())


def at_bulk(role: Role, run: str, name: str, reader: str) -> RequiredAccess:
    """Return the access to the server of the streams of a service's own region; ``reader``: whose consumers it makes."""
    subjects = Subjects(run)
    if role == "learner":
        own = RequiredAccess((subjects.state(name),), (subjects.offer(0, name),))
        return own + _answering(subjects, name) + _log(subjects, reader)
    if role == "syncer":
        pulled = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.archive_stream}.doctor"
        return other_region(run, reader) + RequiredAccess(excess=(pulled,))
    return _log(subjects, reader)


def other_region(run: str, reader: str) -> RequiredAccess:
    """Return a syncer's access to the server of any region."""
    subjects = Subjects(run)
    return RequiredAccess((), (subjects.record(0), subjects.keyframe(0))) + _log(subjects, reader)


def _log(subjects: Subjects, reader: str) -> RequiredAccess:
    """Return the access of a reader of the log: consumers under its own name, and none without a name."""
    create = f"$JS.API.CONSUMER.CREATE.{subjects.log_stream}"
    return RequiredAccess(sends=(f"{create}.{consumers(reader)[0]}.{subjects.record_tree('*')}",), excess=(create,))


def _answering(subjects: Subjects, name: str) -> RequiredAccess:
    """Return the access of a service that others ask: it answers where the server tells it to, and nowhere else."""
    return RequiredAccess(sends=("_R_.doctor",), excess=(subjects.answers(name, "doctor"),))
