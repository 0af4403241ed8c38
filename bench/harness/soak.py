"""Counts of what a run's processes hold while others are killed: memory, threads, open files and asyncio tasks."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.console import Result, say
from harness.host import MB
from harness.live_run import Up, asleep, read_pid, up

SIZE = ("--learners", "3", "--shards", "2", "--standbys", "1", "--coordinators", "2")
MODEL = {
    "task.name": "harness.asleep:make_unstopped",
    "task.layers": 8,
    "task.width": 128,
    "fragments.count": 8,
    "round.steps": 16,
}
STEP_S = 0.5
VICTIMS = ("learner-1", "syncer-1", "coordinator-1", "learner-2", "evaluator", "syncer-2")  # in turn; no other one is killed
SCRAPE_S = 2.0  # a process that is only beginning, or was killed, does not answer
LONG_LIFE_S = 120.0  # shorter lives say nothing about growth
WARM_SHARE, WARM_S = 0.1, 300.0  # of a life, and at most: caches and pools fill
END_SHARE = 0.1  # of a life, whose median is its first or last value
COUNTS = ("rss_bytes", "uss_bytes", "threads", "open_files", "tasks")
# what a process that is never killed may grow by in its life after it is warm: a share of the first value, or so much
GROWTH_BOUNDS = {
    "rss_bytes": (0.1, 16 * MB),
    "uss_bytes": (0.1, 16 * MB),
    "threads": (0.0, 2),
    "open_files": (0.0, 4),
    "tasks": (0.0, 4),
}
SERVER = "nats"
SERVER_MEMORY_BYTES = 64 * MB  # Go collects a heap when it is twice what was in use, and streams that are read are cached


@dataclass
class Life:
    """A process of a service from its first sample to its last one; ``values``: by count, NaN where it did not say."""

    service: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COUNTS})

    @property
    def length_s(self) -> float:
        """Return the time between its first and its last sample."""
        return self.at_s[-1] - self.at_s[0]

    def trend(self, count: str) -> Trend | None:
        """Return the trend of a count once the process is warm; None: there are too few samples."""
        warm_s = self.at_s[0] + min(WARM_S, WARM_SHARE * self.length_s)
        known = [
            (at_s, value)
            for at_s, value in zip(self.at_s, self.values[count], strict=True)
            if at_s >= warm_s and not math.isnan(value)
        ]
        return trend(known) if len(known) >= 3 else None


@dataclass(frozen=True)
class Trend:
    """The least-squares line through the samples of a life, and the medians of its first and last tenth."""

    first: float
    last: float
    slope_per_h: float
    growth: float  # of the line, from the first sample to the last one


def trend(samples: Sequence[tuple[float, float]]) -> Trend:
    """Return the trend of values by their times in seconds, of which there are at least two different ones."""
    times_s, values = [at_s for at_s, _ in samples], [value for _, value in samples]
    edge = max(1, round(END_SHARE * len(samples)))
    slope = statistics.linear_regression(times_s, values).slope
    first, last = statistics.median(values[:edge]), statistics.median(values[-edge:])
    return Trend(first, last, 3600 * slope, slope * (times_s[-1] - times_s[0]))


def counts_of(pid: int, metrics_url: str | None) -> dict[str, float] | None:
    """Return what a process holds; None where it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    private = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", rollup, re.MULTILINE)
    rss = re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)
    threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    if rss is None or threads is None:  # it has ended, and has not been waited for
        return None
    return {
        "rss_bytes": 1024 * int(rss[1]),
        "uss_bytes": 1024 * sum(map(int, private)),
        "threads": int(threads[1]),
        "open_files": open_files,
        "tasks": math.nan if metrics_url is None else tasks_of(metrics_url),
    }


def tasks_of(metrics_url: str) -> float:
    """Return the asyncio tasks of a service, or NaN where it does not answer."""
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(metrics_url, timeout=SCRAPE_S) as answer:
            text = answer.read().decode()
        if found := re.search(r"^diloco_tasks\{[^}]*\} (\S+)$", text, re.MULTILINE):
            return float(found[1])
    return math.nan


class Soak:
    """The lives of a run's processes so far."""

    def __init__(self, run: Up) -> None:
        self.run = run
        self.lives: dict[int, Life] = {}  # by process id
        self._metrics: dict[int, str] = {}  # by process id

    def sample(self) -> None:
        """Sample every process that lives."""
        at_s = time.monotonic()
        for service, pid in self._pids().items():
            found = counts_of(pid, self._metrics_url(service, pid))
            if found is None:
                continue
            life = self.lives.setdefault(pid, Life(service, pid))
            life.at_s.append(at_s)
            for name, value in found.items():
                life.values[name].append(value)

    def kill(self, service: str) -> bool:
        """Kill a service; return False where it has no process, since it is being started again."""
        pid = self.run.pid(service)
        if not pid or pid not in self.lives:
            return False
        with contextlib.suppress(ProcessLookupError):
            self.run.signal(signal.SIGKILL, service)
        return True

    def _pids(self) -> dict[str, int]:
        files = sorted((self.run.directory / "services").glob("*.pid"))
        found = {file.stem: read_pid(file) for file in files} | {"up": self.run.process.pid}
        return {service: pid for service, pid in found.items() if pid}

    def _metrics_url(self, service: str, pid: int) -> str | None:
        """Return the address of a process's metrics, once it serves them."""
        if pid not in self._metrics:
            served = self.run.events(service, "metrics_served")
            known = {url for other, url in self._metrics.items() if self.lives[other].service == service}
            if not served or (url := f"http://127.0.0.1:{served[-1]['port']}/metrics") in known:
                return None
            self._metrics[pid] = url
        return self._metrics[pid]


def measure_soak(directory: Path, for_s: float, kill_every_s: float, sample_every_s: float) -> tuple[list[Life], list[str]]:
    """Run for so long, and return the lives of all processes and the names of the services that were killed."""
    environment = asleep(STEP_S) | {"DILOCO_METRICS_ADDRESS": "127.0.0.1:0"}
    killed: list[str] = []
    with up(directory, *SIZE, sets=MODEL, environment=environment) as run:
        run.until(lambda: run.status() and all(each["version"] >= 1 for each in run.status()["fragments"]), "a cycle")
        soak, began_s = Soak(run), time.monotonic()
        next_sample_s, next_kill_s = began_s, began_s + kill_every_s
        while (now_s := time.monotonic()) < began_s + for_s:
            if run.process.poll() is not None:
                raise SystemExit(f"{directory}: the run ended: {run.said()}")
            if now_s >= next_sample_s:
                soak.sample()
                next_sample_s += sample_every_s
            if now_s >= next_kill_s:
                victim = VICTIMS[len(killed) % len(VICTIMS)]
                if soak.kill(victim):
                    killed.append(victim)
                    next_kill_s += kill_every_s
                    say(f"{now_s - began_s:6.0f} s: killed {victim}")
            time.sleep(max(0.0, min(1.0, min(next_sample_s, next_kill_s) - time.monotonic())))
    return list(soak.lives.values()), killed


def summarise(lives: Sequence[Life], victims: Sequence[str]) -> list[Result]:
    """Return a row for each long life and count, with its bound where the service is none of the victims."""
    longest_s = max(life.length_s for life in lives)
    return [
        {
            "service": life.service,
            "pid": life.pid,
            "life_s": life.length_s,
            "count": count,
            "first": found.first,
            "last": found.last,
            "slope_per_h": found.slope_per_h,
            "growth": found.growth,
            "bound": None if life.service in victims else bound(life.service, count, found.first),
        }
        for life in sorted(lives, key=lambda life: (life.service, life.at_s[0]))
        if life.length_s >= min(LONG_LIFE_S, longest_s / 2)
        for count in COUNTS
        if (found := life.trend(count)) is not None
    ]


def bound(service: str, count: str, first: float) -> float:
    """Return what a survivor's count may grow by."""
    share, least = GROWTH_BOUNDS[count]
    if service == SERVER and count.endswith("_bytes"):
        least = SERVER_MEMORY_BYTES
    return max(least, share * first)


def exceeded(rows: Sequence[Result]) -> list[str]:
    """Return the survivors, and their counts, whose growth exceeds its bound."""
    return [f"{row['service']} {row['count']}" for row in rows if row["bound"] is not None and row["growth"] > row["bound"]]
