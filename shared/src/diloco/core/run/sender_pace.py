"""How many messages a second of each sender are decoded. Pure: it is given the time.

The newest message of a sender that is too fast waits for its turn, and takes the place of the one that waited before. So what a
listener knows of the sender is as new as its pace allows.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from diloco.wire.fields import MAX_MEMBERS

T = TypeVar("T")


class SenderPace(Generic[T]):
    """Lets ``per_s`` messages a second of each sender pass, and ``burst`` at once."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._every_s, self._burst_s = 1 / per_s, (burst - 1) / per_s
        self._free_s: dict[str, float] = {}  # by sender: when it may send `burst` messages again
        self._waiting: dict[str, T] = {}  # by sender: its newest message

    def take(self, sender: str, message: T, now_s: float) -> tuple[T | None, bool]:
        """Take in a message. Return it if it passes now, and whether one was dropped for it."""
        dropped = self._waiting.pop(sender, None) is not None
        if self._pass(sender, now_s):
            return message, dropped
        self._waiting[sender] = message
        return None, dropped

    def due(self, now_s: float) -> list[T]:
        """Return the messages that waited, and pass now."""
        senders = [sender for sender in self._waiting if self._pass(sender, now_s)]
        return [self._waiting.pop(sender) for sender in senders]

    def next_s(self, now_s: float) -> float | None:
        """Return the seconds until a message that waits may pass; None if none waits."""
        left_s = [self._free_s[sender] - self._burst_s - now_s for sender in self._waiting]
        return max(0.0, min(left_s)) if left_s else None

    def _pass(self, sender: str, now_s: float) -> bool:
        free_s = max(now_s, self._free_s.get(sender, now_s))
        if free_s - now_s > self._burst_s:
            return False
        if sender not in self._free_s and len(self._free_s) >= MAX_MEMBERS:
            self._forget(now_s)
        self._free_s[sender] = free_s + self._every_s
        return True

    def _forget(self, now_s: float) -> None:
        """Make room for one more sender: forget those that may send as many as a new one, or the one that is next to."""
        idle = [sender for sender, free_s in self._free_s.items() if free_s <= now_s and sender not in self._waiting]
        for sender in idle or [min(self._free_s, key=lambda sender: self._free_s[sender])]:
            del self._free_s[sender]
            self._waiting.pop(sender, None)
