"""Experiments as files: TOML with a question, settings that all arms have, the arms, and the claims."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from diloco.errors import SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.settings.validation import nearest, parse
from diloco_lab.paces.spec import PaceSpec

SUFFIX = ".toml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
