"""A fragment's log with versions in it, on a real server."""

from __future__ import annotations

import uuid
from dataclasses import replace

import numpy as np
from tests.made.fragment_vectors import each

from diloco.core.log.fold import Replica
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.settings.presets import run_settings
from diloco.wire import framing
from diloco.wire.body import Body
from diloco.wire.entries import Genesis
from diloco.wire.offers import Offer


async def log_of_versions(
    link: NatsTransport, count: int, keyframes: set[int]
) -> tuple[Log, tuple[Genesis, bytes], list[Replica]]:
    """A log of real versions, the states that they have, and keyframes after some of them."""
    settings = run_settings("decoupled", {"fragments.count": 1, "shards": 1, "codec.record_bits": 4})
    fragments, name = build_map([TensorSpec("w", (100,))], 1), f"run-{uuid.uuid4().hex[:8]}"
    log = Log(link, name, framing.run_id(name, settings.digest()), fragments, settings)
    await link.ensure_stream(log.subjects.log_stream, log.subjects.log_filters())
    noise = np.random.default_rng(2)
    await log.writer.found("ann", settings.digest(), each([noise.normal(size=100).astype(np.float32)]))
    genesis = await log.reader.genesis()
    assert genesis is not None
    replica, residual, states = (await log.reader.load(0, *genesis)).replica, np.zeros(100, np.float32), list[Replica]()
    for number in range(1, count + 1):
        states.append(replace(replica.copy(), theta=replica.theta.copy()))
        body = quantise.quantise(noise.normal(size=100).astype(np.float32), 32)
        sent = Body(0, bytes(32), 0, bytes(8))
        offer = Offer(0, "ann", 1, number, (1, number - 1), number, number - 1, bytes(32), 32, 1, 1, 0, [], sent)
        merge = Merge(number, (RoundOffer(offer, body),), False, 0.0, 0.0)
        merged = merging.accumulate(fragments.fragments[0], settings, merge.held, {}, replica.theta)
        record, inline, parts = merging.make_version(
            replica, residual, merged.result(), merge, settings, bits=4, syncer="s", attempt=bytes(8), now_s=0.0
        )
        sequence = await log.writer.append_record(record, inline, parts, replica.chain.sequence)
        replica.chain.advance(record, framing.hash_of(record, log.run), sequence)
        if number in keyframes:
            await log.writer.append_keyframe(replica, residual, None)
    return log, genesis, [*states, replica]
