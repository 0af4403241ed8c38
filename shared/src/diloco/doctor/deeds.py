"""What a service does at its servers, as far as it can be tried without leaving anything behind. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.doctor.check import Role
from diloco.wire.subjects import Subjects


@dataclass(frozen=True)
class Deeds:
    """Subjects that a service listens to, and such of streams that it writes to."""

    listens: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    def __add__(self, other: Deeds) -> Deeds:
        return Deeds(self.listens + other.listens, self.stores + other.stores)


def at_control(role: Role, run: str, name: str) -> Deeds:
    """Where signs of life and the bucket are."""
    subjects = Subjects(run)
    keys = {"learner": (f"member.{name}", "shares"), "evaluator": (), "syncer": ("owners",), "coordinator": ("coordinator",)}
    stores = tuple(f"$KV.{subjects.bucket}.{key}" for key in keys[role])
    listens = {
        "learner": (subjects.round(), subjects.mark, subjects.changed),
        "evaluator": (subjects.round(), subjects.changed),
        "syncer": (subjects.pulse(), subjects.shard(), subjects.mark, subjects.changed),
        "coordinator": (subjects.pulse(), subjects.shard(), subjects.coordinator, subjects.status, subjects.changed),
    }
    return Deeds(listens[role], stores)


def at_bulk(role: Role, run: str, name: str) -> Deeds:
    """Where the streams of a service's own region are."""
    subjects = Subjects(run)
    if role == "learner":
        return Deeds((subjects.state(name),), (subjects.offer(0, name),))
    return other_region(run) if role == "syncer" else Deeds()


def other_region(run: str) -> Deeds:
    """What a syncer does at the server of any region."""
    subjects = Subjects(run)
    return Deeds((), (subjects.record(0), subjects.keyframe(0)))
