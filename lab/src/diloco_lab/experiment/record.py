"""An experiment's raw results as one file: all that its page is made from, with where and when it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from diloco.errors import FormatError
from diloco.settings.validation import parse
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.experiment.tuning import Choice, Tried, choose, settled

SUFFIX = ".results.json"
MAX_BYTES = 1 << 24


class Played(msgspec.Struct, frozen=True):
    """One trial: its arm and seed, and its result or the reason that it has none."""

    arm: str
    seed: int
    measured: Measured | None = None
    failed: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    experiment: dict[str, Any]
    tried: list[Tried]
    trials: list[Played]
    where: dict[str, str]


class Record(msgspec.Struct, frozen=True):
    """An experiment as it was played; ``asked``: as its file has it, with the values to try."""

    name: str
    asked: Experiment
    tried: list[Tried]
    results: Results
    where: dict[str, str]

    @property
    def choices(self) -> list[Choice]:
        """The best combination of each tuned arm."""
        return choose(self.asked, self.tried)

    @property
    def played(self) -> Experiment:
        """The experiment with the chosen values."""
        return settled(self.asked, self.choices)

    def encode(self) -> str:
        """Return the file's text."""
        trials = [Played(arm, seed, measured) for (arm, seed), measured in sorted(self.results.measured.items())]
        trials += [Played(arm, seed, failed=reason) for (arm, seed), reason in sorted(self.results.failed.items())]
        said = _File(self.name, self.asked.model_dump(exclude_defaults=True), self.tried, trials, self.where)
        return msgspec.json.format(msgspec.json.encode(said), indent=1).decode() + "\n"


def read(path: Path) -> Record:
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
        raise FormatError(f"{path}: no results of an experiment: {error}; play it again with diloco lab run") from None
    results = Results({}, {})
    for trial in found.trials:
        if trial.measured is not None:
            results.measured[trial.arm, trial.seed] = trial.measured
        else:
            results.failed[trial.arm, trial.seed] = trial.failed or "no reason"
    return Record(found.name, parse(Experiment, found.experiment, str(path)), found.tried, results, found.where)
