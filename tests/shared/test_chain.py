"""The rules of one fragment's log, each broken once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.made.chains import BODY, GENESIS_CHECK, genesis_chain, marker, member, record, two_versions

from diloco.core.log.chain import NO_ENTRY, Chain
from diloco.core.log.quorum import EPOCH_STEP
from diloco.errors import ChainError
from diloco.wire.entries import Cursor, Keyframe, Record, Repaired, RolledBack
from diloco.wire.process_messages import ChainHead


def test_a_chain_begins_with_genesis() -> None:
    chain = genesis_chain()
    assert (chain.fragment, chain.version, chain.epoch, chain.sequence) == (1, 0, 0, 0)
    assert (chain.head, chain.state_hash) == (GENESIS_CHECK, b"1" * 32)
    assert chain.cursor("ann") == (0, 0)
    assert chain.keyframe_cursors() == []


def test_the_head_moves_with_every_entry() -> None:
    chain = two_versions()
    assert (chain.version, chain.head, chain.sequence, chain.state_hash) == (2, b"2" * 32, 22, b"u" * 32)
    assert (chain.tokens_merged, chain.tokens_lost) == (250, 10)
    assert chain.cursor("ann") == (1, 2)
    assert chain.cursor("bob") == (1, 1)
    assert chain.keyframe_cursors() == [Cursor("ann", 1, 2, 2, 200, 10, 2), Cursor("bob", 1, 1, 1, 50, 0, 1)]


def test_another_process_of_the_learner_gets_all_that_is_known_of_a_log() -> None:
    chain = two_versions()
    chain.ends, chain.closed, chain.rolled_back, chain.epoch_step = {3: 14, 2: 9}, True, RolledBack(1, 2, 3), 5
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(chain.to_head()), type=ChainHead)
    assert Chain.from_head(chain.fragment, head) == chain
    assert {field.name for field in fields(Chain)} == {"fragment", *ChainHead.__struct_fields__}


GOOD = (member("ann", 3, 40, 15), member("bob", 2, 60, 5))  # merged 250 + 100, lost 15 + 5


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"fragment": 0}, "fragment: expected 1, got 0"),
        ({"previous": b"1" * 32}, "hash of the entry before: expected 3232"),
        ({"version": 2}, "version: expected 3, got 2"),
        ({"version": 4}, "version: expected 3, got 4"),
        ({"epoch": 1}, "epoch: expected 0, got 1"),
        ({"members": [GOOD[1], GOOD[0]]}, "members in order, each once"),
        ({"members": [GOOD[0], GOOD[0], GOOD[1]]}, "members in order, each once"),
        ({"tokens_merged": 349}, "merged tokens: expected 350, got 349"),
        ({"tokens_lost": 21}, "lost tokens: expected 20, got 21"),
        ({"body": None}, "a body where it makes a version"),
        ({"members": [], "tokens_merged": 250, "tokens_lost": 10}, "members where it merges"),
        ({"entry": "takeover"}, "version: expected 2, got 3"),
        ({"members": [member("ann", 2, 40, 15), GOOD[1]]}, "offer 2 of ann .* is not newer than the merged"),
        ({"members": [member("ann", 1, 40, 15), GOOD[1]]}, "offer 1 of ann .* is not newer"),
        ({"members": [member("ann", 9, 40, 15, incarnation=0), GOOD[1]]}, r"incarnation 0\) is not newer"),
    ],
)
def test_each_rule_of_a_version(changes: dict[str, Any], rule: str) -> None:
    chain = two_versions()
    good = record(chain, *GOOD, tokens_merged=350, tokens_lost=20)
    chain.check(good)
    before = repr(chain)
    with pytest.raises(ChainError, match=f"^fragment 1.*{rule}"):
        chain.check(replace(good, **changes))
    assert repr(chain) == before


def test_a_new_incarnation_may_number_from_one() -> None:
    chain = two_versions()
    chain.check(record(chain, member("ann", 1, 5, 10, incarnation=2), tokens_merged=255, tokens_lost=10))


def test_a_takeover_raises_the_epoch_and_nothing_else() -> None:
    chain = two_versions()
    takeover = marker(chain, "takeover", epoch=1)
    chain.check(takeover)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"epoch": 0}, "epoch: expected 1, got 0"),
        ({"epoch": 2}, "epoch: expected 1, got 2"),
        ({"epoch": 2**62}, f"epoch: expected 1, got {2**62}"),
        ({"version": 3}, "version: expected 2, got 3"),
        ({"state_hash": b"x" * 32}, "the state before where it makes no version"),
        ({"body": BODY}, "a body where"),
        ({"members": [GOOD[0]], "tokens_merged": 290, "tokens_lost": 15}, "members where"),
        ({"closing": True}, "closing: expected False, got True"),
        ({"tokens_merged": 251}, "merged tokens"),
        ({"tokens_lost": 0}, "lost tokens"),
    ]
    for changes, rule in wrong:
        with pytest.raises(ChainError, match=rule):
            chain.check(replace(takeover, **changes))
    chain.advance(takeover, b"3" * 32, 23)
    assert (chain.version, chain.epoch, chain.head, chain.sequence, chain.closed) == (2, 1, b"3" * 32, 23, False)
    assert chain.cursor("ann") == (1, 2)
    # the deposed owner's version, made before the takeover, follows neither its epoch nor its hash
    with pytest.raises(ChainError, match="epoch: expected 1, got 0"):
        chain.check(record(chain, *GOOD, tokens_merged=350, tokens_lost=20, epoch=0))
    chain.check(record(chain, *GOOD, tokens_merged=350, tokens_lost=20))


def test_in_a_run_with_regions_a_takeover_passes_over_claims_but_leaves_epochs_for_others() -> None:
    chain = two_versions()
    chain.epoch_step = EPOCH_STEP
    takeover = marker(chain, "takeover", epoch=1)
    for epoch in (1, 5, 2**40):
        chain.check(replace(takeover, epoch=epoch))
    for epoch, expected in ((0, 1), (2**40 + 1, 2**40), (2**62, 2**40)):
        with pytest.raises(ChainError, match=f"epoch: expected {expected}, got {epoch}"):
            chain.check(replace(takeover, epoch=epoch))
    chain.advance(replace(takeover, epoch=2**40), b"3" * 32, 23)
    chain.check(marker(chain, "takeover", epoch=2**40 + 1))
    with pytest.raises(ChainError, match=f"epoch: expected {2**40}, got {2**40 + 1}"):
        chain.check(marker(chain, "close", epoch=2**40 + 1))


def test_a_close_ends_the_log_but_for_takeovers() -> None:
    chain = two_versions()
    close = marker(chain, "close")
    with pytest.raises(ChainError, match="closing: expected True, got False"):
        chain.check(replace(close, closing=False))
    chain.check(close)
    chain.advance(close, b"3" * 32, 23)
    assert chain.closed
    assert chain.version == 2
    for after in (record(chain, *GOOD, tokens_merged=350, tokens_lost=20), marker(chain, "close")):
        with pytest.raises(ChainError, match="only takeovers after closing"):
            chain.check(after)
    takeover = marker(chain, "takeover", epoch=1)
    chain.check(takeover)
    chain.advance(takeover, b"4" * 32, 24)
    assert chain.closed  # a takeover does not open it again


def test_a_closing_version_ends_the_log() -> None:
    chain = two_versions()
    last = record(chain, *GOOD, tokens_merged=350, tokens_lost=20, closing=True)
    chain.check(last)
    chain.advance(last, b"3" * 32, 23)
    assert chain.closed
    with pytest.raises(ChainError, match="only takeovers after closing"):
        chain.check(record(chain, member("ann", 4, 1, 15), tokens_merged=351, tokens_lost=20))


def test_a_keyframe_carries_all_that_a_chain_knows() -> None:
    chain = two_versions()
    keyframe = Keyframe(
        chain.fragment,
        chain.version,
        chain.epoch,
        chain.head,
        chain.sequence,
        chain.tokens_merged,
        chain.tokens_lost,
        chain.keyframe_cursors(),
        chain.keyframe_ends(),
        chain.state_hash,
        chain.closed,
        BODY,
    )
    again = Chain.from_keyframe(keyframe)
    assert again == chain
    again.check(record(chain, *GOOD, tokens_merged=350, tokens_lost=20))
    assert Chain.from_keyframe(replace(keyframe, closing=True)).closed
    rolled_back = RolledBack(1, 0, 2)
    assert Chain.from_keyframe(replace(keyframe, rolled_back=rolled_back)).rolled_back == rolled_back


def test_totals_replace_what_a_learner_has_lost_and_add_what_is_merged() -> None:
    chain = two_versions()
    # ann's 10 become 30, cat's 7 are new, bob's 0 stay
    assert chain.totals_with([("ann", 5, 30), ("cat", 1, 7)]) == (256, 37)
    assert chain.totals_with([]) == (250, 10)
    # counted back: a learner may state less than before
    assert chain.totals_with([("ann", 5, 0)]) == (255, 0)


def test_the_log_says_how_far_each_share_of_the_data_was_merged() -> None:
    # ann 0..7 of share 0; bob 0..2 of share 1, which ann's 0..1 does not set back, and 7..8 of share 4
    assert two_versions().keyframe_ends() == [(0, 7), (1, 2), (4, 8)]
    assert genesis_chain().keyframe_ends() == []


def test_no_entry_is_what_stands_before_genesis() -> None:
    assert NO_ENTRY == b"\0" * 32


def rollback(chain: Chain, change: int, to_version: int, **changes: Any) -> Record:
    made = RolledBack(change, to_version, chain.version + 1)
    return record(chain, **({"entry": "rollback", "bits": 32, "rolled_back": made} | changes))


def test_a_rollback_makes_a_version_that_merges_nothing() -> None:
    chain = two_versions()
    back = rollback(chain, 4, 1, state_hash=b"t" * 32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "version: expected 3, got 2"),
        ({"epoch": 1}, "epoch: expected 0, got 1"),
        ({"members": [GOOD[0]], "tokens_merged": 290, "tokens_lost": 15}, "members where it merges"),
        ({"tokens_merged": 150}, "merged tokens: expected 250, got 150"),
        ({"closing": True}, "closing: expected False, got True"),
        ({"body": None}, "a body where"),
        ({"rolled_back": RolledBack(4, 1, 2)}, "version that a rollback makes: expected 3, got 2"),
        ({"rolled_back": RolledBack(4, 2, 3)}, "an earlier version to go back to"),
    ]
    for changes, rule in wrong:
        with pytest.raises(ChainError, match=rule):
            chain.check(replace(back, **changes))
    chain.check(back)
    chain.advance(back, b"3" * 32, 23)
    assert (chain.version, chain.floor, chain.change, chain.state_hash) == (3, 3, 4, b"t" * 32)
    assert (chain.tokens_merged, chain.cursor("ann"), chain.ends) == (250, (1, 2), {0: 7, 1: 2, 4: 8})


def test_a_repair_may_go_back_to_the_newest_version_and_takes_the_ends_of_shares_back() -> None:
    chain = two_versions()
    ends = [(0, 7), (4, 8)]
    fixed = rollback(chain, 4, 2, entry="repair", state_hash=chain.state_hash, repaired=Repaired(9, ends))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rolled_back": RolledBack(4, 3, 3)}, "an earlier version to go back to"),
        ({"repaired": Repaired(9, ends[::-1])}, "shares in order, each once"),
        ({"repaired": Repaired(9, [(0, 8)])}, "ends of shares that are not beyond those before"),
        ({"repaired": Repaired(9, [(7, 1)])}, "ends of shares that are not beyond those before"),
        ({"previous": b"x" * 32}, "hash of the entry before"),
    ]
    for changes, rule in wrong:
        with pytest.raises(ChainError, match=rule):
            chain.check(replace(fixed, **changes))
    assert chain.must_repair(4, 2)
    assert not chain.must_repair(4, 3)
    chain.check(fixed)
    chain.advance(fixed, b"3" * 32, 23)
    assert (chain.version, chain.floor, chain.change, chain.ends) == (3, 3, 4, {0: 7, 4: 8})
    assert (chain.tokens_merged, chain.cursor("ann")) == (250, (1, 2))
    assert not chain.must_repair(4, 2)
    closed = two_versions()
    closed.closed = True
    assert not closed.must_repair(4, 2)
    with pytest.raises(ChainError, match="only takeovers after closing"):
        closed.check(fixed)


def test_each_change_makes_a_log_go_back_once() -> None:
    chain = two_versions()
    assert chain.must_go_back(4, 1)
    assert not chain.must_go_back(4, 2)  # it is there
    back = rollback(chain, 4, 1)
    chain.advance(back, b"3" * 32, 23)
    assert not chain.must_go_back(4, 1)
    for change in (3, 4):
        with pytest.raises(ChainError, match="a change after those that were carried out"):
            chain.check(rollback(chain, change, 1))
    assert chain.must_go_back(5, 0)
    chain.check(rollback(chain, 5, 0))
    chain.closed = True
    assert not chain.must_go_back(5, 0)


def test_what_was_made_before_a_rollback_is_merged_no_more() -> None:
    chain = two_versions()
    chain.advance(rollback(chain, 4, 1), b"3" * 32, 23)
    for base, follows in ((2, False), (3, True)):
        late = replace(member("bob", 2, 60, 5), base_version=base)
        entry = record(chain, late, tokens_merged=310, tokens_lost=15)
        if follows:
            chain.check(entry)
        else:
            with pytest.raises(
                ChainError, match="offer 2 of bob has base version 2, which precedes the rollback that made ver"
            ):
                chain.check(entry)
