"""Checkpoints of whole runs in object storage: ``PLACE/NUMBER/`` has the files that a folder has, and the manifest comes last.

A number is claimed first, by creating an object that must not exist: so two uploads never write to one number. An object is
whole or not there, and the manifest states the hash of each. So an upload that is killed at any request leaves a number without
a manifest, which no reader chooses, and older checkpoints as they are. Nothing is deleted here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from diloco.errors import ObjectExistsError, ObjectMissingError, RunError
from diloco.settings.places import StoragePlace
from diloco.storage.fetching import fetched
from diloco.storage.object_store import ObjectStore
from diloco.storage.opening import open_store
from diloco_ops.checkpoints import manifest
from diloco_ops.checkpoints.manifest import MANIFEST, RunCheckpoint

CLAIM = "claim.json"  # the object that claims a number, and says when
NICENESS = 10  # of processes that upload: training on this machine goes first


def lower_priority() -> None:
    """Let all other processes of this machine have the processor first; threads that begin later have this priority too."""
    os.nice(NICENESS)


@dataclass(frozen=True)
class ClaimedNumber:
    """A number below a place that is this process's to fill."""

    store: ObjectStore
    place: StoragePlace  # of the checkpoint

    def upload(self, taken: RunCheckpoint) -> None:
        """Send a checkpoint's files, and its manifest last.

        Raises:
            RunError: learners' states are missing, or a file has another content than its manifest states.
            ObjectStoreError: the store cannot be reached or refuses; the number stays without a manifest.
        """
        taken.check()
        self.store.send([(self.place.below(each.file).key, taken.path / each.file) for each in taken.manifest.files])
        self.store.put(self.place.below(MANIFEST).key, (taken.path / MANIFEST).read_bytes(), create=True)

    def give_back(self) -> None:
        """Delete the claim of a number below which nothing was sent."""
        self.store.delete([self.place.below(CLAIM).key])


def claim_number(place: StoragePlace) -> ClaimedNumber:
    """Claim the number after the largest one below a place; that shows that the place can be written.

    Raises:
        ObjectStoreError: the store cannot be reached or refuses.
    """
    store = open_store(place)
    number = max(_numbers(store, place), default=0)
    while True:
        number += 1
        claimed = ClaimedNumber(store, place.below(str(number)))
        try:
            store.put(claimed.place.below(CLAIM).key, json.dumps({"claimed_at_s": time.time()}).encode(), create=True)
        except ObjectExistsError:  # another process was faster
            continue
        return claimed


def find(place: StoragePlace, check: Callable[[RunCheckpoint], None]) -> tuple[RunCheckpoint, list[str]]:
    """Bring the checkpoint of a place, or the newest one below it, to this machine; also return notes on those passed over.

    Where the place is a checkpoint itself, those of smaller numbers beside it come after it.

    Raises:
        RunError: there is none that is whole; the fault of each is named.
        ObjectStoreError: the store cannot be reached or refuses.
    """
    store = open_store(place)
    numbers = _numbers(store, place)
    parent = place
    if not numbers and place.name.isdecimal():
        parent = place.parent
        numbers = {number: whole for number, whole in _numbers(store, parent).items() if number <= int(place.name)}
    candidates = [(parent.below(str(number)), whole) for number, whole in sorted(numbers.items(), reverse=True)]
    if not candidates:
        candidates = [(place, True)]  # a folder of any other name
    notes: list[str] = []
    for candidate, whole in candidates:
        try:
            if not whole:
                raise RunError(f"{candidate}: is no checkpoint, or its upload was never finished (it has no {MANIFEST})")
            found = manifest.load(fetched(str(candidate)))
            check(found)
        except (RunError, ObjectMissingError) as error:
            notes.append(f"{error}; passed over")
            continue
        return found, [*notes, f"the checkpoint is {candidate}"]
    raise RunError("; ".join(note.removesuffix("; passed over") for note in notes))


def _numbers(store: ObjectStore, place: StoragePlace) -> dict[int, bool]:
    """Return the numbers below a place, and of each whether it has a manifest."""
    found: dict[int, bool] = {}
    for each in store.list(place.key):
        number, _, name = each.key.removeprefix(place.key).lstrip("/").partition("/")
        if number.isascii() and number.isdecimal() and len(number) < 10 and name:
            found[int(number)] = found.get(int(number), False) or name == MANIFEST
    return found
