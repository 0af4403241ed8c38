"""Assembly of bodies from a stream of parts and heads."""

from __future__ import annotations

from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES, Body


class ChunkAssembler:
    """Parts of bodies whose heads have not come yet, by source (a fragment, or a fragment and a learner).

    A source has one attempt at a time: a part of another attempt replaces it, so that orphans of an interrupted attempt go. At
    most ``limit_bytes`` a source are kept, since more cannot belong to an acceptable body.
    """

    def __init__(self) -> None:
        self._parts: dict[object, tuple[bytes, dict[int, bytes]]] = {}

    def add(self, source: object, index: int, data: bytes, limit_bytes: int) -> bool:
        """Keep a part; return False if it cannot be one."""
        attempt, content = data[:ATTEMPT_BYTES], data[ATTEMPT_BYTES:]
        if len(data) <= ATTEMPT_BYTES or len(data) > PART_BYTES or index * (PART_BYTES - ATTEMPT_BYTES) >= limit_bytes:
            return False
        known = self._parts.get(source)
        if known is None or known[0] != attempt:
            known = self._parts[source] = (attempt, {})
        known[1][index] = content
        return True

    def take(self, source: object, body: Body) -> list[bytes] | None:
        """Return the parts that ``body`` describes, or None if some are missing. Forget all parts of the source."""
        attempt, parts = self._parts.pop(source, (b"", {}))
        if body.parts == 0:
            return []
        if attempt != body.attempt or any(index not in parts for index in range(body.parts)):
            return None
        return [parts[index] for index in range(body.parts)]


def part_index(subject: str) -> int | None:
    """Return the index at the end of a part's subject, or None if it has none."""
    last = subject.rsplit(".", 1)[-1]
    return int(last) if last.isdecimal() and len(last) < 9 else None
