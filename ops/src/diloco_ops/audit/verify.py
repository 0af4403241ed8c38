"""``diloco verify``: check a run from outside, by its stored messages, without asking any service.

The log is folded again from the oldest state that it still holds. The checks compare:

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from diloco.control.changes import read_changes
from diloco.core.run import tape as events
from diloco.core.run.changes import Set, in_force
from diloco.core.run.ledger import Ledger
from diloco.core.run.lives import Life
from diloco.errors import MessageError, RunError, SettingsError
from diloco.log.stream import LogEntry
from diloco.process import tape
from diloco.wire.entries import Record
from diloco_ops.audit.refold import FragmentLog, refold
from diloco_ops.audit.remake import RemadeMerges
from diloco_ops.reading.run_reader import RunReader, opened

Vector = NDArray[np.float32]
State = Literal["holds", "fails", "unchecked"]
MAX_NAMED = 5  # of things that are wrong in the same way
COLOURS = {"holds": "green", "fails": "bold red", "unchecked": "yellow"}


@dataclass(frozen=True)
class PropertyCheck:
    """One property of the run: whether it holds, and the facts found or the faults."""

    name: str
    state: State
    found: str


@dataclass(frozen=True)
class Verification:
    """All checks of a run. ``versions``: how many were folded again, over all fragments."""

    run: str
    live: bool
    versions: int
    checks: list[PropertyCheck]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong. A property that could not be checked is not wrong."""
        return not any(check.state == "fails" for check in self.checks)


def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory; the run may be running.")],
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Check a run's log, hashes and accounts from outside. Exit code 1 if anything is wrong."""
    verdict = asyncio.run(check(directory))
    if json_:
        print(json.dumps(asdict(verdict) | {"holds": verdict.holds}))
    else:
        _show(verdict)
    return 0 if verdict.holds else 1


async def check(path: Path) -> Verification:
    """Verify the run of a directory.

    Raises:
        DilocoError: there is nothing to verify: no run, or none that has begun, or its log cannot be reached.
    """
    async with opened(path) as seen:
        # the log first: a merged offer is on its learner's tape before
        ledger = Ledger(len(seen.map.fragments))
        enter: Callable[[LogEntry], None] = lambda entry: ledger.merge(entry.record)  # noqa: E731
        archived = seen.run.created.log.archive
        factors = await _factors(seen) if archived else []
        merges = [RemadeMerges(seen, fragment.index, factors) if archived else None for fragment in seen.map.fragments]
        logs = [await refold(seen, index, enter, again) for index, again in enumerate(merges)]
        tapes, problems = tape.load_all(path, seen.run.identity)
        changes = await _changes(seen)
    lives, unreadable = _lives(tapes)
    checks = [
        _log(logs, seen.live),
        changes,
        _keyframes(logs),
        _merges(merges),
        _tapes(tapes, problems + unreadable),
        _offers(logs, lives),
        _data(logs, lives, ledger, [fragment.size for fragment in seen.map.fragments]),
        _report(seen, logs),
    ]
    return Verification(seen.run.name, seen.live, sum(log.versions for log in logs), checks)


def _lives(tapes: Iterable[tape.Tape]) -> tuple[dict[tuple[str, int], Life], list[str]]:
    """Return the lives of learners' processes by name and incarnation, and the faults of tapes that make no sense."""
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


def _log(logs: Sequence[FragmentLog], live: bool) -> PropertyCheck:
    wrong = [f"fragment {log.index}: {reason}" for log in logs for reason in log.wrong]
    if wrong:
        return PropertyCheck("log", "fails", _named(wrong))
    versions, passed_over = sum(log.versions for log in logs), [reason for log in logs for reason in log.passed_over]
    found = f"{versions} versions of {len(logs)} fragments follow one another, and give the states that they record"
    first = max(log.first_version for log in logs)
    if first:
        found += f"; what is before version {first} was purged"
    if passed_over:
        found += f"; passed over as no entries: {_named(passed_over)}"
    repairs = [_repair(record) for log in logs for record in log.repairs]
    if repairs:
        found += f"; repaired: {_named(repairs)}"
    open_ = sum(log.chain is not None and not log.chain.closed for log in logs)
    if open_:
        found += f"; {open_} of the logs are not closed" + (" yet" if live else "")
    return PropertyCheck("log", "holds", found)


def _repair(record: Record) -> str:
    """Describe an entry by which a fragment was repaired."""
    assert record.repaired is not None
    assert record.rolled_back is not None
    back, sequence = record.rolled_back, record.repaired.sequence
    made = f"version {back.version} is what version {back.to_version} was"
    because = f" because of message {sequence}" if sequence else ""
    return f"fragment {record.fragment}, {made}, by change {back.change}{because}"


async def _changes(seen: RunReader) -> PropertyCheck:
    """Check the list of changes made since the run was created: its chain, and the settings that follow from it."""
    try:
        listed = await read_changes(seen.run)
        in_force(seen.run.created, listed.records)
    except (MessageError, SettingsError) as error:
        return PropertyCheck("changes", "fails", str(error))
    count = len(listed.records)
    return PropertyCheck("changes", "holds", f"{count} changes follow one another" if count else "nothing was changed")


async def _factors(seen: RunReader) -> list[float]:
    """Return the values that ``quarantine.factor`` has had: merges may have been made with each."""
    try:
        records = (await read_changes(seen.run)).records
    except MessageError:  # reported by itself
        records = ()
    actions = [change.action for change in records]
    set_to = [action.value for action in actions if isinstance(action, Set) and action.key == "quarantine.factor"]
    return [seen.run.created.quarantine.factor, *(float(value) for value in set_to if isinstance(value, int | float))]


def _keyframes(logs: Sequence[FragmentLog]) -> PropertyCheck:
    wrong = [f"fragment {log.index}: {reason}" for log in logs for reason in log.wrong_keyframes]
    if wrong:
        return PropertyCheck("keyframes", "fails", _named(wrong))
    keyframes = sum(log.keyframes for log in logs)
    return PropertyCheck(
        "keyframes", "holds", f"{keyframes} agree with the log in state, cursors and sums" if keyframes else "none yet"
    )


def _merges(merges: Sequence[RemadeMerges | None]) -> PropertyCheck:
    """Check that every version is the merge of its offers, as far as these are in the archive."""
    known = [again for again in merges if again is not None]
    if not known:
        return PropertyCheck("merges", "unchecked", "the run keeps no archive of its offers (log.archive)")
    wrong = [f"fragment {again.fragment.index}, {reason}" for again in known for reason in again.wrong]
    if wrong:
        return PropertyCheck("merges", "fails", _named(wrong))
    redone, unknown = sum(again.redone for again in known), sum(again.unknown for again in known)
    text = f"{redone} versions equal the merges of their offers bit for bit"
    if unknown:
        return PropertyCheck(
            "merges",
            "unchecked",
            f"{text}; {unknown} more could not be checked, because their offers or the residual before them are unknown",
        )
    return PropertyCheck("merges", "holds", text)


def _tapes(tapes: Sequence[tape.Tape], problems: Sequence[str]) -> PropertyCheck:
    if problems:
        return PropertyCheck("tapes", "unchecked", _named(problems))
    if not tapes:
        return PropertyCheck("tapes", "unchecked", "there are none")
    size_bytes, torn = sum(len(read.data) for read in tapes), sum(read.scan.torn_bytes > 0 for read in tapes)
    ends = f"; {torn} end in the middle of a block, as their process died" if torn else ""
    return PropertyCheck("tapes", "holds", f"{len(tapes)} tapes of {size_bytes} bytes are intact{ends}")


def _offers(logs: Sequence[FragmentLog], lives: dict[tuple[str, int], Life]) -> PropertyCheck:
    """Check that every merged offer is on the tape of the learner that made it, as an answer to the same round."""
    offers: dict[tuple[str, int], dict[tuple[int, int], events.TapeOffer]] = {
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
        return PropertyCheck("offers", "fails", _named(wrong))
    text = f"{found} merged offers are on the tapes of their learners, each merged once"
    if unknown:
        return PropertyCheck(
            "offers", "unchecked", f"{text}; {unknown} more could not be checked, because their tapes are missing"
        )
    return PropertyCheck("offers", "holds", text)


def _data(
    logs: Sequence[FragmentLog], lives: dict[tuple[str, int], Life], ledger: Ledger, sizes: Sequence[int]
) -> PropertyCheck:
    """Check that all merged data had been trained, and that no process's work is in two versions of a fragment."""
    for process, life in lives.items():
        ledger.train(process, life.ranges(), 0)
    # one that trains on data of its own has no tape, and its offers state no batches
    known = {(member.learner, member.incarnation) for log in logs for _, member in log.members if member.data}
    oldest = {name: lives[name, min(number for other, number in lives if other == name)] for name, _ in lives}
    # a learner whose oldest life here began with a state goes on with work of one whose tape is elsewhere
    earlier = any(life.restored is not None for life in oldest.values())
    complete = known <= lives.keys() and not earlier and not any(life.gap for life in lives.values())
    wrong = ledger.errors + (ledger.untrained() if complete else [])
    if wrong:
        return PropertyCheck("data", "fails", _named(wrong))
    shares = ledger.shares()
    trained, merged, lost, repeated = (
        sum(getattr(share, name) for share in shares) for name in ("trained", "merged", "lost", "repeated")
    )
    text = (
        f"{trained} batches of {len(shares)} shares were trained, {repeated} of them more than once; no work was merged twice"
    )
    if not any(log.first_version for log in logs):
        text += f"; {merged} are in every fragment, {lost} in no fragment"
    own = ledger.own_tokens(sizes)
    if own:
        text += (
            "; not accounted for, because trained on the learners' own data: "
            f"{', '.join(f'{n} tokens of {name}' for name, n in own.items())}"
        )
    return PropertyCheck(
        "data", "holds" if complete else "unchecked", text + ("" if complete else "; some of the training is not on tapes")
    )


def _report(seen: RunReader, logs: Sequence[FragmentLog]) -> PropertyCheck:
    """Compare the sums that the report states with the log's."""
    path = seen.directory.report
    chains = [log.chain for log in logs if log.chain is not None]
    if not path.exists():
        over = len(chains) == len(logs) and all(chain.closed for chain in chains)
        reason = "the run is over, and its report is in its coordinator's state_dir" if over else "the run is not finished"
        return PropertyCheck("report", "unchecked", f"there is none here: {reason}")
    if len(chains) < len(logs):
        return PropertyCheck("report", "unchecked", "not every fragment's log can be read")
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
        return PropertyCheck("report", "fails", f"{path}: damaged: {error}")
    if wrong:
        return PropertyCheck("report", "fails", _named(wrong))
    return PropertyCheck("report", "holds", f"its versions, tokens and states of {len(logs)} fragments agree with the log")


def _named(reasons: Sequence[str]) -> str:
    more = len(reasons) - MAX_NAMED
    return "; ".join(reasons[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _show(verdict: Verification) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for item in verdict.checks:
        table.add_row(item.name, f"[{COLOURS[item.state]}]{item.state}[/]", item.found)
    console = Console()
    console.print(table)
    unchecked = [item.name for item in verdict.checks if item.state == "unchecked"]
    words = "everything checked holds" if verdict.holds else "NOT in order"
    console.print(f"\nrun {verdict.run}: {words}" + (f"; not fully checked: {', '.join(unchecked)}" if unchecked else ""))
