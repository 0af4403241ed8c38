"""What ``diloco doctor`` concludes from what it measured: verdicts at their thresholds, and needs worked out by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from diloco.core.run.tape import Header
from diloco.core.syncer.bandwidth import Level
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.errors import DilocoError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings, MeshSettings, ProcessesSettings
from diloco.wire import framing
from diloco_ops.broker.server import free_port
from diloco_ops.doctor import access, machine, needs, region_verdicts, verdicts
from diloco_ops.doctor import mesh_check as island
from diloco_ops.doctor.check import Check, Role
from diloco_ops.doctor.mesh_check import IslandFit
from diloco_ops.doctor.needs import ModelSizes, ServiceWay
from diloco_ops.doctor.reach import REFUSED, Reached
from diloco_ops.doctor.verdicts import Members, ServerInfo, Speed, Storage

# 6400 values in four bits are 100 blocks of 34 bytes
PARAMETERS, BODY_BYTES = 6400, 3400
MODEL = ModelSizes(PARAMETERS, PARAMETERS)
ONE_SITE = run_settings()
TWO_REGIONS = run_settings("decoupled", {"regions.names": ["us", "eu"]})
NOW = datetime(2026, 11, 22, tzinfo=UTC)


def verdict(check: Check) -> tuple[str, str]:
    return check.name, check.verdict


def test_a_model_counts_by_its_parameters_and_its_largest_fragment() -> None:
    tensors = [TensorSpec("a", (100, 10)), TensorSpec("b", (10, 10)), TensorSpec("c", (7,))]
    assert ModelSizes.of(build_map(tensors, 2, "layer")) == ModelSizes(1107, 1007)


def test_storage() -> None:
    # a keyframe has 3 x 4 bytes a parameter, 76,800; with as many bytes of records 6990 times 153,600 stay below 1 GiB
    assert needs.storage_bytes(ONE_SITE, PARAMETERS) == {"log": 6990 * 153_600 + 76_800, "offers": 4 * BODY_BYTES}
    # two keyframes and what follows them stay whatever keep_bytes says; half of the learners are in each region
    short = run_settings("decoupled", {"regions.names": ["us", "eu"], "regions.merge": True, "log.keep_bytes": 0})
    assert needs.storage_bytes(short, PARAMETERS) == {"log": 2 * 153_600 + 76_800, "offers": 3 * BODY_BYTES}
    # with AdamW a keyframe has one moment more; gradients go in bfloat16; and the archive is as large as it may get
    gradients = run_settings("data-parallel", {"log.keep_bytes": 0, "log.archive": True, "log.archive_bytes": 1 << 20})
    assert needs.storage_bytes(gradients, PARAMETERS) == {"log": 5 * 102_400, "offers": 4 * 12_800, "archive": 1 << 20}


def test_memory() -> None:
    assert needs.memory_bytes("learner", ONE_SITE, 10**9) == (17_450_000_000, 26_450_000_000)
    assert needs.memory_bytes("evaluator", run_settings("diloco"), 10**9) == (26_450_000_000, 26_450_000_000)
    assert needs.memory_bytes("coordinator", ONE_SITE, 10**9) == (250_000_000, 250_000_000)
    # it owns half and follows half; of four learners' offers, 3.4 MB each, two are counted in what a parameter takes
    usual, worst = needs.memory_bytes("syncer", ONE_SITE, 6_400_000)
    assert usual == 250_000_000 + 3_200_000 * 16 + 3_400_000 + 3_200_000 * 8
    assert worst == 250_000_000 + 6_400_000 * 16 + 6_800_000

    model = ModelSizes(6_400_000, 6_400_000)
    for available, expected in ((usual - 1, "failed"), (usual, "warning"), (worst, "ok")):
        assert verdict(verdicts.memory("syncer", ONE_SITE, model, available)) == ("memory", expected)
    said = verdicts.memory("syncer", ONE_SITE, model, usual).text()
    assert said == (
        "330 MB available; needed: 330 MB for 6.40M values, 359 MB alone with all fragments; more memory, or more syncers"
    )


@pytest.mark.parametrize(
    ("bytes_per_s", "level"), [(178, Level(4, 1)), (177, Level(4, 1.5)), (100, Level(4, 2)), (45, Level(4, 4)), (44, None)]
)
def test_what_fits_a_link(bytes_per_s: float, level: Level | None) -> None:
    # 24 steps of a second, of which the link may be busy for 0.8: 19.2 s for 3400 bytes
    assert needs.needed_bytes_per_s(ServiceWay(PARAMETERS, 4), ONE_SITE, 1.0) == pytest.approx(177.08, abs=0.01)
    assert needs.fits(ServiceWay(PARAMETERS, 4), TWO_REGIONS, bytes_per_s, 1.0) == level
    # without regions nothing follows the links
    fits = Level(4, 1) if bytes_per_s == 178 else None
    assert needs.fits(ServiceWay(PARAMETERS, 4), ONE_SITE, bytes_per_s, 1.0) == fits


def test_what_goes_over_a_link() -> None:
    assert needs.ways("learner", ONE_SITE, PARAMETERS, far=False) == (ServiceWay(PARAMETERS, 4), ServiceWay(PARAMETERS, 4))
    assert needs.ways("evaluator", ONE_SITE, PARAMETERS, far=False) == (ServiceWay(0, 4), ServiceWay(PARAMETERS, 4))
    # of its half of the fragments: entries there, and from there the offers of that region's two learners, or one for both
    assert needs.ways("syncer", TWO_REGIONS, PARAMETERS, far=True) == (ServiceWay(3200, 4), ServiceWay(6400, 4))
    merging = run_settings("decoupled", {"regions.names": ["us", "eu"], "regions.merge": True})
    assert needs.ways("syncer", merging, PARAMETERS, far=True) == (ServiceWay(3200, 4), ServiceWay(3200, 4))


@pytest.mark.parametrize(
    ("settings", "rate", "expected"),
    [
        (TWO_REGIONS, 10_000.0, "ok"),
        (TWO_REGIONS, 100.0, "warning"),
        (TWO_REGIONS, 44.0, "failed"),
        (ONE_SITE, 100.0, "failed"),
    ],
)
def test_a_link_against_what_the_run_sends(settings: RunSettings, rate: float, expected: str) -> None:
    rates, _ = verdicts.link("us", "learner", Speed(0.1, rate, 10_000), settings, MODEL, 1.0, far=False)
    assert verdict(rates) == ("us link", expected)
    assert rates.needed == "0.00142 Mbit/s there, 0.00142 Mbit/s back, at 1 s a step"
    if expected == "warning":
        assert (
            rates.remedy
            == "the run will lower its precision to 4 bits and lengthen rounds to 48 steps; only a faster link helps"
        )


def test_a_round_within_its_window() -> None:
    # two round trips, 1 s for the offer and 2 s for the record; the window is two steps
    speed = Speed(0.1, BODY_BYTES, BODY_BYTES / 2)
    assert needs.round_s(ONE_SITE, MODEL, 0.1, BODY_BYTES, BODY_BYTES / 2) == pytest.approx(3.2)
    found = [verdicts.link("nats", "learner", speed, ONE_SITE, MODEL, step_s, far=False)[1] for step_s in (1.5, 1.7)]
    assert [verdict(check) for check in found] == [("nats round", "warning"), ("nats round", "ok")]
    # who waits for versions has no such window
    waiting = verdicts.link("nats", "learner", speed, run_settings("diloco"), MODEL, 1.5, far=False)
    assert [check.name for check in waiting] == ["nats link"]


def test_a_link_of_which_too_little_is_known() -> None:
    speed = Speed(0.05, 1e6, 2e6)
    for settings, model, step_s in ((None, None, None), (ONE_SITE, None, 1.0), (ONE_SITE, MODEL, None)):
        [check] = verdicts.link("nats", "learner", speed, settings, model, step_s, far=False)
        assert (check.verdict, check.found) == ("ok", "round trip 50 ms, 8 Mbit/s there, 16 Mbit/s back")
    [check] = verdicts.link("nats", "learner", Speed(0.05), ONE_SITE, MODEL, 1.0, far=False)
    assert (check.verdict, check.found) == ("warning", "round trip 50 ms")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (ServerInfo("2.14.0", 1 << 20, True, False), "ok"),
        (ServerInfo("v2.15.1-beta.1", 8 << 20, True, True), "ok"),
        (ServerInfo("2.12.8", 1 << 20, True, False), "failed"),
        (ServerInfo("", 1 << 20, True, False), "failed"),
        (ServerInfo("3.0.0", (1 << 20) - 1, True, False), "failed"),
        (ServerInfo("2.14.0", 1 << 20, False, False), "failed"),
    ],
)
def test_what_a_server_says_of_itself(info: ServerInfo, expected: str) -> None:
    assert verdict(verdicts.server("us", info, (2, 14))) == ("us server", expected)


@pytest.mark.parametrize(
    ("role", "python", "jax", "expected"),
    [
        ("learner", (3, 11, 0), "0.10.2", "ok"),
        ("learner", (3, 11, 0), "0.9.2", "failed"),
        ("evaluator", (3, 12, 1), None, "failed"),
        ("syncer", (3, 11, 9), None, "ok"),
        ("syncer", (3, 10, 9), None, "failed"),
    ],
)
def test_versions(role: Role, python: tuple[int, ...], jax: str | None, expected: str) -> None:
    assert verdicts.versions(role, "0.1.0", 1, python, jax).verdict == expected


def test_storage_of_an_account() -> None:
    needed = {"log": 1000, "offers": 300}
    # 400 of the log are there; 600 and 300 are still to come
    found = Storage(5000, 5900, {"log": 400})
    assert verdicts.missing_bytes(found, needed) == 900
    assert verdicts.storage("us", found, needed).verdict == "ok"
    assert verdicts.storage("us", Storage(5000, 5899, {"log": 400}), needed).verdict == "failed"
    assert verdicts.storage("us", Storage(5000, None, {"log": 2000}), needed).text() == (
        "5.00 kB used, no limit for this account; needed: 300 B more (log 1.00 kB, offers 300 B)"
    )
    assert verdicts.reserved("us", 900, "").verdict == "ok"
    assert verdicts.reserved("us", 900, "insufficient storage resources available (code 10047)").verdict == "failed"


@pytest.mark.parametrize(
    ("memory_s", "file_s", "expected"),
    [(0.0002, 0.0004, "ok"), (0.0002, 0.00024, "warning"), (0.0002, 0.06, "warning"), (0.080, 0.080, "ok")],
)
def test_a_server_s_sync(memory_s: float, file_s: float, expected: str) -> None:
    assert verdict(verdicts.sync("us", memory_s, file_s)) == ("us sync", expected)


@pytest.mark.parametrize(
    ("offset_s", "uncertain_s", "expected"), [(1.01, 0.02, "ok"), (-1.03, 0.02, "warning"), (3.0, 2.5, "ok")]
)
def test_clocks(offset_s: float, uncertain_s: float, expected: str) -> None:
    assert verdict(verdicts.clock("us", offset_s, uncertain_s)) == ("us clock", expected)


def test_what_ends_soon() -> None:
    for days, expected in ((15, "ok"), (13, "warning")):
        ends = NOW + timedelta(days=days)
        assert verdict(verdicts.identity(Path("a.identity"), "syncer", "syncer-us", ends, NOW)) == ("identity", expected)
        assert verdict(verdicts.certificate("us", ends, NOW)) == ("us tls", expected)


def test_who_lacks_a_grant_is_told_which_command_makes_it() -> None:
    assert verdicts.grant("learner", "ann", authority=True, granted=True) is None
    assert verdicts.grant("syncer", "s", authority=True, granted=False) is None
    lacking: list[tuple[Role, bool, str, str]] = [
        ("learner", False, "failed", "diloco keys renew DIR ann"),
        ("syncer", False, "warning", "diloco keys renew DIR ann"),
        ("learner", True, "failed", "diloco keys grant DIR ann --batch-tokens N"),
    ]
    for role, authority, expected, remedy in lacking:
        check = verdicts.grant(role, "ann", authority=authority, granted=False)
        assert check is not None
        assert (check.verdict, check.remedy) == (expected, remedy)


def test_servers_of_a_place() -> None:
    there, away = ("a:4222", "10.0.0.1", 0.0314, ""), ("b:4222", "10.0.0.2", 0.0, "Connection refused")
    for servers, expected in (([there], "ok"), ([there, away], "warning"), ([away, away], "failed")):
        assert verdict(verdicts.reached("control", servers)) == ("control reach", expected)
    assert verdicts.reached("control", [there, away]).found == "a:4222 (10.0.0.1) in 31.4 ms, b:4222: Connection refused"


def test_members() -> None:
    fine, alone = verdicts.members("learner-0", Members(5, "", 0.1, ""), 2.0), Members(0, "", None, "")
    assert [verdict(check) for check in fine] == [("name", "ok"), ("members", "ok")]
    assert [check.verdict for check in verdicts.members("learner-0", alone, 2.0)] == ["ok", "ok"]
    name, others = verdicts.members("learner-0", Members(5, "learner in us, stepping", 0.1, "protocol version 2"), 2.0)
    assert (name.verdict, others.verdict) == ("failed", "warning")
    assert name.found == "learner-0 is there already: learner in us, stepping"


def test_the_control_store_s_round_trip() -> None:
    # heartbeats count for liveness.takeover_s, 1.5 s
    assert [verdicts.signs("control", rtt_s, ONE_SITE).verdict for rtt_s in (0.7, 0.8)] == ["ok", "warning"]


def test_a_run_that_is_not_there_yet() -> None:
    assert verdicts.no_run("demo", "coordinator", "").verdict == "ok"
    assert verdicts.no_run("demo", "learner", "its bucket does not exist").verdict == "warning"


def test_permissions() -> None:
    assert verdicts.allowed("us", 5, [], []).verdict == "ok"
    refused = verdicts.allowed("us", 5, ["to write to diloco.demo.delta.0.a.head"], [])
    assert (refused.verdict, refused.found) == ("failed", "refused: to write to diloco.demo.delta.0.a.head")
    wide = verdicts.allowed("us", 5, [], ["diloco.demo.answer.a.doctor"])
    assert (wide.verdict, wide.found) == ("warning", "too wide: to write to diloco.demo.answer.a.doctor")


def test_limits_of_streams() -> None:
    assert verdicts.limits("us", {}).verdict == "skipped"
    unlimited = verdicts.limits("us", {"A": []}, lists_have_none=True)
    assert (unlimited.verdict, unlimited.found) == ("warning", "the server's auth.conf has no max_payload for this identity")
    assert verdicts.limits("us", {"A": [], "B": []}).found == "limits of A, B as the run sets them"
    assert verdicts.limits("us", {"A": [], "B": ["max_msg_size = no limit"]}).found == "B: max_msg_size = no limit"


def test_what_is_tried_is_the_service_s_own() -> None:
    learner = access.at_control("learner", "demo", "a") + access.at_bulk("learner", "demo", "a", "a-KEY")
    assert learner.stores == ("$KV.DILOCO_demo.member.a", "$KV.DILOCO_demo.share.a", "diloco.demo.delta.0.a.head")
    heard = ("diloco.demo.heartbeat.*", "diloco.demo.round.*", "diloco.demo.marker", "diloco.demo.changed")
    assert learner.listens == (*heard, "diloco.demo.state.a")
    created = "$JS.API.CONSUMER.CREATE.DILOCO_demo_LOG"
    assert learner.sends == (
        "_R_.doctor",
        f"{created}.a-KEY-0.diloco.demo.fragment.*.>",
    )
    assert learner.excess == ("diloco.demo.answer.a.doctor", created, "$JS.API.DIRECT.GET.DILOCO_demo_LOG")
    assert access.at_bulk("syncer", "demo", "b", "b-KEY").sends == access.other_region("demo", "b-KEY").sends


def test_the_servers_of_other_regions() -> None:
    regions = ["us", "eu", "ap"]

    def judged(role: Role, *urls: str) -> tuple[str, str]:
        check = region_verdicts.other_regions(role, "us", regions, urls)
        return check.verdict, check.found

    assert judged("syncer", "eu", "ap") == judged("coordinator", "eu", "ap") == ("ok", "the servers of eu, ap are set")
    assert judged("syncer", "ap") == ("failed", "missing: eu")
    assert judged("coordinator", "ap") == ("warning", "missing: eu; while this coordinator leads, their logs only grow")
    assert judged("coordinator", "ap", "eu", "mars") == ("failed", "the run has no region mars")


# ---- this machine


def test_memory_of_control_groups_and_of_the_machine(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "a.slice" / "b.service").mkdir(parents=True)
    assert machine.available_bytes(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:   1000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a.slice/b.service\n")
    assert machine.available_bytes(proc, groups) == 1_024_000
    for folder, limit in (("a.slice", "900000"), ("a.slice/b.service", "max")):
        (groups / folder / "memory.max").write_text(f"{limit}\n")
        (groups / folder / "memory.current").write_text("100000\n")
    assert machine.available_bytes(proc, groups) == 800_000


def test_a_folder_is_written_to_and_nothing_is_left(tmp_path: Path) -> None:
    found = machine.disk(tmp_path / "not" / "there")
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.sync_s > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DilocoError, match="file: cannot be written"):
        machine.disk(tmp_path / "file")


@pytest.mark.parametrize(
    ("free", "sync_s", "foreign", "expected"),
    [
        (50, 0.001, [], "ok"),
        (9, 0.001, [], "warning"),
        (1, 0.001, [], "failed"),
        (50, 0.06, [], "warning"),
        (50, 0.001, ["a"], "failed"),
    ],
)
def test_state_dir(free: int, sync_s: float, foreign: list[str], expected: str) -> None:
    assert verdicts.state_dir(Path("/state"), free, 100, 2, sync_s, foreign).verdict == expected


def test_files_of_another_run_are_named(tmp_path: Path) -> None:
    ours, theirs = (framing.run_id(name, ONE_SITE.digest()) for name in ("ours", "theirs"))
    (tmp_path / "tapes").mkdir()
    (tmp_path / "tapes" / "a.tape").write_bytes(Header(ours, "a").pack())
    (tmp_path / "tapes" / "b.tape").write_bytes(Header(theirs, "b").pack())
    (tmp_path / "tapes" / "c.tape").write_bytes(b"what cannot be read")
    assert machine.foreign_files(tmp_path, ours) == ["tapes/b.tape"]


def test_an_address_that_is_taken() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert machine.refusal_to_listen(address) == ""
    assert verdicts.listening(address, "").verdict == "ok"
    assert machine.refusal_to_listen("192.0.2.1:9464") == "Cannot assign requested address"
    assert verdicts.listening(address, "Address already in use").verdict == "failed"


def test_limits_of_the_process() -> None:
    assert [verdicts.open_files(limit).verdict for limit in (255, 256)] == ["warning", "ok"]
    wanted = {"MALLOC_ARENA_MAX": "1", "MALLOC_TOP_PAD_": "2"}
    assert verdicts.allocator(wanted, wanted).verdict == "ok"
    assert verdicts.allocator({"MALLOC_ARENA_MAX": "1"}, wanted).text() == (
        "MALLOC_TOP_PAD_ not set; put into the environment: MALLOC_TOP_PAD_=2"
    )


# ---- learners of several devices or hosts

FIT = IslandFit(2, "cpu", {"data": 2, "fsdp": 2, "tensor": 1}, {"python": "3.11", "mesh": "2 x 2"})
LEADER = ProcessesSettings(count=2, index=0, address="10.0.0.1:7600")
OTHER = ProcessesSettings(count=2, index=1, address="10.0.0.1:7600")
NEXT = ProcessesSettings(count=3, index=1, address="10.0.0.1:7600,10.0.0.2:7600", least=2)  # leads where process 0 is lost


def test_which_learners_have_a_mesh_or_processes_to_look_at() -> None:
    assert not island.is_island(LearnerSettings(name="a"))
    assert island.is_island(LearnerSettings(name="a", mesh=MeshSettings(data=2)))
    assert island.is_island(LearnerSettings(name="a", processes=OTHER))


def test_a_mesh() -> None:
    found = island.mesh(FIT, 2, run_known=True)
    assert (found.verdict, found.found) == (
        "ok",
        "2 devices (cpu) here, 4 of 2 processes: data 2, fsdp 2, tensor 1; fits the run's tensors and batches",
    )
    unknown = island.mesh(FIT, 1, run_known=False)
    assert unknown.found.endswith("; tensors and batches are unknown until the run exists")
    refused = island.mesh(IslandFit(2, "cpu", {}, {}, "mesh: change it"), 1, run_known=True)
    assert (refused.verdict, refused.found) == ("failed", "2 devices (cpu): mesh: change it")


@pytest.mark.parametrize(
    ("settings", "refusal", "error", "expected"),
    [
        (LEADER, "", "", "ok"),
        (LEADER, "Cannot assign requested address", "", "failed"),
        (ProcessesSettings(count=2, address="localhost:7600"), "", "", "warning"),
        (OTHER, "", "", "ok"),
        (OTHER, "", REFUSED, "ok"),  # process 0 is not there yet
        (NEXT, "", "", "ok"),
        (NEXT, "Cannot assign requested address", "", "failed"),
        (NEXT, "", "no answer within 5 s: a firewall, or no route", "failed"),
        (OTHER, "", "no answer within 5 s: a firewall, or no route", "failed"),
    ],
)
def test_where_processes_meet(settings: ProcessesSettings, refusal: str, error: str, expected: str) -> None:
    check = island.meets(settings, refusal, Reached(settings.address, error=error))
    assert verdict(check) == ("meeting", expected)
    assert (expected == "ok") == (not check.remedy)


@pytest.mark.parametrize(
    ("address", "meeting", "expected"),
    [
        ("10.0.0.2", "10.0.0.1", "ok"),
        ("127.0.1.1", "10.0.0.1", "failed"),  # as Debian writes it into /etc/hosts
        ("127.0.1.1", "127.0.0.1", "ok"),  # all processes are on this host
        ("", "10.0.0.1", "failed"),
    ],
)
def test_a_host_name_that_collectives_listen_at(address: str, meeting: str, expected: str) -> None:
    assert verdict(island.host_name("node7", address, meeting)) == ("host name", expected)


def test_facts_that_two_hosts_compare() -> None:
    own, same = island.facts(FIT), island.facts(IslandFit(2, "cpu", {}, {"mesh": "2 x 2", "python": "3.11"}))
    other = island.facts(IslandFit(2, "cpu", {}, {**FIT.facts, "python": "3.12"}))
    assert own.found == same.found
    assert own.found.split(":")[0] != other.found.split(":")[0]
    assert own.found.endswith(": mesh 2 x 2, python 3.11")
    assert island.facts(IslandFit(2, "cpu", {}, {})).verdict == "skipped"
