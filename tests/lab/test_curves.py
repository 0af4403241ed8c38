"""Curves: known laws are found again, an extrapolation says how little it knows, and files that cannot tell are refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import SettingsError
from diloco_lab.experiment import answer, curves, record, spec
from diloco_lab.experiment.curves import ArmPoint, Law, ScalingFit
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results

SIZES, BUDGETS = (40_000, 80_000, 200_000), (1e6, 2e6, 4e6)
BAR, ARM = Law(0.9, 30.0, 0.45, 80.0, 0.35), Law(0.9, 30.0, 0.45, 100.0, 0.35)


def points(noise: float = 0.0) -> list[ArmPoint]:
    """Losses of both laws, each off by a relative noise."""
    rng = np.random.default_rng(3)
    return [
        ArmPoint(name, size, int(tokens), law.loss(size, tokens) * math.exp(noise * rng.standard_normal()))
        for name, law in (("bar", BAR), ("arm", ARM))
        for size, tokens in itertools.product(SIZES, BUDGETS)
    ]


def test_a_law_by_hand() -> None:
    # 10,000 ** -0.5 is a hundredth, 1e6 ** -0.5 a thousandth
    assert Law(1.0, 20.0, 0.5, 300.0, 0.5).loss(10_000, 1e6) == pytest.approx(1 + 0.2 + 0.3)


def test_known_laws_are_found_again() -> None:
    fit = ScalingFit(points())
    assert fit.arms == ["bar", "arm"]
    for name, law in (("bar", BAR), ("arm", ARM)):
        for size, tokens in ((80_000, 2e6), (35e6, 700e6)):  # between the points, and far beyond them
            assert fit.law(name).loss(size, tokens) == pytest.approx(law.loss(size, tokens), rel=1e-4)
    above = fit.above("arm", "bar", 35e6, 700e6)
    assert above.mean == pytest.approx(ARM.loss(35e6, 700e6) / BAR.loss(35e6, 700e6) - 1, abs=1e-4)
    assert fit.scatter < 1e-5


def test_an_interval_holds_the_truth_and_grows_with_the_distance() -> None:
    fit = ScalingFit(points(noise=0.003))

    def interval(size: float, tokens: float) -> tuple[float, float]:
        found = fit.above("arm", "bar", size, tokens).interval
        assert found is not None
        truth = ARM.loss(size, tokens) / BAR.loss(size, tokens) - 1
        assert found[0] < truth < found[1]
        return found

    (low, high), (far_low, far_high) = interval(80_000, 2e6), interval(35e6, 700e6)
    assert high - low < 0.02
    assert far_high - far_low > 2 * (high - low)
    assert fit.scatter == pytest.approx(0.003, rel=0.5)


def test_points_that_tell_nothing_of_the_tokens_give_no_interval() -> None:
    """All of one budget: what is of the tokens and what no model can know are the same."""
    sizes = (20_000, 40_000, 80_000, 160_000, 320_000, 640_000, 1_280_000)
    fit = ScalingFit([ArmPoint("bar", size, 1_000_000, BAR.loss(size, 1e6)) for size in sizes])
    assert fit.law("bar").loss(80_000, 1e6) == pytest.approx(BAR.loss(80_000, 1e6), rel=1e-3)
    alike = [ArmPoint("arm", size, 1_000_000, ARM.loss(size, 1e6)) for size in sizes]
    assert ScalingFit([*fit.points, *alike]).above("arm", "bar", 35e6, 700e6).interval is None


FILE = """
question = "How do losses fall?"
seeds = 1
bars = ["data-parallel"]

[settings]
"task.layers" = 2
"task.context" = 64

[arms.data-parallel]
method = "data-parallel"

[arms.four]

[curves]
parameters = 35e6
tokens = 700e6

[curves.grid]
"task.width" = [32, 48, 80]
tokens = [1000000, 2000000, 4000000]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.toml"
    path.write_text(FILE)
    return path


def test_each_arm_is_played_at_each_place_and_the_page_has_the_curves(file: Path) -> None:
    asked = spec.load(str(file))
    played = curves.spread(asked)
    assert len(played.arms) == 2 * 9
    assert played.settings_of("four: task.width 48, tokens 2000000", 0).task.width == 48
    assert played.settings_of("four: task.width 48, tokens 2000000", 0).tokens == 2_000_000

    by_width = {32: 43_168, 48: 80_112, 80: 200_080}  # the embedding, two layers, their norms
    results = Results({}, {})
    for name in played.arms:
        settings = played.settings_of(name, 0)
        law = ARM if name.startswith("four") else BAR
        assert curves.parameters_of(settings) == by_width[settings.task.width]
        results.measured[name, 0] = Measured(law.loss(by_width[settings.task.width], settings.tokens), settings.tokens, 1.0)
    page = answer.markdown(record.ExperimentRecord("sizes", asked, [], results, {"measured": "today"}))
    above = 100 * (ARM.loss(35e6, 700e6) / BAR.loss(35e6, 700e6) - 1)
    assert f"four above data-parallel at 3.5e+07 parameters and 7e+08 tokens, by the curves: {above:+.1f} %" in page
    assert "| data-parallel | 0.9 | 30 | 0.45 | 80 | 0.35 |" in page
    [made] = answer.pictures(asked, played, results)
    picture = made.svg
    panels = [picture.index(f">{size} parameters<") for size in ("43.2k", "80.1k", "200k")]
    assert panels == sorted(panels)
    shown = ARM.loss(80_112, 2_000_000)
    assert f"<title>four, 80.1k parameters, 2.00M tokens: {shown:.4f}</title>" in picture
    assert picture.count("<path") == 2 * 3

    del results.measured["four: task.width 48, tokens 2000000", 0]
    missing = Results({key: one for key, one in results.measured.items() if key[0].startswith("four")}, {})
    few = dict(list(missing.measured.items())[:5])
    assert "curves: 5 points for 5 constants" in answer.markdown(
        record.ExperimentRecord("sizes", asked, [], Results(few, {}), {})
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[arms.four]", '[arms.four]\ntuned = { "inner.learning_rate" = [0.1, 0.2, 0.3] }', "leave tuned and claims out"),
        ("tokens = [1000000, 2000000, 4000000]", "tokens = []", "curves.grid"),
        ('"task.width" = [32, 48, 80]', '"task.with" = [32]', "no setting 'task.with'"),
        ('"task.context" = 64', '"task.name" = "mine:task"', "only for the built-in task"),
    ],
)
def test_files_that_cannot_be_played_are_refused(file: Path, old: str, new: str, said: str) -> None:
    file.write_text(FILE.replace(old, new))
    with pytest.raises(SettingsError, match=said):
        spec.load(str(file))
