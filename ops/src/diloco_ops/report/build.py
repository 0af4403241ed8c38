"""``report.json``: from the log (who merged what), the coordinator's series (what was heard) and the evaluator's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco import __version__
from diloco.core.log.chain import Chain
from diloco.core.run.changes import Changes, in_force, text_of
from diloco.core.run.ledger import Ledger, Process, fragment_mean
from diloco.core.run.lives import Life
from diloco.core.tensors import ranges
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import RunError
from diloco.process.tape import load_all
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco_coordinator import overview
from diloco_ops.report import reference
from diloco_ops.report.reference import ReferenceLosses
from diloco_report import regions, traffic

FORMAT = 1


def read_ledger(directory: RunDirectory, run: bytes, series: Mapping[str, Any], fragments: int) -> Ledger:
    """Read the ledger that the coordinator kept, and add the learners' tapes: a learner may have died unheard.

    Raises:
        KeyError, TypeError, ValueError: the series are damaged.
    """
    ledger = Ledger.load(fragments, series["ledger"])
    for tape in load_all(directory.path, run)[0]:
        try:
            lives = tape.lives()
        except RunError:  # `diloco verify` names it; what was heard must do
            continue
        for life in lives:
            if life.start.incarnation:
                _train(ledger, (tape.name, life.start.incarnation), life)
    return ledger


def _train(ledger: Ledger, process: Process, life: Life) -> None:
    """Enter what a process trained in a life on its tape; where tokens vary the tape counts if it has all of it."""
    own = life.ranges()
    ledger.train(process, own)
    if life.counted:
        counted = sum(life.step_tokens(ledger.most_tokens(process)))
        is_whole = ranges.batches(ledger.trained[process]) == ranges.batches(own)
        ledger.count(process, counted if is_whole else max(counted, ledger.counted.get(process, 0)))


@dataclass(frozen=True)
class Findings:
    """All that a report is made of.

    ``links``: of an emulated WAN, by name; empty without one. ``references``: those known, of any conditions.
    ``failures``: errors that ended no run, by the name of who met them.
    """

    directory: RunDirectory
    map: FragmentMap
    chains: Sequence[Chain]
    owners: Sequence[str]
    series: Mapping[str, Any]
    ledger: Ledger
    evaluation: Mapping[str, Any]
    links: Mapping[str, Any]
    changes: Changes
    references: Sequence[ReferenceLosses]
    failures: Mapping[str, str]
    events: Sequence[Mapping[str, Any]] = ()  # that diloco up knows of

    @property
    def sizes(self) -> list[int]:
        """Parameters by fragment."""
        return [fragment.size for fragment in self.map.fragments]

    @property
    def validation(self) -> list[list[Any]]:
        """Points (seconds, merged tokens, loss) of the global model; the last one is the evaluator's result.

        The coordinator may end before it hears that result.
        """
        points, last = [list(point) for point in self.series["validation"]], self.evaluation.get("val_loss")
        if last is not None and (not points or points[-1][2] != last):
            merged = mean([chain.tokens_merged for chain in self.chains], self.sizes)
            points.append([self.series["wall_s"], merged, last])
        return points


def build(found: Findings) -> dict[str, Any]:
    """Return the report as ``docs/report.md`` describes it.

    Raises:
        SettingsError: the run's changes make no sense here.
        KeyError, TypeError, ValueError, AttributeError: the series or the evaluation are damaged.
    """
    settings, series, evaluation = found.directory.settings, found.series, found.evaluation
    counted = _accounts(series, found.chains)
    # a ledger begins with its run directory: the work of a resumed run before is in the learners' own accounts alone
    processed_by = {name: max(tokens, found.ledger.processed(name)) for name, tokens in counted.items()}
    processed = sum(processed_by.values())
    learners = {name: _learner(name, found, processed_by[name]) for name in series["learners"]}
    places = regions.describe(settings.regions.names, series, found.owners)
    return {
        "format": FORMAT,
        "run": found.directory.name,
        "preset": settings.preset,
        "wall_s": series["wall_s"],
        "origin": _origin(found.directory),
        "parameters": found.map.parameters,
        "state_values": found.map.state_values,
        "val_loss": evaluation.get("val_loss", found.validation[-1][2] if found.validation else None),
        "val_loss_initial": evaluation.get("val_loss_initial"),
        "values": evaluation.get("values", {}),
        "values_initial": evaluation.get("values_initial", {}),
        "units": evaluation.get("units"),
        "item": evaluation.get("item"),
        "baselines": evaluation.get("baselines", {}),
        "comparison": _comparison(found),
        **_tokens(found, counted, processed),
        "rounds": series["rounds"],
        "versions": sum(chain.version for chain in found.chains),
        "learners": learners,
        "fragments": _fragments(found, processed),
        "data": _data(
            found.ledger, found.sizes, settings.epochs(mean([chain.tokens_merged for chain in found.chains], found.sizes))
        ),
        "traffic": traffic.compared(
            learners, found.map.parameters, regions.borders(settings.regions.names, series, found.links)
        ),
        "regions": places,
        "together": regions.together(places, series["merges"], series["wall_s"]) if places else [],
        "settings": settings.model_dump(),
        "in_force": overview.changed(overview.in_force(_at_the_end(found)), settings),
        "changes": [
            {"number": c.number, "at_s": c.at_s, "author": c.author, "reason": c.reason, "text": text_of(c)}
            for c in found.changes.records
        ],
        "failures": dict(found.failures),
        "events": sorted([*series.get("events", []), *found.events], key=lambda event: event["at_s"]),
        "sample": evaluation.get("sample"),
        "series": overview.series({**series, "validation": found.validation}),
    }


def last_status(status: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the final status of a run: the coordinator's last one, with the totals and the loss of the report."""
    ended: dict[str, Any] = {name: report[name] for name in ("tokens_processed", "tokens_merged", "versions")}
    known, points = status.get("validation") or [], report["series"]["global"]
    if points:
        at_s, tokens, loss = points[-1]
        last = [round(at_s, 2), tokens, round(loss, 5)]  # as the coordinator gives them
        ended["validation"] = known if known and known[-1][2] == last[2] else [*known, last]
    return {**status, "state": "finished", **ended}


def _origin(directory: RunDirectory) -> dict[str, Any]:
    return {
        "command": directory.command,
        "host": directory.host,
        "began_at_s": directory.began_at_s,
        "version": __version__,
    }


def _comparison(found: Findings) -> dict[str, Any]:
    settings, text = found.directory.settings, found.evaluation.get("text")
    return reference.compare(found.references, settings, _budget(found), text, found.directory.data)


def _at_the_end(found: Findings) -> RunSettings:
    """Return the settings in force at the end."""
    return in_force(found.directory.settings, found.changes.records).settings


def _budget(found: Findings) -> int:
    return _at_the_end(found).tokens


def _tokens(found: Findings, counted: Mapping[str, int], processed: int) -> dict[str, int]:
    """Return the run's token accounts; ``counted`` is by learner, ``processed`` of all."""
    budget = _budget(found)
    merged = mean([chain.tokens_merged for chain in found.chains], found.sizes)
    return {
        "tokens_before": found.directory.settings.tokens_before,
        "tokens_budget": budget,
        "tokens_processed": processed,
        "tokens_overshoot": sum(counted.values()) - budget,
        "tokens_forgotten": processed - sum(counted.values()),
        "tokens_merged": merged,
        "tokens_lost": processed - merged,
    }


def _fragments(found: Findings, processed: int) -> list[dict[str, Any]]:
    return [
        {
            "fragment": fragment.index,
            "parameters": fragment.size,
            "embedding": fragment.embedding,
            "state": fragment.state,
            "owner": owner,
            "versions": chain.version,
            "tokens_merged": chain.tokens_merged,
            "tokens_lost": processed - chain.tokens_merged,
            "state_hash": chain.state_hash.hex(),
        }
        for fragment, chain, owner in zip(found.map.fragments, found.chains, found.owners, strict=True)
    ]


def _data(ledger: Ledger, sizes: Sequence[int], epochs: Mapping[str, float]) -> dict[str, Any]:
    return {
        "epochs": {name: round(value, 4) for name, value in epochs.items()},
        "batch_tokens": ledger.batch_tokens,
        "tokens_vary": ledger.varies,
        "shares": [
            {
                "share": share.share,
                "learners": list(share.learners),
                "trained": share.trained,
                "merged": share.merged,
                "lost": share.lost,
                "repeated": share.repeated,
            }
            for share in ledger.shares()
        ],
        "own": ledger.own_tokens(sizes),
        "errors": ledger.errors + ledger.untrained(),
    }


def load_json(path: Any) -> dict[str, Any]:
    """Read a JSON object from a file; empty if there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _accounts(series: Mapping[str, Any], chains: Sequence[Chain]) -> dict[str, int]:
    """Tokens by learner that it said it had processed, to the coordinator or, if it was never heard, to the log."""
    accounts: dict[str, int] = {name: heard["tokens"] for name, heard in series["learners"].items()}
    for chain in chains:
        for name, cursor in chain.cursors.items():
            accounts[name] = max(cursor.tokens + cursor.lost_tokens, accounts.get(name, 0))
    return accounts


def _learner(name: str, found: Findings, processed: int) -> dict[str, Any]:
    heard, chains = found.series["learners"][name], found.chains
    cursors = [chain.cursors.get(name) for chain in chains]
    merged = sum(cursor.versions for cursor in cursors if cursor)
    tokens_merged = mean([cursor.tokens if cursor else 0 for cursor in cursors], found.sizes)
    return {
        "region": heard["region"],
        # of the same moment as the tokens: the step of a learner that lost its checkpoint is that of its new one
        "steps": found.ledger.steps(name, processed, heard["step"]),
        "tokens_processed": processed,
        "tokens_merged": tokens_merged,
        "tokens_lost": processed - tokens_merged,
        "busy_fraction": heard["busy_fraction"],
        "blocked_fraction": heard["blocked_fraction"],
        "bytes_up": heard["bytes_up"],
        "bytes_down": heard["bytes_down"],
        "rounds_merged": merged,
        "rounds_missed": sum(chain.version for chain in chains) - merged,
        "device": heard.get("device"),
        "host": heard.get("host"),
        "step_s": heard["step_s"] if heard.get("mean_step_s") is None else heard["mean_step_s"],
    }


def mean(values: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the mean over fragments, weighted by parameters."""
    return round(fragment_mean(values, sizes)) if values else 0
