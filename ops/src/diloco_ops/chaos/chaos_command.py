"""``diloco chaos DIR``: draws or reads a failure tape, brings it about in a live run, and ends with a verdict."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import RunError, SettingsError
from diloco.process import files, observe
from diloco.service import rundir
from diloco_ops import failures
from diloco_ops.chaos.kinds import KINDS, Present, sources
from diloco_ops.chaos.play import Chaos
from diloco_ops.chaos.verdict import describe
from diloco_ops.failures import FailureTape


def chaos(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run that `diloco up` is running.")],
    seed: Annotated[int, typer.Option(help="Seed of the failures.")] = 0,
    for_: Annotated[float, typer.Option("--for", min=0.1, help="Seconds of chaos.")] = 60.0,
    kinds: Annotated[
        str | None,
        typer.Option(
            help=f"Only these kinds of failures, comma separated: {', '.join(KINDS)}; default: all that apply to the run."
        ),
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Failures per second.")] = 0.2,
    tape: Annotated[Path | None, typer.Option(help="Play this failure tape instead of drawing one at random.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write the failure tape to this file.")] = None,
    lead_in: Annotated[
        float, typer.Option(min=0, help="Seconds before the chaos in which the undisturbed pace is measured.")
    ] = 5.0,
    json_: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Break a live run on purpose, check that it recovers, and report the cost. Exit code 1 if any invariant is broken."""
    run = rundir.load(directory.resolve())
    if run.finished:
        raise RunError(f"{directory}: this run is finished; chaos needs a run that `diloco up` is running")
    names = sorted(file.stem for file in (run.path / "services").glob("*.pid"))
    present = Present(names, run.settings.regions.names)
    if not present.targets(KINDS["kill"]) or not run.nats_url:
        raise RunError(f"{directory}: no service of this run is running; begin it with: diloco up --run-dir {directory}")
    chosen = _kinds(kinds, present)
    if tape is None:
        drawn = failures.draw(seed, sources(chosen, present), for_, rate, regular=True)
        left_out: dict[str, int] = {}
    else:
        drawn, left_out = failures.only(_read_tape(tape), chosen)
    if record is not None:
        text = failures.encode(drawn)
        files.replace_text(record, text)
    observe.configure("chaos", run.name, file=run.path / "logs" / "chaos.jsonl")
    verdict = asyncio.run(
        _interruptible(
            Chaos(directory=run, present=present, tape=drawn, seed=seed, lead_in_s=lead_in, say=_silent if json_ else _say)
        )
    )
    verdict |= {"seed": seed, "left_out": left_out}
    if json_:
        print(json.dumps(verdict))
    else:
        print(describe(verdict))
    return 0 if verdict["holds"] else 1


def _kinds(text: str | None, present: Present) -> list[str]:
    if text is None:
        return [name for name, kind in KINDS.items() if present.is_possible(kind)]
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in KINDS:
            raise SettingsError(f"--kinds {name}: no such kind of failure; there are {', '.join(KINDS)}")
        if KINDS[name].links and not present.regions:
            raise SettingsError(f"--kinds {name}: only where the run has regions, with links between them")
        if not present.is_possible(KINDS[name]):
            raise SettingsError(f"--kinds {name}: only where the server is the run's own, not with `diloco up --nats`")
    return chosen


def _read_tape(path: Path) -> FailureTape:
    try:
        with path.open(errors="replace") as lines:
            bounded = iter(lambda: lines.readline(failures.MAX_LINE_BYTES + 1), "")
            return failures.decode(bounded, str(path))
    except OSError as error:
        raise SettingsError(f"--tape {path}: cannot be read: {error.strerror}") from None


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Print nothing: with ``--json`` only the verdict is printed."""


async def _interruptible(chaos: Chaos) -> dict[str, Any]:
    """Run it; SIGTERM ends it as Ctrl-C does, with every fault reverted."""
    task = asyncio.ensure_future(chaos.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
