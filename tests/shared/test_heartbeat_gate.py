"""The gate as a listener has it: of a sender that is too fast the newest heartbeats are decoded, and the others counted."""

from __future__ import annotations

import asyncio
from typing import cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.made.heartbeats import learner_heartbeat
from tests.made.run_settings import ROUNDS, settings_of

from diloco.control.creation import KnownRun
from diloco.control.gate import HEARTBEATS_AT_ONCE, HEARTBEATS_PER_S, HeartbeatGate
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.process.observe import Counted, get_logger
from diloco.process.tasks import end
from diloco.transport import Bucket
from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.subjects import Subjects

NAMES = Subjects("run")


async def test_of_a_flood_of_heartbeats_a_burst_and_the_newest_are_decoded() -> None:
    run = KnownRun("run", settings_of(ROUNDS), cast(Bucket, None))
    refused, heard = Counted(get_logger()), list[int]()

    async def hear(heartbeat: Heartbeat) -> None:
        heard.append(heartbeat.step)

    gate = HeartbeatGate(run, build_map([TensorSpec("w", (8,))], 1), refused, hear, hear)
    working = asyncio.create_task(gate.work())
    loop = asyncio.get_running_loop()
    began_s, flood = loop.time(), 10 * HEARTBEATS_AT_ONCE
    for step in range(flood):
        frame = framing.pack(learner_heartbeat("eva", step, role="evaluator"), run.identity)
        await gate.hear(Msg(cast(Client, None), NAMES.heartbeat("eva"), data=frame))
    while heard[-1] != flood - 1:
        await asyncio.sleep(0.001)
    most = HEARTBEATS_AT_ONCE + HEARTBEATS_PER_S * (loop.time() - began_s) + 1
    await end(working)
    assert HEARTBEATS_AT_ONCE <= len(heard) <= most
    assert gate.dropped.counts() == {("eva", "too_many"): flood - len(heard)}
    assert refused.total == 0
