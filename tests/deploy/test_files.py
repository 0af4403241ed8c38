"""The files of ``deploy/`` say what the code says; no daemon, cluster or network is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.made import kustomize

from diloco.nats.connection import malloc_environment
from diloco.process.observe import _Stamp
from diloco.service.metrics import PATHS
from diloco.settings.loading import read_toml
from diloco.settings.run import RunSettings
from diloco.settings.service import (
    CoordinatorSettings,
    LearnerSettings,
    ServerWatchSettings,
    ServiceSettings,
    SyncerSettings,
)
from diloco.settings.validation import parse
from diloco_ops.broker.server import GO_ENVIRONMENT, REQUEST_QUEUE_LIMIT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DATACENTER = DEPLOY / "datacenter"
OVERLAYS = sorted(path.name for path in (DEPLOY / "kubernetes" / "overlays").iterdir())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
TIMERS = sorted((DEPLOY / "systemd").glob("*.timer"))
NIGHTLY = {timer.stem for timer in TIMERS}
SETTINGS: dict[str, type[ServiceSettings]] = {
    "learner": LearnerSettings,
    "evaluator": LearnerSettings,
    "syncer": SyncerSettings,
    "coordinator": CoordinatorSettings,
    "server-watch": ServerWatchSettings,
}
ROLES = SETTINGS.keys() - {"server-watch"}
SERVERS = {"nats", "control", "control-of-three"}
WATCHES = {"server-watch": "nats", "server-watch-control": "control", "server-watch-control-of-three": "control-of-three"}
SERVER_LOG = "/data/server.log"  # as deploy/images/serve names it
SECRETS = re.compile(r"BEGIN|password|\bSU[A-Z0-9]{56}")


def variables(service: str) -> set[str]:
    return {f"DILOCO_{name.upper()}" for name in SETTINGS[service].model_fields}


# ---- compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DATACENTER / "compose.yml").read_text())
    return loaded


def test_each_service_is_told_what_it_knows_and_sees_the_keys_of_its_role_alone(compose: dict[str, Any]) -> None:
    assert compose["services"].keys() == ROLES | SERVERS | WATCHES.keys() | {"prometheus"}
    for name in ROLES | SERVERS:
        service = compose["services"][name]
        keys = [volume for volume in service["volumes"] if isinstance(volume, dict) and volume["target"] == "/keys"]
        folder = "control" if name.startswith("control") else name
        assert [(volume["source"], volume["read_only"]) for volume in keys] == [(f"./keys/{folder}", True)]
        assert service["profiles"] == [name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        if name not in SERVERS:
            assert service["environment"].keys() <= variables(name), name
            assert service["environment"]["DILOCO_IDENTITY"] == "/keys/{name}.identity"
            for port in service.get("ports", ()):  # nothing but servers is reached from outside
                assert (name, port) == ("coordinator", "127.0.0.1:${PAGE_PORT:-8420}:8420")


def test_each_server_is_watched_in_its_own_network_by_a_process_that_cannot_change_it(compose: dict[str, Any]) -> None:
    for name, server in WATCHES.items():
        watch, watched = compose["services"][name], compose["services"][server]
        assert watch["profiles"] == watched["profiles"]
        assert watch["network_mode"] == f"service:{server}"
        assert "ports" not in watch
        data = next(volume.partition(":")[0] for volume in watched["volumes"] if str(volume).endswith(":/data"))
        [keys] = [volume["source"] for volume in watched["volumes"] if isinstance(volume, dict) and volume["target"] == "/keys"]
        store, lists = watch["volumes"]
        assert store == f"{data}:/data:ro"
        assert (lists["source"], lists["target"], lists["read_only"]) == (f"{keys}/auth.conf", "/auth.conf", True)
        assert watch["environment"]["DILOCO_LISTS_FILE"] == lists["target"]
        assert watch["environment"]["DILOCO_LOG_FILE"] == SERVER_LOG
        assert (watch["read_only"], watch["cap_drop"]) == (True, ["ALL"])
        assert watch["environment"].keys() <= variables("server-watch")
        pid_file = watched["command"][watched["command"].index("-P") + 1]
        assert watch["environment"]["DILOCO_PID_FILE"] == pid_file
        assert pid_file.startswith(watch["environment"]["DILOCO_STORE_DIR"])
        # as the server's certificate and its alias call it
        assert watch["environment"]["DILOCO_NAME"] == watched["networks"]["default"]["aliases"][0]
    assert 'http: "127.0.0.1:8222"' in (DATACENTER / "nats.conf").read_text()


def test_a_stop_ends_learners_then_syncers_then_servers_and_no_machine_needs_all_of_them(compose: dict[str, Any]) -> None:
    after = {name: service.get("depends_on", {}) for name, service in compose["services"].items()}
    assert after["learner"].keys() == SERVERS | {"syncer"}
    assert after["syncer"].keys() == after["coordinator"].keys() == after["evaluator"].keys() == SERVERS
    assert not any(after[name] for name in SERVERS)
    conditions = [condition for name, each in after.items() if name not in WATCHES for condition in each.values()]
    assert all(condition == {"condition": "service_started", "required": False} for condition in conditions)
    assert all(compose["services"][name]["init"] is True for name in SETTINGS)


def test_the_example_of_env_names_only_what_the_compose_file_takes(compose: dict[str, Any]) -> None:
    said = re.findall(r"^#?([A-Z_]+)=", (DATACENTER / ".env.example").read_text(), re.MULTILINE)
    text = (DATACENTER / "compose.yml").read_text()
    for name in set(said) - {"COMPOSE_PROFILES"}:
        assert re.search(rf"\$\{{{name}\b|^ +{name}:$", text, re.MULTILINE), name
    profiles = re.search(r"^COMPOSE_PROFILES=(.*)", (DATACENTER / ".env.example").read_text(), re.MULTILINE)
    assert profiles is not None
    assert set(profiles[1].split(",")) <= compose["services"].keys()


def test_the_example_of_a_run_is_one() -> None:
    for path in (DATACENTER / "run.example.toml", DEPLOY / "kubernetes" / "coordinator" / "run.toml"):
        assert parse(RunSettings, read_toml(path)["settings"], str(path)).regions.names == ["us", "eu", "ap"]


def test_no_secret_is_in_any_file() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not SECRETS.search(path.read_text()), path


@pytest.mark.tool
@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["nats-eu", "syncer-eu-*"], ["nats/auth.conf", "nats/server.key", "syncer/syncer-eu-0.identity"]),
        (["control-us", "learner-eu-1"], ["control/server.key", "learner/learner-eu-1.identity"]),
        (["metrics-us", "coordinator"], ["coordinator/coordinator.identity", "page/server.key"]),
        (["--lists", "nats-eu"], ["nats/auth.conf"]),
    ],
)
def test_a_bundle_has_what_was_asked_for_by_role_and_for_nobody_else_to_read(
    operator: Path, tmp_path: Path, names: list[str], files: list[str]
) -> None:
    bundle = tmp_path / "eu.tar"
    with bundle.open("wb") as out:
        options = [name for name in names if name.startswith("--")]
        subprocess.run([DATACENTER / "bundle", *options, operator, *names[len(options) :]], stdout=out, check=True)
    with tarfile.open(bundle) as tar:
        members = tar.getmembers()
    assert sorted(member.name for member in members if member.isfile()) == [f"keys/{name}" for name in files]
    assert {(member.uid, member.gid) for member in members} == {(10001, 10001)}
    assert {member.mode & 0o077 for member in members} == {0}


@pytest.mark.tool
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["OPERATOR"], "bundle: expected the folder of 'diloco keys' and names of servers or identities"),
        (["nowhere", "nats-eu"], "bundle: HOME/diloco-keys: no keys.toml; is it the folder of 'diloco keys'?"),
        (["--lists", "OPERATOR", "syncer-eu-0"], "bundle: syncer-eu-0: is no server, which have lists"),
        (["OPERATOR", "nats-eu", "nats-xx"], "bundle: OPERATOR: neither a server, a page nor an identity is called nats-xx"),
    ],
)
def test_what_cannot_be_bundled_is_said_in_one_line(operator: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    given = [str(operator) if argument == "OPERATOR" else argument for argument in arguments]
    home = tmp_path / "home"
    ended = subprocess.run(
        [DATACENTER / "bundle", *given],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == said.replace("OPERATOR", str(operator)).replace("HOME", str(home)) + "\n"


@pytest.mark.tool
def test_keys_are_outside_of_the_checkout_unless_an_older_folder_is_there(operator: Path, tmp_path: Path) -> None:
    """Both scripts take the same folder; ``docker`` is stood in for by a script that shows its arguments."""
    here, home, programs = tmp_path / "checkout", tmp_path / "home", tmp_path / "bin"
    for folder in (here, home, programs):
        folder.mkdir()
    (programs / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / "docker").chmod(0o755)
    shutil.copytree(operator, home / "diloco-keys")
    (home / "diloco-keys" / "servers" / "nats-eu").rename(home / "diloco-keys" / "servers" / "nats-new")

    def called(script: str, *arguments: str, **environment: str) -> str:
        known = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home)} | environment
        return subprocess.run(
            [DATACENTER / script, *arguments], cwd=here, env=known, stdin=subprocess.DEVNULL, capture_output=True, check=True
        ).stdout.decode(errors="replace")

    default = str(home / "diloco-keys")
    assert f"-v\n{default}:{default}\n-e\nDILOCO_KEYS={default}\n" in called("diloco", "keys", "list")
    assert "keys/nats/" in called("bundle", "nats-new")
    stated = tmp_path / "stated"
    assert f"-e\nDILOCO_KEYS={stated}\n" in called("diloco", "keys", "list", DILOCO_KEYS=str(stated))
    assert stated.stat().st_mode & 0o777 == 0o700
    shutil.copytree(operator, here / "operator")
    assert "DILOCO_KEYS" not in called("diloco", "keys", "list")
    assert "keys/nats/" in called("bundle", "nats-eu")
    assert "keys/nats/" in called("bundle", "nats-new", DILOCO_KEYS=default)


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    """A folder as ``diloco keys`` leaves it."""
    made = tmp_path / "operator"
    for name, text in {
        "keys.toml": "",
        "ca.key": "secret",
        "servers/nats-eu/server.key": "secret",
        "servers/nats-eu/auth.conf": "",
        "servers/control-us/server.key": "secret",
        "pages/metrics-us/server.key": "secret",
        "identities/syncer-eu-0.identity": 'format = 1\nrole = "syncer"\n',
        "identities/learner-eu-1.identity": 'format = 1\nrole = "learner"\n',
        "identities/coordinator.identity": 'format = 1\nrole = "coordinator"\n',
    }.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    return made


# ---- Kubernetes


def pods(resources: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for item in resources:
        if item["kind"] in ("StatefulSet", "Deployment", "Job"):
            yield item["metadata"]["name"], item["spec"]["template"]["spec"]


def nightly_pods(resources: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    jobs = {item["metadata"]["name"]: item["spec"]["jobTemplate"] for item in resources if item["kind"] == "CronJob"}
    return {name: job["spec"]["template"]["spec"] for name, job in jobs.items()}


def check_closed(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        closed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == closed
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["image"].startswith("registry.example.org/diloco-")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_are_what_kubernetes_takes(overlay: str) -> None:
    resources = kustomize.build(DEPLOY / "kubernetes" / "overlays" / overlay)
    oldest = "1.29" if overlay == "island" else "1.28"
    for version in (oldest, "1.32", kubernetes_validate.latest_version()):
        for item in resources:
            kubernetes_validate.validate(item, version, strict=True)
    kinds = {item["kind"] for item in resources}
    assert {"Service", "NetworkPolicy", "ConfigMap"} <= kinds
    assert ({"StatefulSet", "PodDisruptionBudget"} <= kinds) == (overlay != "island")
    assert ("Deployment" in kinds) == (overlay == "us")


@pytest.mark.tool
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_the_same(overlay: str) -> None:
    folder = DEPLOY / "kubernetes" / "overlays" / overlay
    said = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout

    def key(item: dict[str, Any]) -> tuple[str, str]:
        return item["kind"], item["metadata"]["name"]

    assert sorted(yaml.safe_load_all(said), key=key) == sorted(kustomize.build(folder), key=key)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_as_closed_as_they_can_be_and_told_what_they_know(overlay: str) -> None:
    resources = kustomize.build(DEPLOY / "kubernetes" / "overlays" / overlay)
    maps = {item["metadata"]["name"]: item["data"] for item in resources if item["kind"] == "ConfigMap"}
    for name, pod in pods(resources):
        check_closed(pod)
        container, *beside = pod["containers"]
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        if name in SERVERS:
            assert secrets == {f"{name}-keys"}
            [watch] = beside
            told = {variable["name"] for variable in watch["env"]} | maps["datacenter"].keys()
            assert told <= variables("server-watch")
            assert {"name": "data", "mountPath": "/data", "readOnly": True} in watch["volumeMounts"]
            variables_set = {variable["name"]: variable.get("value") for variable in watch["env"]}
            assert variables_set["DILOCO_LOG_FILE"] == SERVER_LOG
            # of the server's files it sees the list alone, which is replaced when the secret is
            folder, _, file = variables_set["DILOCO_LISTS_FILE"].rpartition("/")
            assert {"name": "lists", "mountPath": folder, "readOnly": True} in watch["volumeMounts"]
            [lists] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "lists"]
            assert lists["items"] == [{"key": "auth.conf", "path": file}]
            assert {mount["name"] for mount in watch["volumeMounts"]} == {"data", "lists", "tmp"}
            assert "readinessProbe" not in watch  # the server serves without it
            continue
        assert not beside
        assert secrets == {f"{name}-identities"}
        told = {variable["name"] for variable in container["env"]} | maps["datacenter"].keys()
        assert told - {"INDEX", "LEADER", "PROCESSES"} <= variables(name.removesuffix("-0"))
        paths = {container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
        assert paths == {"/readyz", "/healthz"} <= set(PATHS)


@pytest.mark.parametrize(("overlay", "jobs"), [("us", {"checkpoint", "states"}), ("eu", {"states"}), ("island", set())])
def test_each_night_the_operator_takes_a_checkpoint_and_each_region_copies_its_states(overlay: str, jobs: set[str]) -> None:
    resources = kustomize.build(DEPLOY / "kubernetes" / "overlays" / overlay)
    claims = {item["metadata"]["name"] for item in resources if item["kind"] == "PersistentVolumeClaim"} | {"state-learner-0"}
    found = nightly_pods(resources)
    assert found.keys() == jobs
    for pod in found.values():
        check_closed(pod)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} <= volumes.keys()
        assert volumes["state"]["persistentVolumeClaim"]["claimName"] in claims


@pytest.mark.tool
def test_the_states_of_a_pod_s_learner_are_copied_once_each(tmp_path: Path) -> None:
    """The script of the CronJob, with folders for its volumes."""
    [container] = nightly_pods(kustomize.build(DEPLOY / "kubernetes" / "overlays" / "eu"))["states"]["containers"]
    *shell, script = container["command"]
    for volume in ("state", "backup"):
        script = script.replace(f"/{volume}/", f"{tmp_path}/{volume}/")
    command = [*shell, script]
    subprocess.run(command, check=True)  # a learner that has saved nothing yet
    assert not (tmp_path / "backup").exists()
    for name in ("3/learner-eu-0.safetensors", "12/learner-eu-0.safetensors", "learner-eu-0.a.safetensors"):
        path = tmp_path / "state" / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    subprocess.run(command, check=True)
    copied = tmp_path / "backup" / "checkpoints"
    assert {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()} == {
        "3/learner-eu-0.safetensors",
        "12/learner-eu-0.safetensors",
    }
    (copied / "3" / "learner-eu-0.safetensors").write_text("as it was copied")
    subprocess.run(command, check=True)
    assert (copied / "3" / "learner-eu-0.safetensors").read_text() == "as it was copied"


def test_the_servers_configuration_is_the_same_everywhere() -> None:
    configuration = (DATACENTER / "nats.conf").read_text()
    assert (DEPLOY / "kubernetes" / "base" / "nats.conf").read_text() == configuration
    for text in (configuration, (DEPLOY.parent / "compose" / "nats.conf").read_text()):
        assert f"sync_interval: always, request_queue_limit: {REQUEST_QUEUE_LIMIT} }}" in text
        assert re.search(r"^logfile_size_limit: 10MB .*\nlogfile_max_num: 5$", text, re.MULTILINE)
    assert (DEPLOY / "kubernetes" / "coordinator" / "run.toml").read_text() == (DATACENTER / "run.example.toml").read_text()


# ---- systemd

HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallFilter": "@system-service",
}


def lines(unit: Path) -> list[tuple[str, str]]:
    found = re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE)
    return [(key, value) for key, value in found]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened_and_told_what_its_service_knows(unit: Path) -> None:
    said = lines(unit)
    values = dict(said)
    assert HARDENED.items() <= values.items()
    assert values["User"].startswith("diloco")
    assert values["UMask"] == ("0027" if "nats" in unit.name else "0077")
    if "nats" in unit.name:
        assert values["StateDirectoryMode"] == "0700"  # the group, which reads the log, sees no streams
        told = dict(item.split("=", 1) for item in values["Environment"].split())
        assert told == {"NATS_CONFIG": "nats.conf"} | GO_ENVIRONMENT
        return
    if unit.stem in NIGHTLY:
        return
    if "server-watch" in unit.name:
        assert values["ExecStart"] == "/opt/diloco/bin/diloco-server-watch"
        told = dict(item.split("=", 1) for key, value in said if key == "Environment" for item in value.split())
        example = (DEPLOY / "systemd" / "watch.env.example").read_text()
        server = dict(lines(DEPLOY / "systemd" / "diloco-nats@.service"))
        assert f" -l {told['DILOCO_LOG_FILE']} " in server["ExecStart"]
        assert told["DILOCO_LOG_FILE"].startswith(f"/var/log/{server['LogsDirectory']}/")
        assert (values["SupplementaryGroups"], server["LogsDirectoryMode"]) == (server["Group"], "0750")
        assert told["DILOCO_LISTS_FILE"] == "/run/credentials/%n/auth.conf"  # systemd 247 has no %d
        assert values["LoadCredential"] == f"auth.conf:{server['WorkingDirectory']}/keys/auth.conf"
        assert told.keys() | set(re.findall(r"^#?(DILOCO_\w+)=", example, re.MULTILINE)) <= variables("server-watch")
        assert values["TemporaryFileSystem"] == "/etc/diloco/keys:ro"
        return
    service = unit.name.removeprefix("diloco-").removesuffix(".service").removesuffix("@")
    assert values["ExecStart"].split()[0] == f"/opt/diloco/bin/diloco-{service}"
    assert f'diloco-{service} = "' in (ROOT / "services" / service / "pyproject.toml").read_text()
    told = dict(item.split("=", 1) for key, value in said if key == "Environment" for item in value.split())
    assert {name for name in told if name.startswith("DILOCO_")} <= variables(service)
    assert {name: value for name, value in told.items() if name.startswith("MALLOC_")} == malloc_environment()
    assert values["TemporaryFileSystem"] == "/etc/diloco/keys:ro"
    assert values["BindReadOnlyPaths"] == told["DILOCO_IDENTITY"]


def test_each_night_a_checkpoint_is_taken_then_states_are_copied_then_collected() -> None:
    times = {timer.stem: dict(lines(timer))["OnCalendar"] for timer in TIMERS}
    assert sorted(times, key=times.__getitem__) == ["diloco-checkpoint", "diloco-states", "diloco-collect"]
    units = {name: dict(lines(DEPLOY / "systemd" / f"{name}.service")) for name in times}
    assert {unit["Type"] for unit in units.values()} == {"oneshot"}
    # what one writes, the next one reads
    assert units["diloco-checkpoint"]["ExecStart"].startswith("/opt/diloco/bin/diloco checkpoint /var/lib/diloco-operator/")
    assert units["diloco-checkpoint"]["StateDirectory"] == units["diloco-collect"]["StateDirectory"] == "diloco-operator"
    assert units["diloco-states"]["StateDirectory"] == "diloco-backup"
    assert units["diloco-states"]["ExecStart"].endswith(" /var/lib/diloco/checkpoints/ /var/lib/diloco-backup/checkpoints/")
    assert ":/var/lib/diloco-backup/checkpoints" in (DEPLOY / "systemd" / "diloco-collect.service").read_text()


@pytest.mark.tool
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    folder = tmp_path / "etc" / "systemd" / "system"
    folder.mkdir(parents=True)
    for name in (
        "sysinit.target",
        "basic.target",
        "shutdown.target",
        "network-online.target",
        "multi-user.target",
        "timers.target",
        "system.slice",
    ):
        (folder / name).write_text("[Unit]\nDescription=stands for the system's\nDefaultDependencies=no\n")
    (folder / "system.slice").write_text("[Unit]\nDescription=stands for the system's\n")
    commands = {value.split()[0] for unit in UNITS for key, value in lines(unit) if key.startswith("Exec")}
    for command in commands:
        path = tmp_path / command.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    for unit in UNITS + TIMERS:
        shutil.copy(unit, folder)
    names = [unit.name.replace("@.", "@learner-us-0.") for unit in UNITS + TIMERS]
    verify = ["systemd-analyze", "verify", "--man=no", f"--root={tmp_path}", *names]
    ended = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# ---- logs


def test_loki_labels_are_fields_of_every_event_and_few() -> None:
    text = (DEPLOY / "loki" / "config.alloy").read_text()
    labels = re.search(r"stage\.labels \{\s+values = \{(.*)\}", text)
    expressions = re.search(r"expressions = \{(.*)\}", text)
    assert labels is not None
    assert expressions is not None
    assert re.findall(r"(\w+) =", labels[1]) == ["run", "service", "level"]
    event = {"event": "joined", "level": "info"}
    stamped = _Stamp("learner-0", "learner", "demo", "us")(None, "info", event)
    assert {name for name, _ in re.findall(r"(\w+) = \"(\w+)\"", expressions[1])} <= stamped.keys()
