"""The model and its data. A user's own model is an object with the methods of :class:`Task`; the GPT is built in."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner import gpt, members, options
from diloco_learner.data import open_data
from diloco_learner.leaves import path_of
from diloco_learner.mix.mix import CACHE, Mix

TEMPERATURE = 0.8
PROMPT = "\n"

Validation = list[NDArray[np.int32]] | dict[str, list[NDArray[np.int32]]]


@dataclass(frozen=True)
class Units:
    """The units of a task's numbers, for people."""

    item: str = "token"  # that tokens_per_batch counts
    loss: str = "nats per token"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aux:
    """A loss's company, which nothing is differentiated through."""

    metrics: Mapping[str, Any] = field(default_factory=dict)  # scalars by name, means over the batch's rows


class Task(Protocol):
    """A JAX model with its data. These members are needed; docs/task-api.md has all of them.

    Parameters are any pytree of arrays, each float32 or bfloat16; the learner keeps all of them in float32, and hands the loss
    what is bfloat16 rounded. Batches are any pytree of arrays, of the same shapes each time.

    A member's function is given the keywords that it names (:data:`CALLED`), and no others.
    """

    @property
    def tokens_per_batch(self) -> int:
        """Tokens that one batch trains on."""

    def init(self, key: jax.Array) -> Any:
        """Return parameters to begin with: the same for the same key."""

    @property
    def loss(self) -> Callable[..., Any]:
        """``loss(params, batch, *, key, train)`` returns a batch's mean loss, or it and an :class:`Aux`.

        A float32 scalar in the task's units, differentiable by JAX, traced by ``jax.jit``.
        """

    @property
    def batches(self) -> Callable[..., Iterator[Any]]:
        """``batches(share, shares, seed, start, *, rows)`` yields batches without end from the ``start``-th on, of one share.

        The k-th batch depends on nothing but share, shares, seed and k. ``rows``: the rows of each to make, None for all;
        arrays of another first axis than the batch's rows are whole all the same.
        """


METRIC_NAME = re.compile(r"[a-z0-9_]{1,48}")  # of all numbers that tasks name
EVALUATE_EVERY_S = 8.0  # often enough for a curve, seldom enough to leave the processor to learners
REQUIRED = ("tokens_per_batch", "init", "loss", "batches")
# by member that is called: how many arguments it is given by place, and the keywords that it may name
CALLED: dict[str, tuple[int, tuple[str, ...]]] = {
    "init": (1, ()),
    "loss": (2, ("key", "train")),
    "batches": (4, ("rows",)),
    "validation": (0, ()),
    "is_embedding": (1, ()),
    "matrices": (1, ()),
    "partition": (2, ()),
    "optimizer": (1, ()),
    "evaluate": (1, ("key",)),
    "sample": (3, ()),
}


def is_embedding(task: Task, path: str) -> bool:
    """Return whether the tensor of this path (its keys joined by ``/``) is embedding-like: merged by direct average."""
    said = getattr(task, "is_embedding", None)
    return False if said is None else bool(said(path))


def matrices_of(task: Task, path: str, shape: tuple[int, ...]) -> int:
    """Return how many matrices a tensor has that an optimizer of matrices treats each by itself; 0: none.

    Raises:
        SettingsError: the task's number does not divide the tensor's rows.
    """
    if len(shape) != 2:
        return 0
    said = getattr(task, "matrices", None)
    count = int(not is_embedding(task, path)) if said is None else said(path)
    if not isinstance(count, int) or count < 0 or (count and shape[0] % count):
        raise SettingsError(f"task: matrices({path!r}) is {count!r}, expected a number that divides its {shape[0]} rows, or 0")
    return count


class GptTask:
    """The built-in GPT: on text, byte by byte, or on the tokens of a mix."""

    def __init__(self, settings: TaskSettings, data: str | None, cache_dir: Path = CACHE) -> None:
        self.data = open_data(settings, data, cache_dir)
        self.mix = self.data if isinstance(self.data, Mix) else None
        self.units = Units("byte" if self.mix is None else "token", self.data.units)
        self.shape = gpt.Shape(settings.layers, settings.width, settings.heads, settings.context, self.data.vocabulary)
        self.dtype = jnp.dtype(settings.dtype)
        self._validation: Validation | None = None

    @property
    def tokens_per_batch(self) -> int:
        """Tokens predicted in a batch."""
        return self.data.batch * self.shape.context

    def init(self, key: jax.Array) -> gpt.Params:
        """Return random parameters."""
        return gpt.init(key, self.shape, self.dtype)

    def loss(self, params: gpt.Params, batch: jax.Array) -> jax.Array:
        """Return the mean cross-entropy in nats a token of windows int32 [batch, context + 1]."""
        return gpt.loss(params, batch, self.shape)

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Return windows int32 [batch, context + 1] of this share, as :meth:`diloco_learner.text.TextData.batches`."""
        return self.data.batches(share, shares, seed, start, rows)

    def validation(self) -> Validation:
        """Return held-out windows int32 [batch, context + 1], as the data's ``validation`` does."""
        if self._validation is None:
            self._validation = self.data.validation()
        return self._validation

    def is_embedding(self, path: str) -> bool:
        """Return whether this is the table of tokens' vectors; the head's rows are output units like any other weight's."""
        return path == "embedding"

    def matrices(self, path: str) -> int:
        """Return how many projections are fused in a tensor; 0 for tables of tokens' vectors and of their scores."""
        name = path.rpartition("/")[2]
        return 0 if name in ("embedding", "head") else {"qkv": 3, "gate_up": 2}.get(name, 1)

    def sample(self, params: gpt.Params, key: jax.Array, count: int, prompt: str = PROMPT) -> str:
        """Return ``count`` tokens as text, which go on from the end of a prompt."""
        seen = self.data.encode(prompt)[-self.shape.context :]
        if not seen.size:
            raise SettingsError(f"prompt = '': the model goes on from a text of at least one {self.units.item}")
        start = jnp.asarray(seen, jnp.int32)
        drawn = gpt.generate(params, key, start, shape=self.shape, count=count, temperature=TEMPERATURE)
        return self.data.decode(np.asarray(drawn))


def load_task(settings: TaskSettings, data: str | None, cache_dir: Path = CACHE) -> Task:
    """Return the built-in ``gpt``, or the result of the user's ``package.module:attribute`` for ``(settings, data)``.

    ``cache_dir``: where the built-in one keeps the tokens of a mix.

    Raises:
        SettingsError: no such task, it cannot be imported, or what it returns lacks something a task has.
        DataError: its data is missing, unreadable or too short.
    """
    if settings.name == "gpt":
        options.refuse(settings.options, options.BUILT_IN)
        return GptTask(settings, data, cache_dir)
    module_name, colon, attribute = settings.name.partition(":")
    if not colon:
        raise SettingsError(f"task.name = {settings.name!r}: expected 'gpt' or 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may do anything wrong
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(f"task.name = {settings.name!r}: {module_name} cannot be imported: {reason}") from error
    make = getattr(module, attribute, None)
    if not callable(make):
        what = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise SettingsError(f"task.name = {settings.name!r}: {attribute!r} {what} in {module_name}")
    task: Task = make(settings, data, **options.of(make, settings.options))
    check_members(task, f"task.name = {settings.name!r}: what {attribute} returns")
    return task


def check_members(task: Any, source: str) -> None:
    """Find out that a task has its members, and that each is called as it can be.

    Raises:
        SettingsError: one is missing, or needs an argument that nobody gives it; ``source`` begins the sentence.
    """
    missing = [name for name in REQUIRED if not hasattr(task, name)]
    if missing:
        raise SettingsError(f"{source} lacks {', '.join(missing)}")
    for member, (arguments, known) in CALLED.items():
        if callable(getattr(task, member, None)):
            members.keywords(task, member, arguments, known)
    rows = _rows_parameter(task)
    if rows is not None and rows.default is not None:
        raise SettingsError(f"task: batches(..., rows) needs the default None: whole batches{members.place(task.batches)}")
    every_s = evaluate_every_s(task)
    if not isinstance(every_s, int | float) or not 0 < every_s < math.inf:
        raise SettingsError(f"task: evaluate_every_s = {every_s!r}, expected seconds above 0")


def named(task: object, member: str) -> frozenset[str]:
    """Return the keywords that a task's member names, of those that it is given."""
    arguments, known = CALLED[member]
    return members.keywords(task, member, arguments, known)


def evaluate_every_s(task: object) -> float:
    """Return the least time between two evaluations of the global model."""
    said: float = getattr(task, "evaluate_every_s", EVALUATE_EVERY_S)
    return said


def units_of(task: object) -> dict[str, str | None]:
    """Return the units of a task's numbers, by ``item`` and ``loss``; None where it does not say."""
    units = getattr(task, "units", None)
    return {name: None if (said := getattr(units, name, None)) is None else str(said) for name in ("item", "loss")}


def makes_rows(task: Task) -> bool:
    """Return whether a task's ``batches`` makes some rows of each batch alone where it is given ``rows``."""
    return _rows_parameter(task) is not None


def _rows_parameter(task: Any) -> inspect.Parameter | None:
    return next((parameter for parameter in members.parameters(task.batches) if parameter.name == "rows"), None)


def first_batch(task: Task, settings: RunSettings) -> Any:
    """Return the first batch of a run's first share.

    Raises:
        SettingsError: there is none.
        DataError: the data is missing, unreadable or too short.
    """
    return next_batch(task.batches(0, settings.learners, settings.seed, 0), settings.task, 0, 0)


def next_batch(batches: Iterator[Any], settings: TaskSettings, share: int, index: int) -> Any:
    """Return the next of a task's batches, the ``index``-th of its share.

    Raises:
        SettingsError: there is none.
    """
    try:
        return next(batches)
    except StopIteration:
        raise SettingsError(
            f"task.name = {settings.name!r}: batches() of share {share} ended before batch {index}; they go on without end: "
            "begin with the data again when it is used up"
        ) from None


def check_shapes(task: Task, settings: RunSettings) -> None:
    """Find out that the first two batches of a run's first share have the same arrays.

    Raises:
        SettingsError: they have not, or there is only one.
    """
    batches = task.batches(0, settings.learners, settings.seed, 0)
    first, second = (_shapes(next_batch(batches, settings.task, 0, index)) for index in range(2))
    changed = next((path for path in sorted(first.keys() | second.keys()) if first.get(path) != second.get(path)), None)
    if changed is not None:
        raise SettingsError(
            f"task.name = {settings.task.name!r}: batches() gave {changed or 'the batch'} as {first.get(changed, 'nothing')} "
            f"and then as {second.get(changed, 'nothing')}: batches have the same shapes each time{members.place(task.batches)}"
        )


def _shapes(batch: Any) -> dict[str, str]:
    """Return a batch's arrays by path: types and shapes."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(batch)
    shaped = ((path, jax.eval_shape(lambda whole: whole, leaf)) for path, leaf in keyed)
    return {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in shaped}
