"""A service's connections to NATS: one for control, one for bulk, so that tensors never delay a heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Self

import nats.errors
import nats.js.errors
from nats.aio.subscription import Subscription

from diloco.core.syncer.bandwidth import Moved
from diloco.errors import AppendUncertainError, BrokerError
from diloco.nats.client import Client
from diloco.nats.consumers import ConsumerNames
from diloco.nats.identity import Identity
from diloco.nats.opening import COMPLAIN_EVERY_S, FLUSH_TIMEOUT_S, RETRY_S, Opening, checked, shown
from diloco.nats.server_list import ListWatch
from diloco.process.observe import Logger
from diloco.process.tasks import end, heeding
from diloco.wire import subjects

JETSTREAM_TIMEOUT_S = 2.0  # a cluster that has no leader yet does not answer
OLDEST_SERVER = (2, 14)  # the first one that takes batches which are acknowledged on their way (ADR-50, fast ingest)
POLL_S = 0.05  # two looks at a connection that is being remade


def malloc_environment() -> dict[str, str]:
    """Return the settings of glibc's allocator for a service's environment.

    With them large buffers do not go back to the kernel between messages and between steps, which costs more than the work on
    them: a step of the default model takes half as long. Arenas of other threads could hold no more than 64 MiB.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
        "MALLOC_TOP_PAD_": str(1 << 20),
    }


class NatsLink:
    """Two connections that are remade for ever. Made by :meth:`open`."""

    def __init__(
        self, control: Client, bulk: Client, name: str, identity: Identity | None, *, process: int = 0, far: bool = False
    ) -> None:
        """Take two open connections; ``far``: over links that may be thin, where a message may take long."""
        self.process = process
        self.control, self.bulk, self.identity, self.far = control, bulk, identity, far
        self.name = name if identity is None else identity.name  # in the subjects of answers to it
        self.fences_heads_only = False  # found out by :func:`diloco.nats.append.append`
        self.replicas: dict[str, int] = {}  # by stream, found out by :mod:`diloco.nats.streams`
        self._consumer_names: dict[str, ConsumerNames] = {}  # by stream
        self.lists: dict[str, ListWatch] = {}  # of the servers, by connection; none without an identity
        self._watching: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        control_url: str,
        bulk_url: str,
        name: str,
        log: Logger,
        give_up_after_s: float | None = None,
        identity: Identity | None = None,
        process: int = 0,
    ) -> Self:
        """Connect, waiting for a server that is not there yet: for ever, or ``give_up_after_s``.

        A URL may be several of one cluster, with commas between them: when a server is gone, the next one is used. With an
        ``identity`` both sides must show a certificate of its authority, and no byte goes out in plain text. ``process``: which
        one this is of those that share the identity.

        Raises:
            SettingsError: a URL is none of NATS, or the identity is damaged.
            BrokerError: no server in time, one that turns us away, is too old or without JetStream; the URL is named.
        """
        control_urls, bulk_urls = checked(control_url), checked(bulk_url)
        async with contextlib.AsyncExitStack() as opened:
            control = await Opening(control_urls, f"{name}-control", log, identity).open(give_up_after_s)
            opened.push_async_callback(_close, control)
            bulk = await Opening(bulk_urls, f"{name}-bulk", log, identity).open(give_up_after_s)
            opened.push_async_callback(_close, bulk)
            for client, urls in ((control, control_urls), (bulk, bulk_urls)):
                await _check_server(client, urls, log, give_up_after_s)
            opened.pop_all()
        link = cls(control, bulk, name, identity, process=process)
        link._watch_lists(log)
        return link

    @classmethod
    async def open_bulk(cls, url: str, name: str, log: Logger, identity: Identity | None = None) -> Self:
        """Connect to another region's server, to use its streams alone: one connection serves for both.

        A server that cannot be used is that region's own trouble: this waits until another one takes its place. One that does
        not know the identity may not have its new list yet, and is waited for, too: now, and if it refuses the identity later.

        Raises:
            SettingsError: a URL is none of NATS, or the identity is damaged.
        """
        urls = checked(url)
        async with contextlib.AsyncExitStack() as opened:
            bulk = await Opening(urls, f"{name}-bulk", log, identity, waits_when_refused=True).open(None)
            opened.push_async_callback(_close, bulk)
            await _check_server(bulk, urls, log, None, wait_for_another=True)
            opened.pop_all()
        link = cls(bulk, bulk, name, identity, far=True)
        link._watch_lists(log)
        return link

    def _watch_lists(self, log: Logger) -> None:
        if self.identity is None:
            return
        clients = {"bulk": self.bulk} if self.control is self.bulk else {"control": self.control, "bulk": self.bulk}
        name = self.identity.name
        self.lists = {connection: ListWatch(client, name, connection, log) for connection, client in clients.items()}
        self._watching = [asyncio.create_task(watch.watch()) for watch in self.lists.values()]

    @property
    def bytes_in(self) -> int:
        """Payload bytes received on all connections."""
        return sum(int(client.stats["in_bytes"]) for client in self._clients())

    @property
    def bytes_out(self) -> int:
        """Payload bytes sent on all connections."""
        return sum(int(client.stats["out_bytes"]) for client in self._clients())

    @property
    def incoming(self) -> Moved:
        """Bytes that came in on the bulk connection in the middle of messages, and the time that they took."""
        incoming: Moved = self.bulk.incoming
        return incoming

    def consumer_names(self, stream: str) -> ConsumerNames:
        """Return the names for this process's consumers of a stream."""
        if stream not in self._consumer_names:
            reader = subjects.reader(self.name, self.identity.public_key if self.identity else None)
            names = subjects.consumers(reader, self.process)
            self._consumer_names[stream] = ConsumerNames(self.bulk, names, stream)
        return self._consumer_names[stream]

    async def close(self) -> None:
        """End this link's tasks, send what is buffered, and close."""
        await end(*self._watching)
        for names in self._consumer_names.values():
            await names.close()
        for client in self._clients():
            await _close(client)

    def _clients(self) -> list[Client]:
        return [self.control] if self.control is self.bulk else [self.control, self.bulk]


async def _check_server(
    client: Client, urls: list[str], log: Logger, give_up_after_s: float | None, *, wait_for_another: bool = False
) -> None:
    """Find out whether a server can hold a run's streams; wait for one that does not answer yet.

    ``wait_for_another``: wait for an unfit server too, since it may be started again with another configuration.

    Raises:
        BrokerError: it is unfit, or does not answer in time.
    """
    clock = asyncio.get_running_loop().time
    began_s, complained_s, before = clock(), -math.inf, ""
    while True:
        unfit = await _unfit(client)
        if unfit is None:
            return
        reason, silent = unfit
        late = give_up_after_s is not None and clock() - began_s >= give_up_after_s
        if client.is_closed or late or not (silent or wait_for_another):
            raise BrokerError(f"NATS at {shown(urls)}: {reason}")
        if reason != before or clock() - complained_s >= COMPLAIN_EVERY_S:
            complained_s, before = clock(), reason
            log.warning("waiting_for_nats", url=shown(urls), waited_s=round(clock() - began_s, 1), reason=reason)
        await asyncio.sleep(RETRY_S)


async def _unfit(client: Client) -> tuple[str, bool] | None:
    """Return why the server cannot hold a run's streams, and whether it may yet answer; None if it can."""
    version = _version(client)
    if version is not None and version < OLDEST_SERVER:
        found, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_SERVER))
        return f"nats-server {found} is too old: at least {oldest} is needed", False
    try:
        await client.jetstream(timeout=JETSTREAM_TIMEOUT_S).account_info()
    except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError, nats.js.errors.NotFoundError):
        if client.has_jetstream:  # so the server, or its cluster, is still starting
            return "JetStream has not started yet, or is not enabled for the account of this identity", True
        return "JetStream is not enabled; start nats-server with -js, or put `jetstream {}` into its configuration", False
    except (nats.errors.Error, TimeoutError) as error:
        return f"JetStream does not answer: {str(error) or type(error).__name__}", True
    return None


def _version(client: Client) -> tuple[int, ...] | None:
    """Return the server's version, or None if it states none that can be read."""
    version = client.connected_server_version
    try:
        numbers = version.major, version.minor, version.patch
    except ValueError:
        return None
    return numbers if any(numbers) else None


async def ask(client: Client, name: str, subject: str, data: bytes, timeout_s: float) -> bytes | None:
    """Return the first answer to a message, or None if there is none in time, or no process listens.

    It comes on a subject of the run that only ``name`` may listen to. So members that answer need no permission to write to
    inboxes, where the server's own answers arrive.
    """
    answer_subject = subjects.answer_to(subject, name, uuid.uuid4().hex)
    try:
        subscription = await client.subscribe(answer_subject, max_msgs=1)
        try:
            await client.publish(subject, data, reply=answer_subject)
            answer = await heeding(subscription.next_msg(timeout_s))
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
    except (nats.errors.Error, TimeoutError):
        return None
    unserved = answer.headers is not None and answer.headers.get("Status") == "503"
    return None if unserved else bytes(answer.data)


async def subscribe(client: Client, subject: str, heard: Callable[[Any], Awaitable[None]]) -> Subscription:
    """Subscribe; when this returns the server knows of it, or it will learn of it when it is reached again."""
    subscription = await client.subscribe(subject, cb=heard)
    with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
        for _ in range(2):  # nats-py writes a ping at once, ahead of what waits to be written
            await client.flush(FLUSH_TIMEOUT_S)
    return subscription


async def _close(client: Client) -> None:
    with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
        await client.flush(1)
    with contextlib.suppress(nats.errors.Error, OSError):
        await client.close()


def check_open(client: Client) -> None:
    """Find out whether a connection is still there, or is being remade.

    Raises:
        BrokerError: it was closed for good: by us, or because the server turned us away.
    """
    if client.is_closed:
        cause = f" ({client.last_error})" if client.last_error else ""
        raise BrokerError(f"NATS: the connection is closed{cause}")


async def wait_connected(client: Client, timeout_s: float, what: str) -> None:
    """Wait while a connection is being remade.

    Without it the client refuses a large message at once, and a caller that tries again until it is stored would never let the
    event loop remake the connection.

    Raises:
        BrokerError: it was closed for good.
        AppendUncertainError: it is not back in time.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while not client.is_connected:
        check_open(client)
        if clock() - began_s >= timeout_s:
            raise AppendUncertainError(f"{what}: NATS: no connection for {timeout_s:g} s")
        await asyncio.sleep(POLL_S)
