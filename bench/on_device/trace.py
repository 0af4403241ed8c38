"""Intervals of a device's work from a trace: kernels and copies, how much of the copies they cover, and how long it is idle.

JAX writes a trace as xplane.pb, and PyTorch as Chrome's JSON. Both become lists of :class:`Work`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]  # seconds from when to when
TO_HOST, TO_DEVICE = ("MemcpyD2H", "Memcpy DtoH"), ("MemcpyH2D", "Memcpy HtoD")


@dataclass(frozen=True)
class Work:
    """A kernel or a copy on a device; ``about`` is what the trace says of a copy's memory."""

    name: str
    began_s: float
    ended_s: float
    about: str = ""

    @property
    def span(self) -> Span:
        return self.began_s, self.ended_s

    @property
    def copies(self) -> bool:
        """Whether it is a copy between host and device."""
        return self.name.startswith(TO_HOST + TO_DEVICE)


def of_jax(folder: Path) -> list[Work]:
    """Return the work of the GPUs in a trace that ``jax.profiler`` wrote into a folder."""
    import jax

    found = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            if plane.name.startswith("/device:GPU"):
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        found += [_of_event(event) for event in line.events]
    return sorted(found, key=lambda work: work.began_s)


def _of_event(event: Any) -> Work:
    about = next((str(value) for key, value in event.stats if key == "memcpy_details"), "")
    return Work(event.name, event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9, about)


def of_torch(file: Path) -> list[Work]:
    """Return the work of the GPUs in a trace that ``torch.profiler`` exported."""
    events = json.loads(file.read_bytes())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Work(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["name"])
        for event in events
        if event.get("cat") in kinds and "dur" in event
    ]
    return sorted(found, key=lambda work: work.began_s)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans in order that do not overlap."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def covered_s(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the seconds of ``spans`` in which one of the ``others`` goes on, too."""
    apart = union(others)
    return sum(max(0.0, min(end, stop) - max(begin, start)) for begin, end in union(spans) for start, stop in apart)


def summary(work: Sequence[Work], steps: int) -> dict[str, Any] | None:
    """Return what a trace of so many steps says, by step; None: it has no kernel, as that of a CPU.

    ``idle`` is the share of the time, from the first kernel to the end of the last, in which no kernel ran.
    """
    kernels = [each.span for each in work if not each.copies]
    if not kernels:
        return None
    busy = union(kernels)
    whole_s = busy[-1][1] - busy[0][0]
    busy_s = sum(end - begin for begin, end in busy)
    found: dict[str, Any] = {"step_s": whole_s / steps, "idle": 1 - busy_s / whole_s, "idle_s": (whole_s - busy_s) / steps}
    for name, kinds in (("to_host", TO_HOST), ("to_device", TO_DEVICE)):
        copies = [each for each in work if each.name.startswith(kinds)]
        took_s = sum(end - begin for begin, end in union(each.span for each in copies))
        found[f"{name}_s"] = took_s / steps
        found[f"{name}_beside_kernels"] = covered_s((each.span for each in copies), kernels) / took_s if took_s else None
        found[f"{name}_about"] = max(copies, key=lambda each: each.ended_s - each.began_s).about if copies else ""
    return found
