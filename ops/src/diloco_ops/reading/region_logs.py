"""The logs of a run's regions side by side, where commands need more than one: which is furthest, and what all hold together.

Where there is no writer any more, what is committed is told as the next owner of each fragment would tell it
(:mod:`diloco.core.log.quorum`): of the last entries that a majority of regions holds the best one has all that was ever
committed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.control.genesis import decided_genesis
from diloco.core.log.quorum import NOTICE_EVERY, LogHead, best, majority
from diloco.errors import BrokerError, MessageError, RunError, SettingsError
from diloco.log.log import Log
from diloco.log.stream import Packed
from diloco.nats import streams
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.service.rundir import RunDirectory
from diloco.settings.validation import nearest
from diloco.wire.entries import Genesis
from diloco_ops.broker import snapshot
from diloco_ops.broker.server import CONNECT_TIMEOUT_S
from diloco_ops.up.embedded import server_name

ABSENT = "no server answers, and its files are not here"


@dataclass(frozen=True)
class Begun:
    """Regions' logs that begin as the run does, and why the others do not count."""

    logs: dict[str, Log]
    faults: dict[str, str]  # by region
    genesis: tuple[Genesis, bytes] | None  # of any of the logs; None: there is none

    def demand_majority(self, path: Path, regions: Sequence[str]) -> tuple[Genesis, bytes]:
        """Refuse to go on with the run in ``path`` where fewer of its regions than a majority hold its log.

        Raises:
            RunError: each region that does not is named, with its server's folder, and why.
        """
        needed = majority(len(regions))
        if self.genesis is None or len(self.logs) < needed:
            missing = [region for region in regions if region not in self.logs]
            faults = "; ".join(f"{path / server_name(region)}: {self.faults.get(region, ABSENT)}" for region in missing)
            raise RunError(
                f"{path}: the servers of {len(self.logs)} of {len(regions)} regions hold this run's log, and {needed} are "
                f"needed to know what is committed ({faults}); put these folders back as they were, or go on from an earlier "
                "checkpoint: diloco up --resume CHECKPOINT --run-dir NEW"
            )
        return self.genesis


async def begun(logs: Mapping[str, Log]) -> Begun:
    """Determine which logs begin as the run does: a server may be empty, or be another run's."""
    found: dict[str, Log] = {}
    faults: dict[str, str] = {}
    first: tuple[Genesis, bytes] | None = None
    for region, log in logs.items():
        try:
            genesis = await log.reader.genesis()
        except BrokerError:
            faults[region] = f"its server has nothing of run {log.subjects.run!r}"
        except (MessageError, RunError) as error:
            faults[region] = f"its log is another run's: {error}"
        else:
            if genesis is None:
                faults[region] = f"its server lacks the beginning of run {log.subjects.run!r}"
            else:
                found[region], first = log, first or genesis
    return Begun(found, faults, first)


async def furthest(logs: Mapping[str, Log]) -> str:
    """Return the region that knows of the most committed versions; of equal ones the first."""

    async def versions(log: Log) -> int:
        notices = await asyncio.gather(*(log.region.furthest_notice(fragment.index) for fragment in log.map.fragments))
        return sum(notice.version for notice in notices if notice is not None)

    known = dict(zip(logs, await asyncio.gather(*map(versions, logs.values())), strict=True))
    return max(known, key=known.__getitem__)


async def settle(logs: Mapping[str, Log], home: str, genesis_check: bytes) -> None:
    """Bring one region's log to everything that may be committed, as each fragment's next owner would.

    ``logs`` are those of a majority of regions, and none of them may be written to meanwhile.

    Raises:
        RunError: another region's log misses what the one at home needs.
    """
    for fragment in logs[home].map.fragments:
        await _settle_fragment(logs, home, fragment.index, genesis_check)


async def _settle_fragment(logs: Mapping[str, Log], home: str, fragment: int, genesis_check: bytes) -> None:
    own = logs[home].region
    notices = {region: await log.region.furthest_notice(fragment) for region, log in logs.items()}
    known_epoch = max([notice.epoch for notice in notices.values() if notice is not None], default=0)
    found = {region: await log.region.log_end(fragment, genesis_check, known_epoch) for region, log in logs.items()}
    log_heads: dict[str, LogHead] = {region: end.last for region, end in found.items()}
    chosen, noticed = best(log_heads, home), notices[home]
    last = log_heads[chosen]
    if last.entry_hash == (noticed.entry_hash if noticed else genesis_check):
        return
    if chosen == home:
        await own.notice(fragment, last.version, last.epoch, last.entry_hash, last.sequence)
        return
    source, fence = logs[chosen].region, found[home].sequence
    start = await source.before(fragment, noticed.version) if noticed else 0
    path: list[Packed] | None = None
    for after in (log_heads[home].entry_hash, noticed.entry_hash if noticed else genesis_check):
        path = path or await source.path(fragment, start, last.sequence, after, last.entry_hash)
    if path is None:
        installed = await source.install_snapshot(fragment, own, fence)
        if installed is None:
            raise RunError(
                f"fragment {fragment}: the log of region {chosen} has no keyframe from which region {home} could continue"
            )
        keyframe, _ = installed
        fence, after = keyframe.entry_sequence, keyframe.entry_hash
        path = await source.path(fragment, 0, last.sequence, after, last.entry_hash) or []
    for number, packed in enumerate(path, 1):
        fence = await own.append_packed(packed, fence)
        if number % NOTICE_EVERY == 0 or number == len(path):
            await own.notice(fragment, packed.record.version, packed.record.epoch, packed.entry_hash, fence)


async def give_back(directory: RunDirectory, url: str, region_urls: Mapping[str, str], log: Logger) -> None:
    """Give each region whose server holds nothing of a run that has begun all that the others hold.

    A server that was lost counts for no majority of what it had held, so it must have that again before anybody appends: no
    service may be running.

    Raises:
        RunError: too few regions hold the run's log to know what is committed.
        BrokerError: a server does not answer.
    """
    names = directory.settings.regions.names
    async with AsyncExitStack() as stack:
        transports: dict[str, NatsTransport] = {}
        for region in names:
            transport = await NatsTransport.open(url, region_urls[region], "up", log, CONNECT_TIMEOUT_S)
            stack.push_async_callback(transport.close)
            transports[region] = transport
        try:
            run = await creation.open_run(transports[names[0]], directory.name, directory.settings)
        except BrokerError:
            return  # it has not been created yet
        if await run.registry.get("map") is None or await decided_genesis(run) is None:
            return
        logs = {region: await log_of(transport, run) for region, transport in transports.items()}
        found = await begun(logs)
        if not found.faults:
            return
        genesis_check = found.demand_majority(directory.path, names)[1]
        home = await furthest(found.logs)
        await settle(found.logs, home, genesis_check)
        with tempfile.TemporaryDirectory(prefix="give-back-", dir=directory.path) as folder:
            file, stream = Path(folder) / "log.snapshot", logs[home].subjects.log_stream
            taken = await snapshot.save(transports[home], stream, file)
            for region, fault in found.faults.items():
                if await streams.exists(transports[region], stream):
                    await streams.delete(transports[region], stream)
                await snapshot.restore(transports[region], taken, file, replicas=directory.settings.log.replicas)
                log.warning("region_given_log", other_region=region, source=home, reason=fault)


async def log_of(transport: NatsTransport, run: KnownRun) -> Log:
    """Return the log that a transport reaches, of a run that has a fragment map."""
    return Log(transport, run.name, run.identity, await creation.find_map(run), run.created)


def urls_of(bulk: Sequence[str], regions: Sequence[str], advice: str = "") -> dict[str, str]:
    """Return the server of each region that ``--bulk`` gives, in the order of their names; none for a run without regions.

    Raises:
        SettingsError: one is no ``REGION=URL``, or a region is missing, unknown, or named twice.
    """
    urls: dict[str, str] = {}
    for each in bulk:
        region, equals, url = each.partition("=")
        if not equals or not url:
            raise SettingsError(f"--bulk {each}: expected REGION=URL, such as us=tls://us.example.org:4222")
        if region not in regions:
            there = f"its regions are {', '.join(regions)}" if regions else "it has no regions, so --nats is enough"
            raise SettingsError(f"--bulk {each}: no region {region!r} of this run{nearest(region, regions)}; {there}")
        if region in urls:
            raise SettingsError(f"--bulk {each}: region {region!r} already has {urls[region]}")
        urls[region] = url
    missing = [region for region in regions if region not in urls]
    if missing:
        raise SettingsError(
            f"--bulk: the servers of {', '.join(missing)} are missing: give each with --bulk REGION=URL{advice}"
        )
    return dict(sorted(urls.items()))
