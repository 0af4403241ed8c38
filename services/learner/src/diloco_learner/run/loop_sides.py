"""The protocol side of a loop in a run: for a loop of one process, and for one rank of several.

All ranks of a loop are one learner. The first one leads: to the run it is the learner. The others carry out what it decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.learner import Dump
from diloco.core.tensors.rows import LEADER
from diloco.errors import RunError, SettingsError
from diloco.member.arrays import Boundary, Initial
from diloco.member.member import Member, copy_own_state
from diloco.processes.copying import copy_state
from diloco.processes.follower import Follower, ProcessSide
from diloco.processes.leader import Leader
from diloco.processes.part import Part
from diloco.processes.restoring import Fit, agree_on_state
from diloco.states.state import UNFIT
from diloco.wire.control import MarkerDeclined
from diloco.wire.process_messages import Candidate, Pending
from diloco_learner.api.model import LoopRanks
from diloco_learner.data.feed import Batch, BatchFeed, Streams
from diloco_learner.run.loop_state import LoopState, bare_fragments
from diloco_learner.run.trainer import Steered
from diloco_learner.task_api import Batches

Place = tuple[int, int]  # share and index of a batch


class LoopSide(Protocol):
    """A process of a loop, as the loop sees it."""

    @property
    def member(self) -> Member | None:
        """The learner, in the process that leads."""

    @property
    def steered(self) -> Steered:
        """The side that steers the loop."""

    async def join(self, initial: Initial) -> None:
        """Join the run; ``initial`` gives a fragment as this process has it, float32 [its size]."""

    async def restore(self, state: LoopState | None) -> None:
        """Go on from a state, once the log is loaded and before the first boundary; None: this rank has no part of it.

        Raises:
            SettingsError: it does not fit the run, or the other ranks cannot go on from it.
        """

    async def copy_state(self) -> tuple[str, Dump]:
        """Return the name of the state as of the last boundary, the same in all ranks, and this process's part of it.

        Raises:
            DilocoError: the run cannot go on here, or not all ranks ask for it.
        """

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended (None: there was none), and return the work before the next one."""

    def look_ahead(self, flight: StepDone, following: Place) -> None:
        """Have the boundary after the step in flight decided; ``following`` is the batch after that of this step."""

    def feed(self, batches: Batches, tokens: int) -> Iterator[Batch]:
        """Yield the batches of the learner's steps, each of so many tokens; the next one when a step was taken on the last."""

    async def farewell(self) -> None:
        """Take leave of the other ranks: from here on none is missed."""

    async def close(self) -> None:
        """End all that runs here."""


class LoneLoopSide:
    """The only process of a loop."""

    def __init__(self, member: Member) -> None:
        self.member = self.steered = member

    async def join(self, initial: Initial) -> None:
        await self.member.join(initial)

    async def restore(self, state: LoopState | None) -> None:
        assert state is not None, "no other rank has one"
        bare = bare_fragments([LEADER] * len(self.member.map.fragments), [state.held])
        try:
            self.member.restore(state.accounts, state.arrays, bare)
        except UNFIT as error:
            raise SettingsError(f"load_state_dict: {_unfit(error)}") from None
        _note_restored(self.member, state, bare)

    async def copy_state(self) -> tuple[str, Dump]:
        accounts, arrays = await copy_own_state(self.member)
        return f"{self.member.admission.incarnation}, step {accounts['step']}", (accounts, arrays)

    def boundary(self, done: StepDone | None) -> Boundary:
        return _pass_boundary(self.member, done)

    def look_ahead(self, flight: StepDone, following: Place) -> None:
        """Decide nothing ahead: no other process waits for a decision."""

    def feed(self, batches: Batches, tokens: int) -> Iterator[Batch]:
        return _leased_batches(self.member, batches)

    async def farewell(self) -> None:
        """Leave at once: there is no other process."""

    async def close(self) -> None:
        await self.member.close()


class RankLoopSide:
    """A rank of a loop of several: what the first one and the others do alike."""

    def __init__(self, its: ProcessSide, ranks: LoopRanks) -> None:
        self._its, self.ranks = its, ranks
        self._feeds = 0

    async def join(self, initial: Initial) -> None:
        """Join the run; ``initial`` is left unread, since all ranks have the model together."""
        await self._its.join()

    async def copy_state(self) -> tuple[str, Dump]:
        return await copy_state(self._its)

    async def farewell(self) -> None:
        await self._its.part.group.farewell()

    async def close(self) -> None:
        group = self._its.part.group
        group.ending()
        await self._its.close()
        await group.close()

    def _begin_feed(self) -> str:
        """Return the name under which the first rank tells the first batch of a feed."""
        self._feeds += 1
        return f"first batch of feed {self._feeds - 1}"


class LeadingLoopSide(RankLoopSide):
    """The first rank of a loop."""

    def __init__(self, leader: Leader, ranks: LoopRanks, held: Sequence[Sequence[int]]) -> None:
        """Begin; ``held`` by rank: fragments whose arrays are in the state that it has loaded."""
        super().__init__(leader, ranks)
        self.leader, self._held = leader, held
        self.member = self.steered = leader.member

    async def restore(self, state: LoopState | None) -> None:
        assert state is not None, "it has the accounts"
        leader, problems = self.leader, list[str]()
        bare = bare_fragments(leader.part.carriers, self._held)

        def fits() -> Iterator[Fit]:
            try:
                yield _fit(leader.part, state, leader.unmerged_of(state.accounts, bare), bare)
            except UNFIT as error:
                problems.append(_unfit(error))

        if await agree_on_state(leader.part, leader, fits=fits(), refused=lambda fit, reason: problems.append(reason)) is None:
            raise SettingsError(f"load_state_dict: {problems[0]}")
        _note_restored(self.member, state, bare)

    def boundary(self, done: StepDone | None) -> Boundary:
        return _pass_boundary(self.member, done)

    def look_ahead(self, flight: StepDone, following: Place) -> None:
        if self.leader.decisions.made is None:
            self.leader.look_ahead(flight, following)

    def feed(self, batches: Batches, tokens: int) -> Iterator[Batch]:
        feed = _leased_batches(self.member, batches)
        batch = next(feed)
        self.ranks.tell(self._begin_feed(), msgspec.msgpack.encode((batch.share, batch.index)))
        while True:
            following = next(feed)  # named a step ahead, so that no rank waits for it
            flight = flight_of(tokens, batch.share, batch.index)
            self.look_ahead(flight, (following.share, following.index))
            yield batch
            batch = following


class FollowingLoopSide(RankLoopSide):
    """A rank of a loop that is not the first one."""

    member = None

    def __init__(self, follower: Follower, ranks: LoopRanks) -> None:
        super().__init__(follower, ranks)
        self.follower = self.steered = follower

    async def restore(self, state: LoopState | None) -> None:
        part = self.follower.part

        def named(candidate: Candidate) -> Fit:
            try:
                return _fit(part, state, candidate.offers, candidate.bare)
            except UNFIT as error:
                raise RunError(_unfit(error)) from None

        if await agree_on_state(part, None, named=named) is None:
            raise SettingsError("load_state_dict: not all ranks can continue from this state; rank 0 reports the reason")

    def boundary(self, done: StepDone | None) -> Boundary:
        return self.follower.boundary(done)

    def look_ahead(self, flight: StepDone, following: Place) -> None:
        """Leave that to the first rank."""

    def feed(self, batches: Batches, tokens: int) -> Iterator[Batch]:
        part = self.follower.part
        streams, within_s = Streams(batches, part.run.created), part.group.settings.start_s
        message = self.ranks.hear(self._begin_feed(), within_s)
        share, index = msgspec.msgpack.decode(message, type=Place)
        while True:
            yield Batch(share, index, streams.batch(share, index))
            share, index = self.follower.batch


def _pass_boundary(member: Member, done: StepDone | None) -> Boundary:
    """Pass a boundary of the learner, and decline the marker of a whole run's checkpoint: a loop keeps its own state."""
    boundary, marker = member.boundary(done), member.marker_due()
    if marker is not None:
        member.answer_marker(MarkerDeclined(member.settings.name, marker.number, "keeps_own", ""))
    return boundary


def _fit(part: Part, state: LoopState | None, offers: list[list[Pending]], bare: list[int]) -> Fit:
    """Return the state that a rank has loaded, as it goes on from it; ``offers`` by fragment: those of unknown fate.

    Raises:
        LookupError, ValueError: arrays of a fragment that it carries do not fit.
    """
    moment, accounts, arrays = ("", {}, {}) if state is None else (state.moment, state.accounts, state.arrays)
    return Fit(moment, accounts, offers, bare, part.carrier.loaded(offers, arrays, bare))


def _unfit(error: BaseException) -> str:
    return f"the state does not fit the run ({type(error).__name__}: {error}): it is damaged, or of another model"


def _note_restored(member: Member, state: LoopState, bare: list[int]) -> None:
    member.log.info("loop_state_restored", step=member.step, moment=state.moment)
    if bare:
        member.log.warning("loop_state_incomplete", fragments=bare, ranks_then=state.ranks)


def _leased_batches(member: Member, batches: Batches) -> BatchFeed:
    """Return the batches of the shares that the learner holds."""
    return BatchFeed(batches, member.run.created, member.leased, member.log)


def flight_of(tokens: int, share: int | None, batch: int) -> StepDone:
    """Return a step in flight, of which no outcome is known."""
    return StepDone(tokens=tokens, share=share, batch=batch, loss=None, busy_s=0.0, blocked_s=0.0)
