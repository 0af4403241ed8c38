"""Take a fragment over: bring it to its log's end, shut its owner before out, and append the entry that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco.errors import BrokerError, FenceError, FormatError, MessageError, WrongEntryError
from diloco.log.stream import Packed
from diloco_syncer.context import Context
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.regions import Regions
from diloco_syncer.replication import OutbidError, Replication

CLAIM_RETRY_S = 0.2  # until the regions are claimed again: the rival that was met has claimed all of them by then


class Takeover:
    """Takes fragments over for one syncer, as long as they are ``wanted``: it is asked with a fragment's number."""

    def __init__(self, context: Context, copies: Copies, wanted: Callable[[int], bool]) -> None:
        self.context, self.copies, self.wanted = context, copies, wanted

    async def take(self, index: int, group: asyncio.TaskGroup) -> FragmentOwner | None:
        """Append the entry that makes this process the fragment's owner; None if that is not wanted any more, or not possible.

        To a log that is closed nothing is appended. It is owned all the same: its owner has to say that it is closed, and to
        notice if a server loses that.
        """
        context = self.context
        claimed = 0  # the highest epoch that another syncer was found to have claimed
        while True:
            copy = await self.copies.take(index)
            if not self.wanted(index):
                return None
            reset = copy.residual is None
            owner = FragmentOwner(context, copy, self.copies.genesis)
            chain = owner.chain
            if context.regions is not None:
                try:
                    if not await self._claim(owner, context.regions, max(claimed, chain.epoch) + 1, group):
                        return None
                except (BrokerError, MessageError) as error:
                    claimed = error.epoch if isinstance(error, OutbidError) else claimed
                    context.log.info("takeover_retried", fragment=index, reason=str(error))
                    await asyncio.sleep(CLAIM_RETRY_S)
                    continue
            if chain.closed and context.regions is None:
                copy.keyframe_version = chain.version  # nor is a keyframe stored
                return owner
            if reset:
                context.log.info("residual_reset", fragment=index, version=chain.version)
            record = owner.marker("takeover", owner.replication.epoch if owner.replication else None)
            try:
                await owner.append(record, b"", [])
            except FenceError as error:
                await owner.stop()
                context.log.info("takeover_retried", fragment=index, reason=str(error))
            except FormatError as error:  # no owner can follow this head
                await owner.stop()
                context.refuse(context.settings.name, error, fragment=index)
                return None
            else:
                context.log.info("taken_over", fragment=index, version=chain.version, epoch=chain.epoch)
                return owner

    async def _claim(self, owner: FragmentOwner, regions: Regions, epoch: int, group: asyncio.TaskGroup) -> bool:
        """Shut the owner before out of a majority of regions, and fold what it left there; False: it is no longer wanted."""
        index, replica, context = owner.index, owner.replica, self.context
        name, chain, wrong = context.settings.name, replica.chain, self.copies.wrong_entries(index)
        replication = Replication(
            regions=regions,
            fragment=index,
            syncer=name,
            genesis_check=self.copies.genesis[1],
            log=context.log,
            epoch=epoch,
            known_epoch=chain.epoch,
        )
        path = await replication.claim(replica.chain, lambda: self.wanted(index))
        if path is None:
            return False
        right: list[Packed] = []
        for packed in path:
            body = await context.store.stream.open(packed)
            if wrong.note(packed.record, packed.entry_hash):
                continue
            try:
                await asyncio.to_thread(replica.judge, packed.record, packed.entry_hash, packed.sequence, body)
            except WrongEntryError as error:
                wrong.add(packed.record, packed.entry_hash)
                context.refuse(packed.record.syncer, error)
            else:
                right.append(packed)
        replication.go_on(chain, right, wrong)
        replication.begin(group)
        owner.replication = replication
        return True
