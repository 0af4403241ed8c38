"""A message is what its subject says: one that states another name, or fragment, is refused whatever else it says."""

from __future__ import annotations

from typing import cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat

from diloco.control.hearing import check_subject, decoding
from diloco.errors import FormatError
from diloco.process.observe import Counted, get_logger
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, MarkerAnswer, SnapshotMarker
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
    with pytest.raises(FormatError, match=f"its subject names {message.subject_field} .*, its content"):
        check_subject(message, others)


@pytest.mark.parametrize(("subject", "handled"), [(NAMES.heartbeat("ann"), ["ann"]), (NAMES.heartbeat("eve"), [])])
async def test_what_is_heard_is_handled_only_under_its_own_subject(subject: str, handled: list[str]) -> None:
    run, names, refused = bytes(8), list[str](), Counted(get_logger(), "message_refused")

    async def handle(heartbeat: Heartbeat, heard: Heard) -> None:
        names.append(heartbeat.learner)

    frame = framing.pack(learner_heartbeat("ann", 1), run)
    await decoding(Heartbeat, run, handle, refused)(Msg(cast(Client, None), subject, data=frame))

    assert names == handled
    assert refused.total == 1 - len(handled)


def test_a_message_that_states_no_name_may_have_any_subject() -> None:
    check_subject(SnapshotMarker(1, [1]), NAMES.marker)
