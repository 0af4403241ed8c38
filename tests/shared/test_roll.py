"""Which processes make a learner's next generation, and when, by a clock that the test moves."""

from __future__ import annotations

import pytest

from diloco.core.roll import Roll, members
from diloco.settings.service import MeshSettings, ProcessesSettings


@pytest.mark.parametrize(
    ("present", "sizes", "chosen"),
    [
        ({0, 1, 2}, [3], [0, 1, 2]),
        ({0, 1}, [3], []),
        ({0, 2}, [3, 2, 1], [0, 2]),
        ({0}, [3, 2], []),
        ({0, 3, 5}, [8, 6, 4, 2], [0, 3]),  # each replica is two processes: the third one waits
    ],
)
def test_as_many_as_have_come_and_fit_the_mesh(present: set[int], sizes: list[int], chosen: list[int]) -> None:
    assert members(present, sizes) == chosen


def test_all_begin_at_once_and_fewer_when_nobody_has_come_for_a_while() -> None:
    roll = Roll([3, 2], regroup_s=10.0, last_s=100.0)
    assert roll.begins_s(100.0) is None  # one alone is too few, for ever
    assert roll.begins_s(1000.0) is None
    roll.come(2, 104.0)
    assert roll.members == [0, 2]
    assert roll.begins_s(106.0) == 8.0
    assert roll.begins_s(115.0) == 0.0
    roll.go(2)
    assert roll.begins_s(115.0) is None
    roll.come(1, 116.0)
    assert roll.begins_s(117.0) == 9.0  # the wait is from whoever came last
    roll.come(2, 118.0)
    assert roll.begins_s(118.0) == 0.0


def test_nobody_is_waited_for_once_all_that_are_known_to_come_are_there() -> None:
    roll = Roll([4, 3, 2, 1], regroup_s=10.0, last_s=100.0, expected=frozenset({0, 1, 3}))
    assert roll.begins_s(100.0) == 10.0
    roll.come(1, 101.0)
    assert roll.begins_s(101.0) == 10.0
    roll.come(3, 102.0)
    assert roll.begins_s(102.0) == 0.0
    assert roll.members == [0, 1, 3]
    roll.go(3)
    roll.come(2, 103.0)  # one more than is known is no reason to go without one that is
    assert roll.begins_s(103.0) == 10.0
    alone = Roll([4, 3], regroup_s=10.0, last_s=100.0, expected=frozenset({0}))
    assert alone.begins_s(200.0) is None, "too few, whoever is expected"


def test_without_least_all_are_waited_for() -> None:
    roll = Roll([2], regroup_s=0.0, last_s=0.0)
    assert roll.begins_s(50.0) is None


def sizes(count: int, least: int | None, data: int) -> list[int]:
    processes = ProcessesSettings(count=count, address="127.0.0.1:7600", least=least)
    return processes.sizes(MeshSettings(data=data))


def test_a_generation_has_whole_replicas() -> None:
    assert sizes(4, None, 4) == [4]
    assert sizes(4, 1, 4) == [4, 3, 2, 1]
    assert sizes(4, 2, 2) == [4, 2]  # each replica lies on two processes
    assert sizes(3, 1, 6) == [3, 2, 1]  # two replicas a process
    assert sizes(4, 1, 1) == [4]  # one replica: none can be left out


def test_the_mesh_shrinks_by_replicas_alone() -> None:
    whole = MeshSettings(data=6, fsdp=2, tensor=2)
    assert whole.of(2, 3) == MeshSettings(data=4, fsdp=2, tensor=2)
    assert whole.of(3, 3) == whole
    assert MeshSettings(data=3).of(1, 2) is None
