"""The papers' findings, and beside each whether experiments confirm it at the sizes that are played here."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco.errors import SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.validation import parse
from diloco_lab.experiment import answer, record, spec
from diloco_lab.experiment.spec import Experiment, LossClaim

HEAD = ("finding", "here", "by", "measured")
WORDS = {True: "confirmed", False: "**not confirmed**", None: "undecided"}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Table):
    """One finding: the claim that asks for it by an experiment's name and two arms, or the reason that nothing can."""

    said: str = Field(min_length=1, max_length=200)
    experiment: str | None = None
    arm: str = ""
    against: str = ""
    of: Literal["loss", "time"] = "loss"
    untested: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Finding:
        if (self.experiment is None) == (self.untested is None):
            raise ValueError(f"{self.said!r}: give an experiment with arm and against, or the reason why it is untested")
        return self

    def claim(self, experiment: Experiment) -> LossClaim:
        """Return the claim that asks for it.

        Raises:
            SettingsError: there is none.
        """
        for claim in experiment.claims:
            if (claim.arm, claim.against, claim.of) == (self.arm, self.against, self.of):
                return claim
        raise SettingsError(
            f"finding {self.said!r}: experiment {self.experiment!r} makes no claim about {self.arm!r} against {self.against!r}"
        )


class _File(_Table):
    findings: list[Finding]


def load() -> list[Finding]:
    """Return all findings."""
    path = Path(str(resources.files("diloco_lab") / "findings.toml"))
    return parse(_File, read_toml(path), str(path)).findings


def table(folder: Path) -> str:
    """Return a table of all findings, judged by the raw results in ``folder``.

    Raises:
        FormatError: results are no results.
        SettingsError: a finding names an experiment or a claim that there is not.
    """
    rows = [(finding.said, *_judged(finding, folder)) for finding in load()]
    return "\n".join(answer.table(HEAD, rows)) + "\n"


def _judged(finding: Finding, folder: Path) -> tuple[str, str, str]:
    """Return verdict, experiment, and the number that it is judged by."""
    if finding.experiment is None:
        return "not tested", "-", finding.untested or ""
    name, experiment = f"`{finding.experiment}`", spec.load(finding.experiment)
    claim, path = finding.claim(experiment), folder / f"{finding.experiment}{record.SUFFIX}"
    known = record.read(path) if path.is_file() else None
    if known is None or not _same(experiment, known.asked, claim):
        return "not played", name, "-"
    judged = answer.verdicts(experiment.model_copy(update={"claims": [claim]}), known.results)
    if not judged:
        return "undecided", name, "no pair of seeds"
    [verdict] = judged
    return WORDS[verdict.holds], name, verdict.number()


def _same(experiment: Experiment, played: Experiment, claim: LossClaim) -> bool:
    """Whether both arms were played as the experiment's file has them."""
    arms = (claim.arm, claim.against)
    return experiment.settings == played.settings and all(experiment.arms[arm] == played.arms.get(arm) for arm in arms)
