"""The rule by which processes meet that may begin with fewer than all, at one of several (:mod:`diloco.core.learner.roll`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from diloco.core.learner import roll
from diloco.core.learner.roll import Roll, goes_to
from diloco.settings.service import LearnerSettings
from diloco.wire.process_messages import Standing


class ElasticAssembly:
    """The rule for the processes of these settings (:class:`diloco.processes.assembly.Assembly`)."""

    goes_on = True

    def __init__(self, settings: LearnerSettings, expected: frozenset[int] = frozenset()) -> None:
        """Begin; ``expected``: processes that are known to come."""
        own = settings.processes
        self.own, self._may_lead, self._regroup_s = own.index, own.own_address is not None, own.regroup_s
        self._sizes, self._expected = own.sizes(settings.mesh), expected
        self._roll = Roll(self._sizes, self._regroup_s, 0.0, self.own, expected)

    @property
    def present(self) -> Collection[int]:
        """The own process, and all that have come and not gone."""
        return self._roll.present

    @property
    def members(self) -> list[int]:
        """As many of those present as the settings allow."""
        return self._roll.members

    @property
    def least_note(self) -> str:
        """How few could begin."""
        return f" (at least {self._sizes[-1]} are required: processes.least)"

    def where(self, at: int | None, heard: Mapping[int, Standing]) -> int | None:
        """Return where :func:`~diloco.core.learner.roll.goes_to` has this process go."""
        standings = {index: roll.ProcessStanding(said.leader, said.generation) for index, said in heard.items()}
        return goes_to(self.own, may_lead=self._may_lead, at=at, heard=standings)

    def begin(self, now_s: float) -> None:
        """Have the others come from now on."""
        self._roll = Roll(self._sizes, self._regroup_s, now_s, self.own, self._expected)

    def wait_for_next(self) -> None:
        """Expect no process any more: those that were known to come are in the generation that goes on, or were lost since."""
        self._expected = frozenset()

    def come(self, index: int, now_s: float) -> None:
        """Note that a process has come."""
        self._roll.come(index, now_s)

    def go(self, index: int) -> None:
        """Note that a process has gone again."""
        self._roll.go(index)

    def begins_s(self, now_s: float) -> float | None:
        """Return in how many seconds a generation begins if no process comes or goes; None: it cannot."""
        return self._roll.begins_s(now_s)

    def grows(self, members: Collection[int], waiting: Collection[int]) -> bool:
        """Whether a generation of ``members`` would be larger with those that are ``waiting``."""
        return len(roll.members({*members, *waiting}, self._sizes)) > len(members)
