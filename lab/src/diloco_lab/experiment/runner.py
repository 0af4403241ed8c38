"""Play an experiment's trials: those that were not played before, in processes of one thread each."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import structlog

from diloco.errors import DilocoError
from diloco.settings import folders
from diloco.settings.run import RunSettings
from diloco_lab.experiment.methods import Measured, play, steps_of_each
from diloco_lab.experiment.spec import Arm, Experiment
from diloco_lab.experiment.statistics import Paired, paired
from diloco_lab.experiment.store import TrialStore
from diloco_ops.up.environment import ONE_THREAD

ENVIRONMENT = ONE_THREAD | {"NUMBA_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
STOP_SEEDS = 2  # after which an arm may stop
PROBE_STEPS = 6  # whose median is a step's length
BYTES_PER_PARAMETER = 48  # generous: 16 for a model with gradient and AdamW, up to 26 for a learner's protocol side
FIXED_BYTES = 600 << 20  # of a process: JAX, its programs, the text


@dataclass(frozen=True)
class TrialJob:
    """One trial to be played, and the file for its result."""

    arm: str
    seed: int
    settings: RunSettings
    path: Path


@dataclass(frozen=True)
class Cost:
    """An arm's cost on this machine: of a step of one learner, of a trial, and the memory of one process."""

    step_s: float
    trial_s: float
    memory_bytes: int


@dataclass
class Results:
    """Results by arm and seed; what failed, by arm and seed, with its reason."""

    measured: dict[tuple[str, int], Measured]
    failed: dict[tuple[str, int], str]

    def losses(self, arm: str) -> dict[int, float]:
        """Return the final losses of an arm by seed, without those that diverged."""
        known = {seed: measured.loss for (name, seed), measured in self.measured.items() if name == arm}
        return {seed: loss for seed, loss in known.items() if loss is not None}


def stopped(experiment: Experiment, results: Results) -> dict[str, float | None]:
    """Return the arms that stop after their first two seeds, and how far they end above the nearest bar there.

    Without ``stop_above``, or with no more seeds than that, no arm stops. None: both trials diverged.
    """
    if experiment.stop_above is None or experiment.seeds <= STOP_SEEDS:
        return {}
    first, later = experiment.seed_range[:STOP_SEEDS], experiment.seed_range[STOP_SEEDS:]
    found: dict[str, float | None] = {}
    for name in experiment.arms:
        ended = all((name, seed) in results.measured for seed in first)
        went_on = any((name, seed) in results.measured for seed in later)
        if name in experiment.bars or not ended or went_on:
            continue
        losses = results.losses(name)
        if not any(seed in losses for seed in first):
            found[name] = None
            continue
        above = [compared(results, name, bar) for bar in experiment.bars]  # over its first seeds, as it has no others
        nearest = min((each.mean for each in above if each is not None), default=0.0)
        if nearest > experiment.stop_above:
            found[name] = nearest
    return found


def compared(results: Results, arm: str, bar: str) -> Paired | None:
    """Compare an arm with another over the seeds that both have ended; None: there are none, or it is the same arm."""
    one, other = results.losses(arm), results.losses(bar)
    seeds = sorted(one.keys() & other.keys())
    return paired([one[seed] for seed in seeds], [other[seed] for seed in seeds]) if seeds and arm != bar else None


def jobs(experiment: Experiment, store: TrialStore, data: str | None) -> Iterator[TrialJob]:
    """Yield all trials, seed by seed: a set that is cut off has whole pairs."""
    for seed in experiment.seed_range:
        for name, arm in experiment.arms.items():
            settings = experiment.settings_of(name, seed)
            yield TrialJob(name, seed, settings, store.path(arm, settings, data))


def play_all(
    experiment: Experiment,
    store: TrialStore,
    data: str | None,
    pool: ProcessPoolExecutor,
    done: Callable[[TrialJob, Measured | str], None],
) -> Results:
    """Play all that is not in the store. ``done`` hears of each trial that is played: its result, or its failure.

    Raises:
        FormatError: a stored result is damaged.
    """
    results = Results({}, {})
    missing: list[TrialJob] = []
    for job in jobs(experiment, store, data):
        known = store.get(job.path)
        if known is None:
            missing.append(job)
        else:
            results.measured[job.arm, job.seed] = known
    futures = {pool.submit(_play, experiment.arms[job.arm], job.settings, data): job for job in missing}
    for future in as_completed(futures):
        job = futures[future]
        try:
            measured = future.result()
        except DilocoError as error:
            results.failed[job.arm, job.seed] = str(error)
            done(job, str(error))
            continue
        store.put(job.path, measured)
        results.measured[job.arm, job.seed] = measured
        done(job, measured)
    return results


def costs(experiment: Experiment, data: str | None, pool: ProcessPoolExecutor) -> dict[str, Cost]:
    """Measure each arm's cost by a few steps of its model."""
    known: dict[str, Future[Cost]] = {
        name: pool.submit(_cost, arm, experiment.settings_of(name, 0), data) for name, arm in experiment.arms.items()
    }
    return {name: future.result() for name, future in known.items()}


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Have so many processes of one thread each, which begin when there is something to do.

    XLA reads the environment when it is loaded, so it is set as long as they may begin.
    """
    before, here = {key: os.environ.get(key) for key in ENVIRONMENT}, str(Path.cwd())
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, here)  # handed on to processes: a task of one's own is found as `diloco up` finds it
    processes = ProcessPoolExecutor(workers, get_context("spawn"), _set_up)
    try:
        yield processes
    finally:
        processes.shutdown(cancel_futures=True)
        sys.path.remove(here)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def _set_up() -> None:
    """Prepare a process: the learners of a trial share one compilation, and of the services' events only failures are shown."""
    import logging

    import jax

    threading.Thread(target=_end_with_parent, daemon=True).start()
    update: Callable[[str, Any], None] = jax.config.update
    cache = folders.user_cache()
    folder = None if cache is None else cache / "diloco" / "lab"
    if folder is not None and folders.can_write(folder):
        update("jax_compilation_cache_dir", str(folder))
    update("jax_persistent_cache_min_compile_time_secs", 0.0)
    update("jax_persistent_cache_min_entry_size_bytes", -1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _end_with_parent() -> None:
    """End this process once the one that began it is gone: killed, it cannot say so, and trials would go on for nothing."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _play(arm: Arm, settings: RunSettings, data: str | None) -> Measured:
    return play(arm, settings, data)


def _cost(arm: Arm, settings: RunSettings, data: str | None) -> Cost:
    import numpy as np

    from diloco_learner.jax.island import Island
    from diloco_learner.task import load_task
    from diloco_learner.task_api import first_batch
    from diloco_learner.text import load_corpus

    task = load_task(settings.task, data)
    island, batch = Island(task, settings), first_batch(task, settings)
    times: list[float] = []
    for _ in range(PROBE_STEPS):
        began_s = time.perf_counter()
        island.step(batch, 0.0).wait()
        times.append(time.perf_counter() - began_s)
    step_s = float(np.median(times))
    models = settings.learners if arm.method == "decoupled" else 1
    batches = 1 if arm.method == "alone" else settings.learners
    parameters = sum(tensor.size for tensor in island.tensors())
    memory = FIXED_BYTES + models * parameters * BYTES_PER_PARAMETER
    trial_s = times[0] + steps_of_each(settings, task) * batches * step_s
    if arm.post_training is not None:
        further = arm.post_training.settings_over(settings, "post_training")
        load_corpus(str(arm.post_training.folder()))  # it is there, before any trial begins
        trial_s += steps_of_each(further, task) * settings.learners * step_s
    return Cost(step_s, trial_s, memory)
