"""Failures of a tape (:mod:`diloco_ops.failures`) in a trial: a step that one of them meets takes that much longer.

So an elastic learner feels the loss of some of its chips: it stands still while it is put together again, and keeps its
state. Tapes of such failures are written by ``diloco simulate run --record FILE --whole-learners``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from diloco.errors import FormatError, SettingsError
from diloco.settings.validation import nearest
from diloco_lab import shipped
from diloco_ops import failures
from diloco_ops.failures import Failure, FailureTape

FOLDER = "experiments/tapes"  # of those that come with the lab
SUFFIX = ".jsonl"
KINDS = frozenset({"freeze"})

Stall = tuple[float, float]  # from, for so long


def read(name: str) -> str:
    """Return the text of a tape that comes with the lab, or of the file that ``name`` is if it ends in ``.jsonl``.

    Raises:
        SettingsError: there is none, or it cannot be read.
    """
    try:
        return shipped.find(FOLDER, name, f"pace.tape = {name!r}: no such tape", SUFFIX).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"pace.tape = {name!r} cannot be read: {error}") from error


def decoded(text: str, name: str, kinds: Collection[str], complaint: Callable[[Failure], str | None]) -> FailureTape:
    """Return a tape by its text; ``complaint`` says what is wrong with a failure's target.

    Raises:
        SettingsError: the tape is damaged, or has failures of another kind or with a wrong target.
    """
    try:
        return failures.decode(text.splitlines(), name, kinds, complaint)
    except FormatError as error:
        raise SettingsError(f"pace.tape: {error}") from error


def of(text: str, name: str, learners: Sequence[str], scale: float) -> dict[str, list[Stall]]:
    """Return the stalls of each of these learners by a tape's text, in order, all its times times ``scale``.

    Raises:
        SettingsError: the tape is damaged, or has failures of another kind or of a learner that is not there.
    """

    def complaint(failure: Failure) -> str | None:
        if failure.targets(learners):
            return None
        there = f"there are {learners[0]} to {learners[-1]}"
        return (
            f"no learner is {failure.target!r}{nearest(failure.target, learners)}; {there}: record it with as many --learners"
        )

    tape = decoded(text, name, KINDS, complaint)
    found: dict[str, list[Stall]] = {learner: [] for learner in learners}
    for failure in tape.failures:
        for learner in failure.targets(learners):
            found[learner].append((scale * failure.at_s, scale * failure.duration_s))
    return found


def lengthened(step_s: float, now_s: float, stalls: Sequence[Stall]) -> float:
    """Return how long a step takes that begins now: a stall that begins within it makes it longer, and the next within that."""
    end_s = now_s + step_s
    for from_s, for_s in stalls:
        if now_s <= from_s < end_s:
            end_s += for_s
    return end_s - now_s
