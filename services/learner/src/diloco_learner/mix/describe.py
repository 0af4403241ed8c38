"""``python -m diloco_learner.mix.describe``: prepare a mix of data, and describe it.

Reads ``{"settings": ..., "data": ...}`` from stdin: a run's settings and the path of a ``mix.toml``. The last line on stdout is
a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco_learner.mix.mix import Mix, MixSource

BATCHES = 200  # that the speed is measured with


def describe(settings: RunSettings, data: str) -> dict[str, Any]:
    """Return a mix's sources, vocabulary, speed and first window.

    Raises:
        SettingsError, DataError, AdmissionError: as :class:`~diloco_learner.mix.mix.Mix`; or a source ends before the run does.
    """
    mix = Mix(settings.task, data, LearnerSettings(name="data").cache_dir)
    mix.check_epochs(settings)
    batches = mix.batches(0, settings.learners, settings.seed, 0)
    first = next(batches)
    mix.validation()
    began_s = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    elapsed_s = time.perf_counter() - began_s
    batch_tokens = mix.batch * mix.context
    epochs = settings.with_mix(mix.settings).epochs(settings.tokens)
    whole = sum(source.weight for source in mix.sources.values())
    return {
        "sources": {name: _source(source, whole) | {"epochs": epochs[name]} for name, source in mix.sources.items()},
        "vocabulary": mix.vocabulary,
        "tokenizer": None if mix.tokenizer.file is None else str(mix.tokenizer.file),
        "batch_tokens": batch_tokens,
        "tokens_per_s": BATCHES * batch_tokens / elapsed_s,
        "sample": mix.decode(first[0]),
        "mix": mix.settings.model_dump(),
    }


def _source(source: MixSource, whole: int) -> dict[str, Any]:
    tokens, held_out = source.stored.training.size, source.stored.held_out.size
    characters = source.stored.characters
    return {
        "kind": source.table.kind,
        "documents": source.stored.documents,
        "tokens": tokens,
        "held_out": held_out,
        "characters_per_token": characters / (tokens + held_out) if characters else None,
        "share": source.weight / whole,
    }


def _main() -> None:
    request = json.load(sys.stdin)
    print(json.dumps(describe(parse(RunSettings, request["settings"], "the run"), request["data"])))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
