"""Which messages of a log are beyond a cut, with regions and without, whatever was stored between and committed when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.log_entries import record_of

from diloco.core.log.chain import NO_ENTRY
from diloco.errors import RunError
from diloco.nats.pull import PulledMessage
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Claim, CommitNotice, Keyframe
from diloco.wire.offers import MergeMember
from diloco.wire.subjects import Subjects
from diloco_ops.checkpoints.shorten import FragmentMessages

RUN, NAMES = bytes(8), Subjects("run")
BODY = Body(1, bytes(32), 0, bytes(8))


@dataclass
class Stream:
    """Fragment 0's messages in one stream; ``committed``: sequence of each version's entry."""

    regions: bool
    messages: list[PulledMessage] = field(default_factory=list)
    committed: dict[int, int] = field(default_factory=dict)
    notices: dict[int, int] = field(default_factory=dict)  # sequence of a notice: that of its entry
    head: bytes = b"\1" * 32
    sequence: int = 0
    epoch: int = 0

    def store(self, subject: str, data: bytes) -> int:
        self.sequence += 1
        self.messages.append(PulledMessage(subject, self.sequence, data, pending=0))
        return self.sequence

    def entry(self, *, dead: bool) -> None:
        """Store an entry with its part; one that is dead is followed by none, and committed by none."""
        version = 1 + len(self.committed)
        member = MergeMember("ann", 1, self.sequence + 1, 1, 0, 1, 10, 0, 1.0, [])
        values: dict[str, Any] = {"epoch": self.epoch, "previous": self.head, "tokens_merged": 10 * version, "body": BODY}
        record = record_of(version, member, syncer="syncer", learning_rate=0.7, momentum=0.5, **values)
        self.store(f"diloco.run.fragment.0.part.{self.sequence:016x}.0", b"part")
        sequence = self.store(NAMES.record(0), framing.pack(record, RUN))
        if not dead:
            self.head, self.committed[version] = framing.hash_of(record, RUN), sequence

    def claim(self) -> None:
        self.epoch += 1
        claim = Claim(0, self.epoch, "syncer", 0, 0, False, bytes(32), 0)
        self.store(NAMES.record(0), framing.pack(claim, RUN))

    def notice(self) -> None:
        if self.committed:
            entry = self.committed[len(self.committed)]
            notice = CommitNotice(0, len(self.committed), self.epoch, self.head, entry)
            self.notices[self.store(NAMES.commit_notice(0), framing.pack(notice, RUN))] = entry

    def keyframe(self) -> None:
        version = len(self.committed)
        head, entry = (self.head, self.committed[version]) if version else (NO_ENTRY, 0)
        keyframe = Keyframe(0, version, self.epoch, head, entry, 0, 0, [], [], bytes(32), False, BODY)
        self.store(NAMES.keyframe(0), framing.pack(keyframe, RUN))

    def read(self) -> FragmentMessages:
        held = FragmentMessages(0, self.regions)
        for message in self.messages:
            held.note(message, RUN)
        return held


ACTIONS = st.lists(st.sampled_from(["entry", "entry", "dead", "claim", "notice", "keyframe"]), max_size=40)


def played(actions: list[str], *, regions: bool) -> Stream:
    stream = Stream(regions)
    stream.keyframe()
    for action in actions:
        if action in ("entry", "dead"):
            stream.entry(dead=regions and action == "dead")
        elif action == "keyframe":
            if regions:
                stream.notice()  # keyframes are of what is committed
            stream.keyframe()
        elif regions:
            getattr(stream, action)()
    if regions:
        stream.notice()
    return stream


@given(actions=ACTIONS, regions=st.booleans(), data=st.data())
def test_nothing_is_left_beyond_a_cut_and_all_that_leads_up_to_it_is(actions: list[str], regions: bool, data: Any) -> None:
    stream = played(actions, regions=regions)
    held = stream.read()
    version = data.draw(st.integers(0, len(stream.committed)))

    end = held.end_of(version)

    assert end == (stream.committed[version] if version else 0)  # never a dead entry, which may have the same version
    doomed = set(held.beyond(end))
    left = [message for message in stream.messages if message.sequence not in doomed]
    if (notice := held.missing_notice(end)) is not None:  # a notice of a later entry committed it
        left.append(PulledMessage(NAMES.commit_notice(0), stream.sequence + 1, framing.pack(notice, RUN), pending=0))
        stream.notices[stream.sequence + 1] = end
    again = Stream(regions, left).read()
    assert dict(again.versions) == {number: made for made, number in stream.committed.items() if made <= version}
    assert again.missing_notice(end) is None
    notices = {message.sequence for message in left if message.subject == NAMES.commit_notice(0)}
    assert notices == {sequence for sequence, entry in stream.notices.items() if entry <= end}
    for message in left:  # what comes later of entries and claims is gone
        assert message.sequence <= end or message.sequence in notices or ".keyframe." in message.subject
    assert again.beyond(end) == []


def test_a_version_that_the_log_does_not_have_is_named_with_those_that_it_has() -> None:
    held = played(["entry", "entry"], regions=True).read()
    with pytest.raises(RunError, match="the log has versions 0 to 2 of fragment 0"):
        held.end_of(3)
    del held.keyframes[:]
    with pytest.raises(RunError, match="fragment 0: its log begins only after"):
        held.beyond(0)
