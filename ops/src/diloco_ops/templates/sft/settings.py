"""The settings of a run: docs/settings.md has all of them."""

from pathlib import Path

MODEL = str(Path(__file__).resolve().parent / "model")  # any folder or name of a causal language model of transformers

LEARNERS = 2
TOKENS = 150_000
SETTINGS = {
    "fragments.count": 6,
    "round.steps": 12,
    "round.overlap_steps": 4,
    # of a model that begins with random values; a pretrained one takes 2e-5, and an adapter on it 2e-4
    "inner.optimizer": "adamw",
    "inner.learning_rate": 0.004,
    "task.context": 128,
    "task.batch": 8,
    "task.options.model": MODEL,
    "task.options.prompts": ["What is two plus three?", "Which colour has snow?"],
    # "task.options.lora": 16,  # an adapter of this rank, in place of all weights
}
