"""Report refused offers to their learners: in the run's bucket, under a key of each learner's."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

import msgspec

from diloco.control.admission import admitted_incarnation
from diloco.control.creation import KnownRun
from diloco.control.tables import BucketTable
from diloco.core.learner.refusals import Refusal, report
from diloco.errors import BrokerError
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.wire.refusals import Refusals, refusals_key, unpack_refusals

REPORT_EVERY_S = 1.0  # the reports of one learner
RETRY_S = 60.0  # after a report that the server did not take: each attempt costs it and its log some lines
MAX_WAITING = 64  # refusals of one learner that wait to be reported


class RefusalReporter:
    """Reports what :meth:`note` is given, as long as :meth:`work` runs.

    A report is a courtesy: a server that does not take it, such as one whose permissions are of an earlier version, holds
    nothing else up.
    """

    def __init__(self, run: KnownRun, log: Logger) -> None:
        self._run, self._log = run, log
        self._waiting: defaultdict[str, list[Refusal]] = defaultdict(list)
        self._news = asyncio.Event()

    def note(self, refusal: Refusal) -> None:
        """Have a refusal reported. An ``incarnation`` of 0 stands for the one that is admitted."""
        waiting = self._waiting[refusal.learner]
        waiting.append(refusal)
        del waiting[:-MAX_WAITING]
        self._news.set()

    async def work(self) -> None:
        """Write reports until cancelled."""
        complaint = Complaint(self._log)
        while True:
            await self._news.wait()
            self._news.clear()
            for learner in list(self._waiting):
                refusals = self._waiting.pop(learner)
                try:
                    await self._report(learner, refusals)
                    complaint.over()
                except BrokerError as error:  # these are not reported: the next refusals are
                    complaint.warn("refusals_not_reported", learner=learner, reason=str(error))
                    await asyncio.sleep(RETRY_S)
            await asyncio.sleep(REPORT_EVERY_S)

    async def _report(self, learner: str, refusals: list[Refusal]) -> None:
        admitted = await admitted_incarnation(self._run, learner)
        if admitted is None:
            return  # no learner reads the key, and anyone could fill the bucket by inventing names
        refusals = [replace(each, incarnation=each.incarnation or admitted) for each in refusals]

        def unpack(stored: bytes | None) -> Refusals | None:
            return unpack_refusals(stored, learner)

        table = BucketTable(self._run.registry, refusals_key(learner), unpack, msgspec.msgpack.encode)
        await table.change(lambda known: report(known, refusals))
