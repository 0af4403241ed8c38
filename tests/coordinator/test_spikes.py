"""When a loss is in a spike: values by hand, and noise that is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from diloco_coordinator.spikes import Spike


def after(*losses: float) -> Spike:
    made = Spike()
    for loss in losses:
        made.note(loss)
    return made


# the mean is 2 and the standard deviation 0.2: a spike begins above 2 + 6 * 0.2, and is over below 2 + 3 * 0.2
USUAL = [1.8, 2.2] * 25


def test_a_spike_begins_six_spreads_above_and_is_over_below_three() -> None:
    made = after(*USUAL, 3.22, 3.22)
    assert not made  # of the newest five steps three are as before
    made.note(3.22)
    assert made
    assert not after(*USUAL, *[3.18] * 5)
    for loss in [2.62] * 5:  # below where it began, and above where it is over
        made.note(loss)
    assert made
    made.note(2.58)
    made.note(2.58)
    assert made
    made.note(2.58)
    assert not made


def test_a_spike_lasts_as_long_as_the_loss_stays_up() -> None:
    made = after(*USUAL, *[6.0] * 500)
    assert made
    for loss in (2.0, 2.0, 2.0):
        made.note(loss)
    assert not made


def test_a_loss_that_was_quite_even_has_to_rise_by_30_per_cent() -> None:
    assert not after(*[2.0] * 20, *[2.59] * 5)
    assert after(*[2.0] * 20, *[2.61] * 5)
    assert not after(*[0.0] * 25)


def test_too_few_steps_say_nothing() -> None:
    assert not after(*[2.0] * 9, *[90.0] * 5)
    assert after(*[2.0] * 12, *[90.0] * 3)


NOISE: dict[str, Callable[[random.Random], float]] = {
    "small": lambda chance: abs(chance.gauss(0.02, 0.01)),
    "smaller than its noise": lambda chance: abs(chance.gauss(0.0, 0.01)),
    "usual": lambda chance: chance.gauss(2.0, 0.05),
    "wide": lambda chance: abs(chance.gauss(2.0, 1.0)),
    "of two kinds": lambda chance: chance.choice((1.0, 3.0)) + chance.gauss(0, 0.02),
    "of two kinds, one rare": lambda chance: (3.0 if chance.random() < 0.15 else 1.0) + chance.gauss(0, 0.02),
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_is_no_spike(kind: str) -> None:
    chance, made, spikes = random.Random(7), Spike(), 0
    for _ in range(5000):
        before = bool(made)
        made.note(NOISE[kind](chance))
        spikes += bool(made) and not before
    assert spikes == 0
    for _ in range(3):
        made.note(20.0)
    assert made
