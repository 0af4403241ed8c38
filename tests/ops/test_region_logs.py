"""Settling regions' logs, after histories of owners that claimed, wrote and died at any point, played in virtual time.

The reference is the rule itself, by counting: an entry is committed once a majority of regions holds it of its own epoch, and
with it all before it. All that is committed must stand in the settled log, as one chain, behind all that was told before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made.fragment_vectors import each

from diloco.core.log.fold import Replica
from diloco.core.log.quorum import LogHead
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import RunError
from diloco.log.log import Log
from diloco.log.stream import Packed, pass_over
from diloco.settings.presets import run_settings
from diloco.testing.virtual_transport import VirtualTransport
from diloco.testing.world import VirtualProcess, World
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES, Body
from diloco.wire.offers import Offer
from diloco_ops.reading import region_logs
from diloco_ops.reading.region_logs import Begun

REGIONS = ("ap", "eu", "us")
SIZE = 4
SETTINGS = run_settings("decoupled", {"regions.names": list(REGIONS), "fragments.count": 1, "shards": 1})
MAP = build_map([TensorSpec("w", (SIZE,))], 1)
RUN = framing.run_id("run", SETTINGS.digest())


@dataclass(frozen=True, eq=False)
class Made:
    """An entry that some owner made, and the state after it."""

    packed: Packed
    replica: Replica
    before: Made | None

    @property
    def line(self) -> list[Made]:
        """All entries up to it."""
        return [*(self.before.line if self.before else []), self]


@dataclass
class Place:
    """A region's log, and the entries that it has in this order, each with its sequence."""

    log: Log
    held: dict[bytes, int] = field(default_factory=dict)
    kept: list[Made] = field(default_factory=list)  # in order of their storing
    told: list[Made] = field(default_factory=list)
    fence: int = 0

    async def store(self, entry: Made) -> None:
        self.fence = await self.log.region.append_packed(entry.packed, self.fence)
        self.held[entry.packed.entry_hash] = self.fence
        self.kept.append(entry)

    async def tell(self, entry: Made) -> None:
        record = entry.packed.record
        await self.log.region.notice(
            0, record.version, record.epoch, entry.packed.entry_hash, self.held[entry.packed.entry_hash]
        )
        self.told.append(entry)

    async def keep(self, entry: Made) -> None:
        """Store a keyframe of an entry that was told, and drop all before it."""
        replica = deepcopy(entry.replica)
        replica.chain.sequence = self.held[entry.packed.entry_hash]
        await self.log.writer.append_keyframe(replica, None, None)
        await self.log.writer.purge_below(0, replica.chain.sequence)


class History:
    """What owners did, one after another; no two at a time."""

    def __init__(self, places: dict[str, Place], genesis: Replica) -> None:
        self.places, self.genesis = places, genesis
        self.epoch, self.offers = 0, 0
        self.committed: list[Made] = []

    async def turn(self, turn: Turn) -> None:
        """Claim a majority, go on from the best of its logs, and write as far as it goes."""
        self.epoch += 1
        claimed = [self.places[REGIONS[index]] for index in turn.claimed]
        for place in claimed:
            head = LogHead(0, 0, False, bytes(32), 0)
            place.fence = await place.log.region.claim(0, self.epoch, "syncer", head, place.fence)
        ends = [place.kept[-1] for place in claimed if place.kept]
        best = max(ends, key=lambda made: (made.packed.record.epoch, made.packed.record.version), default=None)
        line = best.line if best else []
        for number in range(turn.entries):
            line = [*line, self.made(line[-1] if line else None, takeover=number == 0)]
        for place, reach in zip(claimed, turn.reach, strict=False):
            at = max((index + 1 for index, entry in enumerate(line) if entry.packed.entry_hash in place.held), default=0)
            for entry in line[at : at + reach]:
                await place.store(entry)
        self.count(line)
        for place, told, keeps in zip(self.places.values(), turn.told, turn.keeps, strict=True):
            known = [entry for entry in self.committed if entry in place.kept and entry not in place.told]
            for entry in known[:told]:
                await place.tell(entry)
            if keeps and place.told:
                await place.keep(place.told[-1])

    def count(self, line: list[Made]) -> None:
        for index, entry in enumerate(line):
            holders = sum(entry.packed.entry_hash in place.held for place in self.places.values())
            if entry.packed.record.epoch == self.epoch and 2 * holders > len(REGIONS):
                assert line[: len(self.committed)] == self.committed, "no such history can be"
                self.committed = line[: max(index + 1, len(self.committed))]

    def made(self, before: Made | None, *, takeover: bool) -> Made:
        replica = deepcopy(before.replica if before else self.genesis)
        inline, parts = b"", list[bytes]()
        if takeover:
            record = merging.make_marker(replica, "takeover", SETTINGS, syncer="s", now_s=0.0, epoch=self.epoch)
        else:
            self.offers += 1
            base = replica.chain.version
            values = np.full(SIZE, self.offers, np.float32)
            offer = Offer(
                0, "ann", 1, self.offers, (1, self.offers - 1), base + 1, base, bytes(32), 32, 1, 1, 0, [],
                Body(0, bytes(32), 0, bytes(ATTEMPT_BYTES)),
            )  # fmt: skip
            merge = Merge(base + 1, (RoundOffer(offer, values.view(np.uint8)),), False, 0.0, 0.0)
            attempt = self.offers.to_bytes(ATTEMPT_BYTES, "big")
            record, inline, parts = merging.make_version(
                replica, np.zeros(SIZE, np.float32), values, merge, SETTINGS, bits=32, syncer="s", attempt=attempt, now_s=0.0
            )
        packed = Packed(record, framing.hash_of(record, RUN), 0, inline, [part[ATTEMPT_BYTES:] for part in parts])
        replica.chain.check(record)
        replica.chain.advance(record, packed.entry_hash, 0)
        return Made(packed, replica, before)


@dataclass(frozen=True)
class Turn:
    """One owner's time: the regions that it claimed, entries that it made, and how far each region got."""

    claimed: list[int]
    entries: int
    reach: list[int]  # entries stored, by claimed region
    told: list[int]  # committed entries that are told, by region
    keeps: list[bool]


def three(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=3, max_size=3)


MAJORITIES = st.sampled_from([[0, 1], [0, 2], [1, 2], [0, 1, 2]])
FEW_OR_ALL = st.sampled_from([0, 1, 2, 3, 100])
TURNS = st.lists(
    st.builds(Turn, MAJORITIES, st.integers(1, 4), three(FEW_OR_ALL), three(FEW_OR_ALL), three(st.booleans())),
    min_size=2,
    max_size=6,
)


def in_virtual_time(work: Callable[[VirtualProcess], Awaitable[None]]) -> None:
    world = World(1, REGIONS)

    async def serve(process: Any) -> None:
        await work(process)

    process = VirtualProcess(world, "command", REGIONS[0], serve)
    world.processes = [process]
    process.start()
    world.scheduler.run(1e6)
    world.dispose()
    if world.error is not None:
        raise world.error
    assert process.ended


async def begin(process: VirtualProcess) -> tuple[dict[str, Place], Replica, bytes]:
    places = {}
    for region in REGIONS:
        log = Log(VirtualTransport(process, region), "run", RUN, MAP, SETTINGS)
        await log.transport.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
        places[region] = Place(log)
    first = places[REGIONS[0]].log
    await first.writer.found("ann", SETTINGS.digest(), each([np.zeros(SIZE, np.float32)]))
    genesis = await first.reader.genesis()
    assert genesis is not None
    for place in list(places.values())[1:]:
        await place.log.region.begin_from(first.region, framing.pack(genesis[0], RUN))
    return places, (await first.reader.load(0, *genesis)).replica, genesis[1]


@given(turns=TURNS, left=MAJORITIES, furthest=st.integers(0, 2))  # of all fragments: one of them may be behind there
def test_a_settled_log_has_all_that_was_committed_as_one_chain_and_loses_nothing_that_was_told(
    turns: list[Turn], left: list[int], furthest: int
) -> None:
    async def play(process: VirtualProcess) -> None:
        places, replica, genesis_check = await begin(process)
        history = History(places, replica)
        for turn in turns:
            await history.turn(turn)
        logs = {REGIONS[index]: places[REGIONS[index]].log for index in left}
        home = sorted(logs)[furthest % len(logs)]

        await region_logs.settle(logs, home, genesis_check)

        log = logs[home]
        genesis = await log.reader.genesis()
        assert genesis is not None
        loaded = (await log.reader.load(0, *genesis)).replica
        stop = await log.reader.end_sequence(0)
        begins = loaded.chain.sequence + 1
        read = [entry async for entry in log.entries.follow([0], begins, pass_over, stop)] if stop >= begins else []
        for entry in read:
            if not log.entries.is_repeated(loaded.chain, entry):
                loaded.fold(entry.record, entry.entry_hash, entry.sequence, entry.body)  # raises if it does not follow
        known = {made.packed.entry_hash: made for place in places.values() for made in place.kept}
        line = known[loaded.chain.head].line if loaded.chain.head in known else []
        assert line[: len(history.committed)] == history.committed
        assert set(places[home].told) <= set(line)
        if line:
            assert loaded.theta.tolist() == line[-1].replica.theta.tolist()
        best = max(
            (made for region in logs for made in places[region].kept),
            key=lambda made: (made.packed.record.epoch, made.packed.record.version),
            default=None,
        )
        assert (line[-1] if line else None) is best  # as the next owner would go on
        stored = len(process.world.servers[home].streams[log.subjects.log_stream].messages)
        await region_logs.settle(logs, home, genesis_check)
        assert len(process.world.servers[home].streams[log.subjects.log_stream].messages) == stored

    in_virtual_time(play)


def test_regions_that_do_not_hold_the_run_are_named_with_their_folders_and_what_to_do() -> None:
    begun = Begun({}, {"eu": "its server has nothing of run 'run'"}, None)
    with pytest.raises(RunError) as refused:
        begun.demand_majority(Path("runs/mine"), REGIONS)
    said = str(refused.value)
    assert "the servers of 0 of 3 regions hold this run's log, and 2 are needed" in said
    assert "runs/mine/nats-eu: its server has nothing of run 'run'" in said
    assert "runs/mine/nats-us: no server answers, and its files are not here" in said
    assert "put these folders back" in said
