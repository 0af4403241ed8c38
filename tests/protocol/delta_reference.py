"""A reference of a learner's delta state, written from ``docs/protocol.md`` section 11 alone with NumPy.

It refuses every operation that rounds in float32, so the scenarios that it plays have one result in any order of operations.
Values are float64 ``[4]`` that float32 holds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.protocol.make_golden import decode, encode

LEARNER = "ann"
UNIT = 1 / 8
Vector = NDArray[np.float64]


def exact(values: Any) -> Vector:
    """Return values as float64 after a check that float32 holds each of them.

    Raises:
        AssertionError: one of them is rounded.
    """
    vector: Vector = np.asarray(values, np.float64)
    assert np.array_equal(vector, vector.astype(np.float32), equal_nan=True), f"{vector} are rounded"
    return vector


def zeros() -> Vector:
    return np.zeros(4)


@dataclass
class Pending:
    """An offer whose fate is unknown."""

    identity: tuple[int, int]
    round: int
    displacement: Vector
    rest: Vector  # left over by quantisation
    steps: int
    tokens: int
    data: frozenset[tuple[int, int]]
    dropped: bool = False  # its displacement is in the value no more


@dataclass
class State:
    """One fragment's delta state, by the tables of section 11."""

    settings: dict[str, Any]
    incarnation: int
    base: Vector
    base_version: int
    after: tuple[int, int] = (0, 0)
    x: Vector = field(default_factory=zeros)
    e: Vector = field(default_factory=zeros)
    steps: int = 0
    tokens: int = 0
    lost_tokens: int = 0
    data: frozenset[tuple[int, int]] = frozenset()
    number: int = 0
    pending: list[Pending] = field(default_factory=list)

    def step(self, share: int, batch: int, tokens: int, moves: list[float]) -> None:
        self.x = exact(self.x + exact(moves) * UNIT)
        self.steps, self.tokens, self.data = self.steps + 1, self.tokens + tokens, self.data | {(share, batch)}

    def offer(self, round_: int, bits: int) -> dict[str, Any]:
        displacement = exact(self.x - self.base)
        gradient = exact(self.e - displacement)
        content = encode(gradient.astype(np.float32), bits)
        rest = exact(gradient - decode(content, 4, bits))
        self.number += 1
        identity = (self.incarnation, self.number)
        self.pending.append(Pending(identity, round_, displacement, rest, self.steps, self.tokens, self.data))
        return {
            "number": self.number,
            "after": list(self.after),
            "round": round_,
            "base_version": self.base_version,
            "bits": bits,
            "steps": self.steps,
            "tokens": self.tokens,
            "lost_tokens": self.lost_tokens,
            "data": ranges(self.data),
            "content": content.hex(),
        }

    def version(self, version: int, theta: list[float], mine: tuple[int, int] | None) -> None:
        """Apply a version that holds the offer ``mine``, or (None) none of this learner's."""
        old = self.x
        if mine is None:
            self._missed(exact(theta))
        else:
            self._merged(version, exact(theta), mine)
        alpha = self.settings["apply.alpha"]
        self.x = exact(alpha * old + (1 - alpha) * self.x)
        self.base, self.base_version = exact(theta), version

    def rollback(self, version: int, theta: list[float]) -> None:
        self._begin_again(exact(theta))
        self.base, self.base_version = exact(theta), version

    def reload(self, version: int, theta: list[float], cursor: tuple[int, int], rolled_back: int, finite: bool) -> None:
        """Take over the log's state; ``rolled_back`` is the version that its last rollback made, 0 if there is none."""
        if cursor != self.after:
            self._merged(version, exact(theta), cursor)
        elif version != self.base_version:
            self._missed(exact(theta))
        elif not self.tokens:
            self.x = exact(theta)
        if not finite or self.base_version < rolled_back:
            self._begin_again(exact(theta))
        self.base, self.base_version = exact(theta), version

    def _missed(self, theta: Vector) -> None:
        for offer in self.pending:
            offer.dropped = True
        self._drop(theta)

    def _merged(self, version: int, theta: Vector, mine: tuple[int, int]) -> None:
        offer = next((offer for offer in self.pending if offer.identity == mine), None)
        self.after, self.pending = mine, []
        if offer is None:
            self.e = zeros()
            self._drop(theta)
            return
        if offer.dropped:
            self.lost_tokens -= offer.tokens
            self.e = zeros()
            self._drop(theta)
            return
        self.steps, self.tokens, self.data = self.steps - offer.steps, self.tokens - offer.tokens, self.data - offer.data
        if self.settings["codec.error_feedback"]:
            self.e = offer.rest
        if self.settings["carry.overlap"] and offer.round == version:
            self.x = exact(theta + (self.x - (self.base + offer.displacement)))
        else:
            self._drop(theta)

    def _begin_again(self, theta: Vector) -> None:
        self.pending, self.e = [], zeros()
        self._drop(theta)

    def _drop(self, theta: Vector) -> None:
        self.x = theta
        self.lost_tokens += self.tokens
        self.steps, self.tokens, self.data = 0, 0, frozenset()

    def seen(self) -> dict[str, Any]:
        return {
            "x": self.x.tolist(),
            "base_version": self.base_version,
            "e": self.e.tolist(),
            "after": list(self.after),
            "steps": self.steps,
            "tokens": self.tokens,
            "lost_tokens": self.lost_tokens,
            "data": ranges(self.data),
        }


def ranges(batches: frozenset[tuple[int, int]]) -> list[list[int]]:
    """Return a set of (share, batch) as ranges [share, first, count] in order, none touching another."""
    found: list[list[int]] = []
    for share, batch in sorted(batches):
        if found and found[-1][0] == share and sum(found[-1][1:]) == batch:
            found[-1][2] += 1
        else:
            found.append([share, batch, 1])
    return found


class Scenario:
    """Plays events on a state and writes both down."""

    def __init__(self, about: str, *, tokens: int = 0, begin: dict[str, Any] | None = None, **settings: Any) -> None:
        """``tokens``: processed before; ``begin``: other than a founder's; in a keyword ``__`` is the dot of a setting."""
        defaults = {"carry.overlap": True, "codec.error_feedback": True, "apply.alpha": 0.0}
        self.settings = defaults | {name.replace("__", "."): value for name, value in settings.items()}
        founder: dict[str, Any] = {
            "incarnation": 7,
            "version": 0,
            "theta": [100.0, 200.0, -50.0, 8.0],
            "cursor": [0, 0],
            "lost_tokens": 0,
        }
        log = founder | (begin or {})
        self.begin = {"x": log["theta"]} | log
        self.about, self.batch, self.saved = about, 0, State(self.settings, 0, zeros(), 0)
        self.events: list[dict[str, Any]] = []
        self.state = self._at_log(self.begin)
        self.processed: int = tokens or self.begin["lost_tokens"]

    def _at_log(self, log: dict[str, Any]) -> State:
        after = (log["cursor"][0], log["cursor"][1])
        state = State(self.settings, log["incarnation"], exact(log["theta"]), log["version"], after, exact(log["x"]))
        state.lost_tokens = log["lost_tokens"]
        return state

    def _note(self, event: str, inputs: dict[str, Any], **outputs: Any) -> None:
        self.events.append({"event": event, **inputs, **outputs, "then": self.state.seen()})

    def step(self, tokens: int, *moves: float, share: int = 3) -> None:
        """Take a step on the next batch; ``moves`` in eighths."""
        inputs = {"share": share, "batch": self.batch, "tokens": tokens, "moves": (exact(moves) * UNIT).tolist()}
        self.state.step(share, self.batch, tokens, list(moves))
        self.batch, self.processed = self.batch + 1, self.processed + tokens
        self._note("step", inputs)

    def offer(self, round_: int, bits: int = 4) -> None:
        sends = self.state.offer(round_, bits)
        self._note("offer", {"round": round_, "bits": bits}, sends=sends)

    def version(self, version: int, *theta: float, mine: tuple[int, int] | None = None, round_: int = 0) -> None:
        """Apply a version; ``mine`` is the identity of this learner's offer in it, which answered ``round_``."""
        members = [] if mine is None else [{"learner": LEARNER, "incarnation": mine[0], "number": mine[1], "round": round_}]
        members.append({"learner": "zoe", "incarnation": 1, "number": version, "round": version})
        self.state.version(version, list(theta), mine)
        self._note("version", {"version": version, "theta": list(theta), "members": members})

    def rollback(self, version: int, to_version: int, *theta: float) -> None:
        self.state.rollback(version, list(theta))
        self._note("rollback", {"version": version, "to_version": to_version, "theta": list(theta)})

    def reload(self, version: int, *theta: float, cursor: tuple[int, int], rolled_back: int = 0, finite: bool = True) -> None:
        """Load the fragment from the log; not ``finite``: because the value was not."""
        if not finite:
            self.state.x = np.full(4, np.nan)
        self.state.reload(version, list(theta), cursor, rolled_back, finite)
        inputs = {"version": version, "theta": list(theta), "cursor": list(cursor)}
        self._note("reload", inputs | {"rolled_back": rolled_back, "finite": finite})

    def save(self) -> None:
        """Keep the state as a checkpoint does."""
        self.saved = replace(self.state, pending=[replace(offer) for offer in self.state.pending])
        self._note("save", {})

    def restore(self, incarnation: int) -> None:
        """A process of a later incarnation goes on from the checkpoint."""
        self.state = replace(self.saved, incarnation=incarnation, number=0)
        self._note("restore", {"incarnation": incarnation})

    def square(self, known: int, merged: int, lost: int) -> None:
        """Square the accounts after an own offer was merged that was not pending.

        ``known`` tokens were known to be processed before this process; ``merged`` and ``lost`` are the cursor's. Of an offer
        of this process nothing is unknown.
        """
        own = self.state.after[0] == self.state.incarnation
        unknown = 0 if own else max(0, merged + lost - known)
        self.processed += unknown
        self.state.lost_tokens = self.processed - merged - self.state.tokens
        log = {"known": known, "cursor_tokens": merged, "cursor_lost_tokens": lost}
        self._note("square", log, processed=self.processed)

    def json(self) -> str:
        head = {"about": self.about, "learner": LEARNER, "settings": self.settings, "begin": self.begin}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        events = ",\n".join(f"  {json.dumps(event)}" for event in self.events)
        return "{\n" + ",\n".join(lines) + ',\n "events": [\n' + events + "\n ]\n}\n"
