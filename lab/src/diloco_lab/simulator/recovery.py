"""The downtime of a recovering learner by the link that it reads over (arXiv 2604.21428, appendix E.3 and figure 12).

A learner that comes back fetches ``values`` numbers for each parameter: the parameter and the inner optimizer's moments, as of
one syncer step. Meanwhile the run goes on, and in ``steps`` (H) steps brings a version of each fragment over the same link. Of
a link that carries ``rate`` bits a step for each parameter ``rate - version_bits / H`` are left for the state. The learner
has recovered after ``values * value_bits / (rate - version_bits / H)`` steps. The first H steps count as free: the paper bounds
a recovery by H steps, within which any learner is refreshed. The downtime is the time beyond them.

The paper says that there is none while ``3N / H`` parameters a step fit, and that up to six steps a copy of the model are free.
With its H of 24 both hold together where the versions count, N parameters in H steps: ``(3N + N) / 24`` a step is a copy in six
steps. Without them it would be eight. That the versions are what makes the difference is this project's reading: the figure's
model is unpublished.

Not in the model: delay, the peer's own link, lost packets, and the time to begin the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco_lab.bandwidth import BITS_PER_GBIT, gbit_text
from diloco_lab.planning.island_plan import KEYFRAME_BYTES, MOMENT_BYTES, Optimizer

# The links of a table, each by the steps in which it carries the model's parameters once, in COPY_BITS each.
COPY_STEPS = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
COPY_BITS = 16
VALUE_BITS = 32  # of what a member of this project sends: the log's keyframes and a peer's moments


@dataclass(frozen=True, kw_only=True)
class RecoveryNeeds:
    """A recovery's needs, for each parameter of the model.

    Attributes:
        values: numbers of the state that is fetched, of ``value_bits`` each.
        version_bits: of a version, which comes once in ``steps`` steps.
        steps: H.
    """

    values: int = 3
    value_bits: int = 16
    version_bits: int = 16
    steps: int = 24

    def __post_init__(self) -> None:
        for name, most in (("values", 64), ("value_bits", 64), ("version_bits", 64), ("steps", 100_000)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise SettingsError(f"{name} = {value!r}, expected a whole number from 1 to {most}")

    @property
    def free_rate(self) -> float:
        """Return the least rate without downtime, in bits a step for each parameter."""
        return (self.values * self.value_bits + self.version_bits) / self.steps

    def took_steps(self, rate: float) -> float:
        """Return the steps until a learner is in, by a link of ``rate`` bits a step for each parameter.

        Infinite where versions alone fill the link: such a learner never catches up.

        Raises:
            SettingsError: the rate is no number above 0.
        """
        if not (math.isfinite(rate) and rate > 0):
            raise SettingsError(f"a link of {rate!r} bits a step for each parameter: expected a number above 0")
        left = rate - self.version_bits / self.steps
        return self.values * self.value_bits / left if left > 0 else math.inf

    def downtime_steps(self, rate: float) -> float:
        """Return the steps that a recovery takes beyond the H free ones."""
        return max(0.0, self.took_steps(rate) - self.steps)


PUBLISHED = RecoveryNeeds()


def default_run(optimizer: Optimizer = "muon") -> RecoveryNeeds:
    """Return a default run's recovery: value and outer momentum from the log, the optimizer's moments from a peer."""
    settings = run_settings()
    values = 8 * (KEYFRAME_BYTES + MOMENT_BYTES[optimizer]) // VALUE_BITS
    return RecoveryNeeds(
        values=values, value_bits=VALUE_BITS, version_bits=settings.codec.record_bits, steps=settings.round.steps
    )


NAMED = (("published", PUBLISHED), ("default run", default_run()))


@dataclass(frozen=True, kw_only=True)
class RecoveryRow:
    """A link, and what a recovery over it takes. ``took_steps`` and ``downtime_steps`` are None where it never ends."""

    name: str
    copy_steps: float
    bits_per_s: float  # for each parameter
    gbit_per_s: float
    took_steps: float | None
    downtime_steps: float | None


def rows(
    named: Iterable[tuple[str, RecoveryNeeds]], parameters: float, step_s: float, copy_steps: Sequence[float] = COPY_STEPS
) -> list[RecoveryRow]:
    """Return the rows of all recoveries over links that carry a copy of the parameters, 16 bits each, in so many steps.

    Raises:
        SettingsError: a number is not above 0.
    """
    for what, value in (("parameters", parameters), ("step_s", step_s), *(("copy_steps", each) for each in copy_steps)):
        if not (math.isfinite(value) and value > 0):
            raise SettingsError(f"{what} = {value!r}, expected a number above 0")
    found = []
    for name, recovery in named:
        for copy in copy_steps:
            rate = COPY_BITS / copy
            took = recovery.took_steps(rate)
            ends = math.isfinite(took)
            found.append(
                RecoveryRow(
                    name=name,
                    copy_steps=copy,
                    bits_per_s=rate / step_s,
                    gbit_per_s=rate / step_s * parameters / BITS_PER_GBIT,
                    took_steps=took if ends else None,
                    downtime_steps=recovery.downtime_steps(rate) if ends else None,
                )
            )
    return found


def table(found: Sequence[RecoveryRow]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of a table: a row for each link, two columns for each recovery."""
    names = list(dict.fromkeys(row.name for row in found))
    head = ["steps a copy", "bit/s a parameter", "Gbit/s"]
    head += [heading for name in names for heading in (f"{name}: in after, steps", "downtime, steps")]
    made = []
    for copy in dict.fromkeys(row.copy_steps for row in found):
        link = [row for row in found if row.copy_steps == copy]
        cells = [f"{copy:g}", f"{link[0].bits_per_s:.3g}", gbit_text(link[0].gbit_per_s)]
        made.append([*cells, *(text for row in link for text in (_steps(row.took_steps), _steps(row.downtime_steps)))])
    return head, made


def _steps(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"
