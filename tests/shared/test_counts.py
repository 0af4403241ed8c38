"""Counts as people write them."""

from __future__ import annotations

import pytest

from diloco.errors import SettingsError
from diloco.settings.counts import parse_count
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import changed_settings, run_settings
from diloco_report.units import count


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("600000", 600_000),
        ("600k", 600_000),
        ("600K", 600_000),
        ("7.5M", 7_500_000),
        ("7.50M", 7_500_000),  # as output has it
        ("7.5 M", 7_500_000),
        ("1e6", 1_000_000),
        ("1.5e+3", 1500),
        ("1_000_000", 1_000_000),
        ("12B", 12_000_000_000),
        ("12G", 12_000_000_000),
        ("2T", 2_000_000_000_000),
        ("0.1M", 100_000),
        ("0", 0),
        ("1e18", 10**18),
    ],
)
def test_text_of_a_count_is_a_whole_number(text: str, value: int) -> None:
    assert parse_count(text) == value


def test_what_output_prints_is_taken() -> None:
    for value in (999, 1000, 123_000, 7_500_000, 12_300_000_000, 2_000_000_000_000):
        assert parse_count(count(value)) == value


@pytest.mark.parametrize("text", ["", "many", "k", "1.5", "0.0001k", "-5", "600 kk", "1,000", "0x10", "nan", "inf", "1e", "٣"])
def test_other_text_is_refused_with_examples_or_the_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a count, such as 600000, 600k, 7.5M or 1e6|expected a whole number"):
        parse_count(text)


@pytest.mark.parametrize("text", ["1e19", "1e99", "9" * 31, "2000000T"])
def test_a_huge_count_is_refused_before_it_is_a_huge_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"at most 1e\+18"):
        parse_count(text)
    with pytest.raises(ValueError, match="expected a count"):
        parse_count("1e999999999")


def test_whole_floats_are_counts_and_other_values_stay() -> None:
    values = [2e9, 2.5, float("nan"), float("inf"), True, None, 7]
    assert [parse_count(value) for value in values[:2]] == [2_000_000_000, 2.5]
    assert [parse_count(value) is value for value in values[2:]] == [True] * 5


def test_settings_take_counts() -> None:
    settings = run_settings(overrides=parse_assignments(["tokens=600k", "log.archive_bytes=2G"]))
    assert (settings.tokens, settings.log.archive_bytes) == (600_000, 2_000_000_000)
    assert changed_settings(settings, {"tokens": 2e9}, "diloco set").tokens == 2_000_000_000
    with pytest.raises(SettingsError, match=r"^diloco up: tokens = 'x': expected a count, such as 600000, 600k, 7.5M or 1e6$"):
        run_settings(overrides={"tokens": "x"}, source="diloco up")
