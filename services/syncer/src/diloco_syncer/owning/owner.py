"""One fragment that a syncer owns: its rounds are held here, and no other process appends to its log."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.chain import Chain
from diloco.core.syncer import merging
from diloco.core.syncer.outliers import JudgedOffer
from diloco.core.syncer.round import Merge, Round
from diloco.core.tensors.outer import norm
from diloco.errors import FenceError, FormatError, RunError, StorageFullError, UnmergeableError
from diloco.log.follower import LogCopy
from diloco.process.tasks import computed
from diloco.settings.run import Bits
from diloco.wire import framing
from diloco.wire.body import ATTEMPT_BYTES
from diloco.wire.control import Announcement
from diloco.wire.entries import Genesis, Record
from diloco_syncer.context import Context, clock_s
from diloco_syncer.offers.bases import BaseValues, state_at
from diloco_syncer.offers.judging import OfferJudge
from diloco_syncer.owning.fence import append_behind, holds
from diloco_syncer.owning.keyframes import Keyframes
from diloco_syncer.replication import Replication
from diloco_syncer.syncer_tracing import RoundTrace, stage

Vector = NDArray[np.float32]

STORAGE_RETRY_S = 1.0  # until a full server is asked again: people make room, which takes longer
UNHEARD = ""  # stands for learners that are not heard of yet
CHECK_EVERY_S = 10.0  # that no other process has appended to a fragment which makes no versions
CONFIRM_LOOK_S = 0.05  # from one look whether a learner has applied a version to the next
SLOW_ROUND_S = 2.0  # of a fragment whose round is open for so long, the log's end is looked at as often


class FragmentOwner:
    """A fragment's replica, its rounds, the encoder's residual, and the fence of its log.

    ``busy``: a task appends to it or hands it over; nothing else may begin meanwhile. The task that sets it clears it.
    """

    def __init__(self, context: Context, copy: LogCopy, genesis: tuple[Genesis, bytes]) -> None:
        """``copy``: the fragment as of its log's end; it is this owner's from now on."""
        self.context, self.copy, self.genesis = context, copy, genesis
        self.replica = copy.replica
        self.fragment = context.map.fragments[self.chain.fragment]
        self.round = Round(context.roster, self.chain, len(context.map.fragments))
        if copy.residual is None:
            # it was private to the owner before, and went with it
            copy.residual = np.zeros_like(copy.replica.theta)
        self.residual: Vector = copy.residual
        self.keyframes = Keyframes(context, copy)
        self.replication: Replication | None = None  # in a run with regions
        self.announced_at_s = -math.inf
        self.busy = False
        self.checked_at_s = -math.inf  # when the fence was last known to be right
        self._began_s = clock_s()
        self._offers = OfferJudge(context, self.fragment, lambda: norm(copy.replica.theta))
        self._made_at_s = math.inf  # when the newest version was made here
        self.judged_version = 0  # the newest one of which it was looked whether the log folds to it
        self._bases = BaseValues(context, copy.replica, self.round, genesis)
        self._failed_change = 0  # the newest change that was to roll it back, and for which the log has no state any more

    @property
    def chain(self) -> Chain:
        """The log's head."""
        return self.replica.chain

    @property
    def index(self) -> int:
        """The fragment's number."""
        return self.fragment.index

    async def stop(self) -> None:
        """Write to no region any more."""
        if self.replication is not None:
            await self.replication.stop()

    # ---- rounds

    async def announce(self, now_s: float, steps: int, offer_bits: list[tuple[str, Bits]]) -> None:
        """Tell learners that the round is open: ``steps`` lie between two, and some regions' offers have fewer bits."""
        self.announced_at_s = now_s
        context = self.context
        announcement = Announcement(
            fragment=self.index,
            version=self.round.version,
            epoch=self.chain.epoch,
            syncer=context.settings.name,
            remaining_s=self.round.remaining_s(now_s),
            closing=self.round.closing,
            tokens_processed=context.roster.processed(self.chain, now_s),
            steps=steps,
            offer_bits=offer_bits,
        )
        subject = context.store.subjects.round(self.index)
        await context.transport.publish(subject, framing.pack(announcement, context.run.identity))

    async def judge(self, merge: Merge) -> tuple[list[JudgedOffer], UnmergeableError | None]:
        """Judge the offers that are about to be merged, and of quarantined learners: which are outliers by norm.

        Return what was found, and the learners whose offers the version is to be made without; None: none.
        """
        live = {seen.heartbeat.learner for seen in self.context.roster.live(clock_s())}
        judged = await self._offers.judge(self.chain, merge.held, self.round.on_trial.values(), live)
        return judged, await self._offers.left_out(merge.version, merge.held, judged, self.replica.theta)

    async def commit(self, merge: Merge, bits: Bits) -> None:
        """Append the version that a merge makes, with ``bits`` a value where its fragment has no others, or close the log.

        Raises:
            UnmergeableError: some offers cannot be in the version; nothing has changed.
            NonFiniteError: the version would not be finite; the replica is invalid.
            FenceError: another process has appended; the replica is invalid.
            RewoundError: the log lost its last entries.
        """
        context = self.context
        trace = RoundTrace.begin(context, self.index, self.round, merge)
        if merge.held:
            await self._bases.know(merge)
            attempt = context.transport.random_bytes(ATTEMPT_BYTES)
            await self.archive(merge, attempt)
            values = len(merge.held) * self.fragment.size
            work = partial(self._merge, merge, bits, self._awaited(), trace, attempt=attempt)
            record, inline, parts = await computed(values, work)
        else:
            record = self.marker("close")
            inline, parts = b"", []
        with stage(trace, "publish"):
            await self.append(record, inline, parts)
        self.round.committed(clock_s())
        if trace is not None:
            trace.committed(record)
        if record.entry == "version":
            counts = context.counts
            counts.versions += 1
            counts.merged_members += len(record.members)
            counts.quorum_times.observe(record.quorum_s)
            counts.round_times.observe(record.round_s)
        context.log.debug(
            "version_committed",
            fragment=self.index,
            version=record.version,
            members=len(record.members),
            bytes=record.body.size_bytes if record.body else 0,
            bits=record.bits,
            round_s=round(merge.round_s, 3),
            closing=record.closing,
        )
        await self.keep_keyframes()

    @property
    def acquainted_at_s(self) -> float:
        """The time by which every live learner has been heard of: this owner may be a fresh one."""
        return self._began_s + self.context.run.in_force.liveness.dead_s

    def _awaited(self) -> set[str]:
        """Return the learners whose offers may come yet; a fresh owner may not have heard of all of them."""
        now_s = clock_s()
        heard = {seen.heartbeat.learner for seen in self.context.roster.live(now_s)} - self.round.left_out
        return heard if now_s >= self.acquainted_at_s else heard | {UNHEARD}

    def _merge(
        self, merge: Merge, bits: Bits, awaited: Collection[str], trace: RoundTrace | None, *, attempt: bytes
    ) -> tuple[Record, bytes, list[bytes]]:
        """Make the next version; in a thread: nothing else touches the fragment while it is busy."""
        settings, replica = self.context.run.in_force, self.replica
        bases = self._bases.of_merge()
        with stage(trace, "merge"):
            merged = merging.sound(self.fragment, settings, merge, bases, replica, awaited, self.context.run.identity)
        with stage(trace, "outer step"):
            return merging.make_version(
                replica,
                self.residual,
                merged,
                merge,
                settings,
                bits=self.fragment.bits(bits),
                syncer=self.context.settings.name,
                attempt=attempt,
                now_s=self.context.transport.wall_s(),
            )

    async def archive(self, merge: Merge, attempt: bytes) -> None:
        """Keep the offers before they are merged: every merge in the log can be made again.

        ``attempt``: that of the version's body.
        """
        context = self.context
        if not context.run.created.log.archive or context.counts.archive_full:
            return
        try:
            for held in merge.held:
                await context.store.archive.put(held.offer, held.body, attempt)
        except StorageFullError as error:
            context.log.error("archive_full", fragment=self.index, reason=str(error))
            context.counts.archive_full = True

    # ---- rollback

    def order(self) -> tuple[int, int, int | None] | None:
        """Return the change of the run that takes the fragment back now, as :meth:`roll_back` takes it; None: there is none."""
        change, version = self.context.run.now.rollbacks.get(self.index, (0, 0))
        number, repair = self.context.run.now.repairs.get(self.index, (0, None))
        if repair is not None and number > change:  # the last order counts
            due = number > self._failed_change and self.chain.must_repair(number, repair.version)
            return (number, repair.version, repair.sequence) if due else None
        due = change > self._failed_change and self.chain.must_go_back(change, version)
        return (change, version, None) if due else None

    async def roll_back(self, change: int, version: int, repairs: int | None = None) -> None:
        """Append the entry that takes the fragment back to ``version``, as ``change`` of the run asks.

        ``repairs``: the message that the change names where it asks for a repair.
        If no log has that version any more, say so, and do not try this change again.

        Raises:
            FenceError: another process has appended.
            RewoundError: the log lost its last entries.
        """
        context = self.context
        try:
            past = await state_at(context, self.index, version, self.genesis)
            record, inline, parts = await asyncio.to_thread(
                merging.make_rollback,
                self.replica,
                self.residual,
                past,
                change,
                context.run.in_force,
                repairs=repairs,
                syncer=context.settings.name,
                attempt=context.transport.random_bytes(ATTEMPT_BYTES),
                now_s=context.transport.wall_s(),
            )
            await self.append(record, inline, parts)
        except RunError as error:
            # it was there when the change was ordered: it was dropped since
            context.log.error("rollback_failed", fragment=self.index, change=change, reason=str(error))
            self._failed_change = change
            return
        self._bases.clear()
        self.round.committed(clock_s())
        context.counts.versions += 1
        size_bytes = record.body.size_bytes if record.body else 0
        event = "rolled_back" if repairs is None else "repaired"
        context.log.warning(event, fragment=self.index, version=record.version, to_version=version, bytes=size_bytes)
        await self.keep_keyframes()

    # ---- the log

    def marker(self, entry: Literal["takeover", "close"], epoch: int | None = None) -> Record:
        """Return an entry that makes no version."""
        context = self.context
        return merging.make_marker(
            self.replica,
            entry,
            context.run.in_force,
            syncer=context.settings.name,
            epoch=epoch,
            now_s=context.transport.wall_s(),
        )

    async def append(self, record: Record, inline: bytes, parts: list[bytes]) -> None:
        """Append an entry, and make it the head; wait for room as long as storage is full.

        Raises:
            FormatError: its readers could not decode it; nothing was stored.
            FenceError: another process has appended.
        """
        merging.readable(record, self.context.run.identity, inline)
        try:
            sequence = await self._append_until_stored(record, inline, parts)
        finally:
            self.context.counts.unstored.discard(self.index)
        entry_hash = framing.hash_of(record, self.context.run.identity)
        self.chain.check(record)
        self.chain.advance(record, entry_hash, sequence)
        self.copy.fence, self.checked_at_s = sequence, clock_s()
        if record.makes_version:
            self._made_at_s = clock_s()
        self.copy.log_bytes += len(inline) + sum(map(len, parts))

    async def _append_until_stored(self, record: Record, inline: bytes, parts: list[bytes]) -> int:
        unstored, log = self.context.counts.unstored, self.context.log
        while True:
            try:
                if self.replication is not None:
                    return await self.replication.append(record, inline, parts)
                write = partial(self.context.store.writer.append_record, record, inline, parts)
                return await append_behind(self.context.store, self.copy, write, log)
            except StorageFullError as error:
                if self.index not in unstored:
                    log.error("storage_full", fragment=self.index, version=record.version, reason=str(error))
                unstored.add(self.index)
                await asyncio.sleep(STORAGE_RETRY_S)

    def distrust(self) -> None:
        """Have the log's end looked at soon: the fragment may have been another's meanwhile."""
        self.checked_at_s = -math.inf

    def must_check(self, now_s: float) -> bool:
        """Whether it is time to look whether the log ends where it is known to end here."""
        slow = self.round.opened_at_s is not None and now_s - self.round.opened_at_s >= SLOW_ROUND_S
        return not self.busy and now_s - self.checked_at_s >= (SLOW_ROUND_S if slow else CHECK_EVERY_S)

    async def lost(self) -> str | None:
        """Return the log event that says how the log goes on otherwise than is known here; None if it does not.

        All that stands behind the last entry is looked at again: a server that lost its last writes may have got others in
        the place of those that the fence moved over.

        Raises:
            AppendUncertainError: the server is silent.
        """
        chain_head, store = self.chain.head, self.context.store
        goes_on = await holds(store, self.copy, self.chain.sequence)
        event = None
        if not goes_on:
            newest = await store.reader.head_sequence(self.index)
            event = "ownership_lost" if newest > self.copy.fence else "log_rewound"
        if self.busy or self.chain.head != chain_head:
            return None  # it has gone on meanwhile
        self.checked_at_s = clock_s()
        return event

    async def confirmed(self, timeout_s: float) -> bool:
        """Return whether the newest version was not made here, or a learner has applied it; wait for that, but no longer."""
        until_s, version = clock_s() + timeout_s, self.chain.version
        while math.isfinite(self._made_at_s) and self.judged_version < version:
            if self.context.roster.has_applied(self.index, version):
                return True
            if clock_s() >= until_s:
                return False
            await asyncio.sleep(CONFIRM_LOOK_S)
        return True

    def is_unfollowed(self, now_s: float) -> bool:
        """Whether learners have not applied the newest version for so long that it is to be judged by the log itself."""
        chain, roster = self.chain, self.context.roster
        if self.busy or self.judged_version >= chain.version or now_s - self._made_at_s < roster.settings.liveness.dead_s:
            return False
        return bool(roster.live(now_s)) and not roster.have_applied(self.index, chain.version, now_s)

    # ---- keyframes

    async def keep_keyframes(self) -> None:
        """Store a keyframe if one is due."""
        with self._keyframe_may_fail():
            await self.keyframes.keep()

    @property
    def has_keyframe(self) -> bool:
        """Whether a keyframe of the newest version, with its residual, is stored."""
        return self.copy.keyframe_version == self.chain.version

    async def store_keyframe(self) -> None:
        """Store a keyframe of the newest version, so that its residual outlives this owner."""
        with self._keyframe_may_fail():
            await self.keyframes.store()

    @contextlib.contextmanager
    def _keyframe_may_fail(self) -> Iterator[None]:
        try:
            yield
        except (FenceError, StorageFullError, FormatError) as error:
            version = self.chain.version
            self.context.log.warning("keyframe_not_stored", fragment=self.index, version=version, reason=str(error))
