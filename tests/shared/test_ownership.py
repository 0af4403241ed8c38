"""Which shard owns which fragments."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.ownership import assign


def test_largest_first_into_the_emptiest_shard() -> None:
    # 8 to shard 0, 7 to 1, 6 to 1 (13), 5 to 0 (13), 4 to 0, the first of two as full
    assert assign([4, 5, 6, 7, 8], 2) == [[0, 1, 4], [2, 3]]


def test_equal_fragments_are_dealt_in_order() -> None:
    assert assign([3, 3, 3, 3, 3], 3) == [[0, 3], [1, 4], [2]]


def test_shards_without_fragments_are_empty() -> None:
    assert assign([1, 2], 4) == [[1], [0], [], []]


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 10))
def test_every_fragment_has_one_owner_and_loads_differ_by_one_fragment_at_most(sizes: list[int], shards: int) -> None:
    owned = assign(sizes, shards)
    assert sorted(fragment for fragments in owned for fragment in fragments) == list(range(len(sizes)))
    loads = [sum(sizes[fragment] for fragment in fragments) for fragments in owned]
    for fragments, load in zip(owned, loads, strict=True):
        if fragments:
            assert load - min(sizes[fragment] for fragment in fragments) <= min(loads)
