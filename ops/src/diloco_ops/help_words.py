"""Words in the help of commands in place of Python's types: ``TEXT`` for ``<list[str]>``, and nothing for a flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperOption

WORDS: dict[Any, str] = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}


def put_words(command: Any) -> None:
    """Put words into the help of a command, and of all commands below it, where they have no ``metavar`` of their own."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if isinstance(parameter, TyperOption) and parameter.metavar is None and not parameter.type_descriptor.is_choice:
            parameter.metavar = "" if parameter.is_flag else _word(parameter.type_descriptor.annotation)
        elif isinstance(parameter, TyperArgument) and parameter.metavar is not None:
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign] # typer has no setting for it
    for below in getattr(command, "commands", {}).values():
        put_words(below)


def _word(annotation: Any) -> str | None:
    """Return the word for a type, or for the items of a list; None: typer's own."""
    items = get_args(annotation) if get_origin(annotation) is list else (annotation,)
    return WORDS.get(items[0])
