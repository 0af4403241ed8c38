"""Tokens a second of a mix of data, by kind of source, beside those that the default model trains on.

    python bench/data.py

The sources have the text of Python's standard library. A core's tokens a second are by processor time, the prefetching thread's
included. Needs the extra `data`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import pyarrow
from pyarrow import parquet

from diloco.settings.run import TaskSettings
from diloco_learner.mix.mix import Mix
from diloco_learner.task import GptTask
from diloco_learner.text import text_files

TRAIN = "[tokenizer]\ntrain = { vocabulary = 2048 }\n"
STEPS = 10


def main() -> None:
    """Print a line for each kind of source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    settings = TaskSettings()
    print(
        f"windows of {settings.context} tokens, {settings.batch} a batch; load {os.getloadavg()[0]:.1f}; best of {asked.turns}"
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, toml in sources(root, settings).items():
            (root / "mix.toml").write_text(toml)
            began_s, used_s = time.perf_counter(), time.process_time()
            mix = Mix(settings, str(root / "mix.toml"), root / "cache")
            made_s, made_cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
            rates = [rate(mix, asked.batches) for _ in range(asked.turns)]
            core, wall = (max(each) for each in zip(*rates, strict=True))
            tokens = sum(source.stored.training.size for source in mix.sources.values())
            print(
                f"{name:22}  {core / 1e6:6.2f}M tokens/s a core, {wall / 1e6:6.2f}M on the clock; "
                f"{tokens / 1e6:.1f}M tokens made in {made_s:.1f} s, {made_cpu_s:.1f} s of processor time",
                flush=True,
            )
        print(
            f"the default model       {best(lambda: model_rate(settings, root), asked.turns) / 1e6:6.3f}M tokens/s on the clock"
        )


def sources(root: Path, settings: TaskSettings) -> dict[str, str]:
    """Write the texts as files of all kinds, and return the mix of each."""
    texts = [path.read_text(errors="replace") for path, _ in text_files(None)]
    parquet.write_table(pyarrow.table({"text": texts}), root / "texts.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(root / "saved"))
    (root / "mix.toml").write_text(TRAIN + '[sources.a]\nkind = "text"\n')
    tokens = Mix(settings, str(root / "mix.toml"), root / "first cache").sources["a"].stored.training
    for dtype in ("uint16", "uint32"):
        tokens.astype(dtype).tofile(root / f"{dtype}.bin")
    found = {
        "text, bytes": '[sources.a]\nkind = "text"\n',
        "text, BPE": TRAIN + '[sources.a]\nkind = "text"\n',
        "Parquet, BPE": TRAIN + '[sources.a]\nkind = "parquet"\npath = "texts.parquet"\n',
        "Hugging Face, BPE": TRAIN + '[sources.a]\nkind = "huggingface"\npath = "saved"\n',
    }
    for dtype in ("uint16", "uint32"):
        found[f"bin, {dtype}"] = f'vocabulary = 2048\n[sources.a]\nkind = "bin"\npath = "{dtype}.bin"\ndtype = "{dtype}"\n'
    found["four, by weight"] = TRAIN + "".join(
        f'[sources.{kind}]\nkind = "{kind}"\n{path}weight = {weight}\n'
        for weight, (kind, path) in enumerate(
            {
                "text": "",
                "parquet": 'path = "texts.parquet"\n',
                "huggingface": 'path = "saved"\n',
                "bin": 'path = "uint16.bin"\n',
            }.items(),
            1,
        )
    )
    return found


def rate(mix: Mix, count: int) -> tuple[float, float]:
    """Return tokens a second of one share: by processor time, and by the clock."""
    batches = mix.batches(0, 4, 0, 0)
    next(batches)
    began_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    tokens = count * mix.batch * mix.context
    return tokens / (time.process_time() - used_s), tokens / (time.perf_counter() - began_s)


def model_rate(settings: TaskSettings, root: Path) -> float:
    """Return tokens a second of processor time of the built-in model's loss and gradients on bytes, its fastest case."""
    task = GptTask(settings, None, root)
    params = task.init(jax.random.key(0))
    step: Any = jax.jit(jax.grad(task.loss))
    batch = np.asarray(next(task.batches(0, 4, 0, 0)))
    jax.block_until_ready(step(params, batch))
    used_s = time.process_time()
    for _ in range(STEPS):
        jax.block_until_ready(step(params, batch))
    return STEPS * task.tokens_per_batch / (time.process_time() - used_s)


def best(measure: Callable[[], float], turns: int) -> float:
    """Return the largest of some measurements."""
    return max(measure() for _ in range(turns))


if __name__ == "__main__":
    main()
