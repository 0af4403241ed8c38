"""How a run's loss compares, in words."""

from __future__ import annotations

from typing import Any

from diloco_report import compared
from diloco_report.page import render_html

ARM = {"loss": 1.25, "spread": 0.0123, "seeds": 3, "tuned": "rate 0.016 is the best of 4 trials"}
REPORT: dict[str, Any] = {
    "val_loss": 1.3,
    "baselines": {"unigram": 3.25, "4-gram": 2.6},
    "comparison": {
        "arms": {"data-parallel-adamw": ARM | {"loss": 1.625}, "data-parallel-muon": ARM},
        "where": {"measured": "2026-11-23", "code": "abc"},
        "missing": None,
        "command": None,
    },
}


def test_each_other_model_has_its_sentence() -> None:
    # 1.3 is half of 2.6, 4/5 of 1.625, and 1.04 times 1.25
    assert compared.sentences(REPORT) == [
        "50.0 % below the best model that only counts bytes, 4-gram (2.600)",
        "20.0 % below data-parallel-adamw (1.6250 ± 0.0123, 3 seeds; rate 0.016 is the best of 4 trials)",
        "4.0 % above data-parallel-muon (1.2500 ± 0.0123, 3 seeds; rate 0.016 is the best of 4 trials)",
        "data-parallel: the same model, tokens, global batch and text, its best rate; measured 2026-11-23, code abc",
    ]
    page = render_html(REPORT)
    assert "4.0 % above</span> data-parallel-muon (1.25)" in page
    assert "20.0 % below data-parallel-adamw" in page


def test_where_nothing_was_measured_the_command_is_said() -> None:
    nothing = {"arms": {}, "where": {}, "missing": "data-parallel training was not measured yet", "command": "diloco lab run x"}
    said = ["data-parallel training was not measured yet; this does it: diloco lab run x"]
    assert compared.sentences({"val_loss": 1.3, "comparison": nothing}) == said
    assert compared.sentences({"val_loss": 1.3, "comparison": nothing | {"command": None}}) == [said[0].partition(";")[0]]
    assert compared.sentences({"val_loss": None, "comparison": nothing}) == []
    assert "this does it: diloco lab run x" in render_html({"val_loss": 1.3, "comparison": nothing})
