"""Experiments as files: TOML with a question, settings that all arms have, the arms, and the claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco.errors import SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.validation import nearest, parse
from diloco_lab.experiment import recording
from diloco_lab.pace import Pace, Paces

SUFFIX = ".toml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Seconds = Annotated[float, Field(ge=0, le=1e7)]
STEP_S = 0.1  # the usual step of a small model on a CPU; only ratios to the heartbeat and grace times matter


class PaceSpec(_Table):
    """The times of learners, in virtual time: steady steps, or those of a recorded run; and when they are away."""

    step_s: float | None = Field(
        None, gt=0, le=3600, description=f"of the fastest learner ({STEP_S} s); of a recording the mean step (as it was)"
    )
    factors: list[Annotated[float, Field(ge=1, le=1000)]] = Field(
        [1.0], min_length=1, max_length=4096, description="times as long, learner by learner, and from the beginning again"
    )
    recorded: str | None = Field(None, min_length=1, max_length=400, description="a recording's name, or its file")
    away: dict[str, list[tuple[Seconds, Seconds]]] = Field(
        {}, max_length=4096, description="by learner: [from, until], killed and back, in virtual seconds"
    )

    @model_validator(mode="after")
    def _one_way(self) -> PaceSpec:
        if self.recorded is not None and self.factors != [1.0]:
            raise ValueError("pace: factors are of steady steps, and recorded ones have their own; leave one of them out")
        for name, away in self.away.items():
            recording.check_away(f"pace.away, {name}", away)
        return self

    def paces(self, learners: int) -> Paces:
        """Return the times of so many learners.

        Raises:
            SettingsError: the recording cannot be had or is of another number of learners, or a learner is not known.
        """
        if self.recorded is None:
            steps_s = [(self.step_s or STEP_S) * self.factors[index % len(self.factors)] for index in range(learners)]
            found = Paces([Pace([step_s]) for step_s in steps_s])
        else:
            found = recording.load(self.recorded).paces(self.step_s)
        if len(found.learners) != learners:
            raise SettingsError(
                f"pace.recorded = {self.recorded!r}: has {len(found.learners)} learners, the arm {learners}; set learners, or "
                "record a run of as many"
            )
        names = [f"learner-{index}" for index in range(learners)]
        for name in self.away:
            if name not in names:
                raise SettingsError(f"pace.away: no {name!r}{nearest(name, names)}; there are {names[0]} to {names[-1]}")
        changed = [replace(p, away=self.away[n]) if n in self.away else p for n, p in zip(names, found.learners, strict=True)]
        return replace(found, learners=changed)

    def said(self) -> dict[str, Any]:
        """Return all that it says, with the recording's content."""
        return self.model_dump() | ({} if self.recorded is None else {"recorded": recording.load(self.recorded).model_dump()})


class Arm(_Table):
    """One way of training."""

    method: Literal["decoupled", "data-parallel", "alone"] = Field(
        "decoupled", description="the services in virtual time; one model on all shares' batches; one learner on its share"
    )
    preset: str = "decoupled"
    settings: dict[str, Any] = Field({}, description="a run's settings, over the experiment's")
    pace: PaceSpec = PaceSpec()


class Claim(_Table):
    """``arm`` ends at most ``below`` (relative) above ``against``: so says the one-sided 95 % bound over paired seeds."""

    arm: str
    against: str
    below: float = Field(ge=-1, le=10)


class Experiment(_Table):
    """A question, and all that is played to answer it."""

    question: str = Field(min_length=1, max_length=400)
    seeds: int = Field(ge=1, le=1000, description="paired: of one seed all arms have the same first model and shares")
    settings: dict[str, Any] = Field({}, description="a run's settings, of all arms")
    arms: dict[str, Arm] = Field(min_length=1, max_length=64)
    claims: list[Claim] = Field([], max_length=64)

    def settings_of(self, arm: str, seed: int) -> RunSettings:
        """Return the settings of an arm's run.

        Raises:
            SettingsError: a setting is unknown or wrong.
        """
        chosen = self.arms[arm]
        return run_settings(chosen.preset, self.settings | chosen.settings | {"seed": seed}, f"arm {arm}")


def named() -> dict[str, Path]:
    """Return the experiments that come with the lab, by name."""
    folder = Path(str(resources.files("diloco_lab") / "experiments"))
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load(name: str) -> Experiment:
    """Return the experiment of a name, or of a file that ends in ``.toml``, with all its settings checked.

    Raises:
        SettingsError: there is none, or something in it is unknown or wrong.
    """
    known = named()
    path = Path(name) if name.endswith(SUFFIX) else known.get(name)
    if path is None:
        there = ", ".join(known)
        raise SettingsError(f"no experiment {name!r}{nearest(name, list(known))}; there are {there}, or name a file {SUFFIX}")
    experiment = parse(Experiment, read_toml(path), str(path))
    for name, arm in experiment.arms.items():
        arm.pace.paces(experiment.settings_of(name, 0).learners)
    check = partial(_known, experiment.arms, str(path))
    for claim in experiment.claims:
        check(claim.arm)
        check(claim.against)
    return experiment


def _known(arms: Mapping[str, Arm], source: str, name: str) -> None:
    if name not in arms:
        raise SettingsError(f"{source}: a claim names arm {name!r}{nearest(name, list(arms))}; there are {', '.join(arms)}")
