"""The state machine of a learner of several processes, with messages between them that are late, and schedules for it."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from tests.made.learner_world import FRAGMENTS, LearnerWorld

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.decisions import BOUNDARIES_APART_MAX, Course, Decisions
from diloco.core.learner.fragment_state import FragmentVersion
from diloco.settings.run import RunSettings
from diloco.wire import framing
from diloco.wire.framing import Message
from diloco.wire.process_messages import MESSAGES, Decided, PartSaved, Passed, Pending, Purpose, Stage, Staged, Store

RUN, GENERATION = bytes(8), 7


class FollowingProcess:
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


class DecidedIsland(LearnerWorld):
    """A learner of several processes; messages between two of them keep their order, and nothing else does."""

    def __init__(self, run: RunSettings, processes: int) -> None:
        super().__init__(run, arrays=False)
        everyone = frozenset(range(processes))
        self.decisions = Decisions(self.learner, RUN, GENERATION, processes, [everyone] * FRAGMENTS)
        self.processes = [FollowingProcess(index) for index in range(processes)]
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

    def queue(self, index: int, version: FragmentVersion) -> None:
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
                self.decisions.flight = StepDone(self.tokens, 3, self.taken, None, 0.0, 0.0)
            self.now_s += 1
            made = self.decisions.make(self.now_s, (3, self.taken + self.flying), ended=False, wanted=self.wanted)
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
        if self.flying:
            self.learner.book(StepDone(self.tokens, 3, self.taken, None, 0.0, 0.0))
            self.taken += 1
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
ISLAND_ACTS = st.one_of(
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


def go_on(island: DecidedIsland, boundaries: int) -> None:
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
