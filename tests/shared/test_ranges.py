"""Sets of batches as ranges, against sets of batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from diloco.core.tensors import ranges
from diloco.wire.fields import Range

RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 5)), max_size=6)


def spelled(chosen: Iterable[Range]) -> list[tuple[int, int]]:
    """Every batch of some ranges, with repetitions."""
    return [(share, batch) for share, first, count in chosen for batch in range(first, first + count)]


def is_set(chosen: list[Range]) -> bool:
    """In order, none touching another: so that equal sets are equal lists."""
    return all((a[0], a[1] + a[2]) < b[:2] for a, b in itertools.pairwise(chosen))


@given(RANGES)
def test_the_union_of_any_ranges(chosen: list[Range]) -> None:
    joined = ranges.normal(chosen)
    assert is_set(joined)
    assert spelled(joined) == sorted(set(spelled(chosen)))


@given(RANGES, RANGES)
def test_what_two_sets_have_in_common_and_what_not(some: list[Range], others: list[Range]) -> None:
    a, b = ranges.normal(some), ranges.normal(others)
    common, rest = ranges.common(a, b), ranges.subtract(a, b)
    assert is_set(common)
    assert is_set(rest)
    assert set(spelled(common)) == set(spelled(a)) & set(spelled(b))
    assert set(spelled(rest)) == set(spelled(a)) - set(spelled(b))
    assert ranges.batches(common) + ranges.batches(rest) == ranges.batches(a) == len(spelled(a))


@given(RANGES, st.integers(0, 2), st.integers(0, 18))
def test_one_batch_more(chosen: list[Range], share: int, batch: int) -> None:
    before = ranges.normal(chosen)
    kept = list(before)
    after = ranges.add(before, share, batch)
    assert is_set(after)
    assert spelled(after) == sorted({*spelled(before), (share, batch)})
    assert before == kept  # an offer may hold the same list


@given(RANGES, st.dictionaries(st.integers(0, 3), st.integers(0, 20)))
def test_how_far_each_share_goes(chosen: list[Range], known: dict[int, int]) -> None:
    before = dict(known)
    ends = ranges.ends(chosen, known)
    for share in range(4):
        reached = [batch + 1 for s, batch in spelled(chosen) if s == share] + [end for s, end in known.items() if s == share]
        assert ends.get(share) == max(reached, default=None)
    assert known == before
