"""The adversary of a siege draws all that it is to draw, and the same again from the same seed."""

from __future__ import annotations

import random
from itertools import islice

import msgspec
import pytest
from tests.services.secured import members

from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.framing import Message
from diloco.wire.subjects import Subjects
from diloco_ops.keys.permissions import Who, permissions
from diloco_ops.siege.adversary import HEADERS, KINDS, MAX_PAYLOAD, Adversary
from diloco_ops.siege.drawn_messages import KINDS as CLASSES
from diloco_ops.siege.drawn_messages import draw_message

RUN_ID = bytes(range(8))
NAMES = Subjects("besieged")
LIAR = Who("liar", "learner")


def drawn(seed: int) -> Adversary:
    return Adversary(seed, NAMES, RUN_ID, LIAR, [*members(3, 2), LIAR], withheld=[NAMES.state("*")])


def test_all_that_there_is_to_send_is_sent() -> None:
    some = list(islice(drawn(1).actions(), 4000))
    assert list(islice(drawn(1).actions(), 300)) == some[:300]
    assert list(islice(drawn(2).actions(), 300)) != some[:300]
    assert {action.kind for action in some} == set(KINDS)
    assert {action.headers for action in some} >= set(HEADERS)
    assert max(len(action.headers) + len(action.data) for action in some) == MAX_PAYLOAD
    assert max(action.times for action in some) > 10
    assert not any(set(action.subject + action.reply) & set(b" \t\r\n") for action in some)
    subjects = {action.subject.decode(errors="replace") for action in some}
    plain = {subject for subject in permissions(LIAR, NAMES.run, (), ()).publish if "*" not in subject and ">" not in subject}
    assert plain <= subjects
    assert not any(f".{NAMES.run}.state." in subject for subject in subjects)


def test_what_was_heard_is_sent_later_as_it_was_and_in_the_own_name() -> None:
    adversary = drawn(1)
    heard = Heartbeat(*draw_message(Heartbeat, random.Random(5), ["toy-1", "", "1.0"]))
    heard = msgspec.structs.replace(heard, tokens=77, steps=[5, 6])
    adversary.hear(framing.pack(heard, RUN_ID))
    adversary.hear(b"no frame")
    frames = [action.data for action in islice(adversary.actions(), 4000) if action.kind == "valid"]
    sent = [framing.unpack(frame, Heartbeat, RUN_ID)[0] for frame in frames if framing.kind_of(frame) == "heartbeat"]
    alike = {heartbeat.learner for heartbeat in sent if (heartbeat.tokens, heartbeat.steps) == (77, [5, 6])}
    assert alike == {"toy-1", "liar"}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.kind)
def test_drawn_messages_are_within_the_bounds_of_their_fields(cls: type[Message]) -> None:
    choices, decoder = random.Random(3), msgspec.msgpack.Decoder(cls)
    refused = []
    for _ in range(300):
        try:
            decoder.decode(msgspec.msgpack.encode(draw_message(cls, choices, ["toy-1", "", "1.0"])))
        except msgspec.ValidationError as error:
            refused.append(str(error))
    assert len(refused) < 300
    # each field is within its bounds; what several fields say together may be impossible
    assert not [reason for reason in refused if reason.startswith("Expected")]
