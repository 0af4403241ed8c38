"""Boxes of tensors at the processes of a learner: each value is handed over once, and written wherever it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.boxes import Box, row_layouts
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.core.tensors.rows import at, carriers
from diloco.errors import SettingsError

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def sharded(draw: Any, shape: tuple[int, ...], processes: int) -> list[Box]:
    """By process, a box of a tensor: a grid of uneven parts, some of them empty, which replicas share."""
    cuts = [sorted(draw(st.lists(st.integers(0, length), max_size=2))) for length in shape]
    grid: list[Box] = []
    spans = [list(zip([0, *cut], [*cut, length], strict=True)) for cut, length in zip(cuts, shape, strict=True)]
    for place in np.ndindex(*map(len, spans)):
        chosen = [spans[axis][at] for axis, at in enumerate(place)]
        grid.append(Box(tuple(b for b, _ in chosen), tuple(e - b for b, e in chosen)))
    if len(grid) > processes:
        return [Box.whole(shape)] * processes
    extra = [draw(st.sampled_from(grid)) for _ in range(processes - len(grid))]
    permuted: list[Box] = draw(st.permutations([*grid, *extra]))
    return permuted


@given(st.data(), st.integers(1, 6))
def test_each_value_is_handed_over_once_and_reaches_all_that_have_it(data: st.DataObject, processes: int) -> None:
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=4))
    boxes: list[dict[str, Box]] = [{} for _ in range(processes)]
    tensors = {f"tensor/{number}": np.random.default_rng(number).normal(size=shape) for number, shape in enumerate(shapes)}
    for path, tensor in tensors.items():
        for process, box in enumerate(data.draw(sharded(tensor.shape, processes))):
            boxes[process][path] = box
    fragments = build_map([TensorSpec(path, tensor.shape) for path, tensor in tensors.items()], len(tensors)).fragments
    dealt = carriers([fragment.size for fragment in fragments], processes)
    layouts = row_layouts(fragments, boxes, dealt)
    for fragment, carrier, layout in zip(fragments, dealt, layouts, strict=True):
        together, times = np.zeros(fragment.size, np.float32), np.zeros(fragment.size, np.int64)
        for process in range(processes):
            for piece, where in layout.read[process].parts:
                at(together, piece, where)[...] = _local(tensors[piece.path], boxes[process][piece.path], piece)
                at(times.view(), piece, where)[...] += 1  # type: ignore[arg-type]
            for piece, where in layout.held[process].parts:
                _write(tensors[piece.path], boxes[process][piece.path], piece, at(together, piece, where).shape)
        assert (times == 1).all()
        expected = np.concatenate([_rows(tensors[piece.path], piece).reshape(-1) for piece in fragment.pieces])
        np.testing.assert_array_equal(together, np.float32(expected))
        held = sum(rows.size for rows in layout.held)
        assert held == sum(
            math.prod(_local(tensors[piece.path], box, piece).shape)
            for its in boxes
            for piece in fragment.pieces
            for box in [its[piece.path]]
        )
        has_all = all(math.prod(boxes[carrier][piece.path].lengths) == tensors[piece.path].size for piece in fragment.pieces)
        assert not has_all or layout.read[carrier].size == fragment.size, "a carrier that has all is sent nothing"


def _rows(tensor: Any, piece: Any) -> Any:
    return tensor[piece.row_start : piece.row_stop] if tensor.ndim else tensor


def _local(tensor: Any, box: Box, piece: Any) -> Any:
    """Return what a process reads of a piece: rows of its local tensor."""
    local = tensor[tuple(slice(begin, begin + length) for begin, length in zip(box.start, box.lengths, strict=True))]
    return local[box.rows(piece)] if local.ndim else local


def _write(tensor: Any, box: Box, piece: Any, shape: tuple[int, ...]) -> None:
    assert _local(tensor, box, piece).shape == shape


def layouts_of(shape: tuple[int, ...], *boxes: Box) -> list[Any]:
    fragments = build_map([TensorSpec("w", shape)], 1).fragments
    return row_layouts(fragments, [{"w": box} for box in boxes], [0])


def test_parts_that_overlap_or_leave_values_out_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"parameter 'w', rows 0 to 3: .* process 0 has \[0:3, 0:2\], process 1 has \[2:4, 0:2\]"
    ):
        layouts_of((4, 2), Box((0, 0), (3, 2)), Box((2, 0), (2, 2)))
    with pytest.raises(SettingsError, match=r"process 0 has \[0:3, 0:2\]"):
        layouts_of((4, 2), Box((0, 0), (3, 2)), Box((3, 0), (0, 2)))
    with pytest.raises(SettingsError, match="no process has any"):
        layouts_of((4, 2), Box((0, 0), (0, 2)), Box((0, 0), (0, 2)))


def test_replicas_that_the_carrier_is_none_of_hand_over_about_as_much_each() -> None:
    halves = [Box((0, 0), (3, 2)), Box((0, 0), (3, 2)), Box((3, 0), (3, 2)), Box((3, 0), (3, 2))]
    fragments = build_map([TensorSpec(f"w{number}", (6, 2)) for number in range(4)], 4).fragments
    layouts = row_layouts(
        fragments, [dict.fromkeys((f"w{number}" for number in range(4)), box) for box in halves], [0, 0, 0, 0]
    )
    handed_over = [sum(layout.read[process].size for layout in layouts) for process in range(4)]
    assert handed_over == [24, 0, 12, 12]


def test_a_kernel_whose_output_axis_is_not_first_is_sharded_along_it() -> None:
    spec = TensorSpec("conv", (4, 18), arrangement=Arrangement((2, 4, 3, 3), (1,)))
    assert Box((0, 1, 0, 0), (2, 2, 3, 3)).stored(spec) == Box((1, 0), (2, 18))
    assert Box((0, 3, 0, 0), (2, 0, 3, 3)).stored(spec) == Box((3, 0), (0, 18))
    with pytest.raises(SettingsError, match=r"parameter 'conv' is sharded along axis 0, .* \(axis 1\)"):
        Box((0, 0, 0, 0), (1, 4, 3, 3)).stored(spec)
