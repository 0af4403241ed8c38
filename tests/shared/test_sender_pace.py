"""How many messages of a sender pass: its newest is never lost, and no sender costs another one anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.core.run.sender_pace import SenderPace
from diloco.wire.fields import MAX_MEMBERS


def test_a_burst_passes_and_of_what_comes_beyond_the_newest_waits_for_its_turn() -> None:
    pace = SenderPace[int](per_s=10, burst=3)
    assert [pace.take("eve", number, 0.0) for number in range(6)] == [
        (0, False), (1, False), (2, False), (None, False), (None, True), (None, True),
    ]  # fmt: skip
    assert pace.take("ann", 9, 0.0) == (9, False)
    assert abs((pace.next_s(0.0) or 0.0) - 0.1) < 1e-9
    assert pace.due(0.05) == []
    assert pace.due(0.1001) == [5]
    assert pace.next_s(0.2) is None


@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=200))
def test_no_more_pass_than_the_pace_allows_and_the_newest_passes_at_last(pauses_s: list[float]) -> None:
    pace, now_s, passed = SenderPace[int](per_s=20, burst=5), 0.0, list[int]()
    for number, pause_s in enumerate(pauses_s):
        now_s += pause_s
        passed += pace.due(now_s)
        taken, _ = pace.take("eve", number, now_s)
        passed += [] if taken is None else [taken]
    assert len(passed) <= 5 + 20 * now_s + 1e-6
    passed += pace.due(now_s + 1)
    assert passed[-1] == len(pauses_s) - 1
    assert passed == sorted(passed)


def test_what_is_kept_of_senders_is_bounded() -> None:
    pace = SenderPace[int](per_s=1, burst=1)
    for number in range(2 * MAX_MEMBERS):
        pace.take(f"ghost-{number}", number, 0.0)
    assert len(pace._free_s) <= MAX_MEMBERS
