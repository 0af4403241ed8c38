"""The HTTP server of a run's page: the page, its style and script, and the events that it goes on by.

In its process's own loop. uvicorn speaks HTTP; connections are few, and the oldest gives way. A coordinator's page is
read-only; the one that ``diloco page`` serves has actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diloco.errors import SettingsError
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.settings.service import host_and_port
from diloco_coordinator.page.drawing import Drawing, Report
from diloco_coordinator.page.guard import ACT, PageGuard
from diloco_coordinator.page.viewers import Viewers
from diloco_report import page

MAX_CONNECTIONS = 128
STALLED_S = 30.0  # a viewer that takes nothing for so long is cut off, and comes again when it is back
MAX_REQUEST_BYTES = 16384
SEND_BYTES = 1 << 17  # of a socket's buffer, which Linux doubles: else it keeps megabytes of old frames for one that stalls
FIRST = ("state", "headline", "alerts")  # parts that a browser can show while others are drawn
CLOSE_S = 0.5  # for the server to end

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer a browser sends the form of the token with the origin "null"
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Acting(Protocol):
    """Actions of a page."""

    def form(self, report: Report) -> str:
        """Return their part of the page, as HTML."""

    async def act(self, request: Request) -> Response:
        """Carry out the action that the path names, which the guard has let pass."""


class PageServer:
    """A page at one address; ``await start()``, and ``await close()``.

    Args:
        drawing: its parts.
        address: HOST:PORT.
        token: that it asks for; None: none.
        log: for defects.
        acting: its actions; None: it is read-only.
        tls: context of its connections; None: they are in the clear.
        url: its address as people open it, which the log has with the token once it answers; empty: it is not logged.
    """

    def __init__(
        self,
        drawing: Drawing,
        address: str,
        token: str | None,
        log: Logger,
        *,
        acting: Acting | None = None,
        tls: ssl.SSLContext | None = None,
        url: str = "",
    ) -> None:
        self.drawing: Drawing = drawing
        self.address, self.log = address, log
        self._link = url if not url or token is None else f"{url}#{token}"
        self.viewers: Viewers = Viewers(drawing)
        self.port: int | None = None
        self._acting, self._tls = acting, tls
        identified = tls is not None and tls.verify_mode is ssl.CERT_REQUIRED
        self._guard = PageGuard(address, token, acts=acting is not None, identified=identified)
        self._task: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        self._listener: _Listener | None = None

    async def start(self) -> None:
        """Begin to answer, in the running loop.

        Raises:
            SettingsError: the address cannot be used.
        """
        host, port = host_and_port(self.address, "page_address")
        try:
            listener = self._listener = _listen(host, port, MAX_CONNECTIONS)
        except OSError as error:
            raise SettingsError(
                f"page_address (DILOCO_PAGE_ADDRESS) = {self.address!r}: cannot listen there: "
                f"{(error.strerror or str(error)).lower()}; set another address, or leave it empty"
            ) from None
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            http="h11",
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,  # it would be that of the server's start
            proxy_headers=False,
            timeout_graceful_shutdown=0,
            h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
        )
        config.load()
        config.ssl = self._tls
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.log.info("page_served", host=host, port=self.port)
        if self._link:
            self.log.info("page_link", link=self._link)

    async def close(self) -> None:
        """Stop answering; viewers are shown the end of a run that is over."""
        await self.viewers.close()
        if self._server is not None and self._task is not None and self._listener is not None:
            self._server.force_exit = True
            self._server.ends.set()
            self._listener.cut_off()
            await asyncio.wait([self._task], timeout=CLOSE_S)
            await end(self._task)

    def _app(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        routes = [
            Route("/", self._page),
            Route("/page.css", self._asset),
            Route("/page.js", self._asset),
            Route("/enter.js", self._asset),
            Route("/events", self._events),
            Route("/token", self._guard.take_token, methods=["POST"]),
        ]
        if self._acting is not None:
            routes += [Route("/act.js", self._asset), Route(f"{ACT}{{name}}", self._acting.act, methods=["POST"])]
        inner = Starlette(routes=routes)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            request = Request(scope, receive)
            refused = self._guard.refusal(request)
            try:
                await (inner if refused is None else refused)(scope, receive, _with_headers(send))
            except Exception as error:  # a defect, which must not end the process's own work
                self.log.error("page_failed", path=request.url.path, exc_info=error)

        return app

    async def _page(self, _: Request) -> Response:
        return StreamingResponse(self._parts(), media_type="text/html")

    async def _parts(self) -> AsyncIterator[str]:
        """Yield the page: its figures at once, and the rest when curves are drawn, which takes a second on a busy machine."""
        drawing, acting = self.drawing, self._acting
        await drawing.draw(curves=False)
        seen, first = drawing.state, {name: drawing.parts[name] for name in FIRST}
        form = None if acting is None else acting.form(drawing.report)
        yield page.begin_live(drawing.report, form) + page.body(first)
        await drawing.draw()
        others = {name: text for name, text in drawing.parts.items() if name not in FIRST}
        newer = first.keys() & drawing.since(seen).keys()  # drawn again meanwhile, for a viewer
        yield f"\n{page.body(others)}{page.end_live(seen if newer else drawing.state)}"

    async def _asset(self, request: Request) -> Response:
        name = request.url.path.removeprefix("/")
        media = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(page.asset(name), media_type=media)

    async def _events(self, request: Request) -> Response:
        state = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return _Events(self.viewers, state[:64])


class _Events(Response):
    """Server-sent events: parts of the page that changed, until the run is over or the viewer is gone."""

    media_type = "text/event-stream"

    def __init__(self, viewers: Viewers, state: str) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.viewers, self.state = viewers, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.create_task(_until_gone(receive))
        sending = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait([gone, sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(gone, sending)

    async def _send(self, send: Send) -> None:
        frames = self.viewers.watch(self.state)
        try:
            async for state, parts in frames:
                text = f"id: {state}\nevent: parts\ndata: {json.dumps(parts)}\n\n" if parts else "event: quiet\ndata:\n\n"
                async with asyncio.timeout(STALLED_S):
                    await send({"type": "http.response.body", "body": text.encode(errors="replace"), "more_body": True})
            end_ = f"event: over\ndata: {json.dumps(await self.viewers.drawing.whole())}\n\n"
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": end_.encode(errors="replace"), "more_body": False})
        except TimeoutError:
            return
        finally:
            await frames.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_headers(send: Send) -> Send:
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


class _Server(uvicorn.Server):
    """A server within a service: signals are the service's. It is there until ``ends`` is set."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ends = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # uvicorn makes its headers there
        await self.ends.wait()  # the library looks ten times a second whether it should end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Listener(socket.socket):
    """A listening socket of which there are ``most`` connections at a time, TLS or not: the oldest one gives way.

    Else one who holds connections keeps all others from the page, and takes files that the process needs.
    """

    most = 1
    _accepted: tuple[socket.socket, ...] = ()  # the oldest first

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, as any socket does."""
        connection, peer = super().accept()
        opened = [each for each in self._accepted if each.fileno() >= 0]
        for oldest in opened[: max(0, len(opened) + 1 - self.most)]:
            _cut_off(oldest)
        self._accepted = (*opened, connection)
        return connection, peer

    def cut_off(self) -> None:
        """Cut all connections off."""
        for each in self._accepted:
            _cut_off(each)


def _cut_off(connection: socket.socket) -> None:
    """End a connection in both directions: its transport then reads its end."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int, most: int) -> _Listener:
    family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = _Listener(family, kind, number)
    listener.most = most
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listener.bind(place)
        listener.listen(most)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
