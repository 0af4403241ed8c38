"""What a check found, what was needed, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed", "skipped"]

# which services there are; commands (operators, observers) are not examined
Role = Literal["learner", "evaluator", "syncer", "coordinator"]


@dataclass(frozen=True)
class Check:
    """One line of the answer.

    Attributes:
        name: what was looked at; of a server, with its place before: ``eu link``.
        found: of a skipped check, why it was.
        mend: what to do; empty where nothing is wrong.
    """

    name: str
    verdict: Verdict
    found: str
    needed: str = ""
    mend: str = ""

    def text(self) -> str:
        """All but the verdict and the name."""
        return "; ".join(part for part in (self.found, self.needed and f"needed: {self.needed}", self.mend) if part)


def skipped(name: str, why: str) -> Check:
    """A check that could not be made."""
    return Check(name, "skipped", why)
