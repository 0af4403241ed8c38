"""One syncer: owns some fragments or stands by; opens rounds, merges offers, appends versions to the log.

:class:`Shard` connects the parts, hears what others publish, and sends the heartbeat. :mod:`diloco_syncer.owning.governor` has
the fragments that are owned, :mod:`diloco_syncer.owning.owner` one of them, :mod:`diloco_syncer.rounds` the loop over their
rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from diloco import __version__
from diloco.control import creation
from diloco.control.changes import ChangesFollower
from diloco.control.creation import KnownRun
from diloco.control.gate import HeartbeatGate, check_owned
from diloco.control.genesis import await_genesis
from diloco.control.hearing import hear
from diloco.control.sender_reports import SenderReporter
from diloco.core.syncer import claims
from diloco.core.syncer.ownership import Ownership
from diloco.core.syncer.roster import Roster
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import FormatError
from diloco.log.log import Log
from diloco.log.stream import RefusedEntry
from diloco.process.observe import Counted, Logger, Progress
from diloco.process.retry import until_available
from diloco.process.tape import Recorder, Unrecorded
from diloco.process.tasks import end, unbroken
from diloco.process.telemetry import Telemetry
from diloco.settings.service import SyncerSettings
from diloco.transport import Connect, Heard, Transport
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, ShardHeartbeat, SnapshotMarker
from diloco_syncer.context import Context, Counts, clock_s
from diloco_syncer.links import LinkWatch, replications
from diloco_syncer.offers.aggregator import RegionalAggregator
from diloco_syncer.offers.intake import Intake
from diloco_syncer.offers.quarantine import OutlierRecord
from diloco_syncer.offers.refusing import RefusalReporter
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.governor import Governor
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.regions import Regions
from diloco_syncer.rounds import RoundLoop, RoundNews
from diloco_syncer.speaker import PresenceSpeaker

SETTLE_S = 10.0  # for entries to be known in all regions, before a syncer ends

State = Literal["owner", "standby", "leaving", "unable"]
STATES: tuple[State, ...] = get_args(State)


class Shard:
    """The service. ``await Shard(...).serve()`` returns when every fragment's log is closed, or after :meth:`leave`."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        fragment_map: FragmentMap,
        settings: SyncerSettings,
        log: Logger,
        tape: Recorder | None = None,
        connect: Mapping[str, Connect] | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Make the parts; ``connect`` has the ways to the other regions, in a run with regions."""
        self.transport, self.run, self.settings, self.log = transport, run, settings, log
        store = Log(transport, run.name, run.identity, fragment_map, run.created)
        self.subjects = store.subjects
        region = settings.region or ""
        regions = Regions(region, store, run, fragment_map, connect or {}, name=settings.name) if run.regions else None
        roster = Roster(run.in_force, claims.step_bounds(run.created, fragment_map))
        refused, refusals = Counted(log), RefusalReporter(run, log)
        self.context = Context(
            transport=transport,
            run=run,
            map=fragment_map,
            settings=settings,
            log=log,
            store=store,
            regions=regions,
            roster=roster,
            refused=refused,
            refusals=refusals,
            telemetry=telemetry,
        )
        sizes = [fragment.size for fragment in fragment_map.fragments]
        incarnation, takeover_s = int(transport.wall_s() * 1000), run.created.liveness.takeover_s
        self.ownership = Ownership(
            name=settings.name,
            incarnation=incarnation,
            sizes=sizes,
            shards=run.created.shards,
            takeover_s=takeover_s,
            region=region,
            away_s=run.created.regions.away_s,
        )
        self.follower = ChangesFollower(transport, run, log, self._change)
        self.outliers = OutlierRecord(self.context, self.follower, incarnation, self._judged_here)
        self.aggregator: RegionalAggregator | None = None
        if run.created.regions.merge:
            self.aggregator = RegionalAggregator(self.context, incarnation, self.outliers)
        self._news = RoundNews()
        self.intake = Intake(self.context, self.aggregator, self._news.tell_of)
        tape = tape or Unrecorded()
        self.governor = Governor(
            self.context, self.ownership, self.intake, tape, changed=self._news.tell, announce=self._send_heartbeat
        )
        self.links = LinkWatch(self.context, self.owned, self.intake.collectors, self.ownership, self.governor.news.set)
        self.gate = HeartbeatGate(run, fragment_map, refused, self._hear_learner)
        self.reporter = SenderReporter(transport, run, settings.name, lambda: self.context.counted(self.gate.dropped))
        self.speaker = PresenceSpeaker(self.context, self.ownership, self.gate, lambda: self._state() == "unable")
        self.rounds = RoundLoop(self.context, self.governor, self.links, self.outliers, self._news)
        self._heartbeats = 0

    @property
    def owned(self) -> Mapping[int, FragmentOwner]:
        """The fragments that this syncer owns, by number."""
        return self.governor.owned

    @property
    def begun(self) -> bool:
        """Whether the model is known, so that fragments can be owned."""
        return self.governor.begun

    @property
    def counts(self) -> Counts:
        """The counts of its rounds so far."""
        return self.context.counts

    @property
    def refused(self) -> Counted:
        """The messages that did not fit."""
        return self.context.refused

    async def serve(self) -> None:
        """Own what the table says, or stand by, to the end of the run.

        Raises:
            RunError: a younger process goes by this one's name.
        """
        await self._hear()
        regions = self.context.regions
        try:
            await self._serve(self.context.store, regions)
        finally:
            if regions is not None:  # with connections that are open, readers of theirs would end after the event loop
                await unbroken(regions.close())
        await self._send_heartbeat()
        event = "left" if self.ownership.leaving else "closed"
        self.log.info(event, rounds=self.counts.rounds, versions=self.counts.versions)

    async def _serve(self, store: Log, regions: Regions | None) -> None:
        crossing: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            tasks = (self._send_heartbeats(), self.speaker.work(), self.follower.follow(), self.gate.work())
            stating = (self.context.refusals.work(), self.outliers.work())
            working = [group.create_task(task) for task in (*tasks, *stating, self.reporter.work())]
            if regions is not None:
                crossing = await self._begin_regions(regions, group)
            await until_available(self.follower.look, self.log)  # before anything is owned
            genesis = await until_available(partial(await_genesis, self.run, store, None, None, self.log), self.log)
            self.governor.begin(Copies(store, genesis, self._refuse_entry, self.log))
            governing = group.create_task(self.governor.govern(group))
            checking = group.create_task(self.governor.check_heads())
            combining = group.create_task(self.aggregator.work()) if self.aggregator is not None else None
            await self.rounds.run(group)
            while not await self.governor.stays_over():
                await self.rounds.run(group)
            await end(governing, checking, combining)
            await self._settle_regions()
            await end(*working, *crossing)
            await self.governor.stop()
            await self.intake.stop()

    async def leave(self) -> None:
        """Give all fragments to others, where there are others, and let :meth:`serve` end."""
        self.ownership.leaving = True
        await self._send_heartbeat()
        self.governor.news.set()
        self._news.tell()

    async def _begin_regions(self, regions: Regions, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Begin to reach the other regions. Return the tasks that go on with it."""
        make = partial(creation.make_streams, self.transport, self.run.name, self.run.created)
        await until_available(make, self.log)
        tasks = [*regions.begin(group), group.create_task(self.intake.reach(regions, self.governor.news.set))]
        if self.run.created.adapts:
            tasks.append(group.create_task(self.links.fit(regions)))
        await until_available(partial(regions.bring_genesis, self.log), self.log)
        tasks.append(group.create_task(regions.watch(regions.own)))
        return tasks

    async def _settle_regions(self) -> None:
        """Wait until the entries of this process are known in all regions that can be reached."""
        found = replications(self.owned)
        await asyncio.gather(*(replication.settled(SETTLE_S) for replication in found))
        for replication in found:
            await replication.stop()

    def _change(self) -> None:
        """Go by the settings and the excluded learners that are in force now."""
        roster, settings, before = self.context.roster, self.run.in_force, self.context.roster.settings
        excluded, on_trial = self.run.now.excluded, self.run.now.on_trial
        if (excluded, on_trial) != (roster.excluded, roster.on_trial):
            self.intake.read_again()
        roster.change(settings, excluded, on_trial)
        self.ownership.change(settings.shards, settings.liveness.takeover_s, settings.regions.away_s)
        self.links.change(before)
        for owner in self.owned.values():
            owner.round.drop_unfit()
        if self.aggregator is not None:
            self.aggregator.change(excluded, on_trial)
        self.outliers.look()
        self.governor.news.set()
        self._news.tell()

    def _judged_here(self) -> set[int]:
        return {*self.owned, *(self.aggregator.fragments if self.aggregator is not None else ())}

    # ---- what comes in

    async def _hear(self) -> None:
        """Hear syncers, learners, snapshot markers, and where offers are combined, announcements."""
        transport, run, refused = self.transport, self.run.identity, self.refused
        count = len(self.context.map.fragments)
        await hear(transport, self.subjects.shard(), ShardHeartbeat, run, self._hear_syncer, refused, count)
        await transport.subscribe(self.subjects.heartbeat(), self.gate.hear)
        await hear(transport, self.subjects.marker, SnapshotMarker, run, self._hear_marker, refused, count)
        if self.aggregator is not None:
            await hear(transport, self.subjects.round(), Announcement, run, self._hear_round, refused)

    async def _hear_syncer(self, heartbeat: ShardHeartbeat, heard: Heard) -> None:
        check_owned(heartbeat, len(self.context.map.fragments))
        if self.ownership.hear(heartbeat, clock_s()):
            self.governor.news.set()
            self._news.tell()

    async def _hear_learner(self, heartbeat: Heartbeat) -> None:
        self.speaker.hear(heartbeat)
        if self.context.roster.hear(heartbeat, clock_s()):
            if heartbeat.state == "stepping" and not self.run.created.round.learners_wait:
                self._news.tell_soon()
            else:  # others may wait for a round that is due now
                self._news.tell()
        if self.aggregator is not None:
            self.aggregator.hear_learner(heartbeat)

    async def _hear_round(self, announced: Announcement, heard: Heard) -> None:
        assert self.aggregator is not None
        self.aggregator.hear_round(announced)

    async def _hear_marker(self, marker: SnapshotMarker, heard: Heard) -> None:
        """Keep the residuals of the versions that a snapshot marker of the whole run names: no other process knows them."""
        fragments = len(self.context.map.fragments)
        if len(marker.versions) != fragments:
            raise FormatError(f"marker {marker.number} names {len(marker.versions)} fragments, not {fragments}")
        for index, owner in list(self.owned.items()):
            wanted = owner.chain.version == marker.versions[index] and not owner.has_keyframe
            if wanted and not owner.busy and index in self.owned:
                owner.busy = True
                try:
                    await owner.store_keyframe()
                finally:
                    owner.busy = False
                    self._news.tell_of(index)

    def _refuse_entry(self, refusal: RefusedEntry) -> None:
        self.context.refuse(refusal.sender, refusal.error, sequence=refusal.sequence)

    # ---- heartbeat

    async def _send_heartbeats(self) -> None:
        progress = Progress(self.log, clock_s(), self._progress)
        while True:
            progress.look(clock_s())
            self.links.look_around()
            if self.transport.connected:  # what would be sent later says nothing about now
                await self._send_heartbeat()
            await asyncio.sleep(self.ownership.heartbeat_s)

    def _progress(self) -> tuple[dict[str, int], dict[str, Any]]:
        heartbeat = self.heartbeat()
        counts = {"versions": heartbeat.versions, "rounds": heartbeat.rounds}
        counts |= {"bytes_up": heartbeat.bytes_up, "bytes_down": heartbeat.bytes_down}
        return counts, {"state": heartbeat.state, "fragments": len(heartbeat.fragments), "refused": heartbeat.refused}

    async def _send_heartbeat(self) -> None:
        self._heartbeats += 1
        await self.transport.publish(self.subjects.shard(self.settings.name), framing.pack(self.heartbeat(), self.run.identity))

    def heartbeat(self) -> ShardHeartbeat:
        """Return the heartbeat that says how this syncer is now."""
        now_s, ownership, regions, bandwidth = clock_s(), self.ownership, self.context.regions, self.links.bandwidth
        rounds = [(index, owner.round) for index, owner in sorted(self.owned.items())]
        crossing = regions.crossing() if regions is not None else []
        return ShardHeartbeat(
            syncer=self.settings.name,
            region=self.context.region,
            incarnation=ownership.incarnation,
            number=self._heartbeats,
            state=self._state(),
            revision=ownership.revision,
            fragments=sorted(self.owned.keys() | self.governor.taking),
            closed=sorted(self.governor.closed),
            rounds=self.counts.rounds,
            versions=self.counts.versions,
            open=[
                (index, len(round_.answers()), round_.quorum(now_s), now_s - round_.opened_at_s)
                for index, round_ in rounds
                if round_.opened_at_s is not None
            ],
            refused=self.refused.total,
            bytes_up=self.transport.bytes_out + sum(sent for _, sent, _ in crossing),
            bytes_down=self.transport.bytes_in + sum(received for _, _, received in crossing),
            crossing=crossing,
            record_bits=bandwidth.record_bits,
            pace=bandwidth.pace,
            offer_bits=bandwidth.offer_bits,
            software=__version__,
        )

    def waits_for(self) -> str | None:
        """Return what it waits for before it serves fragments or stands by; None: it does."""
        regions = self.context.regions
        if regions is not None and regions.brings:
            return "the other regions' logs, to restore its own region's lost log"
        if self.links.unable:
            return "a majority of regions that can store entries"
        if self.ownership.leaving:
            return "its end: it leaves the run"
        if self.ownership.table is None:
            return "the table of who owns which fragment"
        return "the fragments that it takes over" if self.governor.taking and not self.owned else None

    def _state(self) -> State:
        regions = self.context.regions
        if self.links.unable or (regions is not None and regions.brings):
            return "unable"
        if self.ownership.leaving:
            return "leaving"
        return "owner" if self.ownership.holds or self.owned else "standby"
