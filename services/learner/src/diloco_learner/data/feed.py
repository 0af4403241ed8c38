"""The batches that a learner trains on, of the shares of the data that it holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.core.run.leases import RoundRobin, data_of
from diloco.errors import DataError
from diloco.process.observe import Logger
from diloco.settings.run import RunSettings
from diloco_learner.task_api import Batches, next_batch


@dataclass(frozen=True)
class Batch:
    """The ``index``-th batch of a share."""

    share: int
    index: int
    data: Any


class Streams:
    """The batches of shares, each share's in order from wherever it is asked for.

    ``rows``: of each batch these alone.
    """

    def __init__(self, task: Batches, settings: RunSettings, rows: range | None = None) -> None:
        self.task, self.settings = task, settings
        self._given = {} if rows is None else {"rows": rows}
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}  # by share: index of the next batch, batches from there on

    def batch(self, share: int, index: int) -> Any:
        """Return a batch of a share.

        Raises:
            DataError: the share's data cannot be had here.
            SettingsError: a task's batches ended.
        """
        at, batches = self._open.get(share, (-1, iter(())))
        if at != index:
            part, seed = data_of(share, self.settings.learners, self.settings.seed)
            batches = self.task.batches(part, self.settings.learners, seed, index, **self._given)
        data = next_batch(self.task, batches, share, index)
        self._open[share] = (index + 1, batches)
        return data

    def keep(self, shares: Collection[int]) -> None:
        """Close all shares but these."""
        self._open = {share: stream for share, stream in self._open.items() if share in shares}


class BatchFeed(Iterator[Batch]):
    """Batches without end. ``leased`` gives the shares held right now, and the batch that each is to begin at.

    ``rows``: of each batch these alone.

    A share whose data cannot be had here, of several, is left out: it may have come from a learner that failed by it.
    """

    def __init__(
        self,
        task: Batches,
        settings: RunSettings,
        leased: Callable[[], Mapping[int, int]],
        log: Logger,
        rows: range | None = None,
    ) -> None:
        self.leased, self.log = leased, log
        self._streams = Streams(task, settings, rows)
        self._round_robin = RoundRobin()
        self._unfit: set[int] = set()

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            DataError: none of the shares held has data here.
            SettingsError: a task's batches ended.
        """
        leased = self.leased()
        while True:
            share, index = self._round_robin.next({s: first for s, first in leased.items() if s not in self._unfit})
            try:
                data = self._streams.batch(share, index)
            except DataError as error:
                self._unfit.add(share)
                if self._unfit.issuperset(leased):
                    raise
                self.log.warning("share_unfit", share=share, reason=str(error))
                continue
            self._streams.keep({*leased, share})
            return Batch(share, index, data)
