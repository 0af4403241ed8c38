"""The report's sums: every token processed is merged or lost, whatever was heard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.core.log.chain import Chain
from diloco.core.run.changes import Changes, Tokens
from diloco.core.run.ledger import Ledger
from diloco.core.tensors.fragments import TensorSpec, build_map
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco.wire.entries import Cursor
from diloco_ops.report import build
from diloco_report.page import render_html

HEARD: dict[str, Any] = {
    "region": None, "step": 20, "lost_tokens": 0,
    "busy_fraction": 1.0, "blocked_fraction": 0.0, "bytes_up": 1, "bytes_down": 1, "step_s": 0.1,
    "points": [], "activity": [],
}  # fmt: skip


NOTHING = Changes(bytes(8))
CHANGES = NOTHING.then(Tokens(900), at_s=1.5, author="ann", reason="enough")


def report(
    tmp_path: Path,
    ledger: Ledger,
    heard: dict[str, int],
    *merged: dict[str, tuple[int, int]],
    changes: Changes = NOTHING,
    **places: Any,
) -> dict[str, Any]:
    """Of a run of 1000 tokens; ``heard``: tokens by learner; ``merged``: of each fragment, merged and lost by learner."""
    fragments = build_map([TensorSpec("a", (4,)), TensorSpec("b", (4,))], 2, "balanced")
    chains = []
    for index, by_learner in enumerate(merged):
        total = sum(tokens for tokens, _ in by_learner.values())
        cursors = {name: Cursor(name, 1, 1, 1, tokens, lost, 1) for name, (tokens, lost) in by_learner.items()}
        chains.append(Chain(index, 1, 0, bytes(32), 1, bytes(32), total, cursors=cursors))
    series = {
        "wall_s": 1.0,
        "rounds": 2,
        "validation": [],
        "merges": [],
        "places": {},
        "absences": [],
        "crossing": [],
        "learners": {name: HEARD | {"tokens": tokens} for name, tokens in heard.items()},
    }
    settings = run_settings("decoupled", {"tokens": 1000, "learners": 2, "regions.names": places.pop("names", [])})
    links, known, evaluation = places.pop("links", {}), places.pop("known", ()), places.pop("evaluation", {})
    directory = RunDirectory(tmp_path, "run", "nats://127.0.0.1:4222", None, settings)
    found = build.Findings(
        directory,
        fragments,
        chains,
        ["s", "s"],
        series | places,
        ledger,
        evaluation,
        links,
        changes,
        references=[],
        failures={},
        events=known,
    )
    return build.build(found)


def sums(made: dict[str, Any]) -> list[int]:
    """Processed, overshoot, forgotten, and of each fragment merged and lost; the equations hold in any case."""
    assert made["tokens_processed"] == made["tokens_budget"] + made["tokens_overshoot"] + made["tokens_forgotten"]
    for fragment in made["fragments"]:
        assert fragment["tokens_merged"] + fragment["tokens_lost"] == made["tokens_processed"]
    assert made["tokens_merged"] + made["tokens_lost"] == made["tokens_processed"]
    fragments = [fragment[key] for fragment in made["fragments"] for key in ("tokens_merged", "tokens_lost")]
    return [made["tokens_processed"], made["tokens_overshoot"], made["tokens_forgotten"], *fragments]


def test_what_a_killed_process_did_counts_although_its_next_one_knows_nothing_of_it(tmp_path: Path) -> None:
    ledger = Ledger(2)
    ledger.train(("ann", 1), [(0, 0, 12)], 50)
    ledger.train(("ann", 2), [(0, 8, 4)])  # behind the 8 merged of the 12
    ledger.train(("bob", 1), [(1, 0, 9)])
    made = report(
        tmp_path, ledger, {"ann": 600, "bob": 450}, {"ann": (600, 0), "bob": (450, 0)}, {"ann": (550, 50), "bob": (400, 0)}
    )
    assert sums(made) == [1250, 50, 200, 1050, 200, 950, 300]
    assert (made["learners"]["ann"]["tokens_processed"], made["learners"]["ann"]["tokens_lost"]) == (800, 225)
    # 12 and 4 batches of 50 tokens, whatever the step of its last state is
    assert made["learners"]["ann"]["steps"] == 16
    assert made["data"]["batch_tokens"] == 50
    assert made["data"]["shares"][0] == {
        "share": 0, "learners": ["ann"], "trained": 12, "merged": 0, "lost": 12, "repeated": 4
    }  # fmt: skip


def test_what_was_done_before_a_run_was_resumed_is_in_the_learners_accounts(tmp_path: Path) -> None:
    ledger = Ledger(2)  # of the new run directory: ann alone goes on
    ledger.train(("ann", 2), [(0, 10, 3)], 50)
    made = report(tmp_path, ledger, {"ann": 650}, {"ann": (650, 0), "bob": (300, 50)}, {"ann": (600, 0), "bob": (350, 20)})
    assert sums(made) == [650 + 370, 20, 0, 950, 70, 950, 70]


def test_events_of_the_coordinator_and_of_diloco_up_are_in_the_order_of_time(tmp_path: Path) -> None:
    heard = [{"at_s": 1.0, "text": "coordinator leads"}, {"at_s": 9.0, "text": "ann: was restarted; its new process is heard"}]
    killed = [{"at_s": 5.0, "text": "ann: was killed (SIGKILL) and is started again"}]
    made = report(tmp_path, Ledger(2), {"ann": 100}, {"ann": (100, 0)}, {"ann": (100, 0)}, events=heard, known=killed)
    assert [event["at_s"] for event in made["events"]] == [1.0, 5.0, 9.0]


def test_a_step_takes_the_trained_time_over_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HEARD, "mean_step_s", 0.25)
    made = report(tmp_path, Ledger(2), {"ann": 100}, {"ann": (100, 0)}, {"ann": (100, 0)})
    assert made["learners"]["ann"]["step_s"] == 0.25


BY_NAME = {"learners", "regions", "activity", "baselines"}  # whose keys are names


def keys(value: Any, of: str = "") -> Iterator[str]:
    """All keys of a report, but for names and the settings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if of not in BY_NAME:
                yield key
            if key != "settings":
                yield from keys(inner, "" if of in BY_NAME else key)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_every_key_of_a_run_with_regions_is_described(tmp_path: Path) -> None:
    ledger = Ledger(2)
    ledger.train(("ann", 1), [(0, 0, 12)], 50)
    link = {"control_bytes": 1, "bulk_bytes": 2, "header_bytes_estimated": 3}
    made = report(
        tmp_path,
        ledger,
        {"ann": 600, "bob": 400},
        {"ann": (600, 0), "bob": (400, 0)},
        {"ann": (600, 0), "bob": (400, 0)},
        names=["us", "eu"],
        places={"ann": "us", "bob": "eu", "s": "us"},
        absences=[["eu", 0.25, 0.5]],
        crossing=[["s", 1, "eu", 10, 20]],
        merges=[{"wall_s": 0.3, "fragment": 0, "version": 1, "members": [["ann", 1.0, 0, 24]]}],
        links={"us-eu": link},
    )
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    described = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert set(keys(made)) - described == set()
    assert made["regions"]["us"] == {"learners": ["ann"], "syncers": ["s"], "fragments": 2, "absences": []}
    assert [period["versions"] for period in made["together"]] == [0, 1, 0]
    assert made["traffic"]["borders"][0] == {"from": "us", "to": "eu", "payload_bytes": 10, "link": link}


def test_the_budget_is_the_one_in_force_at_the_end(tmp_path: Path) -> None:
    made = report(tmp_path, Ledger(2), {"ann": 960}, {"ann": (900, 60)}, {"ann": (900, 60)}, changes=CHANGES)
    assert (made["tokens_budget"], made["tokens_overshoot"]) == (900, 60)
    [change] = made["changes"]
    assert change == {"number": 1, "at_s": 1.5, "author": "ann", "reason": "enough", "text": "tokens = 900"}
    assert made["in_force"] == {"tokens": 900}
    page = render_html(made)
    assert "<td>1970-01-01 00:00:01</td><td>tokens = 900</td><td>ann</td><td>enough</td>" in page
    assert "</del> <ins>900</ins>" in page


def test_the_last_status_has_the_totals_and_the_loss_of_the_report(tmp_path: Path) -> None:
    """The evaluator's last loss comes when the coordinator may have ended: its own last point is of an earlier version."""
    heard = [[0.5, 400, 2.75]]
    evaluation = {"val_loss": 2.5123456}
    ended = {"ann": (1000, 0)}
    made = report(tmp_path, Ledger(2), {"ann": 1000}, ended, ended, validation=heard, evaluation=evaluation)
    assert made["val_loss"] == 2.5123456
    assert made["series"]["global"] == [*heard, [1.0, 1000, 2.5123456]]
    status = {"run": "run", "state": "closing", "wall_s": 0.9, "tokens_merged": 900, "versions": 1, "validation": heard}
    last = build.last_status(status, made)
    assert last == status | {
        "state": "finished",
        "tokens_processed": 1000,
        "tokens_merged": 1000,
        "versions": 2,
        "validation": [*heard, [1.0, 1000, 2.51235]],
    }
    assert build.last_status(last, made) == last


def test_a_run_that_nothing_was_evaluated_of_has_no_loss(tmp_path: Path) -> None:
    made = report(tmp_path, Ledger(2), {"ann": 1000}, {"ann": (1000, 0)}, {"ann": (1000, 0)}, evaluation={"val_loss": None})
    assert (made["val_loss"], made["series"]["global"]) == (None, [])
    assert "validation" not in build.last_status({"state": "closing"}, made)
