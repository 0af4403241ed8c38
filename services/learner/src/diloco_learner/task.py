"""The model and its data. A user's own model is an object with the methods of :class:`Task`; the GPT is built in."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.built_in import BUILT_IN
from diloco.errors import SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner import frameworks, tensors
from diloco_learner.api import members, options
from diloco_learner.data.data import open_data
from diloco_learner.jax import gpt
from diloco_learner.jax.leaves import difference, path_of
from diloco_learner.mix.mix import Mix
from diloco_learner.task_api import Aux as Aux
from diloco_learner.task_api import Units as Units
from diloco_learner.task_api import check_called, made
from diloco_learner.tensors import Tensor
from diloco_learner.text import TextData

TEMPERATURE = 0.8
PROMPT = "\n\ndef "  # Python's library goes on with text; after a single newline it mostly goes on with blanks
PROMPT_BYTES = 200
PROMPT_WORDS = 3  # of another text: so many words of what is held out of it

jax.tree_util.register_dataclass(Aux)

Validation = list[NDArray[np.int32]] | dict[str, list[NDArray[np.int32]]]


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
        """``loss(params, batch, *, key, train, state, constants, weights)`` returns the mean loss, or it and an :class:`Aux`.

        A float32 scalar in the task's units, differentiable by JAX, traced by ``jax.jit``.
        """

    @property
    def batches(self) -> Callable[..., Iterator[Any]]:
        """``batches(share, shares, seed, start, *, rows)`` yields batches without end from the ``start``-th on, of one share.

        The k-th batch depends on nothing but share, shares, seed and k. ``rows``: the rows of each to make, None for all;
        arrays of another first axis than the batch's rows are whole all the same.
        """


REQUIRED = ("tokens_per_batch", "init", "loss", "batches")
# by member that is called: how many arguments it is given by place, and the keywords that it may name
CALLED: dict[str, tuple[int, tuple[str, ...]]] = {
    "init": (1, ()),
    "loss": (2, ("key", "train", "state", "constants", "weights")),
    "batches": (4, ("rows",)),
    "validation": (0, ()),
    "is_embedding": (1, ()),
    "matrices": (1, ()),
    "partition": (2, ()),
    "tensor": (2, ()),
    "optimizer": (1, ()),
    "constants": (0, ()),
    "init_state": (1, ()),
    "merge_state": (1, ()),
    "evaluate": (1, ("key", "state", "constants")),
    "sample": (3, ("state", "constants")),
    "names": (0, ()),
    "config": (0, ()),
}


class GptTask:
    """The built-in GPT: on text, byte by byte, or on the tokens of a mix."""

    def __init__(self, settings: TaskSettings, data: str | None, cache_dir: Path | None = None) -> None:
        self.data = open_data(settings, data, cache_dir)
        self.mix = self.data if isinstance(self.data, Mix) else None
        self.units = Units("byte" if self.mix is None else "token", self.data.units)
        self.shape = gpt.Shape(settings.layers, settings.width, settings.heads, settings.context, self.data.vocabulary)
        self.dtype = jnp.dtype(settings.dtype)
        self._validation: Validation | None = None
        self._own_text = data is not None

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

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        """Return the table of tokens' vectors, the head of their scores, and weights, of which some are several fused."""
        name = path.rpartition("/")[2]
        if name in ("embedding", "head"):
            return Tensor(kind=name)  # type: ignore[arg-type]
        if len(shape) < 2:
            return Tensor(kind="vector")
        count = {"qkv": 3, "gate_up": 2}.get(name, 1)
        return Tensor(kind="matrix", parts=(shape[0] // count,) * count)

    @property
    def prompt(self) -> str:
        """The text that samples go on from where no other is given: such as the model was trained on."""
        if not isinstance(self.data, TextData):
            return "\n"
        if not self._own_text:
            return PROMPT
        begins = self.data.decode(self.data.corpus.to_evaluate.text[:PROMPT_BYTES].astype(np.int32)).split()
        return " ".join(begins[:PROMPT_WORDS]) + " "

    def sample(self, params: gpt.Params, key: jax.Array, count: int, prompt: str | None = None) -> str:
        """Return ``count`` tokens as text, which go on from the end of a prompt, by default :attr:`prompt`."""
        seen = self.data.encode(self.prompt if prompt is None else prompt)[-self.shape.context :]
        if not seen.size:
            raise SettingsError(f"prompt = '': the model continues a text of at least one {self.units.item}")
        start = jnp.asarray(seen, jnp.int32)
        drawn = gpt.generate(params, key, start, shape=self.shape, count=count, temperature=TEMPERATURE)
        return self.data.decode(np.asarray(drawn))


def load_task(settings: TaskSettings, data: str | None, cache_dir: Path | None = None) -> Task:
    """Return the built-in ``gpt``, or the result of the user's ``package.module:attribute`` for ``(settings, data)``.

    ``cache_dir``: where the built-in one keeps the tokens of a mix.

    Raises:
        SettingsError: no such task, it cannot be imported, or what it returns lacks something a task has.
        DataError: its data is missing, unreadable or too short.
    """
    if settings.name == BUILT_IN:
        options.refuse(settings.options, options.BUILT_IN)
        return GptTask(settings, data, cache_dir)
    return checked(made(settings, data), settings)


def checked(task: Any, settings: TaskSettings) -> Task:
    """Return a task that a user's factory made, if it has its members.

    Raises:
        SettingsError: it lacks something that a task has, or is one of another framework.
    """
    if not hasattr(task, "init"):
        frameworks.refuse_others(task, settings, "jax")
    check_members(task, f"task.name = {settings.name!r}: what {members.factory(settings.name)[1]} returns")
    found: Task = task
    return found


def check_members(task: Any, source: str) -> None:
    """Check that a task has its members, and that each accepts the arguments that it gets.

    Raises:
        SettingsError: one is missing, or needs an argument that is not given to it; ``source`` begins the sentence.
    """
    check_called(task, REQUIRED, CALLED, source)
    tensors.check_members(task)
    rows = _rows_parameter(task)
    if rows is not None and rows.default is not None:
        raise SettingsError(
            "task: rows of batches(..., rows) needs the default None, which stands for whole "
            f"batches{members.place(task.batches)}"
        )


def named(task: object, member: str) -> frozenset[str]:
    """Return those of the given keywords that a task's member names."""
    arguments, known = CALLED[member]
    return members.keywords(task, member, arguments, known)


def rows_of(task: object, batch: Any) -> int:
    """Return the rows of a whole batch: the task's number, or the first axis of its largest array; 0: there are none."""
    said: int | None = getattr(task, "rows_per_batch", None)
    if said is not None:
        return said
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    largest = max(shapes, key=math.prod, default=())
    return int(largest[0]) if largest else 0


def makes_rows(task: Task) -> bool:
    """Return whether a task's ``batches`` makes some rows of each batch alone where it is given ``rows``."""
    return _rows_parameter(task) is not None


def _rows_parameter(task: Any) -> inspect.Parameter | None:
    return next((parameter for parameter in members.parameters(task.batches) if parameter.name == "rows"), None)


def _is_of_jax(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))


def check_alike(task: Task, first: Any, later: Any) -> None:
    """Check that one of a task's batches has the same arrays as the first.

    Raises:
        SettingsError: it has not, or something else than numbers.
    """
    for keys, leaf in jax.tree_util.tree_flatten_with_path(later)[0]:
        dtype = getattr(leaf, "dtype", None)
        if not (isinstance(leaf, int | float | complex) if dtype is None else _is_of_jax(dtype)):
            came = f"a {type(leaf).__name__}" if dtype is None else f"an array of {dtype}"
            raise SettingsError(
                f"task: batches() gave {path_of(keys) or 'the batch'} as {came}, expected an array of "
                f"numbers{members.place(task.batches)}"
            )
    if (differs := difference(first, later)) is not None:
        path, wanted, came = differs
        raise SettingsError(
            f"task: batches() gave {path or 'the batch'} as {wanted} and then as {came}: batches have the same shapes "
            f"each time{members.place(task.batches)}"
        )
