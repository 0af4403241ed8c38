"""What members have counted of others, as a coordinator puts it together, and what needs attention of it."""

from __future__ import annotations

from tests.made.monitors import monitor

from diloco.control.sender_reports import entries
from diloco.wire.control import SenderReport
from diloco_coordinator.alerts import conditions
from diloco_coordinator.shown.sender_reports import ALERT_S, MAX_ROWS, MemberReports
from diloco_report import now


def test_counts_of_several_members_are_added_and_name_who_counts() -> None:
    reports = MemberReports()
    reports.note(SenderReport("syncer-0", [("eve", "offer", "claim", 3), ("bob", "missed", "too_old", 2)]), 1.0)
    reports.note(SenderReport("syncer-1", [("eve", "offer", "claim", 4)]), 1.0)
    reports.note(SenderReport("syncer-1", [("eve", "offer", "claim", 5)]), 2.0)
    assert reports.dump() == [
        {"sender": "bob", "what": "missed", "reason": "too_old", "count": 2, "by": ["syncer-0"]},
        {"sender": "eve", "what": "offer", "reason": "claim", "count": 8, "by": ["syncer-0", "syncer-1"]},
    ]


def test_a_refused_sender_needs_attention_for_ten_minutes_after_its_last_refusal_and_a_late_one_does_not() -> None:
    made = monitor()
    made.reports.note(SenderReport("syncer-0", [("eve", "offer", "claim", 3), ("bob", "missed", "too_old", 2)]), 10.0)
    alert = "eve: syncers refuse its messages, or wait for it in vain: see its refusals"
    assert list(conditions(made, 11.0)) == [alert]
    made.reports.note(SenderReport("syncer-0", [("eve", "offer", "claim", 3), ("bob", "missed", "too_old", 9)]), 300.0)
    assert list(conditions(made, 10.0 + ALERT_S - 1)) == [alert]
    assert list(conditions(made, 10.0 + ALERT_S)) == []
    made.reports.note(SenderReport("syncer-0", [("eve", "in_vain", "no_answer", 1)]), 700.0)
    assert list(conditions(made, 701.0)) == [alert]


def test_what_is_kept_and_shown_is_bounded() -> None:
    reports = MemberReports()
    for number in range(3000):
        reports.note(SenderReport(f"syncer-{number}", [(f"ghost-{number}", "message", "FormatError", 1 + number)]), 1.0)
    rows = reports.dump()
    assert len(rows) == MAX_ROWS
    assert min(row["count"] for row in rows) == 1024 - MAX_ROWS + 1  # the most frequent of as many members as there may be


def test_a_sender_that_is_known_by_its_subject_is_named() -> None:
    counts = {("diloco.run.heartbeat.eva", "FormatError"): 2, ("\ud800" + "x" * 99, "y" * 99): 1}
    assert entries("message", counts) == [
        ("eva", "message", "FormatError", 2),
        ("?" + "x" * 63, "message", "y" * 32, 1),
    ]


def test_the_page_has_a_section_of_members_and_their_refusals() -> None:
    rows = [{"sender": "<eve>", "what": "in_vain", "reason": "no_answer", "count": 2, "by": ["syncer-0"]}]
    drawn = now.refusals({"now": {"refusals": rows}})
    assert "Members and their refusals" in drawn
    assert "<td>&lt;eve&gt;</td><td>waited for in vain</td><td>no_answer</td><td>2</td><td>syncer-0</td>" in drawn
    assert now.refusals({"now": {}}) == now.refusals({}) == ""
