"""Streams: making them, reading single messages by direct get, purging."""

from __future__ import annotations

import asyncio
import enum
import json
import math
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors

from diloco.errors import AppendUncertainError, BrokerError, RunError
from diloco.nats.connection import Link
from diloco.transport import Stored

TIMEOUT_S = 5.0
DUPLICATE_WINDOW_S = 120.0
DROPS_AT_ONCE = 64

# of an existing stream: what must be as asked for, and what may be more (a limit of zero or less is none)
_EXACT = ("subjects", "retention", "discard", "max_msgs_per_subject", "allow_direct", "allow_batched")
_AT_LEAST = ("max_msgs", "max_bytes", "max_age", "max_msg_size", "num_replicas", "duplicate_window")

_EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_NEVER = 1 << 62

# error codes of the JetStream API
_WRONG_LAST_SEQUENCE = 10071
_NO_STREAM = 10059
OTHER_CONFIGURATION = 10058
_GONE = (10043, 10057)

T = TypeVar("T")


async def ensure(
    link: Link, stream: str, subjects: list[str], *, max_msgs_per_subject: int = -1, max_bytes: int = -1, replicas: int = 1
) -> None:
    """Make a stream, or find that it exists as it should; more room or more replicas than asked for are as good.

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
        duplicate_window=DUPLICATE_WINDOW_S,
    )
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    try:
        await _answer(api.add_stream(config), stream)
    except _Exists:
        info = await _answer(api.stream_info(stream), stream)
        difference = _difference(config, info.config)
        if difference:
            raise RunError(
                f"stream {stream}: has {difference}; if it belongs to something else, choose another run name, else set it so"
            ) from None


def _difference(wanted: nats.js.api.StreamConfig, existing: nats.js.api.StreamConfig) -> str | None:
    """The first setting of a stream that does not do."""
    for name in _EXACT:
        a, b = getattr(wanted, name), getattr(existing, name)
        # the server lists subjects in whatever order they were given
        if (sorted(a) != sorted(b or [])) if name == "subjects" else a != b:
            return f"{name} = {_plain(b)}, expected {_plain(a)}"
    for name in _AT_LEAST:
        a, b = (v if v and v > 0 else math.inf for v in (getattr(wanted, name), getattr(existing, name)))
        if b < a:
            return f"{name} = {b:.15g}, expected {'no limit' if a == math.inf else f'at least {a:.15g}'}"
    return None


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


async def last(link: Link, stream: str, subject: str) -> Stored | None:
    """The last message on a subject, or None.

    Raises:
        AppendUncertainError: no answer.
        BrokerError: there is no such stream, or the server refuses.
    """
    return await _get(link, stream, subject=subject)


async def get(link: Link, stream: str, sequence: int) -> Stored | None:
    """The message with a stream sequence, or None if it is gone; raises as :func:`last`."""
    return await _get(link, stream, seq=sequence)


async def last_sequence(link: Link, subject: str) -> int:
    """The stream sequence of the last message on a subject that we may write to, 0 if there is none.

    It is what the server says when it refuses an append behind a sequence that no message ever has, so whoever may write the
    subject can ask, without being allowed to read anything.

    Raises:
        AppendUncertainError: no answer.
        BrokerError: the server refuses for another reason.
    """
    headers = {_EXPECTED_SEQUENCE: str(_NEVER)}
    try:
        answer = json.loads((await link.bulk.request(subject, b"", timeout=TIMEOUT_S, headers=headers)).data)
        error = answer["error"]
        if error["err_code"] == _WRONG_LAST_SEQUENCE:
            return int(error["description"].removeprefix("wrong last sequence: "))
    except (nats.errors.Error, TimeoutError) as silence:
        raise AppendUncertainError(f"{subject}: no answer: {silence!r}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise AppendUncertainError(f"{subject}: the server does not say what was stored last") from None
    raise BrokerError(f"{subject}: the server refuses: {error.get('description')} (code {error['err_code']})")


async def purge(link: Link, stream: str, subject: str, below_sequence: int) -> None:
    """Drop a subject's messages (wildcards allowed) with a smaller sequence; raises as :func:`last`."""
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    try:
        await _answer(api.purge_stream(stream, seq=below_sequence, subject=subject), stream)
    except nats.js.errors.NotFoundError:
        raise _missing(stream) from None


async def subjects(link: Link, stream: str, within: str) -> list[str]:
    """All subjects of stored messages that match ``within``; raises as :func:`last`."""
    found: list[str] = []
    while True:
        request = json.dumps({"subjects_filter": within, "offset": len(found)}).encode()
        reply = await _answer(link.bulk.request(f"$JS.API.STREAM.INFO.{stream}", request, timeout=TIMEOUT_S), stream)
        try:
            answer = json.loads(reply.data)
            page, total = list(answer["state"].get("subjects", ())), int(answer.get("total", 0))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise BrokerError(f"stream {stream}: {bytes(reply.data[:80])!r} came for its subjects") from None
        found += page
        if not page or len(found) >= total:
            return found


async def drop(link: Link, stream: str, sequences: Iterable[int]) -> None:
    """Drop single messages; those that are gone are as good. Raises as :func:`last`."""
    limit = asyncio.Semaphore(DROPS_AT_ONCE)

    async def drop_one(sequence: int) -> None:
        request = json.dumps({"seq": sequence, "no_erase": True}).encode()
        async with limit:
            reply = await _answer(link.bulk.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", request, timeout=TIMEOUT_S), stream)
        error = json.loads(reply.data).get("error")
        if error is not None and error.get("err_code") not in _GONE:
            raise BrokerError(f"stream {stream}: {error.get('description')} (code {error.get('err_code')})")

    async with asyncio.TaskGroup() as group:
        for sequence in sequences:
            group.create_task(drop_one(sequence))


async def delete(link: Link, stream: str) -> None:
    """Drop a stream and all it holds; none is as good."""
    try:
        await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).delete_stream(stream), stream)
    except nats.js.errors.NotFoundError:
        return


async def listed(link: Link) -> list[dict[str, Any]]:
    """What the server says of each of its streams: ``config``, ``state`` and ``created``, as in its API.

    Raises:
        BrokerError: the server refuses, or what it says is no list of streams.
    """
    found: list[dict[str, Any]] = []
    while True:
        request = json.dumps({"offset": len(found)}).encode()
        reply = await _answer(link.bulk.request("$JS.API.STREAM.LIST", request, timeout=TIMEOUT_S), "*")
        try:
            answer = json.loads(reply.data)
            if "error" in answer:
                raise BrokerError(f"the list of streams: {answer['error'].get('description')}")
            page, total = list(answer["streams"] or []), int(answer["total"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise BrokerError(f"the list of streams: the server answers {reply.data[:40]!r} ({error!r})") from None
        found += page
        if not page or len(found) >= total:
            return found


async def exists(link: Link, stream: str) -> bool:
    """Whether the server has the stream."""
    try:
        await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).stream_info(stream), stream)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def _get(link: Link, stream: str, subject: str | None = None, seq: int | None = None) -> Stored | None:
    api = link.bulk.jetstream(timeout=TIMEOUT_S)
    try:
        # any replica answers a direct get, also one that has not got the newest message yet
        direct = await _replicas(link, stream) == 1
        message = await _answer(api.get_msg(stream, seq=seq, subject=subject, direct=direct), stream)
    except nats.js.errors.NotFoundError as error:
        if error.err_code == _NO_STREAM:
            raise _missing(stream) from None
        return None
    except AppendUncertainError:
        if await exists(link, stream):  # nobody answers for a stream that is not there
            raise
        raise _missing(stream) from None
    return Stored(str(message.subject), int(message.seq or 0), bytes(message.data or b""))


async def _replicas(link: Link, stream: str) -> int:
    known = link.replicas.get(stream)
    if known is None:
        info = await _answer(link.bulk.jetstream(timeout=TIMEOUT_S).stream_info(stream), stream)
        known = link.replicas[stream] = int(info.config.num_replicas or 1)
    return known


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
        # a direct get that nobody answers, as without JetStream, has no code at all
        unanswered = error.code in (None, 503)
        text = f"stream {stream}: {error.description or 'JetStream does not answer'} (code {error.err_code})"
        raise (AppendUncertainError if unanswered else BrokerError)(text) from None
    except (nats.errors.Error, TimeoutError) as error:
        raise AppendUncertainError(f"stream {stream}: no answer: {error!r}") from None
