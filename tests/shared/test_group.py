"""Processes of one learner meet, agree, talk and lose each other, over real connections."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import pytest
from blake3 import blake3
from tests.made.process_groups import FACTS, OPEN_GROUPS, OPEN_LINKS, REGROUP_S, RUN, address, group, group_of, met, until
from tests.pace import DEADLINE_S, scaled_s

from diloco.core.tensors.fragments import Piece
from diloco.core.tensors.rows import FragmentRows, RowLayout
from diloco.elastic.renewing import Renewing
from diloco.errors import FormatError, HashError, IslandError, SettingsError
from diloco.process import renewal
from diloco.process.observe import get_logger
from diloco.processes import links, meeting, proving
from diloco.processes.group import Group
from diloco.processes.links import Links
from diloco.processes.proving import MAX_STRANGERS, prove, secret_of
from diloco.processes.shipping import Shipping
from diloco.processes.stream import HELLO_BYTES, LENGTHS, Stream
from diloco.settings.service import LearnerSettings, ProcessesSettings, host_and_port
from diloco.wire import process_messages as island
from diloco.wire.framing import Message
from diloco.wire.process_messages import Arrival, Challenge, Greeting, Leaving, Proof, Staged, facts

pytestmark = pytest.mark.usefixtures("groups_closed")

START_S = scaled_s(1.5)  # of a process that gives up, since the others do not come


async def served(talk: Callable[[Stream], Coroutine[Any, Any, None]], host: str, port: int) -> asyncio.Server:
    """Talk with each who connects."""
    talking = set[asyncio.Task[None]]()

    def connected(stream: Stream) -> None:
        talking.add(asyncio.get_running_loop().create_task(talk(stream)))

    return await asyncio.get_running_loop().create_server(lambda: Stream(RUN, connected), host, port)


async def test_processes_meet_agree_and_take_leave() -> None:
    groups = await met(3)
    assert [each.generation for each in groups] == [5, 5, 5]
    assert len({each.coordinator for each in groups}) == 1
    assert [each.links.others for each in groups] == [[1, 2], [0, 2], [0, 1]]
    heard: list[tuple[int, Message]] = []
    groups[2].handle(lambda source, message, inline: heard.append((source, message)))
    await asyncio.gather(*(each.agree("model", {"devices": 4}) for each in groups))
    groups[0].links.write(2, Staged(1, 1))
    groups[0].links.write(2, Staged(1, 2))
    groups[1].links.write(2, Leaving(5))
    await until(lambda: len(heard) == 3)
    assert [message for source, message in heard if source == 0] == [Staged(1, 1), Staged(1, 2)]
    await asyncio.gather(*(each.farewell() for each in groups))


async def test_messages_that_come_before_anybody_handles_them_are_kept() -> None:
    groups = await met()
    groups[0].links.write(1, Staged(0, 7))
    groups[0].links.write(1, island.Agreed("model", ""))  # comes behind it
    await groups[1].agree("model", {})
    heard: list[Message] = []
    groups[1].handle(lambda source, message, inline: heard.append(message))
    assert heard == [Staged(0, 7)]


async def test_processes_that_differ_are_refused_with_both_values() -> None:
    where = address()
    own, other = group(0, where), group(1, where)
    said = "process 1 differs from process 0 in mesh: fsdp 4 there, fsdp 2 at process 0"
    leading, coming = await asyncio.gather(
        own.meet(FACTS, 5), other.meet(facts({"mesh": "fsdp 4", "software": "1"}), 5), return_exceptions=True
    )
    for error in (leading, coming):
        assert isinstance(error, SettingsError)
        assert said in str(error)


async def test_models_that_differ_end_all() -> None:
    groups = await met()
    found = await asyncio.gather(
        groups[0].agree("model", {"batch": "a"}), groups[1].agree("model", {"batch": "b"}), return_exceptions=True
    )
    assert all(isinstance(error, SettingsError) and "batch: b there, a at process 0" in str(error) for error in found)


async def test_a_doubled_index_is_refused_and_the_others_wait_on() -> None:
    where = address()
    leader = group(0, where, 3)
    leading = asyncio.create_task(leader.meet(FACTS, 5))
    first = asyncio.create_task(group(1, where, 3).meet(FACTS, 5))
    await until(lambda: leader._meeting is not None and leader._meeting.waiting == {1})
    with pytest.raises(SettingsError, match=r"processes\.index = 1 is already in use"):
        await group(1, where, 3).meet(FACTS, 5)
    await asyncio.gather(leading, first, group(2, where, 3).meet(FACTS, 5))


async def test_a_process_that_was_lost_with_its_host_while_it_waited_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SIGNS_S", scaled_s(0.5))
    where = address()
    leader = group(0, where, 3)
    leading = asyncio.create_task(leader.meet(FACTS, 5))
    await until(lambda: leader._meeting is not None and leader._meeting._server is not None)
    lost = await Stream.connect(*host_and_port(where), RUN)  # stays open, and nothing more is said there
    await prove(lost, leader._key)
    await lost.send(Arrival(1, 3, ("127.0.0.1", 1), FACTS))
    await until(lambda: leader._meeting is not None and leader._meeting.waiting == {1})
    again = asyncio.create_task(group(1, where, 3).meet(FACTS, 5))
    await lost.until_closed()
    lost.abort()
    await asyncio.gather(leading, again, group(2, where, 3).meet(FACTS, 5))


async def test_signs_that_a_network_held_back_are_no_proof_that_the_process_before_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "SIGNS_S", scaled_s(0.5))
    where = address()
    leader = group(0, where, 3)
    leading = asyncio.create_task(leader.meet(FACTS, 5))
    await until(lambda: leader._meeting is not None and leader._meeting._server is not None)
    cut_off = await Stream.connect(*host_and_port(where), RUN)
    await prove(cut_off, leader._key)
    await cut_off.send(Arrival(1, 3, ("127.0.0.1", 1), FACTS))
    await until(lambda: leader._meeting is not None and leader._meeting.waiting == {1})
    again = asyncio.create_task(group(1, where, 3).meet(FACTS, 5))
    await until(lambda: leader._meeting is not None and len(leader._meeting._connections) == 2)
    for _ in range(8):  # two seconds of them, at once
        cut_off.write(island.Ping(0, 0, 0))
    await cut_off.until_closed()
    cut_off.abort()
    await asyncio.gather(leading, again, group(2, where, 3).meet(FACTS, 5))


async def test_another_count_is_refused() -> None:
    where = address()
    found = await asyncio.gather(group(0, where, 3).meet(FACTS, 5), group(1, where, 2).meet(FACTS, 5), return_exceptions=True)
    assert all("process 1 has processes.count = 2, process 0 has 3" in str(error) for error in found)


# ---- several that may lead


def addresses(count: int) -> str:
    return ",".join(address() for _ in range(count))


def several(index: int, where: str, count: int = 3, start_s: float = DEADLINE_S, regroup_s: float = REGROUP_S) -> Group:
    return group(index, where, count, start_s, least=count // 2 + 1, regroup_s=regroup_s)


async def test_another_process_leads_where_process_0_does_not_come_and_0_is_taken_back_when_it_does() -> None:
    where = addresses(3)
    one, two = several(1, where), several(2, where)
    await asyncio.gather(one.meet(FACTS, 7), two.meet(FACTS, 8))
    assert [(each.place, each.generation) for each in (one, two)] == [(0, 7), (1, 7)]
    assert one.links.members == two.links.members == [1, 2]
    found = await asyncio.gather(one.difference("model", {"devices": 4}), two.difference("model", {"devices": 8}))
    assert list(found) == 2 * ["process 2 differs from process 1 in devices: 8 there, 4 at process 1"]
    zero = several(0, where, start_s=START_S)
    coming = asyncio.create_task(zero.meet(FACTS, 5))
    await until(lambda: one.grows)
    await asyncio.sleep(1.5 * START_S)  # longer than it would look for others
    assert not coming.done()
    for each in (one, two):
        each.ending()
        await each.close()  # the generation ends
    again = [several(1, where), several(2, where)]
    await asyncio.gather(coming, *(each.meet(FACTS, 9) for each in again))
    assert [(each.place, each.generation) for each in (zero, *again)] == [(0, 5), (1, 5), (2, 5)]
    assert zero.links.members == [0, 1, 2]


async def test_who_has_others_come_gives_way_to_a_smaller_index() -> None:
    """Process 1 has been there first, and process 2 has come to it."""
    where = addresses(3)
    one, two = several(1, where, regroup_s=DEADLINE_S), several(2, where, regroup_s=DEADLINE_S)
    meeting = [asyncio.create_task(each.meet(FACTS, 7)) for each in (one, two)]
    await until(lambda: one._meeting is not None and one._meeting.waiting == {2})
    zero = several(0, where, regroup_s=DEADLINE_S)
    await asyncio.gather(zero.meet(FACTS, 5), *meeting)
    assert [each.links.members for each in (zero, one, two)] == 3 * [[0, 1, 2]]
    assert {each.generation for each in (zero, one, two)} == {5}


async def test_of_the_parts_of_a_cut_network_the_larger_one_goes_on_alone() -> None:
    """Processes 0 and 1 reach each other, and 2 to 4 do; of these 4 has no address."""
    reached = [address() for _ in range(4)]
    left, right = ",".join([*reached[:2], address(), address()]), ",".join([address(), address(), *reached[2:]])
    smaller = [several(index, left, 5, start_s=START_S) for index in (0, 1)]
    larger = [several(index, right, 5) for index in (2, 3, 4)]
    found = await asyncio.gather(*(each.meet(FACTS, 5 + each.index) for each in (*smaller, *larger)), return_exceptions=True)
    assert found[2:] == 3 * [None]
    assert [each.links.members for each in larger] == 3 * [[2, 3, 4]]
    assert "processes 2, 3, 4 of 5 did not connect" in str(found[0])
    assert "(at least 3 are required: processes.least)" in str(found[0])
    assert isinstance(found[1], IslandError)


async def test_a_process_that_hangs_is_passed_over() -> None:
    """Its system takes connections, and it says nothing itself."""
    where = addresses(3)
    host, _, port = where.split(",")[0].partition(":")
    held: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda reader, writer: held.append(writer), host, int(port))
    others = [several(1, where), several(2, where)]
    await asyncio.gather(*(each.meet(FACTS, 7) for each in others))
    assert [each.links.members for each in others] == [[1, 2], [1, 2]]
    assert held
    silent.close()
    for writer in held:
        writer.transport.abort()


async def test_a_stranger_at_an_address_of_several_keeps_nobody_from_meeting() -> None:
    where = addresses(3)
    stranger = keyed(0, where.split(",")[0], BOB)
    alone = asyncio.create_task(stranger.meet(FACTS, 5))
    others = [several(1, where), several(2, where)]
    for each in others:
        each._key = ANN
    await asyncio.gather(*(each.meet(FACTS, 7) for each in others))
    assert [each.links.members for each in others] == [[1, 2], [1, 2]]
    alone.cancel()
    with suppress(asyncio.CancelledError):
        await alone


async def test_where_no_address_is_reached_all_are_named() -> None:
    where = addresses(2)
    with pytest.raises(
        IslandError, match=rf"process 2: processes 0, 1 at processes.address = {re.escape(where)} cannot be reach"
    ):
        await several(2, where, start_s=START_S).meet(FACTS, 5)


async def test_an_address_of_another_host_is_refused_by_the_process_that_has_it() -> None:
    where = f"{address()},192.0.2.1:7600"
    with pytest.raises(
        SettingsError, match=r"192\.0\.2\.1:7600: process 1 of ann cannot listen there: .* that process 1 runs on"
    ):
        await several(1, where).meet(FACTS, 5)


@pytest.mark.parametrize("missed", [False, True])
async def test_a_leader_that_the_others_have_missed_keeps_no_state(missed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have gone on without it meanwhile, and it would write over a state of theirs."""
    where = addresses(3)
    groups = [several(index, where) for index in range(3)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    for each in groups:
        each._ending.set()
    saved = []

    class Rescue:
        def settle(self) -> island.Kept:
            return island.Kept("5, kept at boundary 3", 3)

        def save(self, kept: island.Kept) -> None:
            saved.append(kept.number)

    leader = groups[0]
    renewing = renews(leader)
    renewing.rescue = Rescue()
    if missed:
        missed_s = asyncio.get_running_loop().time() - 10.1  # silent_s is 10
        leader.links._said_s = missed_s
        await until(lambda: leader.links._said_s != missed_s)  # it says something again
    begun: list[bool] = []

    def renew(expected: Iterable[int] = ()) -> NoReturn:
        begun.append(True)
        raise SystemExit

    def end() -> None:
        with suppress(SystemExit):
            leader.end(IslandError("gone"))

    monkeypatch.setattr(renewal, "renew", renew)
    monkeypatch.setattr("diloco.processes.group.os._exit", lambda code: None)
    for each in groups[1:]:
        for stream in each.links._streams.values():
            stream.abort()
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    await until(lambda: bool(begun))
    await asyncio.to_thread(ending.join)  # it exits last, which must not meet the real os._exit
    assert saved == ([] if missed else [3])


async def test_where_the_leader_is_lost_those_that_are_left_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    where = addresses(4)
    groups = [several(index, where, 4) for index in range(4)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    assert await begun_again(groups, 0, monkeypatch) == {1: (1, 2, 3), 2: (1, 2, 3), 3: (1, 2, 3)}


async def test_who_does_not_come_is_named_in_time() -> None:
    where = address()
    leading, _ = await asyncio.gather(
        group(0, where, 3, START_S).meet(FACTS, 5), group(1, where, 3, 2 * START_S).meet(FACTS, 5), return_exceptions=True
    )
    assert isinstance(leading, IslandError)
    assert re.search(rf"process 2 of 3 did not connect to .* within {START_S:g} s", str(leading))


async def test_a_leader_that_cannot_be_reached_is_named_in_time() -> None:
    where = address()
    with pytest.raises(IslandError, match=f"process 0 at processes.address = {re.escape(where)} cannot be reached"):
        await group(1, where, start_s=START_S).meet(FACTS, 5)


async def test_a_generation_of_those_that_came_has_places_without_gaps() -> None:
    where = address()
    groups = [group(index, where, 3, least=2) for index in (0, 2)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    assert [(each.index, each.place, each.size) for each in groups] == [(0, 0, 2), (2, 1, 2)]
    assert groups[0].links.others == [1]
    assert not groups[0].grows
    for each in groups:
        each.ending()  # or its watch would end this process
    groups[1].links._streams[0].abort()
    await until(lambda: groups[0]._failure is not None)
    assert "process 2 is gone" in str(groups[0]._failure)


async def test_those_that_are_left_tell_the_leader_which_then_waits_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    where = address()
    groups = [group(index, where, 4, least=1, regroup_s=DEADLINE_S) for index in (0, 1, 2, 3)]
    await asyncio.gather(*(each.meet(FACTS, 5) for each in groups))
    assert await begun_again(groups, 2, monkeypatch) == {0: (0, 1, 3), 1: (), 3: ()}


def renews(group: Group) -> Renewing:
    """Have a process begin again where another one is lost."""
    renewing = Renewing(group, LearnerSettings(name="ann", processes=group.settings))
    group.renewal, renewing.may = renewing, lambda: True
    return renewing


async def begun_again(groups: list[Group], lost: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, ...]]:
    """Lose one of four processes; return by process whom it expects when it begins again."""
    begun: dict[int, tuple[int, ...]] = {}
    processes = [index for index in range(4) if index != lost]

    def renew(expected: Iterable[int] = ()) -> NoReturn:
        index = int(threading.current_thread().name)
        begun[index] = tuple(sorted(expected))
        for stream in groups[index].links._streams.values():
            groups[index].links._loop.call_soon_threadsafe(stream.abort)
        raise SystemExit

    def end(index: int) -> None:
        with suppress(SystemExit):
            groups[index].end(IslandError("gone"))

    monkeypatch.setattr(renewal, "renew", renew)
    monkeypatch.setattr("diloco.processes.group.os._exit", lambda code: None)
    for index in processes:
        renews(groups[index])
        groups[index]._ending.set()  # its watch; what it would do is done here
    groups[lost]._ending.set()
    for stream in groups[lost].links._streams.values():
        stream.abort()
    ending = [threading.Thread(target=end, args=(index,), name=str(index), daemon=True) for index in processes]
    for thread in ending:
        thread.start()
    await until(lambda: len(begun) == 3)
    for thread in ending:
        await asyncio.to_thread(thread.join)  # it exits last, which must not meet the real os._exit
    return begun


async def test_a_process_that_comes_later_waits_and_is_in_the_next_generation() -> None:
    where = address()
    leading = group(0, where, least=1)
    await leading.meet(FACTS, 5)
    assert (leading.size, leading.links.others) == (1, [])
    late = group(1, where, start_s=START_S, least=1)
    coming = asyncio.create_task(late.meet(FACTS, 0))
    await until(lambda: leading.grows)
    await asyncio.sleep(1.5 * START_S)  # longer than it would try to reach a leader that does not answer
    assert not coming.done()
    await leading.close()  # the generation ends
    again = group(0, where, least=1)
    await asyncio.gather(again.meet(FACTS, 6), coming)
    assert [(each.place, each.size, each.generation) for each in (again, late)] == [(0, 2, 6), (1, 2, 6)]


async def test_one_too_many_waits_until_more_have_come() -> None:
    """Of four replicas, with at least two: three processes of four hold three, and five of eight none whole."""
    where = address()
    processes = ProcessesSettings(count=8, index=0, address=where, least=2, regroup_s=REGROUP_S)
    leading = group_of(processes, 4)
    others = [group_of(processes.model_copy(update={"index": index}), 4) for index in (3, 5)]
    OPEN_GROUPS.extend([leading, *others])
    OPEN_LINKS.extend(each.links for each in (leading, *others))
    spare = asyncio.create_task(others[1].meet(FACTS, 0))
    await asyncio.gather(leading.meet(FACTS, 5), others[0].meet(FACTS, 0))
    assert leading.links.members == [0, 3]
    assert not leading.grows
    assert not spare.done()
    spare.cancel()
    await leading.close()


async def test_a_process_that_differs_is_refused_and_the_generation_goes_on() -> None:
    where = address()
    leading = group(0, where, least=1)
    await leading.meet(FACTS, 5)
    with pytest.raises(SettingsError, match="process 1 differs from process 0 in software: 2 there, 1 at process 0"):
        await group(1, where, least=1).meet(facts({"mesh": "fsdp 2", "software": "2"}), 0)
    assert not leading.grows
    assert leading._failure is None


@pytest.mark.parametrize("members", [[0], [0, 1, 2], [1, 0], [0, 1, 1]])
async def test_a_welcome_that_does_not_fit_is_refused(members: list[int]) -> None:
    where = address()
    host, _, port = where.partition(":")

    async def welcome(stream: Stream) -> None:
        await proving.Door(proving.OPEN).admit(stream)
        await stream.send(island.Standing(0, None))
        await stream.receive_one(island.Arrival)
        await stream.send(island.Welcome(5, b"s" * 32, (host, 1), members, [(host, 1), (host, 2)]))
        await stream.until_closed()
        stream.abort()

    server = await served(welcome, host, int(port))
    with pytest.raises(
        IslandError, match=rf"is not process 0 of this learner: it welcomed process 1 to {re.escape(str(members))}"
    ):
        await group(1, where).meet(FACTS, 0)
    server.close()


async def test_too_few_are_named_with_the_setting() -> None:
    where = address()
    with pytest.raises(
        IslandError,
        match=rf"processes 1, 2 of 3 did not connect .* within {START_S:g} s \(at least 2 are required: processes.least",
    ):
        await group(0, where, 3, START_S, least=2).meet(FACTS, 5)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 100,
        bytes(8),
        LENGTHS.pack(5, 0) + b"12345",
        b"",
    ],
)
async def test_strangers_change_nothing(bytes_: bytes) -> None:
    where = address()
    leader = group(0, where)
    leading = asyncio.create_task(leader.meet(FACTS, 5))
    await until(lambda: leader._meeting is not None and leader._meeting._server is not None)
    host, _, port = where.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes_)
    await group(1, where).meet(FACTS, 5)
    await leading
    writer.transport.abort()


def made(handle: Any = None) -> tuple[Links, list[IslandError]]:
    lost: list[IslandError] = []
    OPEN_LINKS.append(Links(RUN, get_logger(), handle or (lambda *said: None), lost.append))
    return OPEN_LINKS[-1], lost


async def connected(both: list[Links], secrets: tuple[bytes, bytes] = (b"s" * 32, b"s" * 32)) -> None:
    within_s = DEADLINE_S if secrets[0] == secrets[1] else 2.0
    addresses = [("127.0.0.1", await each.listen("127.0.0.1")) for each in both]
    await asyncio.gather(
        *(each.connect(place, [0, 1], addresses, 5, secrets[place], within_s) for place, each in enumerate(both))
    )


async def linked(secrets: tuple[bytes, bytes] = (b"s" * 32, b"s" * 32)) -> tuple[list[Links], list[list[IslandError]]]:
    pairs = [made(), made()]
    both = [pair[0] for pair in pairs]
    await connected(both, secrets)
    return both, [pair[1] for pair in pairs]


async def test_without_the_secret_nobody_gets_in() -> None:
    with pytest.raises(IslandError, match="no connection to process"):
        await linked((b"s" * 32, b"t" * 32))


async def test_a_greeting_alone_opens_nothing() -> None:
    both, lost = await linked()
    port = both[0]._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    stranger = await Stream.connect("127.0.0.1", port, RUN)
    await stranger.send(Greeting(1, 5, bytes(32)))
    with pytest.raises((EOFError, OSError)):
        await stranger.receive_one(Greeting)  # process 1 is here already
    stranger.abort()
    assert lost == [[], []]


async def test_a_connection_that_ends_without_farewell_is_a_loss() -> None:
    both, lost = await linked()
    both[1]._streams[0].abort()
    await until(lambda: bool(lost[0]))
    assert "process 1 is gone: its connection has ended" in str(lost[0][0])


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (LENGTHS.pack(1 << 30, 0), "a frame of 1073741824 bytes"),
        (LENGTHS.pack(0, 0), "a frame of 0 bytes"),
        (LENGTHS.pack(100, island.PIECE_BYTES + 1), f"content of {island.PIECE_BYTES + 1} bytes"),
        (LENGTHS.pack(5, 3) + bytes(8), "a message None"),
    ],
)
async def test_damaged_messages_end_the_generation(damaged: bytes, reason: str) -> None:
    both, lost = await linked()
    both[1]._streams[0]._transport.write(damaged)
    await until(lambda: bool(lost[0]))
    assert f"process 1 sends damaged messages: {reason}" in str(lost[0][0])


async def test_a_farewell_is_no_loss() -> None:
    both, lost = await linked()
    await asyncio.gather(*(each.farewell(2.0) for each in both))
    await asyncio.gather(*(each.close() for each in both))
    await asyncio.sleep(0.01)
    assert lost == [[], []]


async def test_who_took_leave_and_ended_is_not_lost_and_not_awaited() -> None:
    both, lost = await linked()
    assert not both[0].has_ended(1, 10.0)
    await both[1].farewell(0.01)  # the other one stands still
    await both[1].close()
    await until(lambda: both[0].has_ended(1, 10.0))
    assert lost == [[], []]


async def test_who_takes_leave_hears_the_others_until_they_do() -> None:
    """A leader asks for a fragment's last values after another process has taken its last step."""
    groups = await met()
    heard: list[Message] = []
    groups[1].handle(lambda source, message, inline: heard.append(message))
    leaving = asyncio.create_task(groups[1].farewell())
    await asyncio.sleep(5 * links.BYE_LOOK_S)
    groups[0].links.write(1, island.Gather(3))
    await until(lambda: bool(heard))
    assert heard == [island.Gather(3)]
    assert not leaving.done()
    await asyncio.gather(leaving, groups[0].farewell())


async def test_a_silent_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = await linked()
    assert both[0].silent(10.0) is None
    now_s = asyncio.get_running_loop().time()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s + 11.0)
    assert both[0].silent(10.0) == 1


SIZE = 300_000  # values: more than two pieces
PIECE = Piece("w", 0, SIZE, (SIZE,), 0, embedding=False)
HALVES = [FragmentRows(((PIECE, (slice(0, SIZE // 2),)),)), FragmentRows(((PIECE, (slice(SIZE // 2, SIZE),)),))]


def ships(links_: Links) -> Shipping:
    return Shipping(links_, [RowLayout(HALVES, HALVES)], [SIZE])


async def test_rows_arrive_where_they_belong() -> None:
    took: list[Any] = []
    shippings: list[Shipping] = []

    def handle(source: int, message: Message, content: memoryview) -> None:
        if isinstance(message, island.Rows):
            came = shippings[1].take(source, message, content)
            if came is not None:
                took.append(came)

    pairs = [made(), made(handle)]
    both = [pair[0] for pair in pairs]
    await connected(both)
    shippings += [ships(each) for each in both]
    theta = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    assert shippings[0].sharing(0) == [[1]]
    await shippings[0].send([1], 0, 3, "theta", theta)
    await until(lambda: bool(took))
    np.testing.assert_array_equal(took[0][SIZE // 2 :], theta[SIZE // 2 :])


@pytest.mark.parametrize("first", ["the own ones", "the other's"])
async def test_rows_of_a_reading_of_all_processes_come_together(first: str) -> None:
    each, _ = made()
    shipping = ships(each)
    theta = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    own = np.full(SIZE, np.nan, np.float32)
    HALVES[0].put(HALVES[0].take(theta), own)
    pieces = [piece.take(theta).tobytes() for piece in HALVES[1].cut(island.PIECE_BYTES)]

    def take(piece: int, number: int = 7) -> Any:
        content = pieces[piece]
        head = island.Rows(0, number, "snapshot", piece, len(pieces), blake3(content).digest())
        return shipping.take(1, head, memoryview(content))

    if first == "the own ones":
        shipping.add(0, "snapshot", 7, own)
    assert take(0) is None
    assert take(0, number=6) is None, "an older one is passed over"
    assert take(1) is not None
    if first != "the own ones":
        shipping.add(0, "snapshot", 7, own)
    np.testing.assert_array_equal(shipping.release(0, "snapshot"), theta)


async def test_rows_that_do_not_fit_are_refused() -> None:
    each, _ = made()
    shipping = ships(each)
    content = memoryview(bytes(island.PIECE_BYTES))
    digest = blake3(content).digest()
    with pytest.raises(FormatError, match="rows of fragment 9"):
        shipping.take(0, island.Rows(9, 1, "theta", 0, 2, digest), content)
    with pytest.raises(FormatError, match=r"piece 0 of 7, expected 2"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 7, digest), content)
    with pytest.raises(FormatError, match=r"piece 1 of .* expected 0"):
        shipping.take(0, island.Rows(0, 1, "theta", 1, 2, digest), content)
    with pytest.raises(FormatError, match="piece 0 of 5 bytes"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 2, digest), content[:5])
    with pytest.raises(HashError, match="does not have its hash"):
        shipping.take(0, island.Rows(0, 1, "theta", 0, 2, bytes(32)), content)


# ---- with identities

ANN, BOB = b"a" * 32, b"b" * 32  # keys of two learners' identities


def keyed(index: int, address: str, key: bytes, start_s: float = DEADLINE_S) -> Group:
    made = group(index, address, start_s=start_s)
    made._key = key
    return made


async def test_a_process_with_another_identity_is_refused_at_once_and_the_right_one_begins() -> None:
    where = address()
    leading = asyncio.create_task(keyed(0, where, ANN).meet(FACTS, 5))
    began_s = time.monotonic()
    for key in (BOB, proving.OPEN):
        with pytest.raises(SettingsError, match="does not have the key of this process's identity: give all processes"):
            await keyed(1, where, key).meet(FACTS, 5)
    assert time.monotonic() - began_s < DEADLINE_S / 2
    await asyncio.gather(leading, keyed(1, where, ANN).meet(FACTS, 5))


async def test_who_overhears_the_meeting_does_not_know_the_secret_of_the_links() -> None:
    assert secret_of(ANN, b"s" * 32) != secret_of(BOB, b"s" * 32) != b"s" * 32
    with pytest.raises(IslandError, match="no connection to process"):
        await linked((secret_of(ANN, b"s" * 32), b"s" * 32))


async def stranger(where: str) -> Stream:
    host, _, port = where.partition(":")
    async with asyncio.timeout(DEADLINE_S):
        while True:  # until the leader listens
            try:
                return await Stream.connect(host, int(port), RUN)
            except OSError:
                await asyncio.sleep(0.05)


async def test_what_a_process_proved_serves_nobody_else() -> None:
    """Neither its own words, said back to the leader, nor the leader's, nor those of another connection."""
    where = address()
    leading = asyncio.create_task(keyed(0, where, ANN).meet(FACTS, 5))
    first, second = await stranger(where), await stranger(where)
    await first.send(Challenge(bytes(32)))
    asked = await first.receive_one(Challenge)
    await second.send(Challenge(asked.nonce))  # has the leader prove to itself
    await second.receive_one(Challenge)
    await second.send(Proof(bytes(32)))
    of_leader = await second.receive_one(Proof)
    await first.send(of_leader)
    await first.receive_one(Proof)  # the leader's, which tells a process with a wrong key that it has one
    await first.send(island.Arrival(1, 2, ("127.0.0.1", 9), FACTS))
    for each in (first, second):
        with pytest.raises((EOFError, OSError)):
            await each.receive_any({island.Welcome.kind: island.Welcome, island.Refused.kind: island.Refused})
        each.abort()
    await asyncio.gather(leading, keyed(1, where, ANN).meet(FACTS, 5))


async def test_strangers_without_a_word_keep_no_process_from_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "PROVING_S", 10 * DEADLINE_S)  # for those that waited until they have said who they are
    where = address()
    leading = asyncio.create_task(keyed(0, where, ANN).meet(FACTS, 5))
    holding = [await stranger(where) for _ in range(MAX_STRANGERS + 20)]
    await asyncio.gather(leading, keyed(1, where, ANN).meet(FACTS, 5))
    for each in holding:
        each.abort()


@pytest.mark.parametrize("lengths", [(HELLO_BYTES + 1, 0), (100, 1)])
async def test_a_large_frame_or_content_of_a_stranger_is_refused_before_it_is_read(lengths: tuple[int, int]) -> None:
    where = address()
    leading = asyncio.create_task(keyed(0, where, ANN).meet(FACTS, 5))
    one = await stranger(where)
    one._transport.write(LENGTHS.pack(*lengths))
    with pytest.raises((EOFError, OSError)):
        await one.receive_one(Challenge)
    one.abort()
    await asyncio.gather(leading, keyed(1, where, ANN).meet(FACTS, 5))


async def test_a_leader_that_is_none_gets_nothing_of_a_process() -> None:
    """It is told neither the learner's facts nor anything that serves it at the true leader."""
    heard: list[Message] = []

    async def pretend(stream: Stream) -> None:
        heard.append(await stream.receive_one(Challenge))
        await stream.send(Challenge(bytes(32)))
        heard.append(await stream.receive_one(Proof))
        await stream.send(Proof(bytes(32)))
        with pytest.raises((EOFError, OSError)):
            await stream.receive_one(island.Arrival)
        stream.abort()

    server = await served(pretend, "127.0.0.1", 0)
    where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(SettingsError, match=f"process 0 at processes.address = {re.escape(where)} does not have the key"):
        await keyed(1, where, ANN).meet(FACTS, 5)
    server.close()
    assert [type(message) for message in heard] == [Challenge, Proof]
