"""A run on a real server, and the context of one of its syncers: all that the tests of a syncer's parts need."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.made.fragment_vectors import each
from tests.made.log_entries import offer_of
from tests.pace import DEADLINE_S, scaled_s

from diloco.control import creation
from diloco.control.creation import KnownRun
from diloco.core.run.changes import Action, Changes
from diloco.core.syncer.ownership import Ownership
from diloco.core.syncer.roster import Roster
from diloco.core.syncer.round import Merge, RoundOffer
from diloco.core.tensors import codec, quantise
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.log.log import Log
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Counted, get_logger
from diloco.settings.presets import run_settings
from diloco.settings.service import SyncerSettings
from diloco.wire import framing
from diloco.wire.body import describe_body
from diloco.wire.entries import Genesis
from diloco.wire.offers import Offer
from diloco_syncer.context import Context
from diloco_syncer.offers.refusing import RefusalReporter
from diloco_syncer.owning.copies import Copies
from diloco_syncer.owning.owner import FragmentOwner
from diloco_syncer.owning.takeover import Takeover

SIZE = 64  # parameters of a fragment
SETTINGS: dict[str, Any] = {
    "learners": 2,
    "shards": 1,
    "fragments.count": 2,
    "round.steps": 4,
    "codec.offer_bits": 32,
    "codec.record_bits": 32,
    "outer.learning_rate": 1.0,
    "outer.momentum": 0.0,
    "merge.method": "average",
    "task.name": "tests:parts",
    "liveness.takeover_s": scaled_s(0.6),
    "log.keyframe_factor": 1000.0,
}


@dataclass
class Begun:
    """A run with version 0, as one of its syncers has it."""

    context: Context
    genesis: tuple[Genesis, bytes]
    copies: Copies

    def another(self, name: str) -> Context:
        """Return the context of another syncer of the run."""
        settings = self.context.settings.model_copy(update={"name": name})
        return replace(self.context, settings=settings, roster=Roster(self.context.run.in_force))

    async def owner(self, index: int = 0, context: Context | None = None) -> FragmentOwner:
        """Return an owner of a fragment as of its log's end, which has written nothing yet."""
        return FragmentOwner(context or self.context, await self.copies.take(index), self.genesis)

    async def taken_over(self, index: int = 0, context: Context | None = None) -> FragmentOwner:
        """Return an owner that has appended its takeover."""
        owner = await self.owner(index, context)
        await owner.append(owner.marker("takeover"), b"", [])
        return owner

    def ownership(self, **changes: Any) -> Ownership:
        """Return the view of the context's syncer, incarnation 1."""
        settings = self.context.run.created
        sizes = [fragment.size for fragment in self.context.map.fragments]
        return Ownership(self.context.settings.name, 1, sizes, settings.shards, settings.liveness.takeover_s)


async def begin(link: NatsTransport, **overrides: Any) -> Begun:
    """Make a run of its own on the server: two fragments of ``SIZE`` parameters, or as the settings say, all zero."""
    settings = run_settings("decoupled", SETTINGS | overrides)
    name = f"run-{uuid.uuid4().hex[:8]}"
    run = await creation.create(link, name, settings)
    count = settings.fragments.count
    fragments = build_map([TensorSpec(f"w{i}", (SIZE,)) for i in range(count)], count)
    store = Log(link, name, run.identity, fragments, settings)
    await store.writer.found("ann", settings.digest(), each([np.zeros(SIZE, np.float32)] * count))
    genesis = await store.reader.genesis()
    assert genesis is not None
    log = get_logger()
    own = SyncerSettings(name="syncer-0", run=name)
    context = Context(link, run, fragments, own, log, store, None, Roster(settings), Counted(log), RefusalReporter(run, log))
    return Begun(context, genesis, Copies(store, genesis, lambda *_: None, log))


def change(run: KnownRun, action: Action) -> None:
    """Have a run's processes go by a change, its first."""
    run.adopt(Changes(run.identity).then(action, at_s=0.0, author="somebody").records)


def offer(owner: FragmentOwner, learner: str, value: float, number: int = 1, **changes: Any) -> RoundOffer:
    """Return an answer to the open round: a displacement of ``value`` in every parameter."""
    chain = owner.chain
    raw = quantise.quantise(np.full(SIZE, value, np.float32), 32)
    body, _, _ = describe_body(codec.pack(raw, 1), codec.content_hash(raw), b"attempt.")
    values: dict[str, Any] = {
        "fragment": chain.fragment,
        "number": number,
        "after": chain.cursor(learner),
        "round": chain.version + 1,
        "base_version": chain.version,
        "base_hash": chain.state_hash,
        "bits": 32,
        "data": [(0, 4 * chain.version, 4)],
        "body": body,
    }
    return RoundOffer(offer_of(learner, **(values | changes)), raw)


def merge(owner: FragmentOwner, *held: RoundOffer, closing: bool = False) -> Merge:
    """Return the merge of these offers into the next version."""
    return Merge(owner.chain.version + 1, held, closing, 0.1, 0.2)


async def send_offer(owner: FragmentOwner, held: RoundOffer) -> None:
    """Store an offer as its learner does."""
    assert isinstance(held.offer, Offer)
    context = owner.context
    packed = codec.pack(held.body, 1)
    _, inline, parts = describe_body(packed, codec.content_hash(held.body), b"attempt.")
    assert not parts
    frame = framing.pack(held.offer, context.run.identity, inline)
    head = context.store.subjects.offer(held.offer.fragment, held.offer.learner)
    identifier = f"offer/{held.offer.learner}/1/{held.offer.fragment}/{held.offer.number}"
    await context.transport.append(head, frame, message_id=identifier, fence=None, timeout_s=DEADLINE_S)


async def take_fragment(begun: Begun, context: Context | None = None, *, wanted: bool = True) -> FragmentOwner | None:
    takeover = Takeover(context or begun.context, begun.copies, lambda index: wanted)
    async with asyncio.TaskGroup() as group:
        return await takeover.take(0, group)
