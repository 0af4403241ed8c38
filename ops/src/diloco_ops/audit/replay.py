"""``diloco replay``: fold a run's log once more; with ``--learners``, train its learners once more, from their tapes.

A learner's parameters follow from its tape and the log: from the log's state at its start (or a checkpoint that this replay
made itself), by the same batches, and by the same versions applied after the same steps by the same state machine. Every offer
on the tape is made again, and must have the content that it had; so must the parameters at the end.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from diloco.control.changes import read_changes
from diloco.control.creation import KnownRun
from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import apply_version
from diloco.core.learner.fragment_state import Application, FragmentVersion, How, Phase
from diloco.core.learner.learner import Dump, Learner
from diloco.core.log.fold import Replica
from diloco.core.run import tape as events
from diloco.core.run.changes import Changes, in_force
from diloco.core.run.lives import Life
from diloco.core.tensors import codec
from diloco.errors import ChainError, RunError, SettingsError
from diloco.log.stream import LogEntry
from diloco.process import observe, tape
from diloco.settings.run import Bits
from diloco.states import state
from diloco_ops.audit.refold import FragmentLog, refold
from diloco_ops.audit.retraining import MakeModel, Retraining, State, TrainableModel
from diloco_ops.reading.run_reader import opened


@dataclass
class ReplayResult:
    """The outcome of replaying one life of a learner's process."""

    learner: str
    incarnation: int
    steps: int = 0
    offers: int = 0  # made again, with the content that they had
    parameters: bool | None = None  # whether the final ones are those on the tape; None: the tape does not have them
    wrong: str = ""  # where it first differed
    unchecked: str = ""  # why it, or its rest, could not be replayed
    wall_s: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether nothing differed."""
        return not self.wrong


@dataclass
class FragmentHistory:
    """One fragment's log in memory: its first state, and the entries that follow it."""

    first: Replica
    entries: list[LogEntry] = field(default_factory=list)

    def cursor(self) -> LogCursor:
        """Return a fold of it from the beginning."""
        return LogCursor(self, self.first.copy())


@dataclass
class LogCursor:
    """A fold of a history, as far as it went."""

    history: FragmentHistory
    replica: Replica
    done: int = 0  # entries

    def to(self, version: int) -> LogEntry | None:
        """Go on to a version; return the entry that made it, None for the history's first.

        Raises:
            RunError: the log does not have it, or not after where this fold is.
        """
        chain, made = self.replica.chain, None
        while chain.version < version and self.done < len(self.history.entries):
            made = self.history.entries[self.done]
            self.replica.fold(made.record, made.entry_hash, made.sequence, made.body, in_place=False)
            self.done += 1
        if chain.version != version:
            raise RunError(f"fragment {chain.fragment}: the tape has version {version} where the log has {chain.version}")
        return made


class ReplayedLearner:
    """A learner's state machine and model, driven by a tape."""

    def __init__(
        self, run: KnownRun, model: TrainableModel, name: str, life: Life, histories: Sequence[FragmentHistory]
    ) -> None:
        """Begin with the versions that the tape begins with.

        Raises:
            RunError: the log does not have one of them, or quantisation errors were kept in bits that there are not.
        """
        self.model = model
        bits = known_bits(life.error_bits)
        if bits is None:
            raise RunError(f"its tape has quantisation errors of {life.error_bits} bits")
        self.learner = Learner(
            name=name,
            role="learner",
            region="",
            incarnation=life.start.incarnation,
            settings=run.created,
            error_bits=bits,
            keeps_single_step=life.keeps_single_step,
        )
        self._cursors = [history.cursor() for history in histories]
        if len(life.start.versions) != len(self._cursors):
            raise RunError(f"its tape begins with {len(life.start.versions)} fragments, the run has {len(self._cursors)}")
        for cursor, version, fragment in zip(self._cursors, life.start.versions, model.map.fragments, strict=True):
            cursor.to(version)
            self.learner.seat(FragmentVersion.of(cursor.replica), state=fragment.state)
        self.learner.take_up_accounts()

    def begin(self, life: Life, kept: _Kept) -> None:
        """Give the learner the state that the life began with; from then on, the tape says which version is applied when.

        Raises:
            RunError: it is of a life that could not be replayed.
        """
        if life.restored is not None:
            if life.restored not in kept:
                raise RunError(f"it began from a checkpoint ({life.restored.hex()}) that the tapes here cannot reproduce")
            (plain, arrays), state = kept[life.restored]
            self.learner.restore(plain, arrays, life.bare)
            self.model.load_state(state)
        if life.borrowed is not None:
            peer, digest = life.borrowed
            if digest not in kept:
                raise RunError(f"it began with an optimizer state of {peer} ({digest.hex()}) that could not be reproduced")
            self.model.load_optimizer(kept[digest][1])
        if life.fresh:
            self.learner.accounts.warming = 0
        for fragment in self.learner.fragments:
            fragment.pending.clear()

    def apply(self, event: events.Apply | events.Reload) -> None:
        """Apply a version, and write it into the model.

        Raises:
            RunError: the log does not have it.
        """
        index, cursor = event.fragment, self._cursors[event.fragment]
        made = cursor.to(event.version)
        how: How = "version"
        if isinstance(event, events.Reload):
            made, how = None, "reset" if event.invalid else "reload"
        elif made is None:
            raise RunError(f"fragment {index}: the tape applies version {event.version} twice")
        self.learner.queue(index, FragmentVersion.of(cursor.replica, made.record if made else None))
        applied = apply_version(self.learner, Application(index, event.version, how))
        assert applied.write is not None
        self.model.write(index, applied.write)

    def step(self, share: int, batch: int, tokens: int) -> None:
        """Take an inner step, and book it with the ``tokens`` that it counted."""
        self.model.step(share, batch, self.learner.accounts.moment(self.learner.budget))
        self.learner.book(StepDone(tokens=tokens, share=share, batch=batch, loss=None, busy_s=0.0, blocked_s=0.0))

    def change(self, changes: Changes, event: events.Changed) -> None:
        """Apply the first changes of the run, up to this number.

        Raises:
            RunError: it does not have as many.
        """
        if event.changes > len(changes.records):
            raise RunError(f"its tape refers to change {event.changes}, but the run has {len(changes.records)} changes")
        in_force_now = in_force(self.learner.settings, changes.records[: event.changes])
        self.learner.budget = in_force_now.settings.tokens

    def offer(self, event: events.TapeOffer) -> bool:
        """Make an offer again; return whether it is the one on the tape.

        Raises:
            RunError: the tape has an offer of a precision that there is not, or before its fragment was applied.
        """
        index, state = event.fragment, self.learner.fragments[event.fragment]
        bits = known_bits(event.bits)
        if bits is None or state.phase is Phase.JOINING:
            raise RunError(f"fragment {index}: its tape has offer {event.number} of {event.bits} bits")
        self.learner.submit(index, lambda: self.model.snapshot(index))
        answer = state.offer(event.round, bits)
        encoded = self.learner.encode(answer)
        made = self.learner.encoded(answer, encoded)
        self.learner.sent(index, 0)
        digest = codec.content_hash(encoded.body)[: events.DIGEST_BYTES]
        return (made.stated.number, digest) == (event.number, event.digest)

    def copy(self) -> tuple[Dump, State]:
        """Return the learner's and the model's state."""
        return self.learner.dump([]), self.model.state()


def known_bits(bits: int) -> Bits | None:
    """Return a number of bits of quantised values as one that there is, or None."""
    return next((known for known in get_args(Bits) if known == bits), None)


def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    fragment: Annotated[int | None, typer.Option(help="Only this fragment's log.")] = None,
    learners: Annotated[bool, typer.Option("--learners", help="Also repeat the learners' training.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Fold a run's log again and compare every state, with --learners also the training. Exit code 1 if any bit differs."""
    folded = asyncio.run(fold(directory, fragment, keep=learners))
    with Retraining() as make:
        redone = redo(directory, folded, make) if learners else []
    holds = not folded.wrong and all(life.holds for life in redone)
    if json_:
        log = {"versions": folded.versions, "wall_s": folded.wall_s, "wrong": folded.wrong}
        print(json.dumps({"holds": holds, "log": log, "learners": [asdict(life) for life in redone]}))
    else:
        _show(folded, redone)
    return 0 if holds else 1


@dataclass(frozen=True)
class ReplayedLog:
    """A run's log, folded again; ``histories`` are empty unless they were to be kept."""

    run: KnownRun
    changes: Changes
    data: str | None
    logs: list[FragmentLog]
    histories: list[FragmentHistory]
    wall_s: float

    @property
    def versions(self) -> int:
        return sum(log.versions for log in self.logs)

    @property
    def wrong(self) -> list[str]:
        return [f"fragment {log.index}: {reason}" for log in self.logs for reason in log.wrong]


async def fold(directory: Path, fragment: int | None, *, keep: bool) -> ReplayedLog:
    """Fold a run's log, or one fragment's; ``keep`` it all in memory, for training to be done again.

    Raises:
        SettingsError: there is no such fragment.
        RunError: it is to be kept, and does not go back to the beginning.
    """
    async with opened(directory) as outside:
        indices = range(len(outside.map.fragments))
        if fragment is not None and fragment not in indices:
            raise SettingsError(f"--fragment {fragment}: run {outside.run.name!r} has fragments 0 to {indices[-1]}")
        logs, histories = [], []
        began_s = time.perf_counter()
        for index in indices if fragment is None or keep else [fragment]:
            entries: list[LogEntry] = []
            logs.append(await refold(outside, index, entries.append if keep else lambda entry: None))
            if keep and logs[-1].first_version:
                raise RunError(
                    f"fragment {index}: its log begins with version {logs[-1].first_version}; training can be repeated "
                    "only where nothing was purged (log.keep_keyframes, log.keep_bytes)"
                )
            if keep:
                first = await outside.log.reader.load_first(index, outside.genesis, outside.genesis_check)
                histories.append(FragmentHistory(first.replica, entries))
        changes = await read_changes(outside.run)
        return ReplayedLog(
            run=outside.run,
            changes=changes,
            data=outside.directory.data,
            logs=logs,
            histories=histories,
            wall_s=time.perf_counter() - began_s,
        )


@dataclass(frozen=True)
class _Task:
    """A life that is to be lived again."""

    learner: str
    life: Life
    problem: str  # of its tape, where it ends with that

    @property
    def needs(self) -> bytes | None:
        """Digest of the copy of a state that it began with."""
        return self.life.borrowed[1] if self.life.borrowed else self.life.restored


class _Kept(dict[bytes, tuple[Dump, State]]):
    """Accounts and states that lives made again are asked for by others, by digest."""


def redo(directory: Path, folded: ReplayedLog, make: MakeModel) -> list[ReplayResult]:
    """Redo the training of every learner that has a tape, life by life; ``make`` gives each the model that it begins with."""
    tapes, problems = tape.load_all(directory, folded.run.identity)
    for problem in problems:
        observe.get_logger().warning("tape_refused", reason=problem)
    tasks = []
    for read in tapes:
        lives = [life for life in read.lives() if life.start.incarnation]
        tasks += [_Task(read.name, life, read.problem if life is lives[-1] else "") for life in lives]
    kept = _Kept()
    wanted = {task.needs for task in tasks if task.needs is not None}
    _load_before(directory, folded.run, wanted, kept)
    results: dict[int, ReplayResult] = {}
    while len(results) < len(tasks):
        # one that began with another's state comes after it; where that cannot be made again, it cannot either
        waiting = [i for i in range(len(tasks)) if i not in results]
        i = next((i for i in waiting if tasks[i].needs is None or tasks[i].needs in kept), waiting[0])
        results[i] = _redo(folded, tasks[i], make, kept, wanted)
    return [results[i] for i in range(len(tasks))]


def _load_before(directory: Path, run: KnownRun, wanted: Set[bytes], kept: _Kept) -> None:
    """Load the optimizer states of a run before that lives began with."""
    if run.created.continues is None:
        return
    identity = bytes.fromhex(run.created.continues.identity)
    for name, path in state.ended_before(directory, identity):
        try:
            saved = state.load(path, identity, name)
        except RunError as error:
            observe.get_logger().warning("checkpoint_refused", file=str(path), reason=str(error))
            continue
        if saved.digest in wanted:
            kept[saved.digest] = ({}, {}), saved.arrays("optimizer/")


def _redo(folded: ReplayedLog, task: _Task, make: MakeModel, kept: _Kept, wanted: Set[bytes]) -> ReplayResult:
    result, began_s = ReplayResult(task.learner, task.life.start.incarnation), time.perf_counter()
    try:
        _relive(folded, task.life, make, kept, wanted, result)
    except (RunError, ChainError) as error:
        result.unchecked = str(error)
    if result.wrong and task.life.rewound:
        result.wrong, result.unchecked = "", f"{result.wrong}; its server had lost versions that it had applied"
    if not result.wrong and not result.unchecked:
        result.unchecked = f"{task.life.gap} events of its tape are missing" if task.life.gap else task.problem
    result.wall_s = time.perf_counter() - began_s
    return result


def _relive(folded: ReplayedLog, life: Life, make: MakeModel, kept: _Kept, wanted: Set[bytes], result: ReplayResult) -> None:
    if not life.at:
        return
    learner = ReplayedLearner(folded.run, make(folded.run.created, folded.data, life), result.learner, life, folded.histories)
    learner.begin(life, kept)
    batches, tokens = _batches(life), life.step_tokens(learner.model.tokens_per_batch)
    for step in range(life.steps + 1):
        for place, event in enumerate(life.at.get(step, ())):
            if isinstance(event, events.Apply | events.Reload):
                learner.apply(event)
            elif isinstance(event, events.Changed):
                learner.change(folded.changes, event)
            elif isinstance(event, events.TapeOffer):
                if not learner.offer(event):
                    result.wrong = (
                        f"step {step}: offer {event.number} of fragment {event.fragment} differs from the one on the tape"
                    )
                    return
                result.offers += 1
            else:
                digest = life.copies.get((step, place))
                if digest is not None and digest in wanted:
                    kept[digest] = learner.copy()
        if step < life.steps:
            learner.step(*next(batches), next(tokens))
            result.steps += 1
    if life.end is not None:
        result.parameters = learner.model.parameters_digest() == life.end.digest
        if not result.parameters:
            result.wrong = f"step {life.steps}: the parameters at the end differ from those on the tape"


def _batches(life: Life) -> Iterator[tuple[int, int]]:
    for _, share, first, count in life.data:
        for batch in range(first, first + count):
            yield share, batch


def _show(folded: ReplayedLog, redone: Sequence[ReplayResult]) -> None:
    console = Console()
    speed = folded.versions / folded.wall_s
    console.print(
        f"{folded.versions} versions of {len(folded.logs)} fragments folded in {folded.wall_s:.1f} s, {speed:.0f} a second"
    )
    console.print("; ".join(folded.wrong) or "every state equals the one in its record")
    table = Table("learner", "steps", "offers", "parameters", "", box=None, pad_edge=False)
    for life in redone:
        same = {True: "the same", False: "[bold red]others[/]", None: "not told"}[life.parameters]
        remark = f"[bold red]{life.wrong}[/]" if life.wrong else f"[yellow]{life.unchecked}[/]"
        table.add_row(life.learner, str(life.steps), str(life.offers), same, remark)
    if redone:
        console.print(table)
