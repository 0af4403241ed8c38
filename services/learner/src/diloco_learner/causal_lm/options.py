"""The options of the built-in task for causal language models, as a run's ``task.options`` have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

EVERY_LINEAR = "all-linear"  # peft's word for all linear layers of a model except its head


@dataclass(frozen=True)
class CausalLmOptions:
    """The model, and which part of it is trained in which form. ``diloco up --model`` sets these.

    Attributes:
        model: a folder, or NAME or NAME@REVISION of the hub. A learner may name a place of its own (setting ``model``).
        tokenizer: hash of the tokenizer that all learners have; empty: it is not compared.
        dtype: type of the weights in a step. ``4bit`` is for a frozen base alone.
        lora: rank of the adapter; 0: all weights are trained.
        lora_alpha: the adapter's scale, times its rank; 0: twice the rank.
        lora_dropout: share of the adapter's inputs that are dropped in training.
        lora_targets: ends of the names of the adapted layers, or ``all-linear``.
        recompute: activations are computed again in the backward pass, which takes less memory and a third more time.
        micro_batch: rows of a step whose activations are in memory at a time; they are computed twice. 0: all rows, once.
        template: file with a chat template in place of the tokenizer's own.
        prompts: samples continue these.
    """

    model: str
    tokenizer: str = ""
    dtype: Literal["float32", "bfloat16", "4bit"] = "float32"
    lora: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = (EVERY_LINEAR,)
    recompute: bool = False
    micro_batch: int = 0
    template: str = ""
    prompts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: name a folder, or a model of the hub")
        if self.micro_batch < 0:
            raise ValueError(f"micro_batch = {self.micro_batch}: expected a number of rows, or 0 for all of a step")
        if self.lora < 0:
            raise ValueError(f"lora = {self.lora}: expected the rank of the adapter, or 0")
        if self.dtype == "4bit" and not self.lora:
            raise ValueError("dtype = 4bit: a base of 4 bits is frozen, so an adapter has to be trained on it: set lora = 16")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout = {self.lora_dropout}: expected 0 or more, and less than 1")
        if not 0 <= self.lora_alpha < math.inf:
            raise ValueError(f"lora_alpha = {self.lora_alpha}: expected a finite number above 0, or 0 for twice the rank")
        if not self.lora_targets or (EVERY_LINEAR in self.lora_targets and len(self.lora_targets) > 1):
            raise ValueError(f"lora_targets = {list(self.lora_targets)}: expected names of layers, or {EVERY_LINEAR} alone")

    @property
    def scale(self) -> float:
        """The adapter's scale, times its rank."""
        return self.lora_alpha or 2.0 * self.lora
