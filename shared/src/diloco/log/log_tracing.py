"""The span of a reader of the log: a version was fetched, folded, and, by who has a model, applied."""

from __future__ import annotations

from diloco.core.run.tracing import Span, version_ids
from diloco.process.telemetry import Telemetry
from diloco.wire.entries import Record


def tell_of_read(
    telemetry: Telemetry,
    run: bytes,
    name: str,
    record: Record,
    came_s: float,
    folded_s: float,
    applied: tuple[float, int] | None = None,
) -> None:
    """Tell how the member ``name`` read a version; times are Unix time.

    Args:
        came_s: when all of it had come; it was committed by another machine's clock.
        folded_s: when it was folded.
        applied: when it was in the model, and after how many steps; None: this member has none.
    """
    root = version_ids(run, record.fragment, record.version)
    read, committed_s = root.child("read", name), min(record.committed_at_s, came_s)
    about: dict[str, str | int | float] = {
        "diloco.member": name,
        "diloco.fragment": record.fragment,
        "diloco.version": record.version,
    }
    stages = [("fetch", committed_s, came_s), ("fold", came_s, folded_s)]
    if applied is not None:
        stages.append(("apply", folded_s, applied[0]))
        about["diloco.step"] = applied[1]
    telemetry.add(Span(name="read", ids=read, parent=root.span, began_s=committed_s, ended_s=stages[-1][2], attributes=about))
    for stage, began_s, ended_s in stages:
        telemetry.add(Span(stage, read.child(stage), read.span, began_s, ended_s))
