"""How a relay is commanded: one JSON object a line over TCP, both ways (``docs/wan.md`` is the reference).

A connection carries one request and its answer; ``play`` is answered by a line for each turn of the schedule, and ends with
its connection. The address needs no password: bind it where only operators are.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from diloco.errors import DilocoError, FormatError, SettingsError, WanError
from diloco.process.tasks import end
from diloco.wire.plain import json_object
from diloco_ops import failures
from diloco_ops.wan import impairments
from diloco_ops.wan.config import split_address
from diloco_ops.wan.connection import address_of, listening
from diloco_ops.wan.impairments import Turn
from diloco_ops.wan.relay import Relay

MAX_REQUEST_BYTES = 4 << 20
MAX_COMMANDERS = 32
REQUEST_S = 10.0  # a request is one line, sent at once
ANSWER_S = 10.0  # a relay answers from memory

_ERRORS: dict[int, type[DilocoError]] = {error.exit_code: error for error in (SettingsError, FormatError, WanError)}


Links = Annotated[list[str], msgspec.Meta(min_length=1)]


class Status(msgspec.Struct, tag_field="do", tag="status", forbid_unknown_fields=True):
    """Ask what links carry; no name: all of them."""

    links: list[str] = []


class Cut(msgspec.Struct, tag_field="do", tag="cut", forbid_unknown_fields=True):
    """Cut links."""

    links: Links


class Heal(msgspec.Struct, tag_field="do", tag="heal", forbid_unknown_fields=True):
    """Heal links; no name: all of them."""

    links: list[str] = []


class SetConditions(msgspec.Struct, tag_field="do", tag="set", forbid_unknown_fields=True, omit_defaults=True):
    """Change links' conditions."""

    links: Links
    rate_bits_per_s: float | Literal["unlimited"] | msgspec.UnsetType = msgspec.UNSET
    delay_s: float | msgspec.UnsetType = msgspec.UNSET
    jitter_s: float | msgspec.UnsetType = msgspec.UNSET
    slow: float | msgspec.UnsetType = msgspec.UNSET


class Play(msgspec.Struct, tag_field="do", tag="play", forbid_unknown_fields=True):
    """Play a failure tape, given as its text; ``source`` names it in errors."""

    tape: str
    source: str


Request = Status | Cut | Heal | SetConditions | Play
_requests = msgspec.json.Decoder(Request)


class Control:
    """Answers requests to a relay."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._server: asyncio.Server | None = None
        self._commanders: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # whose request has not come; the oldest first

    async def start(self, address: str) -> str:
        """Listen. Return the address.

        Raises:
            WanError: the address cannot be listened at.
        """
        sock = await listening(address)
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=MAX_REQUEST_BYTES)
        return address_of(self._server)

    async def close(self) -> None:
        """Close everything; a schedule that is played ends."""
        if self._server is not None:
            self._server.close()
        await end(*self._commanders)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._commanders.add(task)
        self._silent[task] = writer
        if len(self._commanders) > MAX_COMMANDERS:  # else one who holds connections keeps operators from an answer
            self._silent.pop(next(iter(self._silent))).transport.abort()
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the commander left without a request, or gave way to others, or the relay ends
        finally:
            self._silent.pop(task, None)
            self._commanders.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _request(reader)
            task = asyncio.current_task()
            assert task is not None
            self._silent.pop(task, None)
            if isinstance(request, Play):
                await self._play(request, reader, writer)
            else:
                _write(writer, self._do(request))
        except DilocoError as error:
            _write(writer, {"error": str(error), "exit_code": error.exit_code})
        await writer.drain()

    def _do(self, request: Status | Cut | Heal | SetConditions) -> dict[str, Any]:
        relay = self._relay
        lines = relay.meant(request.links or ["*"])
        if isinstance(request, Status):
            return relay.status(lines)
        if isinstance(request, Cut):
            relay.cut(lines)
        elif isinstance(request, Heal):
            relay.heal(lines)
        else:
            changes = {name: getattr(request, name) for name in ("rate_bits_per_s", "delay_s", "jitter_s")}
            slow = None if request.slow is msgspec.UNSET else request.slow
            relay.set(lines, {name: value for name, value in changes.items() if value is not msgspec.UNSET}, slow)
        return {"links": [line.name for line in lines]}

    async def _play(self, request: Play, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links = list(self._relay.lines)
        tape = failures.decode(
            request.tape.split("\n"), request.source, impairments.KINDS, lambda failure: impairments.complaint(failure, links)
        )

        async def tell(turn: Turn, met: list[str]) -> None:
            failure = turn.failure
            about = {"kind": failure.kind, "links": met, "begins": turn.begins, "duration_s": failure.duration_s}
            _write(writer, {"at_s": turn.at_s} | about | {"values": dict(failure.values)})
            await writer.drain()

        playing = asyncio.ensure_future(self._relay.play(tape, tell))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([playing, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(*(task for task in (playing, leaving) if not task.done()))
        if not playing.cancelled():
            playing.result()
            _write(writer, {"played": len(tape.failures)})


async def _request(reader: asyncio.StreamReader) -> Request:
    try:
        async with asyncio.timeout(REQUEST_S):
            line = await reader.readuntil(b"\n")
        request: Request = _requests.decode(line)
    except TimeoutError:
        raise WanError(f"no request came within {REQUEST_S:g} s") from None
    except asyncio.LimitOverrunError:
        raise WanError(f"a request of more than {MAX_REQUEST_BYTES} bytes") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WanError(f"not a request: {error}") from None
    return request


def _write(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")


def asked(address: str, request: Request) -> Iterator[dict[str, Any]]:
    """Ask a relay. Yield the lines of its answer.

    Raises:
        SettingsError, FormatError, WanError: what the relay says, or that none answers, or not to the end.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise SettingsError(f"--at: {error}") from None
    body = msgspec.json.encode(request) + b"\n"
    if len(body) > MAX_REQUEST_BYTES:
        raise WanError(f"a request of {len(body)} bytes; a relay takes at most {MAX_REQUEST_BYTES}")
    try:
        with socket.create_connection((host, port), ANSWER_S) as sock:
            sock.sendall(body)
            sock.settimeout(None if isinstance(request, Play) else ANSWER_S)
            with sock.makefile("rb") as lines:
                answer: dict[str, Any] = {}
                while line := lines.readline(MAX_REQUEST_BYTES):
                    answer = _answered(line, address)
                    yield answer
        if not answer or (isinstance(request, Play) and "played" not in answer):
            raise WanError(f"{address}: the relay closed the connection before its answer was complete")
    except OSError as error:
        reason = error.strerror or str(error) or "no answer in time"
        raise WanError(f"{address}: no relay answers: {reason}; start one with: diloco wan serve CONFIG (or --at)") from None


def _answered(line: bytes, address: str) -> dict[str, Any]:
    answer = json_object(line)
    if answer is None:
        raise WanError(f"{address}: another program answers there, not a relay")
    if "error" in answer:
        code = answer.get("exit_code")
        raise (_ERRORS.get(code, WanError) if isinstance(code, int) else WanError)(str(answer["error"]))
    return answer
