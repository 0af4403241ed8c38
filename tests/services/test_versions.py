"""Members of different versions in one run: what can work is said once, what cannot is refused with both versions."""

from __future__ import annotations

import uuid

import msgspec
import pytest
from tests.services.cluster import small
from tests.services.conftest import Launch

from diloco import __version__
from diloco.control import admission, creation
from diloco.errors import RunError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.framing import VERSION
from diloco.wire.subjects import Subjects


async def says(link: NatsTransport, name: str, value: object) -> None:
    """Put what another version, or somebody else, left in the bucket of a run."""
    bucket = await link.bucket(Subjects(name).bucket, create=True)
    await bucket.put("protocol", value if isinstance(value, bytes) else msgspec.json.encode(value))


async def test_who_is_older_than_the_run_is_turned_away_with_both_versions(link: NatsTransport) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    await says(link, name, {"protocol": VERSION + 1, "software": "9.1.0", "more": [1]})
    bucket = await link.bucket(Subjects(name).bucket, create=False)
    await bucket.put("run", RunSettings().canonical())
    for joining in (creation.find(link, name, get_logger()), creation.create(link, name, RunSettings())):
        with pytest.raises(RunError) as refused:
            await joining
        assert str(refused.value) == (
            f"run {name!r} was made by diloco 9.1.0 and speaks protocol {VERSION + 1}; this is diloco {__version__}, which "
            f"speaks {VERSION}: update it"
        )


@pytest.mark.parametrize("value", [b"{", b"[]", b"\xff", {"protocol": "1", "software": ""}, {"protocol": 0, "software": ""}])
async def test_a_key_that_says_nothing_is_named(link: NatsTransport, value: object) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    await says(link, name, value)
    with pytest.raises(RunError, match=f"run '{name}': the bucket's key 'protocol' is damaged"):
        await creation.create(link, name, RunSettings())


async def test_another_version_that_speaks_the_same_is_let_in_and_said_once(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9, round__steps=12))
    cluster.start("coordinator", "diloco_coordinator", settings=cluster.settings.model_dump())
    await cluster.until(lambda: bool(cluster.events("run_ready", "coordinator")), "the run is there")
    link = await cluster.link()
    await says(link, cluster.name, {"protocol": VERSION, "software": "0.0.9"})  # as if that version had made it
    toy = cluster.toy(0)
    await cluster.begin(coordinator=False)
    await cluster.until(lambda: cluster.steps() > 2, "training")
    [of_the_run] = cluster.events("version_differs", "syncer-0")
    assert (of_the_run["sender"], of_the_run["kind"], of_the_run["here"]) == ("run", "0.0.9", __version__)

    assert toy.member is not None
    run = await creation.find(link, cluster.name, get_logger())
    digest = run.created.digest()
    incarnation = await admission.join(run, "mallory", 1, await creation.find_map(run), digest)
    heartbeat = msgspec.structs.replace(toy.member.heartbeat(), learner="mallory", incarnation=incarnation, software="9.8.7")
    for _ in range(3):
        await link.publish(cluster.subjects.heartbeat("mallory"), framing.pack(heartbeat, run.identity))
    await cluster.until(lambda: bool(cluster.events("version_differs", "coordinator")), "the coordinator says so")
    [skew] = cluster.events("version_differs", "coordinator")
    assert (skew["sender"], skew["kind"], skew["here"]) == ("mallory", "9.8.7", __version__)
