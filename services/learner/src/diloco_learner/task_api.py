"""The part of the task API that is independent of the framework. ``docs/task-api.md`` is the reference."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.core.tensors.fragments import STATE_PATH
from diloco.errors import SettingsError
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner.api import members, options

METRIC_NAME = re.compile(r"[a-z0-9_]{1,48}")  # of all numbers that tasks name
MAX_METRICS = 32  # of a loss
RULES = ("average", "local")  # of state
STATE = STATE_PATH  # begins the paths of the arrays of a state that is merged
EVALUATE_EVERY_S = 8.0  # often enough for a curve, seldom enough to leave the processor to learners


@dataclass(frozen=True)
class Units:
    """The units of a task's numbers, for people."""

    item: str = "token"  # that tokens_per_batch counts
    loss: str = "nats per token"


@dataclass(frozen=True)
class Aux:
    """Values that a loss returns besides itself. They are not differentiated."""

    metrics: Mapping[str, Any] = field(default_factory=dict)  # scalars by name, means as the loss is one
    state: Any = None  # after the step, of the same structure as before; None: the task has none
    tokens: Any = None  # that the loss, and each metric, is the mean of: a whole number; None: tokens_per_batch


def check_metric_names(metrics: Mapping[str, Any], where: str) -> None:
    """Check that a loss's metrics are not too many, and well named; ``where`` the loss is written ends the sentence.

    Raises:
        SettingsError: they are not.
    """
    if len(metrics) > MAX_METRICS:
        raise SettingsError(f"task: loss() returned {len(metrics)} metrics, expected at most {MAX_METRICS}{where}")
    for name in metrics:
        if not isinstance(name, str) or METRIC_NAME.fullmatch(name) is None:
            raise SettingsError(
                f"task: loss() returned a metric named {name!r}, expected 1 to 48 lower-case letters, digits and _{where}"
            )


def check_tokens(shape: tuple[int, ...] | None, dtype: str, where: str) -> None:
    """Find out that a loss counts its tokens by one whole number; ``where`` the loss is written ends the sentence.

    ``shape`` is that of ``Aux(tokens)``, None: it has none; ``dtype`` is its type's name, as NumPy has it.

    Raises:
        SettingsError: it does not.
    """
    exact = dtype.startswith(("int", "uint")) or dtype in ("bool", "float32", "float64")
    if shape != () or not exact:
        came = f"a {dtype}" if shape is None else f"{dtype}{list(shape)}"
        raise SettingsError(
            f"task: loss() returned Aux(tokens) as {came}, expected one whole number, such as the sum of a mask in int32{where}"
        )


def checked_tokens(counted: float, most: int, at: tuple[int, int], where: str) -> int:
    """Return what a loss has ``counted``, if that can be: in the batch ``at`` a share and an index.

    Raises:
        SettingsError: it is no whole number, or above ``tokens_per_batch``, the ``most``.
    """
    if not 0 <= counted <= most or counted != int(counted):
        raise SettingsError(
            f"task: loss() counted {counted:g} tokens in batch {at[1]} of share {at[0]}, expected a whole number from 0 to "
            f"tokens_per_batch = {most}: set tokens_per_batch to the most that a batch can have{where}"
        )
    return int(counted)


class Batches(Protocol):
    """An object with the batches of shares."""

    @property
    def batches(self) -> Callable[..., Iterator[Any]]:
        """``batches(share, shares, seed, start)`` yields batches without end from the ``start``-th on, of one share."""


def evaluate_every_s(task: object) -> float:
    """Return the least time between two evaluations of the global model."""
    said: float = getattr(task, "evaluate_every_s", EVALUATE_EVERY_S)
    return said


def units_of(task: object) -> dict[str, str | None]:
    """Return the units of a task's numbers, as ``item`` and ``loss``; None if it has none."""
    units = getattr(task, "units", None)
    return {name: None if (said := getattr(units, name, None)) is None else str(said) for name in ("item", "loss")}


def first_batch(task: Batches, settings: RunSettings) -> Any:
    """Return the first batch of a run's first share.

    Raises:
        SettingsError: there is none.
        DataError: the data is missing, unreadable or too short.
    """
    return next(first_batches(task, settings))


def first_batches(task: Batches, settings: RunSettings) -> Iterator[Any]:
    """Yield the batches of a run's first share.

    Raises:
        SettingsError: they end.
        DataError: the data is missing, unreadable or too short.
    """
    batches = task.batches(0, settings.learners, settings.seed, 0)
    for index in itertools.count():
        yield next_batch(task, batches, 0, index)


def next_batch(task: Batches, batches: Iterator[Any], share: int, index: int) -> Any:
    """Return the next of a task's ``batches``, the ``index``-th of its share.

    Raises:
        SettingsError: there is none.
    """
    try:
        return next(batches)
    except StopIteration:
        raise SettingsError(
            f"task: batches() of share {share} ended before batch {index}; batches() must not end: start the data over "
            f"when it is used up{members.place(task.batches)}"
        ) from None


def made(settings: TaskSettings, data: str | None) -> Any:
    """Return the result of the user's ``package.module:attribute`` for ``(settings, data)``.

    Raises:
        SettingsError: no such factory, or it cannot be imported.
    """
    module_name, attribute = members.factory(settings.name)
    if not module_name:
        raise SettingsError(f"task.name = {settings.name!r}: expected 'gpt' or 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything wrong
        reason = f"{members.brief(error)}{members.raised_at(error, settings.name)}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            reason += f": start the command in the folder that has {error.name}, or add that folder to PYTHONPATH"
        raise SettingsError(f"task.name = {settings.name!r}: {module_name} cannot be imported: {reason}") from error
    make = getattr(module, attribute, None)
    if not callable(make):
        what = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise SettingsError(f"task.name = {settings.name!r}: {attribute!r} {what} in {module_name}")
    given = options.of(make, settings.options)
    with members.users_errors(settings, make):
        task = make(settings, data, **given)
    if task is None:
        raise SettingsError(
            f"task.name = {settings.name!r}: {attribute}() returned nothing, expected a task{members.place(make)}"
        )
    return task


def check_called(task: Any, required: Collection[str], called: Mapping[str, tuple[int, tuple[str, ...]]], source: str) -> None:
    """Check that a task has its members, and that each is called as it can be.

    ``called``: by member, how many arguments it is given by place, and the keywords that it may name.

    Raises:
        SettingsError: one is missing, or needs an argument that is not given to it; ``source`` begins the sentence.
    """
    missing, place = [name for name in required if not hasattr(task, name)], members.place_of_class(type(task))
    if missing:
        raise SettingsError(f"{source} lacks {', '.join(missing)}{place}")
    if not isinstance(task.tokens_per_batch, int) or task.tokens_per_batch < 1:
        came = task.tokens_per_batch
        raise SettingsError(f"task: tokens_per_batch = {came!r}, expected an int above 0{place}")
    for member, (arguments, known) in called.items():
        if callable(getattr(task, member, None)):
            members.keywords(task, member, arguments, known)
    every_s = evaluate_every_s(task)
    if not isinstance(every_s, int | float) or not 0 < every_s < math.inf:
        raise SettingsError(f"task: evaluate_every_s = {every_s!r}, expected seconds above 0")
    per_batch = getattr(task, "rows_per_batch", None)
    if per_batch is not None and (not isinstance(per_batch, int) or per_batch < 1):
        raise SettingsError(f"task: rows_per_batch = {per_batch!r}, expected a whole number above 0, or None")


def said_of_files(task: object, member: str) -> dict[str, Any] | None:
    """Return a task's ``names()``, ``config()`` or the like, of files of Hugging Face's libraries; None: it says nothing.

    Raises:
        SettingsError: it is no mapping that JSON has.
    """
    function = getattr(task, member, None)
    if function is None:
        return None
    said = function()
    if said is None:
        return None
    try:
        if not isinstance(said, Mapping):
            raise TypeError(f"it is a {type(said).__name__}")
        found: dict[str, Any] = json.loads(json.dumps(dict(said)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"task: {member}() did not return a mapping that JSON can store: {error}{members.place(function)}"
        ) from None
    return found


def is_merged(task: object, path: str, dtype: str, place: str) -> bool:
    """Return whether an array of a task's state is averaged between learners. Otherwise each learner has its own.

    ``dtype`` is its type's name, ``place`` where it is made. By default floats are averaged.

    Raises:
        SettingsError: the task's ``merge_state`` says another thing, or has a type averaged that is not float32.
    """
    say = getattr(task, "merge_state", None)
    rule = ("average" if "float" in dtype else "local") if say is None else say(path)
    where = place if say is None else members.place(say)
    if rule not in RULES:
        more = ""
        if rule == "latest":
            more = (
                ": the latest of several learners' values depends on chance; keep each learner's own value, or average floats"
            )
        raise SettingsError(f"task: merge_state({path!r}) is {rule!r}, expected 'average' or 'local'{more}{where}")
    if rule == "average" and dtype != "float32":
        default = " by default" if say is None else ""
        raise SettingsError(
            f"task: state {path!r} is averaged{default} and must be float32, but is {dtype}: make it float32, or return "
            f"'local' from merge_state(path), so that each learner keeps its own{where}"
        )
    return bool(rule == "average")


def default_prompt(task: object) -> str:
    """Return the text that a task's samples go on from, where it states it as ``prompt``; else nothing."""
    prompt = getattr(task, "prompt", "")
    return prompt if isinstance(prompt, str) else ""
