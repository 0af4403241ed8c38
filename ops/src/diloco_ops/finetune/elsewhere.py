"""The words by which people start learners on other machines, in a run that trains a model of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco.settings.run import TaskSettings
from diloco.storage import model_folder
from diloco.storage.fetching import is_remote
from diloco_ops.finetune.model_options import TASK

PROGRAM = "diloco-torch-learner"


def model_of(task: TaskSettings) -> str | None:
    """Return the model of transformers that a run trains, a folder or a name of the hub; None: its task trains none.

    A project of one's own has the built-in task's options, and names a folder.
    """
    model = task.options.get("model")
    if not isinstance(model, str) or not (task.name == TASK or (Path(model) / model_folder.CONFIG).is_file()):
        return None
    return model


def learner_text(run: str, url: str, task: TaskSettings, reach: str) -> str:
    """Return what a person starts on another machine to join a run with a learner; ``reach`` says which machines can.

    The run's settings have the model, the adapter and the hash of the tokenizer. The learner's file has what is its own.
    """
    model = model_of(task)
    assert model is not None, "the run trains a model"
    is_path = Path(model).is_absolute()
    data = "PATH OF YOUR DATA" if task.mix is None else "PATH OF THE SAME DATA"
    values: dict[str, Any] = {"name": "elsewhere-*", "run": run, "nats_url": url, "data": data, "state_dir": "state"}
    if is_path:
        values["model"] = f"PATH OF YOUR COPY OF {Path(model).name}"
    lines = [f"    {key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    needs = ["pip install 'diloco[finetune]'" + (" bitsandbytes" if task.options.get("dtype") == "4bit" else "")]
    if is_remote(model):
        needs.append(f"credentials that may read {model} (docs/storage.md), and pip install 'diloco[storage]'")
    elif not is_path:
        needs.append(f"for a private or gated {model}: HF_TOKEN in the environment")
    if url.startswith("tls:"):
        needs.append('identity = "FILE", which `diloco keys add` makes')
    return "\n".join(
        [
            f"learners join {reach}",
            f"start each by {PROGRAM} --config learner.toml, with this learner.toml:",
            "",
            *lines,
            "",
            f"It needs: {'; '.join(needs)}. The tokenizer has to be that of this run.",
        ]
    )
