"""``diloco verify``: a run checked from outside, by what it stored alone; no service is asked for anything.

The log is folded again from the oldest state that it still holds. What is compared with what:

* every entry with the one before, and its hash with the state that folding it gives;
* every keyframe with the fold at its entry;
* every merge with the offers that it is of, where the run keeps them (``log.archive``);
* every merged offer with the tape of the learner that made it;
* the data that were merged with the data that the tapes say were trained;
* the report's sums with the log's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from diloco import membership, tape
from diloco.core import merging
from diloco.core import tape as events
from diloco.core.chain import Chain
from diloco.core.changes import in_force
from diloco.core.fold import Replica
from diloco.core.ledger import Ledger
from diloco.core.round import Held
from diloco.core.tape import Life
from diloco.errors import ChainError, HashError, MessageError, RunError, SettingsError
from diloco.log import Entry, Loaded
from diloco.outside import Outside, opened
from diloco.wire.messages import Combined, Member, Offer, Record

Vector = NDArray[np.float32]
State = Literal["holds", "fails", "unchecked"]
MAX_NAMED = 5  # of things that are wrong in the same way
COLOURS = {"holds": "green", "fails": "bold red", "unchecked": "yellow"}


@dataclass(frozen=True)
class Check:
    """One property of the run: whether it holds, and what was looked at, or what is wrong."""

    name: str
    state: State
    found: str


@dataclass(frozen=True)
class Verdict:
    """What was checked. ``versions`` are those that were folded again, over all fragments."""

    run: str
    live: bool
    versions: int
    checks: list[Check]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong. What could not be checked is not wrong."""
        return not any(check.state == "fails" for check in self.checks)


@dataclass
class FragmentLog:
    """What was read of one fragment's log."""

    index: int
    first_version: int = 0  # that the fold began with
    chain: Chain | None = None
    versions: int = 0
    keyframes: int = 0
    members: list[tuple[int, Member]] = field(default_factory=list)  # version, member
    passed_over: list[str] = field(default_factory=list)  # no entries of this log, for every reader alike
    wrong: list[str] = field(default_factory=list)
    wrong_keyframes: list[str] = field(default_factory=list)


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory; the run may be going on.")],
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Check a run's log, hashes and accounts from outside. Exit code 1 if anything is wrong."""
    verdict = asyncio.run(check(directory))
    if json_:
        print(json.dumps(asdict(verdict) | {"holds": verdict.holds}))
    else:
        _show(verdict)
    return 0 if verdict.holds else 1


async def check(path: Path) -> Verdict:
    """Verify the run of a directory.

    Raises:
        DilocoError: there is nothing to verify: no run, or none that has begun, or its log cannot be reached.
    """
    async with opened(path) as outside:
        # the log first: what is merged is on its learner's tape before
        ledger = Ledger(len(outside.map.fragments))
        enter: Callable[[Entry], None] = lambda entry: ledger.merge(entry.record)  # noqa: E731
        archived = outside.run.settings.log.archive
        merges = [_Remade(outside, fragment.index) if archived else None for fragment in outside.map.fragments]
        logs = [await read(outside, index, enter, again) for index, again in enumerate(merges)]
        tapes, problems = tape.load_all(path, outside.run.identity)
        changes = await _changes(outside)
    lives, unreadable = _lives(tapes)
    checks = [
        _log(logs, outside.live),
        changes,
        _keyframes(logs),
        _merges(merges),
        _tapes(tapes, problems + unreadable),
        _offers(logs, lives),
        _data(logs, lives, ledger),
        _report(outside, logs),
    ]
    return Verdict(outside.run.name, outside.live, sum(log.versions for log in logs), checks)


async def read(
    outside: Outside,
    index: int,
    folded: Callable[[Entry], None] = lambda entry: None,
    merges: _Remade | None = None,
) -> FragmentLog:
    """Fold a fragment's log from the oldest state there is; ``folded`` is told every entry that follows, ``merges`` before."""
    found, replica = FragmentLog(index), None
    stop = await outside.log.end_sequence(index)
    keyframes = outside.log.keyframes(
        index, lambda sequence, error: found.wrong_keyframes.append(f"message {sequence}: {error}")
    )
    keyframe = await anext(keyframes, None)
    try:
        if stop:
            entries = outside.log.follow([index], 1, lambda _, error: found.passed_over.append(str(error)), stop)
            async for entry in entries:
                if replica is None:
                    while keyframe is not None and not _reaches(keyframe, entry):
                        keyframe = await anext(keyframes, None)
                    replica = await _beginning(outside, entry, keyframe)
                    found.first_version = replica.chain.version
                    if merges is not None and keyframe is not None and found.first_version:
                        merges.begin(keyframe)
                if entry.sequence > replica.chain.sequence:
                    if merges is not None:
                        await merges.redo(replica, entry)
                    _fold(found, replica, entry, folded)
                while keyframe is not None and keyframe.replica.chain.sequence <= replica.chain.sequence:
                    if _compare(found, replica, keyframe) and merges is not None:
                        merges.follow(keyframe)
                    keyframe = await anext(keyframes, None)
        if replica is None:
            replica = (await outside.log.load_first(index, outside.genesis, outside.genesis_check)).replica
    except (HashError, MessageError, RunError) as error:
        found.wrong.append(str(error))
    else:
        if keyframe is not None:
            found.wrong_keyframes.append(f"one of version {keyframe.replica.chain.version} stands after no entry of the log")
    found.chain = replica.chain if replica else None
    return found


def _reaches(keyframe: Loaded, first: Entry) -> bool:
    """Whether the entries that are stored go on where a keyframe stands."""
    chain = keyframe.replica.chain
    return chain.sequence >= first.sequence or chain.head == first.record.previous


async def _beginning(outside: Outside, first: Entry, keyframe: Loaded | None) -> Replica:
    """The state before the first entry that is stored, or the oldest one after it."""
    if first.record.previous == outside.genesis_check:
        return (await outside.log.load_first(first.record.fragment, outside.genesis, outside.genesis_check)).replica
    if keyframe is None:
        version = first.record.version
        raise RunError(f"the log begins with version {version}, and no keyframe that would say what was before is whole")
    return keyframe.replica.copy()  # the keyframe's own is to be compared with


def _fold(found: FragmentLog, replica: Replica, entry: Entry, folded: Callable[[Entry], None]) -> None:
    try:
        replica.fold(entry.record, entry.check, entry.sequence, entry.body)
    except ChainError as error:
        if entry.record.version > replica.chain.version + 1:
            raise HashError(f"{error}: entries are missing") from None
        found.passed_over.append(str(error))
        return
    folded(entry)
    found.versions += entry.record.makes_version
    found.members += [(entry.record.version, member) for member in entry.record.members]


class _Remade:
    """One fragment's merges, made again from the archive as its owners made them.

    An owner's residual is known from the beginning on, after a keyframe, and after a takeover, which begins with the residual
    of a keyframe of that very version or with zeros.
    """

    def __init__(self, outside: Outside, index: int) -> None:
        self.log, self.settings, self.fragment = outside.log, outside.run.settings, outside.map.fragments[index]
        self.redone = self.unknown = 0
        self.wrong: list[str] = []
        self._residuals = [np.zeros(self.fragment.size, np.float32)]  # what the owner's may be
        self._keyframe: Loaded | None = None
        self._older: dict[int, Vector] = {}  # parameters by version, as an owner keeps them

    async def redo(self, replica: Replica, entry: Entry) -> None:
        """Compare an entry that is about to be folded into ``replica`` with what its owner's merge must have given."""
        record, chain = entry.record, replica.chain
        if record.rolled_back is not None:  # nothing is left over of what it undid, and no offer is taken against that
            self._residuals, self._older = [np.zeros(self.fragment.size, np.float32)], {}
        if record.entry == "takeover":
            zeros = np.zeros(self.fragment.size, np.float32)
            kept = self._keyframe is not None and self._keyframe.replica.chain.version == chain.version
            self._residuals = [self._keyframe.residual, zeros] if kept and self._keyframe else [zeros]
            self._older = {}
        if record.entry != "version" or record.previous != chain.head:
            return
        if self.settings.merge.against == "current":
            self._older[chain.version] = replica.theta.copy()
        held = await self._held(record)
        if not held or not self._residuals:
            self._residuals, self.unknown = [], self.unknown + 1
            return
        merged = merging.accumulate(self.fragment, self.settings, held, self._older.get, replica.theta).result()
        for residual in self._residuals:
            left = residual.copy()
            again = merging.encode(merged.copy(), left, self.settings, record.bits)
            if entry.body is not None and np.array_equal(again, entry.body):
                self._residuals, self.redone = [left], self.redone + 1
                return
        self._residuals = []
        self.wrong.append(f"version {record.version}: its offers give another merge than it has")

    def begin(self, keyframe: Loaded) -> None:
        """What was before a keyframe is not known."""
        self._residuals = [keyframe.residual]

    def follow(self, keyframe: Loaded) -> None:
        """Go on with the residual that a keyframe has."""
        self._keyframe = keyframe
        if len(self._residuals) == 1 and not np.array_equal(self._residuals[0], keyframe.residual):
            self.wrong.append(
                f"version {keyframe.replica.chain.version}: its keyframe has another residual than its merges leave"
            )
        self._residuals = [keyframe.residual]

    async def _held(self, record: Record) -> list[Held]:
        """What a version was merged of, in the order of merging; none if something of it is not in the archive."""
        held, left = [], dict(enumerate(record.members))
        try:
            for combination in record.combined:
                stored = await self.log.archived_combined(
                    record.fragment, combination.syncer, combination.incarnation, combination.number
                )
                if stored is None:
                    return []
                self._compare(record, [left.pop(place) for place in combination.members], stored[0])
                held.append(Held(*stored))
            for member in left.values():
                found = await self.log.archived(record.fragment, member.learner, member.incarnation, member.number)
                if found is None:
                    return []
                self._compare(record, [member], found[0])
                held.append(Held(*found))
        except MessageError as error:
            self.wrong.append(f"version {record.version}: {error}")
            return []
        return sorted(held, key=lambda item: item.offer.members[0].learner)

    def _compare(self, record: Record, members: Sequence[Member], offer: Offer | Combined) -> None:
        """The members of a version with what their offer states of them."""
        if [member.learner for member in members] != [stated.learner for stated in offer.members]:
            self.wrong.append(f"version {record.version}: a combined offer has other members than it says")
            return
        for member, stated in zip(members, offer.members, strict=True):
            for name in ("incarnation", "number", "round", "base_version", "steps", "tokens", "lost_tokens", "data"):
                if getattr(stated, name) != getattr(member, name):
                    self.wrong.append(f"version {record.version}: {name} of {member.learner} is not that of its offer")


def _compare(found: FragmentLog, replica: Replica, keyframe: Loaded) -> bool:
    """A keyframe with the fold at its entry, whether that is where the fold is; states are known by their hashes."""
    stated, folded = keyframe.replica.chain, replica.chain
    if stated.sequence < folded.sequence:
        if stated.version >= found.first_version:
            found.wrong_keyframes.append(f"one of version {stated.version} stands after no entry of the log")
        return False
    found.keyframes += 1
    for name in (f.name for f in fields(Chain)):
        if getattr(stated, name) != getattr(folded, name):
            found.wrong_keyframes.append(f"version {stated.version}: {name} is not that of the log")
    return True


def _lives(tapes: Iterable[tape.Tape]) -> tuple[dict[tuple[str, int], Life], list[str]]:
    """The lives of learners' processes by name and incarnation, and what is wrong with the tapes that make no sense."""
    lives: dict[tuple[str, int], Life] = {}
    wrong = []
    for read in tapes:
        try:
            own = read.lives()
        except RunError as error:
            wrong.append(str(error))
            continue
        if read.problem and own:
            own[-1].gap += 1
        lives |= {(read.name, life.start.incarnation): life for life in own if life.start.incarnation}
    return lives, wrong


def _log(logs: Sequence[FragmentLog], live: bool) -> Check:
    wrong = [f"fragment {log.index}: {reason}" for log in logs for reason in log.wrong]
    if wrong:
        return Check("log", "fails", _named(wrong))
    versions, passed_over = sum(log.versions for log in logs), [reason for log in logs for reason in log.passed_over]
    found = f"{versions} versions of {len(logs)} fragments follow one another, and fold to the states that they state"
    first = max(log.first_version for log in logs)
    if first:
        found += f"; what is before version {first} was purged"
    if passed_over:
        found += f"; passed over as no entries: {_named(passed_over)}"
    open_ = sum(log.chain is not None and not log.chain.closed for log in logs)
    if open_:
        found += f"; {open_} of the logs are not closed" + (" yet" if live else "")
    return Check("log", "holds", found)


async def _changes(outside: Outside) -> Check:
    """The list of what was changed since the run was created: its chain, and what follows from it."""
    try:
        listed, _ = await membership.changes(outside.run)
        in_force(outside.run.settings, listed.records)
    except (MessageError, SettingsError) as error:
        return Check("changes", "fails", str(error))
    count = len(listed.records)
    return Check("changes", "holds", f"{count} changes follow one another" if count else "nothing was changed")


def _keyframes(logs: Sequence[FragmentLog]) -> Check:
    wrong = [f"fragment {log.index}: {reason}" for log in logs for reason in log.wrong_keyframes]
    if wrong:
        return Check("keyframes", "fails", _named(wrong))
    keyframes = sum(log.keyframes for log in logs)
    return Check("keyframes", "holds", f"{keyframes} have the state, cursors and sums of the fold" if keyframes else "none yet")


def _merges(merges: Sequence[_Remade | None]) -> Check:
    """Every version is the merge of its offers, as far as these are in the archive."""
    known = [again for again in merges if again is not None]
    if not known:
        return Check("merges", "unchecked", "the run keeps no archive of its offers (log.archive)")
    wrong = [f"fragment {again.fragment.index}, {reason}" for again in known for reason in again.wrong]
    if wrong:
        return Check("merges", "fails", _named(wrong))
    redone, unknown = sum(again.redone for again in known), sum(again.unknown for again in known)
    text = f"{redone} versions are, to the bit, the merges of their offers"
    if unknown:
        return Check(
            "merges", "unchecked", f"{text}; of {unknown} more the offers, or what was left over before, are not known"
        )
    return Check("merges", "holds", text)


def _tapes(tapes: Sequence[tape.Tape], problems: Sequence[str]) -> Check:
    if problems:
        return Check("tapes", "unchecked", _named(problems))
    if not tapes:
        return Check("tapes", "unchecked", "there are none")
    size_bytes, torn = sum(len(read.data) for read in tapes), sum(read.scan.torn_bytes > 0 for read in tapes)
    ends = f"; {torn} end in the middle of a block, as their process died" if torn else ""
    return Check("tapes", "holds", f"{len(tapes)} tapes of {size_bytes} bytes are whole{ends}")


def _offers(logs: Sequence[FragmentLog], lives: dict[tuple[str, int], Life]) -> Check:
    """Whatever was merged is on the tape of the learner that made it, as an answer to the same round."""
    offers: dict[tuple[str, int], dict[tuple[int, int], events.Offer]] = {
        key: {(offer.fragment, offer.number): offer for offer in life.offers()} for key, life in lives.items()
    }
    wrong, unknown, found = [], 0, 0
    for log in logs:
        for version, member in log.members:
            key = (member.learner, member.incarnation)
            offer = offers.get(key, {}).get((log.index, member.number))
            if offer is not None and offer.round == member.round:
                found += 1
            elif key not in lives or lives[key].gap:
                unknown += 1
            else:
                wrong.append(
                    f"fragment {log.index}, version {version}: offer {member.number} of {member.learner} (incarnation "
                    f"{member.incarnation}) to round {member.round} is not on its tape"
                )
    if wrong:
        return Check("offers", "fails", _named(wrong))
    text = f"{found} merged offers are on the tapes of their learners, each merged once"
    if unknown:
        return Check("offers", "unchecked", f"{text}; of {unknown} more there is no tape")
    return Check("offers", "holds", text)


def _data(logs: Sequence[FragmentLog], lives: dict[tuple[str, int], Life], ledger: Ledger) -> Check:
    """What was merged had been trained, and no process's work is in two versions of a fragment."""
    for process, life in lives.items():
        ledger.train(process, life.ranges(), 0)
    known = {(member.learner, member.incarnation) for log in logs for _, member in log.members}
    complete = known <= lives.keys() and not any(life.gap for life in lives.values())
    wrong = ledger.errors + (ledger.untrained() if complete else [])
    if wrong:
        return Check("data", "fails", _named(wrong))
    shares = ledger.shares()
    trained, merged, lost, repeated = (
        sum(getattr(share, name) for share in shares) for name in ("trained", "merged", "lost", "repeated")
    )
    text = (
        f"{trained} batches of {len(shares)} shares were trained, {repeated} of them more than once; no work was merged twice"
    )
    if not any(log.first_version for log in logs):
        text += f"; {merged} are in every fragment, {lost} in none"
    return Check(
        "data", "holds" if complete else "unchecked", text + ("" if complete else "; not all that was trained is on tapes")
    )


def _report(outside: Outside, logs: Sequence[FragmentLog]) -> Check:
    """The sums that the report states of the log."""
    path = outside.directory.report
    if not path.exists():
        return Check("report", "unchecked", "there is none: the run is not finished")
    chains = [log.chain for log in logs if log.chain is not None]
    if len(chains) < len(logs):
        return Check("report", "unchecked", "not every fragment's log can be read")
    try:
        report = json.loads(path.read_text())
        wrong = []
        for chain, stated in zip(chains, report["fragments"], strict=True):
            expected = {
                "versions": chain.version,
                "tokens_merged": chain.tokens_merged,
                "tokens_lost": report["tokens_processed"] - chain.tokens_merged,
                "state_hash": chain.state_hash.hex(),
            }
            wrong += [
                f"fragment {chain.fragment}: {name} is {stated[name]}, by the log {value}"
                for name, value in expected.items()
                if stated[name] != value
            ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return Check("report", "fails", f"{path}: damaged: {error}")
    if wrong:
        return Check("report", "fails", _named(wrong))
    return Check("report", "holds", f"its versions, tokens and states of {len(logs)} fragments are the log's")


def _named(reasons: Sequence[str]) -> str:
    more = len(reasons) - MAX_NAMED
    return "; ".join(reasons[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _show(verdict: Verdict) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for item in verdict.checks:
        table.add_row(item.name, f"[{COLOURS[item.state]}]{item.state}[/]", item.found)
    console = Console()
    console.print(table)
    unchecked = [item.name for item in verdict.checks if item.state == "unchecked"]
    words = "everything checked holds" if verdict.holds else "NOT as it should be"
    console.print(
        f"\nrun {verdict.run}: {words}" + (f"; not, or not wholly, checked: {', '.join(unchecked)}" if unchecked else "")
    )
