"""A fragment's log, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.made.log_entries import record_of

from diloco.core.log.chain import Chain
from diloco.wire.body import Body
from diloco.wire.entries import Genesis, Record
from diloco.wire.fields import Range
from diloco.wire.offers import MergeMember

GENESIS_CHECK = b"g" * 32
BODY = Body(size_bytes=3, content_hash=b"c" * 32, parts=0, attempt=b"attempt.")


def member(
    learner: str, number: int, tokens: int, lost_tokens: int = 0, incarnation: int = 1, data: Sequence[Range] = ()
) -> MergeMember:
    return MergeMember(learner, incarnation, number, 1, 0, 1, tokens, lost_tokens, 1.0, list(data))


def genesis_chain() -> Chain:
    genesis = Genesis("founder", b"s" * 32, b"m" * 32, [b"0" * 32, b"1" * 32], 0.0)
    return Chain.from_genesis(1, genesis, GENESIS_CHECK)


def record(chain: Chain, *members: MergeMember, **changes: Any) -> Record:
    """The version that follows ``chain``; totals are worked out by the test, in ``changes``."""
    values: dict[str, Any] = {
        "fragment": chain.fragment,
        "epoch": chain.epoch,
        "previous": chain.head,
        "tokens_merged": chain.tokens_merged,
        "tokens_lost": chain.tokens_lost,
        "state_hash": b"t" * 32,
        "body": BODY,
    }
    return record_of(chain.version + 1, *members, **(values | changes))


def marker(chain: Chain, entry: str, **changes: Any) -> Record:
    changes = {"version": chain.version, "body": None, "closing": entry == "close", "state_hash": chain.state_hash} | changes
    return record(chain, entry=entry, **changes)


def two_versions() -> Chain:
    """ann's offers 1 and 2 of 100 tokens each, bob's offer 1 of 50; ann has lost 10."""
    chain = genesis_chain()
    first = record(
        chain,
        member("ann", 1, 100, 10, data=[(0, 0, 4)]),
        member("bob", 1, 50, data=[(1, 0, 2), (4, 7, 1)]),
        tokens_merged=150,
        tokens_lost=10,
    )
    chain.check(first)
    chain.advance(first, b"1" * 32, 21)
    second = record(
        chain, member("ann", 2, 100, 10, data=[(0, 4, 3), (1, 0, 1)]), tokens_merged=250, tokens_lost=10, state_hash=b"u" * 32
    )
    chain.check(second)
    chain.advance(second, b"2" * 32, 22)
    return chain
