"""Leadership among several coordinators: a key names the leader, until it is silent by the others' own clocks.

The key is written by compare-and-set, so each of its revisions has one leader. Heartbeats carry the revision, so that a leader
that was frozen or cut off learns that it has been replaced. Pure: times come from the caller.
"""

from __future__ import annotations

from typing import Literal

SILENCE_S = 2.0  # of the leader, after which another one takes its place: four of its heartbeats
LATE_S = 1.0  # between two ticks: twice the usual time; this process itself was frozen
READ_S = 2.0  # after so long the leader reads whether the key still names it

Action = Literal["read", "claim", "heartbeat", "wait"]


class Leadership:
    """One coordinator's view of the leadership.

    Args:
        name: of this coordinator.
        process: identity of this process, which a successor of the same name does not have.
    """

    def __init__(self, name: str, process: bytes, now_s: float) -> None:
        self.name, self.process = name, process
        self.leads = False
        self.revision = 0  # newest known one of the key; 0: there has been no leader
        self._must_read = self._first = True
        self._may_claim = False
        self._heard_s = self._ticked_s = self._read_s = now_s

    def tick(self, now_s: float, connected: bool) -> Action:
        """Return the next action: read the key, claim it at :attr:`revision`, send a heartbeat as the leader, or wait."""
        late = now_s - self._ticked_s > LATE_S
        self._ticked_s = now_s
        if late or not connected:  # a leader that was not heard may live
            self._heard_s, self._must_read, self._may_claim = now_s, True, False
        if not connected:
            return "wait"
        if self._must_read or (self.leads and now_s - self._read_s > READ_S):
            return "read"
        if self.leads:
            return "heartbeat"
        return "claim" if self._may_claim or now_s - self._heard_s > SILENCE_S else "wait"

    def read(self, holder: tuple[str, bytes] | None, revision: int, now_s: float) -> None:
        """Take in the key: name and process of the leader (None: there is none, or it is unknown) and its revision."""
        if revision != self.revision:
            self._heard_s = now_s
        self.revision, self._read_s, self._must_read = revision, now_s, False
        self.leads = holder is not None and holder == (self.name, self.process)
        # at its start a process need not wait for one of its own name, which it follows
        self._may_claim = revision == 0 or (self._first and holder is not None and holder[0] == self.name)
        self._first = False

    def claimed(self, revision: int | None, now_s: float) -> None:
        """Take in the result of a claim: the key's new revision, or None if another coordinator was first."""
        self._may_claim = False
        if revision is None:
            self._must_read, self._heard_s = True, now_s
        else:
            self.leads, self.revision, self._read_s = True, revision, now_s

    def hear(self, revision: int, now_s: float) -> None:
        """Take in a leader's heartbeat."""
        if revision < self.revision or (self.leads and revision == self.revision):
            return  # of a leader that does not know yet that it was replaced, or of this process
        self._heard_s, self._may_claim = now_s, False
        if revision > self.revision:
            self._must_read = True

    def sure(self, now_s: float) -> bool:
        """Whether this process leads without a doubt: it was not frozen just now, and heard of no other leader."""
        return self.leads and not self._must_read and now_s - self._ticked_s <= LATE_S
