"""One shard of the syncer: owns some fragments, opens their rounds, merges offers, appends versions to the log.

The decisions are :mod:`diloco.core.round`'s and :mod:`diloco.core.merging`'s; this connects them to NATS. One loop looks at
all rounds whenever something came in, and at least every ``TICK_S``; merges of different fragments overlap, each in a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco import membership
from diloco.core import codec, fold, merging, ownership, quantise
from diloco.core.fold import Replica
from diloco.core.fragments import Fragment, FragmentMap
from diloco.core.round import Held, Merge, Roster, Round
from diloco.errors import ChainError, FenceError, FormatError, MessageError, NonFiniteError, SettingsError, StorageFullError
from diloco.log import Log, open_body
from diloco.membership import Run
from diloco.nats.append import Fence
from diloco.nats.connection import Link
from diloco.nats.pull import Puller
from diloco.observe import Counted, Logger
from diloco.settings import SyncerSettings
from diloco.wire import messages, subjects
from diloco.wire.assemble import Parts, part_index
from diloco.wire.messages import Announcement, Genesis, Offer, Pulse, Record, ShardPulse

TICK_S = 0.02
ANNOUNCE_EVERY_S = 0.25
STORAGE_RETRY_S = 1.0

Vector = NDArray[np.float32]


@dataclass
class _Owned:
    """A fragment that this shard owns: its replica, its rounds, and the encoder's residual."""

    fragment: Fragment
    replica: Replica
    residual: Vector
    round: Round
    keyframe_sequence: int
    fence: int  # sequence of the last message on the head subject
    log_bytes: int = 0  # of records since the keyframe
    announced_at_s: float = 0.0
    busy: bool = False
    older: dict[int, Vector] = field(default_factory=dict)  # parameters by version, where merges need them


class Shard:
    """The service. ``await Shard(...).serve()`` returns when every owned fragment's log is closed."""

    def __init__(self, link: Link, run: Run, fragment_map: FragmentMap, settings: SyncerSettings, log: Logger) -> None:
        if settings.shard >= run.settings.shards:
            raise SettingsError(f"shard = {settings.shard}: run {run.name!r} has shards 0 to {run.settings.shards - 1}")
        self.link, self.run, self.map, self.settings, self.log = link, run, fragment_map, settings, log
        self.store = Log(link, run.name, run.identity, fragment_map)
        self.subjects = self.store.subjects
        self.refused = Counted(log)
        self.roster = Roster(run.settings)
        self.owned: dict[int, _Owned] = {}
        self.rounds = self.versions = 0
        self._admitted: dict[str, int] = {}
        self._news = asyncio.Event()
        self._genesis: tuple[Genesis, bytes] | None = None

    async def serve(self) -> None:
        """Take the shard's fragments over, and run their rounds to the end of the run."""
        self._genesis = await membership.genesis(self.run, self.store, None, list, self.log)
        sizes = [fragment.size for fragment in self.map.fragments]
        for index in ownership.assign(sizes, self.run.settings.shards)[self.settings.shard]:
            self.owned[index] = await self._take_over(index)
        await self.link.control.subscribe(self.subjects.pulse(), cb=self._hear_pulse)
        self.log.info("serving", fragments=len(self.owned), parameters=sum(o.fragment.size for o in self.owned.values()))
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._collect()), group.create_task(self._pulse_regularly())]
            await self._run_rounds(group)
            for task in background:
                task.cancel()
        await self._pulse()
        self.log.info("closed", rounds=self.rounds, versions=self.versions)

    # ---- ownership

    async def _take_over(self, index: int) -> _Owned:
        """Load a fragment, follow its log to the end, and append the entry that makes this process its owner."""
        while True:
            owned = await self._load(index)
            if owned.replica.chain.closed:
                return owned
            record = merging.make_marker(
                owned.replica, "takeover", self.run.settings, syncer=self.settings.name, now_s=time.time()
            )
            try:
                await self._append(owned, record, b"", [])
                return owned
            except FenceError as error:
                self.log.info("takeover_retried", fragment=index, reason=str(error))

    async def _load(self, index: int) -> _Owned:
        assert self._genesis is not None
        loaded = await self.store.load(index, *self._genesis)
        replica, residual, log_bytes = loaded.replica, loaded.residual, 0
        keyframe_version = replica.chain.version
        fence = await self.store.head_sequence(index)
        if fence > replica.chain.sequence:
            refuse = lambda sequence, error: self._refuse("log", error, sequence=sequence)  # noqa: E731
            async for entry in self.store.follow([index], replica.chain.sequence + 1, refuse, fence):
                try:
                    await asyncio.to_thread(replica.fold, entry.record, entry.check, entry.sequence, entry.body)
                except ChainError as error:
                    self._refuse(entry.record.syncer, error, sequence=entry.sequence)
                log_bytes += entry.size_bytes
        if replica.chain.version != keyframe_version:
            # the residual is its owner's private state, and went with it
            self.log.info("residual_reset", fragment=index, version=replica.chain.version)
            residual[:] = 0
        fragment = self.map.fragments[index]
        round_ = Round(self.run.settings, self.roster, replica.chain, len(self.map.fragments))
        return _Owned(fragment, replica, residual, round_, loaded.keyframe_sequence, fence, log_bytes)

    # ---- what comes in

    async def _hear_pulse(self, message: Any) -> None:
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

    async def _collect(self) -> None:
        filters = [self.subjects.offer_tree(index) for index in sorted(self.owned)]
        parts = Parts()
        async for message in Puller(self.link, self.subjects.offer_stream, filters, 1):
            index, learner = subjects.fragment_of(message.subject), subjects.learner_of(message.subject)
            if index is None or learner is None or index not in self.owned:
                continue
            size = self.owned[index].fragment.size
            if not subjects.is_head(message.subject):
                number = part_index(message.subject)
                if number is not None:
                    parts.add((index, learner), number, message.data, codec.packed_limit(quantise.body_bytes(size, 32)))
                continue
            try:
                await self._take_offer(index, learner, message.data, parts)
            except MessageError as error:
                self._refuse(learner, error, fragment=index)

    async def _take_offer(self, index: int, learner: str, data: bytes, parts: Parts) -> None:
        owned = self.owned[index]
        offer, _, inline = messages.unpack(data, Offer, self.run.identity)
        what = f"fragment {index}, offer {offer.number} of {learner}"
        if offer.fragment != index or offer.learner != learner:
            raise FormatError(f"{what}: it says fragment {offer.fragment}, learner {offer.learner}")
        budget = self.run.settings.tokens
        if offer.bits != self.run.settings.codec.offer_bits or offer.tokens > budget or offer.steps > offer.tokens:
            raise FormatError(
                f"{what}: {offer.bits} bits, {offer.steps} steps, {offer.tokens} tokens; the run has "
                f"{self.run.settings.codec.offer_bits} bits and {budget} tokens in all"
            )
        pieces = parts.take((index, learner), offer.body)
        if pieces is None:
            return  # a newer attempt is on its way: it has replaced parts of this one
        if await self._admitted_incarnation(learner, offer.incarnation) < offer.incarnation:
            raise FormatError(f"{what}: incarnation {offer.incarnation} is not admitted to run {self.run.name!r}")
        reason = owned.round.refuse(offer)
        if reason is not None:
            # nobody's fault: offers cross with versions, and after a restart the stream still holds merged ones
            self.log.debug("offer_passed_over", fragment=index, learner=learner, number=offer.number, reason=reason)
            return
        raw_bytes = quantise.body_bytes(owned.fragment.size, offer.bits)
        body = await asyncio.to_thread(open_body, offer.body, inline, pieces, raw_bytes, what)
        await asyncio.to_thread(quantise.validate, body, owned.fragment.size, offer.bits)
        owned.round.hold(Held(offer, body))
        self._news.set()

    async def _admitted_incarnation(self, learner: str, incarnation: int) -> int:
        if self._admitted.get(learner, -1) < incarnation:
            self._admitted[learner] = await membership.admitted(self.run, learner, self.map.digest) or -1
        return self._admitted[learner]

    # ---- rounds

    async def _run_rounds(self, group: asyncio.TaskGroup) -> None:
        clock = asyncio.get_running_loop().time
        while not all(owned.replica.chain.closed for owned in self.owned.values()):
            self._news.clear()
            for owned in self.owned.values():
                if owned.busy:
                    continue
                round_, now_s = owned.round, clock()
                if round_.due(now_s):
                    round_.open(now_s)
                    self.rounds += 1
                    owned.announced_at_s = 0.0
                if round_.opened_at_s is None:
                    continue
                merge = round_.poll(now_s)
                if merge is not None:
                    owned.busy = True
                    group.create_task(self._commit(owned, merge))
                elif now_s - owned.announced_at_s >= ANNOUNCE_EVERY_S:
                    owned.announced_at_s = now_s
                    await self._announce(owned, now_s)
            await _wait(self._news, TICK_S)

    async def _announce(self, owned: _Owned, now_s: float) -> None:
        announcement = Announcement(
            fragment=owned.fragment.index,
            version=owned.round.version,
            epoch=owned.replica.chain.epoch,
            syncer=self.settings.name,
            remaining_s=owned.round.remaining_s(now_s),
            closing=owned.round.closing,
            tokens_processed=self.roster.tokens_processed(),
        )
        subject = self.subjects.round(owned.fragment.index)
        await self.link.control.publish(subject, messages.pack(announcement, self.run.identity))

    async def _commit(self, owned: _Owned, merge: Merge) -> None:
        index = owned.fragment.index
        try:
            if merge.held:
                record, inline, parts = await asyncio.to_thread(self._merge, owned, merge)
            else:
                record = merging.make_marker(
                    owned.replica, "close", self.run.settings, syncer=self.settings.name, now_s=time.time()
                )
                inline, parts = b"", []
            await self._append(owned, record, inline, parts)
        except NonFiniteError as error:
            # offers are checked one by one; what they add up to overflowed: begin again without them
            self.log.error("merge_not_finite", fragment=index, version=merge.version, reason=str(error))
            self.owned[index] = await self._take_over(index)
        except FenceError as error:
            # another process has appended: what was folded here is not the log's, so begin again from the log
            self.log.warning("version_fenced", fragment=index, version=merge.version, reason=str(error))
            self.owned[index] = await self._take_over(index)
        else:
            owned.round.committed(asyncio.get_running_loop().time())
            self.versions += record.entry == "version"
            self.log.info(
                "version_committed",
                fragment=index,
                version=record.version,
                members=len(record.members),
                bytes=record.body.size_bytes if record.body else 0,
                round_s=round(merge.round_s, 3),
                closing=record.closing,
            )
            await self._keyframe(owned)
        finally:
            owned.busy = False
            self._news.set()

    def _merge(self, owned: _Owned, merge: Merge) -> tuple[Record, bytes, list[bytes]]:
        """Runs in a thread: nobody else touches the fragment while it is busy."""
        settings, replica = self.run.settings, owned.replica
        if settings.merge.against == "current":
            owned.older[replica.chain.version] = replica.theta.copy()
            oldest = replica.chain.version - settings.round.max_staleness_versions
            owned.older = {version: theta for version, theta in owned.older.items() if version >= oldest}
        older = owned.older
        accumulator = merging.accumulate(owned.fragment, settings, merge.held, older.get, replica.theta)
        attempt = os.urandom(messages.ATTEMPT_BYTES)
        return merging.make_version(
            replica,
            owned.residual,
            accumulator,
            merge,
            settings,
            syncer=self.settings.name,
            attempt=attempt,
            now_s=time.time(),
        )

    async def _append(self, owned: _Owned, record: Record, inline: bytes, parts: list[bytes]) -> None:
        complained = False
        while True:
            try:
                sequence = await self.store.append_record(record, inline, parts, owned.fence)
                break
            except StorageFullError as error:
                if not complained:
                    self.log.error("storage_full", fragment=record.fragment, version=record.version, reason=str(error))
                complained = True
                await asyncio.sleep(STORAGE_RETRY_S)
        check = messages.check_of(record, self.run.identity)
        owned.replica.chain.check(record)
        owned.replica.chain.advance(record, check, sequence)
        owned.fence = sequence
        owned.log_bytes += len(inline) + sum(map(len, parts))

    async def _keyframe(self, owned: _Owned) -> None:
        size_bytes = fold.keyframe_bytes(owned.fragment.size)
        if owned.log_bytes < self.run.settings.log.keyframe_factor * size_bytes:
            return
        index, chain = owned.fragment.index, owned.replica.chain
        previous, fence = owned.keyframe_sequence, Fence(self.subjects.record(index), owned.fence)
        try:
            sequence = await self.store.append_keyframe(owned.replica, owned.residual, fence)
        except (FenceError, StorageFullError) as error:
            self.log.warning("keyframe_not_stored", fragment=index, version=chain.version, reason=str(error))
            return
        await self.store.purge_below(index, previous)
        owned.keyframe_sequence, owned.log_bytes = sequence, 0
        self.log.info("keyframe_stored", fragment=index, version=chain.version, bytes=size_bytes)

    # ---- signs of life

    async def _pulse_regularly(self) -> None:
        while True:
            await self._pulse()
            await asyncio.sleep(self.run.settings.liveness.pulse_s)

    async def _pulse(self) -> None:
        now_s = asyncio.get_running_loop().time()
        rounds = [(index, owned.round) for index, owned in sorted(self.owned.items())]
        pulse = ShardPulse(
            syncer=self.settings.name,
            shard=self.settings.shard,
            fragments=sorted(self.owned),
            rounds=self.rounds,
            versions=self.versions,
            open=[
                (index, len(round_.answers()), round_.quorum(now_s), now_s - round_.opened_at_s)
                for index, round_ in rounds
                if round_.opened_at_s is not None
            ],
            refused=self.refused.total,
            bytes_up=self.link.bytes_out,
            bytes_down=self.link.bytes_in,
        )
        await self.link.control.publish(self.subjects.shard(self.settings.name), messages.pack(pulse, self.run.identity))

    def _refuse(self, sender: str, error: MessageError, **values: Any) -> None:
        self.refused.note(sender, type(error).__name__, reason=str(error), **values)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
