"""One process of a machine compiles, and the others wait for that alone. Threads stand for processes: locks are a file's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from diloco_learner.jax import programs
from diloco_learner.jax.programs import compiled_once, name_of

HANG_S = 60.0  # ends a test that hangs


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def asked() -> bool:
    return False


class Waiting:
    """Asked by a waiting process whether it is to end; notes that it waits."""

    def __init__(self, *, end: bool = False) -> None:
        self.end, self.begun = end, Event()

    def __call__(self) -> bool:
        self.begun.set()
        return self.end


def begin(pool: ThreadPoolExecutor, cache: Path, inside: Barrier) -> Future[int]:
    """Begin another process, and return when it waits; inside it meets the others, as only those can who are there together."""
    waiting = Waiting()

    def process() -> int:
        with compiled_once(cache, "model", waiting):
            return inside.wait(HANG_S)

    future = pool.submit(process)
    assert waiting.begun.wait(HANG_S)
    return future


def test_those_that_waited_go_on_together(tmp_path: Path, others: ThreadPoolExecutor) -> None:
    inside = Barrier(3)
    with compiled_once(tmp_path / "cache", "model", asked):
        waiting = [begin(others, tmp_path / "cache", inside) for _ in range(3)]
        assert inside.n_waiting == 0
    assert sorted(future.result(HANG_S) for future in waiting) == [0, 1, 2]


def test_nobody_waits_for_a_program_that_is_known(tmp_path: Path) -> None:
    with compiled_once(tmp_path, "model", asked):
        pass
    with compiled_once(tmp_path, "model", asked), compiled_once(tmp_path, "model", Waiting(end=True)):
        pass


def test_programs_of_two_names_are_compiled_at_once(tmp_path: Path) -> None:
    with compiled_once(tmp_path, "model", asked), compiled_once(tmp_path, "another", Waiting(end=True)):
        pass


def test_where_compiling_fails_one_of_those_that_wait_tries_next(tmp_path: Path, others: ThreadPoolExecutor) -> None:
    class NoMemory(Exception):
        pass

    def compile_in_vain() -> None:
        with compiled_once(tmp_path, "model", asked):
            waiting.append(begin(others, tmp_path, Barrier(1)))
            raise NoMemory

    waiting: list[Future[int]] = []
    with pytest.raises(NoMemory):
        compile_in_vain()
    assert waiting[0].result(HANG_S) == 0
    with compiled_once(tmp_path, "model", asked), compiled_once(tmp_path, "model", Waiting(end=True)):
        pass  # that one has compiled


def test_who_waits_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    with (
        compiled_once(tmp_path, "model", asked),
        pytest.raises(KeyboardInterrupt),
        compiled_once(tmp_path, "model", Waiting(end=True)),
    ):
        pass


def test_a_frozen_process_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PATIENCE_S", 0.0)
    with compiled_once(tmp_path, "model", asked), compiled_once(tmp_path, "model", Waiting(end=True)):
        pass


def test_a_name_is_of_the_program_and_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    first = name_of("module @jit_step")
    assert name_of("module @jit_step") == first != name_of("module @jit_another")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    assert name_of("module @jit_step") != first
