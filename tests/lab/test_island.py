"""The plan of one island: its mesh, and bytes and seconds worked out by hand; and the table of ``docs/islands.md``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.errors import SettingsError
from diloco_lab.commands.island_command import island as command
from diloco_lab.planning.island_plan import Hardware, island

DOCS = Path(__file__).parents[2] / "docs" / "islands.md"
TWO_HOSTS = Hardware(16, 80e9, 2, disk_bytes_per_s=1e9, join_bytes_per_s=1e8)


def test_bytes_and_seconds_of_two_hosts() -> None:
    found = island(8 * 10**9, TWO_HOSTS)
    # 128 GB of state: four devices have 192 GB of room, two have 96
    assert (found.data, found.fsdp, found.state_bytes) == (4, 4, 32e9)
    # 24 fragments would be of 1.33 GB
    assert (found.fragments, found.fragment_bytes) == (96, 32e9 / 96)
    assert (found.host_bytes, found.host_most_bytes) == (48e9, 64e9)
    # four bits a value, and two bytes a block of 64
    assert found.sent_bytes == 8e9 * (0.5 + 2 / 64) / 2
    # each host has a replica: the other one gets all rows of the versions that a host carries, and no offer lacks any
    assert found.rows_bytes == 16e9
    assert (found.checkpoint_bytes, found.checkpoint_s) == (76e9, 76.0)
    assert (found.join_bytes, found.join_s) == (64e9, 640.0)


def test_muon_needs_less_of_a_device_and_of_a_disk() -> None:
    found = island(8 * 10**9, TWO_HOSTS, "muon")
    assert (found.data, found.fsdp, found.state_bytes) == (8, 2, 48e9)
    assert (found.checkpoint_bytes, found.join_bytes) == (60e9, 48e9)


def test_rows_between_hosts_that_share_a_replica() -> None:
    # a replica is on two hosts of two devices each; there are four hosts
    found = island(10**9, Hardware(8, 8e9, 4))
    assert (found.data, found.fsdp) == (2, 4)
    # of 250M parameters that it carries, half to each of three hosts; and half of its rows of 750M for others' offers
    assert found.rows_bytes == 4 * (250e6 * 0.5 * 3 + 250e6 * 0.5)


def test_no_rows_leave_a_single_host() -> None:
    assert island(10**9, Hardware(8, 80e9)).rows_bytes == 0


@pytest.mark.parametrize(("memory", "fits"), [(28e9, True), (27e9, False)])
def test_room_for_a_checkpoints_copy(memory: float, fits: bool) -> None:
    # 16 GB of state, 12 of them copied, and a fragment of 0.17 GB
    found = island(10**9, Hardware(1, memory + 0.2e9))
    assert found.copy_fits == fits


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (Hardware(8, 80e9, 3), "--hosts 3: 8 devices are not divisible by them"),
        (Hardware(8, 80e9), r"do not fit into 60% of 8 devices of 80 GB: use 24 devices or more"),
    ],
)
def test_what_does_not_fit_is_said_with_a_remedy(hardware: Hardware, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        island(70 * 10**9, hardware)


def test_the_command_plans_the_island_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    command(parameters=8e9, devices=16, hosts=2, disk=1e9, link=1e8, json_=True)
    [found] = json.loads(capsys.readouterr().out)
    assert (found["fsdp"], found["checkpoint_s"], found["hardware"]["hosts"]) == (4, 76.0, 2)


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"hosts": 0}, {"memory": 0.0}, {"parameters": -1.0}, {"disk": float("nan")}])
def test_numbers_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    call: Callable[..., None] = command
    with pytest.raises(SettingsError, match=f"--{next(iter(wrong))}"):
        call(**wrong)


def test_the_table_of_the_docs_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    command()
    text = DOCS.read_text()
    _, _, rest = text.partition("<!-- diloco simulate island -->\n")
    written, end, _ = rest.partition("<!-- end -->")
    assert end
    assert written == capsys.readouterr().out
