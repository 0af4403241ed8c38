"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "init": ..., "map": ...}`` from stdin. The built-in task is known to be
right, so that only its text is looked at, without JAX, which takes a second to import, unless learners are to have a mesh
(``mesh`` is not null), or the run begins with a file of weights (``init``). The last line on stdout is ``{"units": ..., "mix":
...}``: the units of the loss, and the mix of data as the run's settings are to have it, or null.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import DilocoError, SettingsError
from diloco.process import observe
from diloco.settings.run import MixSettings, RunSettings, TaskSettings
from diloco.settings.service import LearnerSettings, MeshSettings
from diloco.settings.validation import parse
from diloco_learner import options
from diloco_learner.data import open_data
from diloco_learner.mix.mix import Mix


@dataclass(frozen=True)
class Checked:
    """A task that can be trained: the units of its loss, where it says them, and its mix of data, if that is one."""

    units: str | None
    mix: MixSettings | None


def check(
    settings: RunSettings,
    data: str | None,
    mesh: MeshSettings | None = None,
    init: Path | None = None,
    fragment_map: FragmentMap | None = None,
) -> Checked:
    """Make what a learner and the evaluator make before the first step.

    ``fragment_map``: of the run that this one continues. The built-in task's follows from the settings, and from a mix.

    Raises:
        AdmissionError: the model is not that of the run that this one continues; the first differing tensor is named. Or the
            mix is not the run's.
        SettingsError: the task lacks something, one of its methods fails, or returns something else than a task's; or the mesh
            does not fit the devices, the tensors or the batches; or the file of weights does not fit the model.
        DataError: its data is missing, unreadable or too short.
    """
    cache_dir = LearnerSettings(name="check").cache_dir  # with what DILOCO_* says, as learners have it
    if settings.task.name == "gpt":
        options.refuse(settings.task.options, options.BUILT_IN)
        own = open_data(settings.task, data, cache_dir)
        next(own.batches(0, settings.learners, settings.seed, 0))
        own.validation()
        if mesh is None and init is None and not (isinstance(own, Mix) and fragment_map):
            return _checked(settings, own.units, own)

    from diloco_learner import weights
    from diloco_learner.island import Island
    from diloco_learner.mesh import make_mesh
    from diloco_learner.task import check_shapes, first_batch, load_task, units_of

    with users_errors(settings.task):
        task = load_task(settings.task, data, cache_dir)
        island = Island(task, settings, None if mesh is None else make_mesh(mesh))
        island.check(first_batch(task, settings))
        check_shapes(task, settings)
        fragments = island.fragments()
        if fragment_map is not None and settings.continues is not None:
            check_same_map(fragments, fragment_map, settings.continues.run)
        if init is not None:
            weights.put(init, island, fragments)
        island.check_evaluation()
        return _checked(settings, units_of(task)["loss"], getattr(task, "mix", None))


def _checked(settings: RunSettings, units: str | None, data: object) -> Checked:
    """Return the finding of a check, after that of a mix: the run must not go over a source too often."""
    if not isinstance(data, Mix):
        return Checked(units, None)
    data.check_epochs(settings)
    return Checked(units, data.settings)


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
    found = check(parse(RunSettings, request["settings"], "the run"), request["data"], mesh, init, fragment_map)
    print(json.dumps({"units": found.units, "mix": None if found.mix is None else found.mix.model_dump()}))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
