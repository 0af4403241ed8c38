"""Toy learners whose offers lie."""

from __future__ import annotations

from functools import partial

import numpy as np
from tests.services.cluster import Cluster
from tests.services.toy import Toy, Vector

from diloco.core.learner.fragment_state import Reader


class Liar:
    """A learner's ``before_step`` that multiplies its outer gradients by ``lie``; None: no longer."""

    def __init__(self, cluster: Cluster, lie: float) -> None:
        self.cluster, self._wrapped = cluster, False
        self.lie: float | None = lie

    def __call__(self, toy: Toy) -> None:
        self.cluster.gate(toy)
        if not self._wrapped and toy.member is not None:
            self._wrapped = True
            submit = toy.member.submit
            toy.member.submit = lambda fragment, reader: submit(  # type: ignore[method-assign]
                fragment, partial(self._read, toy.thetas[fragment], reader)
            )

    def _read(self, base: Vector, reader: Reader) -> Vector:
        return reader() if self.lie is None else base + np.float32(self.lie) * (reader() - base)
