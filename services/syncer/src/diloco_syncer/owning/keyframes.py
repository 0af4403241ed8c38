"""Store a fragment's keyframes in one region's log.

Which are due is :mod:`diloco.core.log.retention`'s to say. The owner of a fragment stores them in its own region, and one
syncer that follows the fragment in each other region. The coordinator drops what stands before those that stay.
"""

from __future__ import annotations

from collections.abc import Awaitable

from diloco.core.log import fold
from diloco.core.log.retention import keyframe_due
from diloco.log.follower import LogCopy
from diloco.transport import Fence
from diloco_syncer.context import Context
from diloco_syncer.owning.fence import append_behind


class Keyframes:
    """The keyframes of one fragment. ``copy`` is the fragment as this syncer has it; no thread may be folding it."""

    def __init__(self, context: Context, copy: LogCopy) -> None:
        self.context, self.copy = context, copy
        self.index = copy.replica.chain.fragment

    async def keep(self) -> None:
        """Store a keyframe if one is due, behind the copy's fence.

        Raises:
            FenceError: another entry is the last one.
            StorageFullError: there is no room for it.
        """
        if self._is_due():
            await self.store()

    async def store(self) -> None:
        """Store a keyframe of the fragment as it is now, due or not; raises as :meth:`keep` does."""
        copy, store = self.copy, self.context.store

        def write(fence: int) -> Awaitable[int]:
            behind = Fence(store.subjects.record(self.index), fence)
            return store.writer.append_keyframe(copy.replica, copy.residual, behind)

        copy.keyframe_sequence = await append_behind(store, copy, write, self.context.log)
        copy.keyframe_version, copy.log_bytes = copy.replica.chain.version, 0
        version = copy.keyframe_version
        self.context.log.debug("keyframe_stored", fragment=self.index, version=version, bytes=self._size_bytes)

    def _is_due(self) -> bool:
        copy, settings = self.copy, self.context.run.in_force.log
        return keyframe_due(settings, copy.log_bytes, self._size_bytes, copy.keyframe_sequence, copy.refused)

    @property
    def _size_bytes(self) -> int:
        """Size of a keyframe's content."""
        return fold.keyframe_bytes(self.copy.replica.theta.size, self.copy.replica.optimizer.moments)
