"""The seam between a learner's rounds and its arrays.

A learner has two sides. Its rounds (:class:`Rounds`) are admission, leases, heartbeats, and the counts of each fragment. Its
arrays (:class:`Arrays`) are the log that they fold, the base, quantisation errors, and the way of a version into the model.

In a learner of one process a function call is between them (:class:`diloco.member.own_arrays.OwnArrays`), and in a learner of
several processes it is a connection (:class:`diloco.processes.leader.Leader`). Neither side knows a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diloco.control.creation import KnownRun
from diloco.core.learner.accounts import MemberTraffic, StepDone
from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.fragment_state import FragmentVersion, Reader
from diloco.core.learner.schedule import Moment
from diloco.core.tensors.fragments import Fragment, FragmentMap
from diloco.log.log import Log
from diloco.member.answering import Answering, Encodes
from diloco.member.member_tracing import MemberTraces
from diloco.member.shared import SharedLearner
from diloco.member.shares import Leases
from diloco.member.taping import LearnerTape
from diloco.process.observe import Counted, Logger
from diloco.settings.service import LearnerSettings
from diloco.transport import Transport
from diloco.wire.entries import Genesis

Vector = NDArray[np.float32]
Initial: TypeAlias = Callable[[Fragment], Vector]


@dataclass(frozen=True)
class Boundary:
    """The trainer's work between two steps, in this order."""

    applies: list[tuple[int, VersionWrite]]  # by fragment
    reads: list[int]  # fragments to hand over a reader for, with :meth:`Arrays.submit`
    stop: bool  # the token budget is used up: take no further step
    wait: bool  # take no step yet: a version is on its way (``round.learners_wait``)
    finished: bool  # every fragment's log is closed and applied
    ended: bool = False  # it was asked to end, and nothing is unmerged, or its time is over


class Rounds(Protocol):
    """A learner's rounds, as its arrays see them."""

    transport: Transport
    run: KnownRun
    map: FragmentMap
    settings: LearnerSettings
    log: Logger
    store: Log
    refused: Counted
    shares: Leases
    shared: SharedLearner
    taped: LearnerTape
    answering: Answering
    traces: MemberTraces


class Arrays(Encodes, Protocol):
    """A learner's arrays, as its rounds and its trainer see them."""

    # ---- loop thread

    async def first_values(self, initial: Initial | None, index: int) -> Vector:
        """Return a fragment as this learner founds a run with it, float32 [its size]; ``initial`` gives it in one process."""

    async def load(self, genesis: tuple[Genesis, bytes]) -> list[FragmentVersion]:
        """Load the log to its end; return each fragment's state, in order."""

    async def holds(self) -> bool:
        """Whether what :meth:`load` returned is still the log's, before it is followed.

        Raises:
            AppendUncertainError: the server is silent.
        """

    def follow(self) -> None:
        """Follow the log from here on, and look now and then whether it still has what was read."""

    def others_traffic(self) -> list[MemberTraffic]:
        """Return what other processes of this learner have moved so far."""

    async def end(self) -> None:
        """End what the rounds' tasks do not end."""

    # ---- trainer thread

    def boundary(self, done: StepDone | None) -> Boundary:
        """Book the step that ended (None: there was none), and return the trainer's work before the next one.

        Raises:
            DilocoError: a task of the loop thread failed.
        """

    def submit(self, fragment: int, reader: Reader) -> None:
        """Take a way to read a fragment as it is at this boundary, at most once."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something new since the last boundary, at most ``timeout_s``."""

    def moment(self) -> Moment:
        """Return what the learning rate goes by: the tokens that the newest applied version states and own ones since."""
