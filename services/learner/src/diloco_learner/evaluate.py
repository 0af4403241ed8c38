"""``python -m diloco_learner.evaluate``: evaluate weights in a file as the evaluator does, or draw a sample from them.

Reads ``{"settings": ..., "data": ..., "weights": ..., "sample": ...}`` from stdin. Prints ``{"loss": ..., "units": ...,
"values": ...}``, or ``{"sample": ..., "prompt": ..., "early": ...}`` where ``sample`` is not null but ``{"seed": ...,
"count": ..., "prompt": ..., "early": ...}`` (``prompt`` null: the task's own). Where ``early``
is true, the weights are evaluated, and the answer says why the model has no text to show yet, or null.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from diloco.core.tensors.fragments import build_whole
from diloco.errors import SettingsError
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco_learner import frameworks
from diloco_learner.api import members
from diloco_learner.api.model import Evaluated
from diloco_learner.run import weights
from diloco_learner.run.evaluator import bigram_loss, too_early
from diloco_learner.task_api import default_prompt, units_of


def evaluate(settings: RunSettings, data: str | None, path: Path, sample: dict[str, Any] | None) -> dict[str, Any]:
    """Return the loss of the weights in a file on the task's validation batches, with its units and all values; or a sample.

    Raises:
        SettingsError: the file does not fit the task's model; the task lacks something, or one of its methods fails.
        DataError: its data is missing, unreadable or too short.
    """
    own = LearnerSettings(name="evaluator")  # with what DILOCO_* says of its mesh and the cache, as an evaluator has them
    with members.users_errors(settings.task):
        loaded = frameworks.load(settings.task, data, own.cache_dir)
        loaded.framework.keep_programs(own.cache_dir)
        island = loaded.framework.make_model(loaded.task, settings, own.mesh)
        weights.put(path, island, build_whole(island.specs()), setting="")
        if sample is None:
            found = island.evaluation()
            if found.failure is not None:
                raise found.failure
            if found.loss is None and not found.values:
                raise SettingsError(f"task.name = {settings.task.name!r}: it has neither validation() nor evaluate()")
            loss = found.loss if found.loss is not None and math.isfinite(found.loss) else None
            return {"loss": loss, "units": units_of(island.task)["loss"], "values": found.finite_values()}
        if sample["prompt"] is not None and not takes_prompt(island.task):
            raise SettingsError(
                f"task.name = {settings.task.name!r}: its sample() has no parameter 'prompt': leave out --prompt"
            )
        drawn = island.sample(sample["seed"], sample["count"], sample["prompt"])
        if drawn is None:
            raise SettingsError(f"task.name = {settings.task.name!r}: it has no sample(), which draws from the model")
        prompt = default_prompt(island.task) if sample["prompt"] is None else sample["prompt"]
        return {"sample": drawn, "prompt": prompt, "early": _early(island) if sample.get("early") else None}


def _early(island: Evaluated) -> str | None:
    """Return why the model has no text to show yet; None: it may have, or is of no text."""
    bigram = bigram_loss(island.task)
    return None if bigram is None else too_early(island.evaluation().loss, bigram)


def takes_prompt(task: object) -> bool:
    """Return whether a task's ``sample``, if it has one, goes on from a text."""
    draw = getattr(task, "sample", None)
    return draw is None or any(parameter.name == "prompt" for parameter in members.parameters(draw))


def _main() -> None:
    request = json.load(sys.stdin)
    settings = parse(RunSettings, request["settings"], "the run")
    print(json.dumps(evaluate(settings, request["data"], Path(request["weights"]), request["sample"])))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
