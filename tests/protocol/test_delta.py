"""Golden scenarios: the product keeps a learner's delta state as ``delta_reference.py`` does by ``docs/protocol.md`` alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.made.learner_delta import Delta, written
from tests.made.log_entries import hash_of, record_of
from tests.protocol import make_delta

from diloco.core.learner.accounts import Accounts
from diloco.core.learner.delta import VersionWrite
from diloco.core.log.chain import Chain
from diloco.wire.entries import Cursor, Record, RolledBack
from diloco.wire.offers import MergeMember

FOLDER = Path(__file__).with_name("golden") / "delta"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
FRAGMENT = 2
Vector = NDArray[np.float32]


def vector(values: list[float]) -> Vector:
    return np.array(values, np.float32)


def entry_of(event: dict[str, Any]) -> Record:
    """The entry that makes an event's version."""
    to_version = event.get("to_version")
    back = None if to_version is None else RolledBack(1, to_version, event["version"])
    members = [
        MergeMember(m["learner"], m["incarnation"], m["number"], m["round"], 0, 1, 1, 0, 1.0, [])
        for m in event.get("members", [])
    ]
    return record_of(
        event["version"],
        *members,
        fragment=FRAGMENT,
        entry="version" if back is None else "rollback",
        epoch=1,
        bits=32,
        state_hash=hash_of(event["version"]),
        rolled_back=back,
    )


class Player:
    """The product's delta state of one fragment, and the learner's value beside it."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        begin, self.settings, self.learner = scenario["begin"], scenario["settings"], scenario["learner"]
        self.delta = Delta(
            self.learner,
            begin["incarnation"],
            self.settings["carry.overlap"],
            self.settings["codec.error_feedback"],
            vector(begin["theta"]),
            begin["version"],
            hash_of(begin["version"]),
            error_bits=32,  # the files have `e` as float32 has it
            after=(begin["cursor"][0], begin["cursor"][1]),
            lost_tokens=begin["lost_tokens"],
        )
        self.x = vector(begin["x"])
        self.accounts = Accounts()  # of this fragment alone
        self.saved: Any = None

    def step(self, event: dict[str, Any]) -> None:
        self.delta.state.step(event["tokens"], event["share"], event["batch"])
        self.accounts.tokens += event["tokens"]
        self.x = self.x + vector(event["moves"])

    def offer(self, event: dict[str, Any]) -> None:
        counts = self.delta.state
        held = counts.steps, counts.tokens, counts.data
        offer = self.delta.offer(self.x.copy(), *held, event["round"], event["bits"])
        sends = {name: getattr(offer if name == "bits" else offer.stated, name) for name in event["sends"] if name != "content"}
        assert json.loads(json.dumps(sends)) | {"content": self.delta.body(offer).tobytes().hex()} == event["sends"]
        assert offer.stated.base_hash == hash_of(offer.stated.base_version)

    def version(self, event: dict[str, Any]) -> None:
        self._write(self.delta.apply(entry_of(event), vector(event["theta"])))

    rollback = version

    def reload(self, event: dict[str, Any]) -> None:
        version = event["version"]
        chain = Chain(FRAGMENT, version, 1, bytes(32), 9, hash_of(version))
        incarnation, number = event["cursor"]
        if number:
            chain.cursors[self.learner] = Cursor(self.learner, incarnation, number, 1, 0, 0, 0)
        if event["rolled_back"]:
            chain.rolled_back = RolledBack(1, 0, event["rolled_back"])
        if not event["finite"]:
            self.x = np.full_like(self.x, np.nan)
        self._write(self.delta.reload(chain, vector(event["theta"]), invalid=not event["finite"]))

    def save(self, event: dict[str, Any]) -> None:
        plain, arrays = self.delta.dump()
        self.saved = (
            json.dumps(plain),
            {name: array.copy() for name, array in arrays.items()},
            self.x.copy(),
            self.accounts.tokens,
        )

    def restore(self, event: dict[str, Any]) -> None:
        """As a new process does: a delta state from the log takes over the one that was saved."""
        plain, arrays, self.x, tokens = self.saved
        self.accounts = Accounts(tokens=tokens, earlier_tokens=tokens)
        self.delta.state = replace(self.delta.state, incarnation=event["incarnation"], next_number=1)
        self.delta.load(json.loads(plain), arrays)

    def square(self, event: dict[str, Any]) -> None:
        """What the delta state asks for with ``forgotten``."""
        assert self.delta.carried is not None
        assert self.delta.carried.forgotten
        assert self.accounts.earlier_tokens == event["known"]
        counts = self.delta.state
        cursor = Cursor(self.learner, *counts.after, 1, event["cursor_tokens"], event["cursor_lost_tokens"], 0)
        self.accounts.count_on(cursor, counts.incarnation)
        assert self.accounts.tokens == event["processed"]
        counts.lost_tokens = self.accounts.tokens - event["cursor_tokens"] - counts.tokens

    def seen(self) -> dict[str, Any]:
        counts, error = self.delta.state, self.delta.error()
        return {
            "x": self.x.tolist(),
            "base_version": counts.base_version,
            "e": [0.0] * 4 if error is None else error.tolist(),
            "after": list(counts.after),
            "steps": counts.steps,
            "tokens": counts.tokens,
            "lost_tokens": counts.lost_tokens,
            "data": [list(held) for held in counts.data],
        }

    def _write(self, applied: VersionWrite) -> None:
        """Write a version into the value, as a learner does."""
        old = self.x
        self.x = written(applied, old)
        alpha = np.float32(self.settings["apply.alpha"])
        if alpha and not applied.reset:
            self.x = alpha * old + (1 - alpha) * self.x


def test_the_files_are_what_the_maker_makes() -> None:
    assert {name: (FOLDER / f"{name}.json").read_text() for name in NAMES} == make_delta.make()


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario(name: str) -> None:
    scenario = json.loads((FOLDER / f"{name}.json").read_text())
    player = Player(scenario)
    for number, event in enumerate(scenario["events"]):
        getattr(player, event["event"])(event)
        assert player.seen() == event["then"], f"event {number}, {event['event']}"
        if event["event"] in ("version", "reload"):
            following = scenario["events"][number + 1 : number + 2]
            assert player.delta.carried is not None
            assert player.delta.carried.forgotten == ([later["event"] for later in following] == ["square"])
