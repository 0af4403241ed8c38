"""Precision and pace of a run with regions: bits of offers and entries, and distance of rounds, by the links' capacity.

In a *cycle* of ``round.steps`` inner steps every fragment has a round. An owner's rounds use each link in two directions, its
*ways*: its entries go to the other region, and offers of its fragments come from there. The **load** of a way is the share of a
cycle for which its bytes keep the link busy, at the achieved rate. It is computed for every level of

    offer_bits or record_bits  ->  fewer bits, down to regions.min_bits  ->  then longer cycles, up to regions.max_pace

and the way changes its level:

* to a worse one: at once to the first that fits, when the load is above ``FULL`` at ``BAD_LOOKS`` looks in a row; or by one,
  when the oldest entry that waits is older than a window (a cycle at this level; ``LATE_S`` at least), and none has come over
  for as long: there the rate is unknown;
* to a better one: by one, when the load would be below ``SPARE`` there, and nothing has waited for long, for ``HOLD_WINDOWS``
  windows. A step up that soon had to be taken back is tried again after twice as long each time; sooner only when the load has
  halved since.

``SPARE`` is half of ``FULL`` for two reasons. A level that fits is not left again when the rate varies by less; and a direction
also carries the traffic of the owner at its other end, about as much again, which is not seen before the link is busy. A queue
from which something comes over is no reason to go worse: it was made at the level before, and drains where the load is below
``FULL``.

Rejected: the time between a round's opening and its answers, most of which is the learners' own steps; time stamps of servers,
whose clocks may be minutes apart and jump; and trying a level out, as TCP does: the rate tells a link that recovered from one
that did not, at no cost.

Pure: the caller gives the time, of a clock that never goes back, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from diloco.core.tensors.quantise import body_bytes
from diloco.settings.run import AdaptiveBits, Bits, RunSettings

FULL = 0.8
SPARE = 0.4
BAD_LOOKS = 2
HOLD_WINDOWS = 2.0
REGRET_WINDOWS = 8.0  # a level that held for so long was no mistake
MAX_DOUBLINGS = 16
MIN_WINDOW_S = 2.0  # a shorter window measures the machine rather than the link
LATE_S = 8.0  # a queue that stands still for less may wait for a link that is cut, which is known by then
# of appends: a smaller one is over in little more than a round trip, whatever the rate
MIN_BYTES = 4096
ROUND_TRIPS = 64  # appends of which the least time is that of a round trip
BITS: tuple[AdaptiveBits, ...] = (32, 16, 8, 4)
PACES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)

Reason = Literal["load", "queue", "spare", "cut", "back"]
WayName = Literal["offers", "records"]


@dataclass(frozen=True)
class Level:
    """Bits of a value, and distance of two rounds in times ``round.steps``."""

    bits: Bits
    pace: float


@dataclass(frozen=True)
class Moved:
    """Bytes that came over a link so far, and the time for which they kept it busy."""

    bytes: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True)
class WayState:
    """State of one way of a link."""

    moved: Moved
    values: int  # to go this way in a cycle
    age_s: float  # of the oldest entry or offer that waits


@dataclass(frozen=True)
class LevelChange:
    """Change of a way's level; a way that is cut counts as one at the best level."""

    region: str
    way: WayName
    level: Level
    load: float
    bytes_per_s: float  # infinite: not measured yet
    age_s: float
    reason: Reason


def precisions(best: Bits, settings: RunSettings) -> list[Bits]:
    """Return the bits that offers or records may have in a run, most first; ``best`` are those of its settings."""
    least = settings.regions.min_bits if settings.adapts else best
    return [best, *(bits for bits in BITS if least <= bits < best)]


def possible(best: Bits, settings: RunSettings) -> list[Bits]:
    """Return the same for any ``regions.min_bits``, which may be changed while offers are on their way."""
    return [best, *(bits for bits in BITS if settings.adapts and bits < best)]


def slowest(settings: RunSettings) -> float:
    """Return the longest cycle that a run may have, in times ``round.steps``."""
    # a learner that waits for a version after round.steps takes no step that a later round could wait for
    return settings.regions.max_pace if settings.adapts and not settings.round.learners_wait else 1.0


def steps_between(settings: RunSettings, pace: float) -> int:
    """Return the inner steps between two rounds of a fragment."""
    return math.ceil(settings.round.steps * pace)


def levels(best: Bits, settings: RunSettings) -> list[Level]:
    """Return all levels, the best one first."""
    bits, longest = precisions(best, settings), slowest(settings)
    paces = [pace for pace in PACES if pace < longest] + ([longest] if longest > 1 else [])
    return [Level(b, 1.0) for b in bits] + [Level(bits[-1], pace) for pace in paces]


class Appends:
    """Rate at which a region's server takes entries, measured from the beginning of each append to its acknowledgement.

    An acknowledgement takes a round trip, which costs no bandwidth; it is the shortest time of the last appends. The link was
    busy with an append until its acknowledgement: from the time at which an empty append would have been acknowledged, or, if
    that is later, from the acknowledgement before it.
    """

    def __init__(self) -> None:
        self.moved = Moved()
        self._times: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._last_s = self._broken_s = -math.inf

    def done(self, began_s: float, now_s: float, size_bytes: int) -> None:
        """Note that an append was acknowledged."""
        if began_s <= self._broken_s:
            return
        self._times.append(now_s - began_s)
        busy_s = now_s - max(began_s + min(self._times), self._last_s)
        self._last_s = now_s
        if size_bytes >= MIN_BYTES:
            self.moved = Moved(self.moved.bytes + size_bytes, self.moved.busy_s + max(0.0, busy_s))

    def broken(self, now_s: float) -> None:
        """Note that the link is cut: the duration of appends on their way says nothing about its rate."""
        self._broken_s = now_s


class _Way:
    """One way of one link, and its level."""

    def __init__(self, levels: list[Level]) -> None:
        self.levels, self.at = levels, 0
        self.load = self._bytes = self._busy_s = 0.0  # the sums forget, over about a window
        self._moved: Moved | None = None
        self._counted_s = self._waited_s = -math.inf  # when something came over last; when the wait for it began
        self._bad_looks = 0
        self._fits_since_s: float | None = None  # since when the level above would fit
        self._rose: tuple[float, float] = (-math.inf, 0.0)  # when the level last got better, and the load expected there
        self._undone: dict[int, tuple[int, float]] = {}  # by level: how often it was soon left again, and that load

    @property
    def level(self) -> Level:
        return self.levels[self.at]

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._busy_s if self._busy_s else math.inf

    def pause(self, now_s: float) -> None:
        """Note that the link is cut: decide nothing until it is back, and its queue has had time to go."""
        self._bad_looks, self._fits_since_s, self._waited_s = 0, None, now_s

    def look(self, now_s: float, cycle_s: float, seen: WayState) -> Reason | None:
        """Change the level if it is time to; return the reason."""
        window_s = max(MIN_WINDOW_S, cycle_s * self.level.pace)
        self._count(now_s, seen.moved, window_s)
        self.load = self._load(self.at, cycle_s, seen.values)
        late_s = max(window_s, LATE_S)
        late = seen.age_s > late_s and now_s - max(self._counted_s, self._waited_s) >= late_s
        self._bad_looks = self._bad_looks + 1 if self.load > FULL else 0
        if late or self._bad_looks >= BAD_LOOKS:
            if self.at == len(self.levels) - 1:
                return None
            below = range(self.at + 1, len(self.levels))
            fits = (at for at in below if self._load(at, cycle_s, seen.values) <= FULL)
            self._fall(now_s, window_s, below[0] if late else next(fits, below[-1]))
            return "queue" if late else "load"
        if self._may_rise(now_s, cycle_s, window_s, seen):
            above = self.at - 1
            self._rose = now_s, self._load(above, cycle_s, seen.values)
            self._go(now_s, above)
            return "spare"
        return None

    def _count(self, now_s: float, moved: Moved, window_s: float) -> None:
        before, self._moved = self._moved, moved
        if before is None or moved.bytes <= before.bytes or moved.busy_s < before.busy_s:
            return  # nothing new, or the count began again
        kept = math.exp((self._counted_s - now_s) / window_s)
        self._bytes = kept * self._bytes + moved.bytes - before.bytes
        self._busy_s = kept * self._busy_s + moved.busy_s - before.busy_s
        self._counted_s = now_s

    def _load(self, at: int, cycle_s: float, values: int) -> float:
        """Return the load at a level; 0 while the rate is unknown."""
        level = self.levels[at]
        return body_bytes(values, level.bits) / (self.bytes_per_s * cycle_s * level.pace)

    def _may_rise(self, now_s: float, cycle_s: float, window_s: float, seen: WayState) -> bool:
        above = self.at - 1
        load = self._load(above, cycle_s, seen.values) if above >= 0 else math.inf
        if load >= SPARE or seen.age_s > window_s / 2:
            self._fits_since_s = None
            return False
        if self._fits_since_s is None:
            self._fits_since_s = now_s
        times, load_then = self._undone.get(above, (0, 0.0))
        hold_s = HOLD_WINDOWS * window_s * (1 if load < load_then / 2 else 2 ** min(times, MAX_DOUBLINGS))
        return now_s - self._fits_since_s >= hold_s

    def _fall(self, now_s: float, window_s: float, at: int) -> None:
        rose_s, load = self._rose
        if now_s - rose_s < REGRET_WINDOWS * window_s:
            self._undone[self.at] = self._undone.get(self.at, (0, 0.0))[0] + 1, load
        else:
            self._undone.pop(self.at, None)
        self._rose = -math.inf, 0.0
        self._go(now_s, at)

    def _go(self, now_s: float, at: int) -> None:
        self.at, self._bad_looks, self._fits_since_s, self._waited_s = at, 0, None, now_s


@dataclass
class _Link:
    offers: _Way
    records: _Way
    counts: bool = False  # the link is not cut


class Bandwidth:
    """One owner's ways to and from the other regions, and the precision and pace of its rounds."""

    def __init__(self, settings: RunSettings, regions: Iterable[str]) -> None:
        """Begin at the best levels. ``regions``: the others; none in a run that does not adapt."""
        codec = settings.codec
        self._settings = settings
        self._links = {
            region: _Link(_Way(levels(codec.offer_bits, settings)), _Way(levels(codec.record_bits, settings)))
            for region in regions
        }

    @property
    def record_bits(self) -> Bits:
        """Bits of the next entries, which go to all regions alike."""
        present = (link.records.level.bits for link in self._links.values() if link.counts)
        return min(present, default=self._settings.codec.record_bits)

    @property
    def pace(self) -> float:
        """Distance of two rounds in times ``round.steps``."""
        present = (link for link in self._links.values() if link.counts)
        return max((way.level.pace for link in present for way in (link.offers, link.records)), default=1.0)

    @property
    def steps(self) -> int:
        """Inner steps between two rounds of a fragment."""
        return steps_between(self._settings, self.pace)

    @property
    def offer_bits(self) -> list[tuple[str, Bits]]:
        """Regions whose offers shall have fewer bits than the settings give them, with these bits."""
        best = self._settings.codec.offer_bits
        wanted = ((region, link.offers.level.bits) for region, link in self._links.items())
        return sorted((region, bits) for region, bits in wanted if bits != best)

    def look(self, now_s: float, cycle_s: float, seen: Mapping[str, tuple[WayState, WayState]]) -> list[LevelChange]:
        """Look at the links, about once a second; return the changes. ``seen``: the offers' way and the records', by region.

        A region that is not in ``seen`` is cut off: it keeps its levels and delays no other region.
        """
        changes: list[LevelChange] = []
        for region, link in self._links.items():
            present, counted = seen.get(region), link.counts
            link.counts = present is not None
            ways: list[tuple[WayName, _Way]] = [("offers", link.offers), ("records", link.records)]
            for number, (name, way) in enumerate(ways):
                reason: Reason | None = None
                if link.counts != counted and way.at:
                    reason = "back" if present else "cut"
                if present is None:
                    way.pause(now_s)
                else:
                    reason = way.look(now_s, cycle_s, present[number]) or reason
                if reason is not None:
                    level, age_s = (way.level, present[number].age_s) if present else (way.levels[0], 0.0)
                    changes.append(
                        LevelChange(
                            region=region,
                            way=name,
                            level=level,
                            load=way.load,
                            bytes_per_s=way.bytes_per_s,
                            age_s=age_s,
                            reason=reason,
                        )
                    )
        return changes
