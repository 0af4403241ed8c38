"""The toy regression as a torch task: learners of both train one model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tests.services.toy import NOISE, SAMPLES, TABLE_WIDTH

from diloco.settings.run import TaskSettings


class Model(torch.nn.Module):  # type: ignore[misc]
    """The tensors of :class:`tests.services.toy.Regression`."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(settings.width, settings.width)
        self.table = torch.nn.Parameter(torch.zeros(settings.context, TABLE_WIDTH))


class TorchRegression:
    tokens_per_batch = SAMPLES

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings

    def module(self) -> Model:
        return Model(self.settings)

    def optimizer(self, parameters: list[torch.Tensor], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.5)

    def loss(self, module: Model, batch: Any) -> torch.Tensor:
        x, y, table = (torch.from_numpy(part) for part in batch)
        return (module.linear(x) - y).square().mean() + (module.table - table).square().mean()

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        truth, width = np.random.default_rng(seed), self.settings.width
        weight, bias = truth.normal(size=(width, width)), truth.normal(size=width)
        table = truth.normal(size=(self.settings.context, TABLE_WIDTH))
        for index in itertools.count(start):
            rng = np.random.default_rng((seed, share, index))
            x = rng.normal(size=(SAMPLES, width))
            y = x @ weight.T + bias + NOISE * rng.normal(size=(SAMPLES, width))
            yield tuple(np.float32(part) for part in (x, y, table))

    def is_embedding(self, path: str) -> bool:
        return path == "table"


def make(settings: TaskSettings, data: str | None) -> TorchRegression:
    return TorchRegression(settings)
