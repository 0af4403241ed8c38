"""``report.json``: from the log (who merged what), the coordinator's series (what was heard) and the evaluator's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.core.chain import Chain
from diloco.core.changes import Changes, in_force, text_of
from diloco.core.fragments import FragmentMap
from diloco.core.ledger import Ledger
from diloco.errors import ChainError, RunError
from diloco.log import Log
from diloco.report import regions
from diloco.rundir import RunDirectory
from diloco.tape import load_all

FORMAT = 1
BFLOAT16_BYTES = 2


async def read_chains(log: Log) -> list[Chain]:
    """Every fragment's checked head, from the log alone.

    Raises:
        RunError: the log has no genesis, or misses a keyframe.
    """
    genesis = await log.genesis()
    if genesis is None:
        return []
    chains = []
    for fragment in log.map.fragments:
        chain = (await log.load(fragment.index, *genesis)).replica.chain
        stop = await log.end_sequence(fragment.index)
        if stop > chain.sequence:
            async for entry in log.follow([fragment.index], chain.sequence + 1, lambda sequence, error: None, stop):
                try:
                    chain.check(entry.record)
                except ChainError:
                    continue
                chain.advance(entry.record, entry.check, entry.sequence)
        chains.append(chain)
    return chains


def read_ledger(directory: RunDirectory, run: bytes, series: Mapping[str, Any], fragments: int) -> Ledger:
    """The ledger of what the coordinator heard, and of what is on the learners' tapes: a learner may have died unheard.

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
                ledger.train((tape.name, life.start.incarnation), life.ranges())
    return ledger


def build(
    directory: RunDirectory,
    fragment_map: FragmentMap,
    chains: Sequence[Chain],
    owners: Sequence[str],
    series: Mapping[str, Any],
    ledger: Ledger,
    evaluation: Mapping[str, Any],
    links: Mapping[str, Any],
    changes: Changes,
) -> dict[str, Any]:
    """The report as ``docs/report.md`` describes it. ``links``: of an emulated WAN, by name; empty without one.

    Raises:
        SettingsError: the run's changes make no sense here.
        KeyError, TypeError, ValueError, AttributeError: the series or the evaluation are damaged.
    """
    settings = directory.settings
    budget = in_force(settings, changes.records).settings.tokens
    sizes = [fragment.size for fragment in fragment_map.fragments]
    validation = [list(point) for point in series["validation"]]
    counted = _accounts(series, chains)
    # a ledger begins with its run directory: what a resumed run did before is in the learners' own accounts alone
    processed_by = {name: max(tokens, ledger.processed(name)) for name, tokens in counted.items()}
    processed, merged = sum(processed_by.values()), _mean([chain.tokens_merged for chain in chains], sizes)
    learners = {name: _learner(name, heard, processed_by[name], chains, sizes) for name, heard in series["learners"].items()}
    steps = sum(learner["steps"] for learner in learners.values())
    bytes_up = sum(learner["bytes_up"] for learner in learners.values())
    bytes_down = sum(learner["bytes_down"] for learner in learners.values())
    # a ring all-reduce of bfloat16 gradients at every step sends, and receives, 2 (M - 1) / M of the model a learner
    ring = 2 * max(0, len(learners) - 1) / max(1, len(learners))
    data_parallel = round(2 * steps * ring * fragment_map.parameters * BFLOAT16_BYTES)
    places = regions.describe(settings.regions.names, series, owners)
    final_loss = evaluation.get("val_loss", validation[-1][2] if validation else None)
    return {
        "format": FORMAT,
        "run": directory.name,
        "preset": settings.preset,
        "wall_s": series["wall_s"],
        "parameters": fragment_map.parameters,
        "val_loss": final_loss,
        "val_loss_initial": evaluation.get("val_loss_initial"),
        "baselines": evaluation.get("baselines", {}),
        "tokens_budget": budget,
        "tokens_processed": processed,
        "tokens_overshoot": sum(counted.values()) - budget,
        "tokens_forgotten": processed - sum(counted.values()),
        "tokens_merged": merged,
        "tokens_lost": processed - merged,
        "rounds": series["rounds"],
        "versions": sum(chain.version for chain in chains),
        "learners": learners,
        "fragments": [
            {
                "fragment": fragment.index,
                "parameters": fragment.size,
                "embedding": fragment.embedding,
                "owner": owner,
                "versions": chain.version,
                "tokens_merged": chain.tokens_merged,
                "tokens_lost": processed - chain.tokens_merged,
                "state_hash": chain.state_hash.hex(),
            }
            for fragment, chain, owner in zip(fragment_map.fragments, chains, owners, strict=True)
        ],
        "data": {
            "batch_tokens": ledger.batch_tokens,
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
            "errors": ledger.errors + ledger.untrained(),
        },
        "traffic": {
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            "bytes_data_parallel": data_parallel,
            "ratio": data_parallel / (bytes_up + bytes_down) if bytes_up + bytes_down else None,
            "borders": regions.borders(settings.regions.names, series, links),
        },
        "regions": places,
        "together": regions.together(places, series["merges"], series["wall_s"]) if places else [],
        "settings": settings.model_dump(),
        "changes": [
            {"number": c.number, "at_s": c.at_s, "author": c.author, "reason": c.reason, "text": text_of(c)}
            for c in changes.records
        ],
        "sample": evaluation.get("sample"),
        "series": {
            "learners": {
                name: [[at, tokens, step, loss] for at, tokens, step, loss in heard["points"]]
                for name, heard in series["learners"].items()
            },
            "global": validation,
            "activity": {name: heard["activity"] for name, heard in series["learners"].items()},
            "merges": series["merges"],
            "rollbacks": list(series.get("rollbacks", ())),
        },
    }


def load_json(path: Any) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none."""
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


def _learner(
    name: str, heard: Mapping[str, Any], processed: int, chains: Sequence[Chain], sizes: Sequence[int]
) -> dict[str, Any]:
    cursors = [chain.cursors.get(name) for chain in chains]
    merged = sum(cursor.versions for cursor in cursors if cursor)
    tokens_merged = _mean([cursor.tokens if cursor else 0 for cursor in cursors], sizes)
    return {
        "region": heard["region"],
        "steps": heard["step"],
        "tokens_processed": processed,
        "tokens_merged": tokens_merged,
        "tokens_lost": processed - tokens_merged,
        "busy_fraction": heard["busy_fraction"],
        "blocked_fraction": heard["blocked_fraction"],
        "bytes_up": heard["bytes_up"],
        "bytes_down": heard["bytes_down"],
        "rounds_merged": merged,
        "rounds_missed": sum(chain.version for chain in chains) - merged,
        "step_s": heard["step_s"],
    }


def _mean(values: Sequence[int], sizes: Sequence[int]) -> int:
    """Mean over fragments, weighted by parameters."""
    return round(sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)) if values else 0
