"""The picture of losses by seed: title, axis with units, and every interval within the frame."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from diloco_lab.experiment import answer
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.seed_picture import LEFT, RIGHT, WIDE
from diloco_lab.experiment.spec import Experiment

QUESTION = (
    "Does an island of 4 learners reach the loss of data-parallel training <at the same tokens>, whatever their pace may be?"
)


def experiment(**changed: Any) -> Experiment:
    return Experiment.model_validate(
        {"question": QUESTION, "seeds": 2, "arms": {"one": {}, "a-very-long-name-of-an-arm-indeed": {}}} | changed
    )


def drawn(asked: Experiment, losses: dict[str, list[float]]) -> str:
    measured = {(arm, seed): Measured(loss, 1000, 1.0) for arm, known in losses.items() for seed, loss in enumerate(known)}
    [picture] = answer.pictures(asked, asked, Results(measured, {}))
    return picture.svg


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_interval_of_two_seeds_stays_within_the_frame() -> None:
    svg = drawn(experiment(), {"one": [1.50, 1.55], "a-very-long-name-of-an-arm-indeed": [1.60, 1.601]})
    ends = re.findall(r'class="interval" x1="([\d.-]+)" x2="([\d.-]+)"', svg)
    assert len(ends) == 2
    wide, narrow = ([float(end) for end in each] for each in ends)
    assert LEFT < wide[0] < wide[1] < WIDE - RIGHT
    # of two values the 95 % interval is 12.7062 times half their distance, each way: 0.3177 and 0.00635
    assert (wide[1] - wide[0]) / (narrow[1] - narrow[0]) == pytest.approx(50, rel=0.03)


def test_title_axis_and_units_are_there_and_names_have_room() -> None:
    svg = drawn(experiment(), {"one": [1.5, 1.6, 1.4], "a-very-long-name-of-an-arm-indeed": [1.6]})
    said = texts(svg)
    assert " ".join(said[:2]) == QUESTION  # in two lines
    assert "validation loss, nats per byte; dots: seeds; upright: mean, with its 95 % interval" in said
    assert "a-very-long-na…f-an-arm-indeed" in said
    assert "var(" not in svg


def test_the_units_of_another_task_are_not_guessed() -> None:
    asked = experiment(settings={"task": {"name": "mine.py"}})
    assert any(text.startswith("validation loss; dots") for text in texts(drawn(asked, {"one": [1.5]})))


def test_without_a_loss_there_is_no_picture() -> None:
    assert drawn(experiment(), {}) == ""
