"""What became of tests: written by pytest (``tests/conftest.py``), read by ``make test`` and ``make stress``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "DILOCO_TEST_OUTCOMES"  # the file that pytest writes when it ends


@dataclass(frozen=True)
class Failure:
    """A test that failed."""

    test: str  # pytest's node id
    logs: str  # the folder that it worked in, which is kept
    reason: str  # the last line of its error

    @property
    def lines(self) -> list[str]:
        """What a person needs: the test, where its logs are, and how to run it alone."""
        return [
            f"FAILED {self.test}",
            f"  why:   {self.reason}",
            f"  logs:  {self.logs}",
            f"  again: .venv/bin/pytest '{self.test}'",
        ]


@dataclass(frozen=True)
class Outcomes:
    """The results of a pytest run."""

    factor: float = 1.0
    counts: Mapping[str, int] = field(default_factory=dict)  # by outcome: passed, failed, errors, skipped
    failures: tuple[Failure, ...] = ()

    def write(self) -> None:
        """Write them to the file that the environment names, where it names one."""
        if path := os.environ.get(VARIABLE):
            failures = [vars(failure) for failure in self.failures]
            Path(path).write_text(json.dumps({"factor": self.factor, "counts": dict(self.counts), "failures": failures}))

    @classmethod
    def read(cls, path: Path) -> Outcomes | None:
        """Return what a run wrote; None where it ended before it could."""
        if not path.exists():
            return None
        values: dict[str, Any] = json.loads(path.read_text())
        return cls(values["factor"], values["counts"], tuple(Failure(**each) for each in values["failures"]))
