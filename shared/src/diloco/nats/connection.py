"""A service's connections to NATS: one for control, one for bulk, so that tensors never delay a sign of life."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import nats.aio.client
import nats.aio.transport
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from diloco.core.bandwidth import Moved
from diloco.errors import AppendUncertainError, BrokerError, SettingsError
from diloco.identity import Identity
from diloco.nkey import NatsKey
from diloco.observe import Logger
from diloco.wire import subjects

# nats-py reads into a buffer of 32 KiB; 1 MiB doubles the receive rate
READ_BUFFER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 2.0
JETSTREAM_TIMEOUT_S = 2.0  # a cluster that has no leader yet does not answer
OLDEST_SERVER = (2, 14)  # the first one that takes batches which are acknowledged on their way (ADR-50, fast ingest)
FLUSH_TIMEOUT_S = 5
RETRY_S = 0.5
PING_S = 2.0  # a frozen server is noticed at the third ping
POLL_S = 0.05
COMPLAIN_EVERY_S = 10.0
TURNED_AWAY_S = 10.0  # whom a server does not know any more for so long is not to come back
STALL_S = 1.0  # a longer pause in the middle of a message is a cut: a slow link goes on, packet by packet


def malloc_environment() -> dict[str, str]:
    """Settings of glibc's allocator for a service's environment.

    They keep large buffers from going back to the kernel between messages and between steps, which costs more than what is
    done with them: a step of the default model takes half as long. Arenas of other threads could hold no more than 64 MiB.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
        "MALLOC_TOP_PAD_": str(1 << 20),
    }


class _Parser(Parser):  # type: ignore[misc]  # nats-py is not typed
    """Sees all that comes in on a connection, be it a part of a message, and how fast messages do.

    What comes while a message is there in part was on its way since the part before it: the server sends whole messages.
    Between two messages nobody knows whether there was anything to send.
    """

    def __init__(self, client: _Client) -> None:
        super().__init__(client)
        self.incoming = Moved()
        self._heard_s = -math.inf

    async def parse(self, data: bytes = b"") -> None:
        now_s = asyncio.get_running_loop().time()
        pause_s, self._heard_s = now_s - self._heard_s, now_s
        if self.buf and pause_s < STALL_S:
            self.incoming = Moved(self.incoming.bytes + len(data), self.incoming.busy_s + pause_s)
        self.nc.heard()
        await super().parse(data)


class _Client(Client):  # type: ignore[misc]  # nats-py is not typed
    """A client to which whatever comes shows that the server is there, as a pong does.

    Over a thin link a pong waits behind all that the server had to send before, for longer than a silent server is waited
    for; and who connects anew has it sent again, without end.
    """

    def __init__(self, identity: Identity | None) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._identity = identity
        self._public_nkey = None if identity is None else identity.public_key

    @property
    def incoming(self) -> Moved:
        """What came in in the middle of messages, and the time that it took."""
        return self._ps.incoming

    def heard(self) -> None:
        """Something came."""
        self._pings_outstanding = 0

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # before anything is answered: somebody on the way may have taken the offer of TLS out
        if self._identity is not None and initial_connection and not info.get("tls_required"):
            raise nats.errors.Error(
                "the server offers no TLS, which an identity is never used without: add a tls block to its configuration"
            )
        await super()._process_info(info, initial_connection=initial_connection)


class _Protocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # asyncio complains about anything else over TLS


class _Transport(nats.aio.transport.TcpTransport):  # type: ignore[misc]  # nats-py is not typed
    """As nats-py's, but what comes in over TLS is read by as much at once as without it, not by 64 KiB."""

    async def connect_tls(self, uri: str, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float) -> None:
        loop, plain = asyncio.get_running_loop(), self._bare_io_writer.transport
        protocol = _Protocol(reader := asyncio.StreamReader(limit=buffer_size))
        async with asyncio.timeout(connect_timeout):
            secure: Any = await loop.start_tls(plain, protocol, ssl_context, server_hostname=uri)
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(secure, protocol, reader, loop)


class Link:
    """Two connections that are remade for ever. Made by :meth:`open`."""

    def __init__(self, control: Client, bulk: Client, name: str, identity: Identity | None, *, far: bool = False) -> None:
        """``far``: over links that may be thin, where a message may be on its way for long."""
        self.control, self.bulk, self.identity, self.far = control, bulk, identity, far
        self.name = name if identity is None else identity.name  # what answers to it are addressed to
        self.fences_heads_only = False  # found out by :func:`diloco.nats.append.append`
        self.replicas: dict[str, int] = {}  # by stream, found out by :mod:`diloco.nats.streams`

    @classmethod
    async def open(
        cls,
        control_url: str,
        bulk_url: str,
        name: str,
        log: Logger,
        give_up_after_s: float | None = None,
        identity: Identity | None = None,
    ) -> Self:
        """Connect, waiting for a server that is not there yet: for ever, or ``give_up_after_s``.

        A URL may be several of one cluster, with commas between them: when a server is gone, the next one is used. With an
        ``identity`` both sides must show a certificate of its authority, and no byte goes out in plain text.

        Raises:
            SettingsError: a URL is none of NATS, or the identity is damaged.
            BrokerError: no server in time, one that turns us away, is too old or without JetStream; the URL is named.
        """
        control_urls, bulk_urls = checked(control_url), checked(bulk_url)
        async with contextlib.AsyncExitStack() as opened:
            control = await connect(control_urls, f"{name}-control", log, give_up_after_s, identity)
            opened.push_async_callback(_close, control)
            bulk = await connect(bulk_urls, f"{name}-bulk", log, give_up_after_s, identity)
            opened.push_async_callback(_close, bulk)
            for client, urls in ((control, control_urls), (bulk, bulk_urls)):
                await _check_server(client, urls, log, give_up_after_s)
            opened.pop_all()
        return cls(control, bulk, name, identity)

    @classmethod
    async def open_bulk(cls, url: str, name: str, log: Logger, identity: Identity | None = None) -> Self:
        """Connect to another region's server, whose streams alone are of interest: one connection, which serves for both.

        A server that cannot be used, too, is that region's own trouble: it is waited for until it is another one.

        Raises:
            SettingsError: a URL is none of NATS, or the identity is damaged.
            BrokerError: the server turns us away; the URL is named.
        """
        urls = checked(url)
        async with contextlib.AsyncExitStack() as opened:
            bulk = await connect(urls, f"{name}-bulk", log, None, identity)
            opened.push_async_callback(_close, bulk)
            await _check_server(bulk, urls, log, None, wait_for_another=True)
            opened.pop_all()
        return cls(bulk, bulk, name, identity, far=True)

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
        """What came in on the bulk connection in the middle of messages, and the time that it took."""
        incoming: Moved = self.bulk.incoming
        return incoming

    async def close(self) -> None:
        """Send what is buffered, and close."""
        for client in self._clients():
            await _close(client)

    def _clients(self) -> list[Client]:
        return [self.control] if self.control is self.bulk else [self.control, self.bulk]


def checked(urls: str) -> list[str]:
    """One URL, or several of one cluster with commas between them; with their schemes, as the client takes them.

    Raises:
        SettingsError: one of them is none.
    """
    return [_checked_one(url.strip()) for url in urls.split(",")]


def _checked_one(url: str) -> str:
    full = url if "://" in url else f"nats://{url}"
    try:
        parts = urlsplit(full)
        named = parts.port != 0 and re.fullmatch(r"[\w.:-]+", parts.hostname or "") is not None
        # nobody would read what stands behind the port, and the client takes "none" for no name
        plain = parts.hostname != "none" and not (parts.path.strip("/") or parts.query or parts.fragment)
        valid = parts.scheme in ("nats", "tls") and named and plain
    except ValueError:
        valid = False
    if not valid:
        shown = re.sub(r"^(\w+://)?.*@", r"\1", url, flags=re.DOTALL)  # without credentials
        raise SettingsError(f"NATS URL {shown!r}: not the address of a server; expected nats://HOST:PORT or tls://HOST:PORT")
    return full


async def _check_server(
    client: Client, urls: list[str], log: Logger, give_up_after_s: float | None, *, wait_for_another: bool = False
) -> None:
    """Find out whether a server can hold a run's streams; one that only does not answer yet is waited for.

    ``wait_for_another``: one that cannot is waited for too, as it may be started again with what it lacks.

    Raises:
        BrokerError: it cannot, or does not answer in time.
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
    """Why the server cannot hold a run's streams, and whether that is only that it does not answer yet; None: it can."""
    version = _version(client)
    if version is not None and version < OLDEST_SERVER:
        found, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_SERVER))
        return f"nats-server {found} is too old: at least {oldest} is needed", False
    try:
        await client.jetstream(timeout=JETSTREAM_TIMEOUT_S).account_info()
    except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError, nats.js.errors.NotFoundError):
        if client._server_info.get("jetstream"):  # its configuration has it, so the server, or its cluster, is still starting
            return "JetStream is not there yet, or not for the account of this identity", True
        return "JetStream is not enabled; start nats-server with -js, or put `jetstream {}` into its configuration", False
    except (nats.errors.Error, TimeoutError) as error:
        return f"JetStream does not answer: {str(error) or type(error).__name__}", True
    return None


def _version(client: Client) -> tuple[int, ...] | None:
    """The server's version, if it has said one that can be read."""
    version = client.connected_server_version
    try:
        numbers = version.major, version.minor, version.patch
    except ValueError:
        return None
    return numbers if any(numbers) else None


async def connect(urls: list[str], name: str, log: Logger, give_up_after_s: float | None, identity: Identity | None) -> Client:
    nats.aio.client.DEFAULT_BUFFER_SIZE, nats.aio.client.TcpTransport = READ_BUFFER_BYTES, _Transport
    client = _Client(identity)
    clock = asyncio.get_running_loop().time
    began_s = complained_s = clock()
    reason, turned_away_s = "no answer; start a server there, or give another URL", math.inf

    async def on_error(error: Exception) -> None:
        nonlocal complained_s, reason, turned_away_s
        said = _said(error, identity)
        if connecting.done():
            if _turns_away(error):
                if turned_away_s == math.inf:
                    turned_away_s = clock()
                    log.error("nats_turns_away", connection=name, url=shown(urls), reason=said)
                elif clock() - turned_away_s >= TURNED_AWAY_S:
                    await client.close()
                return
            # after the end nobody asks, while it is being remade every attempt fails, and a lost server is told as a disconnect
            expected = client.is_closed or client.is_reconnecting or isinstance(error, nats.errors.UnexpectedEOF)
            if not expected and "permissions violation" in said.lower():  # nothing else tells: what was asked for has no answer
                log.error("permission_denied", connection=name, reason=said)
            elif not expected:
                log.warning("nats_error", connection=name, reason=said)
            return
        reason = said
        if _turns_away(error):
            raise error  # waiting would not help
        if clock() - complained_s >= COMPLAIN_EVERY_S or complained_s == began_s:
            complained_s = clock()
            log.warning("waiting_for_nats", url=shown(urls), waited_s=round(clock() - began_s, 1), reason=reason)

    async def on_disconnect() -> None:
        if not client.is_closed:  # else it was us
            log.warning("nats_disconnected", connection=name, url=shown(urls))

    async def on_reconnect() -> None:
        nonlocal turned_away_s
        turned_away_s = math.inf
        log.info("nats_reconnected", connection=name, url=shown(urls))

    # without a limit of attempts the client also waits by itself for a server that is not there yet
    connecting = asyncio.ensure_future(
        client.connect(
            urls,
            name=name,
            connect_timeout=CONNECT_TIMEOUT_S,
            flush_timeout=FLUSH_TIMEOUT_S,
            ping_interval=PING_S,
            max_outstanding_pings=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RETRY_S,
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=on_reconnect,
            **_credentials(identity),
        )
    )
    try:
        await asyncio.wait({connecting}, timeout=give_up_after_s)
        if connecting.done() and not connecting.cancelled():
            connecting.result()
            return client
    except (nats.errors.Error, OSError, ValueError) as error:
        reason = _said(error, identity)
    finally:
        if not client.is_connected:
            connecting.cancel()
            await asyncio.wait({connecting})
            await client.close()
    raise BrokerError(f"NATS: no connection to {shown(urls)} (tried for {clock() - began_s:.0f} s): {reason}")


def _turns_away(error: Exception) -> bool:
    return "authorization" in str(error).lower()


def _said(error: Exception, identity: Identity | None) -> str:
    """What went wrong, in words that say whose certificate or name it is about."""
    text = str(error) or type(error).__name__
    if _turns_away(error):
        who = "who we are: set an identity" if identity is None else f"the identity {identity.path}, or it is revoked there"
        return f"{text}: the server does not know {who}"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "the server wants TLS: set an identity" if identity is None else "make it with 'diloco keys add server'"
        return f"the server's certificate is not accepted: {error.verify_message.rstrip('.')}; {hint}"
    if isinstance(error, ssl.SSLError):
        whose = "ours" if identity is None else f"that of {identity.path}"
        return f"TLS fails, the server may not accept our certificate ({whose}): {error.reason or text}"
    if isinstance(error, ConnectionRefusedError | TimeoutError):
        return f"{text}; start a server there, or give another URL"
    return text


def _credentials(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {}
    return {"tls": identity.tls, "signature_cb": NatsKey.from_seed(identity.seed).sign, "inbox_prefix": identity.inbox}


async def ask(client: Client, name: str, subject: str, data: bytes, timeout_s: float) -> bytes | None:
    """The first answer to a message of ours; None if there is none in time, or nobody listens.

    It comes on a subject of the run that only ``name`` may listen to: whoever answers need not be allowed to write to inboxes,
    where the server's own answers are waited for.
    """
    answer_subject = subjects.answer_to(subject, name, uuid.uuid4().hex)
    try:
        subscription = await client.subscribe(answer_subject, max_msgs=1)
        try:
            await client.publish(subject, data, reply=answer_subject)
            answer = await subscription.next_msg(timeout_s)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
    except (nats.errors.Error, TimeoutError):
        return None
    nobody = answer.headers is not None and answer.headers.get("Status") == "503"
    return None if nobody else bytes(answer.data)


async def subscribe(client: Client, subject: str, heard: Callable[[Any], Awaitable[None]]) -> Subscription:
    """A subscription that the server knows of when this returns, or learns of when it is reached again."""
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

    Without it the client refuses a large message at once, and who tries again until it is stored would never let the event
    loop remake the connection.

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


def shown(urls: list[str]) -> str:
    """URLs without their credentials."""
    shown = []
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        shown.append(urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, "", "", "")))
    return ",".join(shown)
