"""``diloco replay``: a run done again. The log is folded once more; with ``--learners`` the training too, from the tapes.

A learner's parameters follow from its tape and the log: from the log's state at its start (or a checkpoint that this replay
made itself), by the same batches, and by the same versions applied after the same steps through the same books. Every offer
on the tape is made again, and must have the content that it had; so must the parameters at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from diloco import membership, observe, tape, verify
from diloco.core import codec
from diloco.core import tape as events
from diloco.core.bandwidth import BITS
from diloco.core.books import Apply
from diloco.core.changes import Changes, in_force
from diloco.core.fold import Replica
from diloco.core.fragments import FragmentMap
from diloco.core.schedule import Moment
from diloco.core.tape import Life
from diloco.errors import ChainError, RunError, SettingsError
from diloco.log import Entry
from diloco.member import Dump, Member, StepDone
from diloco.membership import Run
from diloco.outside import opened
from diloco.settings import LearnerSettings, RunSettings
from diloco.transport import Transport

Vector = NDArray[np.float32]
State = Mapping[str, NDArray[Any]]
MODELS = "diloco.models"  # entry points of what can be trained again
FLAGS = "XLA_FLAGS"

MakeModel = Callable[[RunSettings, str | None, Life], "Model"]


class Model(Protocol):
    """What can be trained again. An entry point of the group ``diloco.models`` makes it, from the run's settings and data."""

    map: FragmentMap

    @property
    def machine(self) -> events.Machine:
        """What its bits depend on here."""

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of a step."""

    def step(self, share: int, batch: int, at: Moment) -> None:
        """Take an inner step on a batch, at the learning rate of that moment."""

    def write(self, fragment: int, applied: Apply) -> None:
        """Write a version into the model."""

    def read(self, fragment: int) -> Vector:
        """A fragment's values."""

    def parameters_digest(self) -> bytes:
        """The digest of all parameters, as a learner's tape has it."""

    def state(self) -> State:
        """Parameters and optimizer state, copied."""

    def load_state(self, state: State) -> None:
        """Take over what :meth:`state` gave."""

    def load_optimizer(self, state: State) -> None:
        """Take over the optimizer state alone."""


@dataclass
class Redone:
    """What came of a life of a learner's process."""

    learner: str
    incarnation: int
    steps: int = 0
    offers: int = 0  # made again, with the content that they had
    parameters: bool | None = None  # whether they are at the end what they were; None: the process did not live to tell
    wrong: str = ""  # where it first differed
    unchecked: str = ""  # why it, or its rest, could not be done again
    wall_s: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.wrong


@dataclass
class History:
    """One fragment's log in memory: its first state, and the entries that follow it."""

    first: Replica
    entries: list[Entry] = field(default_factory=list)

    def walk(self) -> Walk:
        """A fold of it from the beginning."""
        return Walk(self, self.first.copy())


@dataclass
class Walk:
    """A fold of a history, as far as it went."""

    history: History
    replica: Replica
    done: int = 0  # entries

    def to(self, version: int) -> Entry | None:
        """Go on to a version; the entry that made it, None for the history's first.

        Raises:
            RunError: the log does not have it, or not after where this fold is.
        """
        chain, made = self.replica.chain, None
        while chain.version < version and self.done < len(self.history.entries):
            made = self.history.entries[self.done]
            self.replica.fold(made.record, made.check, made.sequence, made.body, in_place=False)
            self.done += 1
        if chain.version != version:
            raise RunError(f"fragment {chain.fragment}: the tape has version {version} where the log has {chain.version}")
        return made


class Rerun(Member):
    """A member that does what a tape says, and sends nothing; the books are kept by the same code as those it repeats."""

    def __init__(
        self, transport: Transport, run: Run, model: Model, name: str, life: Life, histories: Sequence[History]
    ) -> None:
        settings = LearnerSettings(name=name, run=run.name)
        super().__init__(transport, run, model.map, settings, observe.get_logger())
        self.incarnation = life.start.incarnation
        self.model = model
        self._walks = [history.walk() for history in histories]

    def seat(self, life: Life) -> None:
        """Begin with the versions that the tape begins with.

        Raises:
            RunError: the log does not have one of them.
        """
        if len(life.start.versions) != len(self._walks):
            raise RunError(f"its tape begins with {len(life.start.versions)} fragments, the run has {len(self._walks)}")
        for index, (walk, version) in enumerate(zip(self._walks, life.start.versions, strict=True)):
            walk.to(version)
            self._fragments.append(self._seat(index, walk.replica))
        self._take_up_accounts()

    def begin(self) -> None:
        """From here on it is the tape that says what is applied when."""
        for state in self._fragments:
            state.pending.clear()

    def apply(self, event: events.Apply | events.Reload) -> None:
        """Apply a version, and write it into the model.

        Raises:
            RunError: the log does not have it.
        """
        state, made = self._fragments[event.fragment], self._walks[event.fragment].to(event.version)
        with self._lock:
            if isinstance(event, events.Apply):
                if made is None:
                    raise RunError(f"fragment {event.fragment}: the tape applies version {event.version} twice")
                self._queue(state, made.record)
            else:
                self._queue(state, None)
                state.spoilt = event.spoilt
        for fragment, applied in self.boundary(None).applies:
            self.model.write(fragment, applied)

    def step_on(self, share: int, batch: int) -> None:
        """Take an inner step, and book it."""
        self.model.step(share, batch, self.moment())
        self.boundary(StepDone(self.model.tokens_per_batch, share, batch, None, 0.0, 0.0))

    def change(self, changes: Changes, event: events.Changed) -> None:
        """Go by so many of the run's changes.

        Raises:
            RunError: it does not have as many.
        """
        if event.changes > len(changes.records):
            raise RunError(f"its tape goes by change {event.changes}, the run has {len(changes.records)}")
        self._budget = in_force(self.run.settings, changes.records[: event.changes]).settings.tokens

    def _take_changes(self) -> None:
        return  # when is on the tape

    def begin_fresh(self) -> None:
        """The optimizer state begins anew in a run under way."""
        self._warming = 0

    def offer(self, event: events.Offer) -> bool:
        """Make an offer again; whether it is the one on the tape.

        Raises:
            RunError: the tape has an offer of a precision that there is not.
        """
        books = self._fragments[event.fragment].books
        bits = next((known for known in BITS if known == event.bits), None)
        if bits is None:
            raise RunError(f"fragment {event.fragment}: its tape has offer {event.number} of {event.bits} bits")
        vector = self.model.read(event.fragment)
        made = books.offer(vector, books.steps, books.tokens, books.data, event.round, bits)
        return (made.number, codec.content_hash(made.body)[: events.DIGEST_BYTES]) == (event.number, event.digest)

    def _pulse_soon(self) -> None:
        return


def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    fragment: Annotated[int | None, typer.Option(help="Only this fragment's log.")] = None,
    learners: Annotated[bool, typer.Option("--learners", help="Redo the learners' training, too.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Fold a run's log again and compare every state; redo its training. Exit code 1 if any bit differs."""
    folded = asyncio.run(fold(directory, fragment, keep=learners))
    redone = asyncio.run(redo(directory, folded, installed)) if learners else []
    holds = not folded.wrong and all(life.holds for life in redone)
    if json_:
        log = {"versions": folded.versions, "wall_s": folded.wall_s, "wrong": folded.wrong}
        print(json.dumps({"holds": holds, "log": log, "learners": [asdict(life) for life in redone]}))
    else:
        _show(folded, redone)
    return 0 if holds else 1


@dataclass(frozen=True)
class Folded:
    """A run's log, folded again; ``histories`` are empty unless they were to be kept."""

    run: Run
    changes: Changes
    data: str | None
    logs: list[verify.FragmentLog]
    histories: list[History]
    wall_s: float

    @property
    def versions(self) -> int:
        return sum(log.versions for log in self.logs)

    @property
    def wrong(self) -> list[str]:
        return [f"fragment {log.index}: {reason}" for log in self.logs for reason in log.wrong]


async def fold(directory: Path, fragment: int | None, *, keep: bool) -> Folded:
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
            entries: list[Entry] = []
            logs.append(await verify.read(outside, index, entries.append if keep else lambda entry: None))
            if keep and logs[-1].first_version:
                raise RunError(
                    f"fragment {index}: its log begins with version {logs[-1].first_version}; training can be done again only "
                    "where nothing was purged (log.keep_keyframes, log.keep_bytes)"
                )
            if keep:
                first = await outside.log.load_first(index, outside.genesis, outside.genesis_check)
                histories.append(History(first.replica, entries))
        changes, _ = await membership.changes(outside.run)
        return Folded(outside.run, changes, outside.directory.data, logs, histories, time.perf_counter() - began_s)


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
    """Books and states that lives made again are asked for by others, by digest."""


async def redo(directory: Path, folded: Folded, make: MakeModel) -> list[Redone]:
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
    results: dict[int, Redone] = {}
    while len(results) < len(tasks):
        # one that began with another's state comes after it; where that cannot be made again, it cannot either
        waiting = [i for i in range(len(tasks)) if i not in results]
        i = next((i for i in waiting if tasks[i].needs is None or tasks[i].needs in kept), waiting[0])
        results[i] = await _redo(folded, tasks[i], make, kept, wanted)
    return [results[i] for i in range(len(tasks))]


async def _redo(folded: Folded, task: _Task, make: MakeModel, kept: _Kept, wanted: Set[bytes]) -> Redone:
    done, began_s = Redone(task.learner, task.life.start.incarnation), time.perf_counter()
    try:
        await _relive(folded, task.life, make, kept, wanted, done)
    except (RunError, ChainError) as error:
        done.unchecked = str(error)
    if done.wrong and task.life.rewound:
        done.wrong, done.unchecked = "", f"{done.wrong}; its server had lost versions that it had applied"
    if not done.wrong and not done.unchecked:
        done.unchecked = f"{task.life.gap} events of its tape are missing" if task.life.gap else task.problem
    done.wall_s = time.perf_counter() - began_s
    return done


async def _relive(folded: Folded, life: Life, make: MakeModel, kept: _Kept, wanted: Set[bytes], done: Redone) -> None:
    if not life.at:
        return
    model = make(folded.run.settings, folded.data, life)
    member = Rerun(cast(Transport, _Nowhere()), folded.run, model, done.learner, life, folded.histories)
    member.seat(life)
    _begin(member, model, life, kept)
    batches = _batches(life)
    for step in range(life.steps + 1):
        for place, event in enumerate(life.at.get(step, ())):
            if isinstance(event, events.Apply | events.Reload):
                member.apply(event)
            elif isinstance(event, events.Changed):
                member.change(folded.changes, event)
            elif isinstance(event, events.Offer):
                if not member.offer(event):
                    done.wrong = f"step {step}: offer {event.number} of fragment {event.fragment} is not the one on the tape"
                    return
                done.offers += 1
            elif (digest := life.copies.get((step, place))) in wanted:
                kept[cast(bytes, digest)] = member.checkpoint(), model.state()
        if step < life.steps:
            member.step_on(*next(batches))
            done.steps += 1
            await asyncio.sleep(0)  # the loop's own bookkeeping
    if life.end is not None:
        done.parameters = model.parameters_digest() == life.end.digest
        if not done.parameters:
            done.wrong = f"step {life.steps}: the parameters at the end are not those on the tape"


def _begin(member: Rerun, model: Model, life: Life, kept: _Kept) -> None:
    """Give a life the state that it began with.

    Raises:
        RunError: it is of a life that could not be made again.
    """
    if life.restored is not None:
        if life.restored not in kept:
            raise RunError(f"it began from a checkpoint ({life.restored.hex()}) that no tape here says how to make again")
        (books, arrays), state = kept[life.restored]
        member.restore(books, arrays)
        model.load_state(state)
    if life.borrowed is not None:
        peer, digest = life.borrowed
        if digest not in kept:
            raise RunError(f"it began with an optimizer state of {peer} ({digest.hex()}) that could not be made again")
        model.load_optimizer(kept[digest][1])
    if life.fresh:
        member.begin_fresh()
    member.begin()


def _batches(life: Life) -> Iterator[tuple[int, int]]:
    for _, share, first, count in life.data:
        for batch in range(first, first + count):
            yield share, batch


def installed(settings: RunSettings, data: str | None, life: Life) -> Model:
    """The model that the learners of ``diloco up`` train, on a machine like the one of that life.

    Raises:
        RunError: nothing that is installed can train it.
    """
    if life.machine is not None and "jax" not in sys.modules:
        os.environ[FLAGS] = life.machine.flags
    found = [point for point in entry_points(group=MODELS) if point.name == "learner"]
    if not found:
        raise RunError("the distribution diloco-learner is not installed, which trains the models of runs")
    factory: Callable[[RunSettings, str | None], Model] = found[0].load()
    model = factory(settings, data)
    if life.machine is not None and model.machine != life.machine:
        observe.get_logger().warning("other_machine", here=model.machine.text, tape=life.machine.text)
    return model


class _Nowhere:
    """The transport of a member that sends nothing."""

    def wall_s(self) -> float:
        return 0.0


def _show(folded: Folded, redone: Sequence[Redone]) -> None:
    console = Console()
    speed = folded.versions / folded.wall_s
    console.print(
        f"{folded.versions} versions of {len(folded.logs)} fragments folded in {folded.wall_s:.1f} s, {speed:.0f} a second"
    )
    console.print("; ".join(folded.wrong) or "every state is the one that its record has")
    table = Table("learner", "steps", "offers", "parameters", "", box=None, pad_edge=False)
    for life in redone:
        same = {True: "the same", False: "[bold red]others[/]", None: "not told"}[life.parameters]
        remark = f"[bold red]{life.wrong}[/]" if life.wrong else f"[yellow]{life.unchecked}[/]"
        table.add_row(life.learner, str(life.steps), str(life.offers), same, remark)
    if redone:
        console.print(table)
