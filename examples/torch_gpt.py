"""The built-in GPT in PyTorch, with the names and layouts that it has in JAX: learners of both train one model.

PYTHONPATH=examples diloco up --set task.name=torch_gpt:make      # all learners and the evaluator with PyTorch
PYTHONPATH=examples diloco-torch-learner --config learner.toml    # task = "torch_gpt:make": in a run of the built-in model
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from diloco.settings.run import TaskSettings
from diloco_learner.pytorch import Units
from diloco_learner.text import TextData


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / inputs**0.5)
    return layer


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads, hidden, residual = heads, -(-8 * width // 48) * 16, (2 * layers) ** -0.5
        parts = {"norm": nn.RMSNorm(width, 1e-6), "qkv": linear(width, 3 * width), "out": linear(width, width, residual)}
        self.attention = nn.ModuleDict(parts)
        parts = {"norm": nn.RMSNorm(width, 1e-6), "gate_up": linear(width, 2 * hidden), "down": linear(hidden, width, residual)}
        self.mlp = nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def rotated(part: torch.Tensor) -> torch.Tensor:
            first, second = part.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

        qkv = self.attention["qkv"](self.attention["norm"](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.attention["out"](mixed.transpose(1, 2).flatten(2))
        gate, up = self.mlp["gate_up"](self.mlp["norm"](x)).chunk(2, dim=-1)
        return x + self.mlp["down"](functional.silu(gate) * up)


class Gpt(nn.Module):  # type: ignore[misc]
    def __init__(self, settings: TaskSettings) -> None:
        super().__init__()
        width, layers = settings.width, settings.layers
        self.embedding, self.norm = nn.Embedding(256, width), nn.RMSNorm(width, 1e-6)
        self.blocks = nn.ModuleList(Block(width, settings.heads, layers) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.zeros_(self.head.weight)
        frequencies = 10_000.0 ** (-torch.arange(0, width // settings.heads, 2) / (width // settings.heads))
        self.register_buffer("angles", torch.arange(settings.context)[:, None] * frequencies, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, angles = self.embedding(tokens), self.angles[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


class TorchGpt:
    units = Units("byte", "nats per byte")

    def __init__(self, settings: TaskSettings, data: str | None) -> None:
        self.settings, self.data = settings, TextData(settings, data)
        self.tokens_per_batch = settings.batch * settings.context

    def module(self) -> Gpt:
        return Gpt(self.settings)

    def tensors(self, module: Gpt) -> dict[str, torch.Tensor]:
        return {name.removesuffix(".weight").replace(".", "/"): weight for name, weight in module.named_parameters()}

    def loss(self, module: Gpt, windows: Any) -> torch.Tensor:
        tokens = torch.as_tensor(windows, dtype=torch.int64)
        return functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return self.data.batches(share, shares, seed, start)

    def validation(self) -> Sequence[Any]:
        return self.data.validation()

    def is_embedding(self, path: str) -> bool:
        return path == "embedding"

    def matrices(self, path: str) -> int:  # fused in a tensor; Muon takes each by itself
        return {"embedding": 0, "head": 0, "qkv": 3, "gate_up": 2}.get(path.rpartition("/")[2], 1)


def make(settings: TaskSettings, data: str | None) -> TorchGpt:
    """Return the task that `task.name`, or a torch learner's own `task`, names."""
    return TorchGpt(settings, data)
