"""The changes of a run: read, appended, and followed by every service, when the bell rings and every few seconds anyway.

What syncers state of outliers (:mod:`diloco.control.quarantines`) is followed with them: both say who is excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from diloco.control.creation import KnownRun
from diloco.control.quarantines import StatementReader
from diloco.control.tables import BucketTable
from diloco.core.run.changes import Action, Change, Changes, Effective, described, unpack
from diloco.core.run.quarantine import Outlying, Statements
from diloco.errors import BrokerError, MessageError, SettingsError
from diloco.process.observe import Logger
from diloco.transport import Heard, Transport
from diloco.wire.subjects import Subjects

LOOK_S = 5.0  # for a bell that was not heard: an operator waits no longer for a change to be in force
GAP_S = 0.2  # between two looks, however often it rings


class ChangesFollower:
    """Keeps ``run.now`` up to date with the list and with quarantines; calls ``changed`` when either is another one."""

    def __init__(self, transport: Transport, run: KnownRun, log: Logger, changed: Callable[[], None]) -> None:
        self.transport, self.run, self.log, self.changed = transport, run, log, changed
        self.known = Changes(run.identity)
        self.statements: Statements = {}  # of outliers, as they were read last
        self._reader = StatementReader(run)
        self._told = Outlying()  # that was logged last
        self._rung = asyncio.Event()
        self._complaint = ""
        self._reading = asyncio.Lock()  # a list that was read first must not be taken in last

    async def look(self) -> None:
        """Read the list and the quarantines; a list that makes no sense here changes nothing, and is logged once.

        Raises:
            AppendUncertainError: the server is silent.
        """
        async with self._reading:
            await self._look()
            if self.run.in_force.quarantine.factor:
                await self._look_for_outliers()

    async def _look_for_outliers(self) -> None:
        statements, owners = await self._reader.read()
        self.statements = statements
        if any(seen.change > self.run.now.number for statement in statements.values() for seen in statement.outliers):
            await self._look()  # their writer knew of a change that was made since the list was read
        self.run.judge(statements, owners)
        before, now = self._told, self.run.now.outlying
        self._told = now
        for learner in now.quarantined.keys() - before.quarantined.keys():
            seen = now.quarantined[learner]
            values = {"fragment": seen.largest.fragment, "norm": seen.largest.norm, "threshold": seen.largest.threshold}
            author = ", ".join(seen.syncers)
            self.log.warning("learner_quarantined", learner=learner, author=author, reason=seen.label, **values)
        for learner in before.quarantined.keys() - now.quarantined.keys():
            self.log.info("quarantine_over", learner=learner)
        for learner in now.suspected.keys() - before.suspected.keys():
            self.log.warning("outliers_suspected", learner=learner, reason=now.suspected[learner].label)
        if (now.quarantined.keys(), now.suspected.keys()) != (before.quarantined.keys(), before.suspected.keys()):
            self.changed()

    async def _look(self) -> None:
        try:
            listed = await read_changes(self.run)
            self.run.adopt(listed.records)
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
            except BrokerError as error:  # the server is away: the known list is in force
                self.log.debug("changes_unknown", reason=str(error))
            await asyncio.sleep(GAP_S)

    async def _hear(self, message: Heard) -> None:
        self._rung.set()


def table(run: KnownRun) -> BucketTable[Changes]:
    """Return the list of changes made since the run was created.

    Reading it raises FormatError or ChainError where the key holds no such list.
    """
    return BucketTable(
        run.registry,
        "changes",
        lambda stored: Changes(run.identity) if stored is None else unpack(stored, run.identity),
        Changes.pack,
    )


async def read_changes(run: KnownRun) -> Changes:
    """Read the list of changes.

    Raises:
        FormatError, ChainError: the key holds no such list.
    """
    listed, _ = await table(run).read()
    return listed


async def append_changes(
    transport: Transport, run: KnownRun, decide: Callable[[Effective], Sequence[Action]], *, author: str, reason: str = ""
) -> list[Change]:
    """Append the actions that ``decide`` gives for the changes in force, all or none, and ring; return the new changes.

    ``decide`` is asked again if another process appended meanwhile.

    Raises:
        RunError, SettingsError: the list has no room for them, or they lead to impossible settings.
        FormatError, ChainError: the key holds no such list.
    """
    at_s, made = transport.wall_s(), list[Change]()

    def extended(listed: Changes) -> Changes | None:
        made.clear()
        effective = run.after(listed.records)
        for action in decide(effective):
            listed = listed.then(action, at_s=at_s, author=author, reason=reason)
            made.append(listed.records[-1])
            effective = effective.after(made[-1])
        return listed if made else None

    await table(run).change(extended)
    await transport.publish(Subjects(run.name).changed, b"")
    return made
