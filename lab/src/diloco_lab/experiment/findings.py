"""The papers' findings, and beside each whether experiments confirm it at the sizes that are played here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco.errors import SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.validation import parse
from diloco_lab.experiment import answer, record, spec
from diloco_lab.experiment.answer import ClaimVerdict
from diloco_lab.experiment.curves import parameters_of
from diloco_lab.experiment.generation import GENERATION
from diloco_lab.experiment.record import ExperimentRecord
from diloco_lab.experiment.runner import Results, stopped
from diloco_lab.experiment.spec import Experiment, LossClaim

HEAD = ("finding", "published", "verdict", "here", "arms", "model and mechanism")
SUMMARY_HEAD = ("question", "verdict", "here", "by")
REASONS = {"untestable": "not testable here", "unplayed": "not played", "simulated": "simulated"}  # field: verdict


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Table):
    """One finding: the claim that tests it, by an experiment's name and two arms, or the reason why no claim does."""

    said: str = Field(min_length=1, max_length=200, description="the paper's statement, and where it stands")
    published: str = Field("-", max_length=200, description="the paper's figure")
    short: str | None = Field(None, max_length=120, description="the question that it answers on the summary page")
    experiment: str | None = None
    arm: str = ""
    against: str = ""
    of: Literal["loss", "time"] = "loss"
    mechanism: str = Field("", max_length=300, description="what was played to test it, and what was left out")
    untestable: str | None = Field(None, description="it takes what two cores do not have")
    unplayed: str | None = Field(None, description="it could be played, but was not")
    simulated: str | None = Field(None, description="no training tests it; where it is computed")

    @model_validator(mode="after")
    def _one(self) -> Finding:
        given = [name for name in ("experiment", *REASONS) if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{self.said!r}: give one of experiment, {', '.join(REASONS)}, not {' and '.join(given) or 'none'}"
            )
        if self.experiment is not None and not self.mechanism:
            raise ValueError(f"{self.said!r}: name the mechanism by which {self.experiment!r} tests it")
        return self

    def claim(self, experiment: Experiment) -> LossClaim:
        """Return the claim that tests it.

        Raises:
            SettingsError: there is none.
        """
        for claim in experiment.claims:
            if (claim.arm, claim.against, claim.of) == (self.arm, self.against, self.of):
                return claim
        raise SettingsError(
            f"finding {self.said!r}: experiment {self.experiment!r} makes no claim about {self.arm!r} against {self.against!r}"
        )


class FindingGroup(_Table):
    """Findings on one subject."""

    name: str = Field(min_length=1, max_length=60)
    findings: list[Finding] = Field(min_length=1)


class _File(_Table):
    groups: list[FindingGroup]


def load() -> list[FindingGroup]:
    """Return all findings."""
    path = Path(str(resources.files("diloco_lab") / "findings.toml"))
    return parse(_File, read_toml(path), str(path)).groups


def tables(folder: Path) -> str:
    """Return the tables of all findings, one a group, judged by the raw results in ``folder``.

    Raises:
        FormatError: results are no results.
        SettingsError: a finding names an experiment or a claim that does not exist.
    """
    parts: list[str] = []
    groups = load()
    experiments = _experiments(groups)
    for group in groups:
        rows = [(finding.said, finding.published, *_judged(finding, folder, experiments)) for finding in group.findings]
        parts.append(f"## {group.name}\n\n" + "\n".join(answer.table(HEAD, rows)) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def summary(folder: Path) -> str:
    """Return the table of the findings that have a question for the summary page. Raises as :func:`tables`."""
    rows: list[tuple[str, str, str, str]] = []
    groups = load()
    experiments = _experiments(groups)
    for finding in (finding for group in groups for finding in group.findings if finding.short is not None):
        verdict, here, *_ = _judged(finding, folder, experiments)
        by = "-" if finding.experiment is None else f"`{finding.experiment}`"
        rows.append((finding.short or "", verdict, here.partition(";")[0] if finding.experiment is not None else "-", by))
    return "\n".join(answer.table(SUMMARY_HEAD, rows)) + "\n"


def _experiments(groups: list[FindingGroup]) -> dict[str, Experiment]:
    """Return the experiments that findings name, each read once."""
    named = {finding.experiment for group in groups for finding in group.findings}
    return {name: spec.load(name) for name in named if name is not None}


def _judged(finding: Finding, folder: Path, experiments: Mapping[str, Experiment]) -> tuple[str, str, str, str]:
    """Return verdict, figure, arms, and model and mechanism."""
    for name, verdict in REASONS.items():
        reason: str | None = getattr(finding, name)
        if reason is not None:
            return verdict, reason, "-", "-"
    assert finding.experiment is not None
    experiment = experiments[finding.experiment]
    claim, path = finding.claim(experiment), folder / f"{finding.experiment}{record.SUFFIX}"
    arms = f"`{claim.arm}` against `{claim.against}` of `{finding.experiment}`"
    known = record.read(path) if path.is_file() else None
    if known is None or not _same(experiment, known.asked, claim):
        return "not played", "-", arms, finding.mechanism
    verdict, here = _compared(known, claim)
    return verdict, here, arms, f"{_size(known.played, claim.arm)}; {finding.mechanism}"


def _compared(known: ExperimentRecord, claim: LossClaim) -> tuple[str, str]:
    """Return a claim's verdict, and the figure with all that is left out of it."""
    ended = answer.verdicts(known.played.model_copy(update={"claims": [claim]}), known.results)
    notes = _left_out(known.played, known.results, claim)
    if not ended:
        return "too few pairs", "; ".join(["no pair of seeds", *notes])
    [found] = ended
    here = "; ".join([found.number(), *notes])
    return (_verdict(found), here) if known.generation == GENERATION else ("not judged: earlier rules", here)


def _verdict(found: ClaimVerdict) -> str:
    """Return the verdict: *opposite* where the arm that should be better is worse with 95 %."""
    if found.paired.bound is None:
        return "too few pairs"
    if found.holds:
        return "confirmed"
    lower = 2 * found.paired.mean - found.paired.bound  # one-sided, as the bound
    return "**opposite**" if found.claim.below <= 0 < lower else "**not confirmed** at this size"


def _left_out(experiment: Experiment, results: Results, claim: LossClaim) -> list[str]:
    """Return notes on trials of the claim's arms that are in no average."""
    notes: list[str] = []
    for arm in (claim.arm, claim.against):
        diverged = sum(measured.loss is None for (name, _), measured in results.measured.items() if name == arm)
        failed = sum(name == arm for name, _ in results.failed)
        for number, what in ((diverged, "diverged"), (failed, "failed")):
            if number:
                notes.append(f"{number} trial{'s' if number > 1 else ''} of `{arm}` {what}")
        if arm in stopped(experiment, results):
            notes.append(f"`{arm}` was stopped after its first seeds")
    return notes


def _size(experiment: Experiment, arm: str) -> str:
    """Return an arm's parameters, tokens and learners."""
    settings = experiment.settings_of(arm, experiment.first_seed)
    parameters = f"{parameters_of(settings) / 1e6:.2f}M parameters, " if settings.task.name == "gpt" else ""
    return f"{parameters}{settings.tokens / 1e6:.1f}M tokens, {settings.learners} learners"


def _same(experiment: Experiment, played: Experiment, claim: LossClaim) -> bool:
    """Whether both arms were played as the experiment's file has them."""
    arms = (claim.arm, claim.against)
    return experiment.settings == played.settings and all(experiment.arms[arm] == played.arms.get(arm) for arm in arms)
