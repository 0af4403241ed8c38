"""A process of a learner that does not lead it: it carries out what the leader decides, and asks it what it has to know."""

from __future__ import annotations

from typing import Any, TypeAlias

from diloco.control.changes import ChangesFollower
from diloco.control.genesis import await_genesis
from diloco.core.learner import decisions
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.fragment_state import Reader
from diloco.core.learner.schedule import Moment
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import IslandError
from diloco.member.arrays import Boundary
from diloco.member.peer import Loan
from diloco.process.retry import until_available
from diloco.process.tape import Unrecorded
from diloco.processes.leader import Leader
from diloco.processes.part import Part, Saving
from diloco.states.state import Saved
from diloco.wire import process_messages as island


class Follower:
    """A process that does not lead, as its trainer sees it. Construct it in the loop's thread, then ``await join()``.

    It has the methods by which a :class:`~diloco.processes.leader.Leader` begins and ends. It hears what the leader says, and
    does nothing where only a leader has something to do.
    """

    leads = False
    member = None

    def __init__(self, part: Part, fragment_map: FragmentMap) -> None:
        self.part, self.map, self.store, self.tape = part, fragment_map, part.carrier.store, Unrecorded()
        self._moment = Moment(0, 1)
        self.batch = 0, 0  # share and index of the next step's, by the decision that was carried out last
        self._changes = ChangesFollower(part.transport, part.run, part.log, lambda: None)

    async def join(self) -> None:
        """Load the carried fragments once the run is founded, and begin to follow them."""
        run = self.part.run
        await until_available(self._changes.look, self.part.log)
        self.part.tasks.spawn(self._changes.follow())

        async def look() -> Any:
            return await await_genesis(run, self.store, None, None, self.part.log)

        await self.part.carrier.load(await until_available(look, self.part.log))
        self.part.log.info("joined", fragments=len(self.part.carrier.fragments))

    async def close(self) -> None:
        """End all tasks."""
        await self.part.close()

    @property
    def steered(self) -> Follower:
        """The member, or process, that steers the trainer of this process."""
        return self

    # ---- what the leader knows

    async def is_for_larger_generation(self) -> bool:
        """Whether the generation alone has ended, and not the learner."""
        return await self.part.group.hear_answer("end", None)

    async def takes_up_state_before(self) -> bool:
        """Whether the learners of this run begin with the states of the run that it continues."""
        return await self.part.group.hear_answer("begins", None)

    async def loan_peers(self) -> list[str]:
        """Return the learners that an optimizer state can be borrowed from, the best one first."""
        return (await self.part.group.hear_leader(island.LoanPeers, "peers", None)).learners

    async def must_ask_again(self, loan: Loan) -> bool:
        """Whether a loan is so old that all processes ask for a newer one."""
        return await self.part.group.hear_answer("loan, again", None)

    def note_newer_loan(self, loan: Loan | None) -> None:
        """Leave that to the leader."""

    def note_state_before(self, learner: str, digest: bytes) -> None:
        """Leave that to the leader."""

    def note_optimizer(self, loan: Loan | None) -> None:
        """Leave that to the leader."""

    def keep(self) -> tuple[island.Kept, dict[str, Any]]:
        """Refuse: the accounts of a state that is kept are the leader's.

        Raises:
            IslandError: always.
        """
        raise IslandError(f"process {self.part.links.place} does not lead: it has no accounts")

    def note_saved(self, digest: bytes) -> None:
        """Leave that to the leader's tape."""

    # ---- the trainer's thread

    @property
    def step(self) -> int:
        """Steps of this generation."""
        return self.part.course.step

    def boundary(self, done: StepDone | None) -> Boundary:
        """Wait for the leader's decision and return the trainer's work; ``done`` is booked by the leader.

        Raises:
            DilocoError: as :meth:`Part.boundary`.
        """
        decided, writes = self.part.boundary()
        self._moment, self.batch = decisions.moment(decided), decided.batch
        return Boundary(
            applies=writes,
            reads=list(decided.reads),
            stop=decided.stop,
            wait=decided.wait,
            finished=decided.finished,
            ended=decided.ended,
        )

    def submit(self, fragment: int, reader: Reader) -> None:
        """Hand over a way to read a fragment as it is at this boundary."""
        self.part.submit(fragment, reader)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is a decision, at most ``timeout_s``."""
        self.part.wait_for_decision(timeout_s)

    def moment(self) -> Moment:
        """Return what the learning rate of the next step goes by."""
        return self._moment

    @property
    def saving(self) -> Saving | None:
        """The state that is to be saved as of the boundary that was carried out last."""
        return self.part.saving

    def part_saved(self, saving: Saving, saved: Saved | None, content_hash: bytes) -> None:
        """Tell the leader how this process has ended with its part of a state. Callable from any thread."""
        self.part.part_saved(saving, saved, content_hash)

    def leave(self, within_s: float) -> None:
        """Ask the leader that the learner leaves; it does so within its own ``leave_s``."""
        self.part.tell_leader(island.Leaving(self.part.group.generation))

    def next_batch(self) -> tuple[int, int]:
        """Wait for the decision after the last one, and return share and index of the batch that it names."""
        return self.part.next_decision().batch


ProcessSide: TypeAlias = Leader | Follower  # one process of a learner of several
