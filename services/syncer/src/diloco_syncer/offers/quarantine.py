"""Put learners whose offers are outliers on record as quarantined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from diloco.control.changes import ChangesFollower, append_changes
from diloco.core.run.changes import Effective, Quarantine
from diloco.core.syncer.outliers import Outlier
from diloco.errors import MessageError, RunError, SettingsError
from diloco.process.retry import until_available
from diloco_syncer.context import Context

REASON = "its outer gradients are outliers"


class Suspects:
    """Learners that are excluded here at once, until the run's changes say so to everybody."""

    def __init__(self, context: Context, follower: ChangesFollower, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever :attr:`excluded` may be another set."""
        self.context, self.follower, self.changed = context, follower, changed
        self._suspects: dict[str, Outlier] = {}  # by learner: those whose quarantine is not on record yet

    @property
    def excluded(self) -> frozenset[str]:
        """The learners whose offers are not merged."""
        return self.context.run.now.excluded.union(self._suspects)

    def exclude(self, outliers: Sequence[Outlier]) -> None:
        """Merge nothing of these learners from now on."""
        self._suspects.update({outlier.learner: outlier for outlier in outliers})
        self.changed()

    async def record(self, index: int, outliers: Sequence[Outlier]) -> None:
        """Append the quarantine of learners, excluded before, to the run's changes; ``index``: the fragment of their offers."""

        def decide(now: Effective) -> list[Quarantine]:
            return [Quarantine(o.learner, index, o.norm, o.threshold) for o in outliers if o.learner not in now.excluded]

        context = self.context
        author = context.settings.name
        append = partial(append_changes, context.transport, context.run, decide, author=author, reason=REASON)
        try:
            await until_available(append, context.log)
            await until_available(self.follower.look, context.log)
        except (MessageError, RunError, SettingsError) as error:  # the list has no room, or is none
            learners = [outlier.learner for outlier in outliers]
            context.log.error("quarantine_not_recorded", learners=learners, reason=str(error))
            return
        for outlier in outliers:
            self._suspects.pop(outlier.learner, None)
        self.changed()
