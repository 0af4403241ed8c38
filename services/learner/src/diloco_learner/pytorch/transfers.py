"""Copies between a CUDA device and the host for which the thread that trains never waits.

A device does its work later than a loop asks for it, and a step changes parameters in place. What a copy has is therefore
decided by the order of work on the device:

* A fragment that is read is copied on the device, in the order of the stream in which the loop computes, so that no later step
  changes the copy. From there it goes to page-locked memory of the host in a second stream, beside the steps that follow. The
  thread that needs the values waits for the event behind it.
* A device has one buffer for such copies, as large as the largest fragment that was read. The next fragment's copy waits on the
  device until the last one has left the buffer.
* A version goes through page-locked memory in the order of the loop's stream, since the next step computes with it.
* A loss goes to the host in the order of the loop's stream, since its tensor may be written to by the next step (a CUDA graph's
  is). It is waited for a step later.

Page-locked memory is PyTorch's: its allocator keeps freed blocks for later copies, and gives out none before the events of the
copies that it was part of. Parameters are written in place, at the addresses that CUDA graphs and compiled modules know.
:class:`CopyPort` is all that is asked of a device, so that the order is tested without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco_learner.pytorch.shards import is_sharded

Vector = NDArray[np.float32]
WHOLE = 1 << 20  # float32 has all whole numbers up to this one, and beyond


class CopyEvent(Protocol):
    """A place in a stream of work, as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Return once the device has done all work before it. From any thread."""


class CopyPort(Protocol):
    """A device's streams of work, and memory of the host that devices read and write by themselves."""

    def serves(self, device: torch.device) -> bool:
        """Whether a device has streams. The values of any other one are copied within the call."""

    def attach(self, devices: Iterable[torch.device]) -> None:
        """Have the loop's stream of each device be the one in which the calling thread computes now.

        Raises:
            SettingsError: the stream is being captured.
        """

    def computing(self) -> AbstractContextManager[None]:
        """Return a ``with`` statement in which the calling thread computes in the loop's streams."""

    def pinned(self, count: int) -> torch.Tensor:
        """Return page-locked memory, float32 [count]."""

    def send(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue a copy of page-locked memory to a device, in the loop's stream, and return it."""

    def bring(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Queue a copy to page-locked memory in the loop's stream."""

    def bring_beside(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        """Queue a copy to page-locked memory in the second stream, behind what the loop's stream has now."""

    def hold(self, device: torch.device, event: CopyEvent) -> None:
        """Have the work that is queued next in the loop's stream begin behind an event."""


class CudaPort:
    """Devices of CUDA, or of ROCm, which PyTorch calls by the same name."""

    def __init__(self) -> None:
        self._loops: dict[torch.device, torch.cuda.Stream] = {}
        self._besides: dict[torch.device, torch.cuda.Stream] = {}

    def serves(self, device: torch.device) -> bool:
        is_cuda: bool = device.type == "cuda"
        return is_cuda

    def attach(self, devices: Iterable[torch.device]) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise SettingsError(
                "step: a CUDA graph is being captured, so nothing can be read or written: call run.step after graph.replay(), "
                "and leave optimizer= out of diloco.join, since a captured step calls no hooks"
            )
        self._loops.update((device, torch.cuda.current_stream(device)) for device in devices)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device, stream in self._loops.items():
                if torch.cuda.current_stream(device) != stream:  # another thread's, while the loop's waits
                    stack.enter_context(torch.cuda.stream(stream))
            yield

    def pinned(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float32, device="cpu", pin_memory=True)

    def send(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        return source.to(device, non_blocking=True)

    def bring(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        target.copy_(source, non_blocking=True)
        return _event(torch.cuda.current_stream(source.device))

    def bring_beside(self, source: torch.Tensor, target: torch.Tensor) -> CopyEvent:
        beside = self._besides.get(source.device)
        if beside is None:
            beside = self._besides[source.device] = torch.cuda.Stream(source.device)
        beside.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(beside):
            target.copy_(source, non_blocking=True)
        source.record_stream(beside)  # a larger buffer may replace it: its memory is given to none before
        return _event(beside)

    def hold(self, device: torch.device, event: CopyEvent) -> None:
        torch.cuda.current_stream(device).wait_event(event)


def _event(stream: torch.cuda.Stream) -> CopyEvent:
    event: CopyEvent = torch.cuda.Event(blocking=True)  # a thread that waits sleeps
    stream.record_event(event)
    return event


@dataclass(frozen=True)
class PinnedCopy:
    """Values on their way to the host, float32 [count]; they are there once the event is over."""

    values: torch.Tensor
    event: CopyEvent


@dataclass
class _DeviceBuffer:
    """Where a fragment lies on its way to the host, float32 [any length], and the event behind the last one's copy."""

    values: torch.Tensor
    left: CopyEvent | None = None


class Transfers:
    """The copies of one model; any thread may call it, one at a time."""

    def __init__(self, port: CopyPort | None = None) -> None:
        self._port = CudaPort() if port is None else port
        self._lock = threading.Lock()
        self._buffers: dict[torch.device, _DeviceBuffer] = {}

    def serves(self, device: torch.device) -> bool:
        """Whether copies to and from a device are made here."""
        return self._port.serves(device)

    def attach(self, devices: Iterable[torch.device]) -> None:
        """Go by the streams in which the calling thread computes on these devices; raise as :meth:`CopyPort.attach` does."""
        self._port.attach(devices)

    def computing(self) -> AbstractContextManager[None]:
        """Return a ``with`` statement in which work is queued in the loop's streams."""
        return self._port.computing()

    def fetch(self, count: int, device: torch.device, fill: Callable[[torch.Tensor], None]) -> PinnedCopy:
        """Queue a copy of values to the host; ``fill`` writes them to a buffer on the device, float32 [count].

        Raises:
            RuntimeError: device or host has no room.
        """
        with self._lock, self._port.computing():
            buffer = self._buffer(count, device)
            if buffer.left is not None:
                self._port.hold(device, buffer.left)
            pinned, values = self._port.pinned(count), buffer.values[:count]
            fill(values)
            buffer.left = self._port.bring_beside(values, pinned)
            return PinnedCopy(pinned, buffer.left)

    def send(self, values: Vector, device: torch.device) -> torch.Tensor:
        """Queue a copy of values, float32 [...], to a device, in the order of its work; they may change once this returns."""
        pinned = self._port.pinned(values.size)
        pinned.numpy().reshape(values.shape)[...] = values
        return self._port.send(pinned, device)

    def number(self, scalar: Any) -> Callable[[], float]:
        """Queue a copy of a scalar of any framework to the host; return a function that waits for it and returns it."""
        if not isinstance(scalar, torch.Tensor):
            return partial(float, scalar)
        value = scalar.detach()  # without what it was computed from, which would be kept for a step
        if is_sharded(value) or not self._port.serves(value.device):
            return partial(float, value)
        pinned = self._port.pinned(1)
        event = self._port.bring(value.float().reshape(1), pinned)

        def wait() -> float:
            event.synchronize()
            return float(pinned)

        return wait

    def whole_number(self, scalar: Any) -> Callable[[], float]:
        """Queue a copy of a scalar as :meth:`number` does, which goes as float32; an integer keeps all digits."""
        if not isinstance(scalar, torch.Tensor) or scalar.is_floating_point():
            return self.number(scalar)
        high, low = self.number(scalar // WHOLE), self.number(scalar % WHOLE)
        return lambda: high() * WHOLE + low()

    def _buffer(self, count: int, device: torch.device) -> _DeviceBuffer:
        found = self._buffers.get(device)
        if found is None or found.values.numel() < count:
            self._buffers.pop(device, None)
            found = self._buffers[device] = _DeviceBuffer(torch.empty(count, dtype=torch.float32, device=device))
        return found
