"""Files beside the weights of an exported folder: the tokenizer and a model card. An adapter is merged into its base."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import SettingsError
from diloco_ops.reading.asking import ask
from diloco_ops.reading.run_reader import RunReader
from diloco_ops.up.environment import learner_environment
from diloco_ops.weights.weights_file import Precision, Weights
from diloco_report.units import count

CARD = "README.md"  # a repository of the hub shows it
DTYPE_KEYS = ("dtype", "torch_dtype")  # of a config.json: transformers loads the weights in this type
LICENCE = re.compile(r"^license(?:_name|_link)?: .*$", re.MULTILINE)
MAX_CARD = 1 << 20  # bytes of a base model's card that are read


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a run's task states about its model for Hugging Face's libraries; None where it does not."""

    names: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    adapter_config: dict[str, Any] | None = None
    files: Mapping[str, str] | None = None  # by name: the path of a file that belongs beside the weights


def facts_of(seen: RunReader) -> ModelFacts:
    """Return what a run's task says; raise as :func:`diloco_ops.reading.asking.ask` does."""
    request = {"settings": seen.run.created.model_dump(), "data": seen.directory.data}
    return ModelFacts(**ask("hugging_face", request, learner_environment(0, 1, None)))


def config_in(config: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Return a ``config.json`` whose type of weights, if it names one, is that of the file: transformers goes by it."""
    return {key: precision if key in DTYPE_KEYS else value for key, value in config.items()}


@contextmanager
def with_companions(
    folder: Path, weights: AbstractContextManager[Weights], seen: RunReader, said: ModelFacts, kind: str
) -> Iterator[Weights]:
    """Write weights into a folder, and then the files that belong beside them. ``kind`` of folder: ``hf`` or ``peft``.

    Raises:
        OSError: they cannot be written.
    """
    with weights as written:
        yield written
    for name, source in (said.files or {}).items():
        if Path(name).name == name:
            shutil.copyfile(source, folder / name)
    if said.files is not None:
        (folder / CARD).write_text(_card(seen, said, kind), encoding="utf-8")


@contextmanager
def merged(
    folder: Path, seen: RunReader, adapter: AbstractContextManager[Weights], adapter_folder: Path, precision: Precision
) -> Iterator[Weights]:
    """Write an adapter into a folder of its own, and then the model with the adapter merged into it into ``folder``.

    The whole model is in memory for that, as transformers has it.

    Raises:
        ServiceFailed: the base cannot be loaded, or the adapter is none of it.
        OSError: they cannot be written.
    """
    try:
        with adapter as written:
            yield written
        request = {
            "settings": seen.run.created.model_dump(), "data": seen.directory.data, "adapter": str(adapter_folder),
            "out": str(folder), "precision": precision,
        }  # fmt: skip
        ask("causal_lm.merging", request, learner_environment(0, 1, None))
    finally:
        shutil.rmtree(adapter_folder, ignore_errors=True)


def check_mergeable(precision: Precision) -> None:
    """Find out that a merged model can be written in a precision.

    Raises:
        SettingsError: it cannot.
    """
    if precision == "float16":
        raise SettingsError("--precision float16: a merged adapter is written as float32 or bfloat16")


def _card(seen: RunReader, said: ModelFacts, kind: str) -> str:
    """Return the model card: what the model was made of, and by which run. It names no path of this machine."""
    run, task = seen.run, seen.run.created.task
    base = str(task.options.get("model", ""))
    is_path = Path(base).is_absolute() or Path(base).is_dir()
    head = ["library_name: " + ("peft" if kind == "peft" else "transformers"), "tags: [decoupled-diloco]"]
    if base and not is_path:
        head.insert(0, f"base_model: {base.partition('@')[0]}")
    head += _licence_of(said)
    rank = task.options.get("lora")
    how = f"an adapter of rank {rank}" + ("" if kind == "peft" else ", merged into the model") if rank else "all weights"
    sources = {} if task.mix is None else task.mix.sources
    data = ", ".join(f"{name} ({count(source.tokens)} tokens an epoch)" for name, source in sources.items()) or "not recorded"
    rows = {
        "base model": Path(base).name if is_path else base,
        "trained": how,
        "data": data,
        "token budget": count(run.created.tokens),
        "learners": str(run.created.learners),
        "run": f"{run.name}, identity {run.identity.hex()}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return "\n".join(
        ["---", *head, "---", "", f"# {run.name}", "", "Trained with Decoupled DiLoCo.", "", "| | |", "|---|---|", table, ""]
    )


def _licence_of(said: ModelFacts) -> list[str]:
    """Return the lines about its licence in the base model's card: a model that was made of it is bound by them."""
    config = next(iter((said.files or {}).values()), None)
    card = None if config is None else Path(config).parent / CARD
    if card is None or not card.is_file() or card.stat().st_size > MAX_CARD:
        return []
    parts = card.read_text(encoding="utf-8", errors="replace").split("---", 2)
    return LICENCE.findall(parts[1]) if len(parts) == 3 and not parts[0].strip() else []
