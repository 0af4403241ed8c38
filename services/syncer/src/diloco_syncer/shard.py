"""One syncer: owns some fragments or stands by; opens rounds, merges offers, appends versions to the log.

The decisions are :mod:`diloco.core.round`'s, :mod:`diloco.core.merging`'s and :mod:`diloco.core.ownership`'s; this connects
them to the others. One loop governs what is owned, another one looks at all rounds whenever something came in or is due;
merges of different fragments overlap, each in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from diloco import __version__, following, membership
from diloco.core import fold, merging
from diloco.core import tape as events
from diloco.core.bandwidth import Bandwidth, Seen
from diloco.core.changes import Effective, Quarantine
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.core.outliers import Outlier, norm_of
from diloco.core.ownership import Ownership, OwnersTable
from diloco.core.retention import keyframes_kept
from diloco.core.round import Merge, Roster, Round
from diloco.errors import (
    AppendUncertainError,
    BrokerError,
    FenceError,
    FormatError,
    MessageError,
    NonFiniteError,
    RewoundError,
    RunError,
    SettingsError,
    StorageFullError,
)
from diloco.following import Follower
from diloco.log import Log
from diloco.membership import Run
from diloco.metrics import Histogram
from diloco.observe import Counted, Logger, Progress
from diloco.patience import patiently
from diloco.settings import SyncerSettings
from diloco.tape import Recorder, Unrecorded
from diloco.tasks import end
from diloco.transport import Fence, Heard, Transport
from diloco.wire import messages
from diloco.wire.messages import Announcement, Mark, Offer, Pulse, Record, ShardPulse
from diloco_syncer.collector import Collector, Taker
from diloco_syncer.combiner import Combiner
from diloco_syncer.copies import Copies, Copy
from diloco_syncer.owned import Owned
from diloco_syncer.regions import Connect, Regions
from diloco_syncer.replication import OutbidError, Replication

ANNOUNCE_EVERY_S = 0.25
OUTLIER = "its outer gradients are outliers"
STORAGE_RETRY_S = 1.0
SLOW_ROUND_S = 2.0  # a round that is open for so long is checked as often
TAKEOVERS_AT_ONCE = 8
SETTLE_S = 10.0  # for what is not known in all regions yet, before a syncer ends
CLAIM_RETRY_S = 0.2
LOOK_AT_LINKS_S = 1.0
CHECK_EVERY_S = 10.0  # that nobody else has appended to a fragment which makes no versions


State = Literal["owner", "standby", "leaving", "unable"]
STATES: tuple[State, ...] = get_args(State)


class Shard:
    """The service. ``await Shard(...).serve()`` returns when every fragment's log is closed, or after :meth:`leave`."""

    def __init__(
        self,
        transport: Transport,
        run: Run,
        fragment_map: FragmentMap,
        settings: SyncerSettings,
        log: Logger,
        tape: Recorder | None = None,
        connect: Mapping[str, Connect] | None = None,
    ) -> None:
        """``connect``: the ways to the other regions, in a run with regions."""
        self.tape = tape or Unrecorded()
        self.transport, self.run, self.map, self.settings, self.log = transport, run, fragment_map, settings, log
        self.store = Log(transport, run.name, run.identity, fragment_map, run.settings)
        self.subjects = self.store.subjects
        self.refused = Counted(log)
        self.roster = Roster(run.now.settings)
        sizes = [fragment.size for fragment in fragment_map.fragments]
        incarnation, takeover_s = int(transport.wall_s() * 1000), run.settings.liveness.takeover_s
        region, away_s = settings.region or "", run.settings.regions.away_s
        self.ownership = Ownership(settings.name, incarnation, sizes, run.settings.shards, takeover_s, region, away_s)
        self.regions: Regions | None = None
        self._fit_to = [name for name in run.settings.regions.names if name != region] if run.settings.adapts else []
        self.bandwidth = Bandwidth(run.settings, self._fit_to)
        self.follower = Follower(transport, run, log, self._change)
        self._suspects: dict[str, Outlier] = {}  # by learner: whose quarantine is not on record yet
        if run.regions:
            self.regions = Regions(region, self.store, run, fragment_map, connect or {})
        self.owned: dict[int, Owned] = {}
        self.rounds = self.versions = self.merged_members = self.pulses = 0
        self.quorum_times, self.round_times = Histogram(), Histogram()  # of the versions committed here
        self.unstored: set[int] = set()  # fragments whose next entry waits because storage is full
        self.archive_full = False
        self._taking: set[int] = set()
        self._news, self._governed, self._unsure = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._collectors = {region: Collector(transport, run, fragment_map.digest, self._refuse, self._held, log)}
        self.combiner: Combiner | None = None
        if run.settings.regions.merge:
            self.combiner = Combiner(transport, run, fragment_map, settings.name, incarnation, region, log)
        self._copies: Copies
        self._following: asyncio.Task[None] | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._fitting: asyncio.Task[None] | None = None
        self._table_unknown = self._unable = False

    async def serve(self) -> None:
        """Own what the table says, or stand by, to the end of the run.

        Raises:
            RunError: a younger process goes by this one's name.
        """
        await self.transport.subscribe(self.subjects.shard(), self._hear_shard)
        await self.transport.subscribe(self.subjects.pulse(), self._hear_pulse)
        await self.transport.subscribe(self.subjects.mark, self._hear_mark)
        if self.combiner is not None:
            await self.transport.subscribe(self.subjects.round(), self._hear_round)
        async with asyncio.TaskGroup() as group:
            pulsing, following = group.create_task(self._pulse_regularly()), group.create_task(self.follower.follow())
            if self.regions is not None:
                await self._begin_regions(self.regions, group)
            await patiently(self.follower.look, self.log)  # before anything is owned
            genesis = await patiently(partial(membership.genesis, self.run, self.store, None, list, self.log), self.log)
            self._copies = Copies(self.store, genesis, self._refuse_entry, self.log)
            governing, checking = group.create_task(self._govern(group)), group.create_task(self._check_heads())
            combining = group.create_task(self.combiner.work()) if self.combiner is not None else None
            await self._run_rounds(group)
            while not await self._stays_over():
                await self._run_rounds(group)
            await end(governing, checking, combining)
            await self._settle_regions()
            await end(pulsing, following, self._following, self._reaching, self._fitting)
            for collector in self._collectors.values():
                await collector.stop()
            if self.regions is not None:
                await self.regions.close()
        await self._pulse()
        self.log.info("left" if self.ownership.leaving else "closed", rounds=self.rounds, versions=self.versions)

    async def _begin_regions(self, regions: Regions, group: asyncio.TaskGroup) -> None:
        await patiently(partial(membership.make_streams, self.transport, self.run.name, self.run.settings), self.log)
        regions.begin(group)
        self._reaching = group.create_task(self._reach(regions))
        if self.run.settings.adapts:
            self._fitting = group.create_task(self._fit_links(regions))
        await patiently(partial(regions.bring_genesis, self.log), self.log)

    async def _reach(self, regions: Regions) -> None:
        """Take offers from the other regions too, as soon as there is a way to each."""

        async def reach(region: str) -> None:
            transport = (await regions.log(region)).transport
            collector = Collector(transport, self.run, self.map.digest, self._refuse, self._held, self.log, region)
            self._collectors[region] = collector
            self._governed.set()

        async with asyncio.TaskGroup() as group:
            for region in regions.names:
                if region != regions.own:
                    group.create_task(reach(region))

    async def _fit_links(self, regions: Regions) -> None:
        """Have precision and pace follow what the links to the other regions have room for."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_AT_LINKS_S)
            now_s = clock()
            live = {seen.pulse.learner for seen in self.roster.live(now_s)}
            if not live or not self.owned:
                continue
            seen: dict[str, tuple[Seen, Seen]] = {}
            for region, collector in self._collectors.items():
                if region == regions.own:
                    continue
                if collector.transport.connected:
                    seen[region] = self._see_link(regions, region, collector, live, now_s)
                    continue
                regions.appends[region].broken(now_s)
                for replication in self._replications():
                    replication.away(region)
            cycle_s = self.run.now.settings.round.steps * self.roster.step_s(now_s)
            for change in self.bandwidth.look(now_s, cycle_s, seen):
                self.log.info(
                    "bandwidth_changed",
                    other_region=change.region,
                    way=change.way,
                    bits=change.level.bits,
                    pace=change.level.pace,
                    reason=change.reason,
                    load=round(change.load, 3),
                    bytes_per_s=round(change.bytes_per_s) if math.isfinite(change.bytes_per_s) else None,
                    queue_age_s=round(change.age_s, 3),
                )

    def _see_link(self, regions: Regions, region: str, collector: Collector, live: set[str], now_s: float) -> tuple[Seen, Seen]:
        """The ways of the offers and of the entries between here and another region."""
        values = sum(owned.fragment.size for owned in self.owned.values())
        age_s = max((replication.waits_s(region, now_s) for replication in self._replications()), default=0.0)
        crossing = len(collector.learners & live)
        if collector.combined:
            crossing = min(1, crossing)
        # a learner's newer offer replaces its older one: what waits to be read does not grow, and its age says little
        offers = Seen(collector.transport.incoming, crossing * values, 0.0)
        return offers, Seen(regions.appends[region].moved, values, age_s)

    def _change(self) -> None:
        """Go by what is in force now."""
        settings, before = self.run.now.settings, self.roster.settings
        barred = self.run.now.barred.union(self._suspects)
        if barred != self.roster.barred:
            for collector in self._collectors.values():
                collector.again()
        self.roster.change(settings, barred)
        self.ownership.shards, self.ownership.takeover_s = settings.shards, settings.liveness.takeover_s
        self.ownership.away_s = settings.regions.away_s
        if (settings.round, settings.regions) != (before.round, before.regions):
            self.bandwidth = Bandwidth(settings, self._fit_to)  # it finds out anew what the links have room for
        for owned in self.owned.values():
            owned.round.changed()
        if self.combiner is not None:
            self.combiner.change(barred)
        self._governed.set()
        self._news.set()

    def _replications(self) -> list[Replication]:
        """Of the fragments that are owned here, in a run with regions."""
        return [owned.replication for owned in self.owned.values() if owned.replication is not None]

    async def _settle_regions(self) -> None:
        """Before this process ends: what it has written is known in all regions that can be reached."""
        replications = self._replications()
        await asyncio.gather(*(replication.settled(SETTLE_S) for replication in replications))
        for replication in replications:
            await replication.stop()

    async def leave(self) -> None:
        """Give all fragments to others, where there are others, and let :meth:`serve` end."""
        self.ownership.leaving = True
        await self._pulse()
        self._governed.set()
        self._news.set()

    def _closed(self) -> set[int]:
        """Fragments that are owned here, and whose log is closed."""
        return {index for index, owned in self.owned.items() if owned.replica.chain.closed}

    def _over(self) -> bool:
        if len(self._closed() | self.ownership.closed_elsewhere) == len(self.map.fragments):
            return True
        return self.ownership.leaving and not self.owned and not self._taking

    async def _stays_over(self) -> bool:
        """Whether the logs that are owned here are still closed, now that this process is about to end."""
        stays = True
        for index, owned in list(self.owned.items()):
            if not await patiently(partial(self.store.holds, owned.replica.chain), self.log):
                self.log.warning("log_rewound", fragment=index, version=owned.replica.chain.version)
                stays = False
                if self.owned.get(index) is owned and not owned.busy:
                    await self._let_go(owned)
        return stays and self._over()

    # ---- ownership

    async def _govern(self, group: asyncio.TaskGroup) -> None:
        while True:
            self._governed.clear()
            if self.ownership.replaced:
                raise RunError(
                    f"run {self.run.name!r}: a younger process goes by the name {self.settings.name!r}; this one ends: give "
                    "every syncer a name of its own"
                )
            await self._settle_table()
            self._reconcile(group)
            if not self._taking:  # it begins to read again when fragments come or go: not for each of many
                await self._read_offers(group)
            await _wait(self._governed, self.ownership.pulse_s / 2)

    async def _read_offers(self, group: asyncio.TaskGroup) -> None:
        """Read those of the fragments that are owned, from all regions, and of the own region those that are combined here."""
        now_s, home = asyncio.get_running_loop().time(), self.settings.region or ""
        takers: dict[int, Taker] = {**self.owned}
        if self.combiner is not None:
            others = set(range(len(self.map.fragments))) - self.owned.keys()
            self.combiner.serve([index for index in sorted(others) if self.ownership.keeps(index, now_s)])
            takers |= self.combiner.gathered
        # where no syncer lives, nobody combines: its learners' offers are read themselves
        inhabited = self.ownership.inhabited(now_s) if self.combiner is not None else set()
        for region, collector in list(self._collectors.items()):
            if region == home:
                await collector.serve(takers, group)
            else:
                await collector.serve(self.owned, group, combined=region in inhabited)

    def _held(self) -> None:
        """An offer came in that is held."""
        self._news.set()
        if self.combiner is not None:
            self.combiner.news.set()

    async def _settle_table(self) -> None:
        """Read the owners table where it may have changed, and change it where that is needed."""
        clock = asyncio.get_running_loop().time
        try:
            if self.ownership.must_read(clock()):
                await self._read_table()
            planned = self.ownership.propose(clock())
            if planned is None:
                return
            try:
                revision = await membership.set_owners(self.run, planned, self.ownership.revision)
            except FenceError:
                await self._read_table()
                return
            self._adopt(planned, revision)
            self.log.info("owners_set", revision=revision, holders=planned.holders)
            await self._pulse()
        except (AppendUncertainError, StorageFullError) as error:
            if not self._table_unknown:
                self.log.warning("owners_not_settled", reason=str(error))
            self._table_unknown = True
        else:
            self._table_unknown = False

    async def _read_table(self) -> None:
        table, revision = await membership.owners(self.run, len(self.map.fragments))
        if revision != self.ownership.revision:
            # what is owned may have been another's meanwhile
            for owned in self.owned.values():
                owned.checked_at_s = -math.inf
            self._unsure.set()
        self._adopt(table, revision)

    def _adopt(self, table: OwnersTable | None, revision: int) -> None:
        """Go by a table from now on."""
        if table is not None and revision != self.ownership.revision:
            mine = tuple(index for index, owner in enumerate(table.owners) if owner == self.settings.name)
            self.tape.record(events.Owners(int(self.transport.wall_s() * 1000), revision, mine))
            self.tape.flush()
        self.ownership.read(table, revision, asyncio.get_running_loop().time())

    async def _check_heads(self) -> None:
        """Let go of fragments whose log has another end than is known here, without having met a fence.

        Learners ignore an owner that has been replaced, and one whose server lost its last writes has learners that went back:
        nobody answers, so nothing is appended.
        """
        clock = asyncio.get_running_loop().time
        while True:
            self._unsure.clear()
            for owned in list(self.owned.values()):
                index, fence, opened_at_s = owned.fragment.index, owned.fence, owned.round.opened_at_s
                slow = opened_at_s is not None and clock() - opened_at_s >= SLOW_ROUND_S
                if owned.busy or clock() - owned.checked_at_s < (SLOW_ROUND_S if slow else CHECK_EVERY_S):
                    continue
                try:
                    head = await self.store.head_sequence(index)
                    held = head == fence and await self.store.holds(owned.replica.chain)
                except AppendUncertainError:
                    break  # the server is away
                if owned.busy or owned.fence != fence or owned is not self.owned.get(index):
                    continue  # it has gone on meanwhile
                owned.checked_at_s = clock()
                if not held:
                    event = "ownership_lost" if head > fence else "log_rewound"
                    self.log.warning(event, fragment=index, version=owned.replica.chain.version)
                    self.ownership.distrust()
                    await self._let_go(owned)
            await _wait(self._unsure, SLOW_ROUND_S / 2)

    def _reconcile(self, group: asyncio.TaskGroup) -> None:
        """Begin to hand over what is owned and should not be, and to take over what should be and may."""
        now_s = asyncio.get_running_loop().time()
        mine = self.ownership.mine(now_s)
        for index, owned in self.owned.items():
            if index not in mine and not owned.busy:
                owned.busy = True
                group.create_task(self._hand_over(owned))
        missing = mine - self.owned.keys() - self._taking
        free = sorted(index for index in missing if self.ownership.may_take(index, now_s))
        if free:
            self._taking.update(free)
            group.create_task(self._take_over_all(free, group))
        elif not self._taking:
            idle = not mine and not self.owned and self.ownership.table is not None and not self.ownership.leaving
            keeps = self.regions is not None and len(self.owned) < len(self.map.fragments) and not missing
            if (idle or keeps) and self._following is None:
                others = [index for index in range(len(self.map.fragments)) if index not in self.owned]
                self._following = group.create_task(self._copies.follow(others, self._stands_by, self._keep))
            elif not idle and not missing and self._following is None:
                self._copies.clear()

    def _stands_by(self) -> None:
        if self.combiner is not None:
            for copy in self._copies.known():
                self.combiner.follow(copy.replica.chain, None)
        self.log.info("standing_by", fragments=len(self.map.fragments) - len(self.owned))

    async def _keep(self, copy: Copy, record: Record | None) -> None:
        """A followed fragment has a new entry: in a region that does not own it, somebody has to store its keyframes."""
        index, chain = copy.replica.chain.fragment, copy.replica.chain
        if self.combiner is not None:
            self.combiner.follow(chain, record)
        if self.regions is None:
            return
        self.regions.tried(self.regions.own, stored=True)  # somebody's was
        if not self.ownership.keeps(index, asyncio.get_running_loop().time()):
            return
        size = fold.keyframe_bytes(copy.replica.theta.size, copy.replica.optimizer.moments)
        if copy.log_bytes < self.run.now.settings.log.keyframe_factor * size:
            return
        try:
            fence = Fence(self.subjects.record(index), chain.sequence)
            copy.keyframe_sequence = await self.store.append_keyframe(copy.replica, copy.residual, fence)
        except (FenceError, StorageFullError) as error:
            self.log.debug("keyframe_not_stored", fragment=index, version=chain.version, reason=str(error))
            return
        copy.keyframe_version, copy.log_bytes = chain.version, 0
        self.log.debug("keyframe_stored", fragment=index, version=chain.version)
        kept = keyframes_kept(self.run.now.settings.log, self.map.parameters, copy.replica.optimizer.moments)
        sequences = await patiently(partial(self.store.keyframe_sequences, index), self.log)
        if len(sequences) > kept:
            await patiently(partial(self.store.purge_below, index, sequences[-kept]), self.log)

    async def _take_over_all(self, indices: list[int], group: asyncio.TaskGroup) -> None:
        """Take several fragments over: what was followed of them is brought up to date, the rest is loaded."""
        await self._stop_following()
        limit = asyncio.Semaphore(TAKEOVERS_AT_ONCE)

        async def take_over(index: int) -> None:
            async with limit:
                try:
                    owned = await self._take_over(index, group)
                finally:
                    self._taking.discard(index)
            if owned is not None:
                self.owned[index] = owned
                self._governed.set()
                self._news.set()

        async with asyncio.TaskGroup() as taking:
            for index in indices:
                taking.create_task(take_over(index))
        parameters = sum(owned.fragment.size for owned in self.owned.values())
        self.log.info("serving", fragments=len(self.owned), parameters=parameters, taken=len(indices))
        self._governed.set()

    async def _take_over(self, index: int, group: asyncio.TaskGroup) -> Owned | None:
        """Append the entry that makes this process a fragment's owner; None if the table names another one by then.

        To a log that is closed nothing is appended. It is owned all the same: somebody has to say that it is closed, and to
        notice if a server loses that.
        """
        claimed = 0  # the highest epoch that somebody else was found to have claimed
        while True:
            copy = await self._copies.take(index)
            chain = copy.replica.chain
            if index not in self.ownership.mine(asyncio.get_running_loop().time()):
                return None
            owned = Owned(
                self.map.fragments[index],
                copy.replica,
                np.zeros_like(copy.replica.theta) if copy.residual is None else copy.residual,
                Round(self.roster, chain, len(self.map.fragments)),
                copy.keyframe_sequence,
                copy.keyframe_version,
                copy.fence,
                copy.log_bytes,
                copy.refused,
            )
            if self.regions is not None:
                try:
                    if not await self._claim(owned, self.regions, max(claimed, chain.epoch) + 1, group):
                        return None
                except (BrokerError, MessageError) as error:
                    claimed = error.epoch if isinstance(error, OutbidError) else claimed
                    self.log.info("takeover_retried", fragment=index, reason=str(error))
                    await asyncio.sleep(CLAIM_RETRY_S)
                    continue
            if chain.closed and self.regions is None:
                owned.keyframe_version = chain.version  # nor is a keyframe stored
                return owned
            if copy.residual is None:
                # it is its owner's private state, and went with it
                self.log.info("residual_reset", fragment=index, version=chain.version)
            record = merging.make_marker(
                owned.replica,
                "takeover",
                self.run.now.settings,
                syncer=self.settings.name,
                epoch=owned.replication.epoch if owned.replication else None,
                now_s=self.transport.wall_s(),
            )
            try:
                await self._append(owned, record, b"", [])
            except FenceError as error:
                await self._stop_writing(owned)
                self.log.info("takeover_retried", fragment=index, reason=str(error))
            else:
                self.log.info("taken_over", fragment=index, version=chain.version, epoch=chain.epoch)
                return owned

    async def _claim(self, owned: Owned, regions: Regions, epoch: int, group: asyncio.TaskGroup) -> bool:
        """Shut the owner before out of a majority of regions, and fold what it left there; False: it is no longer wanted."""
        index, replica = owned.fragment.index, owned.replica

        def wanted() -> bool:
            return index in self.ownership.mine(asyncio.get_running_loop().time())

        replication = Replication(regions, index, self.settings.name, self._copies.genesis[1], self.log, epoch)
        path = await replication.claim(replica.chain, wanted)
        if path is None:
            return False
        for packed in path:
            body = await self.store.open_record(packed)
            await asyncio.to_thread(replica.fold, packed.record, packed.check, packed.sequence, body)
        replication.begin(group)
        owned.replication = replication
        return True

    async def _hand_over(self, owned: Owned) -> None:
        """Let go of a fragment; what nobody else knows of it, the residual, stays in a keyframe."""
        chain = owned.replica.chain
        if chain.version != owned.keyframe_version and not chain.closed:
            await self._store_keyframe(owned)
        await self._let_go(owned)
        self.log.info("handed_over", fragment=chain.fragment, version=chain.version)
        await self._pulse()

    async def _stop_writing(self, owned: Owned) -> None:
        if owned.replication is not None:
            await owned.replication.stop()

    async def _let_go(self, owned: Owned) -> None:
        del self.owned[owned.fragment.index]
        await self._stop_writing(owned)
        if self.regions is not None:  # this one is followed from now on, too
            await self._stop_following()
        self._governed.set()
        self._news.set()

    async def _stop_following(self) -> None:
        """End the task that follows; several may wait for that, and the first that hears of it may have begun another one."""
        following = self._following
        await end(following)
        if self._following is following:
            self._following = None

    # ---- what comes in

    async def _hear_shard(self, message: Heard) -> None:
        try:
            pulse, _, _ = messages.unpack(message.data, ShardPulse, self.run.identity)
            if any(index >= len(self.map.fragments) for index in (*pulse.fragments, *pulse.closed)):
                raise FormatError(f"pulse of {pulse.syncer} names fragments that the run does not have")
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        if self.ownership.hear(pulse, asyncio.get_running_loop().time()):
            self._governed.set()
            self._news.set()

    async def _hear_pulse(self, message: Heard) -> None:
        try:
            pulse, _, _ = messages.unpack(message.data, Pulse, self.run.identity)
            lists = (pulse.versions, pulse.steps, pulse.fragment_tokens, pulse.lost_tokens)
            if any(len(values) != len(self.map.fragments) for values in lists):
                raise FormatError(
                    f"pulse of {pulse.learner} counts {len(pulse.versions)} fragments, not {len(self.map.fragments)}"
                )
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        self.roster.hear(pulse, asyncio.get_running_loop().time())
        self._news.set()
        if self.combiner is not None:
            self.combiner.hear_learner(pulse)

    async def _hear_round(self, message: Heard) -> None:
        try:
            announced, _, _ = messages.unpack(message.data, Announcement, self.run.identity)
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        if self.combiner is not None:
            self.combiner.hear_round(announced)

    # ---- rounds

    async def _run_rounds(self, group: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        while not self._over():
            self._news.clear()
            wait_s = ANNOUNCE_EVERY_S
            for owned in list(self.owned.values()):
                if owned.busy:
                    continue
                round_, now_s = owned.round, clock()
                order = self._order(owned)
                if order is not None:
                    owned.busy = True
                    group.create_task(self._roll_back(owned, *order))
                    continue
                if round_.due(now_s, self.bandwidth.steps):
                    round_.open(now_s)
                    self.rounds += 1
                    owned.announced_at_s = -math.inf
                if round_.opened_at_s is None:
                    continue
                merge = round_.poll(now_s)
                if merge is not None:
                    owned.busy = True
                    group.create_task(self._commit(owned, merge, group))
                    continue
                if now_s - owned.announced_at_s >= ANNOUNCE_EVERY_S:
                    owned.announced_at_s = now_s
                    await self._announce(owned, now_s)
                wait_s = min(wait_s, owned.announced_at_s + ANNOUNCE_EVERY_S - now_s)
                if round_.quorum_at_s is not None and not round_.closing:
                    wait_s = min(wait_s, round_.remaining_s(now_s))  # the end of its grace window
            await _wait(self._news, max(wait_s, 0.001))

    async def _announce(self, owned: Owned, now_s: float) -> None:
        announcement = Announcement(
            fragment=owned.fragment.index,
            version=owned.round.version,
            epoch=owned.replica.chain.epoch,
            syncer=self.settings.name,
            remaining_s=owned.round.remaining_s(now_s),
            closing=owned.round.closing,
            tokens_processed=self.roster.tokens_processed(),
            steps=self.bandwidth.steps,
            offer_bits=self.bandwidth.offer_bits,
        )
        subject = self.subjects.round(owned.fragment.index)
        await self.transport.publish(subject, messages.pack(announcement, self.run.identity))

    async def _commit(self, owned: Owned, merge: Merge, group: asyncio.TaskGroup) -> None:
        index = owned.fragment.index
        try:
            outliers = await self._outliers(owned, merge)
            if outliers:
                owned.round.without({outlier.learner for outlier in outliers})
                self._suspects.update({outlier.learner: outlier for outlier in outliers})
                self._change()
                group.create_task(self._quarantine(index, outliers))
                return
            if merge.held:
                await self._archive(merge)
                record, inline, parts = await asyncio.to_thread(self._merge, owned, merge)
            else:
                record = merging.make_marker(
                    owned.replica,
                    "close",
                    self.run.now.settings,
                    syncer=self.settings.name,
                    now_s=self.transport.wall_s(),
                )
                inline, parts = b"", []
            await self._append(owned, record, inline, parts)
        except NonFiniteError as error:
            # offers are checked one by one; what they add up to overflowed: begin again without them
            self.log.error("merge_not_finite", fragment=index, version=merge.version, reason=str(error))
            await self._stop_writing(owned)
            again = await self._take_over(index, group)
            if again is None:
                await self._let_go(owned)
            else:
                self.owned[index] = again
                for collector in self._collectors.values():
                    collector.replace(again)
        except FenceError as error:
            # another process has appended: what was folded here is not the log's
            self.log.warning("version_fenced", fragment=index, version=merge.version, reason=str(error))
            self.ownership.distrust()
            await self._let_go(owned)
        else:
            owned.round.committed(asyncio.get_running_loop().time())
            if record.entry == "version":
                self.versions += 1
                self.merged_members += len(record.members)
                self.quorum_times.observe(record.quorum_s)
                self.round_times.observe(record.round_s)
            self.log.debug(
                "version_committed",
                fragment=index,
                version=record.version,
                members=len(record.members),
                bytes=record.body.size_bytes if record.body else 0,
                bits=record.bits,
                round_s=round(merge.round_s, 3),
                closing=record.closing,
            )
            await self._keyframe(owned)
        finally:
            owned.busy = False
            self._news.set()

    async def _outliers(self, owned: Owned, merge: Merge) -> list[Outlier]:
        """Learners whose offers are not to be merged any more, since they are outliers."""
        settings = self.run.now.settings.quarantine
        if not settings.factor:
            return []
        live = {seen.pulse.learner for seen in self.roster.live(asyncio.get_running_loop().time())}
        judged = []
        for item in merge.held:
            assert isinstance(item.offer, Offer), "the settings refuse this together with combined offers"
            norm = await asyncio.to_thread(norm_of, item.body, owned.fragment.size, item.offer.bits)
            judged.append((item.offer, norm))
        return owned.norms.judge(judged, live, settings)

    async def _quarantine(self, index: int, outliers: Sequence[Outlier]) -> None:
        """Put on record who is barred here already."""

        def decide(now: Effective) -> list[Quarantine]:
            return [Quarantine(o.learner, index, o.norm, o.threshold) for o in outliers if o.learner not in now.barred]

        append = partial(following.append, self.transport, self.run, decide, author=self.settings.name, reason=OUTLIER)
        try:
            await patiently(append, self.log)
            await patiently(self.follower.look, self.log)
        except (MessageError, RunError, SettingsError) as error:  # the list has no room, or is none
            self.log.error("quarantine_not_recorded", learners=[o.learner for o in outliers], reason=str(error))
            return
        for outlier in outliers:
            self._suspects.pop(outlier.learner, None)
        self._change()

    def _order(self, owned: Owned) -> tuple[int, int] | None:
        """The change of the run by which a fragment is to go back now, and to which version."""
        change, version = self.run.now.rollbacks.get(owned.fragment.index, (0, 0))
        due = change > owned.failed_change and owned.replica.chain.must_go_back(change, version)
        return (change, version) if due else None

    async def _roll_back(self, owned: Owned, change: int, version: int) -> None:
        """Take a fragment back to an earlier version, as a version of its own that everybody folds like any other."""
        index = owned.fragment.index
        try:
            past = await self._state_at(index, version)
            record, inline, parts = await asyncio.to_thread(
                merging.make_rollback,
                owned.replica,
                owned.residual,
                past,
                change,
                self.run.now.settings,
                syncer=self.settings.name,
                attempt=self.transport.random_bytes(messages.ATTEMPT_BYTES),
                now_s=self.transport.wall_s(),
            )
            await self._append(owned, record, inline, parts)
        except RunError as error:
            # it was there when the change was ordered: somebody has dropped it since
            self.log.error("rollback_failed", fragment=index, change=change, reason=str(error))
            owned.failed_change = change
        except (FenceError, RewoundError) as error:
            self.log.warning("version_fenced", fragment=index, version=owned.round.version, reason=str(error))
            self.ownership.distrust()
            await self._let_go(owned)
        else:
            owned.older.clear()
            owned.round.committed(asyncio.get_running_loop().time())
            self.versions += 1
            size_bytes = record.body.size_bytes if record.body else 0
            self.log.warning("rolled_back", fragment=index, version=record.version, to_version=version, bytes=size_bytes)
            await self._keyframe(owned)
        finally:
            owned.busy = False
            self._news.set()

    async def _state_at(self, index: int, version: int) -> Replica:
        """What a fragment was at a version, from the own region's log, or another one's, which may go back further.

        Raises:
            RunError: none of them has it.
        """
        try:
            return await patiently(partial(self.store.state_at, index, version, *self._copies.genesis), self.log)
        except RunError:
            for log in self.regions.others if self.regions is not None else ():
                with contextlib.suppress(RunError, BrokerError):
                    return await log.state_at(index, version, *self._copies.genesis)
            raise

    def _merge(self, owned: Owned, merge: Merge) -> tuple[Record, bytes, list[bytes]]:
        """Runs in a thread: nobody else touches the fragment while it is busy."""
        settings, replica = self.run.now.settings, owned.replica
        if settings.merge.against == "current":
            owned.older[replica.chain.version] = replica.theta.copy()
            oldest = replica.chain.version - settings.round.max_staleness_versions
            owned.older = {version: theta for version, theta in owned.older.items() if version >= oldest}
        older = owned.older
        accumulator = merging.accumulate(owned.fragment, settings, merge.held, older.get, replica.theta)
        attempt = self.transport.random_bytes(messages.ATTEMPT_BYTES)
        return merging.make_version(
            replica,
            owned.residual,
            accumulator,
            merge,
            settings,
            bits=self.bandwidth.record_bits,
            syncer=self.settings.name,
            attempt=attempt,
            now_s=self.transport.wall_s(),
        )

    async def _append(self, owned: Owned, record: Record, inline: bytes, parts: list[bytes]) -> None:
        try:
            sequence = await self._append_until_stored(owned, record, inline, parts)
        finally:
            self.unstored.discard(record.fragment)
        check = messages.check_of(record, self.run.identity)
        owned.replica.chain.check(record)
        owned.replica.chain.advance(record, check, sequence)
        owned.fence, owned.checked_at_s = sequence, asyncio.get_running_loop().time()
        owned.log_bytes += len(inline) + sum(map(len, parts))

    async def _append_until_stored(self, owned: Owned, record: Record, inline: bytes, parts: list[bytes]) -> int:
        while True:
            try:
                if owned.replication is None:
                    return await self.store.append_record(record, inline, parts, owned.fence)
                return await owned.replication.append(record, inline, parts)
            except StorageFullError as error:
                if record.fragment not in self.unstored:
                    self.log.error("storage_full", fragment=record.fragment, version=record.version, reason=str(error))
                self.unstored.add(record.fragment)
                await asyncio.sleep(STORAGE_RETRY_S)

    async def _archive(self, merge: Merge) -> None:
        """Keep what is about to be merged, before it is: whatever is in the log can be merged again."""
        if not self.run.settings.log.archive or self.archive_full:
            return
        try:
            for held in merge.held:
                await self.store.archive(held.offer, held.body)
        except StorageFullError as error:
            self.log.error("archive_full", fragment=merge.held[0].offer.fragment, reason=str(error))
            self.archive_full = True

    async def _hear_mark(self, message: Heard) -> None:
        """A checkpoint of the whole run: keep the residuals of the versions that it names, which nobody else knows."""
        try:
            mark, _, _ = messages.unpack(message.data, Mark, self.run.identity)
            if len(mark.versions) != len(self.map.fragments):
                raise FormatError(f"mark {mark.number} names {len(mark.versions)} fragments, not {len(self.map.fragments)}")
        except MessageError as error:
            self._refuse(message.subject, error)
            return
        for index, owned in list(self.owned.items()):
            version = owned.replica.chain.version
            if version == mark.versions[index] != owned.keyframe_version and not owned.busy and index in self.owned:
                owned.busy = True
                try:
                    await self._store_keyframe(owned)
                finally:
                    owned.busy, owned.keyframes = False, []
                    self._news.set()

    async def _keyframe(self, owned: Owned) -> None:
        spoilt = any(sequence > owned.keyframe_sequence for sequence in owned.refused)
        if not spoilt and owned.log_bytes < self.run.now.settings.log.keyframe_factor * owned.keyframe_bytes:
            return
        if not await self._store_keyframe(owned):
            return
        index, moments = owned.fragment.index, owned.replica.optimizer.moments
        kept = keyframes_kept(self.run.now.settings.log, self.map.parameters, moments)
        if owned.keyframes:
            owned.keyframes.append(owned.keyframe_sequence)
        else:
            stored = await patiently(partial(self.store.keyframe_sequences, index), self.log)
            owned.keyframes = [sequence for sequence in stored if sequence not in owned.refused]
        if len(owned.keyframes) > kept:
            del owned.keyframes[:-kept]
            await patiently(partial(self.store.purge_below, index, owned.keyframes[0]), self.log)

    async def _store_keyframe(self, owned: Owned) -> bool:
        index, chain = owned.fragment.index, owned.replica.chain
        fence = Fence(self.subjects.record(index), owned.fence)
        try:
            sequence = await self.store.append_keyframe(owned.replica, owned.residual, fence)
        except (FenceError, StorageFullError) as error:
            self.log.warning("keyframe_not_stored", fragment=index, version=chain.version, reason=str(error))
            return False
        owned.keyframe_sequence, owned.keyframe_version, owned.log_bytes = sequence, chain.version, 0
        self.log.debug("keyframe_stored", fragment=index, version=chain.version, bytes=owned.keyframe_bytes)
        return True

    # ---- signs of life

    async def _pulse_regularly(self) -> None:
        clock = asyncio.get_running_loop().time
        progress = Progress(self.log, clock(), self._progress)
        while True:
            progress.look(clock())
            if self.regions is not None:
                self._look_around(self.regions)
            if self.transport.connected:  # what would be sent later says nothing about now
                await self._pulse()
            await asyncio.sleep(self.ownership.pulse_s)

    def _progress(self) -> tuple[dict[str, int], dict[str, Any]]:
        pulse = self.pulse()
        counts = {"versions": pulse.versions, "rounds": pulse.rounds}
        counts |= {"bytes_up": pulse.bytes_up, "bytes_down": pulse.bytes_down}
        return counts, {"state": pulse.state, "fragments": len(pulse.fragments), "refused": pulse.refused}

    def _look_around(self, regions: Regions) -> None:
        """Find out whether anything can be committed from here, and say when that changes."""
        now_s, before = asyncio.get_running_loop().time(), self._unable
        self.ownership.reach(regions.commits, now_s)
        self._unable = self.ownership.unable(now_s)
        if self._unable and not before:
            reason = "no majority of regions can be reached" if regions.stores else "the own region's server stores nothing"
            self.log.warning("commits_nothing", reason=reason)
        elif before and not self._unable:
            self.log.info("commits_again")
        if before != self._unable:
            self._governed.set()

    async def _pulse(self) -> None:
        self.pulses += 1
        await self.transport.publish(self.subjects.shard(self.settings.name), messages.pack(self.pulse(), self.run.identity))

    def pulse(self) -> ShardPulse:
        """What the others are told of this syncer now."""
        now_s, ownership = asyncio.get_running_loop().time(), self.ownership
        rounds = [(index, owned.round) for index, owned in sorted(self.owned.items())]
        crossing = self.regions.crossing() if self.regions is not None else []
        return ShardPulse(
            syncer=self.settings.name,
            region=self.settings.region or "",
            incarnation=ownership.incarnation,
            number=self.pulses,
            state=self._state(),
            revision=ownership.revision,
            fragments=sorted(self.owned.keys() | self._taking),
            closed=sorted(self._closed()),
            rounds=self.rounds,
            versions=self.versions,
            open=[
                (index, len(round_.answers()), round_.quorum(now_s), now_s - round_.opened_at_s)
                for index, round_ in rounds
                if round_.opened_at_s is not None
            ],
            refused=self.refused.total,
            bytes_up=self.transport.bytes_out + sum(sent for _, sent, _ in crossing),
            bytes_down=self.transport.bytes_in + sum(received for _, _, received in crossing),
            crossing=crossing,
            record_bits=self.bandwidth.record_bits,
            pace=self.bandwidth.pace,
            offer_bits=self.bandwidth.offer_bits,
            software=__version__,
        )

    def waits_for(self) -> str | None:
        """What it waits for before it serves fragments or stands by; None: it does."""
        if self._unable:
            return "regions in which entries can be stored"
        if self.ownership.leaving:
            return "its end: it leaves the run"
        if self.ownership.table is None:
            return "the table of who owns which fragment"
        return "the fragments that it takes over" if self._taking and not self.owned else None

    def _state(self) -> State:
        if self._unable:
            return "unable"
        if self.ownership.leaving:
            return "leaving"
        return "owner" if self.ownership.holds or self.owned else "standby"

    def _refuse(self, sender: str, error: MessageError, **values: Any) -> None:
        self.refused.note(sender, type(error).__name__, reason=str(error), **values)

    def _refuse_entry(self, sender: str, error: MessageError, sequence: int) -> None:
        self._refuse(sender, error, sequence=sequence)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
