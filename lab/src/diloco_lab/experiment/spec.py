"""Experiments as files: TOML with a question, settings that all arms have, the arms, and the claims."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from diloco.core.run.changes import with_setting
from diloco.errors import DataError, SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.presets import changed_settings, run_settings
from diloco.settings.run import RunSettings
from diloco.settings.validation import nearest, parse
from diloco_lab import shipped
from diloco_lab.paces.spec import PaceSpec

FOLDER = "experiments"  # of those that come with the lab


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SettingsChange(_Table):
    """Other values of settings from some time on, as an operator sets them in a run that goes on."""

    after: float = Field(gt=0, lt=1, description="share of the token budget that learners have processed by then")
    settings: dict[str, Any] = Field(min_length=1, max_length=32)


class PostTraining(_Table):
    """Further training of an arm's final model, as one model on the batch of all learners, with other text.

    The arm's loss is then that of the model after it, on the held-out part of this text.
    """

    text: str = Field(
        max_length=200,
        pattern=r"^[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*$",
        description="a folder of this Python's standard library, such as test; all text in it",
    )
    settings: dict[str, Any] = Field(
        min_length=1, max_length=32, description="over those of the arm: tokens, and settings of the inner optimizer"
    )

    @field_validator("settings")
    @classmethod
    def _of_training(cls, settings: dict[str, Any]) -> dict[str, Any]:
        others = [key for key in settings if key != "tokens" and not key.startswith("inner.")]
        if others:
            raise ValueError(f"post-training of the same model takes tokens and inner settings, not {', '.join(others)}")
        return settings

    def folder(self) -> Path:
        """Return the folder of the text.

        Raises:
            DataError: this Python does not have it.
        """
        folder = Path(sysconfig.get_path("stdlib")) / self.text
        if not folder.is_dir():
            raise DataError(
                f"post_training.text = {self.text!r}: there is no folder {folder}. Some distributions leave out the tests of "
                "Python's library: use a Python that has them, or another folder"
            )
        return folder

    def settings_over(self, settings: RunSettings, source: str) -> RunSettings:
        """Return the settings of this training, of an arm with these settings.

        Raises:
            SettingsError: a setting is unknown or wrong.
        """
        return changed_settings(settings, self.settings, source)


class Arm(_Table):
    """One way of training."""

    method: Literal["decoupled", "data-parallel", "alone"] = Field(
        "decoupled", description="the services in virtual time; one model on all shares' batches; one learner on its share"
    )
    preset: str = "decoupled"
    settings: dict[str, Any] = Field({}, description="a run's settings, over the experiment's")
    tuned: dict[str, Annotated[list[float], Field(min_length=3, max_length=32)]] = Field(
        {},
        max_length=3,
        description="settings whose best values are looked for first: those to try, in all combinations",
    )
    in_turn: bool = Field(
        False,
        description="tuned settings are searched one after another, the others at the best values so far: fewer trials than "
        "all combinations",
    )
    chosen: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="in place of tuned: how its settings were chosen before, for page and reports",
    )
    pace: PaceSpec = PaceSpec()
    changes: list[SettingsChange] = Field(
        [], max_length=32, description="made while a decoupled run goes on, one after another"
    )
    sample_s: float | None = Field(
        None, gt=0, le=1e6, description="virtual seconds between two losses of the global model, for claims about time"
    )
    post_training: PostTraining | None = None

    @field_validator("changes")
    @classmethod
    def _in_order(cls, changes: list[SettingsChange]) -> list[SettingsChange]:
        if any(one.after >= other.after for one, other in pairwise(changes)):
            raise ValueError(f"changes must come one after another: {', '.join(str(change.after) for change in changes)}")
        return changes

    @model_validator(mode="after")
    def _changes_are_of_a_run(self) -> Arm:
        if self.changes and self.method != "decoupled":
            raise ValueError(f"changes require a method with a running run, which {self.method!r} is not; leave them out")
        return self

    @model_validator(mode="after")
    def _offers_are_of_a_run(self) -> Arm:
        if self.method != "decoupled" and (self.pace.dropped or self.pace.offers_s):
            raise ValueError(
                f"pace: dropped and offers_s need a method with offers, which {self.method!r} is not; leave them out"
            )
        return self

    @model_validator(mode="after")
    def _chosen_once(self) -> Arm:
        if self.chosen is not None and self.tuned:
            raise ValueError(
                f"settings are either chosen beforehand or tuned: {', '.join(self.tuned)}; leave out chosen or tuned"
            )
        return self

    @field_validator("tuned")
    @classmethod
    def _rising(cls, tuned: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, values in tuned.items():
            if any(one >= other for one, other in pairwise(values)):
                raise ValueError(f"values of {name} to try must rise: {values}")
        return tuned

    @model_validator(mode="after")
    def _search_in_turn_has_a_start(self) -> Arm:
        if self.in_turn and not self.tuned:
            raise ValueError("in_turn: the arm has no tuned settings to search; give tuned, or leave in_turn out")
        for name, values in self.tuned.items() if self.in_turn else ():
            if self.settings.get(name) not in values:
                raise ValueError(f"in_turn: set {name} in settings to the value that the search starts from, one of {values}")
        return self

    def combinations(self) -> list[dict[str, float]]:
        """Return the values to try; a single empty one where there is nothing to tune.

        Of a search in turn: those around its start. There are as many trials, but settings that were searched before may have
        other values (:func:`diloco_lab.experiment.tuning.untried`).
        """
        if self.in_turn:
            start = self.start()
            others = [start | {name: value} for name, values in self.tuned.items() for value in values if value != start[name]]
            return [start, *others]
        return [dict(zip(self.tuned, values, strict=True)) for values in product(*self.tuned.values())]

    def start(self) -> dict[str, float]:
        """Return the values from which a search in turn starts."""
        return {name: float(self.settings[name]) for name in self.tuned}


class LossClaim(_Table):
    """``arm`` ends at most ``below`` (relative) above ``against``: so says the one-sided 95 % bound over paired seeds.

    ``of`` time, the claim is about the virtual time until the loss that both reach: the higher one of their ends.
    """

    arm: str
    against: str
    below: float = Field(ge=-1, le=10)
    of: Literal["loss", "time"] = "loss"


class Curves(_Table):
    """Every arm is played at all combinations of ``grid``, and its losses are fitted (:mod:`diloco_lab.experiment.curves`)."""

    grid: dict[str, Annotated[list[int], Field(min_length=1, max_length=32)]] = Field(
        min_length=1, max_length=8, description="settings that change size or tokens, and their values"
    )
    parameters: float = Field(gt=0, le=1e15, description="of the model for which the curves are extrapolated")
    tokens: float = Field(gt=0, le=1e18, description="that it is trained on")

    def places(self) -> list[dict[str, int]]:
        """Return all combinations of the grid's values."""
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


class Experiment(_Table):
    """A question, and all that is played to answer it."""

    question: str = Field(min_length=1, max_length=400)
    seeds: int = Field(ge=1, le=1000, description="paired: of one seed all arms have the same first model and shares")
    first_seed: int = Field(0, ge=0, lt=2**31)
    tuning_seeds: int = Field(2, ge=1, le=100, description="of trials that choose tuned settings; none of the arms'")
    settings: dict[str, Any] = Field({}, description="a run's settings, of all arms")
    arms: dict[str, Arm] = Field(min_length=1, max_length=64)
    bars: list[str] = Field([], max_length=4, description="arms with which every arm is compared")
    stop_above: float | None = Field(
        None,
        gt=0,
        le=10,
        description="an arm whose first two seeds end this much (relative, on average) above every bar is not played further",
    )
    claims: list[LossClaim] = Field([], max_length=64)
    curves: Curves | None = None

    @model_validator(mode="after")
    def _curves_alone(self) -> Experiment:
        if self.curves is not None and (self.claims or any(arm.tuned for arm in self.arms.values())):
            raise ValueError(
                "curves: arms are not tuned at each size, and claims are not of curves; leave tuned and claims out"
            )
        return self

    @model_validator(mode="after")
    def _losses_of_one_text(self) -> Experiment:
        """Losses on different texts are not compared, and the losses along the way are those of the first training."""
        texts = {name: arm.post_training.text for name, arm in self.arms.items() if arm.post_training is not None}
        if texts and self.curves is not None:
            raise ValueError("curves: their losses are those of the first training; leave out curves or post_training")
        pairs = [(claim.arm, claim.against) for claim in self.claims]
        for one, other in [*pairs, *product(self.arms, self.bars)]:
            if texts.get(one) != texts.get(other):
                raise ValueError(f"{one} and {other} are compared, but post_training.text differs: give both the same")
        if any(claim.of == "time" and claim.arm in texts for claim in self.claims):
            raise ValueError("a claim of time is about the first training; leave out of = time or post_training")
        return self

    @model_validator(mode="after")
    def _stops_at_bars(self) -> Experiment:
        if self.stop_above is not None and not self.bars:
            raise ValueError("stop_above: there is no bar to compare with; name arms in bars, or leave stop_above out")
        return self

    @model_validator(mode="after")
    def _equally_tuned(self) -> Experiment:
        counts = {name: len(arm.combinations()) for name, arm in self.arms.items() if arm.tuned}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ValueError(f"tuned arms get equal numbers of trials, these do not: {said}")
        return self

    @property
    def seed_range(self) -> range:
        """The arms' seeds."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def settings_of(self, arm: str, seed: int, tried: Mapping[str, float] | None = None) -> RunSettings:
        """Return the settings of an arm's run; ``tried``: values of its tuned settings.

        Raises:
            SettingsError: a setting is unknown or wrong.
        """
        chosen = self.arms[arm]
        return run_settings(chosen.preset, self.settings | chosen.settings | dict(tried or {}) | {"seed": seed}, f"arm {arm}")


def named() -> dict[str, Path]:
    """Return the experiments that come with the lab, by name."""
    return shipped.named(FOLDER)


def load(name: str) -> Experiment:
    """Return the experiment of a name, or of a file that ends in ``.toml``, with all its settings checked.

    Raises:
        SettingsError: there is none, or something in it is unknown or wrong.
    """
    path = shipped.find(FOLDER, name, f"no experiment {name!r}")
    experiment = parse(Experiment, read_toml(path), str(path))
    places = [{}] if experiment.curves is None else experiment.curves.places()
    for (name, arm), place in product(experiment.arms.items(), places):
        for values in arm.combinations():
            settings = experiment.settings_of(name, 0, values | place)
            arm.pace.paces(settings.learners)
            for key, value in ((key, value) for change in arm.changes for key, value in change.settings.items()):
                settings = with_setting(settings, key, value, f"{path}: arm {name}, changes")
            if arm.post_training is not None:
                _check_post_training(arm.post_training, settings, f"{path}: arm {name}, post_training")
            if experiment.curves is not None and settings.task.name != "gpt":
                said = f"arm {name}: task.name = {settings.task.name!r}, but parameters are counted only for the built-in task"
                raise SettingsError(f"{path}: {said}; leave out curves, or task.name")
    check = partial(_known, experiment.arms, str(path))
    for bar in experiment.bars:
        check(bar)
    for claim in experiment.claims:
        check(claim.arm)
        check(claim.against)
        if claim.of == "time" and not all(experiment.arms[arm].sample_s for arm in (claim.arm, claim.against)):
            raise SettingsError(
                f"{path}: a claim of time about {claim.arm} and {claim.against} needs losses along the way: set their sample_s"
            )
    return experiment


def _check_post_training(training: PostTraining, settings: RunSettings, source: str) -> None:
    training.settings_over(settings, source)
    if settings.task.name != "gpt":
        raise SettingsError(f"{source}: task.name = {settings.task.name!r}, but only the built-in task takes other text")


def _known(arms: Mapping[str, Arm], source: str, name: str) -> None:
    if name not in arms:
        raise SettingsError(
            f"{source}: a claim or bar names arm {name!r}{nearest(name, list(arms))}; the arms are {', '.join(arms)}"
        )
