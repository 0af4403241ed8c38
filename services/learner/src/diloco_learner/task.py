"""What is trained. A user's own model is an object with the methods of :class:`Task`; the GPT is built in."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco.settings import TaskSettings
from diloco_learner import gpt, text

VALIDATION_BATCHES = 64
TEMPERATURE = 0.8
PROMPT = b"\n"


class Task(Protocol):
    """A JAX model with its data.

    Parameters are any pytree of float32 arrays; batches any pytree of arrays, of the same shapes each time. A task may also
    have ``sample(params, key, count) -> str``, text of ``count`` characters drawn from the model.
    """

    @property
    def tokens_per_batch(self) -> int:
        """Tokens that one batch trains on."""

    def init(self, key: jax.Array) -> Any:
        """Parameters to begin with: the same for the same key."""

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Mean loss of a batch in nats a token: a float32 scalar, differentiable by JAX, traced by ``jax.jit``."""

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        """Batches without end from the ``start``-th on, of one of ``shares`` shares of the data.

        The k-th batch depends on nothing but share, shares, seed and k.
        """

    def validation(self) -> Sequence[Any]:
        """Batches that nobody trains on."""

    def is_embedding(self, path: str) -> bool:
        """Whether the tensor of this path (its keys joined by ``/``) is embedding-like: merged by direct average."""


REQUIRED = ("tokens_per_batch", "init", "loss", "batches", "validation", "is_embedding")


class GptTask:
    """The built-in byte-level GPT on text."""

    def __init__(self, settings: TaskSettings, data: str | None) -> None:
        self.shape = gpt.Shape(settings.layers, settings.width, settings.heads, settings.context)
        self.batch = settings.batch
        self.corpus = text.load_corpus(data)
        self._validation: list[NDArray[np.int32]] | None = None

    @property
    def tokens_per_batch(self) -> int:
        """Bytes predicted in a batch."""
        return self.batch * self.shape.context

    def init(self, key: jax.Array) -> gpt.Params:
        """Random parameters."""
        return gpt.init(key, self.shape)

    def loss(self, params: gpt.Params, batch: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats a byte of [batch, context + 1] windows."""
        return gpt.loss(params, batch, self.shape)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[NDArray[np.int32]]:
        """Windows int32 [batch, context + 1] of this share's text.

        Raises:
            DataError: the share is too short for one batch.
        """
        what = f"{self.corpus.source}, share {share} of {shares}"
        windows = text.Windows(
            self.corpus.share(share, shares), self.shape.context, self.batch, seed=seed, share=share, what=what
        )
        return windows.iterate(start)

    def validation(self) -> Sequence[NDArray[np.int32]]:
        """Windows evenly spread over the held-out text.

        Raises:
            DataError: it is too short for one batch.
        """
        if self._validation is None:
            held_out = self.corpus.held_out_text()
            self._validation = text.validation_batches(
                held_out, self.shape.context, self.batch, VALIDATION_BATCHES, self.corpus.source
            )
        return self._validation

    def is_embedding(self, path: str) -> bool:
        """The table of byte vectors; the head's rows are output units like any other weight's."""
        return path == "embedding"

    def sample(self, params: gpt.Params, key: jax.Array, count: int) -> str:
        """``count`` bytes as text."""
        prompt = jnp.asarray(np.frombuffer(PROMPT, np.uint8), jnp.int32)
        drawn = gpt.generate(params, key, prompt, shape=self.shape, count=count, temperature=TEMPERATURE)
        return np.asarray(drawn).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def load_task(settings: TaskSettings, data: str | None) -> Task:
    """The built-in ``gpt``, or what the user's ``package.module:attribute`` returns for ``(settings, data)``.

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
    except Exception as error:  # whatever a user's module does wrong
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
    return task
