"""Signs of life between the ranks of a PyTorch loop while they join, before they have links to each other."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from torch import distributed

from diloco.errors import IslandError

SIGN_S = 0.5  # between two signs of a rank: twenty within the default of `processes.silent_s`
JOINED = b"joined"  # instead of a sign, of a rank that gives no further ones


class RankSigns:
    """A context in which this rank gives signs of life to the others, and looks for theirs.

    The signs are values of the process group's store, set by a thread. A rank is lost if it has given a sign and then none for
    ``silent_s``. A rank that leaves the context without an error says so, and no further sign is expected of it.
    """

    def __init__(self, store: distributed.Store, rank: int, count: int, silent_s: float) -> None:
        self.rank, self.count, self.silent_s = rank, count, silent_s
        self._store, self._ended = store, threading.Event()
        self._last: dict[int, tuple[bytes, float]] = {}  # of the others: the last sign, and when it was first seen
        self._thread = threading.Thread(target=self._give, name="rank-signs", daemon=True)

    def __enter__(self) -> RankSigns:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(self.silent_s)  # a store that cannot be reached may hold it up
        if error is None:
            self._set(JOINED)

    def check(self) -> None:
        """Look for the signs of the other ranks.

        Raises:
            IslandError: one of them is lost, or the store is.
        """
        for rank in range(self.count):
            if rank != self.rank and self._silence_s(rank) > self.silent_s:
                raise IslandError(
                    f"rank {self.rank} of {self.count}: rank {rank} was lost while all ranks joined: no sign of life from it "
                    f"for {self.silent_s:g} s: read its log, and start all ranks again"
                )

    def _silence_s(self, rank: int) -> float:
        try:
            sign = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else JOINED
        except distributed.DistError as error:
            raise IslandError(
                f"rank {self.rank} of {self.count}: the store of the process group is lost ({error}), and with it the process "
                "that serves it: read the log of rank 0, and start all ranks again"
            ) from None
        now_s = time.monotonic()
        last, seen_s = self._last.get(rank, (JOINED, now_s))
        if sign == JOINED or sign != last:
            self._last[rank] = sign, now_s
            return 0.0
        return now_s - seen_s

    def _give(self) -> None:
        number = 0
        while self._set(str(number).encode()) and not self._ended.wait(SIGN_S):
            number += 1

    def _set(self, sign: bytes) -> bool:
        """Give a sign, and return whether the store is there to take it; :meth:`check` says so if it is not."""
        try:
            self._store.set(_key(self.rank), sign)
        except distributed.DistError:
            return False
        return True


def _key(rank: int) -> str:
    return f"signs/{rank}"
