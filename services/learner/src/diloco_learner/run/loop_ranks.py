"""How the ranks of a loop become one learner: they exchange facts, meet, and divide the fragments among themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from diloco import __version__
from diloco.control.creation import KnownRun
from diloco.core.tensors.boxes import Box, row_layouts
from diloco.core.tensors.fragments import FixedSpec, FragmentMap, TensorSpec
from diloco.core.tensors.rows import LEADER, RowLayout
from diloco.errors import SettingsError
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.process.tasks import end
from diloco.process.telemetry import Telemetry
from diloco.processes.follower import Follower
from diloco.processes.group import Group, common_facts
from diloco.processes.leader import Leader
from diloco.processes.part import make_part
from diloco.processes.proving import OPEN
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco.wire.process_messages import facts
from diloco_learner.api.model import LoopRanks, RankedParameters
from diloco_learner.run.loop_sides import FollowingLoopSide, LeadingLoopSide, LoopSide

LOOK_S = 1.0  # between two looks whether all ranks live

S = TypeVar("S", TensorSpec, FixedSpec)
T = TypeVar("T")


class RankSaid(msgspec.Struct, frozen=True):
    """Word of a rank to the others at join: its tensors in the log, what it has of each, and how the first one is reached."""

    run: str
    address: str
    name: str
    tensors: list[TensorSpec]
    fixed: list[FixedSpec]
    boxes: dict[str, Box]
    moment: str = ""  # of the state that it has loaded; empty: it has none
    held: list[int] = []  # fragments of which it has the arrays


def read_said(messages: Sequence[bytes]) -> list[RankSaid]:
    """Return by rank of a loop what it has said.

    Raises:
        SettingsError: one has another version of this software, or joins another run.
    """
    said = list[RankSaid]()
    for rank, message in enumerate(messages):
        try:
            said.append(msgspec.msgpack.decode(message, type=RankSaid))
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"join: what rank {rank} says cannot be read by diloco {__version__} of this rank ({error}): install the same "
                "version in all ranks"
            ) from None
        if said[rank].run != said[LEADER].run:
            raise SettingsError(
                f"join: rank {rank} joins run {said[rank].run!r}, but rank {LEADER} joins run {said[LEADER].run!r}: give all "
                "ranks the same run"
            )
    return said


def together(said: Sequence[RankSaid]) -> tuple[list[TensorSpec], list[FixedSpec]]:
    """Return the tensors of all ranks, each once: those of pipeline stages have different ones.

    Raises:
        SettingsError: two ranks have different tensors of one path, or none has any.
    """
    tensors = _each_once([its.tensors for its in said], _another_tensor)
    fixed = _each_once([its.fixed for its in said], _other_values)
    if all(spec.state for spec in tensors):
        raise SettingsError("join: no rank has a parameter that requires a gradient, so there is nothing to train")
    return tensors, fixed


def _each_once(said: Sequence[Sequence[S]], difference: Callable[[S, int, S, int], str]) -> list[S]:
    """Return what all ranks have said, each path once.

    ``difference`` words an error: of two specs of one path, each with its rank.

    Raises:
        SettingsError: two ranks have said different things of one path.
    """
    first: dict[str, tuple[S, int]] = {}
    for rank, specs in enumerate(said):
        for spec in specs:
            known, known_by = first.setdefault(spec.path, (spec, rank))
            if known != spec:
                raise SettingsError(difference(spec, rank, known, known_by))
    return [spec for spec, _ in first.values()]


def _another_tensor(spec: TensorSpec, rank: int, known: TensorSpec, known_by: int) -> str:
    return (
        f"join: parameter {spec.path!r} has shape {spec.shape} in rank {rank}, but {known.shape} in rank {known_by}, "
        "or is of another kind: build the same model in all ranks"
    )


def _other_values(spec: FixedSpec, rank: int, known: FixedSpec, known_by: int) -> str:
    return (
        f"join: frozen parameter {spec.path!r} has other values in rank {rank} than in rank {known_by}: load the "
        "same checkpoint in all ranks"
    )


async def while_all_live(ranks: LoopRanks, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work, which is cancelled if a rank is lost.

    Raises:
        IslandError: a rank was lost while all ranks join.
    """
    working, looking = asyncio.ensure_future(work), asyncio.ensure_future(_until_lost(ranks))
    try:
        await asyncio.wait((working, looking), return_when=asyncio.FIRST_COMPLETED)
        return await (working if working.done() else looking)
    finally:
        await end(working, looking)


async def _until_lost(ranks: LoopRanks) -> NoReturn:
    while True:
        await asyncio.to_thread(ranks.check)
        await asyncio.sleep(LOOK_S)


async def make_side(
    transport: Transport,
    run: KnownRun,
    fragments: FragmentMap,
    parameters: RankedParameters,
    said: Sequence[RankSaid],
    *,
    settings: LearnerSettings,
    agreed: dict[str, Any],
    telemetry: Telemetry | None,
    log: Logger,
) -> LoopSide:
    """Meet the other ranks, and return this one's side. Call it in the loop's thread. All ranks have ``agreed`` on something.

    Raises:
        SettingsError: ranks differ.
        IslandError: they do not come, or cannot be reached.
    """
    assert isinstance(transport, NatsTransport), "ranks are processes of their own"
    ranks = parameters.ranks
    group = Group(settings, run.identity, log, OPEN if transport.identity is None else transport.identity.meeting_key)
    found = common_facts(run) | ranks.software | {"fragments": fragments.digest.hex()} | agreed
    try:
        await group.meet(facts(found), int(1000 * time.time()))
    except BaseException:
        await group.close()
        raise

    def deal(carriers: Sequence[int]) -> Sequence[RowLayout]:
        layouts = row_layouts(fragments.fragments, [its.boxes for its in said], carriers)
        parameters.deal(layouts)
        return layouts

    part = make_part(
        transport,
        run,
        group,
        fragments,
        deal=deal,
        read=lambda index: parameters.snapshot(fragments.fragments[index]).to_host(),
        log=log,
        telemetry=telemetry,
    )
    part.remembers = True  # a copy of the state is as of the boundary before the decision that came last
    if group.place == LEADER:
        held = [its.held for its in said]
        return LeadingLoopSide(Leader(part, fragments, settings, log, None), ranks, held)
    return FollowingLoopSide(Follower(part, fragments), ranks)
