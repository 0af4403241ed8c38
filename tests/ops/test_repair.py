"""What a key of the bucket is made again from, and what an order to repair a log would undo."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from tests.made.syncer_parts import begin, merge, offer

from diloco.core.log.chain import Chain
from diloco.errors import RunError
from diloco.nats.registry import Registry
from diloco.nats.streams import MAX_VALUE_BYTES
from diloco.nats.transport import NatsTransport
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.entries import Genesis
from diloco_ops.reading.run_reader import read_chains
from diloco_ops.repair.keys import LiveBucket
from diloco_ops.repair.logs import Examined, PassedOver
from diloco_syncer.owning.owner import FragmentOwner

SETTINGS = run_settings("decoupled", {"learners": 2})
REGIONAL = run_settings("decoupled", {"learners": 2, "seed": 5, "regions.names": ["eu", "us"]})


def genesis_of(name: str, settings: RunSettings = SETTINGS) -> bytes:
    record = Genesis("ann", settings.digest(), bytes(32), [bytes(32)], 0.0)
    return framing.pack(record, framing.run_id(name, settings.digest()))


@pytest.mark.services
async def test_a_value_of_an_older_bucket_that_is_too_large_to_be_read_is_removed(link: NatsTransport, tmp_path: Path) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    bucket, other = f"KV_DILOCO_{name}", f"$KV.DILOCO_{name}.owners"
    await link.bulk.jetstream().add_stream(name=bucket, subjects=[f"$KV.DILOCO_{name}.>"], max_msgs_per_subject=1)
    registry = await Registry.open(link, f"DILOCO_{name}", create=False)
    await link.bulk.jetstream().publish(f"$KV.DILOCO_{name}.share.toy-1", bytes(MAX_VALUE_BYTES + 1))
    await link.bulk.jetstream().publish(other, b"others stay")
    keys = LiveBucket(RunDirectory(tmp_path, name, "", None, SETTINGS), link, registry, None)
    remedy = await keys.remedy("share.toy-1")
    assert remedy is not None
    assert "at most" in remedy.reason
    await keys.carry_out(remedy)
    assert await registry.get("share.toy-1") is None
    assert await registry.get("owners") is not None
    assert await keys.remedy("share.toy-1") is None


@pytest.mark.services
async def test_what_says_which_run_this_is_is_made_again_only_for_the_run_of_the_log(
    link: NatsTransport, tmp_path: Path
) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    registry = await Registry.open(link, f"DILOCO_{name}", create=True)
    directory = RunDirectory(tmp_path, name, "", None, REGIONAL)
    own, foreign = genesis_of(name, REGIONAL), genesis_of(name)
    assert [remedy.key for remedy in await LiveBucket(directory, link, registry, own).damaged()] == [
        "run",
        "genesis",
    ]  # missing
    await registry.put("genesis", foreign)
    await registry.put("run", SETTINGS.canonical())
    for frame, reason in ((None, "the log has no genesis record"), (foreign, "belongs to run ")):
        with pytest.raises(RunError, match=f"the key 'run' cannot be restored, .*{reason}.*diloco up --resume"):
            await LiveBucket(directory, link, registry, frame).remedy("run")
    keys = LiveBucket(directory, link, registry, own)
    found = await keys.damaged()
    assert [(remedy.key, remedy.value) for remedy in found] == [("run", REGIONAL.canonical()), ("genesis", own)]
    assert "it has other settings than " in found[0].reason
    for remedy in found:
        await keys.carry_out(remedy)
    assert await keys.damaged() == []


def test_an_order_says_what_it_undoes_and_is_refused_where_no_owner_could_carry_it_out() -> None:
    passed_over = [PassedOver("s", 50, 3, "x"), PassedOver("s", 80, 3, "y")]
    chain = Chain(1, 9, 2, bytes(32), 70, bytes(32), tokens_merged=900)
    tokens = {version: 100 * version for version in range(4, 10)}
    one = Examined(chain, 4, passed_over, tokens)
    assert (one.is_stuck, Examined(chain, 4, passed_over[:1], tokens).is_stuck) == (True, False)
    assert [line.rsplit(", ", 1)[1] for line in one.lines()] == [
        "and the log goes on behind it",
        "and nothing stands behind it yet",
    ]
    order = one.order("r", None)
    assert (order.version, order.sequence, one.lost(9), one.lost(7)) == (9, 80, (0, 0), (2, 200))
    for version in (3, 10):
        with pytest.raises(RunError, match=f"version {version} is not in the log, which has those from 4 to 9; go on from"):
            one.order("r", version)
    chain.closed = True
    with pytest.raises(RunError, match=r"its log is closed at version 9, .* --resume-at 5"):
        one.order("r", 5)


@pytest.mark.services
async def test_who_reads_heads_alone_comes_to_the_log_that_those_have_who_fold(link: NatsTransport) -> None:
    begun = await begin(link)
    log, owner = begun.context.store, await begun.taken_over()

    async def version(of: FragmentOwner, number: int) -> None:
        await of.commit(merge(of, offer(of, "ann", -1.0, number)), 32)

    await version(owner, 1)
    owner.replica.theta[5] += 1.0
    for number in (2, 3):  # wrong
        await version(owner, number)
    await owner.store_keyframe()
    again = await begun.taken_over(context=begun.another("syncer-1"))
    assert again.chain.version == 1
    assert (await read_chains(log))[0] == again.chain
    await version(again, 2)
    assert (await read_chains(log))[0] == again.chain
    await again.store_keyframe()
    await version(again, 3)
    assert (await read_chains(log))[0] == again.chain
