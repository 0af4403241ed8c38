"""A learner's processes as Slurm and Kubernetes tell them."""

from __future__ import annotations

import pytest

from diloco.errors import SettingsError
from diloco.settings.cluster import hosts, resolved
from diloco.settings.service import ProcessesSettings, may_lead

SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "node[03-05,9]", "SLURM_JOB_ID": "4100"}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[03-05,9]", ["node03", "node04", "node05", "node9"]),
        ("node[098-101],other", ["node098", "node099", "node100", "node101", "other"]),
        ("a1,node[03-04],b2", ["a1", "node03", "node04", "b2"]),
        ("node[3-4].site", ["node3.site", "node4.site"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_the_hosts_of_a_slurm_list(listed: str, names: list[str]) -> None:
    assert list(hosts(listed)) == names


def test_a_slurm_step_says_count_index_and_address() -> None:
    found = resolved(ProcessesSettings(cluster="slurm"), SLURM)
    assert (found.count, found.index, found.address) == (4, 2, f"node03:{61440 + 4100 % 4096}")


def test_of_a_slurm_step_in_which_several_may_lead_each_host_has_an_address() -> None:
    elastic = ProcessesSettings(cluster="slurm", least=3)
    assert resolved(elastic, SLURM).addresses == ["node03:61444", "node04:61444", "node05:61444", "node9:61444"]
    assert resolved(elastic, SLURM | {"SLURM_NTASKS": "8"}).addresses == ["node03:61444"], "two processes of each host"
    assert resolved(ProcessesSettings(cluster="slurm", least=2), SLURM).addresses == ["node03:61444"], "two halves may go on"


def test_what_is_set_wins() -> None:
    found = resolved(ProcessesSettings(cluster="slurm", address="10.0.0.1:7600", silent_s=3), SLURM)
    assert (found.count, found.index, found.address, found.silent_s) == (4, 2, "10.0.0.1:7600", 3)


def test_an_indexed_job_says_the_index() -> None:
    settings = ProcessesSettings(cluster="kubernetes", count=2, address="ann-0.ann:7600")
    assert resolved(settings, {"JOB_COMPLETION_INDEX": "1"}).index == 1
    with pytest.raises(SettingsError, match="index = 2: expected 0 to 1"):
        resolved(settings, {"JOB_COMPLETION_INDEX": "2"})


def test_outside_its_cluster_it_says_how_to_start() -> None:
    with pytest.raises(SettingsError, match="SLURM_NTASKS is not set in the environment: start the learner with srun"):
        resolved(ProcessesSettings(cluster="slurm"), {})
    with pytest.raises(SettingsError, match="SLURM_NTASKS = 'x': expected a number"):
        resolved(ProcessesSettings(cluster="slurm"), SLURM | {"SLURM_NTASKS": "x"})
    with pytest.raises(SettingsError, match=r"SLURM_STEP_NODELIST = 'node\[x-y\]': expected a list of hosts"):
        resolved(ProcessesSettings(cluster="slurm"), SLURM | {"SLURM_STEP_NODELIST": "node[x-y]"})


def test_one_process_asks_nobody() -> None:
    assert resolved(ProcessesSettings(), SLURM) == ProcessesSettings()


def test_processes_that_do_not_fit_are_refused() -> None:
    for values, said in (
        ({"count": 2}, "address: several processes need a HOST:PORT"),
        ({"count": 2, "index": 2, "address": "a:1"}, "index = 2: expected 0 to 1"),
        ({"count": 2, "address": "nowhere"}, "processes.address"),
        ({"count": 2, "address": "a:1", "least": 3}, "least = 3: expected 1 to 2, as count = 2"),
        ({"count": 3, "address": "a:1,b:1", "least": 1}, "with 2 addresses .* least must be more than half of count = 3"),
        ({"count": 4, "address": "a:1,b:1", "least": 2}, "more than half of count = 4 and less than count, got 2"),
        ({"count": 3, "address": "a:1,b:1"}, "more than half of count = 3 and less than count, got None"),
        ({"count": 3, "address": "a:1,b:1,c:1,d:1", "least": 2}, "4 addresses for 3 processes"),
        ({"count": 3, "address": "a:1,b:1,a:1", "least": 2}, "a:1 is listed twice"),
        ({"count": 3, "address": "a:1,b", "least": 2}, "processes.address .* = 'b': expected HOST:PORT"),
        ({"count": 3, "address": "a:1,,b:1", "least": 2}, "processes.address .* = '': expected HOST:PORT"),
        ({"count": 64, "address": ",".join(f"a:{i}" for i in range(1, 18)), "least": 60}, "17 addresses, expected at most 16"),
        ({"count": 2, "address": "a:1", "least": 0}, "greater than or equal to 1"),
        ({"count": 2, "address": "a:1", "least": 1, "start_s": 5}, "regroup_s = 10: expected at most start_s = 5"),
    ):
        with pytest.raises(ValueError, match=said):
            ProcessesSettings.model_validate(values)


def test_which_processes_may_lead() -> None:
    several = ProcessesSettings(count=3, index=1, address="a:1, b:2", least=2)
    assert several.addresses == ["a:1", "b:2"]
    assert several.own_address == "b:2"
    assert several.model_copy(update={"index": 2}).own_address is None
    assert ProcessesSettings().addresses == []
    assert [may_lead(3, least) for least in (None, 1, 2, 3)] == [1, 1, 3, 1]
    assert [may_lead(4, least) for least in (2, 3)] == [1, 4]
    assert may_lead(1024, 1000) == 16
