"""The numbers of the newest whole checkpoints of a run: the bucket's key ``whole_checkpoint``.

``diloco checkpoint`` writes it, with an operator's right, once a checkpoint has the states of all its learners. Learners read
it, and drop their states of older checkpoints. Members of earlier versions do not know the key.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from diloco.errors import FenceError
from diloco.transport import Bucket
from diloco.wire.plain import decoded

KEY = "whole_checkpoint"

Checkpointed = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class WholeCheckpoints(msgspec.Struct, frozen=True):
    """Numbers of markers, as JSON, to which later versions may add."""

    newest: Checkpointed
    before: Checkpointed = 0  # the whole one before it; 0: there is none

    def then(self, number: int) -> WholeCheckpoints:
        """Return the numbers when this one is whole too."""
        newest, before, *_ = *sorted({self.newest, self.before, number}, reverse=True), 0
        return WholeCheckpoints(newest, before)


_DECODER = msgspec.json.Decoder(WholeCheckpoints)


async def read_whole(registry: Bucket) -> WholeCheckpoints | None:
    """Read the key; None: it is not there, or damaged, which is no reason to drop anything."""
    stored = await registry.get(KEY)
    return None if stored is None else decoded(stored[0], _DECODER)


async def note_whole(registry: Bucket, number: int) -> None:
    """Note that the checkpoint of this number is whole."""
    while True:
        stored = await registry.get(KEY)
        known = (None if stored is None else decoded(stored[0], _DECODER)) or WholeCheckpoints(0)
        value = msgspec.json.encode(known.then(number))
        try:
            if stored is None:
                await registry.create(KEY, value)
            else:
                await registry.update(KEY, value, stored[1])
            return
        except FenceError:
            continue  # another operator has noted one meanwhile
