"""Garbage while a service is imported, and after it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.tool

SCRIPT = """
import gc
from diloco.process.garbage import importing

class Cycle:
    def __init__(self):
        self.itself = self

collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
with importing():
    kept = [Cycle() for _ in range(100_000)]
assert not collected, "no collection in the block"
assert gc.isenabled()
assert gc.get_freeze_count() >= 100_000
{after}
"""


def run(after: str) -> None:
    """Run it in a process of its own: what the collector passes over would stay so in this one."""
    subprocess.run([sys.executable, "-c", SCRIPT.replace("{after}", after)], check=True)


def test_objects_of_modules_are_passed_over_and_later_garbage_is_collected() -> None:
    run("import weakref; late = weakref.ref(Cycle()); gc.collect(); assert late() is None; assert len(kept) == 100_000")


def test_collections_go_on_where_an_import_fails() -> None:
    run("""
try:
    with importing():
        raise ImportError
except ImportError:
    assert gc.isenabled()
""")
