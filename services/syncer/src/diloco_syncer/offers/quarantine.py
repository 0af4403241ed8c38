"""State what this syncer finds of outliers, for all members, under its own key of the run's bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from msgspec import structs

from diloco.control.changes import ChangesFollower
from diloco.control.quarantines import write_outliers
from diloco.core.run import quarantine
from diloco.core.run.quarantine import Verdict
from diloco.core.syncer.outliers import JudgedOffer, counting
from diloco.errors import AppendUncertainError, BrokerError
from diloco.process.retry import Complaint, until_available
from diloco.wire.quarantines import MAX_OUTLIERS, OutlierStatement, SeenOutlier
from diloco.wire.subjects import Subjects
from diloco_syncer.context import Context, wait

WRITE_EVERY_S = 1.0  # a cycle is longer, and a learner's outliers in several fragments are stated together
RETRY_S = 60.0  # after a statement that the server did not take: each attempt costs it and its log some lines
LOOK_S = 5.0  # at what is judged here, and at what is over


class OutlierRecord:
    """One syncer's statement; ``judged_here`` returns the fragments whose offers are judged here.

    A server that does not take it, such as one whose permissions are of an earlier version, holds nothing up: outliers are left
    out of merges all the same, and no learner is quarantined.
    """

    def __init__(
        self, context: Context, follower: ChangesFollower, incarnation: int, judged_here: Callable[[], Collection[int]]
    ) -> None:
        self.context, self.follower, self._judged_here = context, follower, judged_here
        self._statement = OutlierStatement(
            context.settings.name, incarnation, counting(context.map.fragments), fragments=[], outliers=[]
        )
        self._news = asyncio.Event()
        self._written: OutlierStatement | None = None

    def note(self, fragment: int, version: int, judged: Iterable[JudgedOffer]) -> None:
        """Take in what was found of offers of a fragment that were to be merged into ``version``."""
        change, verdicts = self.context.run.now.number, list[Verdict]()
        for each in judged:
            if each.counts:
                seen = SeenOutlier(
                    learner=each.learner,
                    incarnation=each.incarnation,
                    fragment=fragment,
                    version=version,
                    norm=min(each.norm, 1e300),
                    threshold=min(each.threshold, 1e300),
                    change=change,
                    is_over=False,
                )
                verdicts.append(Verdict(each.learner, seen))
            elif not each.is_outlier:
                verdicts.append(Verdict(each.learner, None))
        known = self._statement
        changed = quarantine.judge(known, fragment, verdicts, self._quarantined())
        self._statement = structs.replace(changed, outliers=changed.outliers[-MAX_OUTLIERS:])
        if self._statement != known:
            self._news.set()

    def look(self) -> None:
        """Look soon at what is judged here, and at what is over."""
        self._news.set()

    async def work(self) -> None:
        """Write the statement when it is another one, until cancelled."""
        await until_available(self.follower.look, self.context.log)
        before = self.follower.statements.get(self.context.settings.name)
        if before is not None:  # of an earlier process of this name
            self._statement = structs.replace(self._statement, fragments=before.fragments, outliers=before.outliers)
        complaint = Complaint(self.context.log)
        while True:
            try:
                await self._settle()
                complaint.over()
            except AppendUncertainError:
                pass  # the server is away
            except BrokerError as error:
                complaint.warn("outliers_not_stated", reason=str(error))
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(WRITE_EVERY_S)
            await wait(self._news, LOOK_S)
            self._news.clear()

    async def _settle(self) -> None:
        run, settings = self.context.run, self.context.run.in_force.quarantine
        fragments = sorted(self._judged_here())
        if fragments != self._statement.fragments:
            await self.follower.look()
            self._statement = quarantine.take_over(self._statement, fragments, self.follower.statements)
        known = self.follower.statements
        self._statement = quarantine.settle(self._statement, self._quarantined(), run.now.readmitted, known)
        if not settings.factor:
            self._statement = structs.replace(self._statement, outliers=[])
        statement = self._statement
        if statement == self._written or (self._written is None and not settings.factor):
            return
        await write_outliers(run, statement)
        self._written = statement
        before = self._quarantined()
        await self.follower.look()
        if self._quarantined() != before:
            await self.context.transport.publish(Subjects(run.name).changed, b"")

    def _quarantined(self) -> frozenset[str]:
        return frozenset(self.context.run.now.outlying.quarantined)
