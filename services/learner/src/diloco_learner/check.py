"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "init": ..., "map": ...}`` from stdin. The built-in task is known to be
right, so that only its data is looked at, without JAX, which takes a second to import, unless learners are to have a mesh
(``mesh`` is not null), or the run begins with a file of weights (``init``). The last line on stdout is a
:class:`Found` as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.service import MeshSettings
from diloco.settings.validation import parse
from diloco_learner import members, options
from diloco_learner.text import UNITS, TextData


@dataclass(frozen=True)
class Found:
    """Facts of a task that is fit.

    ``units``: of the loss; None: it does not say. ``torch``: it is one of PyTorch.
    """

    units: str | None
    torch: bool


def check(
    settings: RunSettings,
    data: str | None,
    mesh: MeshSettings | None = None,
    init: Path | None = None,
    fragment_map: FragmentMap | None = None,
) -> Found:
    """Make what a learner and the evaluator make before the first step.

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
            return Found(UNITS, torch=False)

    from diloco_learner import frameworks, weights
    from diloco_learner.task_api import first_batch, units_of

    with members.users_errors(settings.task):
        loaded = frameworks.load(settings.task, data)
        model = frameworks.make_model(loaded, settings, mesh)
        model.check(first_batch(loaded.task, settings))
        if not loaded.torch:  # shapes of its batches may change
            from diloco_learner.task import check_shapes

            check_shapes(loaded.task, settings)
        fragments = model.fragments()
        if fragment_map is not None and settings.continues is not None:
            check_same_map(fragments, fragment_map, settings.continues.run)
        if init is not None:
            weights.put(init, model, fragments)
        model.check_evaluation()
        return Found(units_of(loaded.task)["loss"], loaded.torch)


def _main() -> None:
    request = json.load(sys.stdin)
    mesh = None if request["mesh"] is None else parse(MeshSettings, request["mesh"], "mesh")
    init = None if request["init"] is None else Path(request["init"])
    fragment_map = None if request["map"] is None else unpack_map(bytes.fromhex(request["map"]))
    found = check(parse(RunSettings, request["settings"], "the run"), request["data"], mesh, init, fragment_map)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
