"""Optimizer state from a peer, over a real server: what comes is what was lent, and nothing else is taken."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import structlog
from blake3 import blake3
from numpy.typing import NDArray
from tests.made.heartbeats import learner_heartbeat
from tests.pace import DEADLINE_S, scaled_s

from diloco.core.tensors.chunks import Chunk
from diloco.errors import FormatError, NonFiniteError, RunError
from diloco.member import peer
from diloco.member.peer import Borrower, InMemory, Layout, Lendable, Lender, Loan, LoanAge, LoanWatch
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import StateLoan, StatePart, StateRequest
from diloco.wire.subjects import Subjects

RUN = b"\x07" * 8
RNG = np.random.default_rng(0)
ARRAYS: dict[str, NDArray[Any]] = {
    "optimizer/mu": RNG.normal(size=(3, 100_000)).astype(np.float32),  # three parts
    "optimizer/nu": RNG.random(size=5).astype(np.float32),
    "optimizer/count": np.array(7, np.int32),
}
LAYOUT = Layout.of(ARRAYS)
STATE = InMemory(ARRAYS)


class Borrowed:
    """A loan, and the chunks that came of it."""

    def __init__(self) -> None:
        self.loan: Loan | None = None
        self.chunks: dict[Chunk, NDArray[Any]] = {}

    def put(self, chunk: Chunk, values: NDArray[Any]) -> None:
        self.chunks[chunk] = values


class Lab:
    """Peers on one server."""

    def __init__(self, link: NatsTransport) -> None:
        self.link, self.subjects = link, Subjects(f"peers-{uuid.uuid4().hex[:8]}")
        self.making: list[asyncio.Task[None]] = []

    async def lender(self, name: str, *, healthy: bool = True, gives: bool = True, state: Lendable = STATE) -> Lender:
        """A peer that makes a copy soon after it is asked, as one does at a boundary."""
        lender = Lender(self.link, RUN, self.subjects, name, lambda: healthy, get_logger())
        await lender.serve()
        if gives:
            self.making.append(asyncio.create_task(self._give(lender, state)))
        return lender

    async def _give(self, lender: Lender, state: Lendable) -> None:
        while True:
            if lender.wanted:
                await asyncio.to_thread(lender.give, 42, [3, 4], state)
            await asyncio.sleep(0.02)

    async def liar(self, name: str, answer: Callable[[StateRequest], bytes]) -> None:
        """A peer that answers as it likes."""

        async def hear(message: Heard) -> None:
            request, _, _ = framing.unpack(message.data, StateRequest, RUN)
            await message.respond(answer(request))

        await self.link.subscribe(self.subjects.state(name), hear)

    async def borrow(self, *peers: str, wanted: Sequence[Chunk] = tuple(LAYOUT.wholes())) -> Borrowed:
        borrowed = Borrowed()
        borrower = Borrower(self.link, RUN, self.subjects, "newcomer", LAYOUT, wanted, borrowed.put, get_logger())
        borrowed.loan = await borrower.borrow(peers)
        return borrowed


@pytest.fixture
async def lab(link: NatsTransport) -> AsyncIterator[Lab]:
    made = Lab(link)
    yield made
    for task in made.making:
        task.cancel()


def same(borrowed: Borrowed, lent_by: str) -> None:
    assert borrowed.loan is not None
    assert (borrowed.loan.peer, borrowed.loan.step, borrowed.loan.versions) == (lent_by, 42, [3, 4])
    assert borrowed.loan.content_hash == InMemory(ARRAYS).content_hash
    for chunk, values in borrowed.chunks.items():
        np.testing.assert_array_equal(values, ARRAYS[chunk.name][chunk.where], strict=True)


@pytest.mark.services
async def test_what_comes_is_what_was_lent(lab: Lab) -> None:
    await lab.lender("learner-0")
    borrowed = await lab.borrow("learner-0")
    same(borrowed, "learner-0")
    assert list(borrowed.chunks) == LAYOUT.wholes()


def _with(values: dict[str, float]) -> InMemory:
    """A state that is fit but for one value of an array each."""
    arrays = {name: array.copy() for name, array in ARRAYS.items()}
    for name, value in values.items():
        arrays[name].reshape(-1)[-1] = value
    return InMemory(arrays)


@pytest.mark.services
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"optimizer/mu": np.nan}, "state of broken: optimizer/mu holds NaN or infinity"),
        ({"optimizer/mu": -np.inf}, "state of broken: optimizer/mu holds NaN or infinity"),
        ({"optimizer/mu": -2e30}, "state of broken: optimizer/mu holds 2e+30, expected at most 1e+30"),
        ({"optimizer/nu": -1e-9}, "state of broken: optimizer/nu holds -1e-09, expected no negative value of a second moment"),
    ],
)
async def test_a_state_that_no_optimizer_can_step_with_is_refused_and_the_next_peer_is_asked(
    lab: Lab, values: dict[str, float], said: str
) -> None:
    await lab.lender("broken", state=_with(values))
    await lab.lender("learner-1")
    with structlog.testing.capture_logs() as events:
        same(await lab.borrow("broken", "learner-1"), "learner-1")
    [refused] = [event for event in events if event["event"] == "state_refused"]
    assert (refused["learner"], refused["reason"].split(":")[0:2]) == ("broken", said.split(":")[0:2])
    assert said.split(",")[0] in refused["reason"]


class _Slow(InMemory):
    """A state of which one slice never comes; ``lets_go`` ends the waiting."""

    def __init__(self) -> None:
        super().__init__(ARRAYS)
        self.lets_go = threading.Event()

    def read(self, wanted: Chunk) -> NDArray[Any]:
        if wanted.name == "optimizer/nu":
            self.lets_go.wait()
        return super().read(wanted)


@pytest.mark.services
async def test_a_loan_has_one_deadline_and_the_next_peer_is_asked_after_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a single answer may take."""
    monkeypatch.setattr(peer, "ANSWER_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(peer, "READY_TIMEOUT_S", scaled_s(2.0))
    slow = _Slow()
    await lab.lender("slow", state=slow)
    await lab.lender("learner-1")
    try:
        with structlog.testing.capture_logs() as events:
            same(await lab.borrow("slow", "learner-1"), "learner-1")
    finally:
        slow.lets_go.set()
    [given_up] = [event for event in events if event["event"] == "state_not_lent"]
    assert given_up["learner"] == "slow"
    assert "its state did not come within" in given_up["reason"]


@pytest.mark.services
async def test_a_borrower_gets_the_slices_that_it_asks_for_and_no_more(lab: Lab, link: NatsTransport) -> None:
    await lab.lender("learner-0")
    columns = [Chunk("optimizer/mu", (3, 100_000), "float32", (0, first), (3, first + 25_000)) for first in (25_000, 75_000)]
    before_bytes = link.bytes_in
    borrowed = await lab.borrow("learner-0", wanted=columns)
    same(borrowed, "learner-0")
    assert set(borrowed.chunks) == set(columns)
    lent_bytes = sum(chunk.size_bytes for chunk in columns)
    assert lent_bytes <= link.bytes_in - before_bytes < 2.1 * lent_bytes + 20_000  # what the lender hears comes in here too


@pytest.mark.services
async def test_one_copy_serves_all_who_ask(lab: Lab) -> None:
    lender = await lab.lender("learner-0")
    loans = await asyncio.gather(*(lab.borrow("learner-0") for _ in range(3)))
    for loan in loans:
        same(loan, "learner-0")
    assert not lender.wanted
    assert len(lender._copies) == 1


@pytest.mark.services
async def test_a_copy_is_dropped_when_nobody_asks_for_it_any_more(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "KEEP_S", scaled_s(0.5))
    lender = await lab.lender("learner-0")
    same(await lab.borrow("learner-0"), "learner-0")
    while lender._copies:
        await asyncio.sleep(0.01)
    same(await lab.borrow("learner-0"), "learner-0")  # and another one is made


@pytest.mark.services
async def test_the_next_peer_is_asked_if_one_has_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "READY_TIMEOUT_S", scaled_s(1.0))
    await lab.lender("warming", healthy=False)
    await lab.lender("busy", gives=False)
    await lab.lender("learner-2")
    same(await lab.borrow("absent", "warming", "busy", "learner-2"), "learner-2")
    assert (await lab.borrow("absent", "warming")).loan is None
    assert (await lab.borrow()).loan is None


@pytest.mark.services
async def test_a_large_copy_may_take_its_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "READY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(peer, "COPIED_BYTES_S", LAYOUT.size_bytes / 100)
    lender = await lab.lender("learner-0", gives=False)
    borrowing = asyncio.create_task(lab.borrow("learner-0"))
    while not lender.wanted:
        await asyncio.sleep(0.01)
    asked_s = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < asked_s + 0.3:  # longer than a small one may take
        assert not borrowing.done()
        await asyncio.sleep(0.01)
    await asyncio.to_thread(lender.give, 42, [3, 4], InMemory(ARRAYS))
    same(await borrowing, "learner-0")


@pytest.mark.services
async def test_a_peer_that_makes_no_copy_is_not_waited_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "READY_TIMEOUT_S", 1000.0)
    refusing = await lab.lender("refusing", gives=False)
    await lab.lender("learner-1")
    borrowing = asyncio.create_task(lab.borrow("refusing", "learner-1"))
    while not refusing.wanted:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(refusing.give_none)
    same(await borrowing, "learner-1")
    assert not refusing.wanted


class Copies:
    """A peer at work: each copy that it makes is ten steps on, and holds other values. ``makes`` bounds them."""

    def __init__(self, lender: Lender, makes: int = 2, state: Callable[[dict[str, NDArray[Any]]], Lendable] = InMemory) -> None:
        self.lender, self.made, self.makes, self.state = lender, 0, makes, state

    async def work(self) -> None:
        while True:
            if self.lender.wanted and self.made < self.makes:
                arrays = {name: (values + self.made).astype(values.dtype) for name, values in ARRAYS.items()}
                self.made += 1
                await asyncio.to_thread(self.lender.give, 10 * self.made, [3, 4], self.state(arrays))
            elif self.lender.wanted:
                self.lender.give_none()
            await asyncio.sleep(0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer copy may be made right after another."""
    monkeypatch.setattr(peer, "COPY_AGAIN_S", 0.0)


async def again(lab: Lab, *peers: str) -> tuple[Loan, Borrowed]:
    """Borrow from the first of ``peers``, and a newer copy then; return the first loan, and what there is in the end."""
    borrowed = Borrowed()
    borrower = Borrower(lab.link, RUN, lab.subjects, "newcomer", LAYOUT, LAYOUT.wholes(), borrowed.put, get_logger())
    first = await borrower.borrow(peers)
    assert first is not None
    borrowed.loan = await borrower.borrow_newer(first, peers)
    return first, borrowed


@pytest.mark.services
@pytest.mark.usefixtures("at_once")
async def test_a_newer_copy_is_whole_and_of_a_later_step(lab: Lab) -> None:
    lab.making.append(asyncio.create_task(Copies(await lab.lender("learner-0", gives=False)).work()))
    first, borrowed = await again(lab, "learner-0")
    assert borrowed.loan is not None
    assert (first.step, borrowed.loan.step) == (10, 20)
    for chunk, values in borrowed.chunks.items():
        np.testing.assert_array_equal(values, (ARRAYS[chunk.name] + 1).astype(chunk.dtype), strict=True)


@pytest.mark.services
async def test_where_no_newer_copy_is_made_the_first_one_serves(lab: Lab) -> None:
    """As by a lender of an earlier version, which names the same copy again, or one that has just made a copy."""
    await lab.lender("learner-0")
    first, borrowed = await again(lab, "learner-0")
    assert borrowed.loan is first
    same(borrowed, "learner-0")


class _HalfGone(InMemory):
    """A copy of which, if it is not the first one, a slice is gone when the four others have been read."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        super().__init__(arrays)
        self.first, self.others = int(arrays["optimizer/count"]) == 7, threading.Semaphore(0)

    def read(self, wanted: Chunk) -> NDArray[Any]:
        if wanted.name != "optimizer/nu":
            self.others.release()
        elif not self.first:
            for _ in range(4):
                self.others.acquire()
            raise RunError("it is gone")
        return super().read(wanted)


@pytest.mark.services
@pytest.mark.usefixtures("at_once")
async def test_chunks_of_two_copies_are_never_mixed(lab: Lab) -> None:
    """The newer copy breaks off half-way: all is borrowed again, from the next peer."""
    lab.making.append(asyncio.create_task(Copies(await lab.lender("learner-0", gives=False), state=_HalfGone).work()))
    await lab.lender("learner-1")
    first, borrowed = await again(lab, "learner-0", "learner-1")
    assert first.peer == "learner-0"
    same(borrowed, "learner-1")


@pytest.mark.services
@pytest.mark.usefixtures("at_once")
async def test_a_peer_that_still_reads_the_older_copy_gets_all_of_it(lab: Lab) -> None:
    lender = await lab.lender("learner-0", gives=False)
    lab.making.append(asyncio.create_task(Copies(lender, makes=3).work()))
    await again(lab, "learner-0")
    assert [copy.loan.step for copy in lender._copies] == [10, 20]
    chunk = LAYOUT.wholes()[0]
    for copy, count in zip(lender._copies, (7, 8), strict=True):
        request = StateRequest("other", copy.loan.copy, 0, list(chunk.start), list(chunk.stop))
        answer = await lab.link.request(lab.subjects.state("learner-0"), framing.pack(request, RUN), DEADLINE_S)
        assert answer is not None
        assert int(np.frombuffer(framing.unpack(answer, StatePart, RUN)[2], np.int32)[0]) == count
    # two are the most: a third one is not made while both are kept
    request = StateRequest("other", b"", 21, [], [])
    answer = await lab.link.request(lab.subjects.state("learner-0"), framing.pack(request, RUN), DEADLINE_S)
    assert answer is not None
    assert framing.unpack(answer, StateLoan, RUN)[0].step == 20


def _loan(step: int = 100, named_s: float = 50.0) -> Loan:
    return Loan("ann", step, [3, 4], bytes(32), named_s)


@pytest.mark.parametrize(
    ("now_s", "step", "step_s", "age_s", "limit_s"),
    [
        (79.0, None, None, 29.0, 30.0),  # not heard of: by the borrower's clock
        (81.0, None, None, 31.0, 30.0),
        (60.0, 110, 1.0, 10.0, 30.0),  # 24 steps of 1 s are less than 30 s
        (60.0, 140, 1.0, 40.0, 30.0),  # the copy was made for another peer, 40 steps ago
        (90.0, 104, 10.0, 40.0, 240.0),  # H is 24 steps of 10 s
        (300.0, 125, 10.0, 250.0, 240.0),
        (81.0, 90, 10.0, 31.0, 240.0),  # its newest heartbeat is older than the copy
    ],
)
def test_the_age_of_a_loan_by_hand(now_s: float, step: int | None, step_s: float | None, age_s: float, limit_s: float) -> None:
    lender = None if step is None or step_s is None else learner_heartbeat("ann", step, 0, 0, tokens=40, step_s=step_s)
    age = LoanAge.of(_loan(), now_s, 24, lender)
    assert (age.age_s, age.limit_s, age.is_old) == (age_s, limit_s, age_s > limit_s)


@dataclass(frozen=True)
class Beat:
    """A heartbeat as it is heard."""

    subject: str
    data: bytes

    async def respond(self, data: bytes) -> None:
        raise AssertionError("heartbeats are not answered")


def beat(step: int, step_s: float = 1.0) -> bytes:
    return framing.pack(learner_heartbeat("learner-0", step, 0, 0, tokens=40, step_s=step_s), RUN)


async def watched(lab: Lab, frame: bytes) -> tuple[Loan | None, list[MutableMapping[str, Any]]]:
    """Borrow of a peer whose copies are of steps 10 and 20 and whose heartbeat this is; return the loan, and what is said."""
    lab.making.append(asyncio.create_task(Copies(await lab.lender("learner-0", gives=False)).work()))
    borrowed = Borrowed()
    borrower = Borrower(lab.link, RUN, lab.subjects, "newcomer", LAYOUT, LAYOUT.wholes(), borrowed.put, get_logger())
    watch = LoanWatch(RUN, lambda: 24, get_logger())
    watch.watch(["learner-0"])
    for name, data in (("learner-0", frame), ("learner-1", b"of a peer that is not asked")):
        watch.hear(Beat(lab.subjects.heartbeat(name), data))
    with structlog.testing.capture_logs() as events:
        lent = await watch.borrow(borrower, ["learner-0"])
    return lent, [event for event in events if event["event"] in ("state_asked_again", "state_old")]


@pytest.mark.services
@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("frame", "step", "said"),
    [
        (beat(40), 10, []),  # 30 steps of 1 s
        (beat(45), 20, [("state_asked_again", 10, 35.0, 30.0)]),  # the newer one is 25 s old
        (beat(51), 20, [("state_asked_again", 10, 41.0, 30.0), ("state_old", 20, 31.0, 30.0)]),
        (beat(36, 10.0), 20, [("state_asked_again", 10, 260.0, 240.0)]),  # H is 24 steps of 10 s
        (b"garbage", 10, []),
    ],
)
async def test_a_loan_that_is_old_when_it_is_complete_is_asked_for_once_more(
    lab: Lab, frame: bytes, step: int, said: list[tuple[str, int, float, float]]
) -> None:
    lent, events = await watched(lab, frame)
    assert lent is not None
    assert lent.step == step
    assert [(event["event"], event["step"], event["age_s"], event["limit_s"]) for event in events] == said


@pytest.mark.services
async def test_where_no_newer_copy_is_made_the_older_one_is_used_and_said(lab: Lab) -> None:
    """The lender has made its copy a moment ago."""
    lent, events = await watched(lab, beat(51))
    assert lent is not None
    assert lent.step == 10
    assert [(event["event"], event["step"]) for event in events] == [("state_asked_again", 10), ("state_old", 10)]


def loan(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "peer": "liar",
        "copy": bytes(8),
        "step": 1,
        "versions": [0, 0],
        "layout": LAYOUT.digest,
        "size_bytes": LAYOUT.size_bytes,
        "content_hash": bytes(32),
    }
    return framing.pack(StateLoan(**(values | changes)), RUN)


def part(request: StateRequest, cut: int = 0, **changes: Any) -> bytes:
    chunk = LAYOUT.slice(request.array, request.start, request.stop)
    assert chunk is not None
    data = ARRAYS[chunk.name][chunk.where].tobytes()[cut:]
    values: dict[str, Any] = {"copy": request.copy, "array": request.array, "start": request.start}
    values["content_hash"] = blake3(data).digest()
    return framing.pack(StatePart(**(values | changes)), RUN, data)


@pytest.mark.services
@pytest.mark.parametrize(
    ("reason", "answer"),
    [
        ("no message", lambda request: b"\x00"),
        ("another model", lambda request: loan(layout=bytes(32))),
        ("another size, stated to make us allocate it", lambda request: loan(size_bytes=2**40)),
        ("a wrong hash", lambda request: part(request, content_hash=bytes(32)) if request.copy else loan()),
        ("a short part", lambda request: part(request, 1) if request.copy else loan()),
        ("another part", lambda request: part(request, start=[7, 7]) if request.copy else loan()),
        ("another array", lambda request: part(request, array=7) if request.copy else loan()),
        ("gone half-way", lambda request: (b"" if any(request.start) else part(request)) if request.copy else loan()),
    ],
)
async def test_what_does_not_fit_is_refused(lab: Lab, reason: str, answer: Callable[[StateRequest], bytes]) -> None:
    await lab.liar("liar", answer)
    await lab.lender("learner-1")
    assert (await lab.borrow("liar")).loan is None, reason
    borrowed = await lab.borrow("liar", "learner-1")
    same(borrowed, "learner-1")
    assert set(borrowed.chunks) == set(LAYOUT.wholes())


@pytest.mark.services
async def test_a_lender_answers_no_nonsense(lab: Lab) -> None:
    lender = await lab.lender("learner-0")
    same(await lab.borrow("learner-0"), "learner-0")
    subject = lab.subjects.state("learner-0")
    copy = lender._copies[0].loan.copy
    for request in (
        StateRequest("a", bytes(8), 0, [], []),  # another copy
        StateRequest("a", copy, 2, [], []),  # no array
        StateRequest("a", copy, 1, [0], [1]),  # of two axes
        StateRequest("a", copy, 1, [0, 0], [1, 100_001]),  # beyond its end
        StateRequest("a", copy, 1, [1, 0], [1, 100]),  # nothing
        StateRequest("a", copy, 1, [0, 0], [2, 100_000]),  # more than a part
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
    assert Layout.of({}).wholes() == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -2e30])
def test_values_of_a_type_that_numpy_does_not_know_are_looked_at_too(value: float) -> None:
    with pytest.raises((NonFiniteError, FormatError), match="state of ann: optimizer/mu holds"):
        peer._check_values("state of ann: optimizer/mu", "optimizer/mu", np.array([1.0, value]).astype(ml_dtypes.bfloat16))
