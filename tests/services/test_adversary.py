"""The adversary of the siege draws all that it is to draw, and the same again from the same seed."""

from __future__ import annotations

from itertools import islice

from tests.services.adversary import HEADERS, KINDS, MAX_PAYLOAD, Adversary
from tests.services.secured import members

from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.subjects import Subjects
from diloco_ops.keys.permissions import Who, permissions

RUN_ID = bytes(range(8))
NAMES = Subjects("besieged")
LIAR = Who("liar", "learner")


def test_all_that_there_is_to_send_is_sent() -> None:
    def drawn(seed: int) -> Adversary:
        return Adversary(seed, NAMES, RUN_ID, LIAR, [*members(3, 2), LIAR], [NAMES.state("*")])

    some = list(islice(drawn(1).actions(), 4000))
    assert list(islice(drawn(1).actions(), 300)) == some[:300]
    assert list(islice(drawn(2).actions(), 300)) != some[:300]
    assert {action.kind for action in some} == set(KINDS)
    assert {action.headers for action in some} >= set(HEADERS)
    assert max(len(action.headers) + len(action.data) for action in some) == MAX_PAYLOAD
    assert not any(set(action.subject + action.reply) & set(b" \t\r\n") for action in some)
    subjects = {action.subject.decode(errors="replace") for action in some}
    plain = {subject for subject in permissions(LIAR, NAMES.run, (), ()).publish if "*" not in subject and ">" not in subject}
    assert plain <= subjects
    assert not any(f".{NAMES.run}.state." in subject for subject in subjects)
    frames = [action.data for action in some if action.kind == "valid" and framing.kind_of(action.data) == "heartbeat"]
    heartbeats = [framing.unpack(frame, Heartbeat, RUN_ID)[0] for frame in frames]
    assert "liar" in {heartbeat.learner for heartbeat in heartbeats}
