"""``python -m diloco_learner.examine``: all that ``diloco check`` says of a task, beyond what stands in the way of a run.

Reads ``{"settings": ..., "data": ...}`` from stdin. The last line on stdout is an :class:`Examination` as JSON. What makes a
run fail is an error (:mod:`diloco_learner.check`, which ``diloco up`` asks too). What a run gets through, and its user hardly
wants, is a warning: a step that is another one each time, batches that do not depend on their number alone, data that repeat,
tensors that nothing trains, constants that are compiled in.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from diloco.core import quantise
from diloco.core.fragments import FragmentMap
from diloco.errors import SettingsError
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco_learner import members
from diloco_learner.check import checked
from diloco_learner.island import Island
from diloco_learner.leaves import path_of
from diloco_learner.loss import Given, Loss
from diloco_learner.task import Task
from diloco_learner.task_api import STATE, next_batch
from diloco_learner.tensors import tensor_of

BATCHES, BATCHES_S = 64, 3.0  # looked for the end of a share's data: so many, or for so long, so that a person can wait for it
SHARES = 4  # compared with each other
LARGE_BYTES = 1 << 20  # a constant from here on is in the way: it is compiled again with each program, and copied


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
class Examination:
    """All that is known of a task before it is trained; sizes in bytes."""

    task: str
    parameters: int
    tensors: list[TensorFacts]
    state: list[StateFacts]
    fragments: list[dict[str, Any]]  # index, parameters, bytes of an offer
    memory: dict[str, int]  # of the compiled step: arguments, results, temporaries, program
    constants: list[dict[str, Any]]  # shape, dtype and bytes of arrays that the loss has closed over
    step_s: float  # of the second step, on this machine
    loss: float  # of the first batch, with the first parameters
    units: str | None
    warnings: list[str]


def examine(settings: RunSettings, data: str | None) -> Examination:
    """Make a task, compile its step, and take it twice.

    Raises:
        SettingsError: it cannot be trained, as :func:`diloco_learner.check.check` raises; batches end, or the first step has no
            finite loss or gradients; or it is a task of PyTorch.
        DataError: its data is missing, unreadable or too short.
    """
    made = checked(settings, data)
    if made.loaded.torch:
        raise SettingsError(
            f"task.name = {settings.task.name!r}: a task of PyTorch, of which diloco check says no more than diloco up: "
            "nothing stands in its way"
        )
    with members.users_errors(settings.task):
        task, island, first = made.loaded.task, made.model, made.batches[0]
        assert isinstance(island, Island)
        warnings = [*_unsteady_data(task, settings, made.batches)]
        [program] = island.trace(first)
        memory = program.compile().memory_analysis()
        constants = list(_constants(task, settings, island, first))
        warnings += [
            f"the loss has closed over an array {fact['dtype']}{fact['shape']} of {fact['size_bytes'] / 1e6:.0f} MB, which is "
            f"compiled into the program: pass it in another way{members.place(task.loss)}"
            for fact in constants
            if fact["size_bytes"] >= LARGE_BYTES
        ]
        warnings += _untrained(task, settings, island, first)
        loss, step_s, unsteady = _two_steps(settings, island, first)
        warnings += unsteady
        fragments = island.fragments()
        return Examination(
            task=settings.task.name,
            parameters=sum(tensor.size for tensor in island.tensors()),
            tensors=_tensors(task, settings, island, fragments),
            state=_state(island, fragments),
            fragments=[
                {
                    "index": one.index,
                    "parameters": one.size,
                    "offer_bytes": quantise.body_bytes(one.size, one.bits(settings.codec.offer_bits)),
                }
                for one in fragments.fragments
            ],
            memory=_memory(memory),
            constants=constants,
            step_s=step_s,
            loss=loss,
            units=made.found.units,
            warnings=warnings,
        )


def _share(task: Task, settings: RunSettings, share: int, start: int = 0) -> Iterator[Any]:
    return task.batches(share, settings.learners, settings.seed, start)


def _unsteady_data(task: Task, settings: RunSettings, first: Sequence[Any]) -> Iterator[str]:
    """Yield what is unusual in a task's batches: a batch is to depend on seed, share and number alone.

    ``first`` are the first two of the first share, as they were made before.

    Raises:
        SettingsError: a share's batches end.
    """
    where, began_s = members.place(task.batches), time.monotonic()
    batches = _share(task, settings, 0)
    kept = [_bytes(batch) for batch in first]
    again = [_bytes(next_batch(batches, settings.task, 0, index)) for index in range(2)]
    for index in range(2, BATCHES):
        if time.monotonic() - began_s > BATCHES_S:
            break
        next_batch(batches, settings.task, 0, index)
    if again != kept:
        yield f"batches() gives other batches when it is called again: a learner that comes back trains others{where}"
    elif _bytes(next(_share(task, settings, 0, 1))) != kept[1]:
        yield f"batches(start=1) does not begin with the second batch: a learner that comes back trains others{where}"
    if kept[0] == kept[1]:
        yield f"batches() gives the same batch twice, the first and the second of share 0{where}"
    seen = {kept[0]: 0}
    for share in range(1, min(SHARES, settings.learners)):
        same = seen.setdefault(_bytes(next_batch(_share(task, settings, share), settings.task, share, 0)), share)
        if same != share:
            yield f"shares {same} and {share} begin with the same batch: learners train on the same data{where}"


def _bytes(batch: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch))


def _traced(task: Task, settings: RunSettings) -> Any:
    """Return a task's training loss as a function of parameters, batch, arrays that it is given, and its state."""
    loss = Loss(task, settings.seed)

    def call(params: Any, batch: Any, given: Given, state: Any) -> jax.Array:
        def own(params: Any, batch: Any, arrays: Any, others: Any) -> Any:
            return task.loss(params, batch, **arrays, **others)

        return loss.of(own, params, batch, loss.given((0, 0)) | given, state, train=True)[0]

    return call


def _company(island: Island) -> tuple[Given, Any]:
    """Return the constants that the loss is given, and the state."""
    company = island.company()
    return {"constants": company["constants"]}, company["state"]


def _constants(task: Task, settings: RunSettings, island: Island, batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the arrays that the loss has closed over, as facts."""
    for value in jax.make_jaxpr(_traced(task, settings))(island.params(), batch, *_company(island)).consts:
        if np.ndim(value):
            shape, dtype = np.shape(value), np.dtype(getattr(value, "dtype", np.asarray(value).dtype))
            size_bytes = int(np.prod(shape)) * dtype.itemsize
            yield {"shape": list(shape), "dtype": str(dtype), "size_bytes": size_bytes}


def _untrained(task: Task, settings: RunSettings, island: Island, batch: Any) -> list[str]:
    """Return a warning for each tensor whose gradient is zero near the first parameters: there a head of zeros hides others."""
    chance, trained = np.random.default_rng(settings.seed), {tensor.path for tensor in island.tensors()}

    def moved(keys: Any, leaf: jax.Array) -> jax.Array:
        return leaf + chance.normal(0, 0.01, leaf.shape).astype(leaf.dtype) if path_of(keys) in trained else leaf

    near = jax.tree_util.tree_map_with_path(moved, island.params())
    gradients = jax.jit(jax.grad(_traced(task, settings), allow_int=True))(near, batch, *_company(island))
    keyed = [(path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]]
    still = [path for path, leaf in keyed if path in trained and not np.any(np.asarray(leaf))]
    where = members.place(task.loss)
    return [f"tensor {path!r} has no gradient: the loss of the first batch does not depend on it{where}" for path in still]


def _two_steps(settings: RunSettings, island: Island, batch: Any) -> tuple[float, float, list[str]]:
    """Take the same step twice, from the same state; return its loss, the second one's seconds, and a warning if they differ.

    Raises:
        SettingsError: loss or gradients are not finite.
    """
    other = island.twin()
    output = island.step(batch, settings.inner.learning_rate)
    output.wait()
    loss = float(output.loss)
    if not bool(output.finite):
        raise SettingsError(
            f"task.name = {settings.task.name!r}: the first step's loss is {loss:g}, its gradient's norm "
            f"{float(output.grad_norm):g}: with NaN or infinity no step is ever taken{members.place(island.task.loss)}"
        )
    began_s = time.monotonic()
    again = other.step(batch, settings.inner.learning_rate)
    again.wait()
    step_s = time.monotonic() - began_s
    states = island.state(), other.state()
    differing = [name for name, value in states[0].items() if value.tobytes() != states[1][name].tobytes()]
    if float(again.loss) == loss and not differing:
        return loss, step_s, []
    named = f"; {differing[0]} differs" if differing else ""
    return (
        loss,
        step_s,
        [f"the same step gives two results (losses {loss!r}, {float(again.loss)!r}{named}): no replay can agree"],
    )


def _tensors(task: Task, settings: RunSettings, island: Island, fragments: FragmentMap) -> list[TensorFacts]:
    lies = _lies(fragments)
    rounded = set(island.rounded_tensors())
    return [
        TensorFacts(
            path=tensor.path,
            shape=list(tensor.model_shape),
            dtype="bfloat16" if tensor.path in rounded else "float32",
            size_bytes=4 * tensor.size,
            fragments=lies[tensor.path],
            merge=_merge(settings, tensor.shape, embedding=tensor.embedding),
            matrices=len(tensor_of(task, tensor.path, tensor.model_shape).matrices(tensor.model_shape)),
        )
        for tensor in island.tensors()
    ]


def _state(island: Island, fragments: FragmentMap) -> list[StateFacts]:
    lies, state = _lies(fragments), island.task_state
    return [
        StateFacts(path, list(array.shape), array.dtype.name, lies.get(STATE + path, []), state.rules[path])
        for path, array in zip(state.rules, jax.tree.leaves(state.values), strict=True)
    ]


def _lies(fragments: FragmentMap) -> dict[str, list[int]]:
    """Return by tensor the fragments that it lies in."""
    found: dict[str, set[int]] = {}
    for fragment in fragments.fragments:
        for piece in fragment.pieces:
            found.setdefault(piece.path, set()).add(fragment.index)
    return {path: sorted(indexes) for path, indexes in found.items()}


def _merge(settings: RunSettings, shape: tuple[int, ...], *, embedding: bool) -> str:
    """Say how offers of a tensor are merged; a row, along the last axis, is one output unit."""
    if embedding or settings.merge.method == "average":
        return "average"
    if settings.merge.granularity == "tensor" or len(shape) < 2:
        return "one norm"
    return f"row: {int(np.prod(shape[:-1]))} norms"


def _memory(analysis: Any) -> dict[str, int]:
    names = {"arguments": "argument", "results": "output", "temporaries": "temp", "program": "generated_code"}
    found = {name: getattr(analysis, f"{part}_size_in_bytes", None) for name, part in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}  # some backends do not say


def _main() -> None:
    request = json.load(sys.stdin)
    found = examine(parse(RunSettings, request["settings"], "the run"), request["data"])
    print(json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco-learner"))
