"""Datasets of ``torch.utils.data`` whose samples the run deals to its learners.

:func:`batches_of` turns a dataset into the ``make`` of ``run.batches``: batches of any share, from any position. The run keeps
the positions, because learners report how far they are in their shares. No state of a loader has to be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from diloco.errors import DataError, SettingsError

Make = Callable[[int, int, int, int], Iterator[Any]]  # share, shares, seed, start


class ShareSampler(Sampler[list[int]]):
    """The samples of one share as batches of indices, without end. Each epoch has its own order.

    Share ``s`` of ``n`` has the samples ``s``, ``s + n``, ``s + 2 n`` and so on. The k-th batch depends only on share, seed and
    k. Iteration begins with the ``start``-th batch.

    Raises:
        DataError: the share has no sample.
    """

    def __init__(self, samples: int, batch_size: int, *, share: int, shares: int, seed: int, start: int) -> None:
        self._own = np.arange(share, samples, shares)
        self._batch_size, self._seed, self._start = batch_size, (seed, share), start
        if not len(self._own):
            raise DataError(
                f"batches_of: share {share} of {shares} has none of the {samples} samples: create the run with fewer learners"
            )

    def __iter__(self) -> Iterator[list[int]]:
        own, first = len(self._own), self._start * self._batch_size
        epoch, order = -1, self._own
        while True:
            batch = []
            for sample in range(first, first + self._batch_size):
                if sample // own != epoch:
                    epoch = sample // own
                    order = self._own[np.random.default_rng((*self._seed, epoch)).permutation(own)]
                batch.append(int(order[sample % own]))
            yield batch
            first += self._batch_size


def batches_of(dataset: Dataset[Any], batch_size: int, **loader: Any) -> Make:
    """Return the ``make`` of ``run.batches``: batches of a dataset's samples.

    Args:
        dataset: a dataset with a length and samples by index; the same in all learners.
        batch_size: number of samples in a batch.
        loader: further arguments of ``DataLoader``, such as ``num_workers`` and ``collate_fn``.

    Raises:
        SettingsError: the dataset has no length, or an argument sets the order of samples.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise SettingsError(
            f"batches_of: {type(dataset).__name__} has no length and no samples by index: write make(share, shares, seed, "
            "start) that begins its stream at a batch"
        )
    taken = loader.keys() & {"batch_sampler", "sampler", "shuffle", "drop_last"}
    if taken or batch_size < 1:
        what = f"{min(taken)} is given" if taken else f"batch_size = {batch_size}"
        raise SettingsError(f"batches_of: {what}: expected at least 1 sample a batch, whose order is the run's")
    samples = len(dataset)

    def make(share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        sampler = ShareSampler(samples, batch_size, share=share, shares=shares, seed=seed, start=start)
        return iter(DataLoader(dataset, batch_sampler=sampler, **loader))

    return make


class RunDataset(IterableDataset[Any]):
    """The batches of ``run.batches`` as a dataset, for code that needs a loader: ``DataLoader(dataset, batch_size=None)``.

    The loader may fetch one batch ahead of the steps. It must not have workers, because shares change in this process. Workers
    of :func:`batches_of` load the samples.

    Args:
        run: the run of a loop of one process. Iterate the dataset inside its ``with`` statement.
        make: as for ``run.batches``.
    """

    def __init__(self, run: Any, make: Make) -> None:
        self.run, self.make = run, make

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the run is over.

        Raises:
            SettingsError: a worker iterates it.
        """
        if get_worker_info() is not None:
            raise SettingsError("RunDataset: the loader has workers: give it num_workers=0, and batches_of(num_workers=...)")
        yield from self.run.batches(self.make, read_ahead=True)
