"""Samples of a torch dataset are dealt by the run: each share has its own, and begins at any batch."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from tests.pace import DEADLINE_S

from diloco.errors import DataError, SettingsError
from diloco.testing import VirtualRun

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from tests.learner.loader_workers import Numbers  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from diloco.integrations.torch_data import RunDataset, batches_of  # noqa: E402


def drawn(batches: int, share: int, *, shares: int = 3, seed: int = 0, start: int = 0, size: int = 2, **loader: Any) -> Any:
    make = batches_of(Numbers(), size, **loader)
    return [batch.tolist() for batch in itertools.islice(make(share, shares, seed, start), batches)]


def test_shares_have_all_samples_once_an_epoch() -> None:
    own = {0: [0, 3, 6, 9], 1: [1, 4, 7], 2: [2, 5, 8]}
    for share, samples in own.items():
        epochs = list(itertools.chain(*drawn(len(samples), share)))  # two epochs of it, in batches of two
        assert sorted(epochs[: len(samples)]) == sorted(epochs[len(samples) :]) == samples
    assert drawn(20, 0) != drawn(20, 0, seed=1)
    assert len({tuple(map(tuple, drawn(2, 0, start=2 * epoch))) for epoch in range(8)}) > 1, "epochs have orders of their own"


@pytest.mark.parametrize("start", [1, 3, 7, 101])
def test_a_share_begins_at_any_batch(start: int) -> None:
    assert drawn(4, 1, start=start) == drawn(start + 4, 1)[start:]


@pytest.mark.tool
def test_workers_give_the_same_batches_in_the_same_order_and_may_not_read_the_run_s() -> None:
    command = [sys.executable, "-m", "tests.learner.loader_workers"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["batches"] == drawn(6, 2)
    assert "RunDataset: the loader has workers: give it num_workers=0" in found["refused"]


def test_what_cannot_be_dealt_is_refused() -> None:
    class Stream(IterableDataset[int]):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(range(10))

    with pytest.raises(SettingsError, match=r"batches_of: Stream has no length .* write make\(share, shares, seed, start\)"):
        batches_of(Stream(), 2)
    with pytest.raises(SettingsError, match=r"batches_of: shuffle is given: expected .* whose order is the run's"):
        batches_of(Numbers(), 2, shuffle=True)
    with pytest.raises(SettingsError, match="batches_of: batch_size = 0: expected at least 1 sample a batch"):
        batches_of(Numbers(), 0)
    with pytest.raises(DataError, match="share 10 of 11 has none of the 10 samples: create the run with fewer learners"):
        drawn(1, 10, shares=11)


def test_a_loader_over_the_run_s_batches_books_each_on_its_step() -> None:
    seen, ahead = list[list[int]](), list[bool]()

    def loop(run: Any) -> None:
        loader = iter(DataLoader(RunDataset(run, batches_of(Numbers(), 2)), batch_size=None))
        following = next(loader)
        for _ in range(12):
            batch, following = following, next(loader)  # as accelerate does
            seen.append(batch.tolist())
            run.step(run.params, loss=1.0)
        next(loader)
        with pytest.raises(SettingsError, match="no step was booked for the last batch"):
            next(loader)
        ahead.append(True)

    with VirtualRun({"tokens": 4096, "learners": 1}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": torch.zeros(8)}, tokens=16)
        virtual.advance(until=lambda: bool(ahead))
        assert virtual._member("ann").heartbeat().trained == [(0, 0, 12)], "the batch that was fetched ahead is not booked"
        make = batches_of(Numbers(), 2)
        created = virtual.settings
        assert seen == [batch.tolist() for batch in itertools.islice(make(0, 1, created.seed, 0), 12)]
