"""Which of several coordinators leads: the one that a key names, until it is silent by the others' own clocks.

The key is written by compare-and-set, so each of its revisions has one leader; signs of life carry the revision, so that one
that was frozen or cut off learns that its time is over. Pure: times come from the caller.
"""

from __future__ import annotations

from typing import Literal

SILENCE_S = 2.0  # of the leader, and another one takes its place
LATE_S = 1.0  # a tick that comes so much after the one before: this process itself was frozen
READ_S = 2.0  # how often the leader looks whether the key still names it

Action = Literal["read", "claim", "pulse", "wait"]


class Leadership:
    """What one coordinator knows of who leads.

    Args:
        name: of this coordinator.
        process: of this very process, so that a successor of the same name is another one.
    """

    def __init__(self, name: str, process: bytes, now_s: float) -> None:
        self.name, self.process = name, process
        self.leads = False
        self.revision = 0  # of the key, the newest known; 0: nobody has led yet
        self._must_read = self._first = True
        self._may_claim = False
        self._heard_s = self._ticked_s = self._read_s = now_s

    def tick(self, now_s: float, connected: bool) -> Action:
        """What to do now: read the key, claim it at :attr:`revision`, tell the others that one leads, or nothing."""
        late = now_s - self._ticked_s > LATE_S
        self._ticked_s = now_s
        if late or not connected:  # whoever was not heard may live
            self._heard_s, self._must_read, self._may_claim = now_s, True, False
        if not connected:
            return "wait"
        if self._must_read or (self.leads and now_s - self._read_s > READ_S):
            return "read"
        if self.leads:
            return "pulse"
        return "claim" if self._may_claim or now_s - self._heard_s > SILENCE_S else "wait"

    def read(self, holder: tuple[str, bytes] | None, revision: int, now_s: float) -> None:
        """Take in the key: name and process of who leads (None: nobody, or no one knows who) and its revision."""
        if revision != self.revision:
            self._heard_s = now_s
        self.revision, self._read_s, self._must_read = revision, now_s, False
        self.leads = holder is not None and holder == (self.name, self.process)
        # at its start a process need not wait for one of its own name, which it follows
        self._may_claim = revision == 0 or (self._first and holder is not None and holder[0] == self.name)
        self._first = False

    def claimed(self, revision: int | None, now_s: float) -> None:
        """Take in what came of a claim: the key's new revision, or None if somebody else was first."""
        self._may_claim = False
        if revision is None:
            self._must_read, self._heard_s = True, now_s
        else:
            self.leads, self.revision, self._read_s = True, revision, now_s

    def hear(self, revision: int, now_s: float) -> None:
        """Take in a leader's sign of life."""
        if revision < self.revision or (self.leads and revision == self.revision):
            return  # of one that does not know yet that its time is over; or one's own
        self._heard_s, self._may_claim = now_s, False
        if revision > self.revision:
            self._must_read = True

    def sure(self, now_s: float) -> bool:
        """Whether this process leads and has no reason to doubt it: it was not frozen just now, nor heard of another one."""
        return self.leads and not self._must_read and now_s - self._ticked_s <= LATE_S
