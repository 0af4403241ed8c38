"""Recorded paces: the times of a live run's learners and syncers, as a file that an experiment may name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco.settings.loading import read_toml
from diloco.settings.run import ProcessName
from diloco.settings.validation import parse
from diloco_lab import shipped
from diloco_lab.paces.times import Paces, VirtualPace

FOLDER = "experiments/paces"  # of those that come with the lab
DAY_MS = 86_400_000
MOST = 1_000_000  # times of a kind

Milliseconds = Annotated[int, Field(ge=0, le=DAY_MS)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedLearner(_Table):
    """One learner's times, in milliseconds from the first learner's join."""

    name: ProcessName
    versions: float = Field(ge=0, le=1, description="share of the run's versions that it was in: for comparison, not played")
    begins_ms: Milliseconds
    away_ms: list[tuple[Milliseconds, Milliseconds]] = Field([], max_length=MOST, description="killed, and back")
    steps_ms: list[Milliseconds] = Field(min_length=1, max_length=MOST, description="one after another")
    offers_ms: list[Milliseconds] = Field(min_length=1, max_length=MOST, description="from begun to acknowledged")

    @model_validator(mode="after")
    def _plays(self) -> RecordedLearner:
        if not any(self.steps_ms):
            raise ValueError(f"{self.name}: steps_ms has no step that takes time, expected milliseconds of its steps")
        check_away(self.name, [(from_ms / 1000, until_ms / 1000) for from_ms, until_ms in self.away_ms])
        return self


class Recording(_Table):
    """The times of one live run."""

    about: str = Field(min_length=1, max_length=1000, description="which run, beside what")
    commits_ms: list[Milliseconds] = Field(min_length=1, max_length=MOST, description="from a version made to it stored")
    learners: list[RecordedLearner] = Field(min_length=1, max_length=4096)

    @property
    def step_s(self) -> float:
        """The mean step of all learners."""
        steps = [step_ms for learner in self.learners for step_ms in learner.steps_ms]
        return sum(steps) / len(steps) / 1000

    def paces(self, step_s: float | None) -> Paces:
        """Return it to be played, all times stretched so that the mean step takes ``step_s``; None: as it was."""
        scale = 1e-3 if step_s is None else 1e-3 * step_s / self.step_s

        def seconds(times_ms: list[int]) -> tuple[float, ...]:
            return tuple(scale * time_ms for time_ms in times_ms)

        return Paces(
            [
                VirtualPace(
                    seconds(learner.steps_ms),
                    seconds(learner.offers_ms),
                    scale * learner.begins_ms,
                    tuple((scale * from_ms, scale * until_ms) for from_ms, until_ms in learner.away_ms),
                )
                for learner in self.learners
            ],
            seconds(self.commits_ms),
        )

    def encode(self) -> str:
        """Return it as a file's text, a list to a line."""
        return tomli_w.dumps(self.model_dump(), multiline_strings=False, indent=0).replace(",\n", ", ").replace("[\n", "[")


def check_away(name: str, away: list[tuple[float, float]]) -> None:
    """Check a learner's absences, in seconds.

    Raises:
        ValueError: one ends before it begins, or they are not in order.
    """
    last_s = 0.0
    for from_s, until_s in away:
        if not last_s <= from_s < until_s:
            raise ValueError(
                f"{name}: away from {from_s:g} s to {until_s:g} s, after {last_s:g} s; expected [from, until], in order"
            )
        last_s = until_s


def recordings() -> dict[str, Path]:
    """Return the recordings that come with the lab, by name."""
    return shipped.named(FOLDER)


def load(name: str) -> Recording:
    """Return the recording of a name, or of a file that ends in ``.toml``.

    Raises:
        SettingsError: there is none, or something in it is unknown or wrong.
    """
    path = shipped.find(FOLDER, name, f"pace.recorded = {name!r}: no such recording")
    return parse(Recording, read_toml(path), str(path))
