"""Cutting models into fragments: worked examples by hand, and what must hold for any model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.made.fragment_vectors import scatter

from diloco.core.tensors.arrangement import Arrangement
from diloco.core.tensors.fragments import (
    FixedSpec,
    Fragment,
    FragmentMap,
    TensorSpec,
    build_map,
    build_whole,
    check_same_map,
    cut_model,
    unpack_map,
)
from diloco.errors import AdmissionError, FormatError, SettingsError
from diloco.settings.run import FragmentSettings, Strategy

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
MODELS = st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=12).map(
    lambda drawn: [TensorSpec(f"t{i}", shape, embedding) for i, (shape, embedding) in enumerate(drawn)]
)


def pieces(fragment: Fragment) -> list[tuple[str, int, int]]:
    return [(piece.path, piece.row_start, piece.row_stop) for piece in fragment.pieces]


def vectors(**sizes: int) -> list[TensorSpec]:
    """One-dimensional tensors."""
    return [TensorSpec(path, (size,)) for path, size in sizes.items()]


def map_or_skip(model: list[TensorSpec], count: int, strategy: str = "balanced") -> FragmentMap:
    try:
        return build_map(model, count, strategy)  # type: ignore[arg-type]
    except SettingsError:
        assume(False)
        raise


def check_cover(made: FragmentMap) -> None:
    """Find out that every value is in exactly one piece, and every piece where its offset says."""
    covered = {tensor.path: np.zeros(tensor.shape, int) for tensor in made.tensors}
    for fragment in made.fragments:
        offset = 0
        for piece in fragment.pieces:
            rows = covered[piece.path]
            if rows.ndim:
                rows = rows[piece.row_start : piece.row_stop]
            assert rows.shape == piece.shape
            rows += 1
            assert piece.offset == offset
            offset += piece.size
        assert offset == fragment.size > 0
    assert all((rows == 1).all() for rows in covered.values())


def test_largest_first_into_the_smallest_bin() -> None:
    # share 8: a to 0 (6), b to 1 (5), c to 2 (4), d to 2 (8), e to 1 (8), f to 0 (8)
    made = build_map(vectors(a=6, b=5, c=4, d=4, e=3, f=2), 3)
    assert [[piece.path for piece in f.pieces] for f in made.fragments] == [["a", "f"], ["b", "e"], ["c", "d"]]
    assert [f.size for f in made.fragments] == [8, 8, 8]
    assert [f.index for f in made.fragments] == [0, 1, 2]
    assert [piece.offset for piece in made.fragments[0].pieces] == [0, 6]


def test_ties_go_by_path_then_by_bin() -> None:
    made = build_map(vectors(d=2, b=2, c=2, a=2), 2)
    assert [[piece.path for piece in f.pieces] for f in made.fragments] == [["a", "c"], ["b", "d"]]


def test_a_big_tensor_is_split_by_rows() -> None:
    # share 16: big is cut into ceil(40 / 16) = 3 at rows 0, 3, 6, 10, of sizes 12, 12, 16; x (8) follows into the first 12
    made = build_map([TensorSpec("big", (10, 4)), TensorSpec("x", (8,))], 3)
    assert [pieces(f) for f in made.fragments] == [[("big", 6, 10)], [("big", 0, 3), ("x", 0, 8)], [("big", 3, 6)]]
    assert made.fragments[1].pieces[0].shape == (3, 4)
    assert made.fragments[1].pieces[1].offset == 12
    assert [f.size for f in made.fragments] == [16, 20, 12]


def test_embeddings_have_their_share_of_the_fragments() -> None:
    # 40 of 160 parameters: 1 of 4 fragments; the others' share is 40, so w and x are halved and dealt 30 each
    model = [TensorSpec("w", (6, 10)), TensorSpec("embed", (10, 4), embedding=True), TensorSpec("x", (6, 10))]
    made = build_map(model, 4)
    assert [f.embedding for f in made.fragments] == [True, False, False, False]
    assert [f.size for f in made.fragments] == [40, 60, 30, 30]
    assert [pieces(f) for f in made.fragments] == [
        [("embed", 0, 10)],
        [("w", 0, 3), ("x", 3, 6)],
        [("w", 3, 6)],
        [("x", 0, 3)],
    ]


@pytest.mark.parametrize(("embedding_rows", "count", "own"), [(1, 8, 1), (995, 8, 7), (500, 2, 1), (750, 8, 6)])
def test_both_kinds_get_at_least_one_fragment(embedding_rows: int, count: int, own: int) -> None:
    model = [TensorSpec("e", (embedding_rows, 2), embedding=True), TensorSpec("w", (1000 - embedding_rows, 2))]
    made = build_map(model, count)
    assert len(made.fragments) == count
    assert [f.embedding for f in made.fragments] == [True] * own + [False] * (count - own)


def test_a_single_fragment_holds_all_and_is_no_embedding() -> None:
    made = build_map([TensorSpec("e", (3, 2), embedding=True), TensorSpec("w", (2, 2))], 1)
    assert [pieces(f) for f in made.fragments] == [[("e", 0, 3), ("w", 0, 2)]]
    assert build_whole([TensorSpec("e", (3, 2), embedding=True), TensorSpec("w", (2, 2))]) == made
    assert not made.fragments[0].embedding
    assert (made.parameters, made.state_values, made.size) == (10, 0, 10)


def test_a_model_of_embeddings_alone() -> None:
    made = build_map([TensorSpec("e", (4, 2), embedding=True)], 2)
    assert [(pieces(f), f.embedding) for f in made.fragments] == [([("e", 0, 2)], True), ([("e", 2, 4)], True)]


def test_state_has_fragments_of_its_own_the_last_ones() -> None:
    # 8 of 168 values: of 4 fragments one; 40 of the others' 160 are an embedding, which has one of the three left
    state = [TensorSpec("state/mean", (4,), state=True), TensorSpec("state/var", (4,), state=True)]
    model = [TensorSpec("w", (6, 10)), TensorSpec("embed", (10, 4), embedding=True), TensorSpec("x", (6, 10)), *state]
    made = build_map(model, 4)
    assert [(f.embedding, f.state) for f in made.fragments] == [(True, False), (False, False), (False, False), (False, True)]
    assert pieces(made.fragments[3]) == [("state/mean", 0, 4), ("state/var", 0, 4)]
    assert (made.parameters, made.state_values, made.size) == (160, 8, 168)
    assert [f.bits(4) for f in made.fragments] == [4, 4, 4, 32]
    # with two fragments the embedding is with the others
    assert [(f.size, f.embedding, f.state) for f in build_map(model, 2).fragments] == [(160, False, False), (8, False, True)]
    assert build_whole(model) == build_map(model, 2)
    with pytest.raises(SettingsError, match=r"fragments.count = 1: merged state such as 'state/mean' .* set at least 2"):
        build_map(model, 1)
    with pytest.raises(SettingsError, match="the model has no tensors"):
        build_map(state, 2)


def test_strided_deals_tensors_in_path_order() -> None:
    made = build_map(vectors(c=9, a=1, e=1, b=1, d=1), 2, "strided")
    assert [[piece.path for piece in f.pieces] for f in made.fragments] == [["a", "c", "e"], ["b", "d"]]


def test_layer_deals_whole_layers() -> None:
    paths = ["blocks/0/a", "blocks/0/b", "blocks/1/a", "blocks/1/b", "blocks/2/a", "head"]
    made = build_map([TensorSpec(path, (2,)) for path in paths], 2, "layer")
    assert [[piece.path for piece in f.pieces] for f in made.fragments] == [
        ["blocks/0/a", "blocks/0/b", "blocks/2/a"],
        ["blocks/1/a", "blocks/1/b", "head"],
    ]


A, B = TensorSpec("a", (2, 3)), TensorSpec("b", (4,))


def layered(numbers: Sequence[int], *, path: str = "blocks/{}/{}") -> list[TensorSpec]:
    """Two tensors a layer, and an embedding, a norm and a head beside them."""
    of_layers = [TensorSpec(path.format(number, name), (4, 2)) for number in numbers for name in ("a", "b")]
    return [*of_layers, TensorSpec("embedding", (8, 2), embedding=True), TensorSpec("norm", (2,)), TensorSpec("head", (8, 2))]


def layers_in(fragment: Fragment) -> list[int]:
    """The numbers of the layers in it, by the second part of their paths, and in the order of numbers."""
    return sorted({int(piece.path.split("/")[1]) for piece in fragment.pieces})


def test_layers_as_published() -> None:
    # 12 layers and P = 4 (arXiv 2604.21428, appendix C)
    made = build_map(layered(range(12)), 4, "layers")
    assert [piece.path for piece in made.fragments[0].pieces] == ["embedding", "head", "norm"]
    assert [layers_in(fragment) for fragment in made.fragments[1:]] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert [fragment.size for fragment in made.fragments] == [34, 64, 64, 64]
    # that of the embedding alone is averaged: it is one fragment with a head and a norm, which are not
    assert not made.fragments[0].embedding
    assert made.fragments[0].embedding_groups("tensor").tolist() == [True, False, False]
    assert made.fragments[0].embedding_groups("row").tolist() == [True] * 8 + [False] * 9


def test_tensors_as_published() -> None:
    made = build_map(layered(range(12)), 4, "tensors")
    assert [piece.path for piece in made.fragments[0].pieces] == ["embedding", "head", "norm"]
    # 0/a, 0/b, 1/a, 1/b, 2/a, ... one by one: every third
    assert pieces(made.fragments[1])[:3] == [("blocks/0/a", 0, 4), ("blocks/1/b", 0, 4), ("blocks/10/b", 0, 4)]
    assert {piece.path for piece in made.fragments[1].pieces} == {
        *("blocks/0/a", "blocks/1/b", "blocks/3/a", "blocks/4/b", "blocks/6/a", "blocks/7/b", "blocks/9/a", "blocks/10/b")
    }
    assert [len(fragment.pieces) for fragment in made.fragments] == [3, 8, 8, 8]


def test_count_is_the_most() -> None:
    made = build_map(layered(range(8)), 24, "layers")
    assert [layers_in(fragment) for fragment in made.fragments[1:]] == [[number] for number in range(8)]
    assert len(build_map(layered(range(8)), 24, "tensors").fragments) == 1 + 16
    assert len(build_map(layered([0]), 24, "layers").fragments) == 2
    assert pieces(build_map(layered(range(3)), 1, "layers").fragments[0]) == pieces(
        build_map(layered(range(3)), 1).fragments[0]
    )


def test_fragments_of_three_layers() -> None:
    # Streaming DiLoCo (arXiv 2501.18512): three layers a fragment, strided; 8 layers are ceil(8 / 3) = 3 fragments
    settings = FragmentSettings(strategy="layers", layers=3)
    made = cut_model(layered(range(8)), settings)
    assert [layers_in(fragment) for fragment in made.fragments[1:]] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert made == unpack_map(made.pack())
    # a smaller count has more layers in each
    fewer = cut_model(layered(range(8)), FragmentSettings(strategy="layers", layers=3, count=3))
    assert [layers_in(fragment) for fragment in fewer.fragments[1:]] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # and the setting is not there for members that do not know it
    assert "layers" not in FragmentSettings(strategy="layers").model_dump()


@pytest.mark.parametrize(
    ("paths", "layers"),
    [
        (["h/0/w", "h/5/w", "h/10/w"], [["h/0/w"], ["h/5/w"], ["h/10/w"]]),
        (["Block_0/Dense_0/w", "Block_1/Dense_0/w"], [["Block_0/Dense_0/w"], ["Block_1/Dense_0/w"]]),
        (["Dense_0/w", "Block_0/w", "Block_1/w", "fc1/w"], [["Block_0/w"], ["Block_1/w"]]),  # the only Dense is no layer
        (["Model_0/layers_1/w", "Model_0/layers_2/w"], [["Model_0/layers_1/w"], ["Model_0/layers_2/w"]]),
        (["a/0/w", "b/0/w", "b/1/experts/3/w"], [["a/0/w", "b/0/w"], ["b/1/experts/3/w"]]),
        (["0/w", "1/w", "2"], [["0/w"], ["1/w"], ["2"]]),
        (["w_0", "b_0", "w_1", "b_1"], [["b_0", "w_0"], ["b_1", "w_1"]]),
    ],
)
def test_layers_are_known_by_numbers_in_paths(paths: list[str], layers: list[list[str]]) -> None:
    made = build_map([TensorSpec(path, (2,)) for path in [*paths, "outside"]], 9, "layers")
    assert [[piece.path for piece in fragment.pieces] for fragment in made.fragments[1:]] == layers


def test_stacked_layers_are_rows_of_the_first_axis() -> None:
    # 4 layers in each tensor; the log has the kernel's rows by layer and output unit, 3 a layer
    kernel = Arrangement((4, 5, 3), (0, 2))
    model = [
        TensorSpec("layers/kernel", kernel.stored_shape, arrangement=kernel, layers=4),
        TensorSpec("layers/scale", (4, 5), layers=4),
        TensorSpec("embedding", (7, 5), embedding=True),
    ]
    made = build_map(model, 3, "layers")
    assert [pieces(fragment) for fragment in made.fragments] == [
        [("embedding", 0, 7)],
        [("layers/kernel", 0, 3), ("layers/kernel", 6, 9), ("layers/scale", 0, 1), ("layers/scale", 2, 3)],
        [("layers/kernel", 3, 6), ("layers/kernel", 9, 12), ("layers/scale", 1, 2), ("layers/scale", 3, 4)],
    ]
    assert unpack_map(made.pack()) == made
    assert len(build_map(model, 24, "layers").fragments) == 5
    by_tensor = build_map(model, 5, "tensors").fragments[1:]
    assert [pieces(fragment) for fragment in by_tensor[:2]] == [
        [("layers/kernel", 0, 3), ("layers/kernel", 6, 9)],
        [("layers/scale", 0, 1), ("layers/scale", 2, 3)],
    ]


def test_other_strategies_know_no_stacks() -> None:
    # so that members of before, which do not know the word, have the same map
    stacked, plain = TensorSpec("w", (4, 5), layers=4), TensorSpec("w", (4, 5))
    for strategy in ("balanced", "strided", "layer"):
        assert build_map([stacked, A], 2, strategy) == build_map([plain, A], 2, strategy)


def test_state_is_the_last_fragment_beside_layers() -> None:
    model = [*layered(range(3)), TensorSpec("state/0/mean", (9,), state=True), TensorSpec("state/1/mean", (9,), state=True)]
    made = build_map(model, 24, "layers")
    assert [(len(f.pieces), f.state) for f in made.fragments] == [(3, False), (2, False), (2, False), (2, False), (2, True)]
    assert [(len(f.pieces), f.state) for f in build_map(model, 2, "layers").fragments] == [(9, False), (2, True)]
    with pytest.raises(SettingsError, match=r"fragments.count = 1: merged state such as 'state/0/mean'"):
        build_map(model, 1, "layers")


@pytest.mark.parametrize("strategy", ["layers", "tensors"])
def test_a_model_without_layers_is_refused(strategy: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"strategy = {strategy}: no layers found in the model, .* set .* = balanced, or strided"
    ):
        build_map([A, B], 24, strategy)  # type: ignore[arg-type]


LAYERED = st.lists(
    st.tuples(
        st.sampled_from(["l/0", "l/1", "l/2", "l/10", "b_0", "b_1", "x"]), SHAPES, st.sampled_from(["", "embedding", "state"])
    ),
    min_size=1,
    max_size=12,
).flatmap(
    lambda drawn: st.lists(st.integers(0, 4), min_size=len(drawn), max_size=len(drawn)).map(
        lambda stacks: [
            TensorSpec(
                f"{'state/' * (kind == 'state')}{path}/t{i}",
                (*((stack * 2,) if stack and kind != "state" else ()), *shape),
                kind == "embedding",
                state=kind == "state",
                layers=stack if kind != "state" else 0,
            )
            for i, ((path, shape, kind), stack) in enumerate(zip(drawn, stacks, strict=True))
        ]
    )
)


@given(LAYERED, st.integers(1, 8), st.sampled_from(["layers", "tensors"]), st.integers(1, 3), st.data())
def test_by_layers_each_value_is_in_one_piece_and_order_does_not_matter(
    model: list[TensorSpec], count: int, strategy: Strategy, layers: int, data: st.DataObject
) -> None:
    try:
        made = build_map(model, count, strategy, layers=layers)
    except SettingsError:
        assume(False)
        raise
    assert len(made.fragments) <= count
    check_cover(made)
    again = build_map(data.draw(st.permutations(model)), count, strategy, layers=layers)
    assert again == made
    # the count that is stored is that of the fragments, and cuts the same ones
    assert unpack_map(made.pack()) == made
    for fragment in made.fragments:
        assert {piece.path.startswith("state/") for piece in fragment.pieces} == {fragment.state}


@given(MODELS, st.integers(1, 8), st.sampled_from(["balanced", "strided", "layer"]))
def test_every_parameter_is_in_exactly_one_piece(model: list[TensorSpec], count: int, strategy: str) -> None:
    made = map_or_skip(model, count, strategy)
    assert len(made.fragments) == count
    check_cover(made)


@given(MODELS, st.integers(2, 8), st.data())
def test_state_shares_a_fragment_with_nothing_and_leaves_the_others_as_they_were(
    model: list[TensorSpec], count: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 9))
    made = map_or_skip([*model, TensorSpec("state/a", (rows,), state=True)], count)
    of_state = [f for f in made.fragments if f.state]
    assert sum(f.size for f in of_state) == rows
    assert {piece.path for f in of_state for piece in f.pieces} == {"state/a"}
    others = made.fragments[: count - len(of_state)]
    assert others == build_map(model, len(others)).fragments
    assert unpack_map(made.pack()) == made


@given(MODELS, st.integers(1, 8))
def test_embeddings_never_share_a_fragment(model: list[TensorSpec], count: int) -> None:
    made = map_or_skip(model, count)
    kinds = {tensor.path: tensor.embedding for tensor in model}
    for fragment in made.fragments:
        in_it = {kinds[piece.path] for piece in fragment.pieces}
        assert count == 1 or in_it == {fragment.embedding}


@given(MODELS, st.integers(1, 8))
def test_bins_differ_by_at_most_one_piece(model: list[TensorSpec], count: int) -> None:
    # what "largest first into the smallest bin" guarantees: before its last piece no bin was larger than any other
    made = map_or_skip(model, count)
    for kind in (True, False):
        fragments = [f for f in made.fragments if f.embedding is kind]
        if fragments:
            smallest = min(f.size for f in fragments)
            for fragment in fragments:
                assert fragment.size - min(piece.size for piece in fragment.pieces) <= smallest


@given(MODELS, st.integers(1, 8), st.data())
def test_the_map_does_not_depend_on_the_order_of_tensors(model: list[TensorSpec], count: int, data: st.DataObject) -> None:
    made = map_or_skip(model, count)
    again = build_map(data.draw(st.permutations(model)), count)
    assert again == made
    assert again.digest == made.digest


@given(MODELS, st.integers(1, 8), st.sampled_from(["balanced", "strided", "layer"]))
def test_pack_and_unpack(model: list[TensorSpec], count: int, strategy: str) -> None:
    made = map_or_skip(model, count, strategy)
    again = unpack_map(made.pack())
    assert again == made
    assert again.digest == made.digest


@given(MODELS, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_scatter_undoes_gather(model: list[TensorSpec], count: int, seed: int) -> None:
    made = map_or_skip(model, count)
    generator = np.random.default_rng(seed)
    tensors = {t.path: generator.standard_normal(t.shape).astype(np.float32).reshape(t.shape) for t in model}
    again = made.empty()
    for fragment in made.fragments:
        vector = fragment.gather(tensors)
        assert vector.dtype == np.float32
        scatter(fragment, vector, again)
    for path, values in tensors.items():
        np.testing.assert_array_equal(again[path], values)


def test_gather_is_in_order_of_pieces_and_rows() -> None:
    fragment = build_map([TensorSpec("b", (2, 2)), TensorSpec("a", ()), TensorSpec("c", (2,))], 1).fragments[0]
    tensors = {"a": np.float32(1), "b": np.array([[2, 3], [4, 5]], np.float32), "c": np.array([6, 7], np.float32)}
    out = np.full(7, -1, np.float32)
    assert fragment.gather({k: np.asarray(v) for k, v in tensors.items()}, out) is out
    assert out.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_gather_reads_only_its_rows_of_a_split_tensor() -> None:
    first, second = build_map([TensorSpec("w", (4, 2))], 2).fragments
    tensors = {"w": np.arange(8, dtype=np.float32).reshape(4, 2)}
    assert first.gather(tensors).tolist() == [0, 1, 2, 3]
    assert second.gather(tensors).tolist() == [4, 5, 6, 7]
    scatter(second, np.full(4, 9, np.float32), tensors)
    assert tensors["w"].ravel().tolist() == [0, 1, 2, 3, 9, 9, 9, 9]


def test_segments_of_every_number_of_dimensions() -> None:
    shapes = {"a": (), "b": (5,), "c": (2, 3), "d": (2, 2, 2), "e": (3, 1)}
    fragment = build_map([TensorSpec(path, shape) for path, shape in shapes.items()], 1).fragments[0]
    assert fragment.segments("tensor").tolist() == [0, 1, 6, 12, 20, 23]
    assert fragment.segments("row").tolist() == [0, 1, 6, 9, 12, 14, 16, 18, 20, 21, 22, 23]
    assert fragment.segments("row").dtype == np.int64


@pytest.mark.parametrize(
    ("tensors", "count", "expected"),
    [
        ([], 1, "no tensors"),
        ([TensorSpec("a", (2,)), TensorSpec("b", (1,)), TensorSpec("a", (3,))], 1, "two tensors are named 'a'"),
        ([TensorSpec("a", (2,)), TensorSpec("b", (3, 0))], 1, r"'b' of shape \(3, 0\) is empty"),
        (vectors(a=2, b=1), 4, "into 3 pieces, fewer than 4 fragments"),
        ([TensorSpec("a", (), embedding=True), TensorSpec("b", (1,))], 3, "can cut 1 embedding-like tensors"),
    ],
)
def test_what_cannot_be_cut_is_refused(tensors: list[TensorSpec], count: int, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        build_map(tensors, count)


def test_without_splitting_there_are_fewer_pieces() -> None:
    with pytest.raises(SettingsError, match=r"into 1 pieces, fewer than 2 fragments.* or fragments.strategy=balanced"):
        build_map([TensorSpec("w", (10, 10))], 2, "strided")


@pytest.mark.parametrize(
    ("ours", "count", "expected"),
    [
        ([A, B, TensorSpec("c", (1,))], 2, r"'c' differs: the run has no such tensor, .* model has shape \(1,\)"),
        ([A], 2, r"'b' differs: the run has shape \(4,\), .* model has no such tensor"),
        ([TensorSpec("a", (3, 2)), TensorSpec("b", (5,))], 2, r"'a' differs: the run has shape \(2, 3\), .* \(3, 2\)"),
        ([A, TensorSpec("b", (4,), True)], 2, r"'b' differs: the run has shape \(4,\), .* shape \(4,\), embedding-like"),
        ([A, TensorSpec("b", (4,), state=True)], 2, r"'b' differs: the run has shape \(4,\), .* state that is merged"),
        ([A, B], 3, "the run has 2 fragments by 'balanced', this learner 3 by 'balanced'"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(ours: list[TensorSpec], count: int, expected: str) -> None:
    with pytest.raises(AdmissionError, match=rf"run 'r': .*{expected}"):
        check_same_map(build_map(ours, count), build_map([A, B], 2), "r")


def test_the_same_model_is_admitted() -> None:
    check_same_map(build_map([B, A], 2), unpack_map(build_map([A, B], 2).pack()), "r")


@pytest.mark.parametrize(
    "values",
    [
        [[], 1, "balanced"],
        [[["a", [2], False]], 0, "balanced"],
        [[["a", [2], False]], 3, "balanced"],  # more than its pieces
        [[["a", [2], False]], 1, "random"],
        [[["a", [2], False], ["a", [2], False]], 1, "balanced"],
        [[["a", [0], False]], 1, "balanced"],
        [[["", [2], False]], 1, "balanced"],
        [[["a" * 513, [2], False]], 1, "balanced"],
        [[["a", [1] * 17, False]], 1, "balanced"],
        [[["a", [2**30, 2**30], False]], 1, "balanced"],
        [[["a", [2**44 - 1], False], ["b", [2], False]], 1, "balanced"],
        [[["a", [2]]], 1, "balanced"],
        [[["a", [2], False], ["b", [2], True, None, True]], 2, "balanced"],  # state, and embedding-like
        [[["a", [2], False], ["b", [4, 3], False, [[3, 4], [1]], True]], 2, "balanced"],
        [[["a", [2], False], ["b", [2], False, None, "latest"]], 2, "balanced"],
        [[["a", [2], False], ["b", [2], False, None, True, 0]], 2, "balanced"],  # of a later version
        [[["a", [2], False, None, False, 2]], 1, "balanced"],  # stacked, where nothing goes by layers
        [[["a", [3], False, None, False, 2]], 1, "layers"],
        [[["a", [], False, None, False, 1]], 1, "layers"],
        [[["a", [2], False], ["b", [2], False, None, True, 2]], 2, "layers"],
        [[["a", [2], False, None, True]], 1, "balanced"],
        "text",
    ],
)
def test_a_map_from_the_wire_out_of_bounds_is_refused(values: object) -> None:
    with pytest.raises(FormatError, match="fragment map"):
        unpack_map(msgspec.msgpack.encode(values))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_map_or_refused(data: bytes) -> None:
    try:
        made = unpack_map(data)
    except FormatError:
        return
    assert unpack_map(made.pack()) == made


def test_a_map_with_a_name_that_is_not_text_is_refused() -> None:
    with pytest.raises(FormatError, match="fragment map: 'utf-8' codec"):
        unpack_map(build_map([A, B], 2).pack().replace(b"\xa1a", b"\xa1\xff"))


def test_a_truncated_map_is_refused() -> None:
    packed = build_map([A, B], 2).pack()
    for length in range(len(packed)):
        with pytest.raises(FormatError):
            unpack_map(packed[:length])


ARRANGED = [
    Arrangement((3, 4), (1,)),
    Arrangement((2, 3, 4), (0, 2)),
    Arrangement((2, 3, 4), (1,)),
    Arrangement((2, 3, 4), (2, 0)),
    Arrangement((2, 3), ()),
]


@given(st.sampled_from(ARRANGED), st.data())
def test_rows_of_the_log_are_where_they_are_in_the_model(kept: Arrangement, data: st.DataObject) -> None:
    model = np.arange(math.prod(kept.shape)).reshape(kept.shape)
    stored = kept.stored(model)
    units = math.prod(kept.shape[axis] for axis in kept.outputs)
    assert stored.shape == (units, model.size // units)
    np.testing.assert_array_equal(kept.restored(stored), model)
    # a row has all values of one output unit: with all its indices along the output axes alike
    for row in stored:
        at = np.array(np.unravel_index(row, kept.shape))
        assert all(len(set(at[axis])) == 1 for axis in kept.outputs)
    start = data.draw(st.integers(0, len(stored) - 1))
    stop = data.draw(st.integers(start + 1, len(stored)))
    index, part, rows = kept.box(start, stop)
    np.testing.assert_array_equal(part.stored(model[index])[rows], stored[start:stop])


FIXED = FixedSpec("base", "bfloat16", (2, 0), bytes(32))


def test_a_packed_map_has_the_way_of_its_tensors_and_those_that_are_fixed() -> None:
    specs = [TensorSpec(f"t{number}", kept.stored_shape, arrangement=kept) for number, kept in enumerate(ARRANGED)]
    made = build_map(specs, 3, fixed=[FIXED])
    assert unpack_map(made.pack()) == made
    assert made.tensors[1].model_shape == (2, 3, 4)
    assert (
        len({build_map(specs, 3, fixed=fixed).digest for fixed in ([], [FIXED], [replace(FIXED, hash=bytes(31) + b"1")])}) == 3
    )
    with pytest.raises(SettingsError, match="two tensors are named 't1'"):
        build_map(specs, 3, fixed=[replace(FIXED, path="t1")])


@pytest.mark.parametrize("kept", [[[3, 4], [2]], [[3, 4], [0, 1]], [[3, 4], [1, 1]], [[3, 5], [1]], [[4, 3], [1]]])
def test_a_tensor_that_is_not_arranged_as_it_says_is_refused(kept: list[list[int]]) -> None:
    packed = msgspec.msgpack.encode([[["w", [4, 3], False, kept]], 1, "balanced"])
    with pytest.raises(FormatError, match="tensor 'w' of shape \\(4, 3\\) does not have the arrangement that the map states"):
        unpack_map(packed)
