"""``diloco simulate run``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from diloco.errors import SettingsError
from diloco.settings.counts import COUNT, parse_count
from diloco.settings.loading import parse_assignments
from diloco.settings.presets import changed_settings, run_settings
from diloco.settings.validation import nearest
from diloco_lab import recorded
from diloco_lab.commands import show
from diloco_lab.commands.files import open_tape, write
from diloco_lab.commands.goodput_command import MAX_DAYS, Set
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import ClusterLearner, LearnerLink, RoundTerms
from diloco_lab.simulator.goodput import STRATEGIES, Strategy, conditions, strategy_of
from diloco_lab.simulator.lifetime import ChipTime, Fault
from diloco_lab.simulator.outcome import Outcome, Scenario
from diloco_lab.traces import tapes
from diloco_ops import failures
from diloco_report.units import count, share, size

HOUR_S = 3600.0  # an hour
BITS_PER_GBIT = 1e9


def run(
    strategy: Annotated[str, typer.Option(help=", ".join(STRATEGIES))] = "decoupled",
    learners: Annotated[int, typer.Option(help="M.")] = 8,
    chips: Annotated[int, typer.Option(parser=parse_count, metavar=COUNT, help="Chips of all learners together.")] = 1_200_000,
    hours: Annotated[float, typer.Option(help="Simulated time.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    parameters: Annotated[float, typer.Option(parser=parse_count, metavar=COUNT, help="Parameters of the model.")] = 5e9,
    link_gbit: Annotated[float, typer.Option(help="Of each learner, in each direction.")] = math.inf,
    delay_s: Annotated[float, typer.Option(help="From a learner to the syncers.")] = 0.0,
    speeds: Annotated[str, typer.Option(metavar="S,S,...", help="How fast each learner is, of --set step_s.")] = "",
    present: Annotated[
        list[str] | None,
        typer.Option(metavar="LEARNER=FROM-UNTIL", help="Hours in which a learner takes part; may be repeated."),
    ] = None,
    set_: Set = None,
    run_set: Annotated[
        list[str] | None, typer.Option("--run-set", metavar="NAME=VALUE", help="A run's setting, such as round.quorum=all.")
    ] = None,
    tape: Annotated[Path | None, typer.Option(help="Failures from a tape instead of random ones.")] = None,
    recorded_: Annotated[
        Path | None,
        typer.Option("--recorded", metavar="DIR", help="Absences of a real run's learners, in its first --hours."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the random failures to a tape.")] = None,
    whole_learners: Annotated[
        bool, typer.Option("--whole-learners", help="On that tape a lost slice freezes its learner: for a live run.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show one simulation in detail: where each learner's time went, what was merged, and what was sent."""
    if not 0 < hours <= MAX_DAYS * 24:
        raise SettingsError(f"--hours {hours:g}: expected a number above 0, at most {MAX_DAYS * 24:g}")
    if not parameters >= 1 or parameters > 1e15:
        raise SettingsError(f"--parameters {parameters:g}: expected 1 to 1e15")
    chosen, plan = conditions(parse_assignments(set_ or []), "--set"), strategy_of(strategy)
    link = LearnerLink(link_gbit * BITS_PER_GBIT, delay_s)
    cluster = replace(chosen.of(plan, chips, 1 if plan.preset is None else learners), link=link, speeds=_speeds(speeds))
    members, rounds = _scheduled(cluster.split(seed), present or []), _rounds(plan, learners, run_set or [], parameters)
    scenario = _with_failures(Scenario(members, hours * HOUR_S, seed, rounds), tape, recorded_)
    drawn: list[tuple[str, Fault]] = []
    if record is not None:
        scenario = replace(scenario, on_failure=lambda learner, fault: drawn.append((learner.name, fault)))
    outcome = simulation.simulate(scenario)
    if record is not None:
        made = tapes.record(scenario, drawn)
        write(record, failures.encode(tapes.whole_learners(made, cluster.costs.downscale_s) if whole_learners else made))
    if json_:
        print(json.dumps(_plain(outcome)))
    else:
        _show(outcome, scenario)


def _rounds(strategy: Strategy, learners: int, run_set: Sequence[str], parameters: float) -> RoundTerms | None:
    """Return the rounds of a strategy whose learners merge; None: it has none."""
    if strategy.preset is None:
        if run_set:
            raise SettingsError(f"--run-set {run_set[0]}: strategy {strategy.name} has no rounds")
        return None
    settings = run_settings(strategy.preset, {"learners": learners})
    settings = changed_settings(settings, parse_assignments(run_set), "--run-set")
    values = max(1, round(parameters / settings.fragments.count))
    return RoundTerms(settings, [values] * settings.fragments.count)


def _with_failures(scenario: Scenario, tape: Path | None, run: Path | None) -> Scenario:
    """Return the scenario with the failures of a tape or of a recorded run, for as long as that is, and no others."""
    if tape is None and run is None:
        return scenario
    if tape is not None and run is not None:
        raise SettingsError(f"--tape {tape} and --recorded {run}: give only one of them")
    learners = [replace(learner, between_s=math.inf) for learner in scenario.learners]
    if tape is not None:
        played = open_tape(tape, learners)
    elif run is not None:
        played = tapes.played(recorded.of_run(run, scenario.duration_s), learners)
    return replace(scenario, learners=learners, duration_s=played.duration_s, faults=played.faults, cuts=played.cuts)


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise SettingsError(f"--speeds {text}: expected numbers, one for each learner, such as 1,1,0.5") from None


def _scheduled(learners: Sequence[ClusterLearner], present: Sequence[str]) -> list[ClusterLearner]:
    """Return the learners, each in the hours that ``present`` gives it, or always."""
    hours: dict[str, list[tuple[float, float]]] = {}
    for item in present:
        name, _, span = item.partition("=")
        if name not in {learner.name for learner in learners}:
            known = [learner.name for learner in learners]
            raise SettingsError(
                f"--present {item}: no learner {name!r}{nearest(name, known)}; there are {known[0]} to {known[-1]}"
            )
        try:
            begin, end = (float(part) * HOUR_S for part in span.split("-"))
        except ValueError:
            raise SettingsError(f"--present {item}: expected LEARNER=FROM-UNTIL in hours, such as {name}=0.5-2") from None
        hours.setdefault(name, []).append((begin, end))
    return [replace(learner, present=tuple(hours.get(learner.name, ()))) for learner in learners]


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "goodput": outcome.goodput,
        "uptime": outcome.uptime,
        "chip_us": asdict(outcome.chip_time),
        "tokens": outcome.tokens,
        "merged_tokens": outcome.merged_tokens,
        "versions": outcome.versions,
        "members": outcome.members,
        "learners": [
            {("chip_us" if name == "chip_time" else name): value for name, value in asdict(learner).items()}
            for learner in outcome.learners
        ],
    }


def _show(outcome: Outcome, scenario: Scenario) -> None:
    out = show.console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("learner", no_wrap=True)
    kinds = [field.name for field in fields(ChipTime)]
    for heading in ("steps", "failures", *kinds, "merged", "lost", "sent", "received"):
        table.add_column(heading, justify="right", no_wrap=True)
    for learner in outcome.learners:
        time, tokens = learner.chip_time, learner.tokens or 1
        shares = [share(getattr(time, kind) / time.allocated, 1) if time.allocated else "–" for kind in kinds]
        merged = [
            share(value / tokens, 1) if scenario.rounds else "–" for value in (learner.merged_tokens, learner.lost_tokens)
        ]
        sent = [size(learner.bytes_up), size(learner.bytes_down)] if scenario.rounds else ["–", "–"]
        table.add_row(learner.name, count(learner.steps), count(learner.failures), *shares, *merged, *sent)
    out.print(table, highlight=False)
    out.print(f"goodput {share(outcome.goodput, 2)}, uptime {share(outcome.uptime, 2)}", highlight=False)
    if outcome.versions:
        each = outcome.members / outcome.versions
        out.print(f"{count(outcome.versions)} versions of {each:.2f} learners on average", highlight=False)
