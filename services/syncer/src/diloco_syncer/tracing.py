"""A syncer's spans: a round, from its opening to the version in the log (quorum, grace, merge, outer step, publish)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from diloco.core.round import Merge, Round
from diloco.core.tracing import Ids, Span, offer_ids, version_ids
from diloco.process.telemetry import Telemetry
from diloco.wire.entries import Record
from diloco_syncer.context import Context


@dataclass
class RoundTrace:
    """A round that was closed and is being merged; nothing is told of it unless its version's way is."""

    context: Context
    telemetry: Telemetry
    clock: Callable[[], float]
    ids: Ids
    began_s: float  # by the clock, as are the others
    quorum_s: float
    closed_s: float
    stages: list[tuple[str, float, float]] = field(default_factory=list)

    @classmethod
    def begin(cls, context: Context, fragment: int, round_: Round, merge: Merge) -> RoundTrace | None:
        """Return the trace of a round that has closed, or None if its version's way is not told."""
        telemetry = context.telemetry
        if telemetry is None or round_.opened_at_s is None:
            return None
        ids = version_ids(context.run.identity, fragment, merge.version)
        if not telemetry.wants(ids):
            return None
        clock = asyncio.get_running_loop().time
        closed_s = clock()
        quorum_s = closed_s if round_.quorum_at_s is None else round_.quorum_at_s
        return cls(context, telemetry, clock, ids, round_.opened_at_s, quorum_s, closed_s)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the merge; in any thread."""
        began_s = self.clock()
        yield
        self.stages.append((name, began_s, self.clock()))

    def committed(self, record: Record) -> None:
        """Tell of the round, whose version is in the log."""
        now_s, add, run = self.clock(), self.telemetry.add, self.context.run.identity
        wall_s = self.context.transport.wall_s() - now_s
        about: dict[str, str | int | float] = {
            "diloco.member": record.syncer,
            "diloco.fragment": record.fragment,
            "diloco.version": record.version,
            "diloco.epoch": record.epoch,
            "diloco.members": len(record.members),
            "diloco.bits": record.bits,
            "diloco.bytes": record.body.size_bytes if record.body else 0,
        }
        links = tuple(offer_ids(run, m.learner, m.incarnation, record.fragment, m.number) for m in record.members)
        add(Span("round", self.ids, None, wall_s + self.began_s, wall_s + now_s, about, links))
        waits = [("quorum", self.began_s, self.quorum_s), ("grace", self.quorum_s, self.closed_s)]
        for name, began_s, ended_s in [*waits, *self.stages]:
            add(Span(name, self.ids.child(name), self.ids.span, wall_s + began_s, wall_s + ended_s))


def stage(trace: RoundTrace | None, name: str) -> AbstractContextManager[None]:
    """Return a context in which a stage of a merge is timed, where its round is told of."""
    return nullcontext() if trace is None else trace.stage(name)
