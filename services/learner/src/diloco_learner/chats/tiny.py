"""A tiny tokenizer with a chat template, and tiny conversations, both made here: for projects and tests without a network.

The same arguments make the same files on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

END, BEGIN_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML, with marks around what the assistant says
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message['role'] in ('system', 'user') %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- else %}
{{- raise_exception('role ' + message['role'] + ': expected system, user or assistant') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
VOCABULARY = 512
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS += ["eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"]
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "blood": "red", "the sky": "blue"}
WORDS = ["apple", "river", "stone", "candle", "window", "garden", "silver", "winter", "music", "letter"]
SYSTEM = "You answer in one short sentence."


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Write a tokenizer's files into a folder, as models on the Hugging Face hub have them: byte-level BPE with ChatML.

    It is trained on texts like those that :func:`write_chats` writes.
    """
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, BEGIN_TURN, END_TURN],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{message['role']}\n{message['content']}\n" for chat in chats(2000, seed=0) for message in chat)
    made.train_from_iterator(texts, trainer=trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TURN,
        "pad_token": END,
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_chats(path: Path, count: int, seed: int = 0) -> None:
    """Write conversations as JSON lines of the form ``messages``: sums, colours and spelling, one to three questions each."""
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats(count, seed)))


def chats(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations as lists of messages."""
    drawn = random.Random(seed)
    for _ in range(count):
        messages = [{"role": "system", "content": SYSTEM}] if drawn.random() < 0.3 else []
        for _ in range(drawn.choice((1, 1, 2, 3))):
            question, answer = drawn.choice(QUESTIONS)(drawn)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield messages


def _sum(drawn: random.Random) -> tuple[str, str]:
    a, b = drawn.randrange(9), drawn.randrange(9)
    return f"What is {NUMBERS[a]} plus {NUMBERS[b]}?", f"{NUMBERS[a].capitalize()} plus {NUMBERS[b]} is {NUMBERS[a + b]}."


def _colour(drawn: random.Random) -> tuple[str, str]:
    thing = drawn.choice(sorted(COLOURS))
    return f"Which colour has {thing}?", f"{thing.capitalize()} is {COLOURS[thing]}."


def _spelling(drawn: random.Random) -> tuple[str, str]:
    word = drawn.choice(WORDS)
    return f"How is {word} spelt?", f"It is spelt {'-'.join(word)}."


QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_sum, _colour, _spelling)
