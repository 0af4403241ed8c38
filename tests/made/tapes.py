"""Tapes of a learner, and how to draw their events."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from diloco.core.run import tape
from diloco.core.run.tape import Header, TapeEvent

RUN = b"run-iden"
HEADER = Header(RUN, "learner-0")
_FIELD_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**63 - 1),
    bool: st.booleans(),
    bytes: st.binary(min_size=8, max_size=8),
    str: st.text(max_size=20),
    tuple[int, ...]: st.lists(st.integers(0, 4095), max_size=9).map(tuple),
}
ANY_EVENT: st.SearchStrategy[TapeEvent] = st.one_of(
    [st.builds(cls, **{name: _FIELD_VALUES[kind] for name, kind in tape.fields_of(cls)}) for cls in tape.KINDS.values()]
)


def tape_of(*groups: list[TapeEvent]) -> bytes:
    """A tape with a flush after each group."""
    raw = HEADER.pack()
    for group in groups:
        raw += b"".join(tape.blocks(map(tape.encode, group), HEADER.hash, len(raw)))
    return raw
