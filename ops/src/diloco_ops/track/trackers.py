"""Places that take a run's values. Each needs a package of its own: ``pip install 'diloco-ops[tensorboard]'``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_ops.track.values import RUN, Value


class Tracker(Protocol):
    """Takes values. Called from one thread at a time, never from an event loop's."""

    def write(self, values: Sequence[Value], began_s: float) -> None:
        """Take values of a run that began at ``began_s``, in seconds since the epoch.

        Raises:
            OSError: they could not be written; later ones may be.
        """

    def close(self) -> None:
        """Take no more.

        Raises:
            OSError: what is not written yet could not be.
        """


class TensorBoard:
    """Event files in a folder, for ``tensorboard --logdir FOLDER``. A tag is ``learner-0/loss``, or ``run/validation_loss``."""

    package: ClassVar = "tensorboardX"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Begin a file; one folder may have several, of a run that was begun again.

        Raises:
            OSError: the folder cannot be written to.
        """
        # its EventsWriter writes at once, and raises here; its SummaryWriter would fail unseen, in a thread of its own
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")

    def write(self, values: Sequence[Value], began_s: float) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        for value in values:
            scalar = Summary.Value(tag=f"{value.owner}/{value.name}", simple_value=value.value)
            self._writer.write_event(Event(wall_time=began_s + value.wall_s, step=value.step, summary=Summary(value=[scalar])))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B in the project ``diloco``, or in that of WANDB_PROJECT; its files are in ``folder``.

    Each owner's values are over an axis of its own, ``learner-0/step`` or ``run/tokens``.
    """

    package: ClassVar = "wandb"

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Begin a run of this name, with the settings as its configuration.

        Raises:
            OSError: the folder cannot be written to, or W&B does not begin a run.
        """
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        project, self._error = os.environ.get("WANDB_PROJECT", "diloco"), wandb.Error
        try:
            self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(settings))
        except wandb.Error as error:
            raise OSError(str(error)) from None
        self._owners = set[str]()

    def write(self, values: Sequence[Value], began_s: float) -> None:
        rows: dict[tuple[str, int], dict[str, float]] = {}
        for value in values:
            row = rows.setdefault((value.owner, value.step), {f"{value.owner}/wall_s": value.wall_s})
            row[f"{value.owner}/{value.name}"] = value.value
        try:
            for (owner, step), row in rows.items():
                self._run.log({self._axis(owner): step, **row})
        except self._error as error:
            raise OSError(str(error)) from None

    def _axis(self, owner: str) -> str:
        axis = f"{owner}/tokens" if owner == RUN else f"{owner}/step"
        if owner not in self._owners:
            self._owners.add(owner)
            self._run.define_metric(axis)
            self._run.define_metric(f"{owner}/*", step_metric=axis)
        return axis

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check(kinds: Sequence[str], option: str) -> None:
    """Check that the trackers exist, and that their packages are installed. ``option`` is named in errors.

    Raises:
        SettingsError: one is not.
    """
    for kind in kinds:
        if kind not in TRACKERS:
            raise SettingsError(
                f"{option} {kind}: no such tracker{nearest(kind, list(TRACKERS))}; there are {', '.join(TRACKERS)}"
            )
        package = TRACKERS[kind].package
        if find_spec(package) is None:
            raise SettingsError(f"{option} {kind}: needs {package}, which is not installed: pip install 'diloco-ops[{kind}]'")


def begin(kinds: Sequence[str], folder: Path, name: str, settings: Mapping[str, Any]) -> list[Tracker]:
    """Begin trackers that :func:`check` has found to be there, each in a folder of its kind's name below ``folder``.

    Raises:
        SettingsError: one does not begin.
    """
    try:
        return [TRACKERS[kind](folder / kind, name, settings) for kind in dict.fromkeys(kinds)]
    except OSError as error:
        raise SettingsError(f"tracking in {folder}: {error}") from None
