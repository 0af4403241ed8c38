"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ...}`` from stdin. The built-in task is known to be right, so that only its data is looked
at, without JAX, which takes a second to import.
"""

from __future__ import annotations

import json
import sys
import traceback

from diloco.errors import DilocoError, SettingsError
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco_learner.text import TextData


def check(settings: RunSettings, data: str | None) -> None:
    """Make what a learner and the evaluator make before the first step.

    Raises:
        SettingsError: the task lacks something, one of its methods fails, or returns something else than a task's.
        DataError: its data is missing, unreadable or too short.
    """
    if settings.task.name == "gpt":
        text = TextData(settings.task, data)
        next(text.batches(0, settings.learners, settings.seed, 0))
        text.validation()
        return

    from diloco_learner.island import Island
    from diloco_learner.task import first_batch, load_task, validation_batches

    try:
        task = load_task(settings.task, data)
        Island(task, settings).check(first_batch(task, settings))
        validation_batches(task, settings.task)
    except DilocoError:
        raise
    except Exception as error:  # raised by the user's code
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        raise SettingsError(f"task.name = {settings.task.name!r}: {type(error).__name__}: {error} ({where})") from None


def _main() -> None:
    request = json.load(sys.stdin)
    check(parse(RunSettings, request["settings"], "the run"), request["data"])


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
