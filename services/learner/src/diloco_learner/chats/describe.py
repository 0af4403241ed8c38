"""``python -m diloco_learner.chats.describe``: make conversations ready, and say what they hold.

Reads ``{"settings": ..., "data": ..., "tokenizer": ..., "template": ...}`` from stdin: a run's settings, the path of the data,
the folder of the tokenizer, and the file of a chat template or null. The last line on stdout is a JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np

from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco_learner.chats import stored
from diloco_learner.chats.chats import IGNORED, Chats, ChatSource, PackedRows
from diloco_learner.mix.describe import BATCHES

ROWS = 10  # that are shown


def describe(settings: RunSettings, data: str, tokenizer: str, template: str | None) -> dict[str, Any]:
    """Return sources, lengths of conversations, speed and first rows.

    ``lengths``: pairs of a power of two and the number of conversations of at most so many tokens, and more than half.

    Raises:
        SettingsError, DataError, AdmissionError: as :class:`~diloco_learner.chats.chats.Chats`; or a source ends too early.
    """
    task = settings.task
    cache_dir = LearnerSettings(name="data").cache_dir
    chats = Chats(
        task, data, tokenizer=tokenizer, context=task.context, batch=task.batch, template=template, cache_dir=cache_dir
    )
    chats.check_epochs(settings)
    batches = chats.batches(0, settings.learners, settings.seed, 0)
    kept = list(itertools.islice(batches, -(-ROWS // task.batch)))
    began_s, trained = time.perf_counter(), 0
    for batch in itertools.islice(batches, BATCHES):
        trained += int((batch["labels"] != IGNORED).sum())
    elapsed_s = time.perf_counter() - began_s
    epochs = settings.with_mix(chats.settings).epochs(settings.tokens)
    whole = sum(source.weight for source in chats.sources.values())
    return {
        "sources": {name: _source(source, whole) | {"epochs": epochs[name]} for name, source in chats.sources.items()},
        "vocabulary": chats.vocabulary,
        "tokenizer": str(chats.tokenizer.folder),
        "context": task.context,
        "batch_tokens": trained / BATCHES,
        "tokens_per_s": BATCHES * task.batch * task.context / elapsed_s,
        "lengths": _lengths(chats),
        "rows": [_row(chats, batch, row) for batch in kept for row in range(task.batch)][:ROWS],
        "notes": chats.notes(),
        "mix": chats.settings.model_dump(),
    }


def _source(source: ChatSource, whole: int) -> dict[str, Any]:
    rows, sides = source.training.rows.counts, (source.training, source.held_out)
    lost = {each: sum(getattr(side.rows.counts, each) for side in sides) for each in ("cut", "divided", "dropped", "lost")}
    return {
        "conversations": source.counts.training.documents,
        "held_out": source.counts.held_out.documents,
        "tokens": source.counts.training.tokens,
        "trained": rows.trained,
        "rows": rows.rows,
        "filled": rows.tokens / (rows.rows * source.training.context),
        "lines": source.counts.lines,
        "bad": source.counts.bad,
        "named": source.counts.named,
        "share": source.weight / whole,
        **lost,
    }


def _lengths(chats: Chats) -> list[tuple[int, int]]:
    lengths = stored.lengths(side.chats for source in chats.sources.values() for side in (source.training, source.held_out))
    bins, counts = np.unique(np.ceil(np.log2(lengths)).astype(int), return_counts=True)
    found = dict(zip(bins.tolist(), counts.tolist(), strict=True))
    return [(1 << each, found.get(each, 0)) for each in range(int(bins[0]), int(bins[-1]) + 1)]


def _row(chats: Chats, batch: PackedRows, row: int) -> list[dict[str, Any]]:
    """Return the parts of a row in order: the number of their document, their text, and whether it is learned."""
    ids, learned, documents = batch["input_ids"][row], batch["labels"][row] != IGNORED, batch["documents"][row]
    length = int((documents > 0).sum())
    edges = np.flatnonzero((np.diff(documents[:length]) != 0) | (np.diff(learned[:length]) != 0)) + 1
    return [
        {
            "document": int(documents[begin]),
            "tokens": end - begin,
            "learned": bool(learned[begin]),
            "text": chats.decode(ids[begin:end]),
        }
        for begin, end in itertools.pairwise([0, *edges.tolist(), length])
    ]


def _main() -> None:
    request = json.load(sys.stdin)
    settings = parse(RunSettings, request["settings"], "the run")
    print(json.dumps(describe(settings, request["data"], request["tokenizer"], request["template"])))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
