"""The inner optimizer over masters, as :mod:`diloco_learner.jax.inner` has it: AdamW, or Muon for matrices.

``torch.optim.Muon`` is another one: it computes in bfloat16, corrects no bias, and takes a fused tensor for one matrix. In a
run of both frameworks all learners are to have the same.

Neither is a ``torch.optim.Optimizer``: making one imports ``torch._dynamo``, which takes nine seconds of processor time in each
process. AdamW's step is PyTorch's own function.

Of a tensor that is spread over the processes of a learner each process moves its part. Muon gathers a matrix, and each process
computes the whole update and takes its part of it, as in Liu et al. (arXiv 2502.16982, 2.3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.adamw import adamw

from diloco.core.tensors.outer import EPSILON
from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco_learner.api import members
from diloco_learner.pytorch.shards import is_sharded, local_of, shards_of
from diloco_learner.tensors import tensor_of

MOMENTUM = 0.95  # as its author has it (Jordan 2024), like the five Newton-Schulz steps of these coefficients
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
RMS = 0.2  # of an update's entries, as AdamW's are about (Liu et al., arXiv 2502.16982), so one rate serves both
TINY = 1e-8  # added to a norm that is divided by


class TorchOptimizer(Protocol):
    """The part of a ``torch.optim.Optimizer`` that is used."""

    param_groups: list[dict[str, Any]]  # each has "params" and "lr"
    state: MutableMapping[torch.Tensor, dict[str, Any]]

    def step(self) -> Any:
        """Take a step along the gradients."""


Optimizers = list[TorchOptimizer]


class _BuiltIn(ABC):
    """An optimizer of groups of parameters, each with its rate ``lr`` and its ``weight_decay``."""

    def __init__(self, groups: Sequence[tuple[Sequence[torch.Tensor], float]], rate: float) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(params), "lr": rate, "weight_decay": decay} for params, decay in groups
        ]
        self.state: MutableMapping[torch.Tensor, dict[str, Any]] = {one: {} for params, _ in groups for one in params}

    def step(self) -> None:
        """Take a step along the gradients."""
        with torch.no_grad():
            for group in self.param_groups:
                params = [parameter for parameter in group["params"] if parameter.grad is not None]
                self.move(params, [parameter.grad for parameter in params], group["lr"], group["weight_decay"])

    @abstractmethod
    def move(self, params: Sequence[torch.Tensor], gradients: Sequence[Any], rate: float, decay: float) -> None:
        """Move parameters along their gradients."""


class TorchAdamW(_BuiltIn):
    """AdamW (arXiv 1711.05101), by the kernel that ``torch.optim.AdamW(fused=True)`` has."""

    def __init__(self, groups: Sequence[tuple[Sequence[torch.Tensor], float]], rate: float, beta1: float, beta2: float) -> None:
        super().__init__(groups, rate)
        self.beta1, self.beta2 = beta1, beta2

    def move(self, params: Sequence[torch.Tensor], gradients: Sequence[Any], rate: float, decay: float) -> None:
        """Move parameters along their gradients."""
        for parameter in params:
            if not self.state[parameter]:
                step = torch.zeros((), device=parameter.device)
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": step, **moments}
        states = [self.state[parameter] for parameter in params]
        means, squares, steps = ([local_of(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            list(map(local_of, params)), list(map(local_of, gradients)), means, squares, [], steps, fused=True, amsgrad=False,
            maximize=False, beta1=self.beta1, beta2=self.beta2, lr=rate, weight_decay=decay, eps=EPSILON,
        )  # fmt: skip


class Muon(_BuiltIn):
    """Orthogonalise the momentum of each matrix (Muon); an update's entries have a root mean square of 0.2.

    ``matrices``: of each parameter, the rows of each of its matrices, one below the other.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], matrices: Sequence[tuple[int, ...]], rate: float, weight_decay: float
    ) -> None:
        super().__init__([(params, weight_decay)], rate)
        self.matrices = dict(zip(params, matrices, strict=True))

    def move(self, params: Sequence[torch.Tensor], gradients: Sequence[Any], rate: float, decay: float) -> None:
        """Move parameters along their gradients."""
        for parameter, gradient in zip(params, gradients, strict=True):
            self._step(parameter, gradient, rate, decay)

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"], state["momentum"] = torch.zeros(()), torch.zeros_like(parameter)
        state["step"] += 1
        momentum, count = state["momentum"], int(state["step"])
        local_of(momentum).lerp_(local_of(gradient), 1 - MOMENTUM)
        # Nesterov's, of which each part is corrected for its beginning with 0
        ahead = MOMENTUM / (1 - MOMENTUM ** (count + 1)) * momentum + (1 - MOMENTUM) / (1 - MOMENTUM**count) * gradient
        update = self._orthogonal(parameter, ahead)
        local_of(parameter).mul_(1 - rate * decay).sub_(rate * update)

    def _orthogonal(self, parameter: torch.Tensor, ahead: Any) -> torch.Tensor:
        """Return the update of a parameter, float32 of the shape of what this process has of it."""
        whole = ahead.full_tensor() if is_sharded(ahead) else ahead
        flat, rows = whole.reshape(-1, whole.shape[-1]), self.matrices[parameter]
        alike = len(set(rows)) == 1
        split = [flat.reshape(len(rows), rows[0], -1)] if alike else [each[None] for each in flat.split(rows)]
        updates = [RMS * max(each.shape[1:]) ** 0.5 * orthogonal(each) for each in split]
        update = (updates[0] if alike else torch.cat(updates, dim=1)).reshape(whole.shape)
        for shard in shards_of({"": parameter}).values():
            return update[shard.box.where]
        return update


def clip(gradients: list[torch.Tensor], most: float, norm: torch.Tensor) -> None:
    """Scale gradients whose ``norm``, float32 [], all together, is above ``most`` down to it, as torch's own function does."""
    if gradients:
        with torch.no_grad():
            torch._foreach_mul_(gradients, torch.clamp(most / (norm + 1e-6), max=1.0))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices, float32 [count, rows, columns], with singular values of about 1 (Newton and Schulz)."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + TINY)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def matrices_of(task: object, path: str, shape: tuple[int, ...], tables: Collection[str]) -> tuple[int, ...]:
    """Return the rows of each of a tensor's matrices for Muon; (): it has none.

    Where the task does not say which tensors are matrices, ``tables``, by path, are none: those of ``nn.Embedding``, and heads
    that are tied to one.
    """
    if path in tables and not hasattr(task, "tensor") and not hasattr(task, "matrices"):
        return ()
    return tensor_of(task, path, shape).matrices(shape)


def built_in(
    settings: RunSettings, task: object, masters: Mapping[str, torch.Tensor], tables: Collection[str], rate: float
) -> Optimizers:
    """Return the optimizers that the run's settings describe; weights of two or more axes decay, norms and biases do not."""
    inner = settings.inner
    rows = {path: matrices_of(task, path, tuple(master.shape), tables) for path, master in masters.items()}
    muons = [path for path, its in rows.items() if its and inner.optimizer == "muon"]
    found: Optimizers = []
    if muons:
        found.append(Muon([masters[path] for path in muons], [rows[path] for path in muons], rate, inner.weight_decay))
    others = [master for path, master in masters.items() if path not in muons]
    if others:
        decays = [master for master in others if master.ndim > 1], [master for master in others if master.ndim <= 1]
        groups = [(some, decay) for some, decay in zip(decays, (inner.weight_decay, 0.0), strict=True) if some]
        found.append(TorchAdamW(groups, rate, inner.beta1, inner.beta2))
    return found


def own(settings: RunSettings, task: Any, masters: Sequence[torch.Tensor], rate: float) -> Optimizers:
    """Return the optimizer that a task makes.

    Raises:
        SettingsError: it returned something else.
    """
    returned, where = task.optimizer(masters, rate), members.place(task.optimizer)
    if not isinstance(returned, torch.optim.Optimizer):
        raise SettingsError(f"task: optimizer() returned a {type(returned).__name__}, expected a torch.optim.Optimizer{where}")
    return [returned]


class Inner:
    """The optimizers of a model's masters, whose rates follow the run's schedule: each group's, times the run's by its peak.

    Their state is arrays by name, ``optimizer/PATH/KEY``. ``tables``: the paths of embeddings.

    Raises:
        SettingsError: a task's own optimizer is none, or the run has no place for one.
    """

    def __init__(
        self, settings: RunSettings, task: object, masters: Mapping[str, torch.nn.Parameter], tables: Collection[str] = ()
    ) -> None:
        if settings.offers_gradients:
            raise SettingsError(
                "task: torch tasks do not support outer.optimizer = adamw, whose learners offer gradients: use another preset"
            )
        self._settings, self._task, self.masters, self._tables = settings, task, masters, tables
        self._peak = settings.inner.learning_rate
        self._where = members.place(task.optimizer) if hasattr(task, "optimizer") else ""
        self.clips = not hasattr(task, "optimizer")
        self._layout: dict[str, torch.Tensor] = {}  # by name: a state's arrays, without values
        self.reset()

    def reset(self) -> None:
        """Begin with a fresh state."""
        if self.clips:
            optimizers = built_in(self._settings, self._task, self.masters, self._tables, self._peak)
        else:
            optimizers = own(self._settings, self._task, list(self.masters.values()), self._peak)
        self._optimizers = optimizers
        self._groups = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
        paths = {master: path for path, master in self.masters.items()}
        for each in (one for group, _ in self._groups for one in group["params"]):
            if each not in paths:
                raise SettingsError(
                    f"task: optimizer() has a parameter of shape {list(each.shape)}, which is not one of the parameters "
                    f"that it was given{self._where}"
                )
        # by path: the optimizer that has it; one of the task's own may leave some out
        self._owners = {paths[one]: each for each in optimizers for group in each.param_groups for one in group["params"]}

    def step(self, rate: float) -> None:
        """Move the masters along their gradients."""
        for group, of_peak in self._groups:
            group["lr"] = of_peak * (rate / self._peak)
        for each in self._optimizers:
            each.step()

    def learn_layout(self) -> None:
        """Note, after a step, of which arrays the state is.

        Raises:
            SettingsError: it holds something that is no tensor, or a tensor has another shape than after an earlier step.
        """
        for path in self._owners:
            for key, value in self._state(path).items():
                if isinstance(value, torch.Tensor):
                    known = self._layout.setdefault(f"optimizer/{path}/{key}", torch.empty_like(value))
                    self._check_shape(f"{path}/{key}", value, known)
                elif value is not None:
                    raise SettingsError(
                        f"task: optimizer(): its state has {path}/{key} as a {type(value).__name__}, which cannot be "
                        f"saved: store tensors there{self._where}"
                    )

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return the state by name. One that begins is zeros, with which optimizers of torch begin.

        Raises:
            SettingsError: a tensor has another shape than it had.
        """
        found = {}
        for name, like in self._layout.items():
            path, _, key = name.removeprefix("optimizer/").rpartition("/")
            state = self._state(path)
            if state.get(key) is None:
                state[key] = torch.zeros_like(like)
            self._check_shape(f"{path}/{key}", state[key], like)
            found[name] = state[key]
        return found

    def _check_shape(self, name: str, value: torch.Tensor, known: torch.Tensor) -> None:
        if value.shape != known.shape:
            raise SettingsError(
                f"task: optimizer(): its state has {name} of shape {list(value.shape)}, expected {list(known.shape)}, as "
                f"before the step{self._where}"
            )

    def _state(self, path: str) -> Any:
        return self._owners[path].state[self.masters[path]]
