"""The ranks of a PyTorch loop, which together are one learner, and their exchange of facts.

Ranks meet through the store of their process group: unlike a collective it needs no device, and a rank that is missing is
named within the time that the loop waits.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from diloco.errors import IslandError, SettingsError
from diloco.processes.meeting import free_port
from diloco_learner.pytorch.rank_signs import RankSigns

LOOPBACK = "127.0.0.1"
LOOK_S = 0.05  # between two looks for what another rank has said
_joins = itertools.count()  # all ranks join equally often


class TorchRanks:
    """A process's rank in its process group of ``count`` ranks."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        default = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no other way to it
        self._store = distributed.PrefixStore(f"diloco-{next(_joins)}", default)
        self._signs: RankSigns | None = None  # while the ranks join

    @property
    def software(self) -> dict[str, str]:
        """The versions that all ranks have to have alike."""
        return {"torch": torch.__version__}

    def address(self) -> str:
        """Return HOST:PORT at which this rank, the first one, is reached by the others.

        Raises:
            SettingsError: it cannot listen at torch's address of rank 0.
        """
        if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == self.count:
            host = LOOPBACK
        else:
            host = os.environ.get("MASTER_ADDR", LOOPBACK)  # by torch's rule it is the host of rank 0
        try:
            port = free_port(host)
        except OSError as error:
            raise SettingsError(
                f"MASTER_ADDR={host}: rank 0 cannot listen there for the other ranks ({error}): "
                'give diloco.join address="HOST:PORT" of the machine of rank 0'
            ) from None
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @contextmanager
    def joining(self, silent_s: float) -> Iterator[None]:
        """Give signs of life to the other ranks, and take one that gives none for so long as lost."""
        with RankSigns(self._store, self.rank, self.count, silent_s) as self._signs:
            try:
                yield
            finally:
                self._signs = None

    def check(self) -> None:
        """Look for signs of life of all ranks that join.

        Raises:
            IslandError: one was lost.
        """
        if self._signs is not None:
            self._signs.check()

    def exchange(self, stage: str, said: bytes, within_s: float) -> list[bytes]:
        """Say something to all other ranks, and return by rank what each has said.

        Raises:
            IslandError: some have said nothing in time, or one was lost while the ranks join.
        """
        self.tell(stage, said)
        return [self._await(stage, rank, within_s) for rank in range(self.count)]

    def tell(self, stage: str, said: bytes) -> None:
        """Say something to all other ranks, who :meth:`hear` it."""
        self._store.set(f"{stage}/{self.rank}", said)

    def hear(self, stage: str, within_s: float) -> bytes:
        """Return what the first rank has said by :meth:`tell`.

        Raises:
            IslandError: it has said nothing in time.
        """
        return self._await(stage, 0, within_s)

    def _await(self, stage: str, rank: int, within_s: float) -> bytes:
        key = f"{stage}/{rank}"
        try:
            if self._signs is None:
                self._store.wait([key], timedelta(seconds=within_s))
            else:
                self._look_for(key, within_s, self._signs)
        except (distributed.DistError, TimeoutError) as error:
            raise IslandError(
                f"rank {self.rank} of {self.count}: rank {rank} has not come to {stage!r} within {within_s:g} s "
                f"({_first_line(error)}): call diloco.join, and enter it, in all ranks"
            ) from None
        said: bytes = self._store.get(key)
        return said

    def _look_for(self, key: str, within_s: float, signs: RankSigns) -> None:
        over_s = time.monotonic() + within_s
        while not self._store.check([key]):
            signs.check()
            if time.monotonic() >= over_s:
                raise TimeoutError("it has said nothing")
            time.sleep(LOOK_S)


def ranks_of_loop() -> tuple[int, int]:
    """Return this process's rank in the default process group, and how many there are; (0, 1) without a group."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
