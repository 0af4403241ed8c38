"""A small key-value bucket with compare-and-set, for what is rarely written: settings, the map, members, owners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import nats.errors
import nats.js.api
import nats.js.errors

from diloco.errors import AppendUncertainError, BrokerError, FenceError
from diloco.nats.connection import Link

TIMEOUT_S = 5.0
ATTEMPTS = 6

T = TypeVar("T")


class Registry:
    """One bucket. Calls are tried again while the server is silent, which is safe: they read, or compare before they set."""

    def __init__(self, bucket: Any, name: str) -> None:
        self._bucket, self._name = bucket, name

    @classmethod
    async def open(cls, link: Link, bucket: str, *, create: bool) -> Registry:
        """The bucket, made if ``create``.

        Raises:
            BrokerError: there is no such bucket, or the server refuses or is silent.
        """
        api = link.control.jetstream(timeout=TIMEOUT_S)
        try:
            if create:
                return cls(await api.create_key_value(nats.js.api.KeyValueConfig(bucket=bucket, history=1)), bucket)
            return cls(await api.key_value(bucket), bucket)
        except nats.js.errors.Error as error:
            raise BrokerError(f"bucket {bucket}: {error}") from None
        except (nats.errors.Error, TimeoutError) as error:
            raise AppendUncertainError(f"bucket {bucket}: no answer: {error!r}") from None

    async def get(self, key: str) -> tuple[bytes, int] | None:
        """Value and revision, or None."""

        async def read() -> tuple[bytes, int] | None:
            try:
                entry = await self._bucket.get(key)
            except nats.js.errors.KeyNotFoundError:
                return None
            return bytes(entry.value or b""), int(entry.revision)

        return await self._patiently(read)

    async def create(self, key: str, value: bytes) -> int:
        """Set a key that does not exist; its revision.

        Raises:
            FenceError: it exists.
        """
        return await self._write(key, value, lambda: self._bucket.create(key, value))

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Set a key that is at ``revision``; its new revision.

        Raises:
            FenceError: it is at another one.
        """
        return await self._write(key, value, lambda: self._bucket.update(key, value, last=revision))

    async def put(self, key: str, value: bytes) -> int:
        """Set a key, whatever it was; its revision."""
        return await self._write(key, value, lambda: self._bucket.put(key, value))

    async def _write(self, key: str, value: bytes, call: Callable[[], Awaitable[int]]) -> int:
        async def write() -> int:
            try:
                return int(await call())
            except nats.js.errors.KeyWrongLastSequenceError:
                stored = await self.get(key)
                if stored is not None and stored[0] == value:
                    return stored[1]  # an earlier attempt of ours came through, or somebody wrote the same
                raise FenceError(f"bucket {self._name}: key {key!r} was set by somebody else") from None

        return await self._patiently(write)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                return await call()
            except (nats.js.errors.NotFoundError, nats.js.errors.BadRequestError) as error:
                raise BrokerError(f"bucket {self._name}: {error}") from None
            except (nats.errors.Error, TimeoutError) as error:
                if attempt == ATTEMPTS - 1:
                    raise AppendUncertainError(f"bucket {self._name}: no answer: {error!r}") from None
                await asyncio.sleep(0.2)
        raise AssertionError("unreachable")
