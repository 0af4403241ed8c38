"""A member's messages on subjects of its own name, which are not stored: heartbeats, gauges, answers to markers, samples."""

from __future__ import annotations

from typing import TypeAlias

from diloco.control.creation import KnownRun
from diloco.member.instruments import Instruments
from diloco.member.shared import SharedLearner
from diloco.transport import Transport
from diloco.wire import framing
from diloco.wire.control import Gauges, Heartbeat, MarkerAnswer, MarkerDeclined, Sample, ValidationLoss
from diloco.wire.fields import MAX_TEXT
from diloco.wire.subjects import Subjects

_SUBJECTS = {
    Gauges: Subjects.gauges,
    Heartbeat: Subjects.heartbeat,
    MarkerAnswer: Subjects.marker_answer,
    MarkerDeclined: Subjects.marker_answer,
    Sample: Subjects.sample,
    ValidationLoss: Subjects.gauges,
}
Sent: TypeAlias = Gauges | Heartbeat | MarkerAnswer | MarkerDeclined | Sample | ValidationLoss


class Outbox:
    """Sends the messages of one member."""

    def __init__(self, transport: Transport, run: KnownRun, name: str, shared: SharedLearner) -> None:
        self._transport, self._run, self._name, self._shared = transport, run, name, shared

    async def send(self, message: Sent) -> None:
        """Send a message, from the loop thread."""
        subject = _SUBJECTS[type(message)](Subjects(self._run.name), self._name)
        await self._transport.publish(subject, framing.pack(message, self._run.identity))

    def send_soon(self, message: Sent) -> None:
        """Send a message, from any thread."""
        self._shared.loop.call_soon_threadsafe(lambda: self._shared.tasks.spawn(self.send(message)))

    def report_validation(self, loss: float) -> None:
        """Send the loss that a learner's own loop has found on validation data. From any thread."""
        self.send_soon(ValidationLoss(self._name, loss))

    def show(self, instruments: Instruments) -> None:
        """Send what a learner's instruments show, again and again. From any thread."""
        sending = instruments.send(self._name, self.send)
        self._shared.loop.call_soon_threadsafe(lambda: self._shared.tasks.spawn(sending))


def sample_of(evaluator: str, versions: list[int], text: str) -> Sample:
    """Return a sample with as much of a text as a message may have; half a character, as a task may return, becomes ``?``."""
    return Sample(evaluator, versions, text[:MAX_TEXT].encode(errors="replace").decode())
