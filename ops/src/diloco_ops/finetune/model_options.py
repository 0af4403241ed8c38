"""The options of ``diloco up`` and ``diloco serve`` for a model of ``transformers``, and the settings of a run that they give.

A run's settings say all of it, so that learners elsewhere join with the same model, tokenizer and adapter.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco.storage.model_folder import ALLOW_CODE, ModelFolder, open_model

TASK = "diloco_learner.causal_lm:make"
LONGEST = 1024  # tokens of a row where nothing else is said
LORA_KEYS = ("rank", "targets", "alpha", "dropout")
LORA_FORM = "rank=16,targets=q_proj+v_proj,alpha=32,dropout=0.05"

# The rates at which fine-tuning usually begins. A run's own defaults assume training from scratch.
FULL = {"inner.optimizer": "adamw", "inner.learning_rate": 2e-5, "inner.weight_decay": 0.01}
ADAPTER = {"inner.optimizer": "adamw", "inner.learning_rate": 2e-4, "inner.weight_decay": 0.0}

Model = Annotated[
    str | None,
    typer.Option(help="Train this model of transformers: a folder, or NAME or NAME@REVISION of the hub. With --data."),
]
Lora = Annotated[
    str | None, typer.Option(help=f"With --model: train an adapter on the frozen model, such as {LORA_FORM}. Needs peft.")
]
Qlora = Annotated[str | None, typer.Option(help="As --lora, with the frozen model in 4 bits. Needs a GPU and bitsandbytes.")]
AllowCode = Annotated[
    str | None, typer.Option(help="The model whose repository may run its own Python code; the same name as --model.")
]


@dataclass(frozen=True)
class ModelRequest:
    """The values of the options; ``model`` is None where none names a model."""

    model: str | None
    lora: str | None = None
    qlora: str | None = None
    allow_code: str | None = None

    def check(self) -> None:
        """Find out that the options fit together.

        Raises:
            SettingsError: they do not.
        """
        for option, value in (("--lora", self.lora), ("--qlora", self.qlora), ("--allow-code", self.allow_code)):
            if value and self.model is None:
                raise SettingsError(f"{option} {value}: needs --model PATH-OR-NAME, the model to train")
        if self.lora is not None and self.qlora is not None:
            raise SettingsError(f"--lora {self.lora}, --qlora {self.qlora}: leave one of them out")
        if self.allow_code is not None and self.model is not None and _resolved(self.allow_code) != _resolved(self.model):
            raise SettingsError(f"--allow-code {self.allow_code}: does not name the model of --model {self.model}")


def _resolved(model: str) -> str:
    """Return the absolute path of a folder, and a name or place as it is."""
    local = Path(model).expanduser()
    return str(local.resolve()) if local.is_dir() else model


@dataclass(frozen=True)
class ChosenModel:
    """A model that a run is to train, with the settings that the options give; a user's own assignments come over them."""

    folder: ModelFolder
    settings: dict[str, Any]


def choose(asked: ModelRequest) -> ChosenModel | None:
    """Return the model that the options name; None: they name none.

    Raises:
        SettingsError: the options do not fit together, or the model cannot be opened.
    """
    asked.check()
    if asked.model is None:
        return None
    folder = open_model(asked.model)
    folder.weights_files()
    model = _resolved(asked.model)
    if asked.allow_code is not None:
        os.environ[ALLOW_CODE] = model
    options: dict[str, Any] = {
        "model": model,
        "tokenizer": folder.tokenizer_digest(),
    }
    adapter = asked.qlora or asked.lora
    if adapter is not None:
        options |= _adapter(adapter, "--lora" if asked.qlora is None else "--qlora")
    if asked.qlora is not None:
        options["dtype"] = "4bit"
    settings = {"task.name": TASK, "task.context": min(folder.positions or LONGEST, LONGEST), "task.batch": 8}
    settings |= FULL if adapter is None else ADAPTER
    return ChosenModel(folder, settings | {f"task.options.{name}": value for name, value in options.items()})


def _adapter(text: str, option: str) -> dict[str, Any]:
    """Return the options of the task that a text such as :data:`LORA_FORM` gives.

    Raises:
        SettingsError: it has another form.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in LORA_KEYS:
            raise SettingsError(
                f"{option} {text}: {part!r} is none of {', '.join(LORA_KEYS)}{nearest(key, LORA_KEYS)}: {LORA_FORM}"
            )
        try:
            if key == "rank":
                found["lora"] = int(value)
            elif key == "targets":
                found["lora_targets"] = [each for each in value.split("+") if each]
            elif not math.isfinite(number := float(value)):
                raise ValueError(value)
            else:
                found[f"lora_{key}"] = number
        except ValueError:
            raise SettingsError(f"{option} {text}: {key} = {value!r} is no number: {LORA_FORM}") from None
    if found.get("lora", 0) < 1:
        raise SettingsError(f"{option} {text}: needs a rank of at least 1: {LORA_FORM}")
    return found
