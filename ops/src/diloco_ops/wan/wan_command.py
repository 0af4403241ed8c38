"""``diloco wan``: the relay, and the commands to it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import SettingsError
from diloco.process import observe
from diloco_ops.wan import control
from diloco_ops.wan.config import DEFAULT_CONTROL, Config, load
from diloco_ops.wan.control import Control
from diloco_ops.wan.relay import Relay
from diloco_report import units

wan = typer.Typer(
    no_args_is_help=True, help="Emulate the WAN between regions: a relay with slow, distant links that can be cut."
)

TOTALS = ("control_bytes", "bulk_bytes", "packets_estimated", "header_bytes_estimated")

_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECOND_UNITS = {"s": 1.0, "ms": 1e-3}

At = Annotated[str, typer.Option(metavar="HOST:PORT", envvar="DILOCO_WAN", help="HOST:PORT of the relay's control.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Links = Annotated[list[str], typer.Argument(metavar="LINK...", help="us-eu (one direction), eu (all from and to it), 'us-*'.")]
AnyLinks = Annotated[
    list[str] | None,
    typer.Argument(metavar="[LINK...]", help="us-eu (one direction), eu (all from and to it), 'us-*'; default: all."),
]


@wan.command()
def serve(path: Annotated[Path, typer.Argument(metavar="CONFIG", help="The relay's TOML file.")]) -> None:
    """Run the relay until it is stopped."""
    config = load(path)
    observe.configure("wan", "", level=config.log_level, fmt=config.log_format, file=config.log_file)
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    log = observe.get_logger()
    stop = asyncio.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(ending, stop.set)
    relay = Relay(config, log)
    commands = Control(relay)
    try:
        await relay.start()
        at = await commands.start(config.control)
        log.info("wan_started", control=at, links=list(relay.lines))
        await stop.wait()
        for name, link in relay.status(relay.lines.values())["links"].items():
            log.info("link_carried", link=name, **{key: link[key] for key in TOTALS})
        log.info("wan_stopped")
    finally:
        await commands.close()
        await relay.close()


@wan.command()
def status(links: AnyLinks = None, at: At = DEFAULT_CONTROL, json_: Json = False) -> None:
    """Show the state of the links: traffic, queues and totals."""
    [answer] = control.asked(at, control.Status(links or []))
    if json_:
        print(json.dumps(answer))
    else:
        Console().print(table(answer))


@wan.command()
def cut(links: Links, at: At = DEFAULT_CONTROL, json_: Json = False) -> None:
    """Cut links: no data passes until they are healed. Connections stay open."""
    _command(at, control.Cut(links), "cut", json_)


@wan.command()
def heal(links: AnyLinks = None, at: At = DEFAULT_CONTROL, json_: Json = False) -> None:
    """End the cuts of links: held data passes at once."""
    _command(at, control.Heal(links or []), "healed", json_)


@wan.command("set")
def set_(
    links: Links,
    rate: Annotated[str | None, typer.Option(metavar="RATE", help="500kbit, 5mbit, 1gbit or unlimited, of payload.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="One way: 60ms or 0.06s.")] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TIME", help="Variation of the delay, up and down.")] = None,
    slow: Annotated[float | None, typer.Option(metavar="FACTOR", help="Divide the rate by this; 1 ends it.")] = None,
    at: At = DEFAULT_CONTROL,
    json_: Json = False,
) -> None:
    """Change the rate, delay or jitter of links, or slow them by a factor."""
    request = control.SetConditions(links)
    if rate is not None:
        request.rate_bits_per_s = "unlimited" if rate == "unlimited" else _quantity("--rate", rate, _RATE_UNITS)
    if delay is not None:
        request.delay_s = _quantity("--delay", delay, _SECOND_UNITS)
    if jitter is not None:
        request.jitter_s = _quantity("--jitter", jitter, _SECOND_UNITS)
    if slow is not None:
        request.slow = slow
    if request == control.SetConditions(links):
        raise SettingsError("diloco wan set: nothing to set; give --rate, --delay, --jitter or --slow")
    _command(at, request, "set", json_)


@wan.command()
def play(
    tape: Annotated[Path, typer.Argument(metavar="TAPE", help="A failure tape with link_cut, link_slow and link_set.")],
    at: At = DEFAULT_CONTROL,
    json_: Json = False,
) -> None:
    """Play a schedule on a running relay. All its effects end with this command."""
    try:
        with tape.open(errors="replace") as file:
            text = file.read(control.MAX_REQUEST_BYTES)
    except OSError as error:
        raise SettingsError(f"{tape}: cannot be read: {error.strerror}") from None
    for line in control.asked(at, control.Play(text, str(tape))):
        print(json.dumps(line) if json_ else _told(line), flush=True)


def _command(at: str, request: control.Request, done: str, json_: bool) -> None:
    [answer] = control.asked(at, request)
    print(json.dumps(answer) if json_ else f"{done}: {', '.join(answer['links'])}")


def _quantity(option: str, text: str, known: dict[str, float]) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text)
    if not found or found[2] not in known:
        raise SettingsError(f"{option} {text}: expected a number with its unit: {', '.join(known)}")
    return float(found[1]) * known[found[2]]


def _told(line: dict[str, Any]) -> str:
    if "played" in line:
        return f"played: {line['played']} failures"
    what = line["kind"]
    if not line["begins"]:
        what += " ends"
    elif line["duration_s"]:
        what += f" for {line['duration_s']:g} s"
    if line["begins"]:
        what += "".join(f", {name} {value}" for name, value in line["values"].items())
    return f"{line['at_s']:8.1f} s  {what}: {', '.join(line['links'])}"


def table(status: dict[str, Any]) -> Table:
    """Return a relay's status as a table."""
    shown = Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title=f"up for {units.duration(status['uptime_s'])}" + (", a schedule plays" if status["playing"] else ""),
        caption="now: over 5 s; sizes: payload; headers: estimated; age: of the queue",
    )
    for heading in ("link", "state"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("Mbit/s", "now", "ms", "control", "bulk", "headers", "queued", "age ms"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, link in status["links"].items():
        shown.add_row(
            name,
            _state(link),
            "unlimited" if link["rate_bits_per_s"] is None else _mbit(link["rate_bits_per_s"]),
            _mbit(link["achieved_bits_per_s"]),
            f"{link['delay_s'] * 1e3:g}" + (f" ± {link['jitter_s'] * 1e3:g}" if link["jitter_s"] else ""),
            *(units.size(link[key]) for key in ("control_bytes", "bulk_bytes", "header_bytes_estimated", "queued_bytes")),
            f"{link['queue_age_s'] * 1e3:.0f}",
        )
    return shown


def _state(link: dict[str, Any]) -> str:
    if link["state"] == "cut":
        return "[red]cut[/]"
    return "[yellow]disturbed[/]" if link["disturbed_by"] else "[green]up[/]"


def _mbit(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e6:.3g}"
