"""``python -m diloco_learner.causal_lm.merging``: merge a run's adapter into its base, and write the whole model.

Reads ``{"settings": ..., "data": ..., "adapter": FOLDER, "out": FOLDER, "precision": ...}`` from stdin. Prints ``{}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from diloco.errors import SettingsError
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco.storage import model_folder
from diloco_learner.api import options
from diloco_learner.causal_lm import modeling
from diloco_learner.causal_lm.options import CausalLmOptions

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def merge(settings: RunSettings, adapter: Path, out: Path, precision: str) -> None:
    """Write the base with the adapter merged into it. Weights are added in float32 and rounded once.

    Raises:
        SettingsError: the base cannot be loaded, or the adapter is none of it.
    """
    import peft

    chosen = options.filled(CausalLmOptions, settings.task.options)
    folder = model_folder.open_model(chosen.model)
    base = modeling.load_base(folder, chosen, torch.float32)
    try:
        model = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    except (ValueError, RuntimeError, KeyError) as error:
        raise SettingsError(f"--model {chosen.model}: its adapter cannot be merged: {error}") from None
    model.to(PRECISIONS[precision]).save_pretrained(out)


def _main() -> None:
    request = json.load(sys.stdin)
    settings = parse(RunSettings, request["settings"], "the run")
    merge(settings, Path(request["adapter"]), Path(request["out"]), request["precision"])
    print(json.dumps({}))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
