"""Entries that lead to a log's newest one, by their heads alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.made.chains import marker, member, record, two_versions

from diloco.core.log.chain import Chain
from diloco.wire.entries import Record
from diloco_ops.audit.lineage import newest_line


@dataclass(frozen=True)
class Stored:
    record: Record
    entry_hash: bytes
    sequence: int


class Branch:
    """A line of entries; ``heads`` is the stream that several of them are stored in."""

    def __init__(self, chain: Chain, heads: list[Stored]) -> None:
        self.chain, self.heads = replace(chain, cursors=dict(chain.cursors), ends=dict(chain.ends)), heads

    def branch(self) -> Branch:
        return Branch(self.chain, self.heads)

    def then(self, made: Record) -> Branch:
        check = bytes([len(self.heads)]) * 32
        self.heads.append(Stored(made, check, 100 + len(self.heads)))
        self.chain.check(made)
        self.chain.advance(made, check, 100 + len(self.heads) - 1)
        return self

    def version(self, number: int) -> Branch:
        merged, lost = self.chain.totals_with([("ann", 10, 10)])
        return self.then(record(self.chain, member("ann", number, 10, 10), tokens_merged=merged, tokens_lost=lost))

    def takeover(self) -> Branch:
        return self.then(marker(self.chain, "takeover", epoch=self.chain.epoch + 1))


def test_of_two_branches_the_one_of_the_newest_entry_counts() -> None:
    chain = two_versions()
    right = Branch(chain, []).takeover().version(3)
    wrong = right.branch().version(4)
    wrong.version(5)
    assert newest_line(chain, right.heads)[0] == wrong.chain  # the fragment is not taken over yet
    right.takeover()
    after, path = newest_line(chain, right.heads)
    assert (after, [head.entry_hash[0] for head in path]) == (right.chain, [0, 1, 4])
    right.version(4).version(5)
    assert newest_line(chain, right.heads)[0] == right.chain
    assert chain == two_versions()


def test_what_follows_nothing_or_breaks_a_rule_leads_nowhere() -> None:
    chain = two_versions()
    right = Branch(chain, []).takeover().version(3)
    bad = record(right.chain, member("ann", 3, 10, 10), tokens_merged=270, tokens_lost=10)  # offer 3 once more
    for made in (bad, replace_previous(bad, b"x" * 32), replace_previous(bad, b"y" * 32)):
        right.heads.append(Stored(made, bytes([len(right.heads)]) * 32, 200 + len(right.heads)))
    follows_bad = replace_previous(bad, right.heads[2].entry_hash)
    right.heads.append(Stored(follows_bad, b"f" * 32, 300))
    assert newest_line(chain, right.heads)[0] == right.chain
    assert newest_line(chain, []) == (chain, [])
    assert newest_line(chain, right.heads[2:]) == (chain, [])


def replace_previous(made: Record, previous: bytes) -> Record:
    return Record(**{name: getattr(made, name) for name in made.__struct_fields__} | {"previous": previous})
