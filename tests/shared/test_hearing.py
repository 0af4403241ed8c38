"""A message is what its subject says: one that states another name, or fragment, is refused whatever else it says."""

from __future__ import annotations

import pytest
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat

from diloco.control.hearing import check_subject
from diloco.errors import FormatError
from diloco.wire.control import Announcement, MarkerAnswer, SnapshotMarker
from diloco.wire.framing import Message
from diloco.wire.subjects import Subjects

NAMES = Subjects("run")


@pytest.mark.parametrize(
    ("message", "own", "others"),
    [
        (learner_heartbeat("ann"), NAMES.heartbeat("ann"), NAMES.heartbeat("eve")),
        (shard_heartbeat("syncer-0", 1), NAMES.shard("syncer-0"), NAMES.shard("syncer-1")),
        (MarkerAnswer("ann", 1, 1, [1], 1, bytes(32)), NAMES.marker_answer("ann"), NAMES.marker_answer("eve")),
        (Announcement(1, 1, 1, "syncer-0", 0.0, False, 0, 4, []), NAMES.round(1), NAMES.round("01")),
    ],
)
def test_a_message_that_names_another_than_its_subject_is_refused(message: Message, own: str, others: str) -> None:
    check_subject(message, own)
    with pytest.raises(FormatError, match=f"of {message.subject_field} .*, by its subject: it says"):
        check_subject(message, others)


def test_a_message_that_states_no_name_may_have_any_subject() -> None:
    check_subject(SnapshotMarker(1, [1]), NAMES.marker)
