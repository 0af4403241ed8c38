"""One check of the doctor: its verdict, its finding, the need and the remedy."""

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
        remedy: what to do; empty where nothing is wrong.
    """

    name: str
    verdict: Verdict
    found: str
    needed: str = ""
    remedy: str = ""

    def text(self) -> str:
        """Return the line without the verdict and the name."""
        return "; ".join(part for part in (self.found, self.needed and f"needed: {self.needed}", self.remedy) if part)


def skipped(name: str, why: str) -> Check:
    """Return a check that could not be made."""
    return Check(name, "skipped", why)
