"""Decisions of a learner of several processes, in any order and with any delay of the facts that they are made of."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.shared.test_learner import FRAGMENTS, TOKENS, World, settings

from diloco.core.accounts import StepDone
from diloco.core.decisions import BOUNDARIES_APART_MAX, Course, Decisions
from diloco.core.fragment_state import Version
from diloco.errors import IslandError
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.control import MarkerAnswer, SnapshotMarker
from diloco.wire.framing import Message
from diloco.wire.island import MESSAGES, Decided, PartSaved, Passed, Pending, Purpose, Stage, Staged, Store

RUN, GENERATION = bytes(8), 7


class Process:
    """A process that does not lead: what it was sent, and what it applied."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.course = Course(RUN, GENERATION)
        self.mail: deque[Message] = deque()
        self.staged: dict[int, Stage] = {}  # by fragment: the one whose rows are here
        self.applied: list[tuple[int, int]] = []
        self.pending: list[list[Pending]] = [[] for _ in range(FRAGMENTS)]  # offers whose arrays it keeps, as a carrier
        self.saved: dict[int, list[list[Pending]]] = {}  # by decision: of which offers it has saved arrays

    def take(self) -> Message | None:
        """Do what the next message asks for; return the answer."""
        message = self.mail.popleft()
        if isinstance(message, Stage):
            self.staged[message.fragment] = message
            return Staged(message.fragment, message.number)
        if isinstance(message, Store):
            stated = message.stated
            self.pending[message.fragment].append(Pending((stated.incarnation, stated.number), message.bits, False))
            return None
        assert isinstance(message, Decided)
        for write in message.writes:
            stage = self.staged.pop(write.fragment)
            assert stage.number == write.stage, "its rows are here before it is applied"
            self.pending[write.fragment] = list(stage.pending)
            self.applied.append((write.fragment, write.version))
        if message.save is not None:
            self.saved[message.number] = [list(offers) for offers in self.pending]
        return self.course.take(message)


class Island(World):
    """A learner of several processes; messages between two of them keep their order, and nothing else does."""

    def __init__(self, run: RunSettings, processes: int) -> None:
        super().__init__(run, arrays=False)
        everyone = frozenset(range(processes))
        self.decisions = Decisions(self.learner, RUN, GENERATION, processes, [everyone] * FRAGMENTS)
        self.processes = [Process(index) for index in range(processes)]
        self.answers_to_leader: list[deque[Message]] = [deque() for _ in range(processes)]
        self.applied: list[tuple[int, int]] = []
        self.flying = False
        self.wanted: Purpose | None = None
        self.saved: dict[int, list[list[Pending]]] = {}  # by decision: the offers in the accounts that the leader has saved
        self.stage()

    def send(self, message: Message) -> None:
        frame = framing.pack(message, RUN)  # as it travels
        for process in self.processes:
            process.mail.append(framing.unpack(frame, MESSAGES[message.kind], RUN)[0])

    def stage(self) -> None:
        for stage in self.decisions.to_stage():
            self.send(stage)

    def merge(self, index: int, *, own: bool, rolled_back: bool = False) -> None:
        super().merge(index, own=own, rolled_back=rolled_back)
        self.stage()

    def queue(self, index: int, version: Version) -> None:
        self.decisions.queue(index, version)

    def rewind(self, index: int) -> None:
        self.decisions.rewind(index, self.logs[index].head(None, arrays=False))
        self.stage()

    def answer(self, index: int) -> None:
        if self.decisions.may_answer:
            super().answer(index)

    def encode(self) -> None:
        sending = list(self.sending)
        super().encode()
        for index, (offer, before) in enumerate(zip(self.sending, sending, strict=True)):
            if offer is not None and offer is not before:
                self.send(Store(index, offer.bits, offer.stated))

    def look_ahead(self) -> None:
        """Dispatch a step, and make the decision after it."""
        if self.decisions.made is None:
            if self.flying:
                self.decisions.book(StepDone(self.tokens, 3, self.taken, None, 0.0, 0.0))
                self.taken += 1
            self.now_s += 1
            made = self.decisions.make(self.now_s, (3, self.taken), ended=False, wanted=self.wanted)
            self.wanted = None if made.save else self.wanted
            self.send(made)

    def want(self) -> None:
        self.wanted = "own"

    def saves(self) -> bool:
        return self.decisions.made is not None and self.decisions.made.save is not None

    def end_step(self) -> None:
        """Pass the boundary that was decided, as the leader; no process can be far behind, since they compute together."""
        made = self.decisions.made
        if made is None:
            return
        for process in self.processes[1:]:
            while made.number - process.course.number >= BOUNDARIES_APART_MAX - 1:
                self.deliver(process.index)
                self.hear(process.index)
        decision = self.decisions.carry_out()
        self.applied += [(each.fragment, each.version) for each in decision.applies]
        if made.save is not None:
            dump, _ = self.learner.dump([])
            self.saved[made.number] = [
                [Pending((of["incarnation"], of["number"]), of["bits"], of["dropped"]) for of in fragment["pending"]]
                for fragment in dump["fragments"]
            ]
            for process in self.processes:
                self.decisions.saves.saved(process.index, PartSaved(made.number, bytes(32), 1))
        for index in decision.reads:
            if self.decisions.submit(index):
                self.answer(index)
        self.flying = not (decision.stop or decision.wait or decision.finished)
        self.stage()

    def deliver(self, index: int) -> None:
        process = self.processes[index]
        if process.mail:
            answer = process.take()
            if answer is not None and (index or isinstance(answer, Staged)):  # the leader's own boundary is ``end_step``
                self.answers_to_leader[index].append(answer)

    def hear(self, index: int) -> None:
        if self.answers_to_leader[index]:
            answer = self.answers_to_leader[index].popleft()
            if isinstance(answer, Staged):
                self.decisions.staged(index, answer.fragment, answer.number)
            else:
                assert isinstance(answer, Passed)
                self.decisions.passed(index, answer)

    def settle(self) -> None:
        """Let all mail arrive."""
        while any(process.mail for process in self.processes) or any(self.answers_to_leader):
            for process in self.processes:
                self.deliver(process.index)
                self.hear(process.index)


PROCESSES = 3
ACTS = st.one_of(
    st.just(("look_ahead",)),
    st.just(("end_step",)),
    st.just(("want",)),
    st.tuples(st.just("deliver"), st.integers(0, PROCESSES - 1)),
    st.tuples(st.just("hear"), st.integers(0, PROCESSES - 1)),
    st.tuples(st.just("announce"), st.integers(0, FRAGMENTS - 1)),
    st.just(("encode",)),
    st.just(("store",)),
    st.tuples(st.just("merge"), st.integers(0, FRAGMENTS - 1), st.booleans()),
    st.tuples(st.just("rollback"), st.integers(0, FRAGMENTS - 1)),
    st.tuples(st.just("rewind"), st.integers(0, FRAGMENTS - 1)),
)


def act(island: Island, name: str, *values: Any) -> None:
    if name == "merge":
        island.merge(values[0], own=values[1])
    elif name == "rollback":
        island.merge(values[0], own=False, rolled_back=True)
    else:
        getattr(island, name)(*values)


def go_on(island: Island, boundaries: int) -> None:
    """Pass so many boundaries with all mail in time."""
    for _ in range(boundaries):
        island.settle()
        island.look_ahead()
        island.settle()
        island.end_step()
        while island.answers:
            island.encode()
        island.store()
    island.settle()


@given(st.lists(ACTS, max_size=80))
def test_all_processes_apply_the_same_in_the_same_order(schedule: list[Any]) -> None:
    island = Island(settings(), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    go_on(island, 8)
    rewound = any(name == "rewind" for name, *_ in schedule)
    for process in island.processes:
        assert process.applied == island.applied
        assert process.course.chain == island.decisions.course.chain
        assert process.course.step == island.decisions.course.step
    for index, log in enumerate(island.logs):
        versions = [version for fragment, version in island.applied if fragment == index]
        assert versions[-1] == log.chain.version, "the newest version is applied in the end"
        if not rewound:
            assert versions == sorted(set(versions)), "none twice, and none after a newer one"
    island.check_accounts()


@given(st.lists(ACTS, max_size=80))
def test_all_save_the_arrays_of_the_offers_in_the_saved_accounts(schedule: list[Any]) -> None:
    island = Island(settings(), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    island.want()
    go_on(island, 8)
    assert island.saved
    for process in island.processes:
        assert process.saved == island.saved


def test_no_state_is_saved_while_another_is_or_an_offer_is_half_made() -> None:
    island = Island(settings(), PROCESSES)
    go_on(island, 2)
    decisions = island.decisions
    island.announce(0)
    island.look_ahead()
    island.end_step()
    island.announce(0)
    assert island.answers, "an offer is being quantised"
    island.want()
    island.look_ahead()
    assert not island.saves()
    island.end_step()
    island.encode()
    island.look_ahead()
    assert island.saves()
    island.announce(1)
    assert not island.answers, "none begins before the state is saved"
    decisions.carry_out()
    assert decisions.saves.under_way is not None
    island.wanted = "own"
    island.look_ahead()
    assert not island.saves()
    assert decisions.saves.saved(0, PartSaved(decisions.course.number - 1, bytes(32), 1)) is None


def test_a_part_may_be_saved_before_the_leader_is_at_that_boundary() -> None:
    island = Island(settings(), PROCESSES)
    go_on(island, 2)
    decisions, saves = island.decisions, island.decisions.saves
    island.want()
    island.look_ahead()
    assert decisions.made is not None
    assert decisions.made.save is not None
    part = PartSaved(decisions.made.number, bytes(32), 1)
    assert saves.saved(1, part) is None
    name = decisions.made.save.name
    decisions.carry_out()
    assert saves.saved(2, part) is None
    assert saves.saved(0, part) is not None
    assert saves.whole == name


def test_a_leader_that_waits_knows_whether_all_are_where_it_is() -> None:
    island = Island(settings(), PROCESSES)
    go_on(island, 2)
    followed = [island.decisions.is_followed]
    island.look_ahead()
    island.end_step()
    followed.append(island.decisions.is_followed)
    island.settle()
    assert [*followed, island.decisions.is_followed] == [True, False, True]


def test_a_marker_is_answered_at_a_boundary_with_its_versions_before_any_other_state() -> None:
    island = Island(settings(), PROCESSES)
    go_on(island, 2)
    markers, decisions = island.learner.markers, island.decisions
    versions = [1] + [0] * (FRAGMENTS - 1)
    markers.hear(SnapshotMarker(4, versions), FRAGMENTS)
    island.look_ahead()
    assert not island.saves(), "a version that it names has not come"
    island.end_step()
    for _ in range(2):
        island.merge(0, own=False)  # the second one is held back
    island.settle()
    island.want()
    island.look_ahead()
    made = decisions.made
    assert made is not None
    assert [(write.fragment, write.version) for write in made.writes] == [(0, 1)]
    assert made.save is not None
    assert (made.save.purpose, made.save.marker) == ("whole", 4)
    decisions.carry_out()
    for process in range(PROCESSES):
        decisions.saves.saved(process, PartSaved(made.number, bytes(32), 1))
    markers.answer(MarkerAnswer("ann", 4, 2, versions, 1, bytes(32), [(1, bytes(32))] * 2))
    island.stage()
    go_on(island, 1)
    assert island.applied[-1] == (0, 2)


@given(st.lists(ACTS, max_size=60))
def test_steps_of_all_processes_are_the_steps_that_are_booked(schedule: list[Any]) -> None:
    island = Island(settings(), PROCESSES)
    for name, *values in schedule:
        act(island, name, *values)
    go_on(island, 3)
    flying = int(island.flying)
    assert island.learner.accounts.step == island.taken == island.decisions.course.step - flying
    assert island.learner.accounts.tokens == TOKENS * island.taken


def decided(island: Island) -> Decided:
    island.look_ahead()
    made = island.decisions.made
    assert made is not None
    return made


def test_a_version_is_not_decided_before_its_rows_are_everywhere() -> None:
    island = Island(settings(), 2)
    island.deliver(0)
    island.hear(0)
    first = decided(island)
    assert first.writes == []  # of process 1 nothing is known
    assert first.wait, "no step is taken on values that are not the log's"
    island.end_step()
    island.settle()
    assert {write.fragment for write in decided(island).writes} == {0, 1}


def test_a_process_that_took_another_course_is_named_with_step_and_hashes() -> None:
    island = Island(settings(), 2)
    made = decided(island)
    island.end_step()
    other = Course(RUN, GENERATION).take(msgspec.structs.replace(made, batch=(3, 5)))
    own = island.decisions.course.chain.hex()[:16]
    with pytest.raises(IslandError, match=rf"process 1, step 0: .* hash {other.chain.hex()[:16]}, the leader's have {own}"):
        island.decisions.passed(1, other)


def test_a_process_refuses_a_decision_that_is_not_the_next_one() -> None:
    island = Island(settings(), 2)
    first = decided(island)
    course = Course(RUN, GENERATION)
    course.take(first)
    with pytest.raises(IslandError, match=r"decision 0 of generation 7, step 0.* expected decision 1"):
        course.take(first)
    with pytest.raises(IslandError, match="generation 8"):
        Course(RUN, GENERATION).take(msgspec.structs.replace(first, generation=8))


def test_a_process_that_does_not_pass_boundaries_is_named() -> None:
    island = Island(settings(), 2)
    island.settle()
    for _ in range(BOUNDARIES_APART_MAX):
        decided(island)
        island.decisions.carry_out()
    decided(island)
    with pytest.raises(IslandError, match=r"process 1, step .* boundaries behind"):
        island.decisions.carry_out()
