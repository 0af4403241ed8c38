"""The testing kit, as a user's tests use it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import RunError, SettingsError
from diloco.testing import VirtualRun

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def two_toys(run: VirtualRun) -> None:
    run.add_toy("ann", founds=True)
    run.add_toy("bob", step_s=0.13)


def some_versions(run: VirtualRun, count: int) -> Callable[[], bool]:
    return lambda: min(run.versions(), default=0) >= count


def check_accounts(run: VirtualRun, name: str) -> None:
    """Every processed token is merged, lost or held."""
    assert (run.merged(name) >= 0).all()
    assert (run.merged(name) <= run.accounts(name).tokens).all()


def test_the_example_of_the_page_passes() -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    names["test_a_lost_syncer_costs_no_work"]()


def test_a_seed_gives_the_same_run_each_time() -> None:
    def played(seed: int) -> tuple[float, list[int], bytes]:
        with VirtualRun({"tokens": 1024}, seed=seed) as run:
            two_toys(run)
            run.advance()
            return run.now_s, run.versions(), run.base("ann", 0).tobytes()

    assert played(3) == played(3)
    assert played(3) != played(4)


def test_a_learner_that_is_killed_comes_back_and_the_run_ends() -> None:
    with VirtualRun({"tokens": 2048}) as run:
        two_toys(run)
        run.advance(until=some_versions(run, 2))
        run.kill("bob")
        before = run.versions()
        run.advance(5.0)
        assert min(run.versions()) > max(before)  # ann trains on alone
        run.start("bob")
        run.advance()
        for name in ("ann", "bob"):
            check_accounts(run, name)
        assert (run.merged("ann") + run.merged("bob") >= 2048).all()
        assert np.array_equal(run.base("ann", 1), run.base("bob", 1))


def test_a_learner_that_is_cut_off_or_stands_still_goes_on_after_it() -> None:
    with VirtualRun({"tokens": 4096}) as run:
        two_toys(run)
        run.advance(until=some_versions(run, 2))
        run.cut("ann")
        run.freeze("bob")
        run.advance(1.0)
        steps = run.accounts("bob").step
        run.advance(1.0)
        assert run.accounts("bob").step == steps
        run.heal("ann")
        run.thaw("bob")
        run.advance()
        assert (run.merged("ann") > 0).all()
        assert (run.merged("bob") > 0).all()


def test_an_error_of_a_loop_ends_the_run_with_its_cause() -> None:
    def fail(run: Any) -> None:
        raise ZeroDivisionError("of the loop")

    with VirtualRun() as run:
        run.add_loop("mine", fail, params=lambda: {"w": np.zeros((4, 4), np.float32)})
        with pytest.raises(RunError, match="ZeroDivisionError: of the loop") as caught:
            run.advance()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_run_that_does_not_come_so_far_says_where_it_is() -> None:
    with VirtualRun() as run:
        run.add_toy("ann", founds=True)
        with pytest.raises(RunError, match=r"not there after 2 s: versions \[\d+, \d+\], learners {'ann': 'stepping'}"):
            run.advance(2.0, until=lambda: False)


@pytest.mark.parametrize("call", ["kill", "start", "freeze", "thaw", "cut", "heal", "merged"])
def test_a_process_that_is_not_there_is_named(call: str) -> None:
    with VirtualRun() as run, pytest.raises(SettingsError, match="there is no process 'carl': creator, syncer-0"):
        getattr(run, call)("carl")


@pytest.mark.tool
def test_it_needs_no_accelerator_and_nothing_for_people() -> None:
    code = "import sys, diloco.testing; print(*{'jax', 'torch', 'diloco_ops', 'textual', 'uvicorn'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
