"""Two shapes for a run over regions: servers linked to no other, which clients cross to, and a supercluster of gateways.

python bench/topology.py                # two and a half minutes
python bench/topology.py --cut 5        # shorter
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

import nats
import nats.errors
import nats.js.api
import nats.js.errors
import numpy as np
from harness.console import Bench, Result, Script, folder
from harness.host import machine
from harness.wan_relay import Relay, Route

from diloco.errors import BrokerError
from diloco.nats.registry import Registry
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco.process.tasks import end
from diloco.transport import Fence
from diloco_ops.broker.server import Server, free_ports
from diloco_ops.up.embedded import JITTER_S, ONE_WAY_S, RATE_BITS_PER_S
from diloco_ops.wan import control as wan

REGIONS = ("us", "eu", "ap")

PAIRS = list(permutations(REGIONS, 2))

CUT = "eu"
OWNED = 8  # fragments a region
BODY_BYTES = 1 << 16
HEAD_BYTES = 400
CYCLES = 3
SMALL_BYTES = 200
FAST_MBIT_S = 20.0
COMMITS = 20
BEAT_S = 0.02
IDLE_S = 3.0
APPEND_TIMEOUT_S = 3.0
EXCHANGE_S = 0.25
ASK_AFTER = 0.5  # of a cut: then what servers can still do is asked
ASK_TIMEOUT_S = 5.0
DEADLINE_S = 60.0
DAMAGE_S = 10.0  # that is looked on after a region is lost


class Configured(Server):
    """A server with more in its configuration."""

    def __init__(self, directory: Path, port: int, more: str) -> None:
        super().__init__(directory, port)
        self._more = more

    def _cluster(self) -> str:
        return self._more


def emulated(folder: Path, routes: list[Route]) -> Relay:
    """Start the relay, with the default links between the regions."""
    links = {(a, b): {"delay_s": ONE_WAY_S[min(a, b), max(a, b)]} for a, b in PAIRS}
    return Relay(folder, routes, links, {"rate_bits_per_s": RATE_BITS_PER_S, "jitter_s": JITTER_S})


def carried(links: Relay) -> dict[str, tuple[int, int]]:
    """Return by link the payload of TCP, and what its headers are estimated to add."""
    found = links.ask(wan.Status())["links"]
    return {name: (link["control_bytes"] + link["bulk_bytes"], link["header_bytes_estimated"]) for name, link in found.items()}


@dataclass
class Shape:
    """Servers and links of one shape."""

    name: str
    bulk: Mapping[str, Server]
    control: Mapping[str, Server]
    links: Relay
    ways: Mapping[tuple[str, str], int]  # where a client in the first region reaches the second one's streams

    def lose(self, region: str) -> None:
        """Kill a region's servers."""
        for server in {self.bulk[region], self.control[region]}:
            server.kill()

    def close(self) -> None:
        for server in {*self.bulk.values(), *self.control.values()}:
            server.kill()
        self.links.close()


def unlinked(folder: Path) -> Shape:
    ports = iter(free_ports(3 * len(REGIONS) + 2 * len(PAIRS)))
    bulk = {region: Server(folder / f"bulk-{region}", next(ports)) for region in REGIONS}
    routes = {region: next(ports) for region in REGIONS}
    ways = {pair: next(ports) for pair in PAIRS}
    listening = {pair: next(ports) for pair in PAIRS}
    control = {}
    for region in REGIONS:
        others = ", ".join(f'"nats://127.0.0.1:{listening[pair]}"' for pair in PAIRS if pair[0] == region)
        more = (
            f'server_name: "{region}"\n'
            f'cluster {{ name: control, listen: "127.0.0.1:{routes[region]}", no_advertise: true, ping_interval: "2s", '
            f"routes: [{others}] }}\n"
        )
        control[region] = Configured(folder / f"control-{region}", next(ports), more)
    over = [(*pair, "bulk", ways[pair], bulk[pair[1]].port) for pair in PAIRS]
    over += [(*pair, "control", listening[pair], routes[pair[1]]) for pair in PAIRS]
    return Shape("unlinked", bulk, control, emulated(folder, over), ways)


def gateways(folder: Path) -> Shape:
    ports = iter(free_ports(3 * len(REGIONS) + len(PAIRS)))
    gates = {region: next(ports) for region in REGIONS}
    listening = {pair: next(ports) for pair in PAIRS}
    servers = {}
    for region in REGIONS:
        others = ", ".join(
            f'{{ name: "{pair[1]}", url: "nats://127.0.0.1:{listening[pair]}" }}' for pair in PAIRS if pair[0] == region
        )
        own = next(ports)
        # what a gateway says of itself to the others would lead them past the relay, so it names a free port;
        # JetStream refuses to start in a cluster without a route, so there is one to itself
        more = (
            f'server_name: "{region}"\n'
            f'cluster {{ name: "{region}", listen: "127.0.0.1:{own}", routes: ["nats://127.0.0.1:{own}"] }}\n'
            f'gateway {{ name: "{region}", listen: "127.0.0.1:{gates[region]}", advertise: "127.0.0.1:1", '
            f"gateways: [{others}] }}\n"
        )
        servers[region] = Configured(folder / f"gateway-{region}", next(ports), more)
    over = [(*pair, "bulk", listening[pair], gates[pair[1]]) for pair in PAIRS]
    ways = {(source, target): servers[source].port for source, target in PAIRS}
    return Shape("gateways", servers, servers, emulated(folder, over), ways)


@dataclass
class Clients:
    """A client in each region, with its ways to all streams, and what it has read."""

    shape: Shape
    ways: dict[tuple[str, str], NatsTransport]  # by region of the client and of the stream
    controls: dict[str, NatsTransport]
    read: set[tuple[str, str, int, int]] = field(default_factory=set)  # reader, source, cycle, fragment
    beats: list[float] = field(default_factory=list)  # seconds that they took
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _fences: dict[str, int] = field(default_factory=dict)

    async def append(self, at: str, to: str, subject: str, head: bytes, body: bytes | None, timeout_s: float) -> None:
        """Append to a region's stream as syncers and learners do; raises BrokerError."""
        way, number = self.ways[at, to], self._fences.get(subject, 0)
        self._fences[subject] = await way.append(
            f"{subject}.head",
            head,
            parts=[] if body is None else [body],
            part_subject=lambda index: f"{subject}.part.{index}",
            message_id=os.urandom(8).hex(),
            fence=None if body is None else Fence(f"{subject}.head", number),
            timeout_s=timeout_s,
        )

    async def follow(self, at: str, source: str) -> None:
        """Read another region's offers of what this one owns, for ever."""
        async for message in self.ways[at, source].pull(f"OFFER_{source}", [f"offer.{source}.{at}.>"], 1):
            if message.subject.endswith(".head"):
                self.read.add((at, source, int.from_bytes(message.data[:4], "big"), int(message.subject.split(".")[3])))
                self._news.set()

    async def cycle(self, number: int) -> float:
        """Everybody offers, reads and appends at once; the seconds until all has arrived."""
        began_s, head = time.perf_counter(), number.to_bytes(4, "big") + os.urandom(HEAD_BYTES - 4)
        body, expected = os.urandom(BODY_BYTES), set()
        async with asyncio.TaskGroup() as group:
            for source, target in PAIRS:
                for fragment in range(OWNED):
                    offer, entry = f"offer.{source}.{target}.{fragment}", f"log.{target}.{source}.{fragment}"
                    group.create_task(self.append(source, source, offer, head, body, DEADLINE_S))
                    group.create_task(self.append(source, target, entry, head, body, DEADLINE_S))
                    expected.add((target, source, number, fragment))
        while not expected <= self.read:
            self._news.clear()
            await self._news.wait()
        return time.perf_counter() - began_s

    async def commit(self) -> float:
        """Seconds until two of three regions have a message."""
        began_s = time.perf_counter()
        tasks = [
            asyncio.create_task(self.append("us", to, f"log.{to}.us.small", bytes(SMALL_BYTES), None, DEADLINE_S))
            for to in REGIONS
        ]
        for done in list(asyncio.as_completed(tasks))[:2]:
            await done
        took_s = time.perf_counter() - began_s
        await asyncio.gather(*tasks)
        return took_s

    async def beat(self) -> None:
        """Publish the time in one region, for another one's ears, for ever."""
        while True:
            await self.controls["us"].publish("beat", str(time.perf_counter()).encode() + bytes(SMALL_BYTES - 20))
            await asyncio.sleep(BEAT_S)

    async def heard(self, message: Any) -> None:
        self.beats.append(time.perf_counter() - float(message.data.rstrip(b"\0")))


@contextlib.asynccontextmanager
async def connected(shape: Shape) -> AsyncIterator[Clients]:
    """Clients in all regions, once the servers know each other and have their streams."""
    async with contextlib.AsyncExitStack() as stack:
        log, ways, controls = get_logger(), {}, {}
        for at in REGIONS:
            ways[at, at] = await NatsTransport.open_bulk(shape.bulk[at].url, f"{at}-own", log)
            stack.push_async_callback(ways[at, at].close)
            controls[at] = await NatsTransport.open_bulk(shape.control[at].url, f"{at}-control", log)
            stack.push_async_callback(controls[at].close)
        for pair, port in shape.ways.items():
            ways[pair] = await NatsTransport.open_bulk(f"nats://127.0.0.1:{port}", "-".join(pair), log)
            stack.push_async_callback(ways[pair].close)
        clients = Clients(shape, ways, controls)
        for region in REGIONS:
            for kind in ("log", "offer"):
                make = partial(ways[region, region].ensure_stream, f"{kind.upper()}_{region}", [f"{kind}.{region}.>"])
                await until_done(make)
        await controls["eu"].subscribe("beat", clients.heard)
        tasks = [asyncio.create_task(clients.follow(at, source)) for source, at in PAIRS]
        stack.push_async_callback(end, *tasks)
        await asyncio.sleep(2)  # interest crosses
        yield clients


async def until_done(work: Callable[[], Awaitable[Any]]) -> float:
    """Do it again and again until it is done; the seconds that took."""
    began_s = time.perf_counter()
    while True:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await work()
            return time.perf_counter() - began_s
        except (BrokerError, nats.errors.Error, TimeoutError):
            if time.perf_counter() - began_s > DEADLINE_S:
                raise
            await asyncio.sleep(0.1)


async def measure_cycles(clients: Clients, first: int) -> Result:
    links = clients.shape.links
    await clients.cycle(first)  # everything is open after it
    before = carried(links)
    took_s = [await clients.cycle(first + 1 + i) for i in range(CYCLES)]
    await asyncio.sleep(0.5)
    after = carried(links)
    ideal = CYCLES * 2 * OWNED * BODY_BYTES
    return {
        "seconds": float(np.median(took_s)),
        "of_payload": {name: (after[name][0] - before[name][0]) / ideal for name in after},
        "of_payload_with_headers": {name: (sum(after[name]) - sum(before[name])) / ideal for name in after},
    }


async def measure_messages(clients: Clients, cycles: int) -> Result:
    """Measure commits, and control messages on idle links and beside cycles, in ms."""
    commits = [1000 * await clients.commit() for _ in range(COMMITS)]
    beating = asyncio.create_task(clients.beat())
    await asyncio.sleep(1)
    clients.beats.clear()
    await asyncio.sleep(IDLE_S)
    idle = list(clients.beats)
    clients.beats.clear()
    for number in range(2):
        await clients.cycle(cycles + number)
    busy = list(clients.beats)
    await end(beating)
    return {"commit_ms": float(np.median(commits)), "idle_ms": quantiles(idle), "beside_bulk_ms": quantiles(busy)}


def quantiles(seconds: list[float]) -> dict[str, float]:
    return {name: 1000 * float(np.quantile(seconds, share)) for name, share in (("p50", 0.5), ("p99", 0.99))}


class Exchange:
    """Small messages from region to region, one after another, for as long as it lasts: when each was acknowledged."""

    def __init__(self, clients: Clients, pairs: list[tuple[str, str]]) -> None:
        self.stored: dict[tuple[str, str], list[float]] = {pair: [time.perf_counter()] for pair in pairs}
        self._tasks = [asyncio.create_task(self._send(clients, *pair)) for pair in pairs]

    async def _send(self, clients: Clients, at: str, to: str) -> None:
        while True:
            with contextlib.suppress(BrokerError):
                await clients.append(at, to, f"log.{to}.{at}.exchange", bytes(SMALL_BYTES), None, APPEND_TIMEOUT_S)
                self.stored[at, to].append(time.perf_counter())
            await asyncio.sleep(EXCHANGE_S)

    def longest_s(self, *regions: str) -> float:
        """Return the longest time without an acknowledgement between any two of these."""
        now_s = time.perf_counter()
        pairs = [pair for pair in self.stored if set(pair) <= set(regions)]
        return max(float(np.diff([*self.stored[pair], now_s]).max()) for pair in pairs)

    async def since(self, pair: tuple[str, str], began_s: float) -> float:
        """Seconds from then to the first acknowledgement after it."""
        while time.perf_counter() - began_s < DEADLINE_S:
            if self.stored[pair][-1] > began_s:
                return next(at_s for at_s in self.stored[pair] if at_s > began_s) - began_s
            await asyncio.sleep(0.02)
        return float("inf")

    async def close(self) -> None:
        await end(*self._tasks)


async def can(work: Callable[[], Awaitable[Any]]) -> str:
    """``yes``, or why it cannot be done."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            await work()
    except nats.js.errors.APIError as error:
        return f"no: {error.description}"
    except (nats.errors.Error, TimeoutError):
        return f"no: no answer in {ASK_TIMEOUT_S:g} s"
    return "yes"


def consumer(clients: Clients, region: str) -> Callable[[], Awaitable[Any]]:
    """Make a consumer of a region's own stream, there."""
    js = clients.ways[region, region].bulk.jetstream(timeout=ASK_TIMEOUT_S)
    return lambda: js.add_consumer(f"LOG_{region}", nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.NONE))


def stream(clients: Clients, region: str, number: int) -> Callable[[], Awaitable[Any]]:
    """Make a stream on a region's own server."""
    js = clients.ways[region, region].bulk.jetstream(timeout=ASK_TIMEOUT_S)
    return lambda: js.add_stream(name=f"NEW_{region}_{number}", subjects=[f"new.{region}.{number}"])


async def measure_cut(clients: Clients, lasts_s: float) -> Result:
    """One region off the others."""
    links, others = clients.shape.links, [region for region in REGIONS if region != CUT]
    exchange = Exchange(clients, [*PAIRS, (CUT, CUT)])
    await asyncio.sleep(2)
    names = [f"{source}-{target}" for source, target in PAIRS if CUT in (source, target)]
    links.ask(wan.Cut(links=names))
    began_s = time.perf_counter()
    await asyncio.sleep(ASK_AFTER * lasts_s)
    asked = {region: (can(consumer(clients, region)), can(stream(clients, region, 0))) for region in REGIONS}
    answers = {region: await asyncio.gather(*both) for region, both in asked.items()}
    await asyncio.sleep(max(0.0, began_s + lasts_s - time.perf_counter()))
    found = {
        "others_longest_gap_s": exchange.longest_s(*others),
        "at_home_longest_gap_s": exchange.longest_s(CUT),
        "can_make_consumers": {region: answer[0] for region, answer in answers.items()},
        "can_make_streams": {region: answer[1] for region, answer in answers.items()},
    }
    links.ask(wan.Heal())
    healed_s = time.perf_counter()
    ways = [("us", CUT), (CUT, "us")]
    passed, usable_s = await asyncio.gather(
        asyncio.gather(*(exchange.since(pair, healed_s) for pair in ways)), until_done(consumer(clients, CUT))
    )
    found["first_message_s"] = {"-".join(pair): took_s for pair, took_s in zip(ways, passed, strict=True)}
    found["consumer_after_s"] = usable_s
    await exchange.close()
    return found


async def measure_loss(clients: Clients) -> Result:
    """Lose the region whose server leads the streams."""
    shape = clients.shape
    async with contextlib.AsyncExitStack() as stack:
        if shape.bulk is shape.control:
            buckets: dict[str, Registry] = {}
            lost = await meta_leader(shape)
        else:
            links = {}
            for region in REGIONS:
                links[region] = await NatsTransport.open_bulk(shape.control[region].url, f"{region}-bucket", get_logger())
                stack.push_async_callback(links[region].close)
            buckets = {region: await Registry.open(link, "bucket", create=True, replicas=3) for region, link in links.items()}
            info = await links["us"].bulk.jetstream().stream_info("KV_bucket")
            assert info.cluster is not None
            lost = str(info.cluster.leader)
        at, other = (region for region in REGIONS if region != lost)
        exchange = Exchange(clients, [(at, other), (other, at)])
        stack.push_async_callback(exchange.close)
        await asyncio.sleep(2)
        shape.lose(lost)
        tasks = [until_done(consumer(clients, at)), until_done(stream(clients, other, 1))]
        tasks += [until_done(partial(buckets[at].put, "key", b"value"))] if buckets else []
        took_s = await asyncio.gather(*tasks)
        await asyncio.sleep(DAMAGE_S)
        found = {"lost": lost, "others_longest_gap_s": exchange.longest_s(at, other)}
        return found | dict(zip(("consumer_after_s", "stream_after_s", "bucket_after_s"), took_s, strict=False))


async def meta_leader(shape: Shape) -> str:
    """Region of the server that leads the meta group."""
    asking = await nats.connect(await asyncio.to_thread(shape.control["us"].admin_file.read_text))
    try:
        while True:
            answer = json.loads((await asking.request("$SYS.REQ.SERVER.PING.JSZ", b"{}", timeout=ASK_TIMEOUT_S)).data)
            leader = answer["data"].get("meta_cluster", {}).get("leader")
            if leader in REGIONS:
                return str(leader)
            await asyncio.sleep(0.2)
    finally:
        await asking.close()


async def measure_shape(make: Callable[[Path], Shape], folder: Path, cut_s: float) -> Result:
    shape = make(folder)
    try:
        for server in {*shape.bulk.values(), *shape.control.values()}:
            server.start()
        async with connected(shape) as clients:
            found: Result = {"thin": await measure_cycles(clients, 0)}
            found["messages"] = await measure_messages(clients, 50)
            shape.links.ask(wan.SetConditions(links=[f"{a}-{b}" for a, b in PAIRS], rate_bits_per_s=FAST_MBIT_S * 1e6))
            found["fast"] = await measure_cycles(clients, 100)
            shape.links.ask(wan.SetConditions(links=[f"{a}-{b}" for a, b in PAIRS], rate_bits_per_s=RATE_BITS_PER_S))
            found["cut"] = await measure_cut(clients, cut_s)
            found["loss"] = await measure_loss(clients)
        return found
    finally:
        shape.close()


async def topology(*, cut: Annotated[float, "seconds that a region is cut off"] = 15.0) -> Result:
    """Compare both shapes.

    Three regions with the default links between them (``docs/wan.md``), emulated by the relay. *unlinked*: a server a region; a
    client in each region also connects to the other regions' servers, as syncers do; beside them a small cluster with a server
    in each region, whose routes go before bulk, for heartbeats and the bucket. *gateways*: a cluster of one server a region,
    joined by gateways; clients connect to their own region's server alone. Either way each region has streams of its own, at
    home.

    A cycle is what a run of 24 fragments with one learner a region sends: each region's client reads the others' offers of the
    eight fragments that it owns from their streams, and appends an entry of each to their logs, all at once. Of each shape:

    * seconds until all of it has arrived, and what the links carried, against the payload; at the default rate, and at 20
      Mbit/s;
    * a message of 200 bytes that a majority of regions is to acknowledge, and one from us to eu, on idle links and beside
      cycles;
    * one region cut off: whether the others exchange messages, whether any client can make consumers and streams, and how soon
      after healing messages pass in each direction;
    * a region lost for good, the one whose server leads: of gateways the JetStream meta group, else the bucket.
    """
    with folder() as place:
        observe.configure("bench", "topology", file=place / "bench.jsonl")
        shapes = {make.__name__: await measure_shape(make, place / make.__name__, cut) for make in (unlinked, gateways)}
    return {
        "machine": machine(),
        "payload_bytes": 2 * OWNED * BODY_BYTES,
        "rates_mbit_s": {"thin": RATE_BITS_PER_S / 1e6, "fast": FAST_MBIT_S},
        "shapes": shapes,
    }


def show(result: Result) -> None:
    machine = result["machine"]
    payload_bytes = result["payload_bytes"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {len(REGIONS)} regions, {payload_bytes:,} bytes a link and cycle")
    for name, found in result["shapes"].items():
        print(name)
        for rate in ("thin", "fast"):
            cycle, mbit_s = found[rate], result["rates_mbit_s"][rate]
            carried, whole = cycle["of_payload"].values(), cycle["of_payload_with_headers"].values()
            print(
                f"  cycle at {mbit_s:g} Mbit/s: {cycle['seconds']:.2f} s (links alone {payload_bytes * 8e-6 / mbit_s:.2f}); "
                f"links carried {min(carried):.3f} to {max(carried):.3f} of the payload, with headers {max(whole):.3f}"
            )
        sent = found["messages"]
        print(f"  commit in a majority: {sent['commit_ms']:.0f} ms")
        for state in ("idle_ms", "beside_bulk_ms"):
            print(f"  control us to eu, {state[:-3]}: p50 {sent[state]['p50']:.0f} ms, p99 {sent[state]['p99']:.0f} ms")
        cut, loss = found["cut"], found["loss"]
        others_s, home_s = cut["others_longest_gap_s"], cut["at_home_longest_gap_s"]
        print(f"  {CUT} cut off: longest gap of the others {others_s:.1f} s, at home {home_s:.1f} s")
        for what in ("consumers", "streams"):
            print(f"    can make {what}: {cut[f'can_make_{what}']}")
        passed = ", ".join(f"{pair} {took_s:.1f} s" for pair, took_s in cut["first_message_s"].items())
        print(f"    after healing: first message {passed}; consumer in {CUT} {cut['consumer_after_s']:.1f} s")
        bucket = f", bucket {loss['bucket_after_s']:.1f} s" if "bucket_after_s" in loss else ""
        print(
            f"  {loss['lost']} lost: longest gap of the others {loss['others_longest_gap_s']:.1f} s; "
            f"consumer {loss['consumer_after_s']:.1f} s, stream {loss['stream_after_s']:.1f} s{bucket}"
        )


SCRIPT = Script(__doc__, Bench(topology, show))

if __name__ == "__main__":
    SCRIPT.run()
