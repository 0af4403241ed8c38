"""The golden scenarios of a learner's delta state, made from ``docs/protocol.md`` alone: nothing of this project is imported.

``python -m tests.protocol.make_delta`` writes ``golden/delta/``, a scenario a file. ``begin`` is one fragment as a process of
the learner takes it up, ``events`` are what happens to it in this order, and ``then`` is the state after each. An ``offer``
``sends`` the fields and the content that go out. Values are float32 ``[4]``; no operation on them rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.protocol.delta_reference import Scenario

FOLDER = Path(__file__).with_name("golden") / "delta"


def merges() -> Iterator[tuple[str, Scenario]]:
    """An own offer is merged by its own round. First moves are 0 or 7 times a power of two: 4 bits scale exactly."""
    play = Scenario("A version holds the answer to its own round. The overlap, all steps since the offer, is kept.")
    play.step(10, -7, 2, 3, 1)
    play.step(10, 0, -4, 0.5, 0)
    play.offer(1)
    play.step(6, 0, 8, 8, 8)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(10, 14, 1, 1, 1)
    play.offer(2)
    play.version(2, 102, 204, -52, 10, mine=(7, 2), round_=2)
    yield "regular_merge", play

    play = Scenario("An overlap is offered without a further step, and with other bits.")
    play.step(10, -7, 2, 3, 1)
    play.offer(1, bits=8)
    play.step(5, 7, -2, 4, 0)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.offer(2, bits=16)
    yield "overlap_alone", play

    play = Scenario("Without carry.overlap the steps since the offer are lost.", carry__overlap=False)
    play.step(10, -7, 2, 3, 1)
    play.step(10, 0, -4, 0.5, 0)
    play.offer(1)
    play.step(6, 0, 8, 8, 8)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(10, 14, 1, 1, 1)
    play.offer(2)
    yield "overlap_dropped", play


def misses() -> Iterator[tuple[str, Scenario]]:
    """Versions come without an own offer, and offers late."""
    play = Scenario("A version holds none of this learner's offers: all displacement is dropped.")
    play.step(10, -7, 2, 3, 1)
    play.offer(1)
    play.step(6, 0, 1, 1, 1)
    play.version(1, 101, 202, -51, 9)
    play.step(6, -7, 1, -1, 2)
    play.offer(2)
    yield "missed_version", play

    play = Scenario(
        "An offer misses its own round and is merged by the next version: its tokens, counted as lost, are counted back. The "
        "newer offer is void, and the steps since the version before are lost."
    )
    play.step(10, -7, 2, 3, 1.5)
    play.offer(1)
    play.step(6, 0, 1, 1, 1)
    play.version(1, 101, 202, -51, 9)
    play.step(7, 7, 1, -1, 2)
    play.offer(2)
    play.version(2, 102, 204, -52, 10, mine=(7, 1), round_=1)
    play.step(4, 7, 1, 1, 1)
    play.offer(3)
    yield "late_merge", play

    play = Scenario("An offer is merged late that holds the error of the one before: the error becomes zero.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(11, -7, 2.5, 3, 1)
    play.offer(2)
    play.step(6, 0, 2, 4, 8)
    play.version(2, 102, 204, -52, 10)
    play.step(7, 7, 1, -1, 2)
    play.version(3, 103, 206, -53, 11, mine=(7, 2), round_=2)
    play.step(4, 7, 1, 1, 1)
    play.offer(4)
    yield "late_merge_error", play

    play = Scenario("Versions are missed in a row. The newest offer is merged in time, and the overlap since is kept.")
    play.step(10, -7, 2, 3, 1)
    play.offer(1)
    play.version(1, 101, 202, -51, 9)
    play.step(5, 0, 1, 1, 1)
    play.version(2, 102, 204, -52, 10)
    play.version(3, 103, 206, -53, 11)
    play.step(10, 14, 1, 1, 1)
    play.offer(4)
    play.step(3, -7, 2, 2, 2)
    play.version(4, 104, 208, -54, 12, mine=(7, 2), round_=4)
    play.offer(5)
    yield "missed_in_a_row", play


def feedback() -> Iterator[tuple[str, Scenario]]:
    """Errors are fed back, values are mixed, and the log goes back."""
    play = Scenario(
        "The rest that quantising a merged offer left becomes the error. Each offer adds it until the next one is merged."
    )
    play.step(10, -7, 2.25, 3.75, 1.5)
    play.offer(1)
    play.version(1, 101, 202, -51, 9)
    play.step(6, 0, 1, 1, 0)
    play.offer(2)
    play.version(2, 102, 204, -52, 10, mine=(7, 2), round_=2)
    play.step(6, -7, 1, 1, 0)
    play.offer(3)
    play.version(3, 103, 206, -53, 11)
    play.offer(4)
    play.version(4, 104, 208, -54, 12, mine=(7, 3), round_=3)
    yield "error_feedback", play

    play = Scenario("Without codec.error_feedback the error stays zero.", codec__error_feedback=False)
    play.step(10, -7, 2.25, 3.75, 1.5)
    play.offer(1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(6, -7, 1, 1, 0)
    play.offer(2)
    yield "no_error_feedback", play

    play = Scenario(
        "apply.alpha is 0.5: half of the own value is mixed in, but neither at a rollback nor at a reload.", apply__alpha=0.5
    )
    play.step(10, -7, 2, 3, 1)
    play.offer(1)
    play.step(6, 0, 2, 4, 8)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(6, 0, 2, 4, 8)
    play.reload(2, 102, 204, -52, 10, cursor=(7, 1))
    play.rollback(3, 1, 101, 202, -51, 9)
    yield "alpha", play

    play = Scenario("A rollback drops displacement, pending offers and error; `after`, numbers and data go on.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(6, -7, 1, 1, 1)
    play.offer(2)
    play.step(6, 0, 1, 1, 1)
    play.rollback(2, 0, 100, 200, -50, 8)
    play.step(6, 7, 1, 1, 1)
    play.offer(3)
    yield "rollback", play


def reloads() -> Iterator[tuple[str, Scenario]]:
    """The log is loaded again."""
    play = Scenario("The log is loaded again at the same version: all stays as it is.")
    play.step(10, -7, 2, 3, 1)
    play.offer(1)
    play.reload(0, 100, 200, -50, 8, cursor=(0, 0))
    play.step(6, 0, 1, 1, 1)
    play.offer(1)
    yield "reload_same_version", play

    play = Scenario("The log is loaded at a later version that holds none of this learner's: as a missed version.")
    play.step(10, -14, 2, 4, 6)
    play.offer(1)
    play.reload(3, 103, 206, -53, 11, cursor=(0, 0))
    play.step(6, 0, 1, 1, 1)
    play.offer(4)
    yield "reload_later_version", play

    play = Scenario("The log is loaded at the version that a pending offer's round made, and holds it: the overlap is kept.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.step(7, -14, 2, 2, 2)
    play.reload(1, 101, 202, -51, 9, cursor=(7, 1))
    play.offer(2)
    yield "reload_own_merged", play

    play = Scenario("The log is loaded at a later version, and holds a pending offer: the steps since the offer are lost.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.step(7, -14, 2, 2, 2)
    play.reload(2, 102, 204, -52, 10, cursor=(7, 1))
    play.step(6, 7, 1, 1, 1)
    play.offer(3)
    yield "reload_own_merged_before", play

    play = Scenario("The log is loaded after a rollback that is later than the base: nothing is kept.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.step(7, 0, 2, 2, 2)
    play.reload(5, 105, 210, -55, 13, cursor=(0, 0), rolled_back=4)
    play.step(6, 7, 1, 1, 1)
    play.offer(6)
    yield "reload_after_rollback", play

    play = Scenario("The value is not finite: the learner begins again from Theta, and its pending offers are void.")
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.step(7, 0, 2, 2, 2)
    play.reload(0, 100, 200, -50, 8, cursor=(0, 0), finite=False)
    play.step(6, 7, 1, 1, 1)
    play.offer(1)
    yield "not_finite", play

    play = Scenario(
        "The value is not finite, and a version has the offer that became void by that. Its tokens, which were counted as "
        "lost, are counted back, and none is counted twice. All displacement since is lost.",
    )
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.step(7, 0, 2, 2, 2)
    play.reload(0, 100, 200, -50, 8, cursor=(0, 0), finite=False)
    play.step(6, 7, 1, 1, 1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.square(known=0, merged=10, lost=0)
    play.step(5, -7, 2, 3, 1)
    play.offer(2)
    yield "void_offer_merged", play

    play = Scenario(
        "Without tokens the value becomes Theta: that of a newcomer, and one whose last token was cut off.",
        begin={"x": [1.0, 2.0, 3.0, 4.0]},
    )
    play.reload(0, 100, 200, -50, 8, cursor=(0, 0))
    play.step(1, 14, 2, 4, 6)
    play.version(1, 101, 202, -51, 9)
    play.version(2, 102, 204, -52, 10)
    play.step(6, 7, 1, 1, 1)
    play.offer(3)
    yield "no_tokens", play


def restarts() -> Iterator[tuple[str, Scenario]]:
    """A later process of the learner goes on."""
    play = Scenario(
        "A process goes on from a checkpoint. A pending offer of the incarnation before is merged; numbers begin again at 1."
    )
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.save()
    play.step(9, 0, 1, 1, 1)
    play.processed -= 9  # not known after the crash
    play.restore(8)
    play.reload(0, 100, 200, -50, 8, cursor=(0, 0))
    play.step(6, 0, 1, 1, 1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(6, 7, 1, 1, 1)
    play.offer(2)
    yield "restart_from_checkpoint", play

    play = Scenario(
        "An offer made after the checkpoint is merged, of which nothing is known after the restart. All displacement is lost, "
        "the error becomes zero, and the accounts are squared by the log's cursor.",
    )
    play.step(10, -7, 2.25, 3, 1)
    play.offer(1)
    play.version(1, 101, 202, -51, 9, mine=(7, 1), round_=1)
    play.step(8, -7, 1, 1, 1)
    play.save()
    play.step(9, 0, 1, 1, 1)
    play.offer(2)
    play.processed -= 9
    play.restore(8)
    play.reload(1, 101, 202, -51, 9, cursor=(7, 1))
    play.step(6, 0, 2, 2, 2)
    play.version(2, 102, 204, -52, 10, mine=(7, 2), round_=2)
    play.square(known=18, merged=27, lost=0)
    play.step(6, 7, 1, 1, 1)
    play.offer(3)
    yield "unknown_offer_merged", play

    play = Scenario(
        "A process goes on without a checkpoint. The log's cursors say 40 merged and 5 lost tokens of this fragment, 48 and 2 "
        "of another one: at least 50 tokens were processed, so 10 of this fragment are lost.",
        begin={"incarnation": 8, "version": 4, "theta": [104.0, 208.0, -54.0, 12.0], "cursor": [7, 3], "lost_tokens": 10},
        tokens=50,
    )
    play.reload(4, 104, 208, -54, 12, cursor=(7, 3))
    play.step(6, -7, 1, 1, 1)
    play.offer(5)
    play.version(5, 105, 210, -55, 13, mine=(8, 1), round_=5)
    yield "restart_without_checkpoint", play


SCENARIOS = (merges, misses, feedback, reloads, restarts)


def make() -> dict[str, str]:
    """Return the files' texts by name."""
    return {name: play.json() for scenarios in SCENARIOS for name, play in scenarios()}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in make().items():
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
