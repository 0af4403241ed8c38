"""Bringing a failure tape about in a live run, and waiting until the run has recovered from it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from diloco.errors import BrokerError, RunError
from diloco.process import observe
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.service.rundir import RunDirectory
from diloco_ops.broker.admin import SERVER_AWAY
from diloco_ops.chaos import revert, verdict
from diloco_ops.chaos.breaking import Breaker
from diloco_ops.chaos.kinds import Present
from diloco_ops.chaos.watch import POLL_S, ChaosWatch
from diloco_ops.chaos.witness import WatchedRecovery, Witness
from diloco_ops.failures import Failure, FailureTape
from diloco_ops.reading import run_reader

READY_S = 180.0  # learners compile for minutes on a busy machine


@dataclass(frozen=True)
class WorkDone:
    """Learners' work in a while: tokens processed, and lost for good."""

    began_s: float
    took_s: float
    processed: int
    lost: float

    @property
    def tokens_per_s(self) -> float:
        return self.processed / max(1e-9, self.took_s)

    @property
    def lost_fraction(self) -> float | None:
        return round(self.lost / self.processed, 4) if self.processed > 0 else None


@dataclass
class Chaos:
    """One tape on one run."""

    directory: RunDirectory
    present: Present
    tape: FailureTape
    seed: int
    lead_in_s: float
    say: Callable[[str], None]
    log: Logger = field(default_factory=observe.get_logger)
    unaccounted: dict[str, int] = field(default_factory=dict)  # tokens unaccounted for in the end, by learner

    async def run(self) -> dict[str, Any]:
        """Bring the tape about. Return the verdict."""
        path = self.directory.path
        self.clock, self.began_s = asyncio.get_running_loop().time, time.time()
        await revert.revert_all(path)  # what an earlier one left behind
        await self._begun()
        watchdog = revert.start_watchdog(path)
        try:
            async with run_reader.opened(path) as seen:
                wan_control = seen.directory.wan_control
                self.breaker = Breaker(
                    directory=path,
                    run=self.directory.name,
                    transports=seen.transports,
                    wan_control=wan_control,
                    seed=self.seed,
                    log=self.log,
                )
                self.watch = await ChaosWatch.begin(seen)
                async with asyncio.TaskGroup() as group:
                    watching = [group.create_task(work) for work in self.watch.works()]
                    await self.watch.listen()
                    await self.breaker.listen()
                    result = await self._break_and_settle()
                    await end(*watching)
        finally:
            await asyncio.to_thread(watchdog.communicate)
        return result | await verdict.judge(path, self.began_s, self.witness, self.breaker, self.unaccounted)

    @property
    def witness(self) -> Witness:
        """The one that hears of all that is seen of the run."""
        return self.watch.witness

    async def _begun(self) -> None:
        """Wait for a run that has just been started, in all its regions."""
        ends_s = self.clock() + READY_S
        while True:
            try:
                async with run_reader.opened(self.directory.path) as seen:
                    missing = [region for region in self.present.regions if region not in seen.regions]
                if not missing:
                    return
                raise RunError(
                    f"{self.directory.path}: the run has not begun in {', '.join(missing)}, or no server answers there"
                )
            except (RunError, BrokerError):
                if self.clock() > ends_s:
                    raise
            await asyncio.sleep(POLL_S)

    # ---- breaking

    async def _break_and_settle(self) -> dict[str, Any]:
        learners = {name for name in self.present.names if name.startswith("learner-")}
        await self._until(lambda: learners <= self.watch.stepping() or self.witness.finished, READY_S)
        if not learners <= self.watch.stepping():
            raise RunError(f"{self.directory.path}: its learners are not training; chaos needs a run whose learners take steps")
        self.say(f"watching {len(self.present.names)} processes, undisturbed for {self.lead_in_s:g} s")
        usual = await self._pace(asyncio.sleep(self.lead_in_s))
        self.say(f"chaos for {self.tape.duration_s:g} s, {len(self.tape.failures)} failures")
        brought_about: Counter[str] = Counter()
        disturbed = await self._pace(self._play(brought_about))
        self.say("waiting for the last recoveries")
        settled = await self._until(self._is_settled, verdict.SETTLE_S)
        # at this moment: heartbeats go on, and would soon name versions that are followed no more
        self.unaccounted = {name: sum(rest.values()) for name, rest in self.watch.unaccounted().items()}
        return {
            "chaos_s": round(disturbed.took_s, 1),
            "wall_s": round(self.clock() - disturbed.began_s, 1),
            "failures": dict(sorted(brought_about.items())),
            "settled": settled,
            "goodput": round(disturbed.tokens_per_s / usual.tokens_per_s, 4) if usual.tokens_per_s > 0 else None,
            "tokens_lost": round(disturbed.lost),
            "lost_fraction": disturbed.lost_fraction,
            "lost_fraction_undisturbed": usual.lost_fraction,
        }

    def _is_settled(self) -> bool:
        return self.witness.finished or not (self.witness.open or self.watch.unaccounted())

    async def _play(self, brought_about: Counter[str]) -> None:
        began_s = self.clock()
        async with asyncio.TaskGroup() as group:
            for failure in self.tape.failures:
                await self._until(lambda: self.witness.finished, began_s + failure.at_s - self.clock())
                if self.witness.finished:
                    self.log.info("run_over", left=len(self.tape.failures) - sum(brought_about.values()))
                    return
                for target in self.present.meant(failure):
                    brought_about[failure.kind] += 1
                    group.create_task(self._break(failure, target))
            await self._until(lambda: self.witness.finished, began_s + self.tape.duration_s - self.clock())

    async def _break(self, failure: Failure, target: str) -> None:
        recovery = self._recovery(failure, target)
        self.say(f"{failure.at_s:8.1f} s  {_brief(failure, target)}")
        if recovery.fragments or recovery.learner or recovery.status or recovery.version:
            self.witness.expect(recovery)
        try:
            await self.breaker.break_(failure, target)
        except SERVER_AWAY as error:
            self.log.warning("not_brought_about", failure=failure.kind, target=target, reason=str(error) or repr(error))

    def _recovery(self, failure: Failure, target: str) -> WatchedRecovery:
        """Return the signs by which a failure counts as recovered, and the moment from which its recovery is timed.

        A frozen learner cannot step before it goes on, but for a syncer's fragments a standby may do its work meanwhile.
        """
        now_s = self.clock()
        over = WatchedRecovery(failure.kind, target, now_s + failure.duration_s)
        group = target.partition("-")[0]
        if failure.kind in ("corrupt", "duplicate", "full", "nats_restart", "nats_kill", "nats_freeze", "link_cut"):
            over.version, over.region = True, self.present.region_of(target)
            over.server = failure.kind in ("nats_restart", "nats_kill") and over.region is None
        elif group in ("learner", "evaluator"):
            over.learner = target
        elif group == "syncer":
            over.since_s, over.fragments = now_s, self.witness.owned(target)
        else:
            over.since_s, over.status = now_s, True
        return over

    async def _pace(self, meanwhile: Awaitable[None]) -> WorkDone:
        began_s, processed, lost = self.clock(), self.witness.processed(), self.witness.lost()
        await meanwhile
        return WorkDone(began_s, self.clock() - began_s, self.witness.processed() - processed, self.witness.lost() - lost)

    async def _until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the predicate holds. Return whether it does in time."""
        ends_s = self.clock() + timeout_s
        while not predicate():
            if self.clock() >= ends_s:
                return False
            await asyncio.sleep(min(POLL_S, max(0.0, ends_s - self.clock())))
        return True


def _brief(failure: Failure, target: str) -> str:
    values = "".join(f", {name} {value:g}" for name, value in failure.values.items() if not isinstance(value, str))
    return f"{failure.kind} {target}" + (f" for {failure.duration_s:g} s" if failure.duration_s else "") + values
