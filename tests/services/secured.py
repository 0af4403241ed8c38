"""Keys for a test's run, and servers that let nobody in without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from diloco.identity import Role
from diloco_coordinator.keys.folder import Folder
from diloco_coordinator.keys.permissions import Who
from diloco_coordinator.keys.roster import IdentityEntry

HOST = "127.0.0.1"
AN_HOUR = timedelta(hours=1)


def make_keys(
    path: Path, run: str, who: Iterable[Who], *, regions: Sequence[str] = (), servers: Mapping[str, list[str]] | None = None
) -> Folder:
    """A folder as ``diloco keys`` makes it; ``servers`` by name: what each serves."""
    folder = Folder.make(path, run, regions)
    for name, serves in (servers or {"nats": []}).items():
        folder.put_server(name, [HOST], serves, datetime.now(UTC) + AN_HOUR)
    for one in who:
        put(folder, one)
    return folder


def put(folder: Folder, who: Who, left: timedelta = AN_HOUR) -> Path:
    """Make an identity that is good for so long; its file."""
    entry = IdentityEntry(
        name=who.name,
        role=who.role,
        region=who.region,
        founder=who.founder,
        public_key="U" + "A" * 55,
        serial="0",
        expires=datetime.now(UTC) + left,
    )
    folder.put_identity(entry)
    return folder.identity_file(who.name)


def members(learners: int, syncers: int, place: Sequence[str | None] = (None,)) -> list[Who]:
    """Whom a run of toys has, the first learner to found it; ``test`` observes."""

    def all_of(count: int, prefix: str, role: Role) -> list[Who]:
        return [Who(f"{prefix}-{i}", role, place[i % len(place)], role == "learner" and i == 0) for i in range(count)]

    others = [Who("coordinator", "coordinator", place[0]), Who("operator", "operator"), Who("test", "observer")]
    return [*all_of(learners, "toy", "learner"), *all_of(syncers, "syncer", "syncer"), *others]
