"""Markers of a whole run's checkpoints, as a member hears them, and the states that it has saved for earlier ones.

A state stays on the learner's disk until a newer checkpoint is whole elsewhere: the newest whole one, the whole one before, and
all that are newer are kept. Where no number of a whole one is known, since the control store's rights are those of an earlier
version, the newest eight are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from diloco.control.whole import WholeCheckpoints, read_whole
from diloco.errors import BrokerError, FormatError
from diloco.member.outbox import Outbox
from diloco.member.shared import SharedLearner
from diloco.process.observe import Logger
from diloco.settings.service import LearnerSettings
from diloco.states.statefolder import StateFolder
from diloco.transport import Bucket, Heard
from diloco.wire.control import SnapshotMarker

KEPT = 8  # where it is not known which checkpoints are whole


class MarkerHearing:
    """Takes in markers: repeats an answer, and drops at a new one what no checkpoint needs any more."""

    def __init__(
        self, shared: SharedLearner, outbox: Outbox, registry: Bucket, settings: LearnerSettings, fragments: int, log: Logger
    ) -> None:
        self._shared, self._outbox, self._registry = shared, outbox, registry
        self._settings, self._fragments, self._log = settings, fragments, log

    async def hear(self, marker: SnapshotMarker, _: Heard) -> None:
        """Take in a marker.

        Raises:
            MessageError: the marker names another number of fragments.
        """
        with self._shared.lock:
            markers = self._shared.learner.markers
            answered = markers.hear(marker, self._fragments)
            is_new = markers.marker is marker
        if answered is not None:
            await self._outbox.send(answered)
        if is_new:
            self._shared.tasks.spawn(drop_superseded(self._registry, self._settings, marker.number, self._log))


async def drop_superseded(registry: Bucket, settings: LearnerSettings, current: int, log: Logger) -> None:
    """Drop a learner's states of checkpoints that are superseded, all of its parts that this process sees.

    ``current``: the number of the marker that is being answered, whose state is kept. A server that is silent, or a disk that
    refuses, costs nothing but room until the next marker.
    """
    try:
        whole = await read_whole(registry)
        dropped = await asyncio.to_thread(_drop, settings.state_dir, settings.name, whole, current)
    except (BrokerError, FormatError, OSError) as error:
        log.debug("states_not_dropped", reason=str(error))
        return
    if dropped:
        log.info("states_dropped", checkpoints=dropped)


def superseded(numbers: Sequence[int], whole: WholeCheckpoints | None, current: int) -> list[int]:
    """Return the numbers of checkpoints whose states are needed no more; ``numbers`` are in the order of their saving."""
    others = [number for number in numbers if number != current]
    if whole is None:
        return others[: max(0, len(others) + 1 - KEPT)]
    return [number for number in others if number < whole.newest and number != whole.before]


def _drop(state_dir: Path, learner: str, whole: WholeCheckpoints | None, current: int) -> list[int]:
    saved = sorted(
        StateFolder(state_dir, learner).snapshots().items(), key=lambda found: max(path.stat().st_mtime for path in found[1])
    )
    dropped = superseded([number for number, _ in saved], whole, current)
    for number, paths in saved:
        if number in dropped:
            for path in paths:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other learners' states are there too
                paths[0].parent.rmdir()
    return dropped
