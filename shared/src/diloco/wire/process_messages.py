"""Messages between the processes of one learner, which pass no NATS server; ``docs/maintainers.md`` says who sends which."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.fields import MAX_MEMBERS, MAX_SHARES, AxisCounts, Bits, Count, FragmentIndex, Hash, Number, ShareId
from diloco.wire.framing import Message
from diloco.wire.offers import Answer

MAX_PROCESSES = 1024
MAX_FACTS = 32
PIECE_BYTES = 512 * 1024  # of rows that travel; small beside a frame's most

Process = Annotated[int, Meta(ge=0, lt=MAX_PROCESSES)]
Text = Annotated[str, Meta(max_length=2000)]
Facts = Annotated[list[tuple[Text, Text]], Meta(max_length=MAX_FACTS)]  # what all processes have to agree on, by name
Address = tuple[Annotated[str, Meta(max_length=255)], Annotated[int, Meta(ge=1, le=65535)]]
What = Literal["whole", "snapshot", "theta", "reference"]
Identity = tuple[Count, Count]  # incarnation and number of an offer
Purpose = Literal["own", "whole", "loan"]  # of a state that is saved: for the learner, a run's checkpoint, or a peer
SetName = Annotated[str, Meta(max_length=100)]  # that all parts of one state have


# ---- meeting


class Challenge(Message, frozen=True):
    """First message of each end, on a connection to one of ``processes.address``."""

    kind = "challenge"

    nonce: Hash


class Arrival(Message, frozen=True):
    """A process to the leader: here it is, reached at this address by other processes."""

    kind = "arrival"

    index: Process
    count: Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
    address: Address
    facts: Facts


class Welcome(Message, frozen=True):
    """The leader's answer when all processes have come."""

    kind = "welcome"

    generation: Number
    secret: Hash
    coordinator: Address  # of jax.distributed
    members: Annotated[list[Process], Meta(max_length=MAX_PROCESSES)]  # the indexes of its processes, by place: they grow
    addresses: Annotated[list[Address], Meta(max_length=MAX_PROCESSES)]  # by place


class Standing(Message, frozen=True):
    """A process that others may come to, again and again, to each that is connected: what it does."""

    kind = "standing"

    leader: Process  # the one that it has gone to, or it itself, which has others come
    generation: Number | None  # that it leads, if it does: who comes waits for the next one


class Refused(Message, frozen=True):
    """The leader's answer to a process that cannot take part."""

    kind = "refused"

    reason: Text


class Greeting(Message, frozen=True):
    """First message on a connection between two processes, from the one that made it; the other answers with its own."""

    kind = "greeting"

    place: Process
    generation: Number
    nonce: Hash


class Proof(Message, frozen=True):
    """Second message of each: the sender knows the secret, or has the key."""

    kind = "proof"

    mac: Hash


# ---- the life of an island


class Ping(Message, frozen=True):
    """A sign of life, and what the sender has moved so far."""

    kind = "ping"

    bytes_up: Count
    bytes_down: Count
    refused: Count


class Agree(Message, frozen=True):
    """Facts that the sender has found so far, which all have to find alike."""

    kind = "agree"

    stage: Annotated[str, Meta(max_length=32)]
    facts: Facts


class Agreed(Message, frozen=True):
    """The leader's answer: all found the same (``reason`` is empty), or not."""

    kind = "agreed"

    stage: Annotated[str, Meta(max_length=32)]
    reason: Text


class LeaderAnswer(Message, frozen=True):
    """The leader to all: yes or no, at a stage at which it alone knows."""

    kind = "leader_answer"

    stage: Annotated[str, Meta(max_length=32)]
    yes: bool


class LoanPeers(Message, frozen=True):
    """The leader to all: the learners that an optimizer state can be borrowed from, the best one first."""

    kind = "loan_peers"

    stage: Annotated[str, Meta(max_length=32)]
    learners: Annotated[list[Text], Meta(max_length=MAX_MEMBERS)]


class Gather(Message, frozen=True):
    """The leader to all, before the first step or after the last one: send your rows of a fragment."""

    kind = "gather"

    fragment: FragmentIndex


class ChainHead(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The head of a fragment's log as its carrier has it (:class:`diloco.core.log.chain.Chain`)."""

    version: Count
    epoch: Count
    head: Hash
    sequence: Count
    state_hash: Hash
    tokens_merged: Count
    tokens_lost: Count
    closed: bool
    cursors: Annotated[list[Cursor], Meta(max_length=MAX_MEMBERS)]
    ends: Annotated[list[tuple[ShareId, Count]], Meta(max_length=MAX_SHARES)]
    rolled_back: RolledBack | None
    epoch_step: Count


class Folded(Message, frozen=True):
    """A carrier to the leader: a fragment's log has an entry more (``record``), or was loaded; ``rewound``: it lost entries."""

    kind = "folded"

    fragment: FragmentIndex
    head: ChainHead
    rewound: bool
    record: Record | None


class Pending(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An offer whose fate is unknown, as far as its arrays are concerned."""

    identity: Identity
    bits: Bits
    dropped: bool


class Stage(Message, frozen=True):
    """The leader to a carrier: bring a version's rows to all processes; how it is to be applied."""

    kind = "stage"

    number: Number
    fragment: FragmentIndex
    version: Count
    keeps: bool
    merged: Pending | None
    cleared: bool
    reset: bool
    pending: Annotated[list[Pending], Meta(max_length=MAX_MEMBERS)]  # after it


class Rows(Message, frozen=True):
    """Piece ``piece`` of ``pieces`` of a process's rows of a fragment; the values are the frame's body.

    ``snapshot``: as of decision ``number``, to the carrier. ``theta``, ``reference``: of stage ``number``, from the carrier.
    ``whole``: as of now, when no step is taken, to the leader.
    """

    kind = "rows"

    fragment: FragmentIndex
    number: Count
    what: What
    piece: Count
    pieces: Count
    digest: Hash  # of these bytes


class Staged(Message, frozen=True):
    """A process to the leader: all its rows of a stage have come."""

    kind = "staged"

    fragment: FragmentIndex
    number: Number


class Encode(Message, frozen=True):
    """The leader to all: the fragment's snapshot as of decision ``number`` is offered; its carrier quantises it."""

    kind = "encode"

    fragment: FragmentIndex
    number: Count
    bits: Bits
    version: Count  # that the round makes which it answers


class Encoded(Message, frozen=True):
    """A carrier to the leader: the snapshot is quantised; ``content`` is None where its values were not finite."""

    kind = "encoded"

    fragment: FragmentIndex
    content: Hash | None


class Store(Message, frozen=True):
    """The leader to a carrier: store the offer that states this."""

    kind = "store"

    fragment: FragmentIndex
    bits: Bits
    stated: Answer


class OfferStored(Message, frozen=True):
    """A carrier to the leader: the offer is stored, with its head at ``sequence``."""

    kind = "stored"

    fragment: FragmentIndex
    sequence: Count


class Write(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A version to be written, whose rows were brought by a stage."""

    fragment: FragmentIndex
    version: Count
    stage: Number
    keeps: bool
    reset: bool


class Save(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The state as of a boundary is to be saved: each process writes the part that it has of it."""

    purpose: Purpose
    name: SetName
    whole: SetName  # the newest own checkpoint of which all parts are on the disk: it is not to be overwritten
    marker: Count  # number of the whole run's checkpoint; 0: it is for none


class Decided(Message, frozen=True):
    """The leader to all: one boundary, the same everywhere."""

    kind = "decided"

    generation: Number
    number: Count  # boundaries of this generation before it
    step: Count  # steps of this generation before it
    writes: Annotated[list[Write], Meta(max_length=4096)]  # in this order
    reads: Annotated[list[FragmentIndex], Meta(max_length=4096)]
    batch: tuple[ShareId, Count]  # of the next step
    tokens: Count  # with ``budget`` and ``warming``: they give the learning rate of the next step
    budget: Count
    warming: Count | None
    stop: bool
    wait: bool
    finished: bool
    ended: bool  # the learner leaves the run now
    save: Save | None  # with all of this boundary carried out
    previous: Hash  # chained hash of the decisions before


class Passed(Message, frozen=True):
    """A process to the leader: it has carried out decision ``number``; ``chain`` is the chained hash up to it."""

    kind = "passed"

    number: Count
    step: Count
    chain: Hash


class PartSaved(Message, frozen=True):
    """A process to the leader: its part of the state as of decision ``number`` is on the disk; None: it is not."""

    kind = "part_saved"

    number: Count
    content: Hash | None  # hash of its part; for a whole run's checkpoint, of the file
    size_bytes: Count


class CopyState(Message, frozen=True):
    """The leader to all, of which each has its part: copy the state as of decision ``number``, which was carried out last."""

    kind = "copy_state"

    number: Count


class AskSlice(Message, frozen=True):
    """The leader to a process: give these values of the state that is lent as of decision ``number``, from its part."""

    kind = "ask_slice"

    request: Number
    number: Count
    name: Text  # of the array
    start: AxisCounts
    stop: AxisCounts


class Slice(Message, frozen=True):
    """The answer, with the values as the frame's body; without any, if there are none."""

    kind = "slice"

    request: Number
    digest: Hash  # of the values


class DropLoan(Message, frozen=True):
    """The leader to all: the state as of decision ``number`` is lent no more."""

    kind = "drop_loan"

    number: Count


class Candidate(Message, frozen=True):
    """The leader to all, before the first step: can you begin from this checkpoint? ``name`` is None: there is no other."""

    kind = "candidate"

    stage: Annotated[str, Meta(max_length=32)]
    name: SetName | None
    offers: Annotated[list[Annotated[list[Pending], Meta(max_length=MAX_MEMBERS)]], Meta(max_length=4096)]
    # by fragment: those whose fate it does not know
    bare: Annotated[list[FragmentIndex], Meta(max_length=4096)]  # of which it has no arrays: a process is gone that had them


class Leaving(Message, frozen=True):
    """A process to the leader: it was asked to end."""

    kind = "leaving"

    generation: Number


class Again(Message, frozen=True):
    """A process to all others: one is gone, and the sender begins again. It waits for the leader's answer."""

    kind = "again"

    generation: Number


class Kept(Message, frozen=True):
    """The leader's answer to :class:`Again`: the state as of decision ``number`` is kept, of which each writes what it has.

    ``name`` is that of its parts; empty: none is kept.
    """

    kind = "kept"

    name: SetName
    number: Count


class Bye(Message, frozen=True):
    """The sender ends as decided: this connection's end is no loss."""

    kind = "bye"

    generation: Number


MESSAGES: dict[str, type[Message]] = {
    message.kind: message
    for message in (
        Ping, Agree, Agreed, LeaderAnswer, LoanPeers, Candidate, Gather, Folded, Stage, Rows, Staged, Encode, Encoded, Store,
        OfferStored, Decided, Passed, PartSaved, CopyState, AskSlice, Slice, DropLoan, Leaving, Again, Kept, Bye,
    )
}  # fmt: skip  # once two processes have proved who they are


def facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return facts in order of their names."""
    return sorted((name, str(value)[:2000]) for name, value in values.items())


def difference(own: list[tuple[str, str]], other: list[tuple[str, str]], process: str) -> str | None:
    """Return the first fact that differs, with both values; None if there is none. ``process`` is the name of the own one."""
    mine, theirs = dict(own), dict(other)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return f"{name}: {theirs.get(name, 'nothing')} there, {mine.get(name, 'nothing')} at {process}"
    return None
