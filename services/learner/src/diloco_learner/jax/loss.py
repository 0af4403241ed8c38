"""A task's loss as steps and evaluation call it: with the keywords that it names, and with separate metrics.

Arrays that it is given besides parameters and batch are arguments of the compiled programs (:meth:`Loss.given`). A task that
names none has none, and its programs are those of a loss of two arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from diloco.errors import SettingsError
from diloco_learner.api import members
from diloco_learner.jax.leaves import difference
from diloco_learner.task import Aux, Task, named, rows_of
from diloco_learner.task_api import check_metric_names

Given: TypeAlias = dict[str, Any]  # arrays by name
Call: TypeAlias = Callable[..., Any]  # (params, batch, arrays by keyword, other keywords) -> what the task's loss returns


class Loss:
    """The loss of a task. ``seed`` is the run's, of which keys are made."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self._seed = task, seed
        self._named = named(task, "loss")

    def given(self, at: tuple[int, int]) -> Given:
        """Return the arrays of a training step on the batch ``at`` a share and an index in it."""
        return {"at": np.array(at, np.uint32)} if "key" in self._named else {}

    def of(
        self, call: Call, params: Any, batch: Any, given: Given, state: Any, *, train: bool
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], Any]]:
        """Return loss, and metrics and state, traced. ``call`` calls the task's loss where the arrays lie.

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
        if "state" not in self._named or not train:
            return loss, (self._metrics(aux.metrics), state)
        return loss, (self._metrics(aux.metrics), self._moved(state, aux.state))

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

    def _wrong(self, came: str, advice: str) -> SettingsError:
        return SettingsError(
            f"task: loss() returned {came}, expected a float32 scalar: {advice}{members.place(self.task.loss)}"
        )


def _is_real(value: Any) -> bool:
    dtype = jnp.result_type(value) if isinstance(value, bool | int | float) else getattr(value, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_) and not jnp.iscomplexobj(value)


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
