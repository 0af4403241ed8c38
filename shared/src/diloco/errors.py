"""Every error that this project raises on purpose.

A message names the run, fragment, tensor or setting, the expected and the actual value, and the remedy.

    DilocoError                      exit code 1
    ├── SettingsError                2   a setting is unknown, out of range, or contradicts another one
    ├── DataError                    3   training data missing, unreadable or too short
    ├── BrokerError                  4   NATS unreachable, without JetStream, or refusing
    │   ├── StorageFullError             the stream or its disk is full: nothing was stored
    │   ├── FenceError                   another process appended first: nothing was stored
    │   ├── AppendUncertainError         no answer came: the message may or may not have been stored
    │   └── RewoundError                 a stream lost messages that it had acknowledged
    ├── RunError                     5   the run directory or the run on the server is missing or another one
    ├── AdmissionError               6   this learner's model, fragment map, data or settings differ from the run's
    ├── MessageError                 7   bytes from the wire that do not fit; never merged
    │   ├── FormatError                  not this protocol, wrong version, wrong type, out of bounds
    │   ├── HashError                    the content does not have its hash
    │   │   └── StateError               a log entry folds to another state than it states, on a state that may be damaged
    │   ├── ChainError                   a record that does not follow the one before it
    │   │   └── WrongEntryError          a log entry folds to another state than it states, on a state that is right
    │   ├── ClaimError                   a learner states work that cannot have been done
    │   ├── NotAdmittedError             its sender is not admitted to the run
    │   ├── UnmergeableError             offers of a round that cannot be merged: they are left out
    │   └── NonFiniteError               NaN or infinity in a delta
    ├── WanError                     8   the relay of an emulated WAN does not answer, or cannot obey
    ├── EjectedError                 9   an operator has ejected this learner from the run
    ├── MachineError                10   this machine folds log entries to other states than all others do
    ├── IslandError                 11   a process of this learner is gone, or does not come: all of them end, and begin again
    ├── RefusedError                12   the run refuses the work of this learner
    └── ObjectStoreError            13   object storage cannot be reached, or refuses
        ├── ObjectMissingError           there is no such object, or it has another content by now
        └── ObjectExistsError            there is an object already where one was to be created
"""

from __future__ import annotations

from typing import ClassVar


class DilocoError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is fit to be shown to a user."""

    exit_code: ClassVar[int] = 1


class SettingsError(DilocoError):
    """A setting is unknown, out of range, or contradicts another one."""

    exit_code = 2


class DataError(DilocoError):
    """Training data is missing, unreadable or too short."""

    exit_code = 3


class BrokerError(DilocoError):
    """NATS cannot be reached, lacks JetStream, or refuses."""

    exit_code = 4


class StorageFullError(BrokerError):
    """The stream or its disk is full; nothing was stored."""


class FenceError(BrokerError):
    """Another process appended first; nothing was stored."""


class AppendUncertainError(BrokerError):
    """No answer came in time; the message may or may not have been stored. Read the head back and compare."""


class RewoundError(BrokerError):
    """A stream no longer has what was read from it: its server lost acknowledged messages. Read it from its beginning."""


class RunError(DilocoError):
    """The run directory, or the run on the server, is missing or another one."""

    exit_code = 5


class AdmissionError(DilocoError):
    """A member's model, fragment map, mix of data or settings differ from the run's."""

    exit_code = 6


class EjectedError(DilocoError):
    """An operator has ejected this learner. After a restart it waits until it is readmitted."""

    exit_code = 9


class MachineError(DilocoError):
    """Log entries fold to other states on this machine than on all others: its memory is bad, or its libraries.

    Or they would, since a thread's floating-point mode is another one than the log's, and cannot be set.
    """

    exit_code = 10


class IslandError(DilocoError):
    """A learner of several processes has lost one, or they differ. All end; started again they are a new generation."""

    exit_code = 11


class RefusedError(DilocoError):
    """The run's syncers refuse the work of this learner, however often it is sent."""

    exit_code = 12


class MessageError(DilocoError):
    """Bytes from the wire that do not fit; they are refused, counted, and never merged."""

    exit_code = 7


class FormatError(MessageError):
    """Not this protocol: wrong magic, version, type, or a value out of bounds."""


class HashError(MessageError):
    """The content does not have its hash."""


class StateError(HashError):
    """Folding a log entry gives another state than it states: the entry is wrong, or the state that it was folded on.

    ``sequence`` is the entry's in its stream. A fold on the state before the entry, known to be right, tells which.
    """

    def __init__(self, text: str, sequence: int) -> None:
        super().__init__(text)
        self.sequence = sequence


class ChainError(MessageError):
    """A log entry that does not follow the one before it."""


class WrongEntryError(ChainError):
    """A log entry that states another state than it folds to."""


class ClaimError(MessageError):
    """An offer, or a claim to data shares, states work that its learner cannot have done."""


class NotAdmittedError(MessageError):
    """The sender of an offer is not admitted to the run; ``lacks_grant``: its grant is missing, or not the authority's."""

    def __init__(self, message: str, *, lacks_grant: bool = False) -> None:
        super().__init__(message)
        self.lacks_grant = lacks_grant


class UnmergeableError(MessageError):
    """Offers of a round that no version can have; the version is made without them.

    ``event`` names the reason, ``learners`` those whose offers they are.
    """

    def __init__(self, event: str, learners: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.event, self.learners = event, learners


class NonFiniteError(MessageError):
    """NaN or infinity in a delta."""


class WanError(DilocoError):
    """The relay of an emulated WAN does not answer, cannot listen, or cannot obey."""

    exit_code = 8


class ObjectStoreError(DilocoError):
    """Object storage, the Hugging Face hub or a web server cannot be reached, or refuses. No message has credentials."""

    exit_code = 13


class ObjectMissingError(ObjectStoreError):
    """There is no such object, or it was replaced while it was read."""


class ObjectExistsError(ObjectStoreError):
    """There is an object already where one was to be created; nothing was stored."""
