"""Frameworks compute the steps of learners. One framework claims a run's task, and the libraries of others are not imported.

A distribution adds a framework by an entry point of the group ``diloco.frameworks``. Its name is the framework's name, and its
object is a subclass of :class:`Framework`. To find the framework that claims a task, the modules of all entry points are
imported. Such a module therefore imports its library inside methods only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from diloco.core.tensors.built_in import BUILT_IN
from diloco.errors import SettingsError
from diloco.settings.run import RunSettings, TaskSettings
from diloco.settings.service import MeshSettings
from diloco_learner.api import members
from diloco_learner.task_api import made

if TYPE_CHECKING:
    from diloco_learner.api.examination import ProcessFacts, TaskExamination
    from diloco_learner.api.model import JoinedParameters, Model

GROUP = "diloco.frameworks"
Task: TypeAlias = Any  # a task of any framework


class FrameworkChecks:
    """Checks of a task and its model before a run that only some frameworks need. By default they find nothing."""

    def keep_programs(self, cache_dir: Path) -> None:
        """Store programs that are compiled from now on for other processes, if the folder is writable."""

    def check_cache(self, cache_dir: Path) -> None:
        """Check that learners can store their files in this folder.

        Raises:
            SettingsError: the folder is not writable.
        """

    def check_values(self, model: Any) -> None:
        """Check that a model's initial values are finite.

        Raises:
            SettingsError: a value is NaN or infinite.
        """

    def check_alike(self, task: Task, first: Any, later: Any) -> None:
        """Check that a batch has the shapes of the first one, if steps need that.

        Raises:
            SettingsError: a shape differs.
        """

    def rehearse(self, model: Model, batch: Any) -> float:
        """Return the loss of a step that is not taken, or NaN.

        Raises:
            SettingsError: the devices have no room for the step, or the task's code fails in it.
        """
        return model.rehearse(batch)

    def examine_processes(
        self, task: Task, settings: RunSettings, mesh: MeshSettings, count: int, batch: Any
    ) -> ProcessFacts | None:
        """Examine a task for a learner of ``count`` processes with one device each, and the ``mesh`` over them.

        Return None if the framework has no such learners, or examines their devices in another way.

        Raises:
            SettingsError: the mesh, a batch or the task does not fit the processes.
        """
        return None

    def find_cause(self, task: Task, settings: RunSettings, model: Any, batch: Any) -> str:
        """Return the reason for which a batch's loss is not finite, as the end of a sentence; empty if it is unknown."""
        return ""


class Framework(FrameworkChecks, ABC):
    """A framework with the ``name`` of its entry point.

    Attributes:
        wants: the member by which it claims a task, for messages.
        module: the module that ``python -m`` runs as a learner or an evaluator.
        one_process: whether the task chooses the process's device. Such a learner is one process, or, with PyTorch, as many as
            ``--torch-processes`` states. Other learners may have a mesh of devices.
    """

    wants: ClassVar[str]
    module: ClassVar[str]
    one_process: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    def parameters(self, params: Any) -> JoinedParameters | None:
        """Return the ``params`` of ``diloco.join`` as parameters of this framework, or None for objects of others.

        Trees of JAX or NumPy arrays belong to no framework. If the objects are the framework's own, its library is imported.

        Raises:
            SettingsError: the objects cannot be trained.
        """
        return None

    @abstractmethod
    def claims(self, task: object) -> bool:
        """Return whether a task is one of this framework. ``task``: the factory's result, or None for the built-in task."""

    @abstractmethod
    def load(self, task: object, settings: TaskSettings, data: str | None, cache_dir: Path) -> Task:
        """Return a claimed task after checking its members, or the built-in task for None.

        ``cache_dir``: folder in which the built-in task stores the tokens of a mix.

        Raises:
            SettingsError: the task lacks a member.
            DataError: the built-in task's data is missing, unreadable or too short.
        """

    @abstractmethod
    def make_model(self, task: Task, settings: RunSettings, mesh: MeshSettings | None) -> Model:
        """Return a task's model. ``mesh``: the mesh of the learner's devices, if it may have several.

        Raises:
            SettingsError: the model cannot be trained.
        """

    @abstractmethod
    def devices(self) -> list[str]:
        """Return the kind of each device that this process has, such as ``cpu``."""

    @abstractmethod
    def examine(
        self, task: Task, settings: RunSettings, model: Model, batches: Sequence[Any], units: str | None
    ) -> TaskExamination:
        """Take the first step of a checked task twice, and return the findings for ``diloco check``.

        ``batches``: the first two batches of the first share. ``model``: the checked model, whose values may change.

        Raises:
            SettingsError: batches of another share end.
        """


@dataclass(frozen=True)
class LoadedTask:
    """A checked task, and the framework that claims it."""

    task: Task
    framework: Framework


def load(settings: TaskSettings, data: str | None, cache_dir: Path) -> LoadedTask:
    """Return a run's task. ``cache_dir``: folder in which the built-in task stores the tokens of a mix.

    Raises:
        SettingsError: the task does not exist, cannot be imported, is claimed by no framework or by several, or lacks a
            member.
        DataError: its data is missing, unreadable or too short.
    """
    found = None if settings.name == BUILT_IN else made(settings, data)
    framework = claimant(found, settings)
    return LoadedTask(framework.load(found, settings, data, cache_dir), framework)


def claimant(task: object, settings: TaskSettings) -> Framework:
    """Return the framework that claims a task. ``task``: the factory's result, or None for the built-in task.

    If several claim it, the task's attribute ``framework`` chooses one. An entry point that cannot be imported is reported only
    if no other framework claims the task.

    Raises:
        SettingsError: no framework claims the task, or several do and it chooses none of them.
    """
    installed, broken = _installed()
    claims = {point: framework for point, framework in installed.items() if framework.claims(task)}
    if len(claims) > 1:
        named = getattr(task, "framework", None)
        claims = {point: framework for point, framework in claims.items() if point.name == named} or claims
    if len(claims) == 1:
        return next(iter(claims.values()))
    what = f"task.name = {settings.name!r}: {_made_by(settings)}"
    where = members.place_of_class(type(task))
    if claims:
        raise SettingsError(
            f"{what} is claimed by the frameworks {' and '.join(map(_text, claims))}: name one by the task's attribute "
            f"framework, such as framework = {next(iter(claims)).name!r}, or uninstall the other distribution{where}"
        )
    wanted = ", ".join(f"{framework.wants} ({framework.name})" for framework in installed.values())
    failed = "".join(f"; the framework {_text(point)} fails: {members.brief(error)}" for point, error in broken.items())
    remedy = "install what it lacks, or uninstall it" if broken else ("add one, or install the distribution of its framework")
    raise SettingsError(
        f"{what} has no member by which a framework claims it: {wanted or 'none is installed'}{failed}: {remedy}{where}"
    )


def parameters_of(params: Any) -> JoinedParameters | None:
    """Return the parameters that a framework makes of what ``diloco.join`` is given; None where no framework knows it.

    Raises:
        SettingsError: a framework's objects cannot be trained.
    """
    installed, _ = _installed()
    return next((found for each in installed.values() if (found := each.parameters(params)) is not None), None)


def refuse_others(task: object, settings: TaskSettings, own: str) -> None:
    """Check that a task that the framework of this name does not claim is not one of another framework.

    Raises:
        SettingsError: another framework claims it.
    """
    installed, _ = _installed()
    for other in installed.values():
        if other.claims(task):
            raise SettingsError(
                f"task.name = {settings.name!r}: {_made_by(settings)} is a task of {other.name}, and this process is a learner "
                f"of {own}: name a task of {own}, or start a learner of {other.name} (python -m {other.module})"
                f"{members.place_of_class(type(task))}"
            )


def _installed() -> tuple[dict[EntryPoint, Framework], dict[EntryPoint, BaseException]]:
    """Return the frameworks whose modules can be imported, and the errors of the others."""
    found, broken = dict[EntryPoint, Framework](), dict[EntryPoint, BaseException]()
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            found[point] = _make(point)
        except (Exception, SystemExit) as error:  # the module of another distribution may do anything wrong
            broken[point] = error
    return found, broken


def _make(point: EntryPoint) -> Framework:
    kind = point.load()
    if not isinstance(kind, type) or not issubclass(kind, Framework):
        raise TypeError(f"it is not a subclass of {Framework.__module__}.{Framework.__name__}")
    return kind(point.name)


def _made_by(settings: TaskSettings) -> str:
    return "the built-in task" if settings.name == BUILT_IN else f"what {members.factory(settings.name)[1]} returns"


def _text(point: EntryPoint) -> str:
    """Return an entry point as messages name it: its name and object, and the distribution that has it."""
    owner = "" if point.dist is None else f" of {point.dist.name}"
    return f"{point.name} (entry point {point.value}{owner})"
