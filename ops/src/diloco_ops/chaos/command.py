"""``diloco chaos DIR``: draws or reads a failure tape, brings it about in a live run, and ends with a verdict."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from diloco.control.gate import HeartbeatGate
from diloco.control.hearing import hear
from diloco.errors import BrokerError, DilocoError, RunError, SettingsError
from diloco.log.log import Log
from diloco.log.stream import pass_over
from diloco.nats.transport import NatsTransport
from diloco.process import files, logs, observe
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.transport import Heard, Transport
from diloco.wire.control import Heartbeat, ShardHeartbeat
from diloco.wire.subjects import Subjects
from diloco_ops import failures, run_reader, verify
from diloco_ops.broker.admin import SERVER_AWAY
from diloco_ops.chaos import revert
from diloco_ops.chaos.breaking import KINDS, Breaker, sources
from diloco_ops.chaos.refusals import Refusals
from diloco_ops.chaos.witness import Recovery, Witness
from diloco_ops.failures import Failure, Tape
from diloco_report.units import share

T = TypeVar("T")

READY_S = 180.0  # learners compile for minutes on a busy machine
SETTLE_S = 60.0  # many times the longest recovery
POLL_S = 0.1  # the resolution of recovery times
STATUS_TIMEOUT_S = 0.5  # a coordinator on this machine answers in milliseconds
GONE_S = 10.0  # without any process of the run: a launcher restarts each within seconds
CHECK_ATTEMPTS = 5
CHECK_RETRY_S = 3.0  # a run that ends takes its server with it, in about so long


def chaos(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run that `diloco up` is running.")],
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    for_: Annotated[float, typer.Option("--for", min=0.1, help="Seconds of chaos.")] = 60.0,
    kinds: Annotated[str | None, typer.Option(help=f"Only these, comma separated: {', '.join(KINDS)}.")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Failures a second.")] = 0.2,
    tape: Annotated[Path | None, typer.Option(help="Bring about this failure tape instead of drawing one.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write the failure tape to this file.")] = None,
    lead_in: Annotated[float, typer.Option(min=0, help="Seconds before it that tell the undisturbed pace.")] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Break a live run on purpose, see that it heals, and tell the cost. Exit code 1 if any invariant is broken."""
    run = rundir.load(directory.resolve())
    if run.finished:
        raise RunError(f"{directory}: this run is finished; chaos needs one that `diloco up` is running")
    names = sorted(file.stem for file in (run.path / "services").glob("*.pid"))
    services = [name for name in names if name != "nats"]
    if not services or not run.nats_url:
        raise RunError(f"{directory}: no service of this run is running; begin it with: diloco up --run-dir {directory}")
    chosen = _kinds(kinds, embedded="nats" in names)
    if tape is None:
        drawn = failures.draw(seed, sources(chosen, services), for_, rate, regular=True)
        left_out: dict[str, int] = {}
    else:
        drawn, left_out = failures.only(_read_tape(tape), chosen)
    if record is not None:
        text = failures.encode(drawn)
        files.replace_text(record, text)
    observe.configure("chaos", run.name, file=run.path / "logs" / "chaos.jsonl")
    verdict = asyncio.run(_interruptible(Chaos(run, names, drawn, seed, lead_in, _silent if json_ else _say)))
    verdict |= {"seed": seed, "left_out": left_out}
    if json_:
        print(json.dumps(verdict))
    else:
        print(describe(verdict))
    return 0 if verdict["holds"] else 1


def _kinds(text: str | None, *, embedded: bool) -> list[str]:
    if text is None:
        return [name for name, kind in KINDS.items() if embedded or not kind.embedded]
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in KINDS:
            raise SettingsError(f"--kinds {name}: no such kind of failure; there are {', '.join(KINDS)}")
        if KINDS[name].embedded and not embedded:
            raise SettingsError(f"--kinds {name}: only where the server is the run's own, not with `diloco up --nats`")
    return chosen


def _read_tape(path: Path) -> Tape:
    try:
        with path.open(errors="replace") as lines:
            bounded = iter(lambda: lines.readline(failures.MAX_LINE_BYTES + 1), "")
            return failures.decode(bounded, str(path))
    except OSError as error:
        raise SettingsError(f"--tape {path}: cannot be read: {error.strerror}") from None


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Print nothing: with ``--json`` only the verdict is printed."""


async def _interruptible(chaos: Chaos) -> dict[str, Any]:
    """Run it; SIGTERM ends it as Ctrl-C does, with every fault reverted."""
    task = asyncio.ensure_future(chaos.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@dataclass(frozen=True)
class Pace:
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
    names: list[str]
    tape: Tape
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
                transport = seen.log.transport
                assert isinstance(transport, NatsTransport)
                self.breaker = Breaker(path, self.directory.name, transport, self.names, self.seed, self.log)
                self.witness = await _witness(seen)
                async with asyncio.TaskGroup() as group:
                    gate = HeartbeatGate(seen.run, seen.map, None, self._hear_member, self._hear_member)
                    works = (self._follow(seen.log), self._ask(transport), self._see_services(), gate.work())
                    watching = [group.create_task(work) for work in works]
                    await self._listen(transport, gate, seen.run.identity)
                    result = await self._break_and_settle()
                    await end(*watching)
        finally:
            await asyncio.to_thread(_release, watchdog)
        return await self._judge(result)

    async def _begun(self) -> None:
        """Wait for a run that has just been started."""
        ends_s = self.clock() + READY_S
        while True:
            try:
                async with run_reader.opened(self.directory.path):
                    return
            except (RunError, BrokerError):
                if self.clock() > ends_s:
                    raise
            await asyncio.sleep(POLL_S)

    # ---- watching

    async def _listen(self, transport: Transport, gate: HeartbeatGate, identity: bytes) -> None:
        subjects = Subjects(self.directory.name)

        async def hear_shard(heartbeat: ShardHeartbeat, message: Heard) -> None:
            self.witness.shard(heartbeat)

        await transport.subscribe(subjects.heartbeat(), gate.hear)
        await hear(transport, subjects.shard(), ShardHeartbeat, identity, hear_shard, refused=None)
        await self.breaker.listen()

    async def _hear_member(self, heartbeat: Heartbeat) -> None:
        self.witness.heartbeat(heartbeat, self.clock())

    async def _follow(self, log: Log) -> None:
        start = 1 + min(chain.sequence for chain in self.witness.chains)
        async for head in log.entries.heads(pass_over, start):
            if head.sequence > self.witness.chains[head.record.fragment].sequence:
                self.witness.entry(head.record, head.entry_hash, head.sequence, self.clock())

    async def _ask(self, transport: Transport) -> None:
        """Ask the coordinator for its status while it is expected to come back; and see whether the server is there."""
        while True:
            asked_s = self.clock()
            if not transport.connected:
                self.witness.away(asked_s)
            if any(recovery.status for recovery in self.witness.open):
                answer = await transport.request(Subjects(self.directory.name).status, b"", STATUS_TIMEOUT_S)
                if answer is not None:
                    self.witness.answered(asked_s, self.clock())
            await asyncio.sleep(POLL_S)

    async def _see_services(self) -> None:
        """Look for the run's processes, as long as it has not ended by itself.

        Raises:
            RunError: none is there any more: its launcher gave up.
        """
        path, seen_s = self.directory.path, self.clock()
        while self.clock() < seen_s + GONE_S:
            if self.witness.finished or any((path / "services").glob("*.pid")):
                seen_s = self.clock()
            await asyncio.sleep(POLL_S)
        raise RunError(f"{path}: the run has ended before its tokens were used up; its logs say why: diloco logs {path}")

    # ---- breaking

    async def _break_and_settle(self) -> dict[str, Any]:
        learners = {name for name in self.names if name.startswith("learner-")}
        await self._until(lambda: learners <= self._stepping() or self.witness.finished, READY_S)
        if not learners <= self._stepping():
            raise RunError(f"{self.directory.path}: its learners are not stepping; chaos needs a run in full swing")
        self.say(f"watching {len(self.names)} processes, undisturbed for {self.lead_in_s:g} s")
        usual = await self._pace(asyncio.sleep(self.lead_in_s))
        self.say(f"chaos for {self.tape.duration_s:g} s, {len(self.tape.failures)} failures")
        brought_about: Counter[str] = Counter()
        disturbed = await self._pace(self._play(brought_about))
        self.say("waiting for the last recoveries")
        settled = await self._until(lambda: self.witness.finished or not (self.witness.open or self._unaccounted()), SETTLE_S)
        # at this moment: heartbeats go on, and would soon name versions that are followed no more
        self.unaccounted = {name: sum(rest.values()) for name, rest in self._unaccounted().items()}
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

    async def _play(self, brought_about: Counter[str]) -> None:
        began_s = self.clock()
        async with asyncio.TaskGroup() as group:
            for failure in self.tape.failures:
                await self._until(lambda: self.witness.finished, began_s + failure.at_s - self.clock())
                if self.witness.finished:
                    self.log.info("run_over", left=len(self.tape.failures) - sum(brought_about.values()))
                    return
                for target in self.breaker.meant(failure):
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

    def _recovery(self, failure: Failure, target: str) -> Recovery:
        """Return the signs by which a failure counts as recovered, and the moment from which its recovery is timed.

        A frozen learner cannot step before it goes on, but for a syncer's fragments a standby may do its work meanwhile.
        """
        now_s = self.clock()
        over = Recovery(failure.kind, target, now_s + failure.duration_s)
        group = target.partition("-")[0]
        if failure.kind in ("corrupt", "duplicate", "full", "nats_restart", "nats_kill", "nats_freeze"):
            over.version, over.server = True, failure.kind in ("nats_restart", "nats_kill")
        elif group in ("learner", "evaluator"):
            over.learner = target
        elif group == "syncer":
            over.since_s, over.fragments = now_s, self.witness.owned(target)
        else:
            over.since_s, over.status = now_s, True
        return over

    # ---- judging

    async def _judge(self, result: dict[str, Any]) -> dict[str, Any]:
        witness = self.witness
        lost, changed = witness.compare(await _retried(lambda: _read_again(self.directory.path)))
        checked = await _retried(lambda: verify.check(self.directory.path))
        violations = [f"{check.name}: {check.found}" for check in checked.checks if check.state == "fails"]
        for count, what in ((lost, "lost"), (witness.doubled, "doubled"), (changed, "changed")):
            if count:
                violations.append(f"{count} versions {what}")
        refused = Refusals.read(logs.merge(self.directory.path), self.began_s, self.breaker.damaged, self.breaker.repeated)
        violations += refused.honest
        if not witness.finished:
            violations += [f"{name}: {tokens} tokens unaccounted for" for name, tokens in self.unaccounted.items()]
            violations += [f"{r.target}: not recovered from {r.kind} within {SETTLE_S:g} s" for r in witness.open]
        return result | {
            "holds": not violations,
            "violations": violations,
            "versions": {"seen": len(witness.versions), "lost": lost, "doubled": witness.doubled, "changed": changed},
            "takeovers": witness.takeovers,
            "refused": {"honest": len(refused.honest), "made": refused.made},
            "tokens_unaccounted": sum(map(abs, self.unaccounted.values())),
            "recovery": witness.recovery_times(),
            "checks": {check.name: check.state for check in checked.checks},
        }

    # ---- small things

    def _stepping(self) -> set[str]:
        return {heartbeat.learner for heartbeat in self.witness.learners() if heartbeat.state == "stepping"}

    def _unaccounted(self) -> dict[str, dict[int, int]]:
        """Return unaccounted tokens by learner and fragment; a learner whose versions are not known yet counts, with none."""
        found = {heartbeat.learner: self.witness.unaccounted(heartbeat) for heartbeat in self.witness.learners()}
        return {name: {} if rest is None else rest for name, rest in found.items() if rest is None or rest}

    async def _pace(self, meanwhile: Awaitable[None]) -> Pace:
        began_s, processed, lost = self.clock(), self.witness.processed(), self.witness.lost()
        await meanwhile
        return Pace(began_s, self.clock() - began_s, self.witness.processed() - processed, self.witness.lost() - lost)

    async def _until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the predicate holds. Return whether it does in time."""
        ends_s = self.clock() + timeout_s
        while not predicate():
            if self.clock() >= ends_s:
                return False
            await asyncio.sleep(min(POLL_S, max(0.0, ends_s - self.clock())))
        return True


async def _witness(seen: run_reader.RunReader) -> Witness:
    loaded = [await seen.log.reader.load(f.index, seen.genesis, seen.genesis_check) for f in seen.map.fragments]
    return Witness([each.replica.chain for each in loaded], [fragment.size for fragment in seen.map.fragments])


async def _read_again(path: Path) -> dict[tuple[int, int], set[bytes]]:
    """Return the entry hashes that the log holds now, by fragment and the version that they make."""
    stored: dict[tuple[int, int], set[bytes]] = {}
    async with run_reader.opened(path) as seen:
        stop = max([await seen.log.reader.end_sequence(fragment.index) for fragment in seen.map.fragments])
        if stop:
            async for head in seen.log.entries.heads(pass_over, stop_sequence=stop):
                if head.record.makes_version:
                    stored.setdefault((head.record.fragment, head.record.version), set()).add(head.entry_hash)
    return stored


async def _retried(work: Callable[[], Awaitable[T]]) -> T:
    """Try again where the run ends, and its server with it, in the middle of a check."""
    for attempt in range(CHECK_ATTEMPTS):
        try:
            return await work()
        except (DilocoError, OSError, *SERVER_AWAY):
            if attempt == CHECK_ATTEMPTS - 1:
                raise
            await asyncio.sleep(CHECK_RETRY_S)
    raise AssertionError("unreachable")


def _release(watchdog: subprocess.Popen[bytes]) -> None:
    watchdog.communicate()


def _brief(failure: Failure, target: str) -> str:
    values = "".join(f", {name} {value:g}" for name, value in failure.values.items() if not isinstance(value, str))
    return f"{failure.kind} {target}" + (f" for {failure.duration_s:g} s" if failure.duration_s else "") + values


def describe(verdict: dict[str, Any]) -> str:
    """Return the verdict as text."""
    refused = verdict["refused"]
    lines = [
        "",
        f"{sum(verdict['failures'].values())} failures in {verdict['wall_s']:g} s: "
        + ", ".join(f"{count} {kind}" for kind, count in verdict["failures"].items()),
        "versions: " + ", ".join(f"{count} {what}" for what, count in verdict["versions"].items()),
        f"tokens: {verdict['tokens_unaccounted']} unaccounted for, {verdict['tokens_lost']} lost "
        f"({share(verdict['lost_fraction'], 1)} of those processed; undisturbed "
        f"{share(verdict['lost_fraction_undisturbed'], 1)})",
        f"goodput of the learners: {share(verdict['goodput'], 1)} of their undisturbed pace",
        f"takeovers: {verdict['takeovers']}",
        f"refused: {refused['honest']} honest messages; what was damaged or repeated here {refused['made']} times",
        "recovery after                count   median      max",
    ]
    for what, times in verdict["recovery"].items():
        lines.append(f"  {what:<26} {times['count']:>6.0f} {times['median_s']:>6.2f} s {times['max_s']:>6.2f} s")
    if verdict["left_out"]:
        lines.append(f"left out of the tape: {', '.join(f'{n} {kind}' for kind, n in verdict['left_out'].items())}")
    unchecked = [name for name, state in verdict["checks"].items() if state == "unchecked"]
    if unchecked:
        lines.append(f"not checked: {', '.join(unchecked)} (diloco verify says why)")
    lines += [f"BROKEN: {violation}" for violation in verdict["violations"]]
    lines.append("verdict: all invariants hold" if verdict["holds"] else "verdict: broken")
    return "\n".join(lines)
