"""Names are resolved in threads that no process waits for, one for a name."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest
from tests.pace import DEADLINE_S

from diloco.process import resolving

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 4222))]


class Silent:
    """A resolver that answers when it is released."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released = threading.Event()

    def __call__(self, host: str, port: int, *rest: int) -> list[Any]:
        self.asked.append(host)
        self.released.wait(DEADLINE_S)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return FOUND


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Silent:
    made = Silent()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    return made


def test_a_process_ends_while_a_name_is_resolved_and_its_other_threads_are_free(silent: Silent) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        resolving.use_own_threads(loop)
        asking = [asyncio.ensure_future(loop.getaddrinfo(f"host-{number}", 4222)) for number in range(64)]
        await asyncio.sleep(0)
        seven = await asyncio.to_thread(lambda: 7)
        for each in asking:
            each.cancel()
        return seven

    began_s = time.monotonic()
    assert asyncio.run(main()) == 7
    assert time.monotonic() - began_s < DEADLINE_S / 2
    silent.released.set()


async def test_those_that_ask_for_one_name_meanwhile_share_a_thread_and_its_answer(silent: Silent) -> None:
    loop = asyncio.get_running_loop()
    resolving.use_own_threads(loop)
    first, second, given_up = (asyncio.ensure_future(loop.getaddrinfo("nats-us", 4222)) for _ in range(3))
    await asyncio.sleep(0)
    given_up.cancel()
    silent.released.set()
    assert await first == await second == FOUND
    assert silent.asked == ["nats-us"]
    assert await loop.getaddrinfo("nats-us", 4222) == FOUND
    assert silent.asked == ["nats-us", "nats-us"]  # answers are not kept


async def test_an_unknown_name_is_an_error_also_if_no_task_waits_for_it_any_more(silent: Silent) -> None:
    loop = asyncio.get_running_loop()
    resolving.use_own_threads(loop)
    asking, given_up = (asyncio.ensure_future(loop.getaddrinfo("unknown", port)) for port in (1, 2))
    await asyncio.sleep(0)
    given_up.cancel()
    silent.released.set()
    with pytest.raises(socket.gaierror, match="not known"):
        await asking
