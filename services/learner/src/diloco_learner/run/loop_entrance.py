"""The entrance of a user's own loop into a run: finding the run and the other ranks, and making its side of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diloco.control.creation import KnownRun
from diloco.core.learner.learner import Dump
from diloco.core.tensors.fragments import FixedSpec, TensorSpec, cut_model
from diloco.core.tensors.rows import LEADER
from diloco.errors import RunError, SettingsError
from diloco.member.member import Member
from diloco.member.shares import OwnData
from diloco.process import observe, telemetry
from diloco.process.observe import Logger
from diloco.service import skeleton
from diloco.settings.service import LearnerSettings, ProcessesSettings
from diloco.transport import Transport
from diloco_learner.api.model import JoinedParameters, RankedParameters
from diloco_learner.run.loop_ranks import RankSaid, make_side, read_said, together, while_all_live
from diloco_learner.run.loop_sides import LoneLoopSide, LoopSide
from diloco_learner.run.loop_state import RESTS, LoopState, agreed_moment, packed, placeholder, unpacked
from diloco_learner.run.surroundings import Surroundings


@dataclass(kw_only=True)
class LoopEntrance:
    """All that a loop has said before it enters its run, and the state that it goes on from.

    On entering, ``settings`` become those of its rank, and ``run`` is found.
    """

    settings: LearnerSettings
    parameters: JoinedParameters
    tensors: list[TensorSpec]
    tokens: int
    own_data: bool
    within_s: float
    address: str | None  # where the first of several ranks has the others come
    is_named: bool  # whether a name was given
    state: LoopState | None = None  # to go on from
    log: Logger = field(default_factory=observe.get_logger)
    run: KnownRun = field(init=False)

    @property
    def place(self) -> tuple[int, int]:
        """The rank of this process, and the number of ranks."""
        ranked = self.parameters.ranked
        return (0, 1) if ranked is None else (ranked.ranks.rank, ranked.ranks.count)

    def expected(self) -> dict[str, Any]:
        """Return what a state will consist of, of a loop that is not in its run."""
        return placeholder(self.place[0]) | self._rests()

    def packed(self, moment: str, dump: Dump) -> dict[str, Any]:
        """Return this rank's state as of a ``moment``, with what it has of the learner's."""
        rank, ranks = self.place
        own = packed(
            dump,
            run=self.run.name,
            identity=self.run.identity,
            learner=self.settings.name,
            moment=moment,
            rank=rank,
            ranks=ranks,
            fingerprint=self.parameters.fingerprint(),
            shown=self.parameters.shown,
        )
        return own | self._rests()

    def _rests(self) -> dict[str, Any]:
        rests = self.parameters.rests()
        return {RESTS: rests} if rests else {}

    def load(self, state: Any) -> None:
        """Continue from the result of :meth:`packed`.

        Raises:
            SettingsError: it is something else, or of another run, learner or model.
        """
        found = unpacked(state, self.place[0])
        if found is not None:
            if found.run != self.settings.run:
                raise SettingsError(
                    f"load_state_dict: the state is of run {found.run!r}, but this loop joins {self.settings.run!r}: leave out "
                    "load_state_dict to join it as new"
                )
            if self.is_named and found.learner != self.settings.name:
                raise SettingsError(
                    f"load_state_dict: the state is of learner {found.learner!r}, but this loop is {self.settings.name!r}: "
                    f"join with name={found.learner!r}, or leave out load_state_dict to join as new"
                )
            self.settings = self.settings.model_copy(update={"name": found.learner})
        self.parameters.put_rests(state.get(RESTS, {}))
        self.state = found

    def enter(self, around: Surroundings, stack: ExitStack) -> LoopSide:
        """Join the run, with the log's state or the loop's own; ``stack`` ends what was begun.

        Raises:
            BrokerError: the server does not answer in time.
            RunError: there is no such run.
            SettingsError: its learners offer gradients, the identity does not fit, or the state does not.
            AdmissionError: its model is another one, or its steps are to be smaller.
            IslandError: a rank does not come, or is lost.
        """
        wait = around.run
        self.parameters.take(self.parameters.tree)  # a checkpoint may have brought other tensors since
        if self.state is not None:
            self.state.check_values(*self.place, self.parameters.fingerprint())
        fixed, ranked = self.parameters.fixed(), self.parameters.ranked
        if ranked is None:
            goes_on = self.state is not None
            side = wait(self._make_side(around, stack, fixed, None, ()))
        else:
            with ranked.ranks.joining(self.settings.processes.silent_s):
                said = self._tell_ranks(ranked, fixed)
                goes_on = bool(agreed_moment([its.moment for its in said]))
                side = wait(while_all_live(ranked.ranks, self._make_side(around, stack, fixed, ranked, said)))
        stack.callback(lambda: wait(side.close()))
        member, read = side.member, self.parameters.snapshot
        if member is not None:
            if self.own_data:
                member.shares = OwnData(member.admission.incarnation, self.tokens)
            member.admission.check_batch(self.tokens)
        wait(side.join(lambda fragment: read(fragment).to_host()))
        if goes_on:
            wait(side.restore(self.state))
        elif member is not None:
            member.count_steps()
        self.state = None
        return side

    def _tell_ranks(self, ranked: RankedParameters, fixed: list[FixedSpec]) -> list[RankSaid]:
        """Exchange with all ranks of the loop what each has, and return it by rank.

        The settings get the learner's name, which all ranks share, and this rank's place.
        """
        ranks, settings, state = ranked.ranks, self.settings, self.state
        own = RankSaid(
            run=settings.run,
            address=(self.address or ranks.address()) if ranks.rank == LEADER else "",
            name=settings.name,
            tensors=self.tensors,
            fixed=fixed,
            boxes=ranked.boxes(),
            moment="" if state is None else state.moment,
            held=[] if state is None else state.held,
        )
        said = read_said(ranks.exchange("join", msgspec.msgpack.encode(own), self.within_s))
        name = settings.name if self.is_named else said[LEADER].name
        processes = ProcessesSettings(count=ranks.count, index=ranks.rank, address=said[LEADER].address, start_s=self.within_s)
        self.settings = settings.model_copy(update={"name": name, "processes": processes})
        return said

    async def _make_side(
        self,
        around: Surroundings,
        stack: ExitStack,
        fixed: Sequence[FixedSpec],
        ranked: RankedParameters | None,
        said: Sequence[RankSaid],
    ) -> LoopSide:
        transport = await around.connect(self.settings, self.log, self.within_s)
        stack.callback(lambda: around.run(transport.close()))
        run = self.run = await self._find_run(transport)
        kept = telemetry.begin(self.settings, "learner", self.log)
        if kept is not None:
            stack.callback(kept.close)
        if ranked is None:
            fragments = cut_model(self.tensors, run.created.fragments, fixed)
            return LoneLoopSide(Member(transport, run, fragments, self.settings, self.log, telemetry=kept))
        tensors, fixed = together(said)
        return await make_side(
            transport,
            run,
            cut_model(tensors, run.created.fragments, fixed),
            ranked,
            said,
            settings=self.settings,
            agreed={"name": self.settings.name, "tokens": self.tokens, "own data": self.own_data},
            telemetry=kept,
            log=self.log,
        )

    async def _find_run(self, transport: Transport) -> KnownRun:
        try:
            async with asyncio.timeout(self.within_s):
                run = await skeleton.find_run(transport, self.settings, self.log)
        except TimeoutError:
            raise RunError(
                f"run {self.settings.run!r}: not found at {self.settings.nats_url} within {self.within_s:g} s: check "
                "the name, and start the run's coordinator (diloco up, or diloco-coordinator)"
            ) from None
        if run.created.offers_gradients:
            raise SettingsError(
                f"run {run.name!r}: its learners offer gradients of single steps (outer.optimizer = adamw), and a loop "
                "takes its own steps: join a run of another preset"
            )
        if self.state is not None and self.state.identity != run.identity.hex():
            raise SettingsError(
                f"load_state_dict: the state is of run {self.state.run!r} with the identity {self.state.identity[:16]}, but "
                f"this run has {run.identity.hex()[:16]}: leave out load_state_dict to join it as new"
            )
        return run
