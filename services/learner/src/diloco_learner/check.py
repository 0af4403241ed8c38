"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "init": ..., "map": ...}`` from stdin. The built-in task is known to be
right, so that only its data is looked at, without JAX, which takes a second to import, unless learners are to have a mesh
(``mesh`` is not null), or the run begins with a file of weights (``init``). The last line on stdout is ``{"units": ...}``,
those of the loss.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import DilocoError, SettingsError
from diloco.process import observe
from diloco.settings.run import RunSettings, TaskSettings
from diloco.settings.service import MeshSettings
from diloco.settings.validation import parse
from diloco_learner import options
from diloco_learner.text import UNITS, TextData


def check(
    settings: RunSettings,
    data: str | None,
    mesh: MeshSettings | None = None,
    init: Path | None = None,
    fragment_map: FragmentMap | None = None,
) -> str | None:
    """Make what a learner and the evaluator make before the first step. Return the units of the loss, where the task says them.

    ``fragment_map``: of the run that this one continues. The built-in task's follows from the settings.

    Raises:
        AdmissionError: the model is not that of the run that this one continues; the first differing tensor is named.
        SettingsError: the task lacks something, one of its methods fails, or returns something else than a task's; or the mesh
            does not fit the devices, the tensors or the batches; or the file of weights does not fit the model.
        DataError: its data is missing, unreadable or too short.
    """
    if settings.task.name == "gpt":
        options.refuse(settings.task.options, options.BUILT_IN)
        text = TextData(settings.task, data)
        next(text.batches(0, settings.learners, settings.seed, 0))
        text.validation()
        if mesh is None and init is None:
            return UNITS

    from diloco_learner import fixed, weights
    from diloco_learner.island import Island
    from diloco_learner.mesh import make_mesh
    from diloco_learner.task import check_shapes, first_batch, load_task, units_of

    with users_errors(settings.task):
        task = load_task(settings.task, data)
        island = Island(task, settings, None if mesh is None else make_mesh(mesh))
        island.check(first_batch(task, settings))
        fixed.check_finite(task.init, island.params())
        if hasattr(task, "constants"):
            fixed.check_finite(task.constants, island.constants)
        check_shapes(task, settings)
        fragments = island.fragments()
        if fragment_map is not None and settings.continues is not None:
            check_same_map(fragments, fragment_map, settings.continues.run)
        if init is not None:
            weights.put(init, island, fragments)
        island.check_evaluation()
        return units_of(task)["loss"]


@contextmanager
def users_errors(settings: TaskSettings) -> Iterator[None]:
    """Have an error of a user's task say so, and where it was raised.

    Raises:
        SettingsError: instead of any error that is none of ours.
    """
    try:
        yield
    except DilocoError:
        raise
    except Exception as error:  # raised by the user's code
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        raise SettingsError(f"task.name = {settings.name!r}: {type(error).__name__}: {error} ({where})") from None


def _main() -> None:
    request = json.load(sys.stdin)
    mesh = None if request["mesh"] is None else parse(MeshSettings, request["mesh"], "mesh")
    init = None if request["init"] is None else Path(request["init"])
    fragment_map = None if request["map"] is None else unpack_map(bytes.fromhex(request["map"]))
    units = check(parse(RunSettings, request["settings"], "the run"), request["data"], mesh, init, fragment_map)
    print(json.dumps({"units": units}))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
