"""Dealing the tensors of a model to fragments, by each strategy; docs/protocol.md, section 6, has the rules step by step.

A strategy is a rule that every member follows from the tensors, the number of fragments and its own name alone, so none of
these may change. What is published is by another name than what came before it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diloco.errors import SettingsError
from diloco.settings.run import BY_LAYERS, Strategy

if TYPE_CHECKING:
    from diloco.core.tensors.fragments import TensorSpec

Rows = tuple["TensorSpec", int, int]  # a tensor, its first row, and the row behind its last one

# the number of a part of a path: the whole part, or what follows its last underscore
_NUMBER = re.compile(r"(?:^|(?<=[/_]))[0-9]+(?=/|$)")


def deal(ordered: Sequence[TensorSpec], count: int, strategy: Strategy, layers: int = 1) -> list[list[Rows]]:
    """Return the rows of each fragment, of tensors in the order of their paths.

    Raises: as :func:`diloco.core.tensors.fragments.build_map`.
    """
    if strategy in BY_LAYERS:
        return _deal_by_layers(ordered, count, strategy, layers)
    groups = _grouped(ordered, count)
    return [rows for group, group_count in groups for rows in _deal_group(group, group_count, strategy)]


def _grouped(ordered: Sequence[TensorSpec], count: int) -> list[tuple[list[TensorSpec], int]]:
    """Return the tensors that are cut together, and into how many fragments."""
    state = [tensor for tensor in ordered if tensor.state]
    trained = [tensor for tensor in ordered if not tensor.state]
    if state:
        _check_apart(state, count)
        own = _own(state, ordered, count)
        return [*_grouped(trained, count - own), (state, own)]
    embedding = [tensor for tensor in ordered if tensor.embedding]
    other = [tensor for tensor in ordered if not tensor.embedding]
    if not embedding or not other or count == 1:
        return [(trained, count)]
    own = _own(embedding, ordered, count)
    return [(embedding, own), (other, count - own)]


def _own(some: Sequence[TensorSpec], ordered: Sequence[TensorSpec], count: int) -> int:
    """Return how many of ``count`` fragments some tensors get: by their share of the values, but not all."""
    share = sum(tensor.size for tensor in some) / sum(tensor.size for tensor in ordered)
    return min(max(1, round(count * share)), count - 1)


def _check_apart(state: Sequence[TensorSpec], count: int) -> None:
    if count == 1:
        raise SettingsError(
            f"fragments.count = 1: merged state such as {state[0].path!r} needs a separate fragment: set at least 2"
        )


def _deal_by_layers(ordered: Sequence[TensorSpec], count: int, strategy: Strategy, layers: int) -> list[list[Rows]]:
    """Return the rows of each fragment: all outside the layers, then the layers, strided, then all state."""
    state = [tensor for tensor in ordered if tensor.state]
    trained = [tensor for tensor in ordered if not tensor.state]
    if state:
        _check_apart(state, count)
        return [*_deal_by_layers(trained, count - 1, strategy, layers), [_whole(tensor) for tensor in state]]
    outside, numbered = _layers(trained)
    if count == 1:
        return [[*outside, *itertools.chain.from_iterable(numbered)]]
    if not numbered:
        whole = " and fragments.layers = 1" if layers > 1 else ""
        raise SettingsError(
            f"fragments.strategy = {strategy}: no layers found in the model, whose first tensor is {ordered[0].path!r}: "
            "layers are numbers in tensor paths (blocks/0/w, block_0/w) or tensors that a task declares as stacked; set "
            f"fragments.strategy = balanced{whole}, or strided or layer with fewer fragments"
        )
    units = numbered if strategy == "layers" else [[rows] for layer in numbered for rows in layer]
    first = [outside] if outside else []
    groups = min(count - len(first), math.ceil(len(units) / layers))
    return [*first, *([rows for unit in units[index::groups] for rows in unit] for index in range(groups))]


def _layers(trained: Sequence[TensorSpec]) -> tuple[list[Rows], list[list[Rows]]]:
    """Return what is outside the layers, and of each layer what is in it, in the order of their numbers and of paths."""
    numbers = _layer_numbers([tensor.path for tensor in trained if not tensor.layers])
    outside: list[Rows] = []
    found: dict[int, list[Rows]] = {}
    for tensor in trained:
        if tensor.layers:
            rows = tensor.shape[0] // tensor.layers
            for layer in range(tensor.layers):
                found.setdefault(layer, []).append((tensor, rows * layer, rows * (layer + 1)))
        elif tensor.path in numbers:
            found.setdefault(numbers[tensor.path], []).append(_whole(tensor))
        else:
            outside.append(_whole(tensor))
    return outside, [found[number] for number in sorted(found)]


def _layer_numbers(paths: Sequence[str]) -> dict[str, int]:
    """Return the number of the layer of each path that is in one.

    It is the first part of the path that is a number, or that is a name, an underscore and a number. Such a name has to have
    several numbers: the ``Dense_0`` that Flax makes of a model's only head is no layer.
    """
    parts = {path: [(path[: part.start()], int(part.group())) for part in _NUMBER.finditer(path)] for path in paths}
    numbers: dict[str, set[int]] = {}
    for name, number in itertools.chain.from_iterable(parts.values()):
        numbers.setdefault(name, set()).add(number)
    found = {}
    for path, named in parts.items():
        of_layers = [number for name, number in named if not name.endswith("_") or len(numbers[name]) > 1]
        if of_layers:
            found[path] = of_layers[0]
    return found


def _deal_group(tensors: Sequence[TensorSpec], count: int, strategy: str) -> list[list[Rows]]:
    share = sum(tensor.size for tensor in tensors) / count
    pieces = [rows for tensor in tensors for rows in _split(tensor, share if strategy == "balanced" else math.inf)]
    bins: list[list[Rows]] = [[] for _ in range(count)]
    if strategy == "balanced":
        filled = [(0, index) for index in range(count)]  # a heap: a map may have many pieces and many fragments
        for tensor, start, stop in sorted(pieces, key=lambda p: (-_rows_size(*p), p[0].path, p[1])):
            size, index = filled[0]
            bins[index].append((tensor, start, stop))
            heapq.heapreplace(filled, (size + _rows_size(tensor, start, stop), index))
    else:
        keys = [tensor.path if strategy == "strided" else _layer(tensor.path) for tensor, _, _ in pieces]
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        for key, piece in zip(keys, pieces, strict=True):
            bins[order[key] % count].append(piece)
    if not all(bins):
        kind = "embedding-like tensors" if tensors[0].embedding else "tensors of state" if tensors[0].state else "tensors"
        raise SettingsError(
            f"fragments.count: the strategy {strategy!r} can cut {len(tensors)} {kind} into {len(pieces)} pieces, fewer "
            f"than {count} fragments; set fewer fragments"
            + ("" if strategy == "balanced" else " or fragments.strategy=balanced")
        )
    return bins


def _whole(tensor: TensorSpec) -> Rows:
    return tensor, 0, _row_count(tensor)


def _row_count(tensor: TensorSpec) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _split(tensor: TensorSpec, share: float) -> list[Rows]:
    rows = _row_count(tensor)
    parts = min(rows, math.ceil(tensor.size / share)) if share < tensor.size else 1
    bounds = [rows * i // parts for i in range(parts + 1)]
    return [(tensor, start, stop) for start, stop in itertools.pairwise(bounds)]


def _rows_size(tensor: TensorSpec, start: int, stop: int) -> int:
    return tensor.size // _row_count(tensor) * (stop - start)


def _layer(path: str) -> str:
    number = re.search(r"[0-9]+", path)
    return f"layer {number.group()}" if number else path
