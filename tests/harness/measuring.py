"""The pace of this machine: a fixed amount of work, done by as many processes at once as there will be workers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from tests.harness.workers import cores

VARIABLE = "DILOCO_TEST_PACE"  # tests/pace.py reads it when it is imported, so it is stated before
REFERENCE_S = 0.55  # of the work on an idle core of an AMD EPYC with 2 cores, Python 3.11 (2026-11-27)

# interpreted Python alone: no library of a machine, and no number of its threads, changes the amount
WORK = """
import time
def work():
    total = 0
    for number in range(7_000_000):
        total = (total * 31 + number) % 1000003
began_s = time.perf_counter()
work()
print(time.perf_counter() - began_s)
"""


def measure(workers: int) -> float:
    """Return how many times longer than on the reference machine the work takes while ``workers`` processes do it at once.

    Where there are more workers than cores they share these, on the reference machine too.
    """
    running = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", WORK], stdout=subprocess.PIPE, text=True)
        for _ in range(max(1, workers))
    ]
    taken_s = [float(process.communicate()[0]) for process in running]
    return sum(taken_s) / len(taken_s) / (REFERENCE_S * max(1.0, workers / cores()))


def state_pace(workers: int) -> str:
    """Measure the pace unless the environment states it; state it there, for all processes that are started, and return it."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = f"{measure(workers):.2f}"
    return os.environ[VARIABLE]


def processor_s() -> float:
    """Return the processor time of all children of this process that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
