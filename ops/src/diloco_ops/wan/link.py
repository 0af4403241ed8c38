"""One direction of an emulated WAN link: what may enter it, what goes first, and when it arrives.

    flows ──▶ queue (bounded; control before bulk, flows in turn) ──▶ serialisation at the rate ──▶ delay ± jitter ──▶ receivers

A link serialises one *piece* after another, each a whole number of packets, at most 10 ms of the rate (or one packet). Which
piece is next is decided when the one before it has left, so a message of the control class waits for one piece at most,
however much bulk is queued. Among flows of a class, bytes are dealt in turns of one piece. What has left arrives after the
delay, never before what left earlier. Nothing is dropped: a full queue closes its entrance, and senders feel that as they
feel a full TCP window. A cut link holds everything, in the queue and in flight, until it is healed.

A piece begins when the one before it has left, not at the next look: as long as the queue has something, a caller that is
late loses none of the rate. That is why there is a queue at all, a tenth of a second of the rate by default.

Rejected: dropping from a full queue, as routers do. The bytes come from sockets and were acknowledged to their sender when
they were read, so what is dropped here is gone. And a token bucket, which would let a burst through after every pause; a
serialiser is a bucket of one piece.

Pure: the caller gives the time, of a clock that never goes back, in seconds, and carries out what :meth:`Link.poll` returns.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Traffic = Literal["control", "bulk"]
Mark = Literal["open", "accepted", "end", "abort"]  # what TCP says by packets without payload: SYN, SYN-ACK, FIN, RST
R = TypeVar("R")

CLASSES: tuple[Traffic, ...] = ("control", "bulk")  # in order of precedence
PACKET_BYTES = 1448  # payload of a TCP segment with timestamps in an Ethernet frame
PIECE_S = 0.010  # a message of the control class waits so long at most
MAX_PIECE_BYTES = 45 * PACKET_BYTES
UNLIMITED_PIECE_BYTES = 181 * PACKET_BYTES  # 256 KiB: with nothing to serialise, only the number of calls counts
QUEUE_S = 0.1  # as long as a late caller may be without a loss of rate
MIN_QUEUE_BYTES = 1 << 16
UNLIMITED_QUEUE_BYTES = 1 << 20
WINDOW_BYTES = 16 << 20  # of one flow, queued and in flight: bounds memory, as TCP's receive window does
ACHIEVED_S = 5.0  # the rate is averaged over so long
_BUCKET_S = 0.5  # steps in which that average moves

MIN_RATE_BITS_PER_S = 1e3  # a packet in 12 s
MAX_RATE_BITS_PER_S = 1e12  # beyond any link
MAX_DELAY_S = 10.0  # beyond any link on Earth
MAX_QUEUE_BYTES = 1 << 30


@dataclass(frozen=True)
class LinkConditions:
    """A link's rate, delay, jitter and queue.

    The rate counts payload; ``None`` is unlimited. The jitter is uniform in ± ``jitter_s``.
    """

    rate_bits_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    queue_bytes: int | None = None  # None: a tenth of a second of the rate, at least 64 KiB

    @property
    def queue_limit_bytes(self) -> int:
        """How much of each class may be queued."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        if self.rate_bits_per_s is None:
            return UNLIMITED_QUEUE_BYTES
        return max(MIN_QUEUE_BYTES, int(self.rate_bits_per_s / 8 * QUEUE_S))

    @property
    def piece_bytes(self) -> int:
        """The largest piece: whole packets, within 10 ms of the rate where that is a packet or more."""
        if self.rate_bits_per_s is None:
            return UNLIMITED_PIECE_BYTES
        packets = int(self.rate_bits_per_s / 8 * PIECE_S / PACKET_BYTES)
        return min(MAX_PIECE_BYTES, max(1, packets) * PACKET_BYTES)

    def serialisation_s(self, size_bytes: float) -> float:
        """Return how long bytes take to be put on the link."""
        return 0.0 if self.rate_bits_per_s is None else size_bytes * 8 / self.rate_bits_per_s


@dataclass
class _Entry:
    data: memoryview
    mark: Mark | None
    entered_s: float


@dataclass(eq=False)
class Flow(Generic[R]):
    """One direction of a connection through a link. ``receiver`` is the caller's, and gets the deliveries."""

    receiver: R
    traffic: Traffic
    queued_bytes: int = 0
    flying_bytes: int = 0  # being serialised, or in flight
    dropped: bool = False
    queue: deque[_Entry] = field(default_factory=deque, repr=False)
    turn_bytes: int = 0  # what is left of its turn


@dataclass(frozen=True)
class Delivery(Generic[R]):
    """Payload, or a mark, that arrived at ``at_s``, before the caller looked."""

    at_s: float
    flow: Flow[R]
    data: memoryview
    mark: Mark | None


@dataclass(frozen=True)
class LinkTraffic:
    """The traffic of one class that a link carried. A packet is up to 1448 bytes of what was sent at once, or a mark."""

    payload_bytes: int = 0
    packets: int = 0


@dataclass(frozen=True)
class Statistics:
    """A link at one moment."""

    achieved_bits_per_s: float  # over the last 5 s
    queued_bytes: int
    queue_age_s: float  # of the oldest that is queued
    flying_bytes: int


class WanLink(Generic[R]):
    """One direction of a link. ``chance`` draws the jitter."""

    def __init__(self, conditions: LinkConditions, chance: random.Random) -> None:
        self.conditions = conditions
        self.is_cut = False
        self._chance = chance
        self._turns: dict[Traffic, deque[Flow[R]]] = {traffic: deque() for traffic in CLASSES}
        self._queued_bytes: dict[Traffic, int] = dict.fromkeys(CLASSES, 0)
        self._serving: tuple[Flow[R], _Entry] | None = None
        self._left_bytes = 0.0  # of what is being served, while the link is cut
        self._done_s = 0.0  # when what is being served has left
        self._free_s = 0.0  # when the next piece may begin
        self._flight: deque[Delivery[R]] = deque()
        self._last_arrival_s = 0.0
        self._flying_bytes = 0
        self.carried: dict[Traffic, LinkTraffic] = dict.fromkeys(CLASSES, LinkTraffic())
        self._meter: deque[tuple[float, int]] = deque()  # (when a bucket began, its bytes)

    # ---- the entrance

    def room(self, flow: Flow[R]) -> int:
        """Return how many bytes of a flow may enter now.

        A flow's share of the queue is the queue over the flows that have something in it. Zero until half of the share is
        free, so that senders are read in large parts. Who has nothing queued may always bring one piece.
        """
        limit, piece = self.conditions.queue_limit_bytes, self.conditions.piece_bytes
        others = len(self._turns[flow.traffic]) - (1 if flow.queue else 0)
        share = max(piece, limit // (others + 1))
        window = WINDOW_BYTES - flow.queued_bytes - flow.flying_bytes
        if flow.queued_bytes > share // 2 or window < min(share, WINDOW_BYTES) // 2:
            return 0
        free = limit - self._queued_bytes[flow.traffic]
        return max(0, min(share - flow.queued_bytes, window, free if flow.queue else max(free, piece)))

    def enter(self, now_s: float, flow: Flow[R], data: bytes) -> None:
        """Add payload of a flow to the queue."""
        if data:
            self._join(now_s, flow, _Entry(memoryview(data), None, now_s))

    def mark(self, now_s: float, flow: Flow[R], mark: Mark) -> None:
        """Add a mark to the queue, behind the flow's payload. It takes no time to serialise."""
        self._join(now_s, flow, _Entry(memoryview(b""), mark, now_s))

    def _join(self, now_s: float, flow: Flow[R], entry: _Entry) -> None:
        self._advance(now_s)
        if self._serving is None and not any(self._turns.values()):
            self._free_s = max(self._free_s, now_s)
        if not flow.queue:
            flow.turn_bytes = self.conditions.piece_bytes
            self._turns[flow.traffic].append(flow)
        flow.queue.append(entry)
        flow.queued_bytes += len(entry.data)
        self._queued_bytes[flow.traffic] += len(entry.data)

    def drop(self, flow: Flow[R]) -> None:
        """Forget a flow: its queued bytes are not sent, those in flight do not arrive."""
        if flow.queue:
            self._turns[flow.traffic].remove(flow)
            self._queued_bytes[flow.traffic] -= flow.queued_bytes
            flow.queue.clear()
        flow.queued_bytes, flow.dropped = 0, True

    # ---- the way

    def poll(self, now_s: float) -> list[Delivery[R]]:
        """Return the deliveries that have arrived by now, in order."""
        self._advance(now_s)
        arrived: list[Delivery[R]] = []
        while not self.is_cut and self._flight and self._flight[0].at_s <= now_s:
            delivery = self._flight.popleft()
            size = len(delivery.data)
            self._flying_bytes -= size
            delivery.flow.flying_bytes -= size
            if not delivery.flow.dropped:
                arrived.append(delivery)
        return arrived

    def next_s(self) -> float | None:
        """Return when to poll again if nothing is done meanwhile; None: there is nothing to wait for."""
        if self.is_cut:
            return None
        leaves_s = self._done_s if self._serving else math.inf
        arrives_s = self._flight[0].at_s if self._flight else math.inf
        next_s = min(leaves_s, arrives_s)
        return None if next_s == math.inf else next_s

    def _advance(self, now_s: float) -> None:
        """Serialise as far as the time has come."""
        while not self.is_cut:
            if self._serving is not None:
                if self._done_s > now_s:
                    return
                self._leave(*self._serving)
            if not any(self._turns.values()):
                return
            self._serving = self._next_piece()
            self._done_s = self._free_s + self.conditions.serialisation_s(len(self._serving[1].data))

    def _next_piece(self) -> tuple[Flow[R], _Entry]:
        turns = next(turns for turns in self._turns.values() if turns)
        flow = turns[0]
        entry = flow.queue[0]
        size = min(len(entry.data), flow.turn_bytes, self.conditions.piece_bytes)
        if size < len(entry.data):
            piece = _Entry(entry.data[:size], None, entry.entered_s)
            entry.data = entry.data[size:]
        else:
            piece = flow.queue.popleft()
        flow.turn_bytes -= size
        flow.queued_bytes -= size
        flow.flying_bytes += size
        self._queued_bytes[flow.traffic] -= size
        self._flying_bytes += size
        if not flow.queue:
            turns.popleft()
        elif flow.turn_bytes == 0:
            turns.rotate(-1)
            flow.turn_bytes = self.conditions.piece_bytes
        return flow, piece

    def _leave(self, flow: Flow[R], piece: _Entry) -> None:
        self._serving, self._free_s = None, self._done_s
        jitter_s = self._chance.uniform(-1, 1) * self.conditions.jitter_s
        arrival_s = max(self._last_arrival_s, self._done_s + max(0.0, self.conditions.delay_s + jitter_s))
        self._last_arrival_s = arrival_s
        self._flight.append(Delivery(arrival_s, flow, piece.data, piece.mark))
        self._count(flow.traffic, len(piece.data))

    # ---- disturbing it

    def change(self, now_s: float, conditions: LinkConditions) -> None:
        """Change the conditions.

        The piece on its way out goes on at the new rate; deliveries in flight stay as they were.
        """
        self._suspend(now_s)
        self.conditions = conditions
        self._go_on(now_s)

    def cut(self, now_s: float) -> None:
        """Stop everything: from now on nothing moves and nothing arrives."""
        self._suspend(now_s)
        self.is_cut = True

    def heal(self, now_s: float) -> None:
        """End a cut: held bytes go on at once, in order, and overdue deliveries arrive now."""
        if self.is_cut:
            self.is_cut = False
            self._go_on(now_s)

    def _suspend(self, now_s: float) -> None:
        self._advance(now_s)
        if not self.is_cut and self._serving is not None:
            whole_s = self.conditions.serialisation_s(len(self._serving[1].data))
            share = (self._done_s - now_s) / whole_s if whole_s else 0.0
            self._left_bytes = share * len(self._serving[1].data)

    def _go_on(self, now_s: float) -> None:
        if not self.is_cut:
            self._free_s = max(self._free_s, now_s)
            self._done_s = now_s + self.conditions.serialisation_s(self._left_bytes)

    # ---- what it says of itself

    def _count(self, traffic: Traffic, size: int) -> None:
        before = self.carried[traffic]
        packets = max(1, math.ceil(size / PACKET_BYTES))
        self.carried[traffic] = LinkTraffic(before.payload_bytes + size, before.packets + packets)
        bucket_s = _bucket_s(self._done_s)
        if self._meter and self._meter[-1][0] >= bucket_s:
            self._meter[-1] = (self._meter[-1][0], self._meter[-1][1] + size)
        else:
            self._meter.append((bucket_s, size))
        while self._meter[0][0] < _since_s(bucket_s):
            self._meter.popleft()

    def statistics(self, now_s: float) -> Statistics:
        """Return the link's state now."""
        self._advance(now_s)
        since_s = _since_s(now_s)
        lately_bytes = sum(size for began_s, size in self._meter if began_s >= since_s)
        oldest_s = min((flow.queue[0].entered_s for turns in self._turns.values() for flow in turns), default=now_s)
        return Statistics(
            lately_bytes * 8 / (now_s - since_s),
            sum(self._queued_bytes.values()),
            max(0.0, now_s - oldest_s),
            self._flying_bytes,
        )


def _bucket_s(at_s: float) -> float:
    return math.floor(at_s / _BUCKET_S) * _BUCKET_S


def _since_s(now_s: float) -> float:
    """Return the moment from which on the achieved rate counts."""
    return _bucket_s(now_s - ACHIEVED_S)
