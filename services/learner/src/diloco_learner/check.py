"""``python -m diloco_learner.check``: find out, before a run begins, that its task and data can be trained on.

Reads ``{"settings": ..., "data": ..., "mesh": ..., "init": ..., "names": ..., "map": ..., "whole": ...}`` from stdin. The
built-in task is known to be right, so that only its data is looked at, without JAX, which takes a second to import, unless
learners are to have a mesh (``mesh`` is not null), the run begins with weights (``init``), or its fragment map is asked for
(``whole``). The last line on stdout is a :class:`Found` as JSON, with that ``map``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.core.fragments import FragmentMap, check_same_map, unpack_map
from diloco.process import observe
from diloco.settings.run import MixSettings, RunSettings
from diloco.settings.service import LearnerSettings, MeshSettings
from diloco.settings.validation import parse
from diloco_learner import members, options
from diloco_learner.data import open_data
from diloco_learner.mix.mix import Mix
from diloco_learner.task_api import GPT, first_batches, units_of

if TYPE_CHECKING:
    from diloco_learner.frameworks import Loaded
    from diloco_learner.model import Model


@dataclass(frozen=True)
class Found:
    """Facts of a task that is fit.

    ``units``: of the loss; None: it does not say. ``torch``: it is one of PyTorch. ``mix``: its mix of data as the run's
    settings are to have it, if that is one.
    """

    units: str | None
    torch: bool
    mix: MixSettings | None


@dataclass(frozen=True)
class Checked:
    """A task that is fit, and all that was made to find that out: its model, and the first two batches of the first share."""

    found: Found
    loaded: Loaded
    model: Model
    batches: list[Any]


def check(
    settings: RunSettings,
    data: str | None,
    mesh: MeshSettings | None = None,
    init: Path | None = None,
    names: Path | None = None,
    fragment_map: FragmentMap | None = None,
) -> Found:
    """Make what a learner and the evaluator make before the first step.

    ``init``, ``names``: the file or folder of the weights that it begins with, and the file of their names.
    ``fragment_map``: of the run that this one continues. The built-in task's follows from the settings, and from a mix.

    Raises:
        AdmissionError: the model is not that of the run that this one continues; the first differing tensor is named. Or the
            mix is not the run's.
        SettingsError: the task lacks something, one of its methods fails, or returns something else than a task's; or the mesh
            does not fit the devices, the tensors or the batches; or the file of weights does not fit the model.
        DataError: its data is missing, unreadable or too short.
    """
    cache_dir = LearnerSettings(name="check").cache_dir  # with what DILOCO_* says, as learners have it
    if settings.task.name == GPT:
        options.refuse(settings.task.options, options.BUILT_IN)
        own = open_data(settings.task, data, cache_dir)
        next(own.batches(0, settings.learners, settings.seed, 0))
        own.validation()
        if mesh is None and init is None and not (isinstance(own, Mix) and fragment_map):
            return _found(settings, own.units, own, torch=False)
    return checked(settings, data, mesh, init, names, fragment_map).found


def checked(
    settings: RunSettings,
    data: str | None,
    mesh: MeshSettings | None = None,
    init: Path | None = None,
    names: Path | None = None,
    fragment_map: FragmentMap | None = None,
) -> Checked:
    """Return the same as :func:`check`, of the built-in task too, with all that was made; raise as it does."""
    from diloco_learner import frameworks, weights

    cache_dir = LearnerSettings(name="check").cache_dir
    with members.users_errors(settings.task):
        loaded = frameworks.load(settings.task, data, cache_dir)
        if not loaded.torch:
            from diloco_learner import programs

            programs.keep(cache_dir)  # learners need the same ones
        model = frameworks.make_model(loaded, settings, mesh)
        batches = _first_batches(loaded, settings)
        model.check(batches[0])
        if not loaded.torch:
            _check_numbers(model)
        fragments = model.fragments()
        if fragment_map is not None and settings.continues is not None:
            check_same_map(fragments, fragment_map, settings.continues.run)
        if init is not None:
            weights.put(init, model, fragments, names)
        model.check_evaluation()
        found = _found(settings, units_of(loaded.task)["loss"], getattr(loaded.task, "mix", None), torch=loaded.torch)
        return Checked(found, loaded, model, batches)


def _first_batches(loaded: Loaded, settings: RunSettings) -> list[Any]:
    """Return the first two batches, which of a task of JAX are of the same shapes; a task of PyTorch may change them."""
    batches = first_batches(loaded.task, settings)
    if not loaded.torch:
        from diloco_learner.task import check_alike

        check_alike(loaded.task, settings.task, batches)
    return batches


def _check_numbers(island: Any) -> None:
    """Find out that a task of JAX begins with parameters and constants that are finite.

    Raises:
        SettingsError: a value is NaN or infinity.
    """
    from diloco_learner import fixed

    fixed.check_finite(island.task.init, island.params())
    if merged := island.task_state.merged():
        fixed.check_finite(island.task.init_state, merged)
    if hasattr(island.task, "constants"):
        fixed.check_finite(island.task.constants, island.constants)


def _found(settings: RunSettings, units: str | None, data: object, *, torch: bool) -> Found:
    """Return the facts of a task, after those of a mix: the run must not go over a source too often."""
    if not isinstance(data, Mix):
        return Found(units, torch, None)
    data.check_epochs(settings)
    return Found(units, torch, data.settings)


def _main() -> None:
    request = json.load(sys.stdin)
    mesh = None if request["mesh"] is None else parse(MeshSettings, request["mesh"], "mesh")
    init = None if request["init"] is None else Path(request["init"])
    names = None if request["names"] is None else Path(request["names"])
    fragment_map = None if request["map"] is None else unpack_map(bytes.fromhex(request["map"]))
    about = parse(RunSettings, request["settings"], "the run"), request["data"], mesh, init, names, fragment_map
    made = checked(*about) if request["whole"] else None
    found = check(*about) if made is None else made.found
    mix = None if found.mix is None else found.mix.model_dump()
    packed = None if made is None else made.model.fragments().pack().hex()
    print(json.dumps({"units": found.units, "torch": found.torch, "mix": mix, "map": packed}))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
