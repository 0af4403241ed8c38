"""A small convolutional network in PyTorch that tells shapes in noisy images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from images import CLASSES, Images
from torch import nn

from diloco.settings.run import TaskSettings
from diloco_learner.pytorch import Aux


@dataclass(frozen=True)
class Options:
    """Values that `diloco up --task KEY=VALUE` may change."""

    channels: int = 32
    noise: float = 0.5
    batch: int = 64


class Net(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x[:, None]).relu()).relu()
        return self.head(x.mean((2, 3)))


class Task(Images):
    def __init__(self, options: Options) -> None:
        super().__init__(options.batch, options.noise)
        self.options = options

    def module(self) -> Net:
        return Net(self.options.channels)

    def tensors(self, module: Net) -> dict[str, torch.Tensor]:  # kernels as matrices (out, in * 3 * 3): a row is an output unit
        named = {name.replace(".", "/"): parameter.detach() for name, parameter in module.named_parameters()}
        return {path: tensor.flatten(1) if tensor.ndim > 2 else tensor for path, tensor in named.items()}

    def loss(self, module: Net, batch: Any) -> tuple[torch.Tensor, Aux]:
        y = torch.as_tensor(batch["y"], dtype=torch.int64)
        scores = module(torch.as_tensor(batch["x"]))
        return nn.functional.cross_entropy(scores, y), Aux({"accuracy": (scores.argmax(-1) == y).float().mean()})

    def matrices(self, path: str) -> int:  # the head is none for Muon
        return int(path != "head/weight")


def make(settings: TaskSettings, data: str | None, options: Options) -> Task:
    return Task(options)
