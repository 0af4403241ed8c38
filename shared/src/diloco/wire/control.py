"""Messages that are heard and not stored: heartbeats, rounds, checkpoints, and loans of a learner's optimizer state."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from diloco.wire.body import ATTEMPT_BYTES, Attempt
from diloco.wire.fields import (
    BY_FRAGMENT,
    MAX_FRAGMENTS,
    MAX_MEMBERS,
    MAX_REGIONS,
    AxisCounts,
    Bits,
    Count,
    Counts,
    FragmentIndex,
    Hash,
    MemberName,
    Number,
    Pace,
    Ranges,
    Region,
    RegionBits,
    Seconds,
    Software,
    Text,
)
from diloco.wire.framing import Message

MAX_SAID = 500  # characters
MAX_PARTS = 1023  # files of a learner's state, besides the first

MAX_PLACE = 100  # characters
MAX_REPORTED = 256  # pairs of sender and reason
MAX_SENDER, MAX_REASON = 64, 32  # characters

Said = Annotated[str, Meta(max_length=MAX_SAID)]  # for people
SenderText = Annotated[str, Meta(max_length=MAX_SENDER)]  # may come from the wire: any characters
ReasonText = Annotated[str, Meta(max_length=MAX_REASON)]
Reported = Literal["message", "offer", "missed", "heartbeat", "in_vain"]  # refused; refused; late; dropped; waited for
Place = Annotated[str, Meta(max_length=MAX_PLACE)]  # a device or a host, for people; may be empty


class Heartbeat(Message, frozen=True):
    """A learner's heartbeat, when a step has ended and at least every ``liveness.heartbeat_s``. Not stored."""

    kind = "heartbeat"
    subject_field = "learner"

    learner: MemberName
    region: Region
    incarnation: Count
    role: Literal["learner", "evaluator"]
    state: Literal["starting", "stepping", "waiting", "recovering", "closing", "leaving", "left", "finished"]
    sending: bool
    step: Count
    tokens: Count  # processed by this learner in this run, those before a restart included
    step_s: Seconds  # moving average of the time of an inner step
    loss: float | None  # of the last step, nats per token; an evaluator's is the global model's validation loss
    versions: Counts  # by fragment: the version last applied
    steps: Counts  # by fragment: steps not yet merged
    fragment_tokens: Counts  # by fragment: tokens not yet merged
    lost_tokens: Counts  # by fragment: tokens that will never be merged
    trained: Ranges  # the newest ranges that this incarnation has trained, each whole
    batch_tokens: Count  # of one batch: the same for all of a run
    busy_s: Seconds  # time with a step in flight
    blocked_s: Seconds  # time without a step in flight because of this system
    bytes_up: Count
    bytes_down: Count
    refused: Count
    software: Software
    failure: Said | None = None  # why its work is in vain: an evaluator's error, or steps that are not finite


class Sample(Message, frozen=True):
    """Text that an evaluator drew from the global model. Not stored."""

    kind = "sample"
    subject_field = "evaluator"

    evaluator: MemberName
    versions: Counts  # by fragment: of the model that it was drawn from
    text: Text


class Gauges(Message, frozen=True):
    """Figures of a learner that are shown, and nothing goes by. Not stored."""

    kind = "gauges"
    subject_field = "learner"

    learner: MemberName
    learning_rate: float | None  # of the newest step; None: not known
    gradient_norm: float | None  # of all parameters together, before clipping; None: not known, or not finite
    cores: Seconds  # processor time of its process by the time that passed
    memory_bytes: Count  # resident
    device_memory_bytes: Count | None  # in use on its devices; None: not known
    device: Place
    host: Place


class ValidationLoss(Message, frozen=True):
    """Loss that a learner's own training loop has found on validation data. Not stored.

    It has the subject of :class:`Gauges`.
    """

    kind = "validation_loss"
    subject_field = "learner"

    learner: MemberName
    loss: float  # of one item, such as a token


class ShardHeartbeat(Message, frozen=True):
    """A syncer's heartbeat, six times in ``liveness.takeover_s``. Not stored."""

    kind = "shard"
    subject_field = "syncer"

    syncer: MemberName
    region: Region
    incarnation: Count
    number: Count  # of this incarnation's heartbeats
    state: Literal["owner", "standby", "leaving", "unable"]
    revision: Count  # of the owners table that it follows; 0 for none
    fragments: Counts  # that it owns, or takes over
    closed: Counts  # fragments with a closed log, as far as it knows
    rounds: Count
    versions: Count
    open: Annotated[list[tuple[FragmentIndex, Count, Count, Seconds]], Meta(max_length=MAX_FRAGMENTS, extra=BY_FRAGMENT)]
    # for each open round: fragment, answers, quorum, waited_s
    refused: Count
    bytes_up: Count
    bytes_down: Count
    crossing: Annotated[list[tuple[Region, Count, Count]], Meta(max_length=MAX_REGIONS)]
    # of these bytes: sent to and received from the servers of each other region
    record_bits: Bits
    pace: Pace  # of its rounds: `round.steps` times this number of steps lie between two of them
    offer_bits: RegionBits  # bits of the offers that it asks for
    software: Software


class PresenceSummary(Message, frozen=True):
    """Summary of a syncer for learners: which of them it has heard. Not stored.

    Sent four times in ``liveness.lease_s``, and when a learner comes or comes back.
    """

    kind = "presence"
    subject_field = "syncer"

    syncer: MemberName
    incarnation: Count
    number: Number  # of this incarnation's summaries
    whole: bool  # it names every learner heard within `liveness.lease_s`; else only those that came, or came back
    learners: Annotated[list[tuple[MemberName, Seconds]], Meta(max_length=MAX_MEMBERS)]
    # each with the seconds since the syncer last heard it


class SenderReport(Message, frozen=True):
    """A member's counts of what it has refused, missed, dropped or waited for in vain since it began, by sender. Not stored."""

    kind = "sender_report"
    subject_field = "member"

    member: MemberName  # that counts
    entries: Annotated[list[tuple[SenderText, Reported, ReasonText, Number]], Meta(max_length=MAX_REPORTED)]
    # sender as it is known, what is counted of it, the reason, and how often; the most frequent ones


class CoordinatorHeartbeat(Message, frozen=True):
    """The leading coordinator's heartbeat, twice a second. Not stored."""

    kind = "coordinator"

    coordinator: MemberName
    revision: Count  # of the bucket's key `coordinator` that names it
    finished: bool  # the run is over: a standby may end
    software: Software


class Announcement(Message, frozen=True):
    """Announcement of an open round of a fragment; repeated until it closes, and idempotent. Not stored."""

    kind = "round"
    subject_field = "fragment"

    fragment: FragmentIndex
    version: Count  # of the merge that ends the round
    epoch: Count
    syncer: MemberName
    remaining_s: Seconds  # as the syncer expects it; a duration, since clocks differ
    closing: bool  # the budget is used up: offer everything
    tokens_processed: Count  # by all learners, as far as the syncer knows
    steps: Number  # between two rounds, at present
    offer_bits: RegionBits  # bits of the answers, by region; in other regions those of the settings


class SnapshotMarker(Message, frozen=True):
    """Snapshot marker: a checkpoint of the whole run is taken, every learner saves its state. Repeated. Not stored."""

    kind = "marker"

    number: Count  # of the checkpoint
    versions: Counts  # by fragment: a learner saves its state at its first step boundary with all of them applied


class MarkerAnswer(Message, frozen=True):
    """Acknowledgement of a snapshot marker: a learner has saved its state; repeated with the marker. Not stored."""

    kind = "marker_answer"
    subject_field = "learner"

    learner: MemberName
    number: Count
    step: Count
    versions: Counts  # by fragment: applied when the state was saved
    size_bytes: Count  # of the file
    file_hash: Hash
    parts: Annotated[list[tuple[Count, Hash]], Meta(max_length=MAX_PARTS)] | None = None
    # bytes and hash of the files of a learner's further processes, in their order; None: it is one


class MarkerDeclined(Message, frozen=True):
    """Answer to a snapshot marker of a learner that leaves no state for it; repeated with the marker. Not stored.

    It has the subject of a :class:`MarkerAnswer`.
    """

    kind = "marker_declined"
    subject_field = "learner"

    learner: MemberName
    number: Count
    reason: Literal["keeps_own", "not_saved"]  # its training loop keeps a checkpoint of its own; its disk took no state
    detail: Text  # for people; may be empty


class StateRequest(Message, frozen=True):
    """Request of a learner to a peer for its optimizer state, or for a slice of one of its arrays. Answered at once."""

    kind = "state_request"

    learner: MemberName  # that asks
    copy: Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)]  # that a slice is asked of; empty: a loan is asked for
    array: Count  # its place among the arrays of the layout, by name
    start: AxisCounts  # of the slice, by axis
    stop: AxisCounts


class StateLoan(Message, frozen=True):
    """Loan of a peer: its optimizer state as of one of its boundaries."""

    kind = "state_loan"

    peer: MemberName
    copy: Annotated[bytes, Meta(max_length=ATTEMPT_BYTES)]  # its name; empty: it is not made yet, ask again
    step: Count
    versions: Counts  # by fragment: applied when it was made
    layout: Hash  # of names, shapes and types of its arrays
    size_bytes: Annotated[int, Meta(ge=0, le=2**40)]
    content_hash: Hash  # tells it from other states


class StatePart(Message, frozen=True):
    """A slice of an array of a loan: the frame's body has its values, in C order, at most ``PART_BYTES``."""

    kind = "state_part"

    copy: Attempt
    array: Count
    start: AxisCounts
    content_hash: Hash  # of the body
