"""A stream as a file and back: the server's own snapshot, in which every message keeps its sequence.

The server packs a stream's files as they are, and sends them in chunks that are acknowledged, so that a slow disk slows the
server's sending and nothing else. What comes is opaque here; a snapshot is restored by a server of the same or a newer version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
from blake3 import blake3

from diloco.errors import AppendUncertainError, BrokerError, RunError
from diloco.nats import streams
from diloco.nats.connection import NatsLink
from diloco.wire.plain import json_object

TIMEOUT_S = 10.0  # for an answer
SILENCE_S = 20.0  # between two chunks
CHUNK_BYTES = 256 * 1024
RESTORE_AHEAD = 8  # chunks on their way to the server
RESTORE_ATTEMPTS = 4  # a machine may be busy for a while

_NAME_IN_USE = 10130  # error code of the JetStream API


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream in a file: what the server says of it, and the hash of the file."""

    config: Mapping[str, Any]
    state: Mapping[str, Any]
    size_bytes: int
    blake3: str


async def save(link: NatsLink, stream: str, path: Path) -> StreamSnapshot:
    """Write the stream as it is now to ``path``; its writers do not wait.

    Raises:
        BrokerError: there is no such stream, or the server refuses.
        AppendUncertainError: the server fell silent.
        OSError: the disk is full.
    """
    inbox = link.bulk.new_inbox()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    # the server's window bounds what comes without having been acknowledged
    subscription = await link.bulk.subscribe(inbox, cb=queue.put, pending_msgs_limit=0, pending_bytes_limit=0)
    request = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
    try:
        answer = await _ask(link, f"$JS.API.STREAM.SNAPSHOT.{stream}", request, stream)
        hasher, size_bytes = blake3(), 0
        with path.open("wb") as file:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        message = await queue.get()
                except TimeoutError:
                    raise AppendUncertainError(f"stream {stream}: its snapshot broke off after {size_bytes} bytes") from None
                if not message.data:
                    break
                hasher.update(message.data)
                size_bytes += len(message.data)
                await asyncio.to_thread(file.write, message.data)
                if message.reply:
                    await link.bulk.publish(message.reply, b"")
        status = (message.headers or {}).get("Status", "")
        if status not in ("", "204"):
            raise BrokerError(f"stream {stream}: its snapshot broke off: {message.headers}")
        return StreamSnapshot(answer["config"], answer["state"], size_bytes, hasher.hexdigest())
    except nats.errors.Error as error:
        raise AppendUncertainError(f"stream {stream}: its snapshot broke off: {error!r}") from None
    finally:
        if not link.bulk.is_closed:
            await subscription.unsubscribe()


class _ForgottenError(AppendUncertainError):
    """No process listens where a chunk belongs: the server ends a restore of which no chunk came for five seconds."""


async def restore(link: NatsLink, snapshot: StreamSnapshot, path: Path, *, replicas: int = 1) -> None:
    """Make the stream again from the file, with the same sequences.

    Raises:
        RunError: the server has a stream of that name.
        BrokerError: the server refuses; also if the file is damaged. There is no such stream then.
        AppendUncertainError: the server fell silent.
        OSError: the file cannot be read.
    """
    # buckets of earlier versions obeyed headers of messages, and streams had no limits
    stream = str(snapshot.config["name"])
    config = dict(snapshot.config) | {"num_replicas": replicas, "allow_rollup_hdrs": False, "allow_msg_ttl": False}
    config |= streams.limits(stream)
    request = {"config": config, "state": snapshot.state}
    for attempt in range(RESTORE_ATTEMPTS):
        try:
            await _restore(link, snapshot, path, request)
            break
        except _ForgottenError:
            if attempt == RESTORE_ATTEMPTS - 1:
                raise


async def _restore(link: NatsLink, snapshot: StreamSnapshot, path: Path, request: Mapping[str, Any]) -> None:
    stream = str(snapshot.config["name"])
    answer = await _ask(link, f"$JS.API.STREAM.RESTORE.{stream}", request, stream)
    try:
        restored = await _send(link, str(answer["deliver_subject"]), path, stream)
        if restored["state"]["last_seq"] != snapshot.state["last_seq"]:
            raise BrokerError(
                f"stream {stream}: restored up to message {restored['state']['last_seq']}, expected "
                f"{snapshot.state['last_seq']}: the snapshot is damaged"
            )
    except BrokerError:
        made = await streams.info(link, stream)
        if made is not None and _metadata(made["config"]) == _metadata(request["config"]):  # else another process made it
            await streams.delete(link, stream)  # the server has kept a part of it
        raise


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the maker of a stream has said of it, without what the server adds."""
    found = config.get("metadata")
    return {name: value for name, value in found.items() if not name.startswith("_nats")} if isinstance(found, dict) else {}


async def _send(link: NatsLink, subject: str, path: Path, stream: str) -> dict[str, Any]:
    with path.open("rb") as file:
        while chunks := [chunk for _ in range(RESTORE_AHEAD) if (chunk := file.read(CHUNK_BYTES))]:
            # requests of one connection arrive in order
            for reply in await asyncio.gather(*(_request(link, subject, chunk, stream) for chunk in chunks)):
                if reply.startswith(b"-ERR"):
                    said = reply.decode(errors="replace")
                    raise BrokerError(f"stream {stream}: the server could not create a snapshot: {said}")
    answer = await _request(link, subject, b"", stream)
    if not answer:  # it was taken for a chunk: lists of earlier versions put a header before what an operator sends
        raise BrokerError(
            f"stream {stream}: the server refuses a snapshot from this identity, because its list is from an earlier "
            "version; run diloco keys refresh, give the server its new files, and restart it"
        )
    return _parse(stream, answer)


async def _ask(link: NatsLink, subject: str, request: Mapping[str, Any], stream: str) -> dict[str, Any]:
    return _parse(stream, await _request(link, subject, json.dumps(request).encode(), stream))


async def _request(link: NatsLink, subject: str, data: bytes, stream: str) -> bytes:
    try:
        return bytes((await link.bulk.request(subject, data, timeout=TIMEOUT_S)).data)
    except nats.errors.NoRespondersError as error:
        raise _ForgottenError(f"stream {stream}: no answer: {error!r}") from None
    except (nats.errors.Error, TimeoutError) as error:
        raise AppendUncertainError(f"stream {stream}: no answer: {error!r}") from None


def _parse(stream: str, data: bytes) -> dict[str, Any]:
    answer = json_object(data)
    if answer is None:
        raise BrokerError(f"stream {stream}: invalid answer {data[:80]!r}")
    if "error" in answer:
        error = answer["error"] if isinstance(answer["error"], dict) else {}
        text = f"stream {stream}: {error.get('description')} (code {error.get('err_code')})"
        if error.get("err_code") == _NAME_IN_USE:
            raise RunError(f"{text}; another server, or another run name, is needed to restore it")
        raise BrokerError(text)
    return answer
