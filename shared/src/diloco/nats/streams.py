"""Streams: making them, reading single messages, purging."""

from __future__ import annotations

import asyncio
import base64
import enum
import json
import math
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors

from diloco.errors import AppendUncertainError, BrokerError, RunError
from diloco.nats.client import Client
from diloco.nats.connection import NatsLink
from diloco.nats.received import headers
from diloco.transport import Room, Stored
from diloco.wire.plain import json_object

TIMEOUT_S = 5.0  # for an answer of JetStream: a cluster elects another leader meanwhile
DUPLICATE_WINDOW_S = 60.0  # a member tries an append again sooner, at most 15 s after the server fell silent
MAX_MESSAGE_BYTES = 1 << 20  # of a frame, its headers included
MAX_VALUE_BYTES = MAX_MESSAGE_BYTES - (1 << 10)  # of a bucket's key: readers take no more, so the stream takes no more
CONSUMER_IDLE_S = 60.0  # no consumer stays longer without a reader, whatever its maker asked for
MAX_CONSUMERS = 1 << 15  # 8 for each of 4096 processes; a server's own limit is 1000
DROPS_AT_ONCE = 64
ACCOUNT = "account"  # name of the room of all streams together

# settings of an existing stream: these must be equal, those may be larger (a limit of zero or less is none)
_EXACT = ("subjects", "retention", "discard", "max_msgs_per_subject", "allow_direct", "allow_batched")
_AT_LEAST = ("max_msgs", "max_age", "max_msg_size", "num_replicas", "duplicate_window")

_EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_NEVER = 1 << 62

# error codes of the JetStream API
_WRONG_LAST_SEQUENCE = 10071
_NO_STREAM = 10059
OTHER_CONFIGURATION = 10058
_GONE = (10043, 10057)
_NO_CONSUMER = 10014

T = TypeVar("T")


async def ensure(
    link: NatsLink, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
) -> int | None:
    """Make a stream, or find that it exists as it should; more room or more replicas than asked for are as good.

    So are wider limits of what an insider may do, as a stream of an older version has them: :func:`wider_limits` names them.
    Return the bytes that it may hold if these are fewer than asked for, else None: a limit changes while a run goes on, and
    members wait at one that is reached.

    Raises:
        BrokerError: the server refuses.
        RunError: it exists with other subjects, keeps less, or keeps it in another way.
    """
    config = nats.js.api.StreamConfig(
        name=stream,
        subjects=subjects,
        retention=nats.js.api.RetentionPolicy.LIMITS,
        discard=nats.js.api.DiscardPolicy.NEW if max_msgs_per_subject < 0 else nats.js.api.DiscardPolicy.OLD,
        max_msgs_per_subject=max_msgs_per_subject,
        max_bytes=max_bytes,
        num_replicas=replicas,
        allow_direct=True,
        allow_batched=True,
    )
    config = configured(config)
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    try:
        await _answer(api.add_stream(config), stream)
    except _Exists:
        info = await _answer(api.stream_info(stream), stream)
        difference = _difference(config, info.config)
        if difference:
            raise RunError(
                f"stream {stream}: has {difference}; if the stream belongs to another program, choose another run name; "
                "otherwise change the stream"
            ) from None
        room_bytes = _limit(info.config.max_bytes)
        return int(room_bytes) if room_bytes < _limit(max_bytes) else None
    return None


async def rooms(link: NatsLink, names: Sequence[str]) -> list[Room]:
    """Return how full streams are that have a bound, and the account if it has one; what does not exist is left out.

    Raises:
        BrokerError: the server refuses, or is silent.
    """
    api, found = link.bulk.jetstream(timeout=TIMEOUT_S), []
    for name in names:
        try:
            info = await _answer(api.stream_info(name), name)
        except nats.js.errors.NotFoundError:
            continue
        if (info.config.max_bytes or -1) > 0:
            found.append(Room(name, int(info.state.bytes), int(info.config.max_bytes)))
    account = await _answer(api.account_info(), ACCOUNT)
    if account.limits.max_storage > 0:
        found.append(Room(ACCOUNT, int(account.storage), int(account.limits.max_storage)))
    return found


def _difference(wanted: nats.js.api.StreamConfig, existing: nats.js.api.StreamConfig) -> str | None:
    """Describe the first setting of a stream that does not do, if any."""
    for name in _EXACT:
        a, b = getattr(wanted, name), getattr(existing, name)
        # the server lists subjects in the order in which they were given
        if (sorted(a) != sorted(b or [])) if name == "subjects" else a != b:
            return f"{name} = {_plain(b)}, expected {_plain(a)}"
    for name in _AT_LEAST:
        a, b = _limit(getattr(wanted, name)), _limit(getattr(existing, name))
        if b < a:
            return f"{name} = {b:.15g}, expected {'no limit' if a == math.inf else f'at least {a:.15g}'}"
    return None


def _limit(value: float | None) -> float:
    return value if value and value > 0 else math.inf


def limits(stream: str) -> dict[str, Any]:
    """Return the limits that a run sets on a stream of its, as JetStream's API has them."""
    return {
        "max_msg_size": MAX_VALUE_BYTES if stream.startswith("KV_") else MAX_MESSAGE_BYTES,
        "max_consumers": MAX_CONSUMERS,
        "duplicate_window": int(DUPLICATE_WINDOW_S * 1e9),
        "consumer_limits": {"inactive_threshold": int(CONSUMER_IDLE_S * 1e9)},
    }


def configured(config: nats.js.api.StreamConfig) -> nats.js.api.StreamConfig:
    """Return a stream's configuration with its limits."""
    return nats.js.api.StreamConfig.from_response(config.as_dict() | limits(str(config.name)))


def wider_limits(config: Mapping[str, Any]) -> list[str]:
    """Name the limits of a stream that are wider than a run sets them, by its configuration as JetStream's API has it."""
    wanted = limits(str(config.get("name")))
    found = [(name, config.get(name), wanted[name]) for name in ("max_msg_size", "duplicate_window")]
    consumers = config.get("consumer_limits")
    consumers = consumers if isinstance(consumers, dict) else {}
    found += [(f"consumer_limits.{name}", consumers.get(name), most) for name, most in wanted["consumer_limits"].items()]
    return [
        f"{name} = {value if isinstance(value, int) and value > 0 else 'no limit'}, expected at most {most}"
        for name, value, most in found
        if not (isinstance(value, int) and 0 < value <= most)
    ]


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


async def last(link: NatsLink, stream: str, subject: str) -> Stored | None:
    """Return the last message on a subject, or None.

    Raises:
        AppendUncertainError: no answer.
        BrokerError: there is no such stream, or the server refuses.
    """
    return await _get(link, stream, subject=subject)


async def get(link: NatsLink, stream: str, sequence: int) -> Stored | None:
    """Return the message with a stream sequence, or None if it is gone; raise as :func:`last`."""
    return await _get(link, stream, seq=sequence)


async def first(link: NatsLink, stream: str, subject: str, start_sequence: int) -> Stored | None:
    """Return the first message on a subject from a stream sequence on, or None; raise as :func:`last`."""
    return await _get(link, stream, subject, start_sequence)


async def last_sequence(link: NatsLink, subject: str) -> int:
    """Return the stream sequence of the last message on a subject that we may write to, 0 if there is none.

    The server states it when it refuses an append behind a sequence that no message ever has. So a member that may write the
    subject learns it without permission to read.

    Raises:
        AppendUncertainError: no answer.
        BrokerError: the server refuses for another reason.
    """
    headers = {_EXPECTED_SEQUENCE: str(_NEVER)}
    try:
        reply = await link.bulk.request(subject, b"", timeout=TIMEOUT_S, headers=headers)
    except (nats.errors.Error, TimeoutError) as silence:
        raise AppendUncertainError(f"{subject}: no answer: {silence!r}") from None
    code, description = _refusal(json_object(reply.data) or {})
    number = (description or "").removeprefix("wrong last sequence: ")
    if code == _WRONG_LAST_SEQUENCE and number.isdecimal():
        return int(number)
    if code is None or code == _WRONG_LAST_SEQUENCE:
        raise AppendUncertainError(f"{subject}: the server does not say what was stored last")
    raise BrokerError(f"{subject}: the server refuses: {description} (code {code})")


async def purge(link: NatsLink, stream: str, subject: str, below_sequence: int) -> None:
    """Drop a subject's messages (wildcards allowed) with a smaller sequence; raises as :func:`last`."""
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    try:
        await _answer(api.purge_stream(stream, seq=below_sequence, subject=subject), stream)
    except nats.js.errors.NotFoundError:
        raise _missing(stream) from None


async def subjects(link: NatsLink, stream: str, within: str) -> list[str]:
    """Return all subjects of stored messages that match ``within``; raises as :func:`last`."""
    found: list[str] = []
    while True:
        answer = await _ask(link, f"STREAM.INFO.{stream}", stream, subjects_filter=within, offset=len(found))
        state = answer.get("state")
        page = state.get("subjects") or {} if isinstance(state, dict) else None
        if not isinstance(page, dict):
            raise _nonsense(stream, answer)
        found += page
        if not page or len(found) >= _total(answer, stream):
            return found


async def drop(link: NatsLink, stream: str, sequences: Iterable[int]) -> None:
    """Drop single messages; ones that are gone already are as good. Raises as :func:`last`."""
    limit = asyncio.Semaphore(DROPS_AT_ONCE)

    async def drop_one(sequence: int) -> None:
        async with limit:
            await _ask(link, f"STREAM.MSG.DELETE.{stream}", stream, _GONE, seq=sequence, no_erase=True)

    async with asyncio.TaskGroup() as group:
        for sequence in sequences:
            group.create_task(drop_one(sequence))


async def delete(link: NatsLink, stream: str) -> None:
    """Drop a stream and all it holds; none is as good."""
    try:
        await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).delete_stream(stream), stream)
    except nats.js.errors.NotFoundError:
        return


async def listed(link: NatsLink) -> list[dict[str, Any]]:
    """Return the ``config``, ``state`` and ``created`` of each of the server's streams, as its API has them.

    Raises:
        AppendUncertainError: no answer.
        BrokerError: the server refuses, or its answer is no list of streams.
    """
    return await _pages(link, "STREAM.LIST", "*", "streams")


async def consumers(link: NatsLink, stream: str) -> list[dict[str, Any]]:
    """Return the ``name``, ``config`` and ``created`` of each of a stream's consumers, as the server's API has them.

    Raises: as :func:`listed`.
    """
    return await _pages(link, f"CONSUMER.LIST.{stream}", stream, "consumers")


async def remove_consumer(link: NatsLink, stream: str, name: str) -> None:
    """Remove a consumer; none is as good. Raises as :func:`listed`."""
    await _ask(link, f"CONSUMER.DELETE.{stream}.{name}", stream, (_NO_CONSUMER,))


async def _pages(link: NatsLink, call: str, stream: str, what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        answer = await _ask(link, call, stream, offset=len(found))
        page = answer.get(what) or []
        if not isinstance(page, list):
            raise _nonsense(stream, answer)
        found += page
        if not page or len(found) >= _total(answer, stream):
            return found


async def exists(link: NatsLink, stream: str) -> bool:
    """Whether the server has the stream."""
    try:
        await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).stream_info(stream), stream)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def info(link: NatsLink, stream: str) -> dict[str, Any] | None:
    """Return ``config``, ``state`` and ``created`` of a stream as the server's API has them; None: the server has none.

    Raises: as :func:`listed`.
    """
    answer = await _ask(link, f"STREAM.INFO.{stream}", stream, (_NO_STREAM,))
    if _refusal(answer)[0] is not None:
        return None
    if not isinstance(answer.get("config"), dict) or not isinstance(answer.get("state"), dict):
        raise _nonsense(stream, answer)
    return answer


async def made_at(link: NatsLink, stream: str) -> str | None:
    """Return when a stream was made, by its server's clock; None: the server does not have it. Raises as :func:`last`."""
    try:
        info = await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).stream_info(stream), stream)
    except nats.js.errors.NotFoundError:
        return None
    return str(info.created)


async def _get(link: NatsLink, stream: str, subject: str | None = None, seq: int | None = None) -> Stored | None:
    where = {} if subject is None else {"last_by_subj" if seq is None else "next_by_subj": subject}
    which = where if seq is None else {"seq": seq} | where
    try:
        # Of direct gets no role may use the form whose request is JSON, which may ask for thousands of messages at a time. Any
        # replica answers a direct get, even one without the newest message.
        if seq is None and await _replicas(link, stream) == 1:
            return await _get_last_directly(link, stream, subject)
        return (await _answer(look_up(link.bulk, stream, which), stream))[0]
    except nats.js.errors.NotFoundError as error:
        if error.err_code == _NO_STREAM:
            raise _missing(stream) from None
        return None
    except AppendUncertainError:
        if await exists(link, stream):  # a request about a stream that is not there has no answer
            raise
        raise _missing(stream) from None


async def _get_last_directly(link: NatsLink, stream: str, subject: str | None) -> Stored:
    """Return the last message on a subject, which is part of the request's own subject."""
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    message = await _answer(api.get_msg(stream, subject=subject, direct=True), stream)
    stored_at_s = message.time.timestamp() if message.time is not None else math.inf
    return Stored(str(message.subject), int(message.seq or 0), bytes(message.data or b""), stored_at_s=stored_at_s)


async def look_up(client: Client, stream: str, which: Mapping[str, Any]) -> tuple[Stored, dict[str, str]]:
    """Ask JetStream's API for one message; return it and its headers, which are its writer's: of a large block the last ones.

    Raises:
        nats.errors.Error: as the client's requests; of JetStream's errors, NotFoundError where there is no such message.
        BrokerError: the answer is none of JetStream.
    """
    reply = await client.request(f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps(which).encode(), timeout=TIMEOUT_S)
    answer = json_object(reply.data) or {}
    if isinstance(answer.get("error"), dict):
        nats.js.errors.APIError.from_error(answer["error"])
    try:
        message = answer["message"]
        data, block = (base64.b64decode(message.get(name) or "") for name in ("data", "hdrs"))
        return Stored(str(message["subject"]), int(message["seq"]), data), headers(block)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise _nonsense(stream, answer) from None


async def _replicas(link: NatsLink, stream: str) -> int:
    known = link.replicas.get(stream)
    if known is None:
        info = await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).stream_info(stream), stream)
        known = link.replicas[stream] = int(info.config.num_replicas or 1)
    return known


async def _ask(link: NatsLink, call: str, stream: str, tolerated: Collection[int] = (), **request: Any) -> dict[str, Any]:
    """Ask JetStream's API, and return its answer; an error of a code in ``tolerated`` is as good as none."""
    asking = link.bulk.request(f"$JS.API.{call}", json.dumps(request).encode(), timeout=TIMEOUT_S)
    data = (await _answer(asking, stream)).data
    answer = json_object(data)
    if answer is None:
        raise _nonsense(stream, data)
    code, description = _refusal(answer)
    if code is not None and code not in tolerated:
        raise BrokerError(f"stream {stream}: {description} (code {code})")
    return answer


def _refusal(answer: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return code and description of the error that an answer of JetStream is, else None for both."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return None, None
    code = error.get("err_code")
    return code if isinstance(code, int) else 0, str(error.get("description"))


def _total(answer: Mapping[str, Any], stream: str) -> int:
    total = answer.get("total", 0)
    if not isinstance(total, int):
        raise _nonsense(stream, answer)
    return total


def _nonsense(stream: str, answer: object) -> BrokerError:
    return BrokerError(f"stream {stream}: JetStream gave an invalid answer: {str(answer)[:80]}")


def _missing(stream: str) -> BrokerError:
    return BrokerError(f"stream {stream}: does not exist on the server")


class _Exists(Exception):
    """The stream exists with another configuration."""


async def _answer(call: Awaitable[T], stream: str) -> T:
    try:
        return await call
    except nats.js.errors.NotFoundError:
        raise
    except nats.js.errors.APIError as error:
        if error.err_code == OTHER_CONFIGURATION:
            raise _Exists from None
        # a direct get that is not answered, as without JetStream, has no code at all
        unanswered = error.code in (None, 503)
        text = f"stream {stream}: {error.description or 'JetStream does not answer'} (code {error.err_code})"
        raise (AppendUncertainError if unanswered else BrokerError)(text) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise AppendUncertainError(f"stream {stream}: no answer: {error!r}") from None
