"""Playing many schedules, in one process or several."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tests.simulation.even import EvenWorld
from tests.simulation.islands import IslandWorld
from tests.simulation.world import Outcome, World

COLLECT_EVERY = 50  # schedules: each leaves cycles behind, and looking for them all the time takes a tenth of it


def world(seed: int, *, islands: bool = False, even: bool = False, verbose: bool = False, **kind: bool) -> World:
    """The world of a schedule: with ``islands`` one whose learners are islands, with ``even`` one of many fragments.

    The rest is as :class:`World` has it.
    """
    if islands:
        return IslandWorld(seed, verbose=verbose)
    return EvenWorld(seed, verbose=verbose) if even else World(seed, verbose=verbose, **kind)


def play(seed: int, **kind: bool) -> Outcome:
    """One schedule, without its trace, of a :func:`world`."""
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    began_s = time.process_time()
    outcome = world(seed, **kind).run()
    return replace(outcome, trace=[], cpu_s=time.process_time() - began_s)


class Playing:
    """Outcomes as they come, in no order, and how long it took: by the clock, and on the cores."""

    def __init__(self, seeds: Sequence[int], jobs: int, **kind: bool) -> None:
        self.seeds, self.jobs, self.seconds, self.cpu_s = seeds, jobs, 0.0, 0.0
        self._one = partial(play, **kind)

    @property
    def outcomes(self) -> Iterator[Outcome]:
        began_s = time.perf_counter()
        gc.disable()
        gc.collect()
        gc.freeze()  # what is there by now stays: it need not be looked at again and again
        try:
            for outcome in self._play():
                self.cpu_s += outcome.cpu_s
                yield outcome
        finally:
            gc.unfreeze()
            gc.enable()
            self.seconds = time.perf_counter() - began_s

    def rate(self, *, cores: bool = False) -> float:
        """Schedules a minute; with ``cores``, a minute of one core."""
        return len(self.seeds) / (self.cpu_s if cores else self.seconds) * 60

    def _play(self) -> Iterator[Outcome]:
        if self.jobs == 1:
            yield from map(self._one, self.seeds)
        else:
            # not forked: the process that runs all tests has JAX and its threads in it
            with multiprocessing.get_context("spawn").Pool(self.jobs) as pool:
                yield from pool.imap_unordered(self._one, self.seeds, chunksize=10)


def play_all(seeds: Sequence[int], jobs: int = 1, **kind: bool) -> Playing:
    """Play the schedules of ``seeds`` in so many processes; ``kind``: as :func:`play` has it."""
    return Playing(seeds, jobs, **kind)


def survived(outcomes: Iterable[Outcome], options: str = "") -> Counter[str]:
    """Count all that happened in schedules of which none fails; ``options`` are those of the command that replays one."""
    total: Counter[str] = Counter()
    failed = {}
    for outcome in outcomes:
        total.update(outcome.stats)
        if outcome.error is not None:
            failed[outcome.seed] = repr(outcome.error)
    assert not failed, f"replay with `python -m tests.simulation {options}--replay SEED`: {failed}"
    return total


def happens(total: Counter[str], kinds: Iterable[str], seeds: range) -> None:
    """Require that the search meets what it looks for: each of these in one of 60 schedules or more.

    The rarest happens in one of ten. The first block answers for all: in others chance alone may leave one kind out.
    """
    if not seeds.start:
        for kind in kinds:
            assert total[kind] >= len(seeds) / 60, f"{kind} hardly ever happens: {total}"
