"""Members of different versions in one run: what can work is said once, what cannot is refused with both versions."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import msgspec
import pytest
from tests.made.fixtures import Diloco, Launch
from tests.services.cluster import small

from diloco import __version__
from diloco.control import admission, creation
from diloco.errors import FormatError, RunError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import get_logger
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.control import Heartbeat
from diloco.wire.entries import Genesis, Keyframe, Record
from diloco.wire.framing import VERSION, Message
from diloco.wire.offers import Offer
from diloco.wire.subjects import Subjects

VERSION_1 = Path(__file__).parents[1] / "protocol" / "version1"  # bytes that diloco 0.1.0 wrote
MADE_BY_1 = "made by version 0.1.0 of diloco (format 1)"


async def says(link: NatsTransport, name: str, value: object) -> None:
    """Put what another version, or another program, left in the bucket of a run."""
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


@pytest.mark.promise("members of another version with the same protocol take part")
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
    told = 0
    while told < 3 or not cluster.events("version_differs", "coordinator"):  # heartbeats are not stored: one may be lost
        await link.publish(cluster.subjects.heartbeat("mallory"), framing.pack(heartbeat, run.identity))
        told += 1
        cluster.check_alive()
        await asyncio.sleep(0.05)
    [skew] = cluster.events("version_differs", "coordinator")
    assert (skew["sender"], skew["kind"], skew["here"]) == ("mallory", "9.8.7", __version__)


async def version_1(link: NatsTransport, *, without: str = "") -> str:
    """Put the bucket of a run of version 1 on the server, under another name."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    bucket = await link.bucket(Subjects(name).bucket, create=True)
    for key, value in json.loads((VERSION_1 / "bucket.json").read_text()).items():
        if key != without:
            await bucket.put(key, bytes.fromhex(value))
    return name


async def test_a_run_of_version_1_is_refused_by_the_software_that_made_it_and_left_as_it_is(
    link: NatsTransport, launch: Launch
) -> None:
    name = await version_1(link)
    expected = (
        f"run {name!r} was made by diloco 0.1.0 and speaks protocol 1; this is diloco {__version__}, which speaks {VERSION}: "
        "use diloco 0.1.0, or begin another run"
    )
    for joining in (creation.find(link, name, get_logger()), creation.create(link, name, RunSettings())):
        with pytest.raises(RunError) as refused:
            await joining
        assert str(refused.value) == expected
    cluster = launch(small(), None, name)
    [(code, said)] = await cluster.refused(cluster.start("syncer-0", "diloco_syncer"))
    assert (code, expected in said) == (5, True)
    made = [str(info.config.name) for info in await link.bulk.jetstream().streams_info()]
    assert [stream for stream in made if name in stream] == [f"KV_{Subjects(name).bucket}"], "it has got no streams of ours"


async def test_a_run_that_requires_what_this_version_does_not_know_is_refused_by_name(link: NatsTransport) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    await says(link, name, {"protocol": VERSION, "software": "0.9.0", "requires": ["sequences", "signatures"]})
    with pytest.raises(RunError, match=r"requires sequences, signatures of its members; this is diloco .*: update it"):
        await creation.create(link, name, RunSettings())


async def test_a_run_with_settings_that_are_no_more_is_refused_by_their_names(link: NatsTransport) -> None:
    """As the first runs of this protocol have them, which carried late work over."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    await says(link, name, {"protocol": VERSION, "software": "0.2.0"})
    values = RunSettings().model_dump() | {"carry": {"overlap": 0.0, "late": 1.0, "max_versions": 8}}
    await (await link.bucket(Subjects(name).bucket, create=False)).put("run", msgspec.json.encode(values))
    with pytest.raises(
        RunError, match=f"run '{name}' was made by another version: .*no setting 'carry.late'.*'carry.max_versions'"
    ):
        await creation.find(link, name, get_logger())
    with pytest.raises(RunError, match=r"exists on the server with another setting: carry\.late is 1\.0 there"):
        await creation.create(link, name, RunSettings())


async def test_a_new_run_requires_nothing_beside_the_protocol(link: NatsTransport) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    stored = await (await creation.create(link, name, RunSettings())).registry.get("protocol")
    assert stored is not None
    assert stored[0] == f'{{"protocol":{VERSION},"software":"{__version__}","requires":[]}}'.encode()


@pytest.mark.parametrize(("bits", "feature"), [(1, "one_bit"), (2, "two_bits")])
@pytest.mark.parametrize("which", ["offer_bits", "record_bits"])
async def test_a_run_of_few_bits_requires_that_members_know_them(
    link: NatsTransport, which: str, bits: int, feature: str
) -> None:
    """A member that does not know the feature ends before it writes: see the test of unknown ones above."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    settings = RunSettings.model_validate({"codec": {which: bits}})
    stored = await (await creation.create(link, name, settings)).registry.get("protocol")
    assert stored is not None
    assert json.loads(stored[0])["requires"] == [feature]
    assert (await creation.find(link, name, get_logger())).created == settings


async def test_a_run_that_says_no_protocol_is_one_of_version_1(link: NatsTransport) -> None:
    name = await version_1(link, without="protocol")
    with pytest.raises(RunError, match=r"as if an early diloco 0\.1\.0 had made it"):
        await creation.find(link, name, get_logger())


def test_files_of_version_1_are_refused_by_the_software_that_made_them(diloco: Diloco, tmp_path: Path) -> None:
    (tmp_path / "old" / "whole" / "1").mkdir(parents=True)
    (tmp_path / "old" / "run.json").write_bytes((VERSION_1 / "run.json").read_bytes())
    (tmp_path / "old" / "whole" / "1" / "manifest.json").write_bytes((VERSION_1 / "manifest.json").read_bytes())
    for arguments in (
        ("verify", "old"),
        ("up", "--run-dir", "old"),
        ("checkpoint", "old"),
        ("up", "--resume", "old", "--run-dir", "new"),
        ("up", "--resume", "old/whole/1", "--run-dir", "new"),
    ):
        ended = diloco(*arguments)
        assert (ended.code, MADE_BY_1 in ended.err, ended.err.count("\n")) == (5, True, 1), (arguments, ended)
        assert not Path("new").exists()


@pytest.mark.parametrize(
    ("name", "cls"),
    [("pulse", Heartbeat), ("offer", Offer), ("record_1", Record), ("genesis", Genesis), ("keyframe_0", Keyframe)],
)
def test_a_message_of_version_1_is_refused_with_both_versions(name: str, cls: type[Message]) -> None:
    frame = bytes.fromhex((VERSION_1 / f"{name}.hex").read_text())
    with pytest.raises(FormatError, match="protocol version 1, expected 2; update the older member"):
        framing.unpack(frame, cls, b"any run.")
