"""The coordinator's picture of a run with regions, from heartbeats and log entries."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace
from tests.made.heartbeats import learner_heartbeat, shard_heartbeat
from tests.made.monitors import entry_record, monitor, story

from diloco.core.run.changes import Change, Effective, Eject
from diloco.wire.entries import RolledBack
from diloco_coordinator.overview import MOST_STATUS_BYTES, packed_status


def test_the_status_says_where_each_is_and_how_its_region_does() -> None:
    made = story()
    status = json.loads(json.dumps(made.status(33.0)))
    assert {name: learner["region"] for name, learner in status["learners"].items()} == {"ann": "us", "bob": "eu"}
    assert {name: syncer["region"] for name, syncer in status["shards"].items()} == {"s-eu": "eu", "s-us": "us"}
    # us to eu: 1500 and 20 that s-us sent in two lives, and 7 that s-eu read there; back: 300, 60 and 1
    assert status["regions"] == {
        "us": {"members": 2, "heard": 1, "away_s": None, "fragments": 2, "bytes_in": 361, "bytes_out": 1527},
        "eu": {"members": 2, "heard": 0, "away_s": 31.0, "fragments": 0, "bytes_in": 1527, "bytes_out": 361},
    }
    made.hear(learner_heartbeat("bob", 2, region="eu"), 62.0)
    made.hear_shard(shard_heartbeat("s-eu", region="eu", crossing=[("us", 400, 7)]), 63.0)
    assert made.status(63.0)["regions"]["eu"] | {"members": 2, "heard": 2, "away_s": None} == made.status(63.0)["regions"]["eu"]


def test_another_coordinator_goes_on_with_what_the_first_knew_of_regions() -> None:
    first, second = story(), monitor("us", "eu")
    series = json.loads(json.dumps(first.series(33.0)))
    second.resume(series)
    assert second.crossing.borders() == first.crossing.borders() == {("us", "eu"): 1527, ("eu", "us"): 361}
    assert second.series(33.0)["absences"] == series["absences"] == [["eu", 2.0, None]]
    assert second.crossing.places == {"ann": "us", "bob": "eu", "s-us": "us", "s-eu": "eu"}
    assert [merge["syncer"] for merge in series["merges"]] == ["s-us", "s-eu", "s-us"]
    assert series["merges"][0]["members"] == [["ann", 0.5, 0, 24], ["bob", 0.5, 0, 24]]


def test_a_validation_has_the_tokens_of_its_model_also_while_a_new_coordinator_reads_the_log() -> None:
    made = monitor()
    said = learner_heartbeat("evaluator", 1, role="evaluator", loss=2.5, versions=[1, 1])
    made.hear_evaluator(said, 1.0)
    made.entry(replace(entry_record(0, 1, "s", "ann"), tokens_merged=300), 2.0)
    made.hear_evaluator(said, 2.5)
    made.entry(replace(entry_record(1, 1, "s", "ann"), tokens_merged=100), 3.0)
    assert made.validation == []
    made.hear_evaluator(said, 3.5)
    assert made.validation == [(3.5, 200, 2.5)]  # two fragments of one size


def test_a_fragment_is_without_owner_while_no_syncer_that_is_heard_says_that_it_owns_it() -> None:
    made = monitor()
    assert made.unowned(0.0) == {0, 1}
    made.hear_shard(shard_heartbeat("s", fragments=[0]), 1.0)
    assert made.unowned(1.0) == {1}
    made.hear_shard(shard_heartbeat("t", fragments=[1]), 2.0)
    assert made.unowned(2.0) == set()
    assert made.unowned(1.5 + made.gone_s) == {0}
    for fragment in (0, 1):  # the run is over, and its syncers leave
        made.entry(replace(entry_record(fragment, 1, "s", "ann"), closing=True), 3.0)
    assert made.unowned(1000.0) == set()


def test_a_syncer_that_is_gone_has_the_fragments_that_no_other_one_took_over() -> None:
    made = monitor()
    made.hear_shard(shard_heartbeat("s", fragments=[0, 1]), 1.0)
    made.hear_shard(shard_heartbeat("t", fragments=[]), 1.0)
    for fragment in (0, 1):
        made.entry(entry_record(fragment, 1, "s", "ann"), 2.0)
    late_s = 2.0 + made.gone_s
    made.entry(entry_record(0, 2, "t", "ann"), late_s)
    made.hear_shard(shard_heartbeat("t", fragments=[0]), late_s)
    shards = made.status(late_s)["shards"]
    assert {name: shard["fragments"] for name, shard in shards.items()} == {"s": 1, "t": 1}


def test_a_learner_that_begins_again_has_sent_what_all_its_processes_sent() -> None:
    made = monitor()
    made.hear(replace(learner_heartbeat("ann", 1, incarnation=5), bytes_up=100, bytes_down=10), 1.0)
    made.hear(replace(learner_heartbeat("ann", 1, incarnation=8), bytes_up=30, bytes_down=40), 2.0)
    row = made.status(2.0)["learners"]["ann"]
    assert (row["bytes_up"], row["bytes_down"]) == (130, 50)
    after = monitor()
    after.resume(json.loads(json.dumps(made.series(3.0))))
    after.hear(replace(learner_heartbeat("ann", 2, incarnation=8), bytes_up=31, bytes_down=40), 4.0)
    row = after.status(4.0)["learners"]["ann"]
    assert (row["bytes_up"], row["bytes_down"]) == (131, 50)


def test_a_run_without_regions_has_none() -> None:
    made = monitor()
    made.hear(learner_heartbeat("ann", 1), 1.0)
    made.hear_shard(shard_heartbeat("s"), 1.0)
    status = made.status(100.0)
    assert (status["regions"], status["learners"]["ann"]["region"], status["shards"]["s"]["region"]) == ({}, None, None)
    assert (made.series(100.0)["places"], made.series(100.0)["absences"]) == ({}, [])


def test_the_status_of_many_learners_has_as_many_points_as_a_message_holds() -> None:
    made = monitor()
    for number in range(200):
        for step in range(1, 119):
            made.hear(replace(learner_heartbeat(f"learner-{number}", step, tokens=10 * step), loss=1 / 3), 1.0 * step)
    assert len(json.dumps(made.status(130.0))) > MOST_STATUS_BYTES
    packed = packed_status(made, 130.0)
    assert len(packed) <= MOST_STATUS_BYTES
    fewer = json.loads(packed)
    assert fewer["learners"].keys() == made.status(130.0)["learners"].keys()
    assert 2 <= len(fewer["loss"]["learner-7"]) < 120
    assert fewer["loss"]["learner-7"][-1] == json.loads(json.dumps(made.status(130.0)))["loss"]["learner-7"][-1]


def test_every_key_of_the_status_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    described = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    status = story().status(33.0)
    by_name = [entry for kind in ("learners", "shards", "regions") for entry in status[kind].values()]
    found = {key for entry in [status, *by_name, *status["fragments"]] for key in entry}
    assert found - described == set()


def test_a_rollback_is_told_once_and_remembered() -> None:
    first, second = story(), monitor("us", "eu")
    for at_s, fragment, change in ((40.0, 0, 3), (40.5, 1, 3), (50.0, 0, 4)):
        version = first.versions[fragment] + 1
        entry = entry_record(fragment, version, "s-us")
        first.entry(replace(entry, entry="rollback", bits=32, rolled_back=RolledBack(change, 1, version)), at_s)
    assert first.versions == [3, 3]
    series = json.loads(json.dumps(first.series(60.0)))
    told = [(entry["wall_s"], entry["change"], entry["to_version"]) for entry in series["rollbacks"]]
    assert told == [(40.0, 3, 1), (50.0, 4, 1)]
    assert len(series["merges"]) == 3  # nothing was merged
    second.resume(series)
    assert second.series(60.0)["rollbacks"] == series["rollbacks"]
    second.resume({name: value for name, value in series.items() if name != "rollbacks"})  # an older coordinator's
    assert second.series(60.0)["rollbacks"] == []


def test_no_member_makes_it_keep_more_and_more() -> None:
    """Incarnations, states and ranges are its word: as many as it likes, each in a heartbeat of its own."""
    made = monitor("us", "eu")
    for number in range(1, 6000):
        state = ("stepping", "waiting")[number % 2]
        made.hear(
            learner_heartbeat("a", number, region="us", incarnation=number, state=state, trained=[(0, 2 * number, 1)]),
            number,
        )
        made.hear_shard(shard_heartbeat("s", region="us", crossing=[("eu", 2, 1)], incarnation=number), number)
    assert len(made.crossing.processes) == 16
    assert made.crossing.borders() == {("us", "eu"): 2 * 5999, ("eu", "us"): 5999}
    assert len(made.ledger.trained) <= 4096
    activity = made.learners["a"].activity
    assert len(activity) <= 2000
    assert all(before[1] == after[0] for before, after in pairwise(activity))
    assert (activity[0][0], activity[-1][1]) == (1, 5999)
    again = monitor("us", "eu")
    again.resume(json.loads(json.dumps(made.series(6000))))
    again.hear(learner_heartbeat("a", 6000, region="us", incarnation=6000, trained=[(1, 0, 1)]), 6000)
    assert len(again.ledger.trained) == len(made.ledger.trained)


def test_an_ejected_learner_and_a_syncer_that_stays_away_leave_the_status() -> None:
    made = story()  # ann and bob, s-us, which owns all fragments, and s-eu
    ejected = Effective(made.settings, made.now.number + 1, {"bob": Change(1, bytes(32), 0.0, "op", "", Eject("bob"))})
    made.hear(learner_heartbeat("bob", 2, region="eu"), 100.0)
    made.hear_shard(shard_heartbeat("s-eu", region="eu"), 100.0)
    made.change(ejected)
    eu = made.status(101.0)["regions"]["eu"]
    assert (eu["members"], eu["heard"]) == (1, 1)  # s-eu
    assert made.status(700.0)["learners"]["bob"]["state"] == "ejected"
    assert set(made.status(701.0)["learners"]) == {"ann"}
    assert set(made.status(3700.0)["shards"]) == {"s-eu", "s-us"}
    late = made.status(3701.0)
    assert set(late["shards"]) == {"s-us"}  # silent too, but the log says that it owns
    assert late["regions"]["eu"]["members"] == 0
    assert late["tokens_processed"] == made.status(101.0)["tokens_processed"]
    assert set(made.series(3701.0)["learners"]) == {"ann", "bob"}  # the report has all of them
    made.hear_shard(shard_heartbeat("s-eu", region="eu"), 3702.0)
    assert set(made.status(3702.0)["shards"]) == {"s-eu", "s-us"}


def test_a_member_that_only_an_earlier_coordinator_heard_counts_for_an_hour() -> None:
    second = monitor("us", "eu")
    second.resume(json.loads(json.dumps(story().series(33.0))))
    assert second.status(3633.0)["regions"]["eu"]["members"] == 2
    assert second.status(3634.0)["regions"]["eu"]["members"] == 0


def test_tokens_and_steps_are_those_that_learners_counted() -> None:
    """Ann restores a checkpoint of 500 tokens, and counts 3 to 10 tokens in batches of at most 10; bob's have all 10."""
    made = monitor("us", "eu")
    ann = {"region": "us", "batch_tokens": 10}
    made.hear(learner_heartbeat("ann", 0, state="starting", tokens=300, trained=[], **ann), 1.0)
    made.hear(learner_heartbeat("ann", 60, tokens=500, trained=[], **ann), 2.0)
    for number, tokens in enumerate((503, 513, 517), 1):
        made.hear(learner_heartbeat("ann", 60 + number, tokens=tokens, trained=[(0, 0, number)], **ann), 2.0 + number)
    made.hear(learner_heartbeat("bob", 0, region="eu", batch_tokens=10, tokens=0), 2.0)
    made.hear(learner_heartbeat("bob", 4, region="eu", batch_tokens=10, tokens=40, trained=[(1, 0, 4)]), 3.0)
    assert (made.ledger.processed("ann"), made.ledger.processed("bob")) == (17, 40)
    learners = made.status(9.0)["learners"]
    assert [(learners[name]["steps"], learners[name]["tokens"]) for name in ("ann", "bob")] == [(63, 517), (4, 40)]
    again = monitor("us", "eu")
    again.resume(json.loads(json.dumps(made.series(10.0))))
    again.hear(learner_heartbeat("ann", 64, tokens=518, trained=[(0, 0, 4)], **ann), 11.0)
    assert again.ledger.processed("ann") == 18
