"""The command line of a script: signatures of functions are its arguments, their docstrings the help, their results shown.

A parameter before a ``*`` is a positional argument. Others are options: ``step_s`` is ``--step-s``, a list may be given in one
go or again and again, and a bool is off by default. ``Annotated`` has an option's help, and a tuple of its choices.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.process import observe

Result = dict[str, Any]
Keep = typing.Annotated[Path | None, "folder of the run, which stays; by default it is temporary"]


class Bench:
    """A measurement of a script: a function, a coroutine function or not, and how its result is shown as text.

    The result may be had as JSON, too. It has ``passed`` where the exit code tells. Without ``show`` the function prints.
    """

    def __init__(self, measure: Callable[..., Any], show: Callable[[Result], None] | None = None) -> None:
        self.measure, self.show = measure, show
        self.name = measure.__name__.replace("_", "-")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments that the function's signature states."""
        hints = typing.get_type_hints(self.measure, include_extras=True)
        for name, parameter in inspect.signature(self.measure).parameters.items():
            options, required = _options(hints[name]), parameter.default is parameter.empty
            option = f"--{name.strip('_').replace('_', '-')}"
            if parameter.kind is parameter.KEYWORD_ONLY:
                if parameter.default not in (None, False) and "help" not in options:
                    options["help"] = f"{_shown(parameter.default)} by default"
                parser.add_argument(option, dest=name, default=argparse.SUPPRESS, **options)
            else:
                options |= {"action": "store"} | ({} if required else {"nargs": "*"})
                if "choices" in options:  # argparse itself would refuse an empty list
                    choices = options.pop("choices")
                    options |= {"type": _one_of(choices), "metavar": f"{{{','.join(choices)}}}"}
                parser.add_argument(name, **options)
        if self.show is not None:
            parser.add_argument("--json", action="store_true")
        parser.set_defaults(bench=self)

    def run(self, asked: dict[str, Any], *, as_json: bool) -> int:
        """Measure, show the result, and return the exit code."""
        result = self.measure(**asked)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if self.show is not None:
            print(json.dumps(result)) if as_json else self.show(result)
        return 0 if result is None or result.get("passed", True) else 1


def _options(hint: Any) -> dict[str, Any]:
    """Return what argparse is to know of a parameter's type."""
    options: dict[str, Any] = {}
    if typing.get_origin(hint) is typing.Annotated:
        hint, *more = typing.get_args(hint)
        options = {"choices" if isinstance(each, tuple) else "help": each for each in more}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        [hint] = (each for each in typing.get_args(hint) if each is not type(None))
    if hint is bool:
        return options | {"action": "store_true"}
    if typing.get_origin(hint) is None:
        return options | {"type": hint}
    [of] = typing.get_args(hint)[:1]
    return options | {"type": of, "nargs": "+", "action": "extend"}


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def chosen(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(choices)}")
        return text

    return chosen


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"


class Script:
    """A script that measures one thing, or several that its first argument names."""

    def __init__(self, about: str | None, *benches: Bench) -> None:
        self.about, self.benches = about, benches

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the script's arguments."""
        kept = argparse.RawDescriptionHelpFormatter  # a module's text is shown as it is
        made = argparse.ArgumentParser(description=self.about, formatter_class=kept)
        if len(self.benches) == 1:
            self.benches[0].add_to(made)
            return made
        commands = made.add_subparsers(required=True, metavar="WHAT")
        for bench in self.benches:
            text = inspect.getdoc(bench.measure) or ""
            bench.add_to(commands.add_parser(bench.name, help=text.partition("\n")[0], description=text, formatter_class=kept))
        return made

    def run(self) -> None:
        """Do what this process's arguments ask for, and exit.

        Events go to stderr: stdout has the result alone, also where a connection of the bench's own is lost.
        """
        observe.configure("bench", "", level="warning", fmt="console")
        asked = {name: value for name, value in vars(self.parser().parse_args()).items() if value != []}
        bench, as_json = asked.pop("bench"), asked.pop("json", False)
        sys.exit(bench.run(asked, as_json=as_json))


def say(text: str) -> None:
    """Print what goes on to stderr, since it takes long."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def folder(given: Path | None = None) -> Iterator[Path]:
    """Give the folder that a bench writes into. A folder that was given stays; any other is removed at the end."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        yield Path(name)
