"""Who leads among coordinators: the rules alone, on clocks that the test sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from diloco.core.run.leadership import LATE_S, READ_S, SILENCE_S, Leadership

TICK_S = 0.5
Holder = tuple[str, bytes] | None


def process(name: str, now_s: float = 0.0) -> Leadership:
    return Leadership(name, name.encode(), now_s)


def test_the_first_one_reads_claims_and_then_heartbeats() -> None:
    only = process("a")
    assert only.tick(0.0, True) == "read"
    only.read(None, 0, 0.0)
    assert only.tick(0.0, True) == "claim"
    only.claimed(1, 0.0)
    assert only.leads
    assert only.sure(0.0)
    assert only.tick(TICK_S, True) == "heartbeat"


def test_a_standby_claims_after_the_silence_and_not_before() -> None:
    standby = process("b")
    standby.tick(0.0, True)
    standby.read(("a", b"a"), 1, 0.0)
    now_s, heard_s = 0.0, 0.0
    while now_s < 5:
        now_s += TICK_S
        if now_s <= 3:
            standby.hear(1, now_s)
            heard_s = now_s
        assert (standby.tick(now_s, True) == "claim") == (now_s - heard_s > SILENCE_S)
    assert standby.revision == 1


def test_a_successor_of_the_same_name_does_not_wait() -> None:
    successor = Leadership("a", b"second", 100.0)
    assert successor.tick(100.0, True) == "read"
    successor.read(("a", b"first"), 7, 100.0)
    assert successor.tick(100.0, True) == "claim"
    successor.claimed(8, 100.0)
    assert successor.leads
    assert successor.revision == 8


def test_two_of_one_name_do_not_take_turns() -> None:
    first = Leadership("a", b"first", 0.0)
    first.tick(0.0, True)
    first.read(None, 0, 0.0)
    first.claimed(1, 0.0)
    first.hear(2, 0.4)  # its successor
    assert not first.sure(0.4)
    assert first.tick(TICK_S, True) == "read"
    first.read(("a", b"second"), 2, TICK_S)
    assert not first.leads
    assert first.tick(2 * TICK_S, True) == "wait"


def test_a_leader_that_was_frozen_reads_before_it_goes_on() -> None:
    leader = process("a")
    leader.tick(0.0, True)
    leader.read(None, 0, 0.0)
    leader.claimed(1, 0.0)
    assert not leader.sure(LATE_S + 5)
    assert leader.tick(LATE_S + 5, True) == "read"
    leader.read(("b", b"b"), 2, LATE_S + 5)
    assert not leader.leads


def test_a_standby_that_was_frozen_or_cut_off_hears_again_before_it_claims() -> None:
    for gap_s, connected in ((30.0, True), (TICK_S, False)):
        standby = process("b")
        standby.tick(0.0, True)
        standby.read(("a", b"a"), 1, 0.0)
        now_s = gap_s
        assert standby.tick(now_s, connected) != "claim"
        if not connected:
            assert standby.tick(now_s + TICK_S, True) == "read"
        standby.read(("a", b"a"), 1, now_s)
        assert standby.tick(now_s + TICK_S, True) == "wait"


def test_a_leader_looks_at_the_key_from_time_to_time() -> None:
    leader = process("a")
    leader.tick(0.0, True)
    leader.read(None, 0, 0.0)
    leader.claimed(1, 0.0)
    actions = [leader.tick(tick * TICK_S, True) for tick in range(1, round(READ_S / TICK_S) + 2)]
    assert actions[:-1] == ["heartbeat"] * (len(actions) - 1)
    assert actions[-1] == "read"


def test_a_damaged_key_is_claimed_after_the_silence() -> None:
    standby = process("b")
    standby.tick(0.0, True)
    standby.read(None, 3, 0.0)
    actions = [standby.tick(tick * TICK_S, True) for tick in range(1, 7)]
    assert actions[3] == "wait"
    assert actions[-1] == "claim"


@dataclass
class World:
    """Some processes, the key that they share, and who is frozen until when."""

    processes: list[Leadership]
    holder: Holder = None
    revision: int = 0
    frozen_until_s: dict[str, float] = field(default_factory=dict)

    def tick(self, one: Leadership, now_s: float, lossy: bool) -> None:
        if now_s < self.frozen_until_s.get(one.name, 0.0):
            return
        action = one.tick(now_s, True)
        if action == "read":
            one.read(self.holder, self.revision, now_s)
        elif action == "claim":
            if one.revision == self.revision:
                self.holder, self.revision = (one.name, one.process), self.revision + 1
                one.claimed(self.revision, now_s)
            else:
                one.claimed(None, now_s)
        elif action == "heartbeat" and not lossy:
            for other in self.processes:
                if now_s >= self.frozen_until_s.get(other.name, 0.0):
                    other.hear(one.revision, now_s)


@given(
    count=st.integers(1, 4),
    faults=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 3), st.floats(0.1, 12)), max_size=8),
    losses=st.sets(st.integers(0, 79), max_size=20),
)
def test_under_freezes_and_losses_one_leads_in_the_end(
    count: int, faults: list[tuple[int, int, float]], losses: set[int]
) -> None:
    world = World([process(f"c{index}") for index in range(count)])
    for tick in range(80 + 60):  # then half a minute in peace
        now_s = tick * TICK_S
        for at, who, for_s in faults:
            if at == tick and who < count:
                world.frozen_until_s[f"c{who}"] = now_s + for_s
        for one in world.processes:
            world.tick(one, now_s, tick in losses)
        awake = [p for p in world.processes if now_s >= world.frozen_until_s.get(p.name, 0.0)]
        # anyone who is sure holds the revision that it was given; no two were given the same
        sure = [p.revision for p in awake if p.sure(now_s)]
        assert len(sure) == len(set(sure))
    leaders = [p for p in world.processes if p.leads]
    assert [(p.name, p.process) for p in leaders] == [world.holder]
