"""All that ``diloco check`` says of a task of JAX: :mod:`diloco_learner.examine`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from diloco.core.tensors.fragments import FragmentMap
from diloco.settings.run import RunSettings
from diloco_learner.api import examination, members
from diloco_learner.api.examination import StateFacts, TaskExamination
from diloco_learner.jax.island import Island
from diloco_learner.jax.leaves import path_of
from diloco_learner.jax.traced import company, out_of_bounds, traced
from diloco_learner.task import Task
from diloco_learner.task_api import STATE
from diloco_learner.tensors import tensor_of

LARGE_BYTES = 1 << 20  # a constant from here on is in the way: it is compiled again with each program, and copied


def examine(settings: RunSettings, task: Task, island: Island, batches: Sequence[Any], units: str | None) -> TaskExamination:
    """Compile the step of a task that is known to be fit, and take it twice; ``batches`` are the first two of its first share.

    ``island`` is the model by which that is known; it gets other values.

    Raises:
        SettingsError: batches of another share end.
    """
    with members.users_errors(settings.task):
        first = batches[0]
        warnings = list(examination.unsteady_data(task, settings, batches, _bytes))
        program, *_ = island.trace(first)  # of its own is at most the count of tokens
        memory = program.compile().memory_analysis()
        constants = list(_constants(task, settings, island, first))
        warnings += [
            f"the loss has closed over an array {fact['dtype']}{fact['shape']} of {fact['size_bytes'] / 1e6:.0f} MB, "
            f"which is compiled into the program: pass it in another way{members.place(task.loss)}"
            for fact in constants
            if fact["size_bytes"] >= LARGE_BYTES
        ]
        warnings += _untrained(task, settings, island, first)
        beyond = out_of_bounds(task, settings, island, first)
        where = members.place(task.loss)
        warnings += (
            [f"an index is out of bounds in the loss of the first batch, which then reads another element: {beyond}{where}"]
            if beyond
            else []
        )
        warnings += examination.fails_to_draw(task, settings, island)
        loss, step_s, unsteady = _two_steps(settings, island, first)
        fragments = island.fragments()
        return TaskExamination(
            task=settings.task.name,
            parameters=fragments.parameters,
            tensors=examination.tensor_facts(
                settings,
                fragments,
                set(island.rounded_tensors()),
                lambda path, shape: tensor_of(task, path, shape).matrices(shape),
            ),
            state=_state(island, fragments),
            fragments=examination.fragment_facts(fragments, settings),
            strategies=examination.strategy_facts(island.specs(), settings),
            memory=_memory(memory),
            constants=constants,
            step_s=step_s,
            loss=loss,
            units=units,
            warnings=warnings + unsteady,
        )


def _state(island: Island, fragments: FragmentMap) -> list[StateFacts]:
    lies, state = examination.lies(fragments), island.task_state
    return [
        StateFacts(path, list(array.shape), array.dtype.name, lies.get(STATE + path, []), state.rules[path])
        for path, array in zip(state.rules, jax.tree.leaves(state.values), strict=True)
    ]


def _bytes(batch: Any) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(batch))


def _constants(task: Task, settings: RunSettings, island: Island, batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the arrays that the loss has closed over, as facts."""
    for value in jax.make_jaxpr(traced(task, settings))(island.params(), batch, *company(island)).consts:
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
    gradients = jax.jit(jax.grad(traced(task, settings), allow_int=True))(near, batch, *company(island))
    keyed = [(path_of(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]]
    still = [path for path, leaf in keyed if path in trained and not np.any(np.asarray(leaf))]
    where = members.place(task.loss)
    return [examination.without_gradient(path, where) for path in still]


def _two_steps(settings: RunSettings, island: Island, batch: Any) -> tuple[float, float, list[str]]:
    """Take a step twice, from the same state; return its loss, the second one's seconds, and a warning if they differ."""
    other = island.twin()
    output = island.step(batch, settings.inner.learning_rate)
    output.wait()
    loss = float(output.loss)
    began_s = time.monotonic()
    again = other.step(batch, settings.inner.learning_rate)
    again.wait()
    step_s = time.monotonic() - began_s
    states = island.state(), other.state()
    differing = [name for name, value in states[0].items() if value.tobytes() != states[1][name].tobytes()]
    return loss, step_s, examination.two_results((loss, float(again.loss)), differing)


def _memory(analysis: Any) -> dict[str, int]:
    names = {"arguments": "argument", "results": "output", "temporaries": "temp", "program": "generated_code"}
    found = {name: getattr(analysis, f"{part}_size_in_bytes", None) for name, part in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}  # some backends do not say
