"""A torch model with its data: an object with the methods of :class:`TorchTask`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from diloco.core.tensors.built_in import BUILT_IN
from diloco.errors import SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner import frameworks, tensors
from diloco_learner.api import members
from diloco_learner.task_api import Aux, check_called, check_metric_names, check_tokens, made

REQUIRED = ("tokens_per_batch", "module", "loss", "batches")
# by member that is called: how many arguments it is given by place, and the keywords that it may name
CALLED: dict[str, tuple[int, tuple[str, ...]]] = {
    "module": (0, ()),
    "loss": (2, ()),
    "batches": (4, ()),
    "validation": (0, ()),
    "is_embedding": (1, ()),
    "matrices": (1, ()),
    "tensor": (2, ()),
    "tensors": (1, ()),
    "merge_state": (1, ()),
    "optimizer": (2, ()),
    "parallelize": (2, ()),
    "evaluate": (1, ()),
    "sample": (2, ("prompt",)),
}


class TorchTask(Protocol):
    """A torch model with its data. These members are needed; docs/pytorch.md has all of them."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens that one batch trains on, at most."""

    def module(self) -> torch.nn.Module:
        """Return the model to begin with. Its trained parameters are float32 or bfloat16."""

    @property
    def loss(self) -> Callable[[torch.nn.Module, Any], Any]:
        """``loss(module, batch)`` returns a batch's mean loss, a float32 scalar in the task's units, or it and an ``Aux``."""

    @property
    def batches(self) -> Callable[..., Iterator[Any]]:
        """``batches(share, shares, seed, start)`` yields batches without end from the ``start``-th on, of one share."""


def load_task(settings: TaskSettings, data: str | None) -> TorchTask:
    """Return the result of the user's ``package.module:attribute`` for ``(settings, data)``.

    Raises:
        SettingsError: no such task, it cannot be imported, or it lacks something that a torch task has.
    """
    if settings.name == BUILT_IN:
        raise SettingsError(
            "the run's task is the built-in one, which is written for JAX: name a torch task of the same model with the "
            "setting task, such as torch_gpt:make of examples/torch_gpt.py"
        )
    return checked(made(settings, data), settings)


def checked(task: Any, settings: TaskSettings) -> TorchTask:
    """Return a task that a user's factory made, if it has its members.

    Raises:
        SettingsError: it lacks something that a torch task has, or is one of another framework.
    """
    if not hasattr(task, "module"):
        frameworks.refuse_others(task, settings, "torch")
    check_called(task, REQUIRED, CALLED, f"task = {settings.name!r}: what {members.factory(settings.name)[1]} returns")
    tensors.check_members(task)
    found: TorchTask = task
    return found


class TorchMeasured(NamedTuple):
    """All that a torch task's loss returned."""

    loss: torch.Tensor  # []
    metrics: dict[str, float]
    tokens: Any  # a number, or a scalar tensor, that loss and metrics are means of; None: the task does not count them


def loss_of(task: TorchTask, module: torch.nn.Module, batch: Any) -> TorchMeasured:
    """Return a batch's loss with its metrics and tokens; nothing waits for the device unless there are metrics on it.

    Raises:
        SettingsError: the task returned something else.
    """
    returned = task.loss(module, batch)
    loss, aux = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, Aux())
    where = members.place(task.loss)
    if not isinstance(aux, Aux):
        raise SettingsError(f"task: loss() returned a tuple with a {type(aux).__name__}, expected (loss, Aux(metrics)){where}")
    if not isinstance(loss, torch.Tensor) or loss.shape != () or loss.dtype not in (torch.float32, torch.float64):
        came = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise SettingsError(
            f"task: loss() returned {came.removeprefix('torch.')}, expected a float32 scalar: the mean loss of the batch, of "
            f"logits in float32{where}"
        )
    if aux.tokens is not None:
        is_tensor = isinstance(aux.tokens, torch.Tensor)
        dtype = str(aux.tokens.dtype).removeprefix("torch.") if is_tensor else type(aux.tokens).__name__
        shape = tuple(aux.tokens.shape) if is_tensor else () if isinstance(aux.tokens, int) else None
        check_tokens(shape, dtype, where)
    return TorchMeasured(loss, _metrics(aux.metrics, where), aux.tokens)


def _metrics(metrics: Mapping[str, Any], where: str) -> dict[str, float]:
    check_metric_names(metrics, where)
    for name, value in metrics.items():
        if not isinstance(value, int | float) and not (isinstance(value, torch.Tensor) and value.shape == ()):
            raise SettingsError(f"task: loss() returned metric {name!r} as {value!r:.60}, expected a scalar{where}")
    return {name: float(value) for name, value in metrics.items()}
