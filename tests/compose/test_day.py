"""The day on call of three data centers, done again in containers: no finding of the operator's report is left.

``make test-day`` runs it, with a Prometheus in each data center (an image of it, or Debian's program). All tests share one
deployment, and go in order. The findings, and what shows that they are gone:

==  ==========================================================  ==========================================================
1   a region without its disk does not heal                     ``test_a_region_without_its_disk_...`` here
2   a founder never comes back after ``keys founded``           ``test_a_founder_restarts_...`` here
3   no restore into three data centers                          ``test_backup``
4   a checkpoint has no learner's state                         ``test_backup``
5   a third data center ends in a loop                          ``test_the_third_...`` here; ``services/test_late_list``
6   no alert of a server or its disk                            ``test_faults_at_once_...``, ``test_a_full_disk_...`` here
7   no alert of a crash loop                                    ``test_faults_at_once_...`` here
8   images without what the doctor needs                        ``test_each_image_...`` here
9   a restarted learner is refused                              ``test_a_founder_restarts_...`` here; ``services/test_claims``
10  no way to watch several teams                               ``test_each_team_sees_...`` here
11  servers stop first                                          ``test_deploy``; ``services/test_evening``
12  certificates begin ten minutes before they are made         ``test_certificates_...`` here
13  ends are not in the structured log                          ``test_an_end_...`` here; ``services/test_ending``
14  nothing watches certificates                                ``test_certificates_...`` here
15  whether a list has arrived cannot be seen                   ``test_whether_a_list_...`` here
16  one team makes all private keys                             ``test_deploy``; ``services/test_team_keys``
17  a region cannot be added                                    ``services/test_restore``; docs/backup.md, A region later
18  ``status`` into a pipe hides names                          ``test_status_into_a_pipe_...`` here
19  images without labels and limits                            ``test_each_image_...`` here; ``deploy/test_sbom``
20  noise                                                       ``test_logs_of_the_day_...`` here
==  ==========================================================  ==========================================================

A licence (19) is the owner's matter. Clocks that are wrong (12) are in ``shared/test_identity``: containers have the
machine's.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from tests.compose.datacenters import (
    ALL_HOSTS,
    DEPLOY,
    STATUS,
    Machine,
    datacenters,
    deploy,
    named,
    status,
    steps_beyond,
)
from tests.compose.prometheus import Prometheus, image, of_operator, watch_all
from tests.made.docker_commands import ROOT, docker
from tests.made.pages import block_with, sections
from tests.pace import DEADLINE_S, scaled_s

pytestmark = [pytest.mark.compose, pytest.mark.day]

ALERT_S = scaled_s(120.0)  # each fault that needs a person is alerted within
HEALED_S = scaled_s(60.0)
Machines = dict[str, Machine]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("day")
    with datacenters(folder, ALL_HOSTS, PROMETHEUS_IMAGE=image(folder / "prometheus")) as made:
        deploy(made)
        watch_all(made)
        yield made


@pytest.fixture(scope="module")
def prometheus(machines: Machines) -> Prometheus:
    return of_operator(machines["us"])


def containers(machine: Machine) -> list[dict[str, Any]]:
    names = machine.type("docker compose ps -aq").stdout.split()
    found: list[dict[str, Any]] = json.loads(docker("inspect", *names))
    return found


OURS = ("coordinator", "learner", "syncer")


def test_the_third_datacenter_joins_without_a_restart(machines: Machines) -> None:
    for machine in machines.values():
        assert {found["Name"]: found["RestartCount"] for found in containers(machine) if found["RestartCount"]} == {}


def test_a_founder_restarts_after_its_right_is_taken_away_and_is_believed(machines: Machines) -> None:
    us = machines["us"]
    us.type(block_with(sections(DEPLOY)["A second datacenter joins"], "keys founded"))
    before = status(us)["learners"]
    us.type("docker compose restart learner")
    us.until("the founder is back", STATUS, steps_beyond("learner-us-0", before["learner-us-0"]["step"]))
    assert not named("permission_denied", us.events("learner"))
    for machine in machines.values():
        assert not named("message_refused", machine.events("learner", "syncer"))


def test_whether_a_list_has_arrived_can_be_seen(machines: Machines) -> None:
    us = machines["us"]
    at = " ".join(
        f"--at {name}=tls://{host}.example.org:{port}"
        for name, host, port in [("control-us", "us", 4223), *((f"nats-{host}", host, 4222) for host in ALL_HOSTS)]
    )
    behind = us.type(f"./diloco keys status {at}", check=False)
    assert behind.returncode == 1
    assert {line.split()[0] for line in behind.stdout.splitlines() if "behind" in line} == {"nats-ap", "nats-eu"}
    for host in ("eu", "ap"):
        us.type(f"./bundle --lists nats-{host} | ssh {host}.example.org 'cd diloco/deploy/datacenter && sudo tar -xp'")
        machines[host].type("docker compose kill -s HUP nats")
    arrived = us.until("all servers have their lists", f"./diloco keys status {at}", bool, within_s=DEADLINE_S)
    assert arrived.count("has the newest list") == 4


def test_each_image_has_what_the_doctor_needs_labels_and_limits(machines: Machines) -> None:
    us = machines["us"]
    for role in ("learner", "syncer"):
        said = us.type(f"docker compose run --rm --no-deps -T {role} diloco doctor --role {role} --json", check=False)
        checks = [json.loads(line) for line in said.stdout.splitlines()]
        assert len(checks) > 5, said.stderr
        assert "not found" not in said.stdout + said.stderr
    for found in containers(us):
        labels, host = found["Config"]["Labels"], found["HostConfig"]
        assert host["Memory"] > 0, found["Name"]
        assert host["PidsLimit"] >= 512
        assert host["ReadonlyRootfs"]
        if labels["com.docker.compose.service"] != "prometheus":
            assert labels["org.opencontainers.image.version"]
            assert labels["org.opencontainers.image.revision"]


def test_each_team_sees_the_whole_run(machines: Machines, prometheus: Prometheus) -> None:
    eu = machines["eu"]
    eu.type(block_with(sections(DEPLOY)["A second datacenter joins"], "watch-eu.identity > watch-eu.identity"))
    assert status(eu)["learners"].keys() == {f"learner-{host}-0" for host in ALL_HOSTS}

    def seen() -> set[str]:
        return {found["metric"]["name"] for found in prometheus.query("diloco_ready")}

    expected = {"coordinator"} | {f"{role}-{host}-0" for role in ("learner", "syncer") for host in ALL_HOSTS}
    expected |= {f"nats-{host}" for host in ALL_HOSTS} | {"control-us"}
    machines["us"].until("all services are seen", "true", lambda _: expected <= seen())


def test_status_into_a_pipe_has_all_names(machines: Machines) -> None:
    said = machines["us"].type("./diloco status seen | cat").stdout
    for host in ALL_HOSTS:
        assert f"learner-{host}-0" in said
        assert f"syncer-{host}-0" in said


def test_certificates_begin_a_day_before_and_their_ends_are_alerted(machines: Machines, prometheus: Prometheus) -> None:
    us, ap = machines["us"], machines["ap"]
    identity = tomllib.loads((us.home / "diloco-keys" / "identities" / "learner-ap-0.identity").read_text())
    begins = x509.load_pem_x509_certificate(identity["certificate"].encode()).not_valid_before_utc
    assert begins < datetime.now(UTC) - timedelta(hours=23)
    us.type("./diloco keys renew learner-ap-0 --days 10")
    us.type("./bundle --lists control-us | sudo tar -xp && docker compose kill -s HUP control")
    us.type("./bundle nats-ap learner-ap-0 | ssh ap.example.org 'cd diloco/deploy/datacenter && sudo tar -xp'")
    ap.type("docker compose kill -s HUP nats && docker compose restart learner")
    step = status(us)["learners"]["learner-ap-0"]["step"]
    us.until("it is back", STATUS, steps_beyond("learner-ap-0", step))
    prometheus.until_firing([("DilocoCertificateEnds", "learner-ap-0")], ALERT_S)


def test_an_end_stands_in_the_structured_log(machines: Machines) -> None:
    ended = machines["us"].type("docker compose run --rm --no-deps -T -e DILOCO_NAME=learner-us-9 learner", check=False)
    assert ended.returncode == 2
    said = [json.loads(line) for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("{")]
    [end] = [line for line in said if line["event"] == "process_ended"]
    assert end.items() >= {"level": "critical", "service": "learner-us-9", "code": 2}.items()
    assert end["time"]
    assert "learner-us-9" in end["reason"]


def test_faults_at_once_each_have_an_alert_in_two_minutes(machines: Machines, prometheus: Prometheus) -> None:
    """A server hangs in ap, a syncer crashes in a loop in eu, and the founder is frozen in us."""
    us, eu, ap = machines["us"], machines["eu"], machines["ap"]
    before = status(us)["learners"]
    frozen = next(found for found in containers(us) if found["Config"]["Labels"]["com.docker.compose.service"] == "learner")
    [network] = frozen["NetworkSettings"]["Networks"].values()
    ap.type("docker compose pause nats")
    us.type("docker compose pause learner")
    try:
        prometheus.until_firing(
            [
                ("DilocoServerDown", "nats-ap"),
                ("DilocoNotConnected", "learner-ap-0"),
                ("DilocoLinkCut", "ap"),
                ("DilocoServiceDown", f"{network['IPAddress']}:9464"),
            ],
            ALERT_S,
        )
    finally:
        ap.type("docker compose unpause nats")
        us.type("docker compose unpause learner")
    started = {found["metric"]["name"]: found["value"][1] for found in prometheus.query("diloco_start_timestamp_seconds")}
    for _ in range(3):
        eu.type("docker compose restart syncer")
        eu.until(
            "it is scraped",
            "true",
            lambda _: any(
                found["value"][1] != started["syncer-eu-0"]
                for found in prometheus.query('diloco_start_timestamp_seconds{name="syncer-eu-0"}')
            ),
        )
        [now] = prometheus.query('diloco_start_timestamp_seconds{name="syncer-eu-0"}')
        started["syncer-eu-0"] = now["value"][1]
    prometheus.until_firing([("DilocoCrashLoop", "syncer-eu-0")], ALERT_S)
    for name, learner in before.items():
        us.until(f"{name} goes on", STATUS, steps_beyond(name, learner["step"]))


BROKEN = """
import diloco.wire.framing as framing
unpack = framing.unpack

def misread(data, kind, run):
    message = unpack(data, kind, run)
    if kind.__name__ == "Heartbeat" and message[0].learner != "learner-ap-0":
        raise framing.HashError("the content has another hash")
    return message

framing.unpack = misread
"""


def test_a_place_that_refuses_all_others_is_named_and_not_its_senders(machines: Machines, prometheus: Prometheus) -> None:
    ap = machines["ap"]
    broken = ap.home / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BROKEN)
    override = f"COMPOSE_FILE=$COMPOSE_FILE:{ROOT / 'tests' / 'compose' / 'refusing.yml'} BROKEN={broken}"
    ap.type(f"{override} docker compose up -d --no-deps syncer")
    prometheus.until_firing([("DilocoRefusesOthers", "ap")], ALERT_S)
    assert not {alert for alert in prometheus.firing() if alert[0] == "DilocoRefusedMessages"}
    ap.type("docker compose up -d --no-deps syncer")


def lose_the_disk(ap: Machine, compose_file: str = "$COMPOSE_FILE") -> None:
    """Kill all of a data center, remove its server's volume, and start all again."""
    ap.type("docker compose kill && docker compose rm -sf nats server-watch")
    ap.type("docker volume rm ${COMPOSE_PROJECT_NAME}_nats")
    ap.type(f"COMPOSE_FILE={compose_file} docker compose up -d")


def test_a_region_without_its_disk_is_in_the_merges_again_and_verify_holds_through_it(machines: Machines) -> None:
    us, ap = machines["us"], machines["ap"]
    before, lost_at = status(us), datetime.now(UTC).isoformat()

    def joined() -> list[dict[str, Any]]:
        return [event for event in named("joined", ap.events("learner")) if event["time"] > lost_at]

    lose_the_disk(ap, f"$COMPOSE_FILE:{ROOT / 'tests' / 'compose' / 'tmpfs.yml'}")
    began_s = time.monotonic()
    ap.until("its learner has joined", "true", lambda _: bool(joined()))
    print(f"{time.monotonic() - began_s:.0f} s: the learner of the region without its disk has joined")
    us.until("its work is merged", STATUS, steps_beyond("learner-ap-0", before["learners"]["learner-ap-0"]["step"]))
    assert joined()[0]["version_min"] >= min(fragment["version"] for fragment in before["fragments"])
    attach = block_with(sections(DEPLOY)["A second datacenter joins"], "--bulk tls://us.example.org:4222 ").splitlines()[0]
    us.type(attach.replace("attach seen", "attach through-ap").replace("--bulk tls://us.", "--bulk tls://ap."))
    us.until("verify holds through ap", "./diloco verify through-ap", lambda said: "holds" in said)
    refused = named("message_refused", ap.events("learner", "syncer"))
    assert not [event for event in refused if event["time"] > lost_at]


def test_a_full_disk_of_a_server_has_alerts_and_is_mended_by_room_and_a_restart(
    machines: Machines, prometheus: Prometheus
) -> None:
    us, ap = machines["us"], machines["ap"]
    ap.type("docker compose exec -T nats sh -c 'dd if=/dev/zero of=/data/filler bs=64k || true'")
    prometheus.until_firing([("DilocoServerDisk", "nats-ap"), ("DilocoServerUnhealthy", "nats-ap")], ALERT_S)
    ap.type("docker compose exec -T nats rm /data/filler")
    step = status(us)["learners"]["learner-ap-0"]["step"]
    ap.type("docker compose restart nats")
    us.until("ap's learner goes on", STATUS, steps_beyond("learner-ap-0", step))


def test_logs_of_the_day_repeat_nothing_without_end_and_have_no_errors_of_libraries(machines: Machines) -> None:
    for machine in machines.values():
        services = OURS if machine.name == "us" else OURS[1:]
        events = machine.events(*services)
        counts = Counter((event["service"], event["event"]) for event in events if event["level"] in ("warning", "error"))
        often = {key: count for key, count in counts.items() if count > 60}
        assert often == {}
        assert not [event for event in named("library_message", events) if event["level"] == "error"]
        assert not [line for line in machine.log_lines(*services) if not line.startswith('{"time"')]
