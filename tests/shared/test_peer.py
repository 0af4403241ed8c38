"""Optimizer state from a peer, over a real server: what comes is what was lent, and nothing else is taken."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diloco.member import peer
from diloco.member.peer import Borrower, Layout, Lender, Loan
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.body import PART_BYTES
from diloco.wire.control import StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

RUN = b"\x07" * 8
RNG = np.random.default_rng(0)
ARRAYS: dict[str, NDArray[Any]] = {
    "optimizer/mu": RNG.normal(size=(3, 100_000)).astype(np.float32),  # three parts
    "optimizer/count": np.array(7, np.int32),
}
LAYOUT = Layout.of(ARRAYS)
DATA = LAYOUT.join(ARRAYS)


class Lab:
    """Peers on one server."""

    def __init__(self, link: NatsTransport) -> None:
        self.link, self.subjects = link, Subjects(f"peers-{uuid.uuid4().hex[:8]}")
        self.making: list[asyncio.Task[None]] = []

    async def lender(self, name: str, *, healthy: bool = True, gives: bool = True) -> Lender:
        """A peer that makes a copy soon after it is asked, as one does at a boundary."""
        lender = Lender(self.link, RUN, self.subjects, name, lambda: healthy, get_logger())
        await lender.serve()
        if gives:
            self.making.append(asyncio.create_task(self._give(lender)))
        return lender

    async def _give(self, lender: Lender) -> None:
        while True:
            if lender.wanted:
                await asyncio.to_thread(lender.give, 42, [3, 4], LAYOUT, DATA)
            await asyncio.sleep(0.02)

    async def liar(self, name: str, answer: Callable[[StateRequest], bytes]) -> None:
        """A peer that answers as it likes."""

        async def hear(message: Heard) -> None:
            request, _, _ = framing.unpack(message.data, StateRequest, RUN)
            await message.respond(answer(request))

        await self.link.subscribe(self.subjects.state(name), hear)

    async def borrow(self, *peers: str) -> Loan | None:
        return await Borrower(self.link, RUN, self.subjects, "newcomer", LAYOUT, get_logger()).borrow(peers)


@pytest.fixture
async def lab(link: NatsTransport) -> AsyncIterator[Lab]:
    made = Lab(link)
    yield made
    for task in made.making:
        task.cancel()


def same(loan: Loan | None, lent_by: str) -> None:
    assert loan is not None
    assert (loan.peer, loan.step, loan.versions) == (lent_by, 42, [3, 4])
    assert loan.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loan.arrays[name], array, strict=True)


async def test_what_comes_is_what_was_lent(lab: Lab) -> None:
    await lab.lender("learner-0")
    same(await lab.borrow("learner-0"), "learner-0")


async def test_one_copy_serves_all_who_ask(lab: Lab) -> None:
    lender = await lab.lender("learner-0")
    loans = await asyncio.gather(*(lab.borrow("learner-0") for _ in range(3)))
    assert len({id(loan) for loan in loans}) == 3
    for loan in loans:
        same(loan, "learner-0")
    assert not lender.wanted
    assert lender._lent is not None


async def test_a_copy_is_dropped_when_nobody_asks_for_it_any_more(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "KEEP_S", 0.5)
    lender = await lab.lender("learner-0")
    same(await lab.borrow("learner-0"), "learner-0")
    while lender._lent is not None:
        await asyncio.sleep(0.01)
    same(await lab.borrow("learner-0"), "learner-0")  # and another one is made


async def test_the_next_peer_is_asked_if_one_has_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "READY_TIMEOUT_S", 0.3)
    await lab.lender("warming", healthy=False)
    await lab.lender("busy", gives=False)
    await lab.lender("learner-2")
    same(await lab.borrow("nobody", "warming", "busy", "learner-2"), "learner-2")
    assert await lab.borrow("nobody", "warming") is None
    assert await lab.borrow() is None


def loan(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "peer": "liar",
        "copy": bytes(8),
        "step": 1,
        "versions": [0, 0],
        "layout": LAYOUT.digest,
        "size_bytes": DATA.size,
        "content_hash": bytes(32),
    }
    return framing.pack(StateLoan(**(values | changes)), RUN)


def part(request: StateRequest, cut: int = 0) -> bytes:
    data = DATA[request.offset : request.offset + PART_BYTES].tobytes()
    return framing.pack(StatePart(request.copy, request.offset), RUN, data[cut:])


@pytest.mark.parametrize(
    ("reason", "answer"),
    [
        ("no message", lambda request: b"\x00"),
        ("another model", lambda request: loan(layout=bytes(32))),
        ("another size, stated to make us allocate it", lambda request: loan(size_bytes=2**40)),
        ("a wrong hash", lambda request: part(request) if request.copy else loan()),
        ("a short part", lambda request: part(request, 1) if request.copy else loan()),
        ("another part", lambda request: framing.pack(StatePart(request.copy, 1), RUN, b"") if request.copy else loan()),
        ("gone half-way", lambda request: (b"" if request.offset else part(request)) if request.copy else loan()),
    ],
)
async def test_what_does_not_fit_is_refused(lab: Lab, reason: str, answer: Callable[[StateRequest], bytes]) -> None:
    await lab.liar("liar", answer)
    await lab.lender("learner-1")
    assert await lab.borrow("liar") is None, reason
    same(await lab.borrow("liar", "learner-1"), "learner-1")


async def test_a_lender_answers_no_nonsense(lab: Lab) -> None:
    lender = await lab.lender("learner-0")
    same(await lab.borrow("learner-0"), "learner-0")
    subject = lab.subjects.state("learner-0")
    for request in (
        StateRequest("a", bytes(8), 0),  # another copy
        StateRequest("a", lender._lent[0].copy if lender._lent else b"", DATA.size),  # beyond its end
    ):
        assert await lab.link.request(subject, framing.pack(request, RUN), 2.0) == b""
    assert await lab.link.request(subject, b"garbage", 0.2) is None
    assert lender.refused.total == 1


def test_layouts_differ_by_name_shape_and_type() -> None:
    one = Layout.of({"a": np.zeros(3, np.float32)})
    others: list[dict[str, Any]] = [
        {"b": np.zeros(3, np.float32)},
        {"a": np.zeros((3, 1), np.float32)},
        {"a": np.zeros(3, np.int32)},
    ]
    assert len({one.digest, *(Layout.of(other).digest for other in others)}) == 4
    assert one.size_bytes == 12
    empty = Layout.of({})
    assert empty.split(empty.join({})) == {}
