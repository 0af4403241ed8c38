"""A learner's steps and boundaries on its tape."""

from __future__ import annotations

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.boundary import Decision
from diloco.core.run import tape as events
from diloco.process.tape import Recorder, Unrecorded
from diloco.wire.fields import Bits


class LearnerTape:
    """Writes steps and decisions.

    A reader of the tape takes for granted that a share's batches come one after another, and that a step has as many tokens as
    the one before, the first one the most that a step has.
    """

    def __init__(self, tape: Recorder) -> None:
        self.tape = tape
        self._next: tuple[int | None, int] | None = None  # share and batch of the next step, as the tape has it
        self._tokens: int | None = None  # of the next step, as the tape has it; None: the most
        self._changes = 0
        self._began_s = 0.0
        self._noted_ms = 0  # since then, by the events so far

    def start(self, start: events.Start, error_bits: Bits, now_s: float) -> None:
        """Record the start of a process that has joined; ``now_s`` is by the clock of :meth:`step`.

        ``error_bits``: in which it keeps quantisation errors.
        """
        self._began_s, self._noted_ms = now_s, 0
        self.tape.record(start)
        self.tape.record(events.ErrorBits(error_bits))
        self.tape.record(events.SingleStepKept())

    def step(self, done: StepDone, now_s: float) -> None:
        """Record an inner step that has ended by now."""
        if isinstance(self.tape, Unrecorded):  # of a joined loop: no step makes events that are thrown away
            return
        if done.share is not None and (done.share, done.batch) != self._next:
            self.tape.record(events.Data(done.share, done.batch))
        if done.tokens != (done.most_tokens if self._tokens is None else self._tokens):
            self.tape.record(events.TokensCounted(done.tokens))
            self._tokens = done.tokens
        self.tape.record(events.Step())
        self._next = (done.share, done.batch + 1)
        elapsed_ms = int(1000 * (now_s - self._began_s))
        self.tape.record(events.Elapsed(elapsed_ms - self._noted_ms))
        self._noted_ms = elapsed_ms

    def decision(self, decision: Decision) -> None:
        """Record a boundary's decision."""
        if isinstance(self.tape, Unrecorded):
            return
        if decision.changes != self._changes:
            self._changes = decision.changes
            self.tape.record(events.Changed(decision.changes))
        for applied in decision.applies:
            if applied.how == "version":
                self.tape.record(events.Apply(applied.fragment, applied.version))
            else:
                self.tape.record(events.Reload(applied.fragment, applied.version, applied.how == "reset"))
