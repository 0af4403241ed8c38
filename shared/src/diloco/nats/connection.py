"""A service's connections to NATS: one for control, one for bulk, so that tensors never delay a sign of life."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit, urlunsplit

import nats.aio.client
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from diloco.errors import BrokerError
from diloco.observe import Logger

# nats-py reads into a buffer of 32 KiB; 1 MiB doubles the receive rate
READ_BUFFER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 2.0
FLUSH_TIMEOUT_S = 5
RETRY_S = 0.5
COMPLAIN_EVERY_S = 10.0


def malloc_environment() -> dict[str, str]:
    """Settings of glibc's allocator for a service's environment.

    They keep large buffers from going back to the kernel between messages and between steps, which costs more than what is
    done with them: a step of the default model takes half as long. Arenas of other threads could hold no more than 64 MiB.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(1 << 20),
    }


class Link:
    """Two connections that are remade for ever. Made by :meth:`open`."""

    def __init__(self, control: Client, bulk: Client) -> None:
        self.control, self.bulk = control, bulk

    @classmethod
    async def open(cls, control_url: str, bulk_url: str, name: str, log: Logger, give_up_after_s: float | None = None) -> Link:
        """Connect, waiting for a server that is not there yet: for ever, or ``give_up_after_s``.

        Raises:
            BrokerError: no server in time, or one without JetStream; the URL is named.
        """
        control = await _connect(control_url, f"{name}-control", log, give_up_after_s)
        bulk = await _connect(bulk_url, f"{name}-bulk", log, give_up_after_s)
        link = cls(control, bulk)
        try:
            await link.check_jetstream()
        except BrokerError:
            await link.close()
            raise
        return link

    async def check_jetstream(self) -> None:
        """Ask the server for JetStream.

        Raises:
            BrokerError: it is not enabled.
        """
        server = self.bulk.connected_url
        url = _shown(server.geturl() if server else "")
        try:
            await self.bulk.jetstream(timeout=10).account_info()
        except (nats.js.errors.ServiceUnavailableError, nats.errors.NoRespondersError, nats.js.errors.NotFoundError):
            raise BrokerError(
                f"NATS at {url}: JetStream is not enabled; start nats-server with -js, or put "
                "`jetstream {}` into its configuration"
            ) from None
        except (nats.errors.Error, TimeoutError) as error:
            raise BrokerError(f"NATS at {url}: JetStream does not answer: {error!r}") from None

    @property
    def bytes_in(self) -> int:
        """Payload bytes received on both connections."""
        return int(self.control.stats["in_bytes"] + self.bulk.stats["in_bytes"])

    @property
    def bytes_out(self) -> int:
        """Payload bytes sent on both connections."""
        return int(self.control.stats["out_bytes"] + self.bulk.stats["out_bytes"])

    async def close(self) -> None:
        """Send what is buffered, and close."""
        for client in (self.control, self.bulk):
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                await client.flush(1)
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()


async def _connect(url: str, name: str, log: Logger, give_up_after_s: float | None) -> Client:
    nats.aio.client.DEFAULT_BUFFER_SIZE = READ_BUFFER_BYTES
    client = Client()
    clock = asyncio.get_running_loop().time
    began_s = complained_s = clock()
    reason = "no answer"

    async def on_error(error: Exception) -> None:
        nonlocal complained_s, reason
        reason = str(error) or type(error).__name__
        if connecting.done():
            if not client.is_reconnecting:
                log.warning("nats_error", connection=name, reason=reason)
            return
        if "authorization" in reason.lower():
            connecting.cancel()  # waiting would not help
        elif clock() - complained_s >= COMPLAIN_EVERY_S or complained_s == began_s:
            complained_s = clock()
            log.warning("waiting_for_nats", url=_shown(url), waited_s=round(clock() - began_s, 1), reason=reason)

    async def on_disconnect() -> None:
        if not client.is_closed:
            log.warning("nats_disconnected", connection=name, url=_shown(url))

    async def on_reconnect() -> None:
        log.info("nats_reconnected", connection=name, url=_shown(url))

    # without a limit of attempts the client also waits by itself for a server that is not there yet
    connecting = asyncio.ensure_future(
        client.connect(
            url,
            name=name,
            connect_timeout=CONNECT_TIMEOUT_S,
            flush_timeout=FLUSH_TIMEOUT_S,
            ping_interval=2,
            max_outstanding_pings=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RETRY_S,
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=on_reconnect,
        )
    )
    try:
        await asyncio.wait({connecting}, timeout=give_up_after_s)
        if connecting.done() and not connecting.cancelled():
            connecting.result()
            return client
    except (nats.errors.Error, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
    finally:
        if not client.is_connected:
            connecting.cancel()
            await asyncio.wait({connecting})
            await client.close()
    raise BrokerError(
        f"NATS: no connection to {_shown(url)} (tried for {clock() - began_s:.0f} s): {reason}; "
        "start a server there, or give another URL"
    )


def check_open(client: Client) -> None:
    """Find out whether a connection is still there, or is being remade.

    Raises:
        BrokerError: it was closed for good: by us, or because the server turned us away.
    """
    if client.is_closed:
        cause = f" ({client.last_error})" if client.last_error else ""
        raise BrokerError(f"NATS: the connection is closed{cause}")


def _shown(url: str) -> str:
    """A URL without its credentials."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, "", "", ""))
