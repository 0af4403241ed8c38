"""``diloco simulate``: its subcommands, each a module's."""

from __future__ import annotations

import typer

from diloco_lab.commands.bandwidth_command import bandwidth
from diloco_lab.commands.goodput_command import goodput
from diloco_lab.commands.island_command import island
from diloco_lab.commands.plan import plan
from diloco_lab.commands.recovery import recover
from diloco_lab.commands.report import report
from diloco_lab.commands.run import run
from diloco_lab.commands.trace import trace

simulate = typer.Typer(
    no_args_is_help=True, help="Estimate what a run would do on machines that you do not have: goodput, bandwidth, a plan."
)


@simulate.callback()
def _simulate() -> None:
    """Make the commands below it subcommands, however many there are."""


simulate.command()(goodput)
simulate.command()(bandwidth)
simulate.command("recovery")(recover)
simulate.command()(plan)
simulate.command()(island)
simulate.command()(run)
simulate.command()(report)
simulate.command()(trace)
