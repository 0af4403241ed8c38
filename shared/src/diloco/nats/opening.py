"""Opening a connection to NATS, and logging its troubles as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import re
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import nats.errors

from diloco.errors import BrokerError, SettingsError
from diloco.nats.client import Client
from diloco.nats.identity import Identity
from diloco.nats.nkey import NatsKey
from diloco.process.observe import Logger
from diloco.process.tasks import give_up

CONNECT_TIMEOUT_S = 2.0  # a few round trips over the longest link; TCP would try for two minutes
FLUSH_TIMEOUT_S = 5  # longer than PING_S notices a dead server, so that this never ends first
RETRY_S = 0.5  # between two attempts to connect: a server that starts is used soon, and is not flooded
PING_S = 2.0  # a frozen server is noticed at the third ping
# of a certificate, as OpenSSL numbers them
NOT_YET_VALID, HAS_EXPIRED, SELF_SIGNED_IN_CHAIN, UNKNOWN_ISSUER = 9, 10, 19, 20
COMPLAIN_EVERY_S = 10.0  # of the same trouble: often enough to see it go on, seldom enough to read the rest
COMPLAIN_SELDOM_S = 320.0  # the pause between two complaints doubles until it is this long
ASK_AGAIN_S = 3.0  # between two attempts at a server that refuses the identity, and logs each of them
REFUSALS = 2  # of an identity, to be believed: a server that reads its users again refuses a client just connecting, too
TURNED_AWAY_S = 10.0  # an identity that a server does not know for so long will not be known again
_NO_LIMIT = (
    "its auth.conf has no max_payload for this identity, as an earlier version wrote it; when all members are of this version, "
    "write it again with 'diloco keys refresh', and restart the server"
)
WAITS = "waiting for it: give that server its new auth.conf, and reload it"


class _State(enum.Enum):
    """State of a connection."""

    OPENING = enum.auto()  # no server has taken it yet; the client goes on trying
    OPEN = enum.auto()  # a server took it; the client makes it again when it is lost
    TURNED_AWAY = enum.auto()  # it was open; a server now refuses the identity


class _Failing:
    """Attempts that fail one after another, and the pauses between complaints of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.attempts = 0
        self._clock, self._refused = clock, False
        self._due_s, self._pause_s = -math.inf, COMPLAIN_EVERY_S

    def is_news(self, refused: bool) -> bool:
        """Count an attempt; return whether to complain of it. ``refused``: the server answers, and refuses the identity."""
        now_s = self._clock()
        self.attempts += 1
        if refused == self._refused and now_s < self._due_s:
            return False
        if self.attempts > 1 and refused == self._refused:
            self._pause_s = min(2 * self._pause_s, COMPLAIN_SELDOM_S)
        self._refused, self._due_s = refused, now_s + self._pause_s
        return True


class Opening:
    """Opens one connection, and hears from the client of its troubles.

    ===========  ==========================  ================================================================
    state        event                       action
    ===========  ==========================  ================================================================
    OPENING      error                       complain: at once, after ``COMPLAIN_EVERY_S``, then ever more seldom
    OPENING      the identity is refused     try once more, then give up
    OPENING      connected                   OPEN
    OPEN         error                       log it, unless the connection is being remade, or closed
    OPEN         the identity is refused     TURNED_AWAY
    TURNED_AWAY  refused for 10 s            close the connection
    TURNED_AWAY  connected again             OPEN
    ===========  ==========================  ================================================================

    With ``waits_when_refused`` a server that refuses the identity is waited for like one that is away: it may get its new list
    of identities later than other servers. Nothing is given up or closed then.
    """

    def __init__(
        self, urls: list[str], name: str, log: Logger, identity: Identity | None, *, waits_when_refused: bool = False
    ) -> None:
        self.urls, self.name, self.log, self.identity = urls, name, log, identity
        self.client = Client(identity)
        self._waits_when_refused = waits_when_refused
        self._clock = asyncio.get_running_loop().time
        self._state = _State.OPENING
        self._began_s = self._clock()
        self._turned_away_s = -math.inf
        self._failing = _Failing(self._clock)
        self._reason = "no answer; start a server there, or give another URL"
        self._refused = asyncio.Event()  # by the server that is being tried
        self._refusals = 0

    async def open(self, give_up_after_s: float | None) -> Client:
        """Return the client once it is connected.

        Raises:
            BrokerError: no server in time, or one that does not know the identity; the URL is named.
        """
        ends_s = math.inf if give_up_after_s is None else self._began_s + give_up_after_s
        while not await self._try(None if ends_s == math.inf else max(0.0, ends_s - self._clock())):
            if self._clock() >= ends_s:
                raise self._failure()
            await asyncio.sleep(ASK_AGAIN_S if self._refused.is_set() and self._refusals >= REFUSALS else RETRY_S)
            self.client = Client(self.identity)
            self._refused.clear()
        if self.client.lacks_limit:  # a server may tell the account's limit a moment after it has let the client in
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                await self.client.flush(FLUSH_TIMEOUT_S)
        if self.client.lacks_limit:
            self.log.warning("server_without_limits", connection=self.name, reason=_NO_LIMIT)
        return self.client

    async def _try(self, timeout_s: float | None) -> bool:
        """Let a new client connect; return False if another attempt may end otherwise.

        A server that closes the connection may have refused the identity without its word being read.
        """
        # without a limit of attempts the client also waits by itself for a server that is not there yet
        connecting = asyncio.ensure_future(
            self.client.connect(
                self.urls,
                name=self.name,
                connect_timeout=CONNECT_TIMEOUT_S,
                flush_timeout=FLUSH_TIMEOUT_S,
                ping_interval=PING_S,
                max_outstanding_pings=2,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RETRY_S,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                **_credentials(self.identity),
            )
        )
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait({connecting, refused}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done() and not connecting.cancelled():
                connecting.result()
                self._state = _State.OPEN
                return True
        except (nats.errors.Error, OSError, ValueError) as error:
            if not self._refused.is_set():  # else that is the reason
                self._reason = _said(error, self.identity)
                if isinstance(error, BrokenPipeError | ConnectionResetError):
                    return False
        finally:
            await give_up(refused)
            if not self.client.is_connected:
                await give_up(connecting)
                await self.client.close()
        if self._refused.is_set():
            self._refusals += 1
            if self._refusals < REFUSALS or self._waits_when_refused:
                return False
        raise self._failure()

    def _failure(self) -> BrokerError:
        tried_s = self._clock() - self._began_s
        return BrokerError(f"NATS: no connection to {shown(self.urls)} (tried for {tried_s:.0f} s): {self._reason}")

    async def _on_error(self, error: Exception) -> None:
        if self._state is _State.OPENING:
            self._complain(error)
        elif _turns_away(error):
            await self._turn_away(error)
        # errors that say nothing new: after the end, and of attempts to connect again; a lost server is logged as a disconnect
        elif not (self.client.is_closed or self.client.is_reconnecting or isinstance(error, nats.errors.UnexpectedEOF)):
            reason = _said(error, self.identity)
            if "permissions violation" in reason.lower():  # nothing else shows it: the request is never answered
                if self.client.is_optional(reason):
                    self.log.debug("optional_denied", connection=self.name, reason=reason)
                    return
                if self.identity is not None:
                    reason += f": {_lacks(self.identity)}"
                self.client.denied += 1
                self.log.error("permission_denied", connection=self.name, reason=reason)
            else:
                self.log.warning("nats_error", connection=self.name, reason=reason)

    def _complain(self, error: Exception) -> None:
        if self._refused.is_set():
            return  # the refusal is the reason, not the broken pipe that follows it
        self._reason, refuses = _said(error, self.identity), _turns_away(error)
        if refuses:
            self._refused.set()
            if not self._waits_when_refused:
                return
            self._reason += f"; {WAITS}"
        if self._failing.is_news(refuses):
            waited_s = round(self._clock() - self._began_s, 1)
            self.log.warning(
                "waiting_for_nats",
                url=shown(self.urls),
                waited_s=waited_s,
                attempts=self._failing.attempts,
                reason=self._reason,
            )

    async def _turn_away(self, error: Exception) -> None:
        reason = _said(error, self.identity)
        if self._state is _State.OPEN:
            self._state, self._turned_away_s = _State.TURNED_AWAY, self._clock()
            self._failing = _Failing(self._clock)
        elif not self._waits_when_refused and self._clock() - self._turned_away_s >= TURNED_AWAY_S:
            await self.client.close()
        if not self._failing.is_news(True):
            return
        if self._waits_when_refused:
            self.client.options["reconnect_time_wait"] = ASK_AGAIN_S
            reason += f"; {WAITS}"
        tell = self.log.warning if self._waits_when_refused else self.log.error
        tell("nats_turns_away", connection=self.name, url=shown(self.urls), attempts=self._failing.attempts, reason=reason)

    async def _on_disconnect(self) -> None:
        if not self.client.is_closed:  # else it was us
            self.log.warning("nats_disconnected", connection=self.name, url=shown(self.urls))

    async def _on_reconnect(self) -> None:
        self._state = _State.OPEN
        self.client.options["reconnect_time_wait"] = RETRY_S
        self.log.info("nats_reconnected", connection=self.name, url=shown(self.urls))


def checked(urls: str) -> list[str]:
    """Return the URLs of one cluster, given with commas between them, each with its scheme as the client expects it.

    Raises:
        SettingsError: one of them is no URL of NATS.
    """
    return [_checked_one(url.strip()) for url in urls.split(",")]


def _checked_one(url: str) -> str:
    full = url if "://" in url else f"nats://{url}"
    try:
        parts = urlsplit(full)
        named = parts.port != 0 and re.fullmatch(r"[\w.:-]+", parts.hostname or "") is not None
        # what stands behind the port would not be read, and the client takes "none" for no name
        plain = parts.hostname != "none" and not (parts.path.strip("/") or parts.query or parts.fragment)
        valid = parts.scheme in ("nats", "tls") and named and plain
    except ValueError:
        valid = False
    if not valid:
        shown = re.sub(r"^(\w+://)?.*@", r"\1", url, flags=re.DOTALL)  # without credentials
        raise SettingsError(f"NATS URL {shown!r}: not the address of a server; expected nats://HOST:PORT or tls://HOST:PORT")
    return full


def shown(urls: list[str]) -> str:
    """Return URLs without their credentials, as messages show them."""
    shown = []
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = f"[{host}]" if ":" in host else host
        shown.append(urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, "", "", "")))
    return ",".join(shown)


def _turns_away(error: Exception) -> bool:
    return "authorization" in str(error).lower()


def _lacks(identity: Identity) -> str:
    """Return why a server may deny an identity something, and what to do."""
    text = f"the server's auth.conf does not permit this to {identity.name}; "
    if identity.founder:
        text += (
            "its identity has the right to found the run, which 'diloco keys founded' withdraws once the run exists; "
            f"'diloco keys renew {identity.name}' makes an identity without that right; otherwise "
        )
    return f"{text}auth.conf may be older than the identity, or of another version: write it again with 'diloco keys refresh'"


def _said(error: Exception, identity: Identity | None) -> str:
    """Return an error's reason, with the certificate or identity that it is about."""
    text = str(error) or type(error).__name__
    if _turns_away(error):
        who = (
            "this process, which has no identity: set DILOCO_IDENTITY, or --identity for a command"
            if identity is None
            else f"the identity {identity.path}, or it is revoked there"
        )
        return f"{text}: the server does not know {who}"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "the server requires TLS: set an identity" if identity is None else "make it with 'diloco keys add server'"
        if error.verify_code == NOT_YET_VALID:
            hint = "this machine's clock is behind, or that of the machine that made it was ahead: set the clock"
        elif error.verify_code == HAS_EXPIRED and identity is not None:
            hint = "make it again with 'diloco keys renew' and the server's name, unless this machine's clock is ahead"
        elif error.verify_code in (SELF_SIGNED_IN_CHAIN, UNKNOWN_ISSUER) and identity is not None:
            hint = "it and this identity are not of the same authority: check which folder of 'diloco keys' made them"
        return f"the server's certificate is not accepted: {error.verify_message.rstrip('.')}; {hint}"
    if isinstance(error, ssl.SSLError):
        whose = "its certificate" if identity is None else f"the certificate of {identity.path}"
        return f"TLS failed: {error.reason or text}; the server may not accept {whose}"
    if isinstance(error, ConnectionRefusedError | TimeoutError):
        return f"{text}; start a server there, or give another URL"
    return text


def _credentials(identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {}
    return {"tls": identity.tls, "signature_cb": NatsKey.from_seed(identity.seed).sign, "inbox_prefix": identity.inbox}
