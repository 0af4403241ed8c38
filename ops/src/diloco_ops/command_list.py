"""The commands of ``diloco`` by group, each with one line of help. Nothing is imported, so that ``diloco --help`` is quick.

A command's own help is its docstring, which ``diloco COMMAND --help`` shows.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

USAGE = "Usage: diloco COMMAND [OPTIONS] [ARGUMENTS]"
INTRODUCTION = "Decoupled DiLoCo: train one model over many data centers, on ordinary links."
OTHERS = "Other"  # the group of commands that other distributions bring

GROUPS: dict[str, dict[str, str]] = {
    "Run": {
        "init": "Make a project that trains and tests itself.",
        "check": "Compile one step of a task and report what a run would do with it.",
        "doctor": "Examine this machine, the servers and the links before a run.",
        "up": "Train one model with several learners on this machine.",
        "serve": "Start the services of a run that your own training loops join.",
        "attach": "Make a directory for a run that others started, to watch and verify it.",
    },
    "Watch": {
        "status": "Show what a run is doing now, or how it ended.",
        "top": "Watch a run in the terminal.",
        "page": "Serve a run's page on this machine, with actions.",
        "logs": "Show the logs of all services of a run, in order of time.",
        "track": "Send a run's losses, rates and bytes to TensorBoard or W&B.",
        "runs": "List the runs of this machine; list, show and remove those on a NATS server.",
    },
    "Operate": {
        "set": "Change the settings or the token budget of a run.",
        "eject": "Exclude a learner from a run.",
        "readmit": "Let an ejected or quarantined learner take part again.",
        "checkpoint": "Take a checkpoint of a whole run, without a pause.",
        "restore": "Restore a checkpoint onto running servers.",
        "rollback": "Take a run back to an earlier version.",
        "repair": "Find damaged records in a run's log, and continue after them.",
        "keys": "Manage certificates and NATS keys: who may take part in a run.",
        "wan": "Emulate slow, distant links between regions.",
    },
    "Weights": {
        "export": "Write the weights of a run to a file.",
        "eval": "Evaluate a run's model on held-out data.",
        "sample": "Generate text with a run's model.",
    },
    "Data": {
        "data": "Prepare a mix of data or conversations, and show its sources, epochs and speed.",
    },
    "Study": {
        "verify": "Check a run's log, hashes and accounts from outside.",
        "replay": "Repeat a run's merges and training, and compare every bit.",
        "compare": "Show several runs side by side.",
        "chaos": "Break a live run on purpose, and check that it recovers.",
        "siege": "Attack a rehearsal of a run under members' identities, and measure the harm.",
        "simulate": "Estimate goodput, bandwidth and a plan for machines that you do not have.",
        "lab": "Run experiments on model quality, in virtual time over paired seeds.",
    },
}  # fmt: skip
# printed before the command is imported, unless its output is JSON: a user sees at once that it has begun
FIRST_LINES = {"up": "diloco up: starting"}
OPTIONS = {"--version": "Print the version.", "--help": "Show this message, or, after a command, that command's help."}


def help_text(installed: Mapping[str, str]) -> str:
    """Return the help of ``diloco``, as wide as the terminal.

    Args:
        installed: the distribution of each command that is installed, by the command's name.
    """
    groups = {group: {name: text for name, text in lines.items() if name in installed} for group, lines in GROUPS.items()}
    known = {name for lines in groups.values() for name in lines}
    groups[OTHERS] = {name: f"From {source}." for name, source in installed.items() if name not in known}
    width = min(shutil.get_terminal_size().columns, 100)
    column = 2 + max(len(name) for name in (*installed, *OPTIONS)) + 2
    text = "\n\n".join(textwrap.fill(paragraph, width) for paragraph in (USAGE, INTRODUCTION))
    for group, lines in (groups | {"Options": OPTIONS}).items():
        if lines:
            text += f"\n\n{group}"
        for name, line in lines.items():
            begins, goes_on = f"  {name}".ljust(column), " " * column
            text += "\n" + textwrap.fill(line, max(width, column + 20), initial_indent=begins, subsequent_indent=goes_on)
    return text + "\n"
