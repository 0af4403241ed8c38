"""The end of a run in a terminal: samples in the course of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.made.reports import fake_report

from diloco_ops.up.run_summary import samples, summarise
from diloco_report.samples import trimmed


def test_samples_near_a_tenth_and_a_half_are_shown_before_the_last() -> None:
    drawn = [[1.0, 120, 1, "early"], [2.0, 300, 2, "later"], [3.0, 480, 3, "half"], [4.0, 900, 4, "late"]]
    report = {"sample": "last", "tokens_merged": 1000, "series": {"samples": drawn}}
    assert samples(report) == [(0.12, "early"), (0.48, "half"), (1.0, "last")]
    assert samples(report | {"series": {"samples": drawn[3:]}}) == [(None, "last")]
    assert samples(report | {"series": {}}) == [(None, "last")]
    assert samples(report | {"sample": None, "series": {}}) == []
    # one sample near both is shown once
    assert samples(report | {"series": {"samples": [[1.0, 400, 1, "only"]]}}) == [(0.4, "only"), (1.0, "last")]


def test_blank_lines_around_a_sample_are_left_out() -> None:
    assert trimmed("\n\n  \n    def read(self):\n        return 1  \n\n") == "    def read(self):\n        return 1"
    assert trimmed(" \n \n") == ""


def test_the_summary_has_five_lines_of_each_sample(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n" + "\n".join(f"line {number}" for number in range(9)) + "\n\n"
    report = fake_report()
    merged = report["tokens_merged"]
    report["sample"] = text
    report["series"]["samples"] = [[1.0, merged // 2, 1, text]]
    report |= {
        "values": {},
        "values_initial": {},
        "units": None,
        "item": None,
        "settings": {"round": {"overlap_steps": 5}},
        "data": {"epochs": {}},
    }
    summarise(report, Path("runs/mine"))
    said = capsys.readouterr().out
    begins = said.index("a sample after 50 % of the tokens:\nline 0\n")
    assert said.index("a sample after 100 % of the tokens:\nline 0\n") > begins
    assert said.count("line 4\n") == 2
    assert "line 5" not in said
