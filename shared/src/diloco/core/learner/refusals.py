"""Refused offers, on both sides: an owner's report, and a learner's account of it.

An offer is *refused* if it cannot be accepted however often it is sent. An offer that is late is not: it was merged already,
superseded, made on a base that is too old or of before a rollback, or the log is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from diloco.errors import ClaimError, MessageError, NonFiniteError, NotAdmittedError, RefusedError, UnmergeableError
from diloco.wire.refusals import MAX_REFUSALS, MAX_TEXT_CHARACTERS, RefusalReason, Refusals, RefusedOffers

FOLLOWS: frozenset[RefusalReason] = frozenset({"ejected", "too_far"})  # a learner that is refused so may be merged again
IN_A_ROW = 3  # refused offers of one fragment, with nothing merged in between, that end a learner

REMEDIES: Mapping[RefusalReason, str] = {
    "claim": "report the true number of tokens per step; if this learner's grant is too small: diloco keys grant DIR "
    "NAME --batch-tokens N --min-step-s S",
    "form": "run the same version of diloco here as the run's syncers",
    "identity": "the process is not admitted: give each learner its own name and identity",
    "grant": "have the operator make a grant: diloco keys grant DIR NAME --batch-tokens N",
    "not_finite": "its parameters contain NaN or infinity: check its data and lower its learning rate",
    "too_far": "if the merge moved too far, or the offer is an outlier: check this learner's data and loss, lower its "
    "learning rate, or ask the operator to raise quarantine.merge_factor or quarantine.factor; if the offer's base left the "
    "log: ask the operator to raise log.keep_keyframes",
    "ejected": "ask the operator: diloco readmit DIR NAME; a quarantine also ends after a cycle of sound offers",
}


@dataclass(frozen=True)
class Refusal:
    """One offer that an owner has refused; ``number`` is 0 where the offer could not be read."""

    learner: str
    incarnation: int
    fragment: int
    number: int
    reason: RefusalReason
    text: str


def reason_of(error: MessageError) -> RefusalReason:
    """Return the reason that an error is of."""
    match error:
        case ClaimError():
            return "claim"
        case NonFiniteError():
            return "not_finite"
        case NotAdmittedError():
            return "grant" if error.lacks_grant else "identity"
        case UnmergeableError(event="merge_too_far" | "merge_base_unknown" | "offer_outlier"):
            return "too_far"
        case UnmergeableError(event="merge_not_finite"):
            return "not_finite"
    return "form"


def report(known: Refusals | None, refusals: Iterable[Refusal]) -> Refusals | None:
    """Return a learner's report with further ``refusals`` of the same learner, in order; None: they change nothing.

    A refusal of an older process of the learner, and of an offer that is in the report, changes nothing: a new owner reads
    the same offers as the one before it. So offers of a fragment that cannot be read, and have no number, count once. A refusal
    of a younger process begins a new report.
    """
    changed = known
    for refusal in refusals:
        if changed is None or changed.incarnation < refusal.incarnation:
            changed = Refusals(refusal.learner, refusal.incarnation, [], [])
        if refusal.incarnation < changed.incarnation:
            continue
        of_fragment = [entry for entry in changed.entries if entry.fragment == refusal.fragment]
        old = next((entry for entry in of_fragment if entry.reason == refusal.reason), None)
        if any(entry.number >= refusal.number for entry in of_fragment) if refusal.number else old:
            continue
        newest = max(refusal.number, old.number if old else 0)
        entry = RefusedOffers(refusal.fragment, refusal.reason, 1 + (old.offers if old else 0), newest)
        entries = [*(other for other in changed.entries if other is not old), entry][-MAX_REFUSALS:]
        texts = dict(changed.texts) | {refusal.reason: refusal.text[:MAX_TEXT_CHARACTERS]}
        changed = Refusals(changed.learner, changed.incarnation, entries, list(texts.items()))
    return None if changed is known else changed


class RefusalAccount:
    """A learner's account of its refused offers.

    ``offers``: how many were refused, by reason.
    """

    def __init__(self) -> None:
        self.offers: Counter[RefusalReason] = Counter()
        self._in_a_row: Counter[int] = Counter()  # by fragment: refused since the last one was merged
        self._known: Counter[int] = Counter()  # by fragment: refused in all
        self._forgiven: dict[int, int] = {}  # by fragment: refusals of offers up to this one end no learner
        self._merged: dict[int, tuple[int, int]] = {}  # by fragment: the offer merged last, as of the last look
        self._texts: dict[RefusalReason, str] = {}

    def take_in(self, refusals: Refusals, merged: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Take in a report. Return by fragment, where more were refused than before, the newest one's number.

        ``merged``: by fragment, (incarnation, number) of the learner's last merged offer.
        """
        offers_by_reason = Counter[RefusalReason]()
        known, newest = Counter[int](), Counter[int]()
        for entry in refusals.entries:
            offers_by_reason[entry.reason] += entry.offers
            if entry.number and entry.reason not in FOLLOWS:
                known[entry.fragment] += entry.offers
                newest[entry.fragment] = max(newest[entry.fragment], entry.number)
        self.offers, self._texts = offers_by_reason, dict(refusals.texts)  # another thread reads them
        more = {}
        for fragment, offers in known.items():
            at = merged.get(fragment, (0, 0))
            if at > self._merged.get(fragment, (0, 0)):
                self._in_a_row[fragment] = 0
            self._merged[fragment] = at
            if offers > self._known[fragment]:
                row = self._in_a_row[fragment] + offers - self._known[fragment]
                # of the offers since the last one that was merged, however many were refused before it
                last = max(at[1] if at[0] == refusals.incarnation else 0, self._forgiven.get(fragment, 0))
                most = newest[fragment] - last if last else row
                self._in_a_row[fragment] = max(0, min(row, most))
                more[fragment] = newest[fragment]
        self._known = known
        return more

    def forgive(self, newest: Mapping[int, int]) -> None:
        """End no learner for refusals of offers up to ``newest``, by fragment: they came while its admission was lost."""
        self._forgiven = dict(newest)
        self._in_a_row.clear()

    def remedies(self) -> dict[RefusalReason, str]:
        """Return what to do about each reason that there is."""
        return {reason: REMEDIES[reason] for reason in self.offers}

    def in_a_row(self, run: str, learner: str) -> RefusedError | None:
        """Return the error that ends a learner whose offers of one fragment are refused in a row; None: they are not."""
        for fragment, offers in self._in_a_row.items():
            if offers >= IN_A_ROW:
                return self._error(run, learner, f"its last {offers} offers of fragment {fragment} were refused")
        return None

    def in_vain(self, run: str, learner: str) -> RefusedError | None:
        """Return the error of a learner that ends, where nothing of it was merged and offers were refused; None: none were."""
        refused = sum(self.offers.values())
        return (
            self._error(run, learner, f"none of its work was merged, and {refused} of its offers were refused")
            if refused
            else None
        )

    def _error(self, run: str, learner: str, what: str) -> RefusedError:
        said = "; ".join(f"{reason}: {self._texts.get(reason, '')}: {REMEDIES[reason]}" for reason in self.offers)
        return RefusedError(f"run {run!r}: learner {learner}: {what} ({said})")
