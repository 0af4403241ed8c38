"""A small key-value bucket with compare-and-set, for values that are rarely written: settings, the map, members, owners."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors
from nats.js import JetStreamContext

from diloco.errors import AppendUncertainError, BrokerError, FenceError, FormatError
from diloco.nats.append import HEADER_BYTES, ID_HEADER, append_one
from diloco.nats.connection import NatsLink, check_open
from diloco.nats.streams import MAX_VALUE_BYTES, OTHER_CONFIGURATION, TIMEOUT_S, configured, look_up
from diloco.process.retry import RETRY_S
from diloco.transport import Fence, Stored

ATTEMPTS = 6  # half a minute in all: as long as a cluster may need to elect a leader
MAX_WRITTEN_BYTES = MAX_VALUE_BYTES - HEADER_BYTES  # the stream takes no message, headers included, that no reader would take

# error codes of the JetStream API
_NO_MESSAGE = 10037
_NO_PEERS = 10005

T = TypeVar("T")


class Registry:
    """One bucket. Calls are tried again while the server is silent, which is safe: each write has an id of its own.

    So a compare-and-set succeeds for one caller alone, also if another one sets the same value.
    """

    def __init__(self, link: NatsLink, bucket: str) -> None:
        self._link, self._name = link, bucket

    @classmethod
    async def open(cls, link: NatsLink, bucket: str, *, create: bool, replicas: int = 1) -> Registry:
        """Open the bucket, and make it if ``create``; one that an earlier version made is as good.

        Raises:
            BrokerError: there is no such bucket, it is kept otherwise than it should be, or the server refuses or is silent.
        """
        api = link.control.jetstream(timeout=TIMEOUT_S)
        # the client's own configuration of a bucket lets a header of any message empty it
        config = configured(
            nats.js.api.StreamConfig(
                name=f"KV_{bucket}",
                subjects=[f"$KV.{bucket}.>"],
                discard=nats.js.api.DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                num_replicas=replicas,
                deny_delete=True,
            )
        )
        try:
            if create:
                await api.add_stream(config)
            else:
                await api.key_value(bucket)
        except nats.js.errors.NotFoundError:
            raise BrokerError(f"bucket {bucket}: does not exist on the server") from None
        except nats.js.errors.APIError as error:
            if error.err_code == _NO_PEERS:  # a cluster that has just begun, or of which a server is away
                raise AppendUncertainError(
                    f"bucket {bucket}: the cluster does not have {replicas} servers for it now: start the others"
                ) from None
            if error.err_code != OTHER_CONFIGURATION or not await _keeps(api, config):
                raise BrokerError(f"bucket {bucket}: {error.description} (code {error.err_code})") from None
        except (nats.errors.Error, TimeoutError) as error:
            raise AppendUncertainError(f"bucket {bucket}: no answer: {error!r}") from None
        return cls(link, bucket)

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Return a key's value and revision, or None if it does not exist.

        Raises:
            FormatError: the value is larger than the protocol allows.
        """
        stored, headers = await self._retried(lambda: self._last(key))
        if stored is None or _deleted(headers):
            return None
        value = stored.data
        if len(value) > MAX_VALUE_BYTES:
            raise FormatError(
                f"bucket {self._name}: key {key!r} holds {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed; "
                "another program wrote it: choose another run name, or delete the bucket"
            )
        return value, stored.sequence

    async def after(self, keys: str, revision: int) -> tuple[str, bytes, int] | None:
        """Return key, value and revision of the first value set after ``revision`` under ``keys`` (wildcards allowed), or None.

        A value that was deleted is empty. Nothing is refused for its size: the stream bounds it, and one learner's value must
        not keep others' from being read.
        """
        which = {"next_by_subj": self._subject(keys), "seq": revision + 1}
        stored, headers = await self._retried(lambda: self._found(which))
        if stored is None:
            return None
        return stored.subject.removeprefix(self._subject("")), b"" if _deleted(headers) else stored.data, stored.sequence

    async def create(self, key: str, value: bytes) -> int:
        """Set a key that does not exist; return its revision.

        Raises:
            FenceError: it exists.
        """
        return await self._write(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set a key that is at ``revision``; return its new revision.

        Raises:
            FenceError: it is at another one.
        """
        return await self._write(key, value, revision)

    async def put(self, key: str, value: bytes) -> int:
        """Set a key without a condition; return its revision."""
        return await self._write(key, value, None)

    async def _write(self, key: str, value: bytes, revision: int | None) -> int:
        if len(value) > MAX_WRITTEN_BYTES:
            raise BrokerError(
                f"bucket {self._name}: key {key!r}: the value has {len(value)} bytes, at most {MAX_WRITTEN_BYTES} are allowed"
            )
        subject, identifier = self._subject(key), uuid.uuid4().hex
        expected = revision

        async def write() -> int:
            fence = None if expected is None else Fence(subject, expected)
            return await append_one(self._link.control, subject, value, message_id=identifier, fence=fence, timeout_s=TIMEOUT_S)

        while True:
            try:
                return await self._retried(write)
            except FenceError:
                stored, headers = await self._retried(lambda: self._last(key))
                if stored is not None and headers.get(ID_HEADER) == identifier:
                    return stored.sequence  # an attempt that was not answered
                if revision == 0 and stored is not None and _deleted(headers) and expected != stored.sequence:
                    expected = stored.sequence  # a deleted key does not exist
                    continue
                raise FenceError(f"bucket {self._name}: key {key!r} was set by another process") from None

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def _last(self, key: str) -> tuple[Stored | None, dict[str, str]]:
        return await self._found({"last_by_subj": self._subject(key)})

    async def _found(self, which: Mapping[str, Any]) -> tuple[Stored | None, dict[str, str]]:
        try:
            return await look_up(self._link.control, f"KV_{self._name}", which)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _NO_MESSAGE:
                return None, {}
            raise

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
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
    """Whether the stream with a bucket's name keeps as much as the bucket has to."""
    try:
        config = (await api.stream_info(str(wanted.name))).config
    except (nats.js.errors.APIError, nats.errors.Error, TimeoutError):
        return False
    same = (config.subjects, config.max_msgs_per_subject) == (wanted.subjects, wanted.max_msgs_per_subject)
    return same and (config.num_replicas or 1) >= (wanted.num_replicas or 1)


def _deleted(headers: Mapping[str, str]) -> bool:
    return headers.get("KV-Operation") in ("DEL", "PURGE")
