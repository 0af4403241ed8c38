"""The states that a learner of several processes saves, as its leader knows of them: every process writes a part of each.

A state counts once all of its parts are on the disk. Each process keeps the newest own checkpoint that counts until a newer
one does: :class:`~diloco.wire.process_messages.Save` names it, so that all keep the same one, though some could not write
theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.errors import IslandError
from diloco.wire.process_messages import PartSaved, Purpose, Save


def set_name(generation: int, number: int, *, kept: bool = False) -> str:
    """Return the name of a generation's state as of a boundary; ``kept``: of the one that is kept as the generation ends."""
    return f"{generation}, {'kept at ' if kept else ''}boundary {number}"


def same_generation(name: str, other: str) -> bool:
    """Whether two names are of states of one generation."""
    return name.partition(",")[0] == other.partition(",")[0]


@dataclass(frozen=True)
class Ended:
    """A state with which all processes have ended; ``parts`` by process are empty if one could not save its own."""

    number: int  # of the decision
    save: Save
    parts: dict[int, PartSaved]


@dataclass
class Saves:
    """The state that is being saved, and the newest own checkpoint that counts. The caller serialises the calls."""

    processes: int
    whole: str = ""  # name of that checkpoint
    under_way: Save | None = None
    _number: int = -1  # of the decision that named it
    _parts: dict[int, PartSaved] = field(default_factory=dict)  # by process

    def word(self, purpose: Purpose, name: str, marker: int = 0) -> Save:
        """Return what a decision says of a state that is to be saved; ``marker``: for which checkpoint of a whole run."""
        return Save(purpose, name, self.whole, marker)

    def begin(self, number: int, save: Save) -> None:
        """Note that a decision was made that says so."""
        self._number, self.under_way = number, save
        self._parts = {}

    def saved(self, process: int, part: PartSaved) -> Ended | None:
        """Take in that a process has ended with its part; return the outcome once all have.

        Raises:
            IslandError: the process was not asked, or says so twice.
        """
        if part.number < self._number:
            return None  # the learner leaves, and has begun to save its last state meanwhile
        if self.under_way is None or part.number > self._number or process in self._parts:
            raise IslandError(f"process {process} has saved a part as of boundary {part.number}: it was not asked for")
        self._parts[process] = part
        if len(self._parts) < self.processes:
            return None
        save, self.under_way = self.under_way, None
        complete = all(each.content is not None for each in self._parts.values())
        if complete and save.purpose == "own":
            self.whole = save.name
        return Ended(self._number, save, self._parts if complete else {})
