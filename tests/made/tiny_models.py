"""Tiny models of ``transformers`` with random weights, and conversations, made where a test runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_learner.chats import tiny

VOCABULARY = 512


def libraries() -> tuple[Any, Any]:
    """Return PyTorch and transformers, or skip the test."""
    reason = "torch and transformers are not installed: make torch"
    return pytest.importorskip("torch", reason=reason), pytest.importorskip("transformers", reason=reason)


def write_llama(folder: Path, *, tied: bool = True, seed: int = 0, width: int = 32) -> Path:
    """Write a Llama of two layers with a tokenizer and a chat template, and return its folder."""
    torch, transformers = libraries()
    tiny.write_tokenizer(folder, VOCABULARY)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_chats(folder: Path, count: int = 300) -> Path:
    """Write conversations, and return their file."""
    file = folder / "chats.jsonl"
    tiny.write_chats(file, count)
    return file
