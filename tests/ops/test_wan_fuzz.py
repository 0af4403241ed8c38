"""The port that commands a relay gets requests of random bytes and random values: it answers, and the relay goes on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.made.hostile_values import JSON
from tests.made.relays import relay_world
from tests.pace import DEADLINE_S

from diloco_ops.wan import control

REQUESTS = 300
LINKS = ('["us"]', '["*"]', '["us-eu"]', "[]", '["x"]', '[""]', *JSON)
VALUES = ("0", "1", "1e6", '"unlimited"', "1e-9", "86400", *JSON)
TAPES = ("", "x", '{"kind": "cut"}', "{}\n[]\n", '{"at_s": 1e999}')


def requests(seed: int) -> Iterator[bytes]:
    """Yield requests: objects with hostile values, one in five torn, and random bytes."""
    chance = random.Random(seed)

    def value() -> str:
        return chance.choice(VALUES)

    while True:
        links = chance.choice(LINKS)
        text = chance.choice(
            [
                f'{{"do": "set", "links": {links}, "rate_bits_per_s": {value()}, "delay_s": {value()}}}',
                f'{{"do": "set", "links": {links}, "jitter_s": {value()}, "slow": {value()}}}',
                f'{{"do": "{chance.choice(["cut", "heal", "status"])}", "links": {links}}}',
                f'{{"do": "play", "tape": {json.dumps(chance.choice(TAPES))}, "source": {value()}}}',
                value(),
            ]
        )
        raw = text.encode() if chance.random() < 0.9 else chance.randbytes(50)
        yield raw[: chance.randrange(len(raw))] if raw and chance.random() < 0.2 else raw


async def test_no_request_ends_a_relay_or_is_left_without_an_answer() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with relay_world() as there:
        for _, request in zip(range(REQUESTS), requests(1), strict=False):
            reader, writer = await there.command()
            writer.write(request.replace(b"\n", b" ") + b"\n")
            line = b""
            async with asyncio.timeout(DEADLINE_S):
                while not line.endswith(b"\n"):
                    line += await reader.readexactly(1)
            answer = json.loads(line)
            assert isinstance(answer, dict), request
            assert answer.get("exit_code") != 70, (request, answer)
            writer.close()
        assert "links" in (await there.ask(control.Status()))[0]
    assert faults == []
