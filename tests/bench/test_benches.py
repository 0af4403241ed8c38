"""Scripts in ``bench`` run, and report what they should; how fast anything is, no test asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.pace import DEADLINE_S, LONG_TEST_S

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
STAGES = {"encode", "decode", "merge of 4", "merge of 8", "fold in place", "fold"}
TARGETS = {"encode": 0.8, "decode": 1.5, "merge of 4": 1.2, "merge of 8": 1.2, "fold in place": 0.4, "fold": 0.4}
EVEN_FROM_S = 180 + 2 * 24  # two cycles after the cut

LOSES_ITS_CONNECTION = """
import sys
from harness.console import Bench, Script
from diloco.process.observe import get_logger

def measure():
    get_logger().warning("nats_disconnected", connection="bench")
    return {"pace": 1.0}

sys.argv = ["bench", "--json"]
Script("A bench.", Bench(measure, print)).run()
"""


def printed(script: str, *arguments: str, timeout_s: float = 4 * DEADLINE_S) -> str:
    """Run a script to its end, and return what it prints."""
    command = [sys.executable, str(BENCH / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(script: str, *arguments: str) -> Any:
    return json.loads(printed(script, *arguments, "--json"))


def test_events_of_a_bench_go_to_stderr_and_its_result_alone_to_stdout() -> None:
    command = [sys.executable, "-c", LOSES_ITS_CONNECTION]
    environment = os.environ | {"PYTHONPATH": str(BENCH)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == {"pace": 1.0}
    assert "nats_disconnected" in done.stderr


@pytest.mark.slow
def test_a_disturbed_run_is_compared_with_an_undisturbed_one(tmp_path: Path) -> None:
    options = ["drill", "--long", "--for", "20", "--rate", "0.2", "--keep", str(tmp_path), "--json"]
    command = [sys.executable, str(BENCH / "chaos.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LONG_TEST_S, check=False)
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert (result["verdict"]["violations"], result["lasted"]) == ([], True)
    # four are drawn; one may meet a process that is only beginning again, and is left out with a warning
    assert 3 <= sum(result["verdict"]["failures"].values()) <= 4
    disturbed, undisturbed = result["loss"]["disturbed"], result["loss"]["undisturbed"]
    assert undisturbed["tokens_merged"] == pytest.approx(disturbed["tokens_merged"], rel=0.1)
    assert result["loss"]["difference"] == pytest.approx(disturbed["val_loss"] / undisturbed["val_loss"] - 1)
    assert result["passed"] == (done.returncode == 0)


def test_kernels_as_json() -> None:
    result = measured("core", "kernels", "--values", "4096", "--repeat", "2")
    assert result["values"] > 1000
    assert result["repeat"] == 2
    assert result["machine"].keys() == {"cpu", "cores", "vectors", "python", "numpy"}
    assert result["machine"]["cores"] > 0
    rows = {(row["name"], row["bits"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    assert {(name, bits) for name in STAGES for bits in (1, 2, 4, 8, 16, 32)} < rows.keys()
    assert {name: row["target"] for (name, bits), row in rows.items() if bits == 4 and row["target"]} == TARGETS
    for (name, bits), row in rows.items():
        assert 0 < row["best_s"] <= row["median_s"]
        assert row["best"] == row["values"] / row["best_s"] / 1e9
        assert row["ratio"] == (row["best"] / row["target"] if row["target"] else None)
        assert row["values"] == result["values"] * {"merge of 4": 4, "merge of 8": 8}.get(name, 1) or name not in STAGES
        assert bits == 4 or row["target"] is None
    ours, naive = rows["merge of 4", 4], rows["merge of 4, plain NumPy", 4]
    assert result["times_plain_numpy"] == ours["best"] / naive["best"]
    assert result["times_float64_mean"] == ours["best"] / rows["float64 mean of 4", 32]["best"]


@pytest.mark.slow
def test_kernels_as_a_table() -> None:
    heading, columns, *rows, comparison = printed("core", "kernels", "--values", "4096", "--repeat", "2").splitlines()
    assert "2 repeats" in heading
    assert columns.split() == ["1e9", "values/s", "bits", "best", "median", "target", "ratio"]
    assert len(rows) == 5 * len(STAGES) + 3
    encode = next(row for row in rows if row.split()[:2] == ["encode", "4"]).split()
    assert (encode[0], encode[1], float(encode[4])) == ("encode", "4", 0.8)
    assert "times as fast as plain NumPy" in comparison


@pytest.mark.slow  # `make bench` runs it, too
def test_memory_by_stage() -> None:
    result = measured("core", "memory", "--parameters", "200000", "--fragments", "3", "--learners", "1", "--cycles", "1")
    assert (result["parameters"], result["fragments"], result["learners"], result["cycles"]) == (200_000, 3, 1, 1)
    assert result["target_bytes"] == 16
    assert result["syncer_base_bytes"] > 10 << 20  # an interpreter with NumPy
    assert list(result["stages"]) == ["joining", "rounds in turn", "rounds at once"]
    for stage in result["stages"].values():
        assert stage.keys() == {"syncer", "learner"}
    # a learner that has joined holds more than it did before: at least base and momentum
    assert result["stages"]["rounds in turn"]["learner"] >= 8


@pytest.mark.slow
def test_emulated_links_are_about_what_they_should_be() -> None:
    result = measured("links", "relay", "--seconds", "0.2", "--rates", "20")
    [rate] = result["rates"]
    assert rate["rate_mbit_s"] == 20
    assert rate["achieved_mbit_s"] > 0
    conditions = [(row["delay_s"], row["jitter_s"]) for row in result["delays"]]
    assert conditions == [(0, 0), (0.03, 0), (0.07, 0), (0.03, 0.005), (0.07, 0.005)]
    for row in result["delays"]:
        assert row["off_s"]["least"] >= -row["jitter_s"] - 0.0005
    sent = [(row["rate_mbit_s"], row["sent_as"]) for row in result["control"]]
    assert sent == [(5, "control"), (5, "bulk"), (10, "control"), (10, "bulk")]
    assert result["unlimited"]["mb_s"] > 0


SMALLEST = ("transport", "--record-mb", "0.25", "0.6", "--sample-mb", "0.6", "--samples", "2", "--small", "10")


def test_transport_has_a_row_for_everything_measured() -> None:
    result = measured("links", *SMALLEST)
    assert set(result["machine"]) == {"cpu", "cores", "system", "python", "nats-server", "nats-py"}
    assert all(result["machine"].values())
    assert [(row["what"], row["record_mb"], row["records"]) for row in result["records"]] == [
        ("append", 0.25, 2),
        ("read", 0.25, 2),
        ("append", 0.6, 1),
        ("read", 0.6, 1),
    ]
    assert [(row["writers"], row["appends"]) for row in result["small"]] == [(1, 10), (8, 10), (64, 10)]
    rates = [row["mb_s"] for row in result["records"]] + [row["per_s"] for row in result["small"]] + [result["disk_mb_s"]]
    for rate in rates:
        assert 0 < rate["least"] <= rate["median"] <= rate["most"]
    for row in result["small"]:
        assert 0 < row["p50_s"] <= row["p99_s"]


@pytest.mark.slow
def test_the_table_of_transport_names_the_machine_and_the_target() -> None:
    lines = printed("links", *SMALLEST).splitlines()
    assert "nats-server 2." in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["disk", *["append", "read"] * 2, "1/s", *["append"] * 3]
    assert [line.split()[9] for line in lines if line.startswith("read")] == ["200", "200"]


@pytest.mark.slow
def test_tls_has_a_row_for_everything_measured() -> None:
    rows = measured("links", "tls", "--record-mb", "0.6", "--sample-mb", "1.2", "--samples", "2")["rows"]
    assert [(row["what"], row["client"]) for row in rows] == [
        ("append records", "plain"),
        ("append records", "tls"),
        ("append offers", "plain"),
        ("append offers", "member"),
        *(("read", client) for client in ("plain", "tls", "member")),
    ]
    for row in rows:
        assert 0 < row["mb_s"]["least"] <= row["mb_s"]["median"] <= row["mb_s"]["most"]
        assert (row["ratio"]["median"] == 1.0) == (row["client"] == "plain")


@pytest.mark.slow
def test_a_learner_that_joins_reads_no_more_than_there_is() -> None:
    smallest = ["--parameters", "1000000", "--fragments", "2", "--delay", "0.01", "--samples", "1", "--rates", "100", "50"]
    result = measured("log_readers", "joining", *smallest)
    assert result["stored_bytes"] > 9e6
    assert [row["rate_mbit_s"] for row in result["rows"]] == [100, 50]
    for row in result["rows"]:
        assert 0 < row["raw_mb_s"] < 1.1 * row["rate_mbit_s"] / 8
        for part in (row["log"], row["loan"]):
            assert 0 < part["share"] <= part["best_share"] < 1.1
        assert 0.7 < row["read"] < 1  # the residuals are left out


@pytest.mark.slow
def test_a_standby_is_as_quick_as_it_should_be() -> None:
    result = measured("starts", "takeover", "--kills", "1", "--freezes", "1")
    assert [row["how"] for row in result["failures"]] == ["SIGKILL", "SIGSTOP"]
    for row in result["failures"]:
        assert 0 < row["first_record_s"] <= row["last_record_s"]
        assert row["first_record_s"] < row["first_version_s"]
        assert row["first_record_s"] <= result["target_s"]


@pytest.mark.slow
def test_unlinked_servers_need_no_other_and_both_shapes_carry_all() -> None:
    result = measured("topology", "--cut", "8")
    assert list(result["shapes"]) == ["unlinked", "gateways"]
    for shape in result["shapes"].values():
        for rate in ("thin", "fast"):
            assert shape[rate]["seconds"] >= 8 * result["payload_bytes"] / (1e6 * result["rates_mbit_s"][rate]) * 0.98
            assert all(1 < share < 1.1 for share in shape[rate]["of_payload"].values())
    unlinked = result["shapes"]["unlinked"]
    assert set(unlinked["cut"]["can_make_consumers"].values()) == {"yes"}
    assert set(unlinked["cut"]["can_make_streams"].values()) == {"yes"}


def test_the_page_of_regions_and_its_picture_have_the_counts(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    printed("pictures", "even-rounds", "--counts", str(file))
    before = json.loads((BENCH / "even_rounds_before.json").read_text())["versions"]
    now = json.loads(file.read_text())["versions"]
    assert len(before) == len(now) == 420
    late, late_now = before[EVEN_FROM_S:], now[EVEN_FROM_S:]
    page = (ROOT / "docs" / "regions.md").read_text()
    assert f"| most versions in a second | {max(late)} | {max(late_now)} |" in page
    assert f"| seconds without a version, of 192 | {late.count(0)} | {late_now.count(0)} |" in page
    cards = 3  # the picture's, and in each panel the time of the cut
    assert (ROOT / "docs" / "even-rounds.svg").read_text().count("<rect ") == cards + sum(map(bool, [*before, *now]))


@pytest.mark.slow
def test_a_joined_loop_beside_a_bare_one() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make torch")
    options = ["--asleep", "--step-s", "0.02", "--parameters", "20000", "--fragments", "3", "--pairs", "2", "--turn-s", "1"]
    result = measured("frameworks", "stepping", *options)
    assert (result["pairs"], result["asleep"], result["pin"]) == (2, True, False)
    assert len(result["turns"]) == 2
    for turn in result["turns"]:
        assert turn["steps"] > 1
        assert turn["step_s"] > 0.02  # it sleeps so long
        assert turn["bare_step_s"] > 0.02
        assert turn["pace"] == pytest.approx(turn["bare_step_s"] / turn["step_s"])
        assert turn["blocked"] == pytest.approx(turn["call_mean_s"] / turn["step_s"])
        assert 0 < turn["call_median_s"] <= turn["call_p99_s"] < turn["step_s"] * turn["steps"]
    assert result["pace"]["low"] <= result["pace"]["ratio"] <= result["pace"]["high"]


def test_conversations_as_json() -> None:
    pytest.importorskip("grain", reason="the extra `data` is not installed: make extras")
    pytest.importorskip("transformers", reason="PyTorch and transformers are not installed: make torch")
    result = measured("chats", "--count", "200", "--context", "512")
    assert [row["name"] for row in result["rows"]] == ["marked", "found"]
    marked, found = result["rows"]
    assert marked["tokens"] == found["tokens"] > 20_000
    assert all(row["read"] > row["made"] > 0 for row in result["rows"])
    assert result["passed"] == (result["ratio"] >= 2)
