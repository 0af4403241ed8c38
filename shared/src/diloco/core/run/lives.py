"""Lives of a learner's process, read from its tape: its steps, and its actions between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diloco.core.learner.delta import PLAIN_BITS
from diloco.core.run.tape import (
    Apart,
    Apply,
    Bare,
    Borrowed,
    Checkpoint,
    Copied,
    Data,
    Elapsed,
    End,
    ErrorBits,
    Fresh,
    Gap,
    Lent,
    Machine,
    Mesh,
    Processes,
    Reload,
    Restored,
    Sent,
    SingleStepKept,
    Start,
    Step,
    TapeEvent,
    TapeOffer,
    TokensCounted,
)
from diloco.errors import FormatError


@dataclass
class Life:
    """One life of a learner's process, from its start to the next one or to its end; ``steps`` are those on the tape."""

    start: Start
    machine: Machine | None = None
    mesh: Mesh | None = None  # None: one device
    processes: int = 1
    apart: bool = False  # a step is two programs
    error_bits: int = PLAIN_BITS  # of quantisation errors that are kept
    keeps_single_step: bool = False  # that no version merges
    restored: bytes | None = None  # digest of the checkpoint at its start
    bare: set[int] = field(default_factory=set)  # fragments of whose accounts it has no arrays
    borrowed: tuple[str, bytes] | None = None  # peer and digest of the optimizer state at its start
    fresh: bool = False  # the optimizer state was reset in a run under way
    steps: int = 0
    data: list[tuple[int, int, int, int]] = field(default_factory=list)  # first step, share, first batch, count
    counted: dict[int, int] = field(default_factory=dict)  # by steps taken: the tokens of each step from the next one on
    at: dict[int, list[TapeEvent]] = field(default_factory=dict)  # by steps taken: the events before the next step
    copies: dict[tuple[int, int], bytes] = field(default_factory=dict)  # digests of copies, by their place in ``at``
    end: End | None = None
    step_ms: list[int] = field(default_factory=list)  # from the start or the end of a step to the end of the next
    sent_ms: list[int] = field(default_factory=list)  # of each offer, from its begin to the server's acknowledgement
    gap: int = 0  # events that could not be written; later ones are left out

    @property
    def rewound(self) -> bool:
        """Whether it went back to an older version of a fragment: the server had lost a version that was applied before."""
        newest = dict(enumerate(self.start.versions))
        for step in sorted(self.at):
            for event in self.at[step]:
                if isinstance(event, Apply | Reload):
                    if event.version < newest.get(event.fragment, 0):
                        return True
                    newest[event.fragment] = event.version
        return False

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (share, first batch, count) of all batches that it trained on, in order."""
        return [(share, first, count) for _, share, first, count in self.data]

    def step_tokens(self, most: int) -> Iterator[int]:
        """Yield the tokens of each step on the tape; a step has so many at ``most``."""
        tokens = most
        for step in range(self.steps):
            tokens = self.counted.get(step, tokens)
            yield tokens

    def offers(self) -> Iterator[TapeOffer]:
        """Yield all its offers."""
        for done in self.at.values():
            for event in done:
                if isinstance(event, TapeOffer):
                    yield event

    def step(self, share: int, batch: int) -> None:
        """Note a step on a batch."""
        if self.data:
            first_step, last_share, first, count = self.data[-1]
            if (last_share, first + count) == (share, batch):
                self.data[-1] = (first_step, share, first, count + 1)
                self.steps += 1
                return
        self.data.append((self.steps, share, batch, 1))
        self.steps += 1

    def note(self, event: TapeEvent) -> bool:
        """Note an event about the process's start or end, its pace, or its tokens; return False if it is about none of them."""
        match event:
            case Machine():
                self.machine = event
            case Mesh():
                self.mesh = event
            case Processes():
                self.processes = event.count
            case Apart():
                self.apart = True
            case ErrorBits(bits):
                self.error_bits = bits
            case SingleStepKept():
                self.keeps_single_step = True
            case TokensCounted(tokens):
                self.counted[self.steps] = tokens
            case Bare(fragment):
                self.bare.add(fragment)
            case Restored(digest):
                self.restored = digest
            case Borrowed(peer, digest):
                self.borrowed = (peer, digest)
            case Fresh():
                self.fresh = True
            case End():
                self.end = event
            case Elapsed(ms):
                self.step_ms.append(ms)
            case Sent():
                self.sent_ms.append(event.ms)
            case _:
                return False
        return True


def read_lives(tape: Iterable[TapeEvent]) -> list[Life]:
    """Return the lives on a learner's tape, one for each of its starts.

    An event that is dated ``ago`` steps back stands between the steps where it happened, in the tape's order.

    Raises:
        FormatError: an event that cannot stand where it does.
    """
    found: list[Life] = []
    data: tuple[int, int] | None = None  # share and batch of the next step
    copied: tuple[int, int] | None = None  # place of the last copy of the state
    for event in tape:
        if isinstance(event, Start):
            found.append(Life(event))
            data = copied = None
            continue
        if not found:
            raise FormatError(f"tape: {type(event).__name__} before any Start")
        life = found[-1]
        if isinstance(event, Gap):
            life.gap += event.events
        elif life.gap or life.note(event):
            continue
        elif isinstance(event, Step):
            if data is None:
                raise FormatError("tape: a step of unknown data")
            life.step(*data)
            data = (data[0], data[1] + 1)
        elif isinstance(event, Data):
            data = (event.share, event.batch)
        elif isinstance(event, Checkpoint | Lent):
            if copied is None:
                raise FormatError(f"tape: {event} of no copy")
            life.copies[copied] = event.digest
        else:
            place = _place(life, event)
            if isinstance(event, Copied):
                copied = place
    return found


def _place(life: Life, event: TapeEvent) -> tuple[int, int]:
    """Put an event between the steps where it happened; return its place in ``life.at``."""
    step = life.steps - (event.ago if isinstance(event, TapeOffer) else 0)
    if step < 0:
        raise FormatError(f"tape: {event} is of {-step} steps before the start")
    done = life.at.setdefault(step, [])
    done.append(event)
    return step, len(done) - 1
