"""A task's loss as steps and evaluation call it: with the keywords that it names, and with separate metrics.

Arrays that it is given besides parameters and batch are arguments of the compiled programs (:meth:`Loss.given`). A task that
names none has none, and its programs are those of a loss of two arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.jax.leaves import difference
from diloco_learner.task import Aux, Task, named, rows_of
from diloco_learner.task_api import check_metric_names, check_tokens, checked_tokens

Given: TypeAlias = dict[str, Any]  # arrays by name
Call: TypeAlias = Callable[..., Any]  # (params, batch, arrays by keyword, other keywords) -> what the task's loss returns


class MeasuredLoss(NamedTuple):
    """All that a task's loss returned, traced: scalars, and the state."""

    loss: jax.Array
    metrics: dict[str, jax.Array]  # float32
    tokens: jax.Array | None  # of a type that counts exactly; None: the task does not count them
    state: Any


class Loss:
    """The loss of a task. ``seed`` is the run's, of which keys are made."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self._seed = task, seed
        self._named = named(task, "loss")

    def given(self, at: tuple[int, int]) -> Given:
        """Return the arrays of a training step on the batch ``at`` a share and an index in it."""
        return {"at": np.array(at, np.uint32)} if "key" in self._named else {}

    def of(self, call: Call, params: Any, batch: Any, given: Given, state: Any, *, train: bool) -> MeasuredLoss:
        """Return all that the task's loss returns, traced. ``call`` calls it where the arrays lie.

        A step's key is ``fold_in(fold_in(key(seed), share), index)``: the same in every process, and when the step is done
        again. In validation, where ``given`` has no batch's place, it is ``key(seed)``, and the state stays as it is.

        Raises:
            SettingsError: the task returned something else.
        """
        arrays: Given = {}
        if "key" in self._named:
            arrays["key"] = jax.random.key(self._seed)
            for number in given.get("at", ()):
                arrays["key"] = jax.random.fold_in(arrays["key"], number)
        if "weights" in self._named:
            arrays["weights"] = jnp.ones(rows_of(self.task, batch), jnp.float32)
        known = {"state": state, "constants": given.get("constants")}
        arrays |= {name: value for name, value in known.items() if name in self._named}
        others = {"train": train} if "train" in self._named else {}
        loss, aux = self._parts(call(params, batch, arrays, others))
        moves = "state" in self._named and train
        after = self._moved(state, aux.state) if moves else state
        return MeasuredLoss(loss, self._metrics(aux.metrics), self._tokens(aux.tokens), after)

    def counted(self, tokens: jax.Array, at: tuple[int, int]) -> int:
        """Wait for the tokens that were counted in the batch ``at`` a share and an index in it, and return them.

        Raises:
            SettingsError: they are above ``tokens_per_batch``, or no whole number.
        """
        most, where = self.task.tokens_per_batch, members.place(self.task.loss)
        return checked_tokens(float(jax.device_get(tokens)), most, at, where)

    def _parts(self, returned: Any) -> tuple[jax.Array, Aux]:
        if not isinstance(returned, tuple):
            return self._scalar(returned), Aux()
        if len(returned) != 2 or not isinstance(returned[1], Aux):
            came = ", ".join(_shown(part) for part in returned)
            raise self._wrong(f"a tuple of {came}", "return only the mean loss of the batch, or (loss, Aux(metrics))")
        return self._scalar(returned[0]), returned[1]

    def _moved(self, before: Any, after: Any) -> Any:
        """Return the state that a step leaves, of the very types that it began with."""
        if (differs := difference(before, after)) is not None:
            path, wanted, came = differs
            name = f"the state's {path!r}" if path else "the state"
            raise SettingsError(
                f"task: loss() returned {name} as {came}, expected {wanted}, as before the step: "
                f"return (loss, Aux(metrics, state)){members.place(self.task.loss)}"
            )
        if str(jax.tree.structure(before)) != str(jax.tree.structure(after)):
            raise SettingsError(
                f"task: loss() returned the state as {jax.tree.structure(after)}, expected {jax.tree.structure(before)}, as "
                f"before the step{members.place(self.task.loss)}"
            )
        return jax.tree.map(lambda old, new: jax.lax.convert_element_type(new, old.dtype), before, after)

    def _scalar(self, loss: Any) -> jax.Array:
        if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise self._wrong(_shown(loss), "return only the mean loss of the batch, or (loss, Aux(metrics))")
        if loss.dtype.itemsize < 4:
            raise self._wrong(
                _shown(loss),
                "cast logits to float32 before the loss; otherwise the loss and its mean have only two or three digits",
            )
        scalar: jax.Array = loss
        return scalar

    def _metrics(self, metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
        where = members.place(self.task.loss)
        check_metric_names(metrics, where)
        for name, value in metrics.items():
            if np.shape(value) != () or not _is_real(value):
                raise SettingsError(
                    f"task: loss() returned metric {name!r} as {_shown(value)}, expected a scalar, the mean of its rows{where}"
                )
        return {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    def _tokens(self, tokens: Any) -> jax.Array | None:
        if tokens is None:
            return None
        shape = np.shape(tokens) if _is_real(tokens) else None
        dtype = type(tokens).__name__ if shape is None else str(jnp.result_type(tokens))
        check_tokens(shape, dtype, members.place(self.task.loss))
        return jnp.asarray(tokens)

    def _wrong(self, came: str, advice: str) -> SettingsError:
        return SettingsError(
            f"task: loss() returned {came}, expected a float32 scalar: {advice}{members.place(self.task.loss)}"
        )


class TokenCount:
    """Counts the tokens of a training step's loss, by ``program(leaves, task's state, batch, given)``.

    A step's outputs are there when it ends, and the boundary that books it comes a little before that. So the tokens have a
    program of their own, dispatched ahead of the step: they are known when a device begins it. It is the same loss, of which
    XLA leaves out all that the tokens do not depend on: the whole model, where a mask in the batch says what counts.
    """

    def __init__(self, loss: Loss, program: Any) -> None:
        self._loss, self._program, self._counts = loss, program, False

    def lower(self, step: jax.stages.Lowered, *arguments: Any) -> list[jax.stages.Lowered]:
        """Return the program traced, if the ``step``, whose last output it is, has tokens among its scalars."""
        self._counts = step.out_info[-1][-1] is not None
        return [self._program.lower(*arguments)] if self._counts else []

    def begin(self, *arguments: Any) -> jax.Array | None:
        """Dispatch the program ahead of a step; None: it is not known that the task counts."""
        return self._program(*arguments) if self._counts else None

    def waiting(self, ahead: jax.Array | None, own: jax.Array | None, at: tuple[int, int]) -> dict[str, Any]:
        """Return as ``counted`` what waits for a step's tokens: those begun ``ahead`` of it, or its ``own`` output.

        Nothing, if the task does not count them. ``at``: share and index of its batch.
        """
        self._counts = own is not None
        return {} if own is None else {"counted": partial(self._loss.counted, own if ahead is None else ahead, at)}


def _is_real(value: Any) -> bool:
    dtype = jnp.result_type(value) if isinstance(value, bool | int | float) else getattr(value, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_) and not jnp.iscomplexobj(value)


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
