"""Which processes make a learner's next generation, and when, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.learner.roll import ProcessStanding, Roll, goes_to, members
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
    assert roll.begins_s(117.0) == 9.0  # the wait is from the last one that came
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
    assert alone.begins_s(200.0) is None, "too few, expected or not"


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


# ---- where they meet


@pytest.mark.parametrize(
    ("own", "at", "heard", "to"),
    [
        (0, 0, {}, 0),
        (0, 0, {1: ProcessStanding(1), 2: ProcessStanding(2)}, 0),  # they come to it
        (1, 1, {0: ProcessStanding(0), 2: ProcessStanding(2)}, 0),  # gives way
        (2, 2, {1: ProcessStanding(1)}, 1),
        (2, 1, {0: ProcessStanding(0), 1: ProcessStanding(1)}, 1),  # stays until 1 gives way
        (2, 1, {0: ProcessStanding(0), 1: ProcessStanding(0)}, 0),
        (2, 1, {1: ProcessStanding(0)}, 2),  # 0 is reached by 1 alone
        (0, 0, {1: ProcessStanding(1, 7)}, 1),  # a generation goes on without process 0
        (0, 1, {1: ProcessStanding(1, 7), 2: ProcessStanding(2)}, 1),
        (0, 1, {2: ProcessStanding(2)}, 0),  # it is over
        (3, 2, {1: ProcessStanding(1, 7), 2: ProcessStanding(2)}, 1),  # or it would wait in vain
        (3, 2, {1: ProcessStanding(1, 7), 2: ProcessStanding(2, 8)}, 2),
    ],
)
def test_where_a_process_goes(own: int, at: int, heard: dict[int, ProcessStanding], to: int) -> None:
    assert goes_to(own, may_lead=True, at=at, heard=heard) == to


def test_a_process_without_an_address_goes_to_others_alone() -> None:
    assert goes_to(3, may_lead=False, at=None, heard={}) is None
    assert goes_to(3, may_lead=False, at=None, heard={1: ProcessStanding(1), 2: ProcessStanding(2)}) == 1
    assert goes_to(3, may_lead=False, at=None, heard={1: ProcessStanding(0)}) is None


@dataclass
class Meetings:
    """Processes that meet, of which each reaches some others, and the first ``leading`` may lead."""

    count: int
    leading: int
    reached: set[tuple[int, int]]  # pairs, the smaller one first
    at: dict[int, int | None] = field(default_factory=dict)
    begun: dict[int, list[int]] = field(default_factory=dict)  # generations by leader

    def __post_init__(self) -> None:
        self.at = {index: index if index < self.leading else None for index in range(self.count)}

    def turn(self, own: int) -> None:
        """Have a process that is in no generation look around, and if it can, begin one."""
        if own in self.busy:
            return
        others = [index for index in range(self.leading) if (min(own, index), max(own, index)) in self.reached]
        heard = {}
        for index in others:
            at = self.at[index]
            if index in self.begun:
                heard[index] = ProcessStanding(index, 1)
            elif at is not None and index not in self.busy:
                heard[index] = ProcessStanding(at)
        to = goes_to(own, may_lead=own < self.leading, at=self.at[own], heard=heard)
        if to != self.at[own]:
            for index, at in self.at.items():
                if at == own and index != own and index not in self.busy:
                    self.at[index] = index if index < self.leading else None  # their connections end
            self.at[own] = to
        if to == own:
            present = {index for index, at in self.at.items() if at == own and index not in self.busy}
            if chosen := members(present, range(self.count, self.count // 2, -1)):
                self.begun[own] = chosen

    @property
    def busy(self) -> set[int]:
        return {index for generation in self.begun.values() for index in generation}


COUNTS = st.integers(3, 7)


@given(st.data())
def test_whoever_reaches_whom_at_most_one_generation_begins_and_its_smallest_index_leads(data: st.DataObject) -> None:
    count = data.draw(COUNTS)
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)]
    meetings = Meetings(count, data.draw(st.integers(2, count)), set())
    for _ in range(4):  # the network changes again and again
        meetings.reached = data.draw(st.sets(st.sampled_from(pairs)))
        for own in data.draw(st.lists(st.integers(0, count - 1), max_size=3 * count)):
            meetings.turn(own)
            assert len(meetings.begun) <= 1
    for leader, generation in meetings.begun.items():
        assert leader == generation[0] == min(generation)
        assert 2 * len(generation) > count


@given(st.data())
def test_of_the_parts_of_a_cut_network_the_one_with_more_than_half_begins(data: st.DataObject) -> None:
    count = data.draw(COUNTS)
    side = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    part = {index for index in range(count) if side[index]}
    parts = [part, set(range(count)) - part]
    leading = data.draw(st.integers(2, count))
    reached = {(one, other) for part in parts for one in part for other in part if one < other}
    meetings = Meetings(count, leading, reached)
    order = data.draw(st.permutations(range(count)))
    for _ in range(3):
        for own in order:
            meetings.turn(own)
    larger = next((part for part in parts if 2 * len(part) > count and min(part) < leading), None)
    if larger is None:
        assert not meetings.begun
    else:
        [generation] = meetings.begun.values()
        assert set(generation) <= larger
