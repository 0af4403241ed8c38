"""Keep one syncer's knowledge of the owners table true: read it when it may have changed, set it when it has to change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from diloco.control import tables
from diloco.core.run import tape as events
from diloco.core.syncer.ownership import Ownership, OwnersTable
from diloco.errors import AppendUncertainError, FenceError, StorageFullError
from diloco.process.retry import Complaint
from diloco.process.tape import Recorder
from diloco_syncer.context import Context, clock_s


class OwnersRegistry:
    """The owners table as it is stored, on behalf of ``ownership``."""

    def __init__(
        self,
        context: Context,
        ownership: Ownership,
        tape: Recorder,
        changed: Callable[[], None],
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        """Call ``changed`` before another syncer's table is adopted, ``announce`` after this one has set a table."""
        self.context, self.ownership, self.tape = context, ownership, tape
        self.changed, self.announce = changed, announce
        self._table = tables.owners(context.run, len(context.map.fragments))
        self._complaint = Complaint(context.log)

    async def settle(self) -> None:
        """Read the table where it may have changed, and set another one where that is needed."""
        try:
            await self._settle()
        except (AppendUncertainError, StorageFullError) as error:
            self._complaint.warn("owners_not_settled", reason=str(error))
        else:
            self._complaint.over()

    async def _settle(self) -> None:
        ownership = self.ownership
        if ownership.must_read(clock_s()):
            await self._read()
        regions = self.context.regions
        if regions is not None and ownership.table is None and not regions.begun:
            return  # that there is a table says that regions may have been counted
        planned = ownership.propose(clock_s())
        if planned is None:
            return
        try:
            revision = await self._table.write(planned, ownership.revision)
        except FenceError:
            await self._read()
            return
        self._adopt(planned, revision)
        self.context.log.info("owners_set", revision=revision, holders=planned.holders)
        await self.announce()

    async def _read(self) -> None:
        table, revision = await self._table.read()
        if revision != self.ownership.revision:
            self.changed()
        self._adopt(table, revision)

    def _adopt(self, table: OwnersTable | None, revision: int) -> None:
        """Go by a table from now on."""
        if table is not None and revision != self.ownership.revision:
            name = self.context.settings.name
            mine = tuple(index for index, owner in enumerate(table.owners) if owner == name)
            self.tape.record(events.Owners(int(self.context.transport.wall_s() * 1000), revision, mine))
            self.tape.flush()
        self.ownership.read(table, revision, clock_s())
