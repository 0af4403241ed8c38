"""Make what this project begins with: a small Llama with random weights, its tokenizer, and conversations.

Put a model and a file of conversations of your own in their place (settings.py, task.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from diloco_learner.chats import tiny

FOLDER = Path(__file__).parent
VOCABULARY = 512


def main() -> None:
    model, chats = FOLDER / "model", FOLDER / "chats.jsonl"
    tiny.write_tokenizer(model, VOCABULARY)
    tiny.write_chats(chats, count=4000)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(model)
    print(f"{model.name}: {made.num_parameters() / 1e6:.2f} million parameters; {chats.name}: 4000 conversations")


if __name__ == "__main__":
    main()
