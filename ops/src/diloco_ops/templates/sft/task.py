"""Fine-tuning of a causal language model on conversations: the task of `diloco up --model`, open to change."""

from __future__ import annotations

from pathlib import Path

from diloco.settings.run import TaskSettings
from diloco_learner.causal_lm import CausalLmOptions
from diloco_learner.causal_lm.lm_task import CausalLm

CHATS = Path(__file__).parent / "chats.jsonl"


class Task(CausalLm):
    """Override `loss`, `module`, `sample` or `evaluate(self, module)` here: docs/task-api.md has all members."""


def make(settings: TaskSettings, data: str | None, options: CausalLmOptions) -> Task:
    return Task(settings, data or str(CHATS), options)
