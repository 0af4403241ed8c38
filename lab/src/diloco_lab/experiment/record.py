"""An experiment's raw results as one file: all that its page is made from, with where and when it was measured."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from diloco.errors import FormatError
from diloco.settings.validation import parse
from diloco_lab.experiment.curves import spread
from diloco_lab.experiment.generation import GENERATION
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.experiment.store import code_digest
from diloco_lab.experiment.tuning import Tried, TunedArm, choose, settled
from diloco_learner.text import load_corpus
from diloco_ops.report.reference import Losses, ReferenceLosses, conditions

SUFFIX = ".results.json"
MAX_BYTES = 1 << 24


class PlayedTrial(msgspec.Struct, frozen=True):
    """One trial: its arm and seed, and its result or the reason that it has none."""

    arm: str
    seed: int
    measured: Measured | None = None
    failed: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    experiment: dict[str, Any]
    tried: list[Tried]
    trials: list[PlayedTrial]
    where: dict[str, str]
    text: str | None = None
    generation: int = 1


class ExperimentRecord(msgspec.Struct, frozen=True):
    """An experiment as it was played.

    ``asked``: as its file has it, with the values to try. ``where``: date, code and machine. ``text``: the hash of the text of
    all arms; None: it is not known. ``generation``: that of the losses (:mod:`diloco_lab.experiment.generation`).
    """

    name: str
    asked: Experiment
    tried: list[Tried]
    results: Results
    where: dict[str, str]
    text: str | None = None
    generation: int = GENERATION

    @property
    def choices(self) -> list[TunedArm]:
        """The best combination of each tuned arm."""
        return choose(self.asked, self.tried)

    @property
    def played(self) -> Experiment:
        """The experiment with the chosen values, and each arm at all places of its curve."""
        return spread(settled(self.asked, self.choices))

    @property
    def chosen(self) -> dict[str, str]:
        """How the settings of arms were chosen, in words: by the search of this experiment, or before it."""
        before = {name: arm.chosen for name, arm in self.asked.arms.items() if arm.chosen is not None}
        return before | {choice.arm: choice.found() for choice in self.choices}

    def reference(self) -> ReferenceLosses | None:
        """Return the losses of the data-parallel arms whose settings were chosen by a search, for reports of runs.

        None: there are none, the text is not known, or the arms differ in model, batch or tokens.
        """
        played, chosen = self.played, self.chosen
        arms = {
            name: Losses(list(known.values()), chosen[name])
            for name, arm in played.arms.items()
            if arm.method == "data-parallel"
            and arm.post_training is None
            and name in chosen
            and (known := self.results.losses(name))
        }
        settings = [played.settings_of(name, 0) for name in arms]
        if self.text is None or not arms:
            return None
        of, *others = [conditions(each, each.tokens, self.text) for each in settings]
        return ReferenceLosses(of, arms, self.where) if all(other == of for other in others) else None

    def encode(self) -> str:
        """Return the file's text."""
        trials = [PlayedTrial(arm, seed, measured) for (arm, seed), measured in sorted(self.results.measured.items())]
        trials += [PlayedTrial(arm, seed, failed=reason) for (arm, seed), reason in sorted(self.results.failed.items())]
        said = _File(
            name=self.name,
            experiment=self.asked.model_dump(exclude_defaults=True),
            tried=self.tried,
            trials=trials,
            where=self.where,
            text=self.text,
            generation=self.generation,
        )
        return msgspec.json.format(msgspec.json.encode(said), indent=1).decode() + "\n"


def where(experiment: Experiment) -> dict[str, str]:
    """Return date, code and machine of trials that are played now, and hashes of the texts of post-training."""
    folders = {arm.post_training.text: arm.post_training.folder() for arm in experiment.arms.values() if arm.post_training}
    texts = {f"text of {name}": load_corpus(str(folder)).digest()[:12] for name, folder in folders.items()}
    return texts | {
        "measured": datetime.now(UTC).date().isoformat(),
        "code": code_digest()[:12],
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def text_of(experiment: Experiment, data: str | None) -> str | None:
    """Return the hash of the text of an experiment's arms; None: one of them has a task of one's own.

    Raises:
        DataError: the text cannot be read.
    """
    built_in = all(experiment.settings_of(name, 0).task.name == "gpt" for name in experiment.arms)
    return load_corpus(data).digest() if built_in else None


def read(path: Path) -> ExperimentRecord:
    """Read a file of raw results.

    Raises:
        FormatError: it is none.
        SettingsError: its experiment is not one of this version.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES)
    try:
        found = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}: not results of an experiment: {error}; run it again with diloco lab run") from None
    results = Results({}, {})
    for trial in found.trials:
        if trial.measured is not None:
            results.measured[trial.arm, trial.seed] = trial.measured
        else:
            results.failed[trial.arm, trial.seed] = trial.failed or "no reason"
    return ExperimentRecord(
        name=found.name,
        asked=parse(Experiment, found.experiment, str(path)),
        tried=found.tried,
        results=results,
        where=found.where,
        text=found.text,
        generation=found.generation,
    )
