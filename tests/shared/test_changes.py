"""The list of a run's changes: what is stored, what is refused, and what follows from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.run import changes
from diloco.core.run.changes import (
    MAX_BYTES,
    MAX_REASON,
    SETTABLE,
    Action,
    Changes,
    Eject,
    Quarantine,
    Readmit,
    Repair,
    Rollback,
    Set,
    Tokens,
    in_force,
    readable,
    with_setting,
)
from diloco.errors import ChainError, FormatError, RunError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.validation import all_names

RUN = bytes(range(8))


def listed(*actions: Action) -> Changes:
    """A list of these actions, by ann, a second apart."""
    made = Changes(RUN)
    for second, action in enumerate(actions):
        made = made.then(action, at_s=float(second), author="ann", reason="why not")
    return made


def test_records_are_chained_from_the_runs_identity_on() -> None:
    made = listed(Set("round.steps", 12), Eject("bob"))
    first, second = made.packed
    # by hand: array of 6, number 1, bin of 32, float 0.0, two texts, the action as an array that begins with its name
    start = blake3(b"DLC1change\x00" + RUN).digest()
    action = b"\x93\xa3set\xabround.steps\x0c"
    assert first == b"\x96\x01\xc4\x20" + start + b"\xcb" + bytes(8) + b"\xa3ann\xa7why not" + action
    assert made.records[1].previous == blake3(b"DLC1change\x00" + first).digest()
    assert made.head == blake3(b"DLC1change\x00" + second).digest()
    assert changes.unpack(made.pack(), RUN) == made


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[1:],  # the first is missing
        lambda packed: packed[::-1],
        lambda packed: [packed[0], packed[0]],
        lambda packed: [packed[0].replace(b"ann", b"eve"), packed[1]],
    ],
)
def test_a_list_of_which_something_was_taken_out_or_changed_is_refused(spoil: Any) -> None:
    packed = spoil(list(listed(Eject("bob"), Readmit("bob")).packed))
    with pytest.raises(ChainError, match=r"change [12]: expected number"):
        changes.unpack(msgspec.msgpack.encode(packed), RUN)


def test_another_runs_list_is_refused() -> None:
    with pytest.raises(ChainError, match="change 1"):
        changes.unpack(listed(Eject("bob")).pack(), bytes(8))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ((1, bytes(32), 0.0, "ann", "", ("set", "Round.Steps", 1)), "change 1: .*regex"),
        ((1, bytes(32), 0.0, "ann", "", ("tokens", 0)), "change 1: .*>= 1"),
        ((1, bytes(32), 0.0, "ann", "two\nlines", ("eject", "bob")), "change 1: .*regex"),
        ((1, bytes(32), 0.0, "", "", ("eject", "bob")), "change 1: .*length"),
        ((1, bytes(32), 0.0, "ann", "", ("depose", "bob")), "change 1: .*depose"),
        ((1, bytes(32), 0.0, "ann", "", ("eject", "bob", 1)), "change 1: .*length"),
        ((1, bytes(32), 0.0, "ann", "", ("quarantine", "bob", 0, float("nan"), 1.0)), "change 1: "),
        ((1, bytes(32), 0.0, "ann", "", ("set", "liveness.dead_s", float("inf"))), "not finite"),
        ((0, bytes(32), 0.0, "ann", "", ("eject", "bob")), "change 1: .*>= 1"),
    ],
)
def test_a_record_out_of_bounds_is_refused(record: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        changes.unpack(msgspec.msgpack.encode([msgspec.msgpack.encode(record)]), RUN)


@pytest.mark.parametrize("stored", [b"", b"\xc0", b"\x91\xc0", b"\x91" * 2000, bytes(MAX_BYTES + 1)])
def test_what_is_no_list_is_refused(stored: bytes) -> None:
    with pytest.raises(FormatError, match="the run's changes"):
        changes.unpack(stored, RUN)


@given(
    st.lists(st.sampled_from([Eject("a"), Readmit("a"), Tokens(5), Rollback(3, [0]), Set("shards", 1)]), max_size=6), st.data()
)
def test_any_damaged_byte_is_noticed(actions: list[Action], data: st.DataObject) -> None:
    made = listed(*actions)
    packed = bytearray(made.pack())
    if len(made.packed) < 2:
        return
    # whatever the last record is, nothing follows that would tell
    at = data.draw(st.integers(0, packed.index(made.packed[-1]) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    try:
        assert changes.unpack(bytes(packed), RUN) == made
    except (FormatError, ChainError):
        return


def test_a_reason_that_cannot_be_stored_is_refused() -> None:
    for reason in ("a\nb", "x" * (MAX_REASON + 1), "\udc80"):
        with pytest.raises(RunError, match="one line of at most 400 characters"):
            Changes(RUN).then(Eject("bob"), at_s=0.0, author="ann", reason=reason)


def test_a_full_list_says_so() -> None:
    made, long = Changes(RUN), "x" * MAX_REASON
    while len(made.pack()) < MAX_BYTES - 500:
        made = made.then(Tokens(5), at_s=0.0, author="ann", reason=long)
    with pytest.raises(RunError, match=f"the run has {len(made.records)} changes, at most 4096"):
        made.then(Tokens(5), at_s=0.0, author="ann", reason=long)


# ---- what is in force


def test_the_fold_by_hand() -> None:
    settings = run_settings(overrides={"tokens": 1000})
    made = listed(
        Set("round.steps", 12),
        Eject("bob"),
        Quarantine("cat", 2, 9.0, 3.0),
        Tokens(2000),
        Quarantine("bob", 0, 9.0, 3.0),
        Readmit("cat"),
        Rollback(7, [0, 2]),
        Set("round.quorum", "all"),
    )
    now = in_force(settings, made.records)
    assert (now.number, now.settings.round.steps, now.settings.round.quorum, now.settings.tokens) == (8, 12, "all", 2000)
    assert now.excluded == {"bob"}
    assert now.ejected["bob"].number == 2
    assert now.rollbacks == {0: (7, 7), 2: (7, 7)}
    assert settings.tokens == 1000  # the run's own stay
    assert in_force(settings, made.records[:5]).excluded == {"bob", "cat"}
    again = made.then(Readmit("bob"), at_s=9.0, author="ann")
    later = again.then(Rollback(5, [1, 2]), at_s=10.0, author="ann")  # of each fragment the newest order counts
    assert in_force(settings, later.records).rollbacks == {0: (7, 7), 1: (10, 5), 2: (10, 5)}
    assert in_force(settings, again.records).excluded == frozenset()


def test_everything_that_can_be_set_is_a_setting_and_leaves_the_bits_of_a_fold_alone() -> None:
    assert set(SETTABLE) <= set(all_names())
    decides = ("seed", "preset", "learners", "fragments.", "merge.", "inner.", "carry.", "apply.", "codec.", "task.")
    assert not [name for name in SETTABLE if name.startswith(decides)]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("round.stepz", 3, "no setting 'round.stepz' .did you mean 'round.steps'"),
        ("round", 3, "set one of its members, round.NAME=VALUE"),
        ("seed", 3, "seed cannot be changed while the run goes on: it is part of the run's identity.* begin a new run"),
        ("codec.offer_bits", 8, "codec.offer_bits cannot be changed"),
        ("log.archive", True, "--resume DIR --set log.archive="),
        ("round.steps", "x", "round.steps = 'x'"),
        ("round.steps", 0, "round.steps = 0: .* greater than or equal to 1"),
        ("round.quorum", 5, "round.quorum = 5 must be between 1 and learners = 4"),
        ("shards", 25, "shards = 25 is more than fragments.count = 24"),
    ],
)
def test_what_would_break_the_run_is_refused_with_the_reason(key: str, value: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        with_setting(run_settings(), key, value, "diloco set")


def test_of_a_damaged_list_what_is_before_the_damage_stays() -> None:
    made, settings = listed(Set("shards", 1), Eject("bob"), Set("round.steps", 9)), run_settings()
    data = made.pack()
    assert readable(data, RUN, settings) == made
    assert [len(readable(data[:at] + b"\xff" + data[at + 1 :], RUN, settings).records) for at in (0, 9, 60, len(data) - 1)] == [
        0,
        0,
        0,
        2,
    ]
    impossible = made.then(Set("seed", 3), at_s=0.0, author="ann")
    assert readable(impossible.pack(), RUN, settings) == made
    assert readable(b"\x93\x01", RUN, settings) == Changes(RUN)


def test_cross_checks_hold_for_changes_too() -> None:
    with pytest.raises(SettingsError, match="gradients"):
        with_setting(run_settings("data-parallel"), "outer.learning_rate", 0.5, "diloco set")
    with pytest.raises(SettingsError, match="changes the kind of training"):
        with_setting(run_settings("diloco"), "round.steps", 1, "diloco set")
    with pytest.raises(SettingsError, match=r"merge\.against = current"):
        with_setting(run_settings("diloco"), "round.max_staleness_versions", 9, "diloco set")


def test_a_list_that_sets_what_cannot_be_set_is_refused_whole() -> None:
    with pytest.raises(SettingsError, match="change 2: seed"):
        in_force(run_settings(), listed(Set("round.steps", 3), Set("seed", 3)).records)


def test_a_log_that_begins_again_at_a_version_is_not_ordered_back_behind_it() -> None:
    made = listed(Set("shards", 1), Rollback(7, [0, 1]), Eject("bob"), Rollback(9, [1]))
    assert made.without_rollbacks(8, [0, 0]).records == made.records[:1]  # what was carried out later is cut off
    assert made.without_rollbacks(8, [2, 2]) is made  # back to 9 is ahead of it
    assert made.without_rollbacks(7, [0, 0]) is made  # where it is by now
    assert made.without_rollbacks(20, [2, 2]).records == made.records[:3]
    assert made.without_rollbacks(20, [2, 4]) is made
    repaired = made.then(Repair(0, 30, 0), at_s=0.0, author="ann")
    assert repaired.without_rollbacks(40, [2, 4]) == made  # it would be carried out now
    assert repaired.without_rollbacks(40, [5, 4]) is repaired
    assert made.without_rollbacks(8, [0, 0]).then(Eject("cat"), at_s=0.0, author="ann").records[1].number == 2
