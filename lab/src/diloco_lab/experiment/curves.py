"""Losses fitted over size and tokens, for each way of training, and extrapolated with their interval.

The law is that of Hoffmann et al. (arXiv 2203.15556): ``E + A N^-alpha + B D^-beta`` of N parameters and D tokens. All arms
share ``E``, which no model can know of the text; the other four are each arm's own. Least squares of the logarithms of the
mean losses over seeds. Intervals are those of the linearised fit (Student's t): they know the scatter around the law, and not
whether the law holds beyond the sizes that were played.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import t

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco_lab.experiment.runner import Results
from diloco_lab.experiment.spec import Experiment
from diloco_lab.experiment.statistics import CONFIDENCE
from diloco_learner.jax import gpt

Floats = NDArray[np.float64]
OWN = 4  # constants of each arm
HEAD = ("curve", "E", "A", "alpha", "B", "beta")
_STARTS = [(share, exponent) for share in (0.2, 0.5, 0.8) for exponent in (0.1, 0.3, 0.6)]  # of the search: E, exponents
_SINGULAR = 1e13  # a condition beyond which the points do not tell the constants apart


@dataclass(frozen=True)
class ArmPoint:
    """The mean loss of an arm at one size and budget."""

    arm: str
    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Law:
    """The constants of one arm's law."""

    floor: float
    of_size: float  # A
    size_exponent: float
    of_tokens: float  # B
    tokens_exponent: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the law's loss."""
        by_size, by_tokens = parameters**-self.size_exponent, tokens**-self.tokens_exponent
        return float(self.floor + self.of_size * by_size + self.of_tokens * by_tokens)


@dataclass(frozen=True)
class Above:
    """How far an arm's curve is above another's, relative; ``interval`` with 95 %, None where the points do not tell it."""

    mean: float
    interval: tuple[float, float] | None


class ScalingFit:
    """The laws of all arms of ``points``.

    Raises:
        SettingsError: there are too few points for the constants.
    """

    def __init__(self, points: Sequence[ArmPoint]) -> None:
        self.points = list(points)
        self.arms = list(dict.fromkeys(point.arm for point in points))
        constants = 1 + OWN * len(self.arms)
        if len(points) <= constants:
            raise SettingsError(f"curves: {len(points)} points for {constants} constants; give the grid more sizes or budgets")
        self._freedom = len(points) - constants
        self._arm = np.array([self.arms.index(point.arm) for point in points])
        sizes, budgets = (np.log([getattr(point, name) for point in points]) for name in ("parameters", "tokens"))
        self._middle = float(np.mean(sizes)), float(np.mean(budgets))  # of the points: about zero the constants hang together
        self._places = sizes - self._middle[0], budgets - self._middle[1]
        self._logs = np.log([point.loss for point in points])
        found = [least_squares(self._residuals, self._start(*start), x_scale="jac") for start in _STARTS]
        self._best = min(found, key=lambda one: float(one.cost))

    @property
    def scatter(self) -> float:
        """The standard deviation of a point around its law, relative."""
        return math.sqrt(2 * float(self._best.cost) / self._freedom)

    def law(self, arm: str) -> Law:
        """Return an arm's law."""
        values, own = self._best.x, 1 + OWN * self.arms.index(arm)
        of_size, size_exponent, of_tokens, tokens_exponent = (float(value) for value in values[own : own + OWN])
        return Law(
            math.exp(values[0]),
            math.exp(of_size + size_exponent * self._middle[0]),
            size_exponent,
            math.exp(of_tokens + tokens_exponent * self._middle[1]),
            tokens_exponent,
        )

    def above(self, arm: str, bar: str, parameters: float, tokens: float) -> Above:
        """Return how far an arm's curve is above a bar's at a size and budget."""
        places = np.full(2, math.log(parameters) - self._middle[0]), np.full(2, math.log(tokens) - self._middle[1])
        which = np.array([self.arms.index(arm), self.arms.index(bar)])

        def difference(values: Floats) -> float:
            one, other = _log_losses(values, which, *places)
            return float(one - other)

        best, jacobian = self._best.x, self._best.jac
        mean = difference(best)
        if np.linalg.cond(jacobian) > _SINGULAR:
            return Above(math.expm1(mean), None)
        step = 1e-6 * np.maximum(1.0, np.abs(best))
        moves = zip(np.diag(step), step, strict=True)
        slope = np.array([(difference(best + move) - difference(best - move)) / (2 * each) for move, each in moves])
        covariance = np.linalg.inv(jacobian.T @ jacobian) * self.scatter**2
        half = float(t.ppf((1 + CONFIDENCE) / 2, self._freedom)) * math.sqrt(float(slope @ covariance @ slope))
        return Above(math.expm1(mean), (math.expm1(mean - half), math.expm1(mean + half)))

    def _residuals(self, values: Floats) -> Floats:
        return _log_losses(values, self._arm, *self._places) - self._logs

    def _start(self, share: float, exponent: float) -> Floats:
        """Begin with a floor of a share of the least loss, and halves of the rest above it."""
        floor = share * math.exp(float(self._logs.min()))
        rest = math.log((math.exp(float(self._logs.mean())) - floor) / 2)
        return np.array([math.log(floor), *([rest, exponent, rest, exponent] * len(self.arms))])


def _log_losses(values: Floats, arms: NDArray[np.int64], sizes: Floats, budgets: Floats) -> Floats:
    """Return the laws' losses, as logarithms; ``values``: log E, and of each arm log A, alpha, log B, beta about the middle."""
    own = values[1:].reshape(-1, OWN)[arms]
    parts = np.exp(own[:, 0] - own[:, 1] * sizes) + np.exp(own[:, 2] - own[:, 3] * budgets)
    return np.asarray(np.log(np.exp(values[0]) + parts))


def spread(experiment: Experiment) -> Experiment:
    """Return the experiment that plays each arm at all places of the grid, each as an arm; itself where there are no curves."""
    if experiment.curves is None:
        return experiment
    arms = {
        _name(name, place): arm.model_copy(update={"settings": arm.settings | place})
        for name, arm in experiment.arms.items()
        for place in experiment.curves.places()
    }
    return experiment.model_copy(update={"arms": arms, "bars": [], "curves": None})


def points(experiment: Experiment, results: Results) -> list[ArmPoint]:
    """Return the points that have been played, arm by arm and place by place."""
    found: list[ArmPoint] = []
    assert experiment.curves is not None
    for name in experiment.arms:
        for place in experiment.curves.places():
            losses = results.losses(_name(name, place))
            if losses:
                settings = experiment.settings_of(name, 0, place)
                found.append(ArmPoint(name, parameters_of(settings), settings.tokens, float(np.mean(list(losses.values())))))
    return found


def parameters_of(settings: RunSettings) -> int:
    """Return the parameters of the built-in task's model."""
    task = settings.task
    shape = gpt.Shape(task.layers, task.width, task.heads, task.context)
    tree = jax.eval_shape(partial(gpt.init, shape=shape), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def sentences(experiment: Experiment, fit: ScalingFit) -> list[str]:
    """Say of each arm how far its curve is above each bar's where the curves are extrapolated to."""
    curves = experiment.curves
    assert curves is not None
    said: list[str] = []
    where = f"at {curves.parameters:.3g} parameters and {curves.tokens:.3g} tokens, by the curves"
    for arm in fit.arms:
        for bar in experiment.bars:
            if arm not in experiment.bars:
                above = fit.above(arm, bar, curves.parameters, curves.tokens)
                low, high = above.interval or (math.nan, math.nan)
                between = (
                    f"95 % interval {100 * low:+.1f} to {100 * high:+.1f} %"
                    if above.interval
                    else "the points tell no interval"
                )
                said.append(f"{arm} above {bar} {where}: {100 * above.mean:+.1f} % ({between}).")
    return said


def rows(fit: ScalingFit) -> list[list[str]]:
    """Return the table of the laws, one an arm, as :data:`HEAD` names its columns."""
    made: list[list[str]] = []
    for arm in fit.arms:
        law = fit.law(arm)
        constants = [law.floor, law.of_size, law.size_exponent, law.of_tokens, law.tokens_exponent]
        made.append([arm, *(f"{constant:.3g}" for constant in constants)])
    return made


def _name(arm: str, place: Mapping[str, int]) -> str:
    return f"{arm}: " + ", ".join(f"{name} {value}" for name, value in place.items())
