"""Every service follows what is changed of its run: it reads the list when the bell rings, and every few seconds anyway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from diloco import membership
from diloco.core.changes import Action, Changes, Effective, described, in_force
from diloco.errors import BrokerError, MessageError, SettingsError
from diloco.membership import Run
from diloco.observe import Logger
from diloco.transport import Heard, Transport
from diloco.wire.subjects import Subjects

LOOK_S = 5.0
GAP_S = 0.2  # between two looks, however often it rings


class Follower:
    """Keeps ``run.now`` what the list says. ``changed`` is called after each list that is new."""

    def __init__(self, transport: Transport, run: Run, log: Logger, changed: Callable[[], None]) -> None:
        self.transport, self.run, self.log, self.changed = transport, run, log, changed
        self.known = Changes(run.identity)
        self._rung = asyncio.Event()
        self._complaint = ""
        self._reading = asyncio.Lock()  # what was read first is not to be taken in last

    async def look(self) -> None:
        """Read the list. One that makes no sense here changes nothing, and is complained about once.

        Raises:
            AppendUncertainError: the server is silent.
        """
        async with self._reading:
            await self._look()

    async def _look(self) -> None:
        try:
            listed, _ = await membership.changes(self.run)
            effective = in_force(self.run.settings, listed.records)
        except (MessageError, SettingsError) as error:
            if str(error) != self._complaint:
                self.log.error("changes_refused", reason=str(error))
            self._complaint = str(error)
            return
        self._complaint = ""
        if listed == self.known:
            return
        if not listed.extends(self.known):
            self.log.error("changes_rewound", known=len(self.known.records), stored=len(listed.records))
        before, self.known = self.known, listed
        self.run.now = effective
        for change in listed.records[len(before.records) :]:
            event, values = described(change)
            self.log.info(event, change=change.number, author=change.author, reason=change.reason, **values)
        self.changed()

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        await self.transport.subscribe(Subjects(self.run.name).changed, self._hear)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._rung.wait()
            self._rung.clear()
            try:
                await self.look()
            except BrokerError as error:  # the server is away: what was known is in force
                self.log.debug("changes_unknown", reason=str(error))
            await asyncio.sleep(GAP_S)

    async def _hear(self, message: Heard) -> None:
        self._rung.set()


async def append(
    transport: Transport, run: Run, decide: Callable[[Effective], Sequence[Action]], *, author: str, reason: str = ""
) -> Changes:
    """Append changes as :func:`diloco.membership.append_changes` does, and ring the bell."""
    listed = await membership.append_changes(run, decide, at_s=transport.wall_s(), author=author, reason=reason)
    await transport.publish(Subjects(run.name).changed, b"")
    return listed
