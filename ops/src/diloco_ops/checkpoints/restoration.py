"""``diloco restore``: a checkpoint of a whole run onto servers that are there, with identities, in as many regions as it has.

The run is prepared at a scratch server on this machine: its log is cut and completed there, its bucket gets the settings. Then
each region's server gets the log, in the order of the regions' names, and the control store gets the bucket, each by one
``STREAM.RESTORE``: no right to write entries is needed. Services begin when the bucket is there, so it comes last.

Each stream is tagged with what it was restored from, and with the sequence and number of its messages then. So a command that
was killed can be typed again: what is there whole stays. What a restore did not make is never deleted, except a log without any
message. Of two restores at once one is refused: a server makes a stream with the tags of one of them, and fills it then.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3

from diloco.errors import BrokerError, RunError
from diloco.nats import streams
from diloco.nats.identity import Identity, of_command
from diloco.nats.opening import checked, shown
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.service.rundir import RunDirectory
from diloco.settings import folders
from diloco.settings.loading import parse_assignments
from diloco.settings.places import has_scheme, parse_place
from diloco.settings.run import RunSettings
from diloco.wire.subjects import Subjects
from diloco_ops.broker import snapshot
from diloco_ops.broker.server import CONNECT_TIMEOUT_S, Server
from diloco_ops.broker.snapshot import StreamSnapshot
from diloco_ops.checkpoints import in_bucket, manifest
from diloco_ops.checkpoints import restore as prepared
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.operate.changing import Say
from diloco_ops.reading import region_logs
from diloco_ops.up import resume
from diloco_report.units import duration, size

LEFT_OUT = "; to leave a region out, set the others with --set 'regions.names=[...]'"
COMMAND = "diloco restore"
SETTLED_S = 1.0  # another restore that has deleted an empty log has made its own by then
TAG, MADE_BY, CONTENT = "diloco_restore", "diloco_restore_by", "diloco_restore_content"  # names in a stream's metadata


def restore(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of a whole run, or its place.")],
    nats_url: Annotated[
        str, typer.Option("--nats", envvar="DILOCO_NATS_URL", help="NATS server; with regions, the control store.")
    ],
    bulk: Annotated[
        list[str] | None, typer.Option("--bulk", metavar="REGION=URL", help="With regions: the server of each; repeatable.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", envvar="DILOCO_IDENTITY", help="An operator's identity file.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE: regions, shards, log, liveness or quarantine; repeatable."),
    ] = None,
) -> None:
    """Restore a checkpoint onto running servers, before the run's services start."""
    asyncio.run(restore_to(source, nats_url, bulk or [], identity, parse_assignments(set_ or [], COMMAND)))


async def restore_to(
    given: str | Path,
    nats_url: str,
    bulk: Sequence[str],
    identity: Path | None,
    overrides: Mapping[str, Any],
    say: Say = print,
) -> None:
    """Restore a checkpoint, which may lie at a place, onto servers.

    Raises:
        SettingsError: a server is missing or unknown, or an override is impossible; nothing was changed.
        RunError: the checkpoint is damaged or of another version; or a server has this run, or gets it from another restore.
        BrokerError: a server does not answer, or refuses. The command can be typed again.
    """
    began_s = time.monotonic()
    if has_scheme(str(given)):
        source, notes = in_bucket.find(parse_place(str(given), COMMAND), RunCheckpoint.check_run)
        for note in notes:
            say(f"note: {note}")
    else:
        source = manifest.load(Path(given))
        source.check_run()
    settings = resume.changed(source, overrides, COMMAND)
    run = source.manifest.run
    urls = region_logs.urls_of(bulk, settings.regions.names, LEFT_OUT)
    own = None if identity is None else of_command(identity, run)
    for name in source.absent():
        say(
            f"note: the state of {name} is not in this checkpoint; restore the copy that its team has, otherwise the "
            "learner begins from the log"
        )
    async with _connected(nats_url, urls, own) as (control, homes):
        tag = blake3(f"{source.manifest.hash} {settings.digest().hex()} {settings.canonical().hex()}".encode()).hexdigest()[:32]
        restoration = _Restoration(run, tag, secrets.token_hex(8), control, homes)
        if await restoration.is_done():
            say(f"run {run}: this checkpoint is restored there already; start its services")
            return
        with folders.temporary() as folder:
            log, bucket = await _prepare(source, settings, Path(folder))
            for place in homes:
                say(f"{place}: {await restoration.put_log(place, log, settings)}")
            await restoration.put_bucket(bucket, settings)
    versions = [cut.version for cut in source.manifest.fragments]
    say(
        f"run {run} is restored at versions {min(versions)} to {max(versions)}, in {duration(time.monotonic() - began_s)}; put "
        "the learners' states back, then start its services"
    )


@asynccontextmanager
async def _connected(
    nats_url: str, urls: Mapping[str, str], identity: Identity | None
) -> AsyncIterator[tuple[NatsTransport, dict[str, NatsTransport]]]:
    """Connect to the control store, and to the server of each region; without regions, to the same server as log's too."""
    async with AsyncExitStack() as stack:

        async def connected(url: str) -> NatsTransport:
            made = await NatsTransport.open(nats_url, url, "restore", observe.get_logger(), CONNECT_TIMEOUT_S, identity)
            stack.push_async_callback(made.close)
            return made

        control = await connected(nats_url)
        homes = {f"region {region}": await connected(url) for region, url in urls.items()}
        yield control, homes or {f"server {shown(checked(nats_url))}": control}


async def _prepare(source: RunCheckpoint, settings: RunSettings, folder: Path) -> tuple[_Packed, _Packed]:
    """Make the run at a scratch server; return its log and its bucket."""
    names = Subjects(source.manifest.run)
    server = Server(folder / "nats")
    server.start()
    try:
        link = await NatsTransport.open(server.url, server.url, "restore", observe.get_logger(), CONNECT_TIMEOUT_S)
        try:
            directory = RunDirectory(folder, names.run, server.url, None, settings)
            await prepared.restore(source, directory, link, [link], None, scratch=True)
            return (
                await _Packed.taken(link, names.log_stream, folder / "log.snapshot"),
                await _Packed.taken(link, f"KV_{names.bucket}", folder / "bucket.snapshot"),
            )
        finally:
            await link.close()
    finally:
        server.kill()  # nothing of it is needed any more


@dataclass(frozen=True)
class _Packed:
    """A stream in a file."""

    snapshot: StreamSnapshot
    file: Path

    @classmethod
    async def taken(cls, link: NatsTransport, stream: str, file: Path) -> _Packed:
        return cls(await snapshot.save(link, stream, file), file)

    @property
    def content(self) -> str:
        """The content of a server's stream that holds just this."""
        return _content(self.snapshot.state)


def _content(state: Mapping[str, Any]) -> str:
    return f"{state.get('last_seq')} {state.get('messages')}"


def _tags(stream: Mapping[str, Any]) -> dict[str, str]:
    found = stream["config"].get("metadata")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _Restoration:
    """One restore: where it puts what, and what its streams are told apart by."""

    run: str
    tag: str  # the same for all restores of one checkpoint with the same settings
    nonce: str  # of this one
    control: NatsTransport
    homes: Mapping[str, NatsTransport]  # by how a place is called, in the order in which they get the log

    async def is_done(self) -> bool:
        """Whether an earlier restore of this checkpoint has put everything, and nothing was written since.

        Raises:
            RunError: a server has this run, and not from such a restore. All are named.
        """
        bucket = await streams.info(self.control, f"KV_{Subjects(self.run).bucket}")
        if bucket is not None and self._is_whole(bucket):
            return True
        faults = [] if bucket is None else [f"the control store has its bucket, made {bucket.get('created')}"]
        for place, home in self.homes.items():
            log = await streams.info(home, self._log)
            if log is not None and not self._is_whole(log) and not self._may_replace(log):
                faults.append(f"{place} has its log, with {log['state'].get('messages')} messages")
        if faults:
            raise RunError(
                f"run {self.run!r} is there already, and a restore replaces nothing: {'; '.join(faults)}; use empty "
                f"servers, or delete its data for good: diloco runs remove {self.run}"
            )
        return False

    @property
    def _log(self) -> str:
        return Subjects(self.run).log_stream

    async def put_log(self, place: str, packed: _Packed, settings: RunSettings) -> str:
        """Put the log at a region's server; return what was done.

        Raises:
            RunError: another restore was first.
        """
        home = self.homes[place]
        there = await streams.info(home, self._log)
        if there is not None and self._is_whole(there):
            return f"the log is there already, {size(int(there['state'].get('bytes', 0)))}"
        if there is not None:
            if not self._may_replace(there):
                raise self._other(place)
            await streams.delete(home, self._log)
        await self._put(home, packed, settings.log.replicas, place)
        return f"log of {size(packed.snapshot.size_bytes)} restored"

    async def put_bucket(self, packed: _Packed, settings: RunSettings) -> None:
        """Put the bucket at the control store: services begin now.

        Raises:
            RunError: another restore was first, or has replaced a log meanwhile.
        """
        for place, home in self.homes.items():
            log = await streams.info(home, self._log)
            if log is None or not self._is_whole(log):
                raise self._other(place)
        replicas = settings.regions.control_replicas if settings.regions.names else settings.log.replicas
        await self._put(self.control, packed, replicas, "the control store")

    async def _put(self, link: NatsTransport, packed: _Packed, replicas: int, place: str) -> None:
        tags = {TAG: self.tag, MADE_BY: self.nonce, CONTENT: packed.content}
        stream = str(packed.snapshot.config["name"])
        tagged = replace(packed.snapshot, config=dict(packed.snapshot.config) | {"metadata": tags})
        try:
            await snapshot.restore(link, tagged, packed.file, replicas=replicas)
        except RunError:
            raise self._other(place) from None
        except BrokerError as error:
            await asyncio.sleep(SETTLED_S)
            other = await streams.info(link, stream)
            if other is not None and _tags(other).get(MADE_BY) != self.nonce:
                raise self._other(place) from None
            raise BrokerError(f"{place}: {error}; run the command again: it keeps what has been restored") from None
        made = await streams.info(link, stream)
        if made is None or _tags(made).get(MADE_BY) != self.nonce:
            raise self._other(place)

    def _other(self, place: str) -> RunError:
        return RunError(
            f"{place}: another restore of run {self.run!r} is in progress there, and this one changed nothing; wait for "
            f"its end, then see: diloco runs show {self.run}"
        )

    def _is_whole(self, stream: Mapping[str, Any]) -> bool:
        """Whether a stream is what a restore of this checkpoint made, and nothing was written to it since."""
        tags = _tags(stream)
        return tags.get(TAG) == self.tag and tags.get(CONTENT) == _content(stream["state"])

    def _may_replace(self, stream: Mapping[str, Any]) -> bool:
        """Whether nothing is lost with a log: it is empty, or less than a restore of this checkpoint put there."""
        if not stream["state"].get("messages"):
            return True
        tags, last = _tags(stream), stream["state"].get("last_seq")
        put, _, _ = tags.get(CONTENT, "").partition(" ")
        return tags.get(TAG) == self.tag and put.isdecimal() and isinstance(last, int) and last < int(put)
