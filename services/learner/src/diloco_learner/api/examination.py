"""The findings of ``diloco check`` on a task, and the checks that are independent of the framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from diloco.core.tensors import quantise
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.errors import DilocoError, SettingsError
from diloco.settings.run import RunSettings, Strategy
from diloco_learner.api import members
from diloco_learner.api.model import Evaluated
from diloco_learner.task_api import Batches, first_batches, next_batch
from diloco_learner.tensors import Shape

SHARES = 4  # compared with each other
DRAWN = 4  # tokens of text, which show that it can be drawn


@dataclass(frozen=True)
class TensorFacts:
    """A tensor as the run treats it."""

    path: str
    shape: list[int]
    dtype: str
    size_bytes: int  # of float32, as offers and versions have it
    fragments: list[int]
    merge: str
    matrices: int  # that the built-in optimizer of matrices sees


@dataclass(frozen=True)
class StateFacts:
    """An array of a task's state as the run treats it."""

    path: str
    shape: list[int]
    dtype: str
    fragments: list[int]  # none: it is its learner's own
    merge: str  # average, or local


@dataclass(frozen=True)
class StrategyFacts:
    """Fragments that a strategy would make of a model, with the run's other settings.

    ``refusal``: why it cannot cut the model, with no fragments; empty: it can. Sizes are of a fragment, in bytes of float32.
    """

    strategy: Strategy
    fragments: int
    smallest_bytes: int
    largest_bytes: int
    refusal: str = ""


@dataclass(frozen=True)
class ProcessFacts:
    """The first of a learner's processes, which has at least as much of the model as the others. Sizes in bytes."""

    count: int
    mesh: dict[str, int]  # sizes of its axes
    rows: int  # of the first batch
    batch_rows: int
    parameters_bytes: int
    optimizer_bytes: int
    whole: list[str]  # paths of the tensors that each process has whole


@dataclass(frozen=True)
class TaskExamination:
    """The findings on a task before it is trained. Sizes in bytes."""

    task: str
    parameters: int
    tensors: list[TensorFacts]
    state: list[StateFacts]
    fragments: list[dict[str, Any]]  # index, parameters, bytes of an offer
    strategies: list[StrategyFacts]  # every way to cut the model into as many fragments
    memory: dict[str, int]  # of the compiled step: arguments, results, temporaries, program; empty where these are unknown
    constants: list[dict[str, Any]]  # shape, dtype and bytes of arrays that the loss has closed over
    step_s: float  # of the second step, on this machine
    loss: float  # of the first batch, with the first parameters
    units: str | None
    warnings: list[str]
    framework: str = ""  # that claims the task, once it is known
    devices: list[str] = field(default_factory=list)  # kind of each that a process of it has here
    processes: ProcessFacts | None = None  # where a learner of several was asked about


def share_of(task: Batches, settings: RunSettings, share: int, start: int = 0) -> Iterator[Any]:
    """Return a share's batches from the ``start``-th on."""
    return task.batches(share, settings.learners, settings.seed, start)


def unsteady_data(
    task: Batches, settings: RunSettings, first: Sequence[Any], as_bytes: Callable[[Any], bytes]
) -> Iterator[str]:
    """Yield warnings about a task's batches: a batch should depend only on seed, share and number.

    ``first`` are the first two of the first share, as they were made before.

    Raises:
        SettingsError: a share's batches end.
    """
    where = members.place(task.batches)
    kept = [as_bytes(batch) for batch in first]
    again = [as_bytes(batch) for batch in itertools.islice(first_batches(task, settings), 2)]
    if again != kept:
        yield (
            f"batches() returns other batches when it is called again, so a restarted learner would train on other data{where}"
        )
    elif as_bytes(next(share_of(task, settings, 0, 1))) != kept[1]:
        yield (
            f"batches(start=1) does not begin with the second batch, so a restarted learner would train on other data{where}"
        )
    if kept[0] == kept[1]:
        yield f"batches() gives the same batch twice, the first and the second of share 0{where}"
    seen = {kept[0]: 0}
    for share in range(1, min(SHARES, settings.learners)):
        same = seen.setdefault(as_bytes(next_batch(task, share_of(task, settings, share), share, 0)), share)
        if same != share:
            yield f"shares {same} and {share} begin with the same batch: learners train on the same data{where}"


def without_gradient(path: str, where: str) -> str:
    """Return the warning about a tensor without gradient. ``where``: the loss's place, as the end of the sentence."""
    return f"tensor {path!r} has no gradient: the loss of the first batch does not depend on it{where}"


def fails_to_draw(task: object, settings: RunSettings, model: Evaluated) -> list[str]:
    """Return a warning if the task has a ``sample`` that fails."""
    draw = getattr(task, "sample", None)
    try:
        with members.users_errors(settings.task, draw):
            model.sample(settings.seed, DRAWN)
    except DilocoError as error:
        return [f"sample() fails, so that the run's end has no text: {error}"]
    return []


def two_results(losses: tuple[float, float], differing: list[str]) -> list[str]:
    """Return a warning if the same step gave two losses, or arrays that differ, by name."""
    if losses[0] == losses[1] and not differing:
        return []
    named = f"; {differing[0]} differs" if differing else ""
    return [f"the same step gives two results (losses {losses[0]!r}, {losses[1]!r}{named}), so a replay cannot reproduce it"]


def fragment_facts(fragments: FragmentMap, settings: RunSettings) -> list[dict[str, Any]]:
    """Return for each fragment its index, parameters, and bytes of an offer."""
    bits = settings.codec.offer_bits
    return [
        {"index": one.index, "parameters": one.size, "offer_bytes": quantise.body_bytes(one.size, one.bits(bits))}
        for one in fragments.fragments
    ]


def strategy_facts(specs: Sequence[TensorSpec], settings: RunSettings) -> list[StrategyFacts]:
    """Return the fragments that each strategy would make of a model's tensors."""
    cut, found = settings.fragments, list[StrategyFacts]()
    for strategy in get_args(Strategy):
        layers = cut.layers if strategy == cut.strategy else 1
        try:
            sizes = [4 * fragment.size for fragment in build_map(specs, cut.count, strategy, layers=layers).fragments]
        except SettingsError as error:
            found.append(StrategyFacts(strategy, 0, 0, 0, str(error)))
        else:
            found.append(StrategyFacts(strategy, len(sizes), min(sizes), max(sizes)))
    return found


def tensor_facts(
    settings: RunSettings, fragments: FragmentMap, rounded: set[str], matrices: Callable[[str, Shape], Shape]
) -> list[TensorFacts]:
    """Return the trained tensors as the run treats them; those ``rounded`` are bfloat16 in the model.

    ``matrices`` returns of a tensor, by path and shape in the model, the rows of each of its matrices.
    """
    found = lies(fragments)
    return [
        TensorFacts(
            path=tensor.path,
            shape=list(tensor.model_shape),
            dtype="bfloat16" if tensor.path in rounded else "float32",
            size_bytes=4 * tensor.size,
            fragments=found[tensor.path],
            merge=_merge(settings, tensor.shape, embedding=tensor.embedding),
            matrices=len(matrices(tensor.path, tensor.model_shape)),
        )
        for tensor in fragments.tensors
        if not tensor.state
    ]


def lies(fragments: FragmentMap) -> dict[str, list[int]]:
    """Return the fragments of each tensor."""
    found: dict[str, set[int]] = {}
    for fragment in fragments.fragments:
        for piece in fragment.pieces:
            found.setdefault(piece.path, set()).add(fragment.index)
    return {path: sorted(indexes) for path, indexes in found.items()}


def _merge(settings: RunSettings, shape: tuple[int, ...], *, embedding: bool) -> str:
    """Say how offers of a tensor are merged; a row, along the last axis, is one output unit."""
    if (settings.merge.embedding if embedding else settings.merge.method) == "average":
        return "average"
    if settings.merge.granularity == "tensor" or len(shape) < 2:
        return "one norm"
    return f"row: {int(np.prod(shape[:-1]))} norms"
