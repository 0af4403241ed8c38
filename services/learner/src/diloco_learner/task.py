"""The model and its data. A user's own model is an object with the methods of :class:`Task`; the GPT is built in."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner import gpt, text

TEMPERATURE = 0.8
PROMPT = "\n"


@dataclass(frozen=True)
class Units:
    """The units of a task's numbers, for people."""

    loss: str


class Task(Protocol):
    """A JAX model with its data.

    Parameters are any pytree of arrays, each float32 or bfloat16; the learner keeps all of them in float32, and hands the loss
    what is bfloat16 rounded. Batches are any pytree of arrays, of the same shapes each time. A task may also
    have ``units: Units``, ``sample(params, key, count) -> str``, text of ``count`` characters drawn from the model (with a
    parameter ``prompt`` more, which has a default, it goes on from a text: ``diloco sample --prompt``), and
    ``matrices(path) -> int``, how many matrices a tensor of two axes has, one below the other: 0 for tables and heads, as
    ``inner.optimizer = muon`` treats them (where a task does not say: 0 for embedding-like tensors, 1 for others). For learners
    of several devices it may have ``partition(path, shape) -> PartitionSpec | None``, how a tensor is split over the mesh, and
    ``axes = "explicit"``, for a loss that is written for explicit axes (docs/islands.md). ``init`` is then traced, too.
    ``batches`` may have a further parameter, ``rows: range | None = None``: of a learner of several processes each asks for its
    rows of each batch alone. Arrays of another first axis than the batch's rows are whole all the same.
    """

    @property
    def tokens_per_batch(self) -> int:
        """Tokens that one batch trains on."""

    def init(self, key: jax.Array) -> Any:
        """Return parameters to begin with: the same for the same key."""

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the mean loss of a batch in nats a token: a float32 scalar, differentiable by JAX, traced by ``jax.jit``."""

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        """Yield batches without end from the ``start``-th on, of one of ``shares`` shares of the data.

        The k-th batch depends on nothing but share, shares, seed and k.
        """

    def validation(self) -> Sequence[Any]:
        """Return batches that nobody trains on."""

    def is_embedding(self, path: str) -> bool:
        """Return whether the tensor of this path (its keys joined by ``/``) is embedding-like: merged by direct average."""


def matrices_of(task: Task, path: str, shape: tuple[int, ...]) -> int:
    """Return how many matrices a tensor has that an optimizer of matrices treats each by itself; 0: none.

    Raises:
        SettingsError: the task's number does not divide the tensor's rows.
    """
    if len(shape) != 2:
        return 0
    said = getattr(task, "matrices", None)
    count = int(not task.is_embedding(path)) if said is None else said(path)
    if not isinstance(count, int) or count < 0 or (count and shape[0] % count):
        raise SettingsError(f"task: matrices({path!r}) is {count!r}, expected a number that divides its {shape[0]} rows, or 0")
    return count


REQUIRED = ("tokens_per_batch", "init", "loss", "batches", "validation", "is_embedding")


class GptTask:
    """The built-in byte-level GPT on text."""

    units = Units("nats per byte")

    def __init__(self, settings: TaskSettings, data: str | None) -> None:
        self.shape = gpt.Shape(settings.layers, settings.width, settings.heads, settings.context)
        self.dtype = jnp.dtype(settings.dtype)
        self.data = text.TextData(settings, data)
        self._validation: list[NDArray[np.int32]] | None = None

    @property
    def tokens_per_batch(self) -> int:
        """Bytes predicted in a batch."""
        return self.data.batch * self.shape.context

    def init(self, key: jax.Array) -> gpt.Params:
        """Return random parameters."""
        return gpt.init(key, self.shape, self.dtype)

    def loss(self, params: gpt.Params, batch: jax.Array) -> jax.Array:
        """Return the mean cross-entropy in nats a byte of windows int32 [batch, context + 1]."""
        return gpt.loss(params, batch, self.shape)

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Return windows int32 [batch, context + 1] of this share's text, as :meth:`diloco_learner.text.TextData.batches`."""
        return self.data.batches(share, shares, seed, start, rows)

    def validation(self) -> Sequence[NDArray[np.int32]]:
        """Return held-out windows int32 [batch, context + 1], as :meth:`~diloco_learner.text.TextData.validation`."""
        if self._validation is None:
            self._validation = self.data.validation()
        return self._validation

    def is_embedding(self, path: str) -> bool:
        """Return whether this is the table of byte vectors; the head's rows are output units like any other weight's."""
        return path == "embedding"

    def matrices(self, path: str) -> int:
        """Return how many projections are fused in a tensor; 0 for tables of bytes' vectors and of their scores."""
        name = path.rpartition("/")[2]
        return 0 if name in ("embedding", "head") else {"qkv": 3, "gate_up": 2}.get(name, 1)

    def sample(self, params: gpt.Params, key: jax.Array, count: int, prompt: str = PROMPT) -> str:
        """Return ``count`` bytes as text, which go on from the end of a prompt."""
        seen = np.frombuffer(prompt.encode()[-self.shape.context :], np.uint8)
        if not seen.size:
            raise SettingsError("prompt = '': the model goes on from a text of at least one byte")
        start = jnp.asarray(seen, jnp.int32)
        drawn = gpt.generate(params, key, start, shape=self.shape, count=count, temperature=TEMPERATURE)
        return np.asarray(drawn).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def load_task(settings: TaskSettings, data: str | None) -> Task:
    """Return the built-in ``gpt``, or the result of the user's ``package.module:attribute`` for ``(settings, data)``.

    Raises:
        SettingsError: no such task, it cannot be imported, or what it returns lacks something a task has.
        DataError: its data is missing, unreadable or too short.
    """
    if settings.name == "gpt":
        return GptTask(settings, data)
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
    task: Task = make(settings, data)
    missing = [name for name in REQUIRED if not hasattr(task, name)]
    if missing:
        raise SettingsError(f"task.name = {settings.name!r}: what {attribute} returns lacks {', '.join(missing)}")
    rows = _rows_parameter(task)
    if rows is not None and rows.default is not None:
        raise SettingsError(f"task.name = {settings.name!r}: batches(..., rows) needs the default None: whole batches")
    return task


def makes_rows(task: Task) -> bool:
    """Return whether a task's ``batches`` makes some rows of each batch alone where it is given ``rows``."""
    return _rows_parameter(task) is not None


def _rows_parameter(task: Task) -> inspect.Parameter | None:
    try:
        return inspect.signature(task.batches).parameters.get("rows")
    except (TypeError, ValueError):  # a callable that says nothing of its parameters
        return None


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


def validation_batches(task: Task, settings: TaskSettings) -> Sequence[Any]:
    """Return the batches that the global model is evaluated on.

    Raises:
        SettingsError: there are none.
    """
    batches = task.validation()
    if not len(batches):
        raise SettingsError(
            f"task.name = {settings.name!r}: validation() returned no batch; give at least one, on which the model is evaluated"
        )
    return batches
