"""The Job of ``deploy/kubernetes/island``: its settings are a learner's, and its script's exit codes are those it goes by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.made import kustomize
from tests.made.island_pods import LEFT, OVERLAY, POD_SCRIPT, pod_environment
from tests.pace import DEADLINE_S

from diloco.errors import (
    AdmissionError,
    BrokerError,
    DataError,
    DilocoError,
    EjectedError,
    IslandError,
    MachineError,
    MessageError,
    RefusedError,
    RunError,
    SettingsError,
    WanError,
)
from diloco.settings.loading import load_service
from diloco.settings.service import LearnerSettings


@pytest.fixture(scope="module")
def resources() -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in kustomize.build(OVERLAY)}


def test_a_pod_is_the_process_of_its_index_and_meets_the_others_at_the_first_pod(
    resources: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in pod_environment(3).items():
        monkeypatch.setenv(name, value)
    settings = load_service(LearnerSettings, None)
    job, service = resources["Job"], resources["Service"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert settings.processes.count == job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert settings.processes.index == 3
    name, pod = job["metadata"]["name"], job["spec"]["template"]
    assert settings.processes.address == f"{name}-0.{pod['spec']['subdomain']}:7600"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"] is True, "or the leader is not found before it is ready"
    assert pod["spec"]["terminationGracePeriodSeconds"] >= settings.leave_s + 30


def test_processes_reach_each_other_at_any_port_and_are_reached_by_nobody_else(resources: dict[str, dict[str, Any]]) -> None:
    policy, labels = resources["NetworkPolicy"]["spec"], resources["Job"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    each_other = [{"podSelector": policy["podSelector"]}]
    assert {"from": each_other} in policy["ingress"]
    assert {"to": each_other} in policy["egress"]
    others = [rule for rule in policy["ingress"] if rule != {"from": each_other}]
    assert [rule["ports"] for rule in others] == [[{"port": 9464}]], "metrics"


def test_the_job_replaces_pods_that_can_go_on_and_gives_up_what_would_end_again(resources: dict[str, dict[str, Any]]) -> None:
    spec = resources["Job"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which a policy of failures requires"
    by_action: dict[str, set[int]] = {"Ignore": set(), "FailJob": set()}
    for rule in spec["podFailurePolicy"]["rules"]:
        by_action[rule["action"]] |= set(rule.get("onExitCodes", {}).get("values", ()))
    assert by_action["Ignore"] == {IslandError.exit_code, LEFT}
    given_up = (SettingsError, DataError, RunError, AdmissionError, EjectedError, MachineError, RefusedError)
    assert by_action["FailJob"] == {error.exit_code for error in given_up}
    counted = {error.exit_code for error in (DilocoError, BrokerError, MessageError, WanError)}
    assert not counted & (by_action["Ignore"] | by_action["FailJob"])


@pytest.mark.tool
def test_shellcheck_finds_nothing() -> None:
    found = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", POD_SCRIPT], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "")


class Pod:
    """The script of a pod with a program in the learner's place."""

    def __init__(self, state: Path, index: int, life: str) -> None:
        self.own = state / f"pod-{index}"
        self.own.mkdir()
        learner = self.own / "diloco-learner"
        learner.write_text(f"#!/bin/sh\n{life}\n")
        learner.chmod(0o755)
        told = {"LEADER": "localhost:7600", "DILOCO_NAME": "learner-0", "DILOCO_STATE_DIR": str(state), "OWN": str(self.own)}
        path = {"PATH": f"{self.own}:{os.environ['PATH']}", "BEGUN": str(self.own / "begun")}
        self.process = subprocess.Popen(["sh", POD_SCRIPT], env=os.environ | told | path)

    def begun(self) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not (self.own / "ready").exists():
            assert time.monotonic() < ends_s
            time.sleep(0.01)


UNTIL_ASKED = 'trap "exit 0" TERM; touch "$OWN/ready"; while :; do sleep 0.02; done'
UNTIL_ANOTHER_IS_ASKED = 'touch "$OWN/ready"; until [ -e "$DILOCO_STATE_DIR/learner-0.leaving" ]; do sleep 0.02; done'


@pytest.mark.services
@pytest.mark.parametrize("code", [0, 2, 11])
def test_a_process_that_ends_by_itself_gives_its_code_to_the_job(tmp_path: Path, code: int) -> None:
    (tmp_path / "learner-0.leaving").touch()  # of an earlier generation
    os.utime(tmp_path / "learner-0.leaving", (1, 1))
    assert Pod(tmp_path, 0, f"exit {code}").process.wait(DEADLINE_S) == code


@pytest.mark.services
def test_all_processes_of_a_learner_that_leaves_with_notice_are_to_be_replaced(tmp_path: Path) -> None:
    pods = [Pod(tmp_path, 0, UNTIL_ANOTHER_IS_ASKED), Pod(tmp_path, 1, UNTIL_ASKED)]
    for pod in pods:
        pod.begun()
    pods[1].process.send_signal(signal.SIGTERM)  # the node of one is drained
    assert [pod.process.wait(DEADLINE_S) for pod in pods] == [LEFT, LEFT]


@pytest.mark.services
def test_a_killed_process_counts_as_killed(tmp_path: Path) -> None:
    assert Pod(tmp_path, 0, "kill -9 $$").process.wait(DEADLINE_S) == 128 + signal.SIGKILL
