"""Figures that learners say of themselves besides their heartbeats, over the run: for pictures and tables alone.

Pure, except for :func:`listen`: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.control.hearing import decoding
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Gauges, ValidationLoss
from diloco.wire.frame_sizes import largest_bytes

if TYPE_CHECKING:
    from diloco_coordinator.service import Coordinator

MAX_POINTS = 500  # of a learner; every second one goes when there are more
MAX_LOSSES = 2000  # on validation data, likewise

# time, learning rate, gradient norm, cores, resident bytes, bytes on its devices
Point = tuple[float, float | None, float | None, float, int, int | None]


class GaugeCurves:
    """The figures of all learners, and the newest of what each says about its machine."""

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}
        self.places: dict[str, dict[str, str]] = {}  # by learner: device and host

    def note(self, said: Gauges, now_s: float) -> None:
        """Take in what a learner of the run says."""
        points = self.points.setdefault(said.learner, [])
        memory = said.memory_bytes, said.device_memory_bytes
        points.append((round(now_s, 1), said.learning_rate, said.gradient_norm, round(said.cores, 3), *memory))
        if len(points) > MAX_POINTS:
            self.points[said.learner] = points[::2]
        self.places[said.learner] = {"device": said.device, "host": said.host}

    def dump(self) -> dict[str, list[list[Any]]]:
        """Return a copy of the points for JSON."""
        return {name: [list(point) for point in points] for name, points in self.points.items()}

    @classmethod
    def load(cls, dumped: Mapping[str, Sequence[Sequence[Any]]]) -> GaugeCurves:
        """Go on from what an earlier process dumped.

        Raises:
            TypeError, ValueError, AttributeError: it is damaged.
        """
        made = cls()
        for name, points in dumped.items():
            made.points[str(name)] = [
                (float(at_s), _known(rate), _known(norm), float(cores), int(memory), None if device is None else int(device))
                for at_s, rate, norm, cores, memory, device in points[-MAX_POINTS:]
            ]
        return made


def note_validation(points: list[tuple[float, int, float]], loss: float, tokens: int, now_s: float) -> None:
    """Add a loss on validation data, an evaluator's or a loop's own; each point is time, tokens merged, loss."""
    points.append((now_s, tokens, loss))
    if len(points) > MAX_LOSSES:
        points[:] = points[::2]


def _known(value: Any) -> float | None:
    return None if value is None else float(value)


async def listen(coordinator: Coordinator) -> None:
    """Have a coordinator hear what learners say; only those count that the run knows by their heartbeats."""

    async def noted(said: Gauges, _: Heard) -> None:
        monitor = coordinator.monitor
        if monitor is not None and said.learner in monitor.learners:
            monitor.gauges.note(said, coordinator.now_s())

    async def validated(said: ValidationLoss, _: Heard) -> None:
        monitor = coordinator.monitor
        if monitor is not None and said.learner in monitor.learners:
            note_validation(monitor.validation, said.loss, monitor.tokens_merged(), coordinator.now_s())

    identity, refused = coordinator.run.identity, coordinator.refused
    gauges = decoding(Gauges, identity, noted, refused)
    losses = decoding(ValidationLoss, identity, validated, refused)

    async def heard(message: Heard) -> None:
        is_loss = len(message.data) <= largest_bytes(ValidationLoss) and framing.kind_of(message.data) == ValidationLoss.kind
        await (losses if is_loss else gauges)(message)

    await coordinator.transport.subscribe(coordinator.subjects.gauges(), heard)
