"""The fragments that one process of a learner carries: it follows and folds their logs, and makes and stores their offers.

The leader's :class:`~diloco.core.learner.learner.Learner` has the counts of all fragments and decides; a carrier has the
arrays. It tells the leader what it folded, quantised and stored, and does what the leader says: bring a version's rows to all
processes (*stage*), quantise a snapshot, store an offer. Arrays change in the loop's thread alone, in the order of the leader's
messages; worker threads read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.control.creation import KnownRun
from diloco.core.learner import decisions
from diloco.core.learner.delta import Baseline, DeltaValues, PendingDelta, Unmerged, VersionWrite, dump_arrays, load_arrays
from diloco.core.learner.learner import ACCOUNTS
from diloco.core.tensors.rows import LEADER
from diloco.log.follower import LogCopy
from diloco.log.log import Log
from diloco.member.following import Following
from diloco.member.member_tracing import MemberTraces, OfferTrace
from diloco.member.offer_maker import OfferMaker, QuantisedOffer
from diloco.process.observe import Counted, Logger
from diloco.processes.links import Links
from diloco.processes.shipping import Shipping
from diloco.transport import Transport
from diloco.wire import process_messages as island
from diloco.wire.entries import Genesis, Record
from diloco.wire.fields import Bits
from diloco.wire.process_messages import Stage, Store, Write

Vector = NDArray[np.float32]
Restored = dict[int, tuple[list[Unmerged], DeltaValues]]  # by fragment


@dataclass
class _Carried:
    """A fragment's arrays."""

    values: DeltaValues
    version: int  # that its base is
    pending: list[Unmerged] = field(default_factory=list)  # offers whose fate is unknown, as the leader has them
    thetas: dict[int, Vector] = field(default_factory=dict)  # of versions that were folded and not applied
    snapshot: int | None = None  # number of the one that is to be quantised
    came: dict[int, set[int]] = field(default_factory=dict)  # by number of a snapshot: processes whose rows are here
    bits: Bits = 32
    shipping: asyncio.Lock = field(default_factory=asyncio.Lock)  # one version's rows after another's
    trace: OfferTrace | None = None  # of the offer that is being made
    quantised: QuantisedOffer | None = None  # it is to be stored

    def take_quantised(self) -> QuantisedOffer:
        """Return the offer that is quantised, and keep it no longer."""
        quantised, self.quantised = self.quantised, None
        assert quantised is not None
        return quantised

    def forget(self, applied: Vector) -> None:
        """Forget the version with this theta, float32 [size], and those folded before it.

        Its number does not tell which those are: a log that went back counts on from a lower one, and what was decided before
        is applied yet.
        """
        folded = list(self.thetas.items())
        at = next((at for at, (_, theta) in enumerate(folded) if theta is applied), -1)
        self.thetas = dict(folded[at + 1 :])


@dataclass(frozen=True)
class _Staged:
    stage: Stage
    theta: Vector
    reference: Baseline | Vector | None = None


class Carrier:
    """One process's fragments, and the rows that it was brought of all others."""

    def __init__(
        self,
        transport: Transport,
        run: KnownRun,
        store: Log,
        links: Links,
        shipping: Shipping,
        *,
        carriers: Sequence[int],
        name: str,
        refused: Counted,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        log: Logger,
        traces: MemberTraces,
    ) -> None:
        """``carriers``: by fragment, the process that carries it. ``spawn`` begins a task whose failure ends this process."""
        self.run, self.store, self.links, self.shipping = run, store, links, shipping
        self.spawn, self._maker = spawn, OfferMaker(transport, run, log)
        self.fragments = [index for index, process in enumerate(carriers) if process == links.place]
        self.carriers, self._traces = carriers, traces
        self._carried: dict[int, _Carried] = {}
        self._stages: dict[int, Stage] = {}  # by fragment: the newest, of any process
        self._vectors: dict[int, dict[str, tuple[int, Vector]]] = {}  # by fragment and kind: number of the stage, and rows
        self._staged: dict[int, _Staged] = {}  # by fragment
        # of fragments that the newest decision writes; None: they are not asked for
        self._before: dict[int, tuple[DeltaValues, list[Unmerged]]] | None = None
        others, tell = run.created.learners - 1, self._tell
        self._following = Following(
            store=store,
            run=run,
            name=name,
            fragments=self.fragments,
            refused=refused,
            log=log,
            others=others,
            spawn=spawn,
            tell=tell,
        )
        self._following.folded = traces.folded

    # ---- the log

    async def load(self, genesis: tuple[Genesis, bytes]) -> None:
        """Load the carried fragments, tell the leader, and begin to follow them."""
        created = self.run.created
        for copy in await self._following.load(genesis):
            replica = copy.replica
            fragment = self.store.map.fragments[replica.chain.fragment]
            values = DeltaValues.of(replica.theta, created, state=fragment.state)
            self._carried[replica.chain.fragment] = _Carried(values, replica.chain.version)
            self._tell(copy, None, False)
        if self.fragments:
            self._following.begin()

    def _tell(self, copy: LogCopy, record: Record | None, rewound: bool) -> None:
        chain = copy.replica.chain
        carried = self._carried[chain.fragment]
        if rewound:
            carried.thetas.clear()
        if record is None or record.makes_version:
            carried.thetas[chain.version] = copy.replica.theta
        self.links.write(LEADER, island.Folded(chain.fragment, chain.to_head(), rewound, record))

    # ---- staging: versions' rows to all processes

    def stage(self, stage: Stage) -> None:
        """Bring a version's rows to all processes, or await this process's rows of it."""
        self._stages[stage.fragment] = stage
        if self.carriers[stage.fragment] == self.links.place:
            carried = self._carried[stage.fragment]
            theta = carried.thetas.get(stage.version)
            if theta is None and stage.version == carried.version:
                theta = carried.values.base
            if theta is None:
                return  # the log went back; the leader is about to hear of it
            self.spawn(self._bring(stage, carried, theta))
        else:
            self._look(stage.fragment)

    async def _bring(self, stage: Stage, carried: _Carried, theta: Vector) -> None:
        index = stage.fragment
        async with carried.shipping:
            if self._stages[index] is not stage:
                return  # it is applied in another way, or another one is
            prepared = carried.values.prepare(decisions.carried(stage), theta)
            self._staged[index] = _Staged(stage, theta, prepared.reference)
            self.links.write(LEADER, island.Staged(index, stage.number))
            for processes in self.shipping.sharing(index):
                await self.shipping.send(processes, index, stage.number, "theta", theta)
                if prepared.reference is not None:
                    await self.shipping.send(processes, index, stage.number, "reference", prepared.reference)

    def receive(self, head: island.Rows, vector: Vector) -> None:
        """Take in a vector, float32 [size of the fragment], with all of this process's rows of a stage."""
        self._vectors.setdefault(head.fragment, {})[head.what] = head.number, vector
        self._look(head.fragment)

    def _look(self, index: int) -> None:
        """Tell the leader once a stage and its rows are here, whichever came first."""
        stage, came = self._stages.get(index), self._vectors.get(index, {})
        wanted = ("theta", "reference") if stage is not None and stage.keeps else ("theta",)
        if stage is None or any(came.get(what, (0, None))[0] != stage.number for what in wanted):
            return
        del self._vectors[index]
        self._staged[index] = _Staged(stage, *(came[what][1] for what in wanted))
        self.links.write(LEADER, island.Staged(index, stage.number))

    def begin_decision(self, *, remember: bool) -> None:
        """Note that a decision has come, of which :meth:`write` is told all; ``remember`` what was before it."""
        self._before = {} if remember else None

    def write(self, write: Write) -> VersionWrite | None:
        """Take over a version that was decided; return how it is written into the model, None where no row of it is here.

        Raises:
            LookupError: its rows are not here.
        """
        index = write.fragment
        carries = self.carriers[index] == self.links.place
        if not carries and not self.shipping.rows(index, self.links.place, "theta").size:
            return None
        staged = self._staged.pop(index)
        if staged.stage.number != write.stage:
            raise LookupError(
                f"fragment {index}: this process has stage {staged.stage.number}, but the decision names stage {write.stage}"
            )
        if carries:
            carried = self._carried[index]
            if self._before is not None:
                values = carried.values
                self._before[index] = replace(values, held=dict(values.held)), list(carried.pending)
            carried.values.commit(decisions.carried(staged.stage), staged.stage.pending, staged.theta)
            carried.version, carried.pending = write.version, list(staged.stage.pending)
            carried.forget(staged.theta)
        return VersionWrite(staged.theta, staged.reference if write.keeps else None, write.reset)

    # ---- offers

    def begin_offer(self, encode: island.Encode) -> None:
        """Await all processes' rows of a snapshot, which is then quantised."""
        carried = self._carried[encode.fragment]
        carried.snapshot, carried.bits = encode.number, encode.bits
        carried.trace = self._traces.offer(encode.fragment, encode.version)
        self._look_at_snapshot(encode.fragment, carried)

    def receive_snapshot(self, source: int, index: int, number: int) -> None:
        """Take in that a process's rows of a snapshot have come."""
        carried = self._carried[index]
        carried.came.setdefault(number, set()).add(source)  # the leader's word for it may come later, by another connection
        self._look_at_snapshot(index, carried)

    def _look_at_snapshot(self, index: int, carried: _Carried) -> None:
        if carried.snapshot is None:
            return
        came = carried.came.get(carried.snapshot, set())
        needed = [process for process in self.links.others if self.shipping.rows(index, process, "snapshot").size]
        if all(process in came for process in [self.links.place, *needed]):
            carried.snapshot, carried.came = None, {}
            self.spawn(self._encode(index, carried, self.shipping.release(index, "snapshot")))

    async def _encode(self, index: int, carried: _Carried, snapshot: Vector) -> None:
        if carried.trace is not None:
            carried.trace.read()
        encode = partial(carried.values.encode, snapshot, carried.bits)
        quantised = carried.quantised = await self._maker.quantise(index, carried.version, encode, carried.trace, len(snapshot))
        self.links.write(LEADER, island.Encoded(index, None if quantised is None else quantised.content_hash))

    def store_offer(self, store: Store) -> None:
        """Store the offer that was quantised, as the leader states it."""
        index, carried = store.fragment, self._carried[store.fragment]
        offer = PendingDelta(store.stated, store.bits)
        assert carried.quantised is not None
        carried.values.hold(offer.identity, carried.quantised.encoded)
        carried.pending.append(island.Pending(offer.identity, offer.bits, False))
        self.spawn(self._store(index, offer, carried))

    async def _store(self, index: int, offer: PendingDelta, carried: _Carried) -> None:
        sequence = await self._maker.storing(index, offer, carried.take_quantised())
        self.links.write(LEADER, island.OfferStored(index, sequence))

    # ---- checkpoints

    def dump(self, *, before: bool = False) -> dict[str, NDArray[Any]]:
        """Return the arrays of all carried fragments by name, any dtype [...], as the decisions so far leave them.

        ``before``: as those leave them that came before the newest. They are not written to any more.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for index, carried in self._carried.items():
            now = carried.values, carried.pending
            values, pending = (self._before or {}).get(index, now) if before else now
            arrays |= {f"{ACCOUNTS}{index}/{name}": array for name, array in dump_arrays(values, pending).items()}
        return arrays

    def loaded(
        self, offers: Sequence[Sequence[Unmerged]], arrays: Mapping[str, NDArray[Any]], bare: Collection[int] = ()
    ) -> Restored:
        """Return what :meth:`restore` takes over: by fragment, its offers of unknown fate.

        ``arrays`` are those of a :meth:`dump`, any dtype [...]. ``bare`` fragments have none: they begin with the log's.

        Raises:
            LookupError, ValueError: an array is missing, or of another size.
        """
        found: Restored = {}
        for index, carried in self._carried.items():
            prefix = f"{ACCOUNTS}{index}/"
            named = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            values = carried.values if index in bare else load_arrays(carried.values, offers[index], named)
            found[index] = list(offers[index]), values
        return found

    def restore(self, restored: Restored) -> None:
        """Go on from a checkpoint, before the first decision."""
        for index, (pending, values) in restored.items():
            self._carried[index].pending, self._carried[index].values = pending, values
