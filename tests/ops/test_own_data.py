"""Work on data of a learner's own, as people are told of it: its data are not accounted for."""

from __future__ import annotations

from diloco.core.run.ledger import Ledger
from diloco_ops.audit.verify import _data
from diloco_ops.report import build
from diloco_report.page import _data as section

SIZES = [3, 1]  # parameters of two fragments


def ledger() -> Ledger:
    """12 tokens of lab were merged into one fragment, 4 into the other."""
    return Ledger(2, own=[{"lab": 12}, {"lab": 4}])


def test_verify_says_whose_and_how_many_tokens_and_nothing_fails() -> None:
    check = _data([], {}, ledger(), SIZES)
    assert check.state == "holds"
    assert check.found.endswith("not accounted for, because trained on the learners' own data: 10 tokens of lab")
    assert "own" not in _data([], {}, Ledger(2), SIZES).found


def test_the_report_says_so() -> None:
    data = build._data(ledger(), SIZES, {})
    assert data["own"] == {"lab": 10}
    assert "lab trained on data of its own: 10 merged tokens are not accounted for." in section({"data": data})
    assert section({"data": build._data(Ledger(2), SIZES, {})}) == ""
