"""Samples that a coordinator keeps: few, spread over the run, and bounded whatever evaluators say."""

from __future__ import annotations

import random

import pytest
from tests.made.monitors import entry_record, monitor, past_of, region_settings

from diloco.control.history import MAX_BYTES, unpack
from diloco.errors import FormatError
from diloco.wire.control import Sample
from diloco.wire.fields import MAX_TEXT
from diloco_coordinator import history, overview
from diloco_coordinator.shown.samples import MAX_SAMPLES, Samples
from diloco_report.page import parts


def test_a_sample_has_the_time_the_tokens_and_the_lowest_version_of_its_model() -> None:
    made = monitor()
    made.entry(entry_record(0, 1, "s", "ann"), 5.0)
    made.hear_sample(Sample("judge", [3, 2], "text"), 61.04)
    assert made.samples.dump() == [[61.0, made.tokens_merged(), 2, "text"]]
    made.hear_sample(Sample("judge", [3, 2], "text"), 70.0)  # nothing was committed since
    assert len(made.samples.kept) == 1
    with pytest.raises(FormatError, match="sample of 3 fragments, the run has 2"):
        made.hear_sample(Sample("judge", [3, 2, 1], "text"), 71.0)


def test_few_are_kept_the_newest_among_them() -> None:
    made = Samples()
    for number in range(100):
        made.note([number], str(number), 0, float(number))
        assert len(made.kept) <= MAX_SAMPLES
    versions = [version for _, _, version, _ in made.kept]
    assert versions[0] == 0
    assert versions[-1] == 99
    assert versions == sorted(versions)
    with pytest.raises(ValueError, match="unpack"):
        Samples([[1.0, 2]])


def test_hostile_text_goes_through_the_history_to_the_page_as_text() -> None:
    made, chance = monitor(), random.Random(3)
    for number in range(MAX_SAMPLES - 1):  # what compresses worst
        text = "".join(chr(chance.randrange(0x10000, 0x110000)) for _ in range(MAX_TEXT))
        made.hear_sample(Sample("judge", [number] * 2, text), 1.0)
    made.hear_sample(Sample("judge", [9, 9], "</pre><script>alert(1)</script>\x1b[2J"), 2.0)
    packed = history.pack(past_of(made, 3.0))
    assert len(packed) < MAX_BYTES / 2
    past = unpack(packed)
    again = monitor()
    again.resume(past.curves)
    assert again.samples.kept == made.samples.kept
    drawn = parts(overview.report(past.picture, region_settings(), None) | {"series": overview.series(past.curves)})["sample"]
    assert "&lt;/pre&gt;&lt;script&gt;" in drawn
    assert "<script" not in drawn
    assert "version 9, 0 tokens merged" in drawn
    assert drawn.count("<pre") == MAX_SAMPLES
