"""Assembly of bodies from a stream of parts and heads."""

from __future__ import annotations

from diloco.wire.body import ATTEMPT_BYTES, PART_BYTES, Body, is_part


class ChunkAssembler:
    """Parts of bodies whose heads have not come yet, by source (a fragment, or a fragment and a learner).

    A source has one attempt at a time: a part of another attempt replaces it, so that orphans of an interrupted attempt go. At
    most ``limit_bytes`` a source are kept, since more cannot belong to an acceptable body; and ``most_bytes`` of all sources
    together: where there would be more, the one to which nothing has come for longest loses its parts.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes, self.kept_bytes = most_bytes, 0
        self._parts: dict[object, tuple[bytes, dict[int, bytes]]] = {}  # the source that got one last is last

    def add(self, source: object, index: int, data: bytes, limit_bytes: int) -> bool:
        """Keep a part; return False if it cannot be one."""
        attempt, content = data[:ATTEMPT_BYTES], data[ATTEMPT_BYTES:]
        if not is_part(data, attempt) or index * (PART_BYTES - ATTEMPT_BYTES) >= limit_bytes:
            return False
        known, parts = self._parts.pop(source, (attempt, {}))
        if known != attempt:
            self.kept_bytes -= _size(parts)
            parts = {}
        self.kept_bytes += len(content) - len(parts.get(index, b""))
        parts[index] = content
        self._parts[source] = attempt, parts
        while self.most_bytes is not None and self.kept_bytes > self.most_bytes:
            self._pop(next(iter(self._parts)))
        return True

    def take(self, source: object, body: Body) -> list[bytes] | None:
        """Return the parts that ``body`` describes, or None if some are missing. Forget all parts of the source."""
        attempt, parts = self._pop(source)
        if body.parts == 0:
            return []
        if attempt != body.attempt or any(index not in parts for index in range(body.parts)):
            return None
        return [parts[index] for index in range(body.parts)]

    def _pop(self, source: object) -> tuple[bytes, dict[int, bytes]]:
        attempt, parts = self._parts.pop(source, (b"", {}))
        self.kept_bytes -= _size(parts)
        return attempt, parts


def _size(parts: dict[int, bytes]) -> int:
    return sum(map(len, parts.values()))


def part_index(subject: str) -> int | None:
    """Return the index at the end of a part's subject, or None if it has none."""
    last = subject.rsplit(".", 1)[-1]
    return int(last) if last.isdecimal() and len(last) < 9 else None
