"""The data and the first weights that a run is given, as its services are told them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diloco.core.tensors.built_in import BUILT_IN
from diloco.errors import DataError, RunError, SettingsError
from diloco.service.rundir import RunDirectory
from diloco.settings.places import has_scheme, parse_place, refuse_credentials
from diloco.settings.run import RunSettings
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.up.continuing import ContinuationSource


def data_source(data: str | None, settings: RunSettings) -> str | None:
    """Return ``--data`` as services are told it: an absolute path, a place, or what only the run's own task understands.

    Raises:
        DataError: the built-in task would not find it.
        SettingsError: it may hold credentials; or the built-in task knows no such place.
    """
    if data is None:
        return None
    if has_scheme(data):  # another task than the built-in one may mean anything by it
        if settings.task.name == BUILT_IN:
            return str(parse_place(data, "--data"))
        refuse_credentials(data, "--data")
        return data
    if Path(data).exists():
        return str(Path(data).resolve())
    if settings.task.name == BUILT_IN:
        raise DataError(f"--data {data}: there is no such file or folder")
    return data


def beginning_with(
    directory: RunDirectory, init: str | None, names: Path | None, source: RunCheckpoint | ContinuationSource | None
) -> RunDirectory:
    """Return a run's directory that begins with the weights in a file or folder, if one is given.

    Raises:
        SettingsError: it goes on from a checkpoint, which has them; or there are names of no weights.
        RunError: it has begun with others.
    """
    if init is None:
        if names is not None:
            raise SettingsError(f"--names {names}: needs --init PATH, the weights whose tensors have these names")
        return directory
    if source is not None:
        option = "--resume" if isinstance(source, RunCheckpoint) else "--continue"
        raise SettingsError(f"--init {init}: a run of {option} already has weights; leave one of the options out")
    file = str(parse_place(init, "--init")) if has_scheme(init) else str(Path(init).resolve())
    named = None if names is None else str(names.resolve())
    if (directory.path / "run.json").exists() and (directory.init, directory.init_names) != (file, named):
        began = f"the weights in {directory.init}" if directory.init else "the weights that its task creates"
        raise RunError(f"{directory.path}: this run was started with {began}; resume it without --init")
    return replace(directory, init=file, init_names=named)
