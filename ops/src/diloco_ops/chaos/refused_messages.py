"""The messages that a run's members refused, by their logs: those that chaos damaged or repeated are told from all others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from diloco.errors import FormatError, HashError
from diloco.process.logs import LogLine

EVENTS = ("message_refused", "entry_refused", "offers_dropped", "state_refused")
DAMAGE = (FormatError.__name__, HashError.__name__)  # all that a damaged frame is refused as


@dataclass
class RefusalCount:
    """Refusals: each sender and kind once for each member that refused it, as members log them."""

    honest: list[str] = field(default_factory=list)  # in words
    made: int = 0  # of damage, of a sender whose messages were damaged; of entries that were stored once more

    @classmethod
    def read(
        cls, entries: Iterable[LogLine], since_s: float = 0.0, damaged: Collection[str] = (), repeated: Collection[int] = ()
    ) -> RefusalCount:
        """Sort the refusals since a moment; ``damaged``: whose messages chaos damaged; ``repeated``: sequences of copies."""
        found = cls()
        for entry in entries:
            if entry.event not in EVENTS or entry.time_s < since_s:
                continue
            sender = str(entry.values.get("sender"))
            is_damage = sender in damaged and entry.values.get("kind") in DAMAGE
            if is_damage or entry.values.get("sequence") in repeated:
                found.made += 1
            else:
                found.honest.append(f"{entry.service} refused a message of {sender}: {entry.values.get('reason')}")
        return found
