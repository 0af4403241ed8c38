"""The relay on real sockets, its commands, and what it refuses. How accurate it is, is ``bench/links.py relay``'s matter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from tests.made.command_line import Command, commanding
from tests.made.fixtures import Ended
from tests.made.relays import Stream, close_streams, relay_world
from tests.pace import DEADLINE_S, FACTOR, scaled_s

from diloco.errors import SettingsError, WanError
from diloco.nats import opening
from diloco.nats.connection import NatsLink, subscribe
from diloco.process import observe
from diloco_ops import cuts
from diloco_ops.broker.server import Server
from diloco_ops.wan import control, relay
from diloco_ops.wan.config import checked
from diloco_ops.wan.wan_command import wan as wan_command

SILENCE_S = 0.05  # long enough for what is wrongly let through to be there, nearly always
HEADER = {"format": "diloco-failures", "version": 1, "duration_s": 0.0}


async def read(stream: Stream, count: int) -> bytes:
    return await asyncio.wait_for(stream[0].readexactly(count), DEADLINE_S)


async def read_all(stream: Stream) -> bytes:
    return await asyncio.wait_for(stream[0].read(), DEADLINE_S)


async def silent(stream: Stream) -> bool:
    """Whether nothing comes, not even an end."""
    try:
        await asyncio.wait_for(stream[0].readexactly(1), SILENCE_S)
    except TimeoutError:
        return True
    return False


def send(stream: Stream, data: bytes) -> None:
    stream[1].write(data)


# ---- carrying


@pytest.mark.parametrize(
    "conditions",
    [{}, {"rate_bits_per_s": 50e6, "delay_s": 0.01, "jitter_s": 0.005}, {"rate_bits_per_s": 200e6, "queue_bytes": 1448}],
)
async def test_bytes_arrive_as_they_were_sent_both_ways_and_are_counted(conditions: dict[str, Any]) -> None:
    async with relay_world(**conditions) as there:
        pairs = [await there.pair("control" if i == 0 else "bulk") for i in range(4)]
        up = [random.Random(i).randbytes(40_000 + 1000 * i) for i in range(4)]
        down = [random.Random(10 + i).randbytes(30_000 + 1000 * i) for i in range(4)]
        for (client, server), sent, answered in zip(pairs, up, down, strict=True):
            send(client, sent)
            client[1].write_eof()
            send(server, answered)
            server[1].write_eof()
        for (client, server), sent, answered in zip(pairs, up, down, strict=True):
            assert await read_all(server) == sent
            assert await read_all(client) == answered
            close_streams(client, server)
        await there.until("us-eu", "connections", 0)
        assert (there.link("us-eu")["control_bytes"], there.link("us-eu")["bulk_bytes"]) == (40_000, 126_000)
        assert (there.link("eu-us")["control_bytes"], there.link("eu-us")["bulk_bytes"]) == (30_000, 96_000)
        assert there.link("us-ap")["bulk_bytes"] == 0


async def test_what_headers_add_is_estimated_from_packets_both_ways() -> None:
    async with relay_world() as there:
        client, server = await there.pair()
        send(client, bytes(2 * 1448))
        await read(server, 2 * 1448)
        # us-eu: the opening, two segments; one acknowledgement of the acceptance. eu-us: the acceptance; two for three packets
        assert there.link("us-eu")["packets_estimated"] == 3
        assert there.link("us-eu")["header_bytes_estimated"] == 52 * (3 + 1)
        assert there.link("eu-us")["header_bytes_estimated"] == 52 * (1 + 2)


async def test_opening_and_asking_cost_a_round_trip_each() -> None:
    clock = asyncio.get_running_loop().time
    async with relay_world(delay_s=0.03) as there:
        began_s = clock()
        client = await there.connect()
        send(client, b"?")
        server = await there.accept()
        assert clock() - began_s >= 0.03  # the opening
        assert await read(server, 1) == b"?"
        assert clock() - began_s >= 0.09  # the opening, its acceptance, and the question
        send(server, b"!")
        assert await read(client, 1) == b"!"
        assert clock() - began_s >= 0.12


async def test_a_link_carries_no_more_than_its_rate() -> None:
    clock = asyncio.get_running_loop().time
    async with relay_world(rate_bits_per_s=4e6) as there:
        (client, server), (second, other) = await there.pair(), await there.pair()
        began_s = clock()
        send(client, bytes(60_000))
        send(second, bytes(60_000))
        await asyncio.gather(read(server, 60_000), read(other, 60_000))
        assert clock() - began_s >= 120_000 * 8 / 4e6 - 0.001


async def test_control_passes_a_queue_of_bulk() -> None:
    async with relay_world(rate_bits_per_s=2e4) as there:
        bulk, sink = await there.pair()
        heartbeats, heard = await there.pair("control")
        send(bulk, bytes(300_000))  # two minutes
        await read(sink, 1)
        send(heartbeats, b"heartbeat")
        await read(heard, 5)
        assert there.link("us-eu")["queued_bytes"] > 0  # the bulk that was there before it still is


async def test_a_receiver_that_does_not_read_stops_its_sender_and_nobody_else() -> None:
    size = 64 << 20
    async with relay_world() as there:
        (client, server), (second, other) = await there.pair(), await there.pair()
        server[0]._limit = 1 << 16  # type: ignore[attr-defined]  # asyncio stops reading for anyone who does not take it
        send(client, bytes(size))
        sending = asyncio.ensure_future(client[1].drain())
        send(second, b"not held up")
        assert await read(other, 11) == b"not held up"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sending), 0.2)
        assert not sending.done()
        assert there.link("us-eu")["bulk_bytes"] < size // 2
        assert len(await read(server, size)) == size
        await asyncio.wait_for(sending, DEADLINE_S)


async def test_a_reset_goes_to_the_other_end() -> None:
    async with relay_world() as there:
        for from_client in (True, False):
            client, server = await there.pair()
            gone, other = (client, server) if from_client else (server, client)
            gone[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone[1].transport.abort()
            with pytest.raises(ConnectionResetError):
                await read_all(other)
        await there.until("us-eu", "connections", 0)


async def test_a_target_that_refuses_ends_the_connection_and_is_counted() -> None:
    async with relay_world() as there:
        await there.target.close()
        client = await there.connect()
        with contextlib.suppress(ConnectionResetError):
            assert await read_all(client) == b""
        close_streams(client)
        await there.until("us-eu", "connections", 0)
        assert there.relay.status([])["connections_refused"] == 1


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 1)
    async with relay_world() as there:
        await there.pair()
        refused = await there.connect()
        with contextlib.suppress(ConnectionResetError):
            assert await read_all(refused) == b""
        assert there.relay.status([])["connections_refused"] == 1


# ---- cutting


async def test_nothing_passes_a_cut_and_everything_comes_after() -> None:
    async with relay_world() as there:
        client, server = await there.pair()
        await there.ask(control.Cut(["eu"]))
        send(client, b"up")
        send(server, b"down")
        assert await silent(server)
        assert await silent(client)
        assert there.link("us-eu")["state"] == there.link("eu-us")["state"] == "cut"
        assert there.link("us-ap")["state"] == "up"
        await there.ask(control.Heal())
        assert (await read(server, 2), await read(client, 4)) == (b"up", b"down")


async def test_one_direction_can_be_cut_alone() -> None:
    async with relay_world() as there:
        client, server = await there.pair()
        await there.ask(control.Cut(["us-eu"]))
        send(client, b"up")
        send(server, b"down")
        assert await read(client, 4) == b"down"
        assert await silent(server)
        await there.ask(control.Heal(["us-eu"]))
        assert await read(server, 2) == b"up"


async def test_a_connection_begun_in_a_cut_is_made_when_it_is_healed() -> None:
    async with relay_world() as there:
        await there.ask(control.Cut(["us-eu"]))
        client = await there.connect()
        send(client, b"hello")
        await asyncio.sleep(SILENCE_S)
        assert there.target.connections.empty()
        await there.ask(control.Heal())
        server = await there.accept()
        assert await read(server, 5) == b"hello"


async def test_a_target_never_hears_of_who_gave_up_in_a_cut() -> None:
    async with relay_world() as there:
        await there.ask(control.Cut(["us-eu"]))
        close_streams(*[await there.connect() for _ in range(5)])
        await there.until("us-eu", "connections", 0)
        await there.ask(control.Heal())
        client, server = await there.pair()
        send(client, b"the first that is heard")
        assert await read(server, 23) == b"the first that is heard"
        assert there.target.connections.empty()


@pytest.mark.services
async def test_a_nats_client_goes_on_after_a_cut(nats_server: Server) -> None:
    async with relay_world(nats_server.url.removeprefix("nats://")) as there:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def hear(message: Msg) -> None:
            heard.put_nowait(message.data)

        near, far = await nats.connect(f"nats://{there.relay.addresses[0]}"), await nats.connect(nats_server.url)
        try:
            await near.subscribe("across", cb=hear)
            await near.flush()
            await there.ask(control.Cut(["eu-us"]))
            await far.publish("across", b"in the cut")
            await far.flush()
            await asyncio.sleep(SILENCE_S)
            assert heard.empty()
            await there.ask(control.Heal())
            assert await asyncio.wait_for(heard.get(), DEADLINE_S) == b"in the cut"
            await near.flush()
        finally:
            await near.close()
            await far.close()


@pytest.mark.services
async def test_a_link_is_not_given_up_while_what_it_was_asked_for_is_still_coming(
    nats_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PING_S", scaled_s(0.5))  # silence is noticed after 1.5 s, and 1 MB takes 10 s
    pieces = [bytes([number]) * 50_000 for number in range(20)]
    async with relay_world(nats_server.url.removeprefix("nats://"), rate_bits_per_s=8e5 / FACTOR) as there:
        arrived: list[bytes] = []

        async def hear(message: Msg) -> None:
            arrived.append(message.data)

        url = f"nats://{there.relay.addresses[0]}"
        near, far = await NatsLink.open_bulk(url, "test", observe.get_logger()), await nats.connect(nats_server.url)
        try:
            await subscribe(near.bulk, "across", hear)
            for piece in pieces:
                await far.publish("across", piece)
            await far.flush()
            async with asyncio.timeout(DEADLINE_S):
                while len(arrived) < len(pieces):
                    await asyncio.sleep(0.01)
            assert (arrived, near.bulk.stats["reconnects"]) == (pieces, 0)
        finally:
            await near.close()
            await far.close()


# ---- commands


async def test_a_link_is_set_and_slowed_while_it_carries() -> None:
    async with relay_world(rate_bits_per_s=2e4) as there:
        client, server = await there.pair()
        send(client, bytes(50_000))  # 20 s
        await there.ask(control.SetConditions(["us-eu"], rate_bits_per_s=4e9, delay_s=0.01, slow=4.0))
        await read(server, 50_000)
        link = there.link("us-eu")
        assert (link["rate_bits_per_s"], link["delay_s"], link["jitter_s"]) == (1e9, 0.01, 0.0)
        await there.ask(control.SetConditions(["us-*"], rate_bits_per_s="unlimited", slow=1.0))
        assert there.link("us-eu")["rate_bits_per_s"] is there.link("us-ap")["rate_bits_per_s"] is None


async def test_the_kernel_holds_little_in_front_of_a_thin_link() -> None:
    async with relay_world() as there:
        await there.pair()
        sockets = there.relay.lines["us-eu"].sockets
        assert len(sockets) == 3  # two routes listen, one connection is read
        for rate, least, most in ((5e6, 65_536, 131_072), ("unlimited", 200_000, 1 << 30), (20e6, 200_000, 500_000)):
            await there.ask(control.SetConditions(["us-eu"], rate_bits_per_s=rate))  # type: ignore[arg-type]
            for sock in sockets:
                assert least <= sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= most


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (control.Cut(["mars"]), "mars: no such region or link; regions: ap, eu, us"),
        (control.Cut(["us-euu"]), "us-euu: no such region or link (did you mean 'us-eu'?)"),
        (
            control.SetConditions(["us-eu"], rate_bits_per_s=5.0),
            "us-eu: rate_bits_per_s = 5.0: Input should be greater than or equal to 1000",
        ),
        (control.SetConditions(["us-eu"], delay_s=60.0), "us-eu: delay_s = 60.0: Input should be less than or equal to 10"),
        (control.SetConditions(["us-eu"], rate_bits_per_s=1e6, slow=0.5), "us-eu: slow = 0.5, expected 1 to 1e+06"),
        (control.SetConditions(["us-eu"], slow=2.0), "us-eu: its rate is unlimited, so it cannot be slowed"),
    ],
)
async def test_a_command_that_cannot_be_done_changes_nothing(request_: control.Request, says: str) -> None:
    async with relay_world() as there:
        before = there.link("us-eu")
        with pytest.raises(SettingsError) as refused:
            await there.ask(request_)
        assert says in str(refused.value)
        assert there.link("us-eu") == before


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\n", "not a request"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a request"),
        (b'{"x": ' + b"[" * 100_000 + b"\n", "not a request: maximum recursion"),
        (b'{"do": "explode"}\n', "not a request: Invalid value 'explode'"),
        (b'{"do": "cut"}\n', "not a request: Object missing required field `links`"),
        (b'{"do": "cut", "links": []}\n', "not a request: Expected `array` of length >= 1"),
        (b'{"do": "set", "links": ["us"], "rate": 3}\n', "not a request: Object contains unknown field `rate`"),
        (b"x" * (control.MAX_REQUEST_BYTES + 10), "a request of more than 4194304 bytes"),
    ],
)
async def test_what_is_no_request_is_answered_with_why(sent: bytes, says: str) -> None:
    async with relay_world() as there:
        reader, writer = await there.command()
        writer.write(sent)
        answer = json.loads(await asyncio.wait_for(reader.readline(), DEADLINE_S))
        assert answer["exit_code"] == WanError.exit_code
        assert says in answer["error"]


# ---- schedules


def tape(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in (HEADER, *lines))


async def test_who_holds_connections_without_a_word_keeps_no_operator_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_COMMANDERS", 3)
    async with relay_world() as there:
        playing = await there.command()  # the oldest of all, but no silent one
        text = tape({"at_s": 0, "kind": "link_cut", "target": "link/us-eu", "duration_s": 1000})
        send(playing, json.dumps({"do": "play", "tape": text, "source": "tape"}).encode() + b"\n")
        await playing[0].readline()
        held = [await there.command() for _ in range(2)]
        [status] = await there.ask(control.Status())
        assert status["playing"]
        assert await read_all(held[0]) == b""  # gave way
        assert await silent(held[1])
        assert await silent(playing)


async def test_a_schedule_is_played_and_nothing_of_it_lasts_but_settings_without_an_end() -> None:
    text = tape(
        {"at_s": 0, "kind": "link_set", "target": "link/us-eu", "rate_bits_per_s": 8e6},
        {"at_s": 0, "kind": "link_cut", "target": "link/*-eu", "duration_s": 0.1},
        {"at_s": 0.02, "kind": "link_slow", "target": "link/us-eu", "factor": 4, "duration_s": 0.02},
        {"at_s": 0.03, "kind": "link_cut", "target": "link/us-eu", "duration_s": 0.02},
    )
    async with relay_world() as there:
        client, server = await there.pair()
        send(client, b"before or after")
        told = await there.ask(control.Play(text, "tape"))
        assert [(each["at_s"], each["kind"], each["begins"]) for each in told[:-1]] == [
            (0, "link_set", True),
            (0, "link_cut", True),
            (0.02, "link_slow", True),
            (0.03, "link_cut", True),
            (0.04, "link_slow", False),
            (0.05, "link_cut", False),
            (0.1, "link_cut", False),
        ]
        assert told[1]["links"] == ["us-eu"]
        assert told[-1] == {"played": 4}
        assert await read(server, 15) == b"before or after"
        link = there.link("us-eu")
        assert (link["state"], link["rate_bits_per_s"], link["disturbed_by"]) == ("up", 8e6, [])


async def test_a_schedule_ends_with_its_commander_and_there_is_one_at_a_time() -> None:
    text = tape({"at_s": 0, "kind": "link_cut", "target": "link/us-eu", "duration_s": 1000})
    async with relay_world() as there:
        reader, writer = await there.command()
        writer.write(json.dumps({"do": "play", "tape": text, "source": "tape"}).encode() + b"\n")
        assert json.loads(await reader.readline())["kind"] == "link_cut"
        assert (there.link("us-eu")["state"], there.link("us-eu")["disturbed_by"]) == ("cut", ["link_cut"])
        with pytest.raises(WanError, match="another schedule is being played"):
            await there.ask(control.Play(text, "tape"))
        writer.close()
        await there.until("us-eu", "state", "up")


async def test_an_operator_heals_what_a_schedule_cut() -> None:
    text = tape({"at_s": 0, "kind": "link_cut", "target": "link/us-eu", "duration_s": 1000})
    async with relay_world() as there:
        reader, writer = await there.command()
        writer.write(json.dumps({"do": "play", "tape": text, "source": "tape"}).encode() + b"\n")
        await reader.readline()
        await there.ask(control.Heal())
        assert there.link("us-eu")["state"] == "up"


async def test_cuts_and_heals_of_a_relay_are_told_to_the_one_who_began_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "LOOK_S", 0.01)
    told: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with relay_world() as there, asyncio.TaskGroup() as tasks:
        looked = asyncio.Event()

        def links() -> dict[str, Any]:
            [answer] = control.asked(there.at, control.Status())
            loop.call_soon_threadsafe(looked.set)
            return dict(answer["links"])

        watching = tasks.create_task(cuts.watch(links, lambda names, what: told.put_nowait(f"{names} {what}")))
        await asyncio.wait_for(looked.wait(), DEADLINE_S)
        await there.ask(control.Cut(["eu"]))
        assert await asyncio.wait_for(told.get(), DEADLINE_S) == "links eu-us, us-eu are cut"
        await there.ask(control.Heal())
        assert await asyncio.wait_for(told.get(), DEADLINE_S) == "links eu-us, us-eu are healed"
        assert told.empty()
        watching.cancel()


# ---- as a user sees it


@pytest.fixture
def wan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Command]:
    with commanding(wan_command, ("wan",), 80, tmp_path, monkeypatch, capfd) as made:
        yield made


CONFIG = """
control = "127.0.0.1:{control}"
[defaults]
rate_bits_per_s = 5e6
delay_s = 0.05
[links.eu-us]
delay_s = 0.03
[[routes]]
from = "us"
to = "eu"
listen = "127.0.0.1:{listen}"
target = "127.0.0.1:1"
traffic = "bulk"
"""


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("delay_s = 0.05", "delay = 0.05", "wan.toml, [defaults]: no setting 'delay' (did you mean 'delay_s'?)"),
        ("delay_s = 0.03", "dely_s = 0.03", "wan.toml, [links.eu-us]: no setting 'dely_s' (did you mean 'delay_s'?)"),
        ("delay_s = 0.03", "jitter_s = -1", "wan.toml, [links.eu-us]: jitter_s = -1: "),
        ("rate_bits_per_s = 5e6", 'rate_bits_per_s = "5mbit"', "wan.toml, [defaults]: rate_bits_per_s = '5mbit': "),
        ("[links.eu-us]", "[links.eu-uk]", "[links.eu-uk]: no route passes this link (did you mean 'eu-us'?)"),
        ('to = "eu"', 'to = "us"', "wan.toml, [[routes]] 1: from and to are both 'us'"),
        ('to = "eu"', 'to = "eu-1"', "wan.toml, [[routes]] 1: to = 'eu-1': String should match pattern"),
        ('to = "eu"', 'too = "eu"', "wan.toml, [[routes]] 1: "),
        ('"bulk"', '"bulky"', "wan.toml, [[routes]] 1: traffic = 'bulky': Input should be 'control' or 'bulk'"),
        ("127.0.0.1:1", "127.0.0.1", "wan.toml, [[routes]] 1: '127.0.0.1' is not HOST:PORT"),
        ("control =", "contrl =", "wan.toml: no setting 'contrl' (did you mean 'control'?)"),
        ("[defaults]", "[default]", "wan.toml: no setting 'default' (did you mean 'defaults'?)"),
        ("[[routes]]", "[[routes", "wan.toml: not TOML: "),
        ("{control}", "{listen}", "wan.toml, [[routes]] 1: listen = '127.0.0.1:4302' is taken by control"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(wan: Command, before: str, after: str, says: str) -> None:
    assert before in CONFIG
    Path("wan.toml").write_text(CONFIG.replace(before, after).format(control=4300, listen=4302))
    ended = wan("serve", "wan.toml")
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_the_file_that_the_docs_show_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wan.md").read_text()
    config = checked(tomllib.loads(page.partition("```toml\n")[2].partition("```")[0]), "docs/wan.md")
    assert {name: link.delay_s for name, link in config.links.items()} == {
        "us-eu": 0.03, "eu-us": 0.03, "us-ap": 0.05, "ap-us": 0.05, "eu-ap": 0.07, "ap-eu": 0.07,
    }  # fmt: skip
    # 2 Gbit/s is to 12B parameters at 5 s a step what this is to the default model at 110 ms
    [rate] = {link.rate_bits_per_s for link in config.links.values()}
    assert rate == pytest.approx(2e9 * 381_600 / 12e9 * 5 / 0.11, rel=0.01)


def test_two_routes_cannot_listen_at_one_address(wan: Command) -> None:
    text = CONFIG.format(control=4300, listen=4302)
    Path("wan.toml").write_text(text + text[text.index("[[routes]]") :])
    ended = wan("serve", "wan.toml")
    assert ended.code == 2
    assert "wan.toml, [[routes]] 2: listen = '127.0.0.1:4302' is taken by [[routes]] 1" in ended.err


def test_a_missing_file_and_a_taken_port_are_said(wan: Command) -> None:
    assert wan("serve", "none.toml") == Ended(2, "", "diloco: none.toml: cannot be read: No such file or directory\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Path("wan.toml").write_text(CONFIG.format(control=0, listen=port))
        ended = wan("serve", "wan.toml")
    assert ended.code == 8
    [said] = [json.loads(line) for line in ended.err.splitlines() if "process_ended" in line]
    assert said["reason"].startswith(f"127.0.0.1:{port}: cannot listen there: Address already in use")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["status", "--at", "127.0.0.1:1"], 8, "127.0.0.1:1: no relay answers: Connection refused; start one with: diloco wan"),
        (["status", "--at", "nowhere"], 2, "--at: 'nowhere' is not HOST:PORT"),
        (["cut"], 2, "Missing argument 'LINK...'"),
        (["set", "us-eu"], 2, "nothing to set; give --rate, --delay, --jitter or --slow"),
        (["set", "us-eu", "--rate", "5"], 2, "--rate 5: expected a number with its unit: bit, kbit, mbit, gbit"),
        (["set", "us-eu", "--rate", "5mb"], 2, "--rate 5mb: expected a number with its unit"),
        (["set", "us-eu", "--delay", "-3ms"], 2, "--delay -3ms: expected a number with its unit: s, ms"),
        (["play", "none.jsonl"], 2, "none.jsonl: cannot be read: No such file or directory"),
        (["sever"], 2, "No such command 'sever'"),
    ],
)
def test_wrong_commands_are_answered_in_one_line(wan: Command, arguments: list[str], code: int, says: str) -> None:
    ended = wan(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert says in ended.err
    assert ended.err.count("\n") == 1


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``diloco wan serve`` as a process, and where it is commanded."""
    (folder / "wan.toml").write_text(CONFIG.format(control=0, listen=0))
    run = (
        "from diloco.process import observe; from diloco_ops.wan.wan_command import wan; "
        "observe.run_main(lambda: wan(standalone_mode=False))"
    )
    process = subprocess.Popen([sys.executable, "-c", run, "serve", "wan.toml"], cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if (event := json.loads(line))["event"] == "wan_started":
                break
        yield process, event["control"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.services
def test_a_relay_is_served_commanded_and_ended(wan: Command, tmp_path: Path) -> None:
    with served(tmp_path) as (process, at):
        assert wan("cut", "eu", "--at", at) == Ended(0, "cut: us-eu, eu-us\n", "")
        link = json.loads(wan("status", "us-eu", "--json", "--at", at).out)["links"]["us-eu"]
        assert (link["state"], link["rate_bits_per_s"], link["delay_s"]) == ("cut", 5e6, 0.05)
        assert wan("heal", "--at", at, "--json").out == '{"links": ["us-eu", "eu-us"]}\n'
        done = wan("set", "us-eu", "--rate", "2.5mbit", "--delay", "60ms", "--jitter", "0.005s", "--slow", "2", "--at", at)
        assert done.out == "set: us-eu\n"
        shown = wan("status", "--at", at).out
        assert [" ".join(line.split()) for line in shown.splitlines() if "us-eu" in line or "eu-us" in line] == [
            "us-eu up 1.25 0 60 ± 5 0 B 0 B 0 B 0 B 0",
            "eu-us up 5 0 30 0 B 0 B 0 B 0 B 0",
        ]
        ended = wan("cut", "eu-uss", "--at", at)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == (
            "diloco: eu-uss: no such region or link (did you mean 'eu-us'?); regions: eu, us; links: us-eu, eu-us\n"
        )
        Path("bad.jsonl").write_text(tape({"at_s": 1, "kind": "link_cut", "target": "link/us-mars", "duration_s": 1}))
        ended = wan("play", "bad.jsonl", "--at", at)
        assert ended.code == 7
        assert ended.err.startswith("diloco: bad.jsonl, line 2: target 'link/us-mars' matches no link (did you mean 'link/us-")
        Path("good.jsonl").write_text(tape({"at_s": 0, "kind": "link_cut", "target": "link/us-*", "duration_s": 0.01}))
        assert wan("play", "good.jsonl", "--at", at).out == (
            "     0.0 s  link_cut for 0.01 s: us-eu\n     0.0 s  link_cut ends: us-eu\nplayed: 1 failures\n"
        )
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        last = [json.loads(line) for line in err.splitlines()[-3:]]
        assert [(event["event"], event.get("link"), event.get("bulk_bytes")) for event in last] == [
            ("link_carried", "us-eu", 0),
            ("link_carried", "eu-us", 0),
            ("wan_stopped", None, None),
        ]


@pytest.mark.parametrize("code", ["[]", "{}", "null", '"2"', "1e999", "8"])
def test_an_error_of_no_known_kind_is_one_of_the_relay(code: str) -> None:
    with pytest.raises(WanError, match="so it says"):
        control._answered(f'{{"error": "so it says", "exit_code": {code}}}'.encode(), "relay")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "another program answers there, not a relay"),
        (b"[1]\n", "another program answers there, not a relay"),
        (b"[" * 100_000 + b"\n", "another program answers there, not a relay"),
        (b"", "the relay closed the connection before its answer was complete"),
    ],
)
def test_what_answers_but_is_no_relay_is_said(wan: Command, answer: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        at = f"127.0.0.1:{other.getsockname()[1]}"
        ended = wan("status", "--at", at)
        thread.join()
    assert ended == Ended(8, "", f"diloco: {at}: {says}\n")
