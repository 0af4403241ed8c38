"""Some thousand schedules of learners of several processes, what they have found, and defects that they have to find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.made.mutations import lost_tokens_forgotten
from tests.simulation.blocks import in_blocks
from tests.simulation.islands import INSIDE
from tests.simulation.play import happens, play, play_all, survived, world

from diloco.core.learner.decisions import Decisions
from diloco.core.learner.learner import Learner
from diloco.core.learner.saving import Ended, Saves
from diloco.core.tensors.chunks import Chunk
from diloco.elastic import rescue
from diloco.processes import restoring
from diloco.processes.follower import Follower
from diloco.processes.links import Links
from diloco.processes.meeting import Meeting
from diloco.processes.part import Part
from diloco.states.statefile import OpenFile, StoredChunk
from diloco.states.statefolder import StateFolder
from diloco.wire.process_messages import Decided, PartSaved

Patch = pytest.MonkeyPatch
SCHEDULES = 100  # in which a defect is to be found


@in_blocks(10_000, 100, now=0)
def test_nothing_is_lost_or_done_twice_whatever_happens_inside_islands(seeds: range) -> None:
    total = played(seeds)
    happens(total, (*(f"fault {kind}" for kind in INSIDE), "generation from a checkpoint", "setting changed"), seeds)


def test_some_schedules_of_islands() -> None:
    played(range(2, 6))


def played(seeds: range) -> Counter[str]:
    total = survived(play_all(seeds, islands=True).outcomes, "--islands ")
    assert total["step of an island"] > 20 * len(seeds)
    assert total["checkpoint counts"] > len(seeds)
    assert total["process ended with its island"]
    return total


def test_a_seed_replays_exactly() -> None:
    first, second = world(5, islands=True).run(), world(5, islands=True, verbose=False).run()
    assert first.trace == second.trace
    assert first.stats == second.stats


# ---- defects, put in on purpose


def written_a_boundary_late(patch: Patch) -> None:
    """A process writes a version into its model a boundary later than the others."""
    boundary, late = Part.boundary, dict[Part, list[Any]]()

    def slow(self: Part) -> Any:
        decided, writes = boundary(self)
        if self.links.place != 1:
            return decided, writes
        before, late[self] = late.get(self, []), writes
        return decided, before

    patch.setattr(Part, "boundary", slow)


def another_batch(patch: Patch) -> None:
    """A process trains the batch after the one that was decided."""
    next_batch = Follower.next_batch

    def further(self: Follower) -> tuple[int, int]:
        share, batch = next_batch(self)
        return share, batch + 1

    patch.setattr(Follower, "next_batch", further)


def decided_before_it_is_there(patch: Patch) -> None:
    """A version is decided though no process has said that its rows are there."""
    begin = Decisions.__init__

    def careless(self: Decisions, *others: Any) -> None:
        begin(self, *others)
        self.needed = [frozenset() for _ in self.needed]

    patch.setattr(Decisions, "__init__", careless)


def counted_with_a_part_missing(patch: Patch) -> None:
    """A checkpoint counts though a process could not write its part."""
    saved = Saves.saved

    def lenient(self: Saves, process: int, part: PartSaved) -> Ended | None:
        return saved(self, process, msgspec.structs.replace(part, content=part.content or bytes(32)))

    patch.setattr(Saves, "saved", lenient)


def counted_is_overwritten(patch: Patch) -> None:
    """A part of the newest checkpoint that counts is overwritten by the next one's."""

    def careless(settings: Any, run: bytes, index: int, save: Any, *, missed: bool) -> Any:
        return StateFolder(settings.state_dir, settings.name).generations(index)[0], None

    patch.setattr(restoring, "own_place", careless)


def saved_with_half_an_offer(patch: Patch) -> None:
    """Offers begin though a state is about to be saved."""
    patch.setattr(Decisions, "may_answer", True)


def rows_of_an_earlier_boundary(patch: Patch) -> None:
    """A process hands over the rows that it read a boundary before the one that an offer is of."""
    note = Part._note_reading
    before: dict[tuple[Part, int], Any] = {}

    def stale(self: Part, key: tuple[int, int], reader: Any) -> None:
        old = before.get((self, key[0]), reader)
        before[self, key[0]] = reader
        note(self, key, old if self.links.place == 1 else reader)

    patch.setattr(Part, "_note_reading", stale)


def losses_unnoticed(patch: Patch) -> None:
    """It is not noticed that a process is gone."""
    patch.setattr(Links, "silent", lambda self, most_s: None)
    patch.setattr(Links, "fail", lambda self, error: None)


def decided_otherwise(patch: Patch) -> None:
    """The leader tells a process of another decision than the others."""
    write = Links.write

    def false(self: Links, index: int, message: Any) -> None:
        if isinstance(message, Decided) and index == 1 and message.number == 12:
            message = msgspec.structs.replace(message, tokens=message.tokens + 1)
        write(self, index, message)

    patch.setattr(Links, "write", false)


# what schedules have found in this code, put back


def parts_from_the_leaders_boundary_on(patch: Patch) -> None:
    """A part that is saved before the leader is at that boundary is one that was not asked for."""
    begin, carry_out = Saves.begin, Decisions.carry_out
    patch.setattr(Saves, "begin", lambda self, number, save: None)

    def late(self: Decisions) -> Any:
        made = self.made
        decision = carry_out(self)
        if made is not None and made.save is not None:
            begin(self.saves, made.number, made.save)
        return decision

    patch.setattr(Decisions, "carry_out", late)


def decided_on_and_on(patch: Patch) -> None:
    """A leader that takes no step decides on and on while a process stands still, until that one is too far behind."""
    patch.setattr(Decisions, "is_followed", True)


def rows_awaited_for_ever(patch: Patch) -> None:
    """A leader that stood still while all left awaits rows of a process that has ended."""
    patch.setattr(Links, "has_ended", lambda self, index, most_s: False)


# of islands that go on with fewer processes


def no_state_kept(patch: Patch) -> None:
    """No process keeps its state where another one is lost."""
    patch.setattr(rescue, "keeps", lambda *about: False)


def step_in_flight_counted(patch: Patch) -> None:
    """A state that is kept counts the step in flight, whose outcome is not in the model."""
    dump = Learner.dump
    patch.setattr(Learner, "dump", lambda self, positions, without=None: dump(self, positions))


def never_taken_back(patch: Patch) -> None:
    """A leader does not notice that with those that wait a generation would be larger."""
    patch.setattr(Meeting, "_look", lambda self: self._changed.set())


def kept_is_removed_by_its_own_generation(patch: Patch) -> None:
    """A process that begins to save when it has kept its state removes that."""
    patch.setattr(restoring, "same_generation", lambda name, other: False)


def saved_though_the_others_have_gone_on(patch: Patch) -> None:
    """A process that stood still writes its part, when another one has its place and sees the same folder."""
    own_place = restoring.own_place
    patch.setattr(restoring, "own_place", lambda *about, missed: own_place(*about))


def read_from_what_is_there_by_now(patch: Patch) -> None:
    """A process reads the model that it begins with from the file that has the checked one's place by now."""
    read = StoredChunk.read

    def by_name(self: StoredChunk, wanted: Chunk) -> Any:
        return read(replace(self, within=OpenFile(self.path)), wanted)

    patch.setattr(StoredChunk, "read", by_name)


MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (written_a_boundary_late, "writes .* decided was"),
    (another_batch, "takes .* takes"),
    (decided_before_it_is_there, "its rows are not here"),
    (counted_with_a_part_missing, "counts, and .* have no part of it|begins from"),
    (counted_is_overwritten, "begins from|have no part of it"),
    (saved_with_half_an_offer, "cannot begin from checkpoint"),
    (lost_tokens_forgotten, "tokens processed|for the marker|tokens lost|Expected `int` >= 0"),
    (rows_of_an_earlier_boundary, "holds"),
    (losses_unnoticed, "which is gone|is not over"),
    (decided_otherwise, "but .* has|have the hash"),
    (parts_from_the_leaders_boundary_on, "it was not asked for"),
    (decided_on_and_on, "boundaries behind"),
    (rows_awaited_for_ever, "is not over|goes on without"),
    (no_state_kept, "keeps its state: False"),
    (step_in_flight_counted, "steps taken, .* are kept"),
    (never_taken_back, "do not step together"),
    (saved_though_the_others_have_gone_on, "have no part of it"),
    (kept_is_removed_by_its_own_generation, "begins from the log, and .* counted"),
    (read_from_what_is_there_by_now, "takes .* takes"),
]


# those that no early schedule finds, with one that does, which is played first
FOUND_BY: dict[Callable[[Patch], None], int] = {
    decided_on_and_on: 20,
    rows_awaited_for_ever: 59,
    step_in_flight_counted: 9,
    never_taken_back: 9,
    kept_is_removed_by_its_own_generation: 2143,
    saved_though_the_others_have_gone_on: 500119,
    read_from_what_is_there_by_now: 902503,
}
QUICK = (written_a_boundary_late, counted_with_a_part_missing, losses_unnoticed, parts_from_the_leaders_boundary_on)


@pytest.mark.parametrize(
    ("mutate", "found"),
    [
        pytest.param(mutate, found, id=mutate.__name__, marks=[] if mutate in QUICK else [pytest.mark.slow])
        for mutate, found in MUTATIONS
    ],
)
def test_the_defect_is_found(mutate: Callable[[Patch], None], found: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    for seed in (FOUND_BY.get(mutate, 0), *range(SCHEDULES)):
        error = play(seed, islands=True).error
        if error is not None:
            assert re.search(found, repr(error)), error
            return
    pytest.fail(f"{mutate.__doc__} was not noticed in {SCHEDULES} schedules")
