"""An arm's pace as an experiment's file says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_lab.paces import recording, slices, stalls
from diloco_lab.paces.recording import Recording
from diloco_lab.paces.slices import SlicedMachine
from diloco_lab.paces.times import Paces, VirtualPace, varying
from diloco_lab.simulator.cluster import MAX_SLICES

MOST_S = 1e7  # four months: as long as a trial may last
Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
STEP_S = 0.1  # the usual step of a small model on a CPU; only ratios to the heartbeat and grace times matter


class Visitors(BaseModel):
    """Learners that join in mid-run, stay for a while, and leave: once, or day after day. They are killed when they leave."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    count: int = Field(ge=1, le=4096, description="the last so many of the arm's learners")
    joins_s: Seconds = Field(description="when they come for the first time")
    stays_s: float = Field(gt=0, le=MOST_S, description="for how long, each time")
    away_s: Seconds = Field(0.0, description="for how long they are away in between")
    times: int = Field(1, ge=1, le=1000, description="how often they come")

    @model_validator(mode="after")
    def _away_in_between(self) -> Visitors:
        if self.times > 1 and not self.away_s:
            raise ValueError(f"pace.visitors: times = {self.times} stays need a time between them; set away_s, or times = 1")
        return self

    def pace(self, usual: VirtualPace) -> VirtualPace:
        """Return the pace of such a learner: the ``usual`` one while it is there."""
        leaves_s = [self.joins_s + self.stays_s + time * (self.stays_s + self.away_s) for time in range(self.times)]
        returns_s = [*(left_s + self.away_s for left_s in leaves_s[:-1]), leaves_s[-1] + MOST_S]
        return replace(usual, begins_s=self.joins_s, away=tuple(zip(leaves_s, returns_s, strict=True)))


class PaceSpec(BaseModel):
    """The times of learners, in virtual time: steady steps, or those of a recorded run; and when they are away."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    step_s: float | None = Field(
        None, gt=0, le=3600, description=f"of the fastest learner ({STEP_S} s); of a recording the mean step (as it was)"
    )
    factors: list[Annotated[float, Field(ge=1, le=1000)]] = Field(
        [1.0], min_length=1, max_length=4096, description="times as long, learner by learner, and from the beginning again"
    )
    jitter: float = Field(
        0.0, ge=0, le=1, description="standard deviation of steady steps, relative: each is drawn from a normal distribution"
    )
    offers_s: float = Field(
        0.0, ge=0, le=3600, description="longest time of an offer to the server, each drawn evenly between 0 and it"
    )
    recorded: str | None = Field(None, min_length=1, max_length=400, description="a recording's name, or its file")
    away: dict[str, list[tuple[Seconds, Seconds]]] = Field(
        {}, max_length=4096, description="by learner: [from, until], killed and back, in virtual seconds"
    )
    dropped: float = Field(0.0, ge=0, lt=1, description="share of offers that are lost on their way, at random by seed")
    visitors: Visitors | None = Field(None, description="learners that come and go")
    tape: str | None = Field(
        None, min_length=1, max_length=400, description="a failure tape's name, or its file: its freezes make steps longer"
    )
    slices: int | None = Field(
        None, ge=1, le=MAX_SLICES, description="of all learners together, that the tape takes away: batches shrink with them"
    )
    elastic: bool = Field(True, description="whether a learner goes on without lost slices, or begins again on spare ones")
    tape_step_s: float = Field(
        STEP_S, gt=0, le=3600, description="a step of the learners that the tape is of: its times are as many steps here"
    )

    @model_validator(mode="after")
    def _one_way(self) -> PaceSpec:
        if self.recorded is not None and self.factors != [1.0]:
            raise ValueError("pace: factors are of steady steps, and recorded ones have their own; leave one of them out")
        if (self.jitter or self.offers_s) and (self.recorded is not None or self.slices is not None):
            raise ValueError("pace: jitter and offers_s are of steady steps; leave them out, or recorded and slices")
        if self.recorded is not None and self.tape is not None:
            raise ValueError("pace: a recording has the failures of its own run; leave out tape or recorded")
        if self.slices is not None and self.tape is None:
            raise ValueError(f"pace: slices = {self.slices} are those of a tape; name one with tape, or leave out slices")
        if self.slices is None and not self.elastic:
            raise ValueError("pace: elastic = false is of learners with slices; give their number with slices, and a tape")
        for name, away in self.away.items():
            recording.check_away(f"pace.away, {name}", away)
        return self

    @cached_property
    def recording(self) -> Recording | None:
        """The recording, read once: a trial plays the one that its result's name is made from.

        Raises:
            SettingsError: it cannot be had.
        """
        return None if self.recorded is None else recording.load(self.recorded)

    @cached_property
    def failures(self) -> str | None:
        """The tape's text, read once like the recording.

        Raises:
            SettingsError: it cannot be had.
        """
        return None if self.tape is None else stalls.read(self.tape)

    def paces(self, learners: int, seed: int = 0) -> Paces:
        """Return the times of so many learners; ``seed`` draws those of steps that vary.

        Raises:
            SettingsError: the recording cannot be had or is of another number of learners, or a learner is not known.
        """
        if self.recording is None:
            steps_s = self._steps_s(learners)
            found = Paces([varying(step_s, self.jitter, self.offers_s, (seed, index)) for index, step_s in enumerate(steps_s)])
        else:
            found = self.recording.paces(self.step_s)
        if len(found.learners) != learners:
            raise SettingsError(
                f"pace.recorded = {self.recorded!r}: has {len(found.learners)} learners, the arm {learners}; set learners, or "
                "record a run of as many"
            )
        names = [f"learner-{index}" for index in range(learners)]
        for name in self.away:
            if name not in names:
                raise SettingsError(f"pace.away: no {name!r}{nearest(name, names)}; there are {names[0]} to {names[-1]}")
        found = self._visited(self._failing(found, names), names)
        changed = [replace(p, away=self.away[n]) if n in self.away else p for n, p in zip(names, found.learners, strict=True)]
        return replace(found, learners=changed, dropped=self.dropped)

    def _visited(self, found: Paces, names: Sequence[str]) -> Paces:
        """Return the times with those of visitors, who are the last ones."""
        if self.visitors is None:
            return found
        staying = len(names) - self.visitors.count
        if staying < 1:
            raise SettingsError(
                f"pace.visitors.count = {self.visitors.count}: the arm has {len(names)} learners, and one at least stays"
            )
        twice = [name for name in names[staying:] if name in self.away]
        if twice:
            raise SettingsError(f"pace.away: {twice[0]} is one of the {self.visitors.count} visitors; leave it out of away")
        visiting = [self.visitors.pace(pace) for pace in found.learners[staying:]]
        return replace(found, learners=[*found.learners[:staying], *visiting])

    def _steps_s(self, learners: int) -> list[float]:
        return [(self.step_s or STEP_S) * self.factors[index % len(self.factors)] for index in range(learners)]

    def _failing(self, found: Paces, names: Sequence[str]) -> Paces:
        """Return the times with the tape's failures."""
        if self.failures is None:
            return found
        scale = (self.step_s or STEP_S) / self.tape_step_s
        if self.slices is None:
            of_tape = stalls.of(self.failures, str(self.tape), names, scale)
            return replace(found, learners=[replace(p, stalls=of_tape[n]) for n, p in zip(names, found.learners, strict=True)])

        def machines(steps_s: Sequence[float]) -> list[SlicedMachine]:
            text, each_s = str(self.failures), [step_s / scale for step_s in steps_s]
            return slices.machines(text, str(self.tape), self.slices or 0, each_s, scale, elastic=self.elastic)

        steps_s = self._steps_s(len(names))
        learners = [replace(pace, machine=own) for pace, own in zip(found.learners, machines(steps_s), strict=True)]
        return replace(found, learners=learners, whole=machines([max(steps_s)])[0])

    def said(self) -> dict[str, Any]:
        """Return all that it says, with the content of recording and tape."""
        said = self.model_dump()
        if self.recording is not None:
            said["recorded"] = self.recording.model_dump()
        if self.failures is not None:
            said["tape"] = self.failures
        return said
