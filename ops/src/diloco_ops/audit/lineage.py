"""Which entries of a log lead to its newest one, determined from their heads.

A wrong entry (:class:`diloco.errors.WrongEntryError`) keeps all rules but the hash of its state, which readers that do not
fold cannot see. But the owner that comes next has folded: its takeover names the entry before the wrong one. So of two entries
that follow the same one, the one counts to which the newest entry leads back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from diloco.core.log.chain import Chain
from diloco.errors import ChainError
from diloco.wire.entries import Record


class Headed(Protocol):
    """An entry without its body."""

    @property
    def record(self) -> Record: ...

    @property
    def entry_hash(self) -> bytes: ...

    @property
    def sequence(self) -> int: ...


H = TypeVar("H", bound=Headed)


def newest_line(chain: Chain, heads: Sequence[H]) -> tuple[Chain, list[H]]:
    """Return the chain after the newest entry that leads back to ``chain`` by the rules, and the entries up to it, in order.

    ``heads`` are those stored after the chain's head, as they are stored.
    """
    known = {head.entry_hash: head for head in heads}
    unfit: set[bytes] = set()  # they follow no entry, or break a rule
    for newest in reversed(heads):
        path, at = list[H](), newest.entry_hash
        while at != chain.head and at in known and at not in unfit:
            path.append(known[at])
            at = known[at].record.previous
        if at != chain.head:
            unfit.update(head.entry_hash for head in path)
            continue
        after = replace(chain, cursors=dict(chain.cursors), ends=dict(chain.ends))
        path.reverse()
        for head in path:
            try:
                after.check(head.record)
            except ChainError:
                unfit.add(head.entry_hash)
                break
            after.advance(head.record, head.entry_hash, head.sequence)
        else:
            return after, path
    return chain, []
