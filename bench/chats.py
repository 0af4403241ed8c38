"""Conversations as data: how fast tokens are made of them once, and how fast packed rows are read, by processor time.

python bench/chats.py                       # 8,000 conversations, rows of 1,024 tokens; a minute
python bench/chats.py --count 500 --json

The turns are passages of Python's standard library, with the tiny tokenizer. *marked*: the chat template marks the assistant's
turns. *found*: it does not, so they are found by rendering parts of each conversation. *trained*: tokens that the fastest
example, ``own_model``, computes in a second. Target: rows are read at least twice as fast.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness.console import Bench, Result, Script, folder
from harness.host import machine

from diloco.settings.run import TaskSettings
from diloco_learner.chats import tiny
from diloco_learner.chats.chats import Chats
from diloco_learner.text import text_files

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

TARGET = 2.0
CHARACTERS = (40, 400)  # of a turn
BATCHES = 500
STEPS, BATCH_OF_MODEL = 50, 512  # of own_model, which is fastest in large batches
FOUND = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count: int) -> Iterator[list[dict[str, str]]]:
    """Yield conversations. Each has one to three questions with their answers."""
    drawn = random.Random(0)
    texts = [path.read_text(errors="replace") for path, size in text_files(None)[:100] if size > CHARACTERS[1]]

    def passage() -> str:
        text = drawn.choice(texts)
        at = drawn.randrange(len(text) - CHARACTERS[1] + 1)
        return "#" + text[at : at + drawn.randint(*CHARACTERS)]

    for _ in range(count):
        turns = drawn.choice((2, 4, 6))
        yield [{"role": ("user", "assistant")[turn % 2], "content": passage()} for turn in range(turns)]


def read(chats: Chats) -> float:
    """Return the tokens of rows that are read in a second of processor time, the prefetching thread's included."""
    batches = chats.batches(0, 2, 0, 0)
    next(batches)
    used_s = time.process_time()
    for _ in range(BATCHES):
        next(batches)
    return BATCHES * chats.batch * chats.context / (time.process_time() - used_s)


def trained() -> float:
    """Return the tokens that the fastest example computes in a second of processor time."""
    import own_model

    task = own_model.make(TaskSettings(batch=BATCH_OF_MODEL), None)
    params = task.init(jax.random.key(0))
    step: Any = jax.jit(jax.grad(task.loss))
    batch = np.asarray(next(task.batches(0, 1, 0, 0)))
    jax.block_until_ready(step(params, batch))
    used_s = time.process_time()
    for _ in range(STEPS):
        jax.block_until_ready(step(params, batch))
    return float(STEPS * task.tokens_per_batch / (time.process_time() - used_s))


def measure(*, count: int = 8000, context: int = 1024, batch: int = 8) -> Result:
    """Make and read conversations with both kinds of templates."""
    rows: list[dict[str, Any]] = []
    with folder() as root:
        tiny.write_tokenizer(root / "tokenizer")
        data, template = root / "chats.jsonl", root / "found.jinja"
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in conversations(count)))
        template.write_text(FOUND)
        given: dict[str, Any] = {
            "tokenizer": root / "tokenizer",
            "context": context,
            "batch": batch,
            "cache_dir": root / "cache",
        }
        data_of = (TaskSettings(), str(data))
        tiny.write_chats(root / "few.jsonl", 40)
        Chats(TaskSettings(), str(root / "few.jsonl"), **given)  # imports transformers
        for name, file in (("marked", None), ("found", str(template))):
            used_s = time.process_time()
            chats = Chats(*data_of, template=file, **given)
            made_s = time.process_time() - used_s
            tokens = sum(source.counts.training.tokens for source in chats.sources.values())
            filled = [source.training.rows.counts for source in chats.sources.values()]
            share = sum(each.tokens for each in filled) / (context * sum(each.rows for each in filled))
            rows.append({"name": name, "tokens": tokens, "made": tokens / made_s, "read": read(chats), "filled": share})
    rate = trained()
    least = min(row["read"] for row in rows)
    return {"rows": rows, "trained": rate, "ratio": least / rate, "passed": least >= TARGET * rate, "machine": machine()}


def show(result: Result) -> None:
    for row in result["rows"]:
        print(
            f"{row['name']:7} {row['tokens'] / 1e6:6.2f}M tokens, made at {row['made'] / 1e6:.2f}M a second of processor time, "
            f"read at {row['read'] / 1e6:.2f}M; rows are {100 * row['filled']:.1f} % full"
        )
    rate, ratio = result["trained"] / 1e6, result["ratio"]
    print(f"own_model trains on {rate:.2f}M, and rows are read {ratio:.1f} times as fast; target {TARGET}")


SCRIPT = Script(__doc__, Bench(measure, show))

if __name__ == "__main__":
    SCRIPT.run()
