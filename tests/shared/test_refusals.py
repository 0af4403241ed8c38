"""Refused offers: what an owner reports of them, and what a learner makes of its owners' reports."""

from __future__ import annotations

import msgspec
import pytest

from diloco.core.learner.refusals import Refusal, RefusalAccount, reason_of, report
from diloco.errors import (
    ClaimError,
    FormatError,
    HashError,
    MessageError,
    NonFiniteError,
    NotAdmittedError,
    RefusedError,
    UnmergeableError,
)
from diloco.wire.refusals import (
    MAX_REFUSALS,
    MAX_REFUSALS_BYTES,
    MAX_TEXT_CHARACTERS,
    RefusalReason,
    Refusals,
    RefusedOffers,
    unpack_refusals,
)

REASONS: tuple[RefusalReason, ...] = ("claim", "form", "not_finite")


def refused(number: int, fragment: int = 0, reason: RefusalReason = "claim", incarnation: int = 7) -> Refusal:
    return Refusal("ann", incarnation, fragment, number, reason, f"offer {number}")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ClaimError("x"), "claim"),
        (FormatError("x"), "form"),
        (HashError("x"), "form"),
        (NonFiniteError("x"), "not_finite"),
        (NotAdmittedError("x"), "identity"),
        (NotAdmittedError("x", lacks_grant=True), "grant"),
        (UnmergeableError("merge_too_far", ("ann",), "x"), "too_far"),
        (UnmergeableError("merge_base_unknown", ("ann",), "x"), "too_far"),
        (UnmergeableError("merge_not_finite", ("ann",), "x"), "not_finite"),
        (UnmergeableError("merge_unreadable", ("ann",), "x"), "form"),
    ],
)
def test_every_refusal_has_a_reason(error: MessageError, reason: str) -> None:
    assert reason_of(error) == reason


def test_owners_add_to_one_report() -> None:
    first = report(None, [refused(1), refused(2), refused(4, fragment=1, reason="form")])
    assert first == Refusals(
        "ann",
        7,
        [RefusedOffers(0, "claim", 2, 2), RefusedOffers(1, "form", 1, 4)],
        [("claim", "offer 2"), ("form", "offer 4")],
    )
    second = report(first, [refused(5, reason="too_far"), refused(6, fragment=2)])
    assert second is not None
    assert [(entry.fragment, entry.reason, entry.offers, entry.number) for entry in second.entries] == [
        (0, "claim", 2, 2), (1, "form", 1, 4), (0, "too_far", 1, 5), (2, "claim", 1, 6),
    ]  # fmt: skip


def test_a_new_owner_reads_the_same_offer_and_reports_it_no_second_time() -> None:
    known = report(None, [refused(3)])
    assert report(known, [refused(3)]) is None
    assert report(known, [refused(2, reason="form")]) is None
    assert report(known, [refused(3, fragment=1)]) is not None


def test_offers_that_cannot_be_read_count_once() -> None:
    """They have no number, and every new owner of the fragment reads them again."""
    known = report(None, [refused(0, reason="form"), refused(0, reason="form")])
    assert known is not None
    assert known.entries == [RefusedOffers(0, "form", 1, 0)]
    assert report(known, [refused(0, reason="form")]) is None
    account = RefusalAccount()
    assert account.take_in(known, {}) == {}
    assert account.offers == {"form": 1}


def test_refusals_between_merges_that_one_look_shows_together_are_no_row() -> None:
    """Offers 1, 3 and 5 were refused, 2 and 4 merged."""
    account = RefusalAccount()
    known = _taken_in(account, None, [refused(1), refused(3), refused(5)], (7, 4))
    assert account.in_a_row("run", "ann") is None
    known = _taken_in(account, known, [refused(6)], (7, 4))
    assert account.in_a_row("run", "ann") is None
    _taken_in(account, known, [refused(7)], (7, 4))
    assert account.in_a_row("run", "ann") is not None


def test_a_younger_process_begins_anew_and_an_older_one_is_over() -> None:
    known = report(None, [refused(3)])
    younger = report(known, [refused(1, incarnation=8)])
    assert younger is not None
    assert (younger.incarnation, younger.entries) == (8, [RefusedOffers(0, "claim", 1, 1)])
    assert report(younger, [refused(9, incarnation=7)]) is None


def test_the_largest_report_fits_its_bound_and_is_read_again() -> None:
    many = [
        Refusal("ann", 7, fragment, 2**62 - 3 + number, reason, "\u20ac" * 1000)
        for number, reason in enumerate(REASONS)
        for fragment in range(MAX_REFUSALS // 2)
    ]
    largest = report(None, many)
    assert largest is not None
    packed = msgspec.msgpack.encode(largest)
    assert len(largest.entries) == MAX_REFUSALS
    assert largest.entries[-1].fragment == MAX_REFUSALS // 2 - 1  # the newest are kept
    assert all(len(text) == MAX_TEXT_CHARACTERS for _, text in largest.texts)
    assert len(packed) <= MAX_REFUSALS_BYTES
    assert unpack_refusals(packed, "ann") == largest


@pytest.mark.parametrize("stored", [None, b"", b"\xc1", b"\x91" * 4000, bytes(MAX_REFUSALS_BYTES + 1)])
def test_what_is_no_report_is_none(stored: bytes | None) -> None:
    assert unpack_refusals(stored, "ann") is None


def test_a_report_of_another_learner_is_none() -> None:
    assert unpack_refusals(msgspec.msgpack.encode(report(None, [refused(1)])), "bob") is None


def _taken_in(account: RefusalAccount, known: Refusals | None, refusals: list[Refusal], merged: tuple[int, int]) -> Refusals:
    changed = report(known, refusals)
    assert changed is not None
    account.take_in(changed, {0: merged})
    return changed


def test_three_refusals_in_a_row_of_one_fragment_end_a_learner() -> None:
    account = RefusalAccount()
    known = _taken_in(account, None, [refused(1), refused(1, fragment=1), refused(1, fragment=2)], (0, 0))
    known = _taken_in(account, known, [refused(2)], (0, 0))
    assert account.offers == {"claim": 4}
    assert account.in_a_row("run", "ann") is None
    _taken_in(account, known, [refused(3)], (0, 0))
    error = account.in_a_row("run", "ann")
    assert isinstance(error, RefusedError)
    assert "run 'run': learner ann: its last 3 offers of fragment 0 were refused (claim: offer 3: report the true" in str(error)


def test_a_merge_in_between_begins_the_row_anew() -> None:
    account = RefusalAccount()
    known = _taken_in(account, None, [refused(1), refused(2)], (0, 0))
    known = _taken_in(account, known, [refused(4)], (7, 3))
    known = _taken_in(account, known, [refused(5)], (7, 3))
    assert account.in_a_row("run", "ann") is None
    _taken_in(account, known, [refused(6)], (7, 3))
    assert account.in_a_row("run", "ann") is not None


def test_what_was_merged_after_it_makes_a_refusal_none_of_a_row() -> None:
    account = RefusalAccount()
    _taken_in(account, None, [refused(1), refused(2), refused(3)], (7, 4))
    assert account.in_a_row("run", "ann") is None
    assert account.offers == {"claim": 3}


def test_offers_of_before_a_new_admission_end_no_learner() -> None:
    """A server lost the admission, and the owners' report of offers 1 to 4 comes after the learner was admitted again."""
    account = RefusalAccount()
    known = _taken_in(account, None, [refused(1, reason="identity")], (0, 0))
    account.forgive({0: 4})
    known = _taken_in(account, known, [refused(n, reason="identity") for n in (2, 3, 4)], (0, 0))
    assert account.in_a_row("run", "ann") is None
    known = _taken_in(account, known, [refused(n, reason="identity") for n in (5, 6)], (0, 0))
    assert account.in_a_row("run", "ann") is None
    _taken_in(account, known, [refused(7, reason="identity")], (0, 0))
    assert account.in_a_row("run", "ann") is not None


def test_a_newest_refused_offer_is_named_once() -> None:
    account = RefusalAccount()
    known = report(None, [refused(1), refused(2), refused(5, fragment=3)])
    assert known is not None
    assert account.take_in(known, {}) == {0: 2, 3: 5}
    assert account.take_in(known, {}) == {}


def test_a_learner_that_ends_without_a_refusal_ends_well() -> None:
    account = RefusalAccount()
    assert account.in_vain("run", "ann") is None
    _taken_in(account, None, [refused(1)], (0, 0))
    assert "none of its work was merged, and 1 of its offers were refused" in str(account.in_vain("run", "ann"))


@pytest.mark.parametrize(("reason", "remedy"), [("ejected", "readmit"), ("too_far", "merge_factor")])
def test_a_learner_that_may_be_merged_again_goes_on(reason: RefusalReason, remedy: str) -> None:
    """One that is quarantined until it is readmitted, and one that moves the model too far."""
    account = RefusalAccount()
    known = report(None, [refused(number, reason=reason) for number in range(1, 6)])
    assert known is not None
    assert account.take_in(known, {}) == {}
    assert account.in_a_row("run", "ann") is None
    assert account.offers == {reason: 5}
    assert remedy in str(account.in_vain("run", "ann"))
