"""The log that a learner's process follows: all fragments, or those that it carries.

A server's crash may undo entries that were read. So the process looks now and then whether the log still has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from diloco.control.creation import KnownRun
from diloco.core.run.leases import LOOKS_A_LEASE
from diloco.errors import BrokerError, MachineError
from diloco.log.follower import FollowedEntry, LogCopy, LogFollower, Wrong
from diloco.log.log import Log
from diloco.log.stream import RefusedEntry
from diloco.process.observe import Counted, Logger
from diloco.process.tasks import end
from diloco.wire.entries import Genesis, Record
from diloco.wire.subjects import fragment_of

Tell = Callable[[LogCopy, Record | None, bool], None]


class Following:
    """Loads fragments and follows them, for the learner (or evaluator) ``name``.

    ``tell`` is called with a copy after each entry, and the record that made it: None if it was loaded again. The flag says
    that this was because the log has lost entries.
    """

    def __init__(
        self,
        store: Log,
        run: KnownRun,
        name: str,
        fragments: Sequence[int],
        refused: Counted,
        log: Logger,
        *,
        others: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tell: Tell,
    ) -> None:
        """Begin without fragments; ``others`` is the number of the run's other learners."""
        self.store, self.run, self.name, self.fragments, self.refused, self.log = store, run, name, fragments, refused, log
        self.others, self._spawn, self._tell = others, spawn, tell
        self.folded: Callable[[Record, float], None] | None = None  # told of each entry, and when it had come
        self._follower: LogFollower
        self._task: asyncio.Task[None]

    async def load(self, genesis: tuple[Genesis, bytes]) -> list[LogCopy]:
        """Load the fragments to the log's end; return them in order."""
        self._follower = LogFollower(self.store, genesis, self._refuse, self.log, in_place=False)
        return await self._follower.load_all(self.fragments)

    def begin(self) -> None:
        """Begin to follow what was loaded, and to look whether the log still holds it."""
        self._task = self._spawn(self._follow())
        self._spawn(self._audit())

    async def holds(self) -> bool:
        """Whether the log still has what was read last.

        Raises:
            AppendUncertainError: the server is silent.
        """
        return await self._follower.holds()

    async def _audit(self) -> None:
        while True:
            await asyncio.sleep(self.run.in_force.liveness.lease_s / LOOKS_A_LEASE)
            try:
                if not await self.holds():
                    await self._begin_again()
            except BrokerError as error:  # the server is away
                self.log.debug("server_unknown", reason=str(error))

    async def _begin_again(self) -> None:
        """Load and follow the log again, which has lost what was read last without its reader noticing."""
        self.log.error("log_rewound", reason="the newest entry that was read is gone")
        await end(self._task)
        self._follower.rewind()
        self._task = self._spawn(self._follow())

    async def _follow(self) -> None:
        async for event in self._follower.follow(self.fragments):
            if isinstance(event, FollowedEntry):
                if self.folded is not None:
                    self.folded(event.entry.record, event.came_s)
                self._tell(event.copy, event.entry.record, False)
            elif not isinstance(event, Wrong):  # else the versions that were told are right
                self._tell(event.copy, None, event.rewound)

    def _refuse(self, refusal: RefusedEntry) -> None:
        """Note an entry that is passed over.

        Raises:
            MachineError: at least half of the other learners have folded what seems wrong here.
        """
        error, fragment = refusal.error, fragment_of(refusal.subject)
        self.refused.note(refusal.sender, type(error).__name__, reason=str(error), sequence=refusal.sequence)
        wrong = self._follower.wrong.get(fragment) if fragment is not None else None
        if wrong is None or wrong.newest is None:
            return
        vouchers = sorted(wrong.vouchers - {self.name})
        if 2 * len(vouchers) >= max(1, self.others):
            raise MachineError(
                f"run {self.run.name!r}, fragment {fragment}: version {wrong.newest.version} gives another state on this "
                f"machine than at {', '.join(vouchers)}: test this machine's memory, and compare its libraries with theirs"
            )
