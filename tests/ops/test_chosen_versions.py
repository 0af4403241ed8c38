"""``--version 10%``: the versions at the moment when a tenth of the merged tokens had been merged."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
from tests.made.chains import genesis_chain, marker, member, record

from diloco.core.log.chain import Chain
from diloco.errors import RunError
from diloco.wire.entries import Record
from diloco_ops.weights.versions import ChosenVersions, at_share, stated, version_of

SIZES = [300, 100]


@dataclass(frozen=True)
class Stored:
    record: Record
    entry_hash: bytes
    sequence: int


class Log:
    """Two fragments' entries in one stream."""

    def __init__(self) -> None:
        self.chains: list[Chain] = [replace(genesis_chain(), fragment=0, cursors={}, ends={}), genesis_chain()]
        self.heads: list[Stored] = []

    def version(self, fragment: int, tokens: int) -> None:
        chain = self.chains[fragment]
        merged, lost = chain.totals_with([("ann", tokens, 0)])
        self._add(chain, record(chain, member("ann", chain.version + 1, tokens), tokens_merged=merged, tokens_lost=lost))

    def takeover(self, fragment: int) -> None:
        chain = self.chains[fragment]
        self._add(chain, marker(chain, "takeover", epoch=chain.epoch + 1))

    def _add(self, chain: Chain, made: Record) -> None:
        sequence, check = 10 + len(self.heads), bytes([len(self.heads)]) * 32
        self.heads.append(Stored(made, check, sequence))
        chain.check(made)
        chain.advance(made, check, sequence)

    def at(self, percent: int) -> ChosenVersions:
        return at_share(self.chains, self.heads, SIZES, percent)


@pytest.fixture
def log() -> Log:
    """The first versions have few tokens, since one learner joined first. Each fragment has 1000 tokens in all."""
    made = Log()
    made.takeover(0)
    for tokens in (10, 10, 180, 400, 400):
        made.version(0, tokens)
        made.version(1, tokens)
    made.takeover(1)
    return made


@pytest.mark.parametrize(
    ("percent", "versions", "merged"),
    [
        (0, [0, 0], 0),
        (1, [1, 1], 10),  # the larger fragment's first version is 0.75 % of the whole
        (10, [3, 2], 155),
        (20, [3, 3], 200),
        (60, [4, 4], 600),
        (100, [5, 5], 1000),
    ],
)
def test_a_share_is_of_tokens_and_not_of_versions(log: Log, percent: int, versions: list[int], merged: int) -> None:
    chosen = log.at(percent)
    assert (chosen.versions, chosen.tokens) == (versions, (merged, 1000))


def test_the_sentence_says_which_tokens_and_versions_it_is(log: Log) -> None:
    assert log.at(10).sentence == "versions 2 to 3 of 2 fragments, after 155 of 1.00k merged tokens (15.5 %)"
    none = log.at(0).sentence
    assert none is not None
    assert none.endswith("of 2 fragments, after 0 of 1.00k merged tokens (0.0 %): the model as it was initialised")
    assert (ChosenVersions(3).sentence, ChosenVersions(3).after, ChosenVersions(None).sentence) == (None, "", None)


def test_a_log_that_begins_later_serves_what_it_has(log: Log) -> None:
    kept = log.heads[5:]  # what made 20 tokens of each fragment is gone
    assert at_share(log.chains, kept, SIZES, 10).versions == [3, 2]
    said = "--version 1%: the log begins after 2.0 % of the merged tokens; how far back it goes is set by log.keep_keyframes"
    with pytest.raises(RunError, match=re.escape(said)):
        at_share(log.chains, kept, SIZES, 1)


def test_an_entry_that_leads_nowhere_does_not_count(log: Log) -> None:
    wrong = log.heads[3].record
    assert at_share(log.chains, [*log.heads, Stored(wrong, b"x" * 32, 99)], SIZES, 60) == log.at(60)


def test_a_run_without_a_version() -> None:
    assert Log().at(50) == ChosenVersions([0, 0], (0, 0))


def test_versions_by_fragment() -> None:
    assert [version_of(versions, 1) for versions in (None, 7, [3, 2])] == [None, 7, 2]
    assert [stated(versions) for versions in (None, 7, [3, 2], [4, 4])] == ["latest", "7", "3,2", "4"]
