"""The messages between the processes of a learner: how to draw them, and an example of each with a value in every field."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from diloco.wire import process_messages as island
from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.framing import Message
from diloco.wire.offers import Answer
from diloco.wire.process_messages import ChainHead, Pending, Write

Strategy = st.SearchStrategy[Any]

COUNT, NUMBER, FRAGMENT = st.integers(0, 2**62), st.integers(1, 2**62), st.integers(0, 4095)
HASH, SHARE, PROCESS = st.binary(min_size=32, max_size=32), st.integers(0, 2**14 - 1), st.integers(0, 1023)
BITS, STAGE = st.sampled_from([1, 2, 4, 8, 16, 32]), st.sampled_from(["model", "program"])
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
FACTS = st.lists(st.tuples(TEXT, TEXT), max_size=3)
ADDRESS = st.tuples(st.sampled_from(["10.0.0.1", "fe80::1"]), st.integers(1, 65535))
PENDING = st.builds(Pending, st.tuples(COUNT, COUNT), BITS, st.booleans())
SAVE = st.builds(island.Save, st.sampled_from(["own", "whole", "loan"]), TEXT, TEXT, COUNT)
WRITE = st.builds(Write, FRAGMENT, COUNT, NUMBER, st.booleans(), st.booleans())


def strategies(answer: Strategy, cursor: Strategy, record: Strategy, rolled_back: Strategy) -> dict[type[Message], Strategy]:
    """How to draw a message of each kind, of these parts."""
    ends = st.lists(st.tuples(SHARE, COUNT), max_size=3)
    cursors, flag = st.lists(cursor, max_size=3), st.booleans()
    back = st.none() | rolled_back
    head = st.builds(ChainHead, COUNT, COUNT, HASH, COUNT, HASH, COUNT, COUNT, flag, cursors, ends, back, COUNT)
    writes, reads = st.lists(WRITE, max_size=3), st.lists(FRAGMENT, max_size=3)
    addresses, offers = st.lists(ADDRESS, max_size=3), st.lists(PENDING, max_size=3)
    moment = [COUNT, COUNT, st.none() | COUNT]
    return {
        island.Challenge: st.builds(island.Challenge, HASH),
        island.Arrival: st.builds(island.Arrival, PROCESS, st.integers(1, 1024), ADDRESS, FACTS),
        island.Welcome: st.builds(island.Welcome, NUMBER, HASH, ADDRESS, st.lists(PROCESS, max_size=3), addresses),
        island.Standing: st.builds(island.Standing, PROCESS, st.none() | NUMBER),
        island.Refused: st.builds(island.Refused, TEXT),
        island.Greeting: st.builds(island.Greeting, PROCESS, NUMBER, HASH),
        island.Proof: st.builds(island.Proof, HASH),
        island.Ping: st.builds(island.Ping, COUNT, COUNT, COUNT),
        island.Agree: st.builds(island.Agree, STAGE, FACTS),
        island.Agreed: st.builds(island.Agreed, STAGE, TEXT),
        island.LeaderAnswer: st.builds(island.LeaderAnswer, STAGE, flag),
        island.LoanPeers: st.builds(island.LoanPeers, STAGE, st.lists(TEXT, max_size=3)),
        island.Gather: st.builds(island.Gather, FRAGMENT),
        island.Folded: st.builds(island.Folded, FRAGMENT, head, flag, st.none() | record),
        island.Stage: st.builds(island.Stage, NUMBER, FRAGMENT, COUNT, flag, st.none() | PENDING, flag, flag, offers),
        island.Rows: st.builds(
            island.Rows, FRAGMENT, COUNT, st.sampled_from(["whole", "snapshot", "theta", "reference"]), COUNT, COUNT, HASH
        ),
        island.Staged: st.builds(island.Staged, FRAGMENT, NUMBER),
        island.Encode: st.builds(island.Encode, FRAGMENT, COUNT, BITS, COUNT),
        island.Encoded: st.builds(island.Encoded, FRAGMENT, st.none() | HASH),
        island.Store: st.builds(island.Store, FRAGMENT, BITS, answer),
        island.OfferStored: st.builds(island.OfferStored, FRAGMENT, COUNT),
        island.Decided: st.builds(
            island.Decided,
            *[NUMBER, COUNT, COUNT, writes, reads, st.tuples(SHARE, COUNT)],
            *moment,
            *[flag, flag, flag, flag, st.none() | SAVE, HASH],
        ),
        island.Passed: st.builds(island.Passed, COUNT, COUNT, HASH),
        island.PartSaved: st.builds(island.PartSaved, COUNT, st.none() | HASH, COUNT),
        island.CopyState: st.builds(island.CopyState, COUNT),
        island.AskSlice: st.builds(
            island.AskSlice, NUMBER, COUNT, TEXT, st.lists(COUNT, max_size=3), st.lists(COUNT, max_size=3)
        ),
        island.Slice: st.builds(island.Slice, NUMBER, HASH),
        island.DropLoan: st.builds(island.DropLoan, COUNT),
        island.Candidate: st.builds(island.Candidate, STAGE, st.none() | TEXT, st.lists(offers, max_size=3), reads),
        island.Leaving: st.builds(island.Leaving, NUMBER),
        island.Again: st.builds(island.Again, NUMBER),
        island.Kept: st.builds(island.Kept, st.text(max_size=100), COUNT),
        island.Bye: st.builds(island.Bye, NUMBER),
    }


def examples(record: Message) -> dict[type[Message], Message]:
    """An example of each kind, with this record."""
    assert isinstance(record, Record)
    answer = Answer("ann", 3, 4, (3, 3), 5, 4, b"b" * 32, 6, 7, 8, [(2, 9, 5)])
    pending, save = Pending((3, 4), 8, False), island.Save("own", "7, boundary 6", "7, boundary 2", 0)
    head = ChainHead(
        4, 1, b"h" * 32, 9, b"s" * 32, 10, 11, False, [Cursor("ann", 1, 2, 3, 4, 5, 6)], [(2, 14)], RolledBack(1, 2, 3), 1
    )
    found: list[Message] = [
        island.Challenge(b"n" * 32),
        island.Arrival(1, 2, ("10.0.0.2", 7600), [("jax", "0.10")]),
        island.Welcome(7, b"s" * 32, ("10.0.0.1", 7601), [0, 2], [("10.0.0.1", 7602), ("10.0.0.2", 7603)]),
        island.Standing(0, 7),
        island.Refused("process 1 differs"),
        island.Greeting(1, 7, b"n" * 32),
        island.Proof(b"m" * 32),
        island.Ping(8, 9, 1),
        island.Agree("model", [("mesh", "2")]),
        island.Agreed("model", "process 1 differs"),
        island.LeaderAnswer("end", True),
        island.LoanPeers("peers", ["bob"]),
        island.Gather(3),
        island.Folded(3, head, True, record),
        island.Stage(5, 3, 4, True, pending, False, True, [pending]),
        island.Rows(3, 5, "theta", 0, 2, b"d" * 32),
        island.Staged(3, 5),
        island.Encode(3, 6, 4, 8),
        island.Encoded(3, b"c" * 32),
        island.Store(3, 4, answer),
        island.OfferStored(3, 12),
        island.Decided(
            7, 6, 5, [Write(3, 4, 5, True, False)], [3], (2, 9), 10, 11, 12, False, False, False, False, save, b"p" * 32
        ),
        island.Passed(6, 5, b"c" * 32),
        island.PartSaved(6, b"c" * 32, 4096),
        island.CopyState(6),
        island.AskSlice(2, 6, "optimizer/0/mu", [0, 4], [8, 8]),
        island.Slice(2, b"d" * 32),
        island.DropLoan(6),
        island.Candidate("checkpoint 0", "7, boundary 6", [[pending]], [3]),
        island.Leaving(7),
        island.Again(7),
        island.Kept("1760000000000, kept at 12", 12),
        island.Bye(7),
    ]
    return {type(message): message for message in found}
