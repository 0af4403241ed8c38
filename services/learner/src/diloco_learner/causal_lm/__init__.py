"""A built-in task for causal language models of ``transformers``: ``diloco up --model PATH-OR-NAME --data chats.jsonl``.

It continues the pretraining of a model on text, fine-tunes all of it on conversations, or trains an adapter (LoRA) on a frozen
base. The names in this module import neither PyTorch nor ``transformers``.
"""

from __future__ import annotations

from typing import Any

from diloco.settings.run import TaskSettings
from diloco_learner.causal_lm.options import CausalLmOptions as CausalLmOptions


def make(settings: TaskSettings, data: str | None, options: CausalLmOptions) -> Any:
    """Return the :class:`diloco_learner.causal_lm.lm_task.CausalLm` that ``diloco up --model`` names.

    Raises:
        SettingsError: the model cannot be opened.
        AdmissionError: its tokenizer is not the run's.
    """
    from diloco_learner.causal_lm.lm_task import CausalLm

    return CausalLm(settings, data, options)
