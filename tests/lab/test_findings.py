"""The pages of findings: judged by results of the same arms and rules, and made from the results that are published."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.errors import SettingsError
from diloco_lab.commands.experiment import lab
from diloco_lab.experiment import answer, experiment_page, findings, record, spec
from diloco_lab.experiment.findings import Finding
from diloco_lab.experiment.generation import GENERATION
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Arm, Experiment
from diloco_lab.paces.spec import PaceSpec

DOCS = Path(__file__).parents[2] / "docs"
ALL = [finding for group in findings.load() for finding in group.findings]
loaded = functools.cache(spec.load)
PAGES = ["quality.md", *sorted(f"quality/{page.name}" for page in (DOCS / "quality").glob("*.md"))]


@pytest.mark.parametrize("finding", ALL, ids=lambda finding: finding.said[:40])
def test_every_finding_of_the_papers_has_its_claim_or_the_reason_that_it_has_none(finding: Finding) -> None:
    if finding.experiment is None:
        assert finding.untestable or finding.unplayed or finding.simulated
    else:
        assert finding.claim(loaded(finding.experiment)).below <= 0.1


def test_the_published_algorithm_comes_first() -> None:
    first = ALL[0]
    assert first.experiment is not None
    assert spec.load(first.experiment).arms[first.arm].preset == "published"


@pytest.mark.parametrize("table", [*range(1, 13), "14", "15a", "13"])
def test_every_table_of_the_paper_has_a_row(table: object) -> None:
    """Table 15b has the scores behind Table 4."""
    assert any(f"Table {table}" in finding.said or f"Tables 8, {table}" in finding.said for finding in ALL)


@pytest.mark.parametrize("number", ["2311.08105", "2501.18512", "2503.09799", "2505.23725", "2502.12996", "2401.09135"])
def test_every_paper_of_the_lineage_has_a_row(number: str) -> None:
    assert any(number in finding.said for finding in ALL)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "not none"),
        ({"untestable": "no", "unplayed": "no"}, "not untestable and unplayed"),
        ({"experiment": "mixed"}, "name the mechanism by which 'mixed' tests it"),
    ],
)
def test_a_finding_is_tested_or_has_one_reason(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Finding(said="Something holds", **given)


def test_a_claim_that_no_experiment_makes_is_named() -> None:
    finding = Finding(said="Something holds", experiment="mixed", arm="equal", against="equals", mechanism="none")
    with pytest.raises(SettingsError, match="'mixed' makes no claim about 'equal' against 'equals'"):
        finding.claim(spec.load("mixed"))


class MixedPage:
    """A page with the blocks of all findings, beside results of the experiment ``mixed`` alone."""

    def __init__(self, folder: Path) -> None:
        self.path, self.experiment = folder / "page.md", spec.load("mixed")
        self.path.write_text("<!-- findings -->\noutdated\n<!-- end -->\n\n<!-- answers -->\n<!-- end -->\nBehind it.\n")
        (folder / "results").mkdir()
        self.file = folder / "results" / f"mixed{record.SUFFIX}"

    def rows(self, said: str) -> list[list[str]]:
        arguments = ["page", str(self.path), "--results", str(self.file.parent)]
        assert CliRunner().invoke(lab, arguments).exit_code == 0
        lines = [line for line in self.path.read_text().splitlines() if said in line]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    def store(
        self, losses: dict[str, list[float | None]], asked: Experiment | None = None, generation: int = GENERATION
    ) -> None:
        trials = {(arm, seed): Measured(loss, 1, 1.0) for arm, known in losses.items() for seed, loss in enumerate(known)}
        kept = record.ExperimentRecord("mixed", asked or self.experiment, [], Results(trials, {}), {}, generation=generation)
        self.file.write_text(kept.encode())


# claimed: at most 1 % above. 10 % below each time; 10 % above each time
LOSSES: dict[str, list[float | None]] = {
    "equal": [2.0, 2.0],
    "half-18-percent-slower": [1.8, 1.8],
    "one-5-times-slower": [2.2, 2.2],
}
SAID = " of `mixed` |"  # the arms' column


def test_findings_are_judged_by_results_of_the_arms_as_they_are(tmp_path: Path) -> None:
    page = MixedPage(tmp_path)

    def judged(asked: Experiment) -> list[str]:
        page.store(LOSSES, asked)
        return [row[2] for row in page.rows(SAID)]

    experiment = page.experiment
    assert judged(experiment) == ["confirmed", "**not confirmed** at this size"]
    half, one = page.rows(SAID)
    assert half[3] == "-10.0 ± 0.0 % (2 pairs), at most -10.0 % with 95 %; claimed: at most +1.0 %"
    assert half[4] == "`half-18-percent-slower` against `equal` of `mixed`"
    assert half[5].startswith("0.08M parameters, 2.0M tokens, 4 learners; two of four learners 18 % slower")
    assert one[4] == "`one-5-times-slower` against `equal` of `mixed`"
    [short] = page.rows("| `mixed` |")
    assert short[1:3] == ["confirmed", "-10.0 ± 0.0 % (2 pairs), at most -10.0 % with 95 %"]
    text = page.path.read_text()
    assert text.endswith("<!-- end -->\nBehind it.\n")
    assert "outdated" not in text
    other_pace = experiment.arms | {"one-5-times-slower": Arm(pace=PaceSpec(factors=[1.0, 4.0]))}
    assert judged(experiment.model_copy(update={"arms": other_pace})) == ["confirmed", "not played"]
    assert judged(experiment.model_copy(update={"settings": {"tokens": 1000}})) == ["not played", "not played"]
    page.file.unlink()
    assert {row[2] for row in page.rows(SAID)} == {"not played"}


def test_results_of_another_generation_are_shown_and_not_judged(tmp_path: Path) -> None:
    page = MixedPage(tmp_path)
    page.store(LOSSES, generation=GENERATION - 1)
    for row in page.rows(SAID):
        assert row[2] == "not judged: earlier rules"
        assert row[3].startswith(("-10.0 ±", "+10.0 ±"))
    shown = answer.markdown(record.read(page.file))
    assert "| equal | 2 | 2.0000 |" in shown
    assert f"generation {GENERATION - 1}" in shown
    assert "`diloco lab run mixed` plays them again" in shown
    assert "holds" not in shown


def test_results_without_a_generation_are_of_the_first(tmp_path: Path) -> None:
    page = MixedPage(tmp_path)
    page.store(LOSSES, generation=1)
    page.file.write_text(page.file.read_text().replace(',\n "generation": 1', ""))
    assert "generation" not in page.file.read_text()
    assert record.read(page.file).generation == 1


def test_diverged_trials_are_named_and_in_no_average(tmp_path: Path) -> None:
    page = MixedPage(tmp_path)
    page.store({"equal": [2.0, 2.0, 2.0], "half-18-percent-slower": [1.8, 1.8, None], "one-5-times-slower": [None, None, None]})
    half, one = page.rows(SAID)
    assert half[2] == "confirmed"
    assert half[3].startswith("-10.0 ± 0.0 % (2 pairs)")
    assert half[3].endswith("; 1 trial of `half-18-percent-slower` diverged")
    assert one[2:4] == ["too few pairs", "no pair of seeds; 3 trials of `one-5-times-slower` diverged"]


@pytest.mark.parametrize(
    ("slow", "verdict"),
    [
        ([2.2, 2.2], "**opposite**"),  # should be better, and is 10 % worse
        ([2.2, 1.9], "**not confirmed** at this size"),  # 2.5 % worse on average, by two pairs that differ by 15 %
        ([1.8, 1.8], "confirmed"),
        ([1.8], "too few pairs"),
    ],
)
def test_an_arm_that_should_be_better_and_is_worse_is_opposite(tmp_path: Path, slow: list[float], verdict: str) -> None:
    page = MixedPage(tmp_path)
    [claim, *_] = page.experiment.claims
    better = page.experiment.model_copy(update={"claims": [claim.model_copy(update={"below": 0.0})]})
    page.store({"equal": [2.0, 2.0], "half-18-percent-slower": list(slow)})
    known = record.read(page.file)
    assert findings._compared(known, better.claims[0])[0] == verdict


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_made_from_the_results_that_are_published(name: str) -> None:
    path, results = DOCS / name, DOCS / "quality"
    text = path.read_text()
    made, pictures = experiment_page.fill(text, path.parent, results)
    remedy = "make it again: diloco lab page docs/quality.md docs/quality/*.md --results docs/quality"
    assert made == text, f"{path} differs from the results in {results}; {remedy}"
    for file, picture in pictures.items():
        assert file.read_text() == picture, f"{file} differs from the results in {results}; {remedy}"


def test_the_summary_has_an_answers_block_and_the_findings_page_has_all() -> None:
    assert "<!-- answers -->" in (DOCS / "quality.md").read_text()
    assert "<!-- findings -->" in (DOCS / "quality/findings.md").read_text()
