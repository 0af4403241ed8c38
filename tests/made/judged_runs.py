"""Runs in virtual time of learners that may lie, be slow, be late, or have data of their own; and what became of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from structlog.testing import capture_logs

from diloco.core.learner.delta import VersionWrite
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.testing import VirtualRun
from diloco.testing.toy import ToyLearner
from diloco.testing.virtual_run import RUN
from diloco.testing.world import VirtualProcess

Vector = NDArray[np.float32]

WIDTH, SIZE = 16, 256
TENSORS = (
    *(TensorSpec(f"layer{i}", (WIDTH, WIDTH)) for i in range(5)),
    TensorSpec("embed", (WIDTH, WIDTH), embedding=True),
)
OWN_ROWS = 4  # the last rows of the embedding: only words of one learner's alphabet
RATE, NOISE = 0.1, 0.05
LARGEST = np.float32(1e12)  # of a lie: what is not finite is refused for that


@dataclass(frozen=True)
class Kind:
    """What is special of a learner.

    ``lie``: its offers state its displacement times that, as long as ``until_step`` is not reached. ``alone``: it alone has
    data of the embedding's last rows. ``begins_s``: when it joins.
    """

    lie: float = 1.0
    until_step: float = float("inf")
    step_s: float = 0.1
    alone: bool = False
    begins_s: float = 0.0


class Pupil(ToyLearner):
    """A learner that learns values by gradient descent from noisy samples; the truth is the same for all."""

    tensors = TENSORS

    def __init__(self, process: VirtualProcess, kind: Kind, *, alone: bool, tokens: int) -> None:
        """``alone``: one learner of the run has rows for itself."""
        super().__init__(process, RUN, step_s=kind.step_s, tokens=tokens, founds=True)
        self.kind, self.alone, self.has_rows = kind, alone, kind.alone or not alone
        self.bases: dict[int, Vector] = {}
        self.taken = 0

    def step(self, share: int, batch: int) -> float:
        draw = np.random.default_rng((share, batch))
        self.taken += 1
        for index, values in enumerate(self.values):
            error = truth(index, alone=self.alone) - values + NOISE * draw.normal(size=values.size).astype(np.float32)
            if index == EMBEDDING and not self.has_rows:
                error[-OWN_ROWS * WIDTH :] = 0
            values += np.float32(RATE) * error
        return 1.0

    def offered(self, index: int) -> Vector:
        values = super().offered(index)
        if self.kind.lie == 1.0 or self.taken >= self.kind.until_step:
            return values
        base = self.bases.get(index, np.zeros_like(values))
        with np.errstate(over="ignore"):
            return np.clip(base + np.float32(self.kind.lie) * (values - base), -LARGEST, LARGEST)

    def _write(self, index: int, write: VersionWrite) -> None:
        self.bases[index] = write.theta.copy()
        super()._write(index, write)


[EMBEDDING] = [each.index for each in build_map(TENSORS, len(TENSORS)).fragments if each.embedding]


def truth(index: int, *, alone: bool = False) -> Vector:
    """Return what is to be learnt of a fragment; rows that one learner has ``alone`` are far from where they begin."""
    values = np.random.default_rng(index).normal(size=SIZE)
    if alone and index == EMBEDDING:
        values[-OWN_ROWS * WIDTH :] *= 30
    return values.astype(np.float32)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        distance: mean squared error of the model against the truth, relative to that of zeros.
        own_rows: the same of the rows that one learner alone has.
        quarantined, over, suspected: learners that were logged so by any process.
        left_out: how many offers were left out as outliers.
        cut: learners whose offers were cut.
        merged: by learner, its merged tokens in each fragment.
    """

    distance: float
    own_rows: float
    quarantined: list[str]
    over: list[str]
    suspected: list[str]
    left_out: int
    cut: list[str]
    merged: dict[str, NDArray[np.int64]]


class JudgedRun(VirtualRun):
    """A run in virtual time of such learners."""

    logs: Sequence[MutableMapping[str, Any]] = ()

    def of(self, event: str) -> list[str]:
        """Return the learners of all events of this name, each once."""
        entries = [entry for entry in self.logs if entry["event"] == event]
        return sorted({name for entry in entries for name in entry.get("learners", [entry.get("learner", "")])})

    def add(self, name: str, kind: Kind, *, alone: bool, tokens: int = 16) -> None:
        async def serve(process: VirtualProcess) -> None:
            pupil = Pupil(process, kind, alone=alone, tokens=tokens)
            await pupil.serve(partial(self._members.__setitem__, name))

        self._add(name, serve)


def play(
    kinds: Mapping[str, Kind], steps: int = 240, meanwhile: Callable[[JudgedRun], object] | None = None, **changes: Any
) -> Outcome:
    """Play a run of these learners to its end: so many steps of each that is as fast as most.

    ``meanwhile`` is called once all have begun, and may let time pass.
    """
    fast = sum(0.1 / kind.step_s for kind in kinds.values())
    settings: dict[str, Any] = {
        "tokens": int(fast * steps * 16),
        "learners": len(kinds),
        "fragments.count": 6,
        "round.steps": 12,
        "quarantine.factor": 5.0,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    alone = any(kind.alone for kind in kinds.values())
    with capture_logs() as logs, JudgedRun(settings, syncers=2) as run:
        run.logs = logs
        for name, kind in sorted(kinds.items(), key=lambda item: item[1].begins_s):
            if kind.begins_s:
                run.advance(until=lambda begins_s=kind.begins_s: run.now_s >= begins_s)  # type: ignore[misc]
            run.add(name, kind, alone=alone)
        if meanwhile is not None:
            meanwhile(run)
        run.advance()
        bases = [run.base(min(kinds), index) for index in range(len(TENSORS))]
        merged = {name: run.merged(name) for name in kinds}
    errors = [np.square(base - truth(index, alone=alone)) for index, base in enumerate(bases)]
    sizes = [np.square(truth(index, alone=alone)) for index in range(len(bases))]
    rows = slice(-OWN_ROWS * WIDTH, None)
    return Outcome(
        distance=float(sum(map(np.sum, errors)) / sum(map(np.sum, sizes))),
        own_rows=float(errors[EMBEDDING][rows].sum() / sizes[EMBEDDING][rows].sum()),
        quarantined=run.of("learner_quarantined"),
        over=run.of("quarantine_over"),
        suspected=run.of("outliers_suspected"),
        left_out=sum(len(entry["learners"]) for entry in logs if entry["event"] == "offer_outlier"),
        cut=run.of("offers_cut"),
        merged=merged,
    )
