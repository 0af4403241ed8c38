"""A small key-value bucket with compare-and-set, for what is rarely written: settings, the map, members, owners."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors
from nats.js import JetStreamContext

from diloco.errors import AppendUncertainError, BrokerError, FenceError, FormatError
from diloco.nats.append import HEADER_BYTES, ID_HEADER, append_one
from diloco.nats.connection import Link, check_open
from diloco.nats.streams import DUPLICATE_WINDOW_S, OTHER_CONFIGURATION
from diloco.transport import Fence

TIMEOUT_S = 5.0
ATTEMPTS = 6
RETRY_S = 0.2
MAX_VALUE_BYTES = (1 << 20) - HEADER_BYTES  # one message of a server with the smallest max_payload that the protocol allows

_NO_MESSAGE = 10037  # error code of the JetStream API

T = TypeVar("T")


class Registry:
    """One bucket. Calls are tried again while the server is silent, which is safe: each write is known by an id of its own.

    So a compare-and-set succeeds for one caller only, also if another one sets the same value.
    """

    def __init__(self, link: Link, bucket: str) -> None:
        self._link, self._name = link, bucket

    @classmethod
    async def open(cls, link: Link, bucket: str, *, create: bool, replicas: int = 1) -> Registry:
        """The bucket, made if ``create``; one that an earlier version made is as good.

        Raises:
            BrokerError: there is no such bucket, it is kept otherwise than it should be, or the server refuses or is silent.
        """
        api = link.control.jetstream(timeout=TIMEOUT_S)
        # the client's own configuration of a bucket lets a header of any message empty it
        config = nats.js.api.StreamConfig(
            name=f"KV_{bucket}",
            subjects=[f"$KV.{bucket}.>"],
            discard=nats.js.api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            num_replicas=replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
            deny_delete=True,
        )
        try:
            if create:
                await api.add_stream(config)
            else:
                await api.key_value(bucket)
        except nats.js.errors.NotFoundError:
            raise BrokerError(f"bucket {bucket}: does not exist on the server") from None
        except nats.js.errors.APIError as error:
            if error.err_code != OTHER_CONFIGURATION or not await _keeps(api, config):
                raise BrokerError(f"bucket {bucket}: {error.description} (code {error.err_code})") from None
        except (nats.errors.Error, TimeoutError) as error:
            raise AppendUncertainError(f"bucket {bucket}: no answer: {error!r}") from None
        return cls(link, bucket)

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and revision, or None.

        Raises:
            FormatError: the value is larger than anybody of this protocol writes.
        """
        stored = await self._patiently(lambda: self._last(key))
        if stored is None or _deleted(stored):
            return None
        value = bytes(stored.data or b"")
        if len(value) > MAX_VALUE_BYTES:
            raise FormatError(
                f"bucket {self._name}: key {key!r} holds {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed; "
                "somebody else wrote it: choose another run name, or delete the bucket"
            )
        return value, int(stored.seq)

    async def create(self, key: str, value: bytes) -> int:
        """Set a key that does not exist; its revision.

        Raises:
            FenceError: it exists.
        """
        return await self._write(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set a key that is at ``revision``; its new revision.

        Raises:
            FenceError: it is at another one.
        """
        return await self._write(key, value, revision)

    async def put(self, key: str, value: bytes) -> int:
        """Set a key, whatever it was; its revision."""
        return await self._write(key, value, None)

    async def _write(self, key: str, value: bytes, revision: int | None) -> int:
        if len(value) > MAX_VALUE_BYTES:
            raise BrokerError(f"bucket {self._name}: key {key!r}: a value of {len(value)} bytes, at most {MAX_VALUE_BYTES} fit")
        subject, identifier = self._subject(key), uuid.uuid4().hex
        expected = revision

        async def write() -> int:
            fence = None if expected is None else Fence(subject, expected)
            return await append_one(self._link.control, subject, value, message_id=identifier, fence=fence, timeout_s=TIMEOUT_S)

        while True:
            try:
                return await self._patiently(write)
            except FenceError:
                stored = await self._patiently(lambda: self._last(key))
                if stored is not None and (stored.headers or {}).get(ID_HEADER) == identifier:
                    return int(stored.seq)  # an attempt that was not answered
                if revision == 0 and stored is not None and _deleted(stored) and expected != stored.seq:
                    expected = int(stored.seq)  # what was deleted does not exist
                    continue
                raise FenceError(f"bucket {self._name}: key {key!r} was set by somebody else") from None

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def _last(self, key: str) -> Any:
        api = self._link.control.jetstream(timeout=TIMEOUT_S)
        try:
            return await api.get_msg(f"KV_{self._name}", subject=self._subject(key))
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                return await call()
            except (nats.js.errors.NotFoundError, nats.js.errors.BadRequestError) as error:
                raise BrokerError(f"bucket {self._name}: {error.description} (code {error.err_code})") from None
            except (AppendUncertainError, nats.errors.Error, TimeoutError) as error:
                check_open(self._link.control)
                if attempt == ATTEMPTS - 1:
                    reason = str(error) or type(error).__name__
                    raise AppendUncertainError(f"bucket {self._name}: no answer: {reason}") from None
                await asyncio.sleep(RETRY_S)
        raise AssertionError("unreachable")


async def _keeps(api: JetStreamContext, wanted: nats.js.api.StreamConfig) -> bool:
    """Whether the stream that has a bucket's name keeps what the bucket is to keep."""
    try:
        config = (await api.stream_info(str(wanted.name))).config
    except (nats.js.errors.APIError, nats.errors.Error, TimeoutError):
        return False
    same = (config.subjects, config.max_msgs_per_subject) == (wanted.subjects, wanted.max_msgs_per_subject)
    return same and (config.num_replicas or 1) >= (wanted.num_replicas or 1)


def _deleted(stored: Any) -> bool:
    return (stored.headers or {}).get("KV-Operation") in ("DEL", "PURGE")
