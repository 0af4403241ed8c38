"""Calls of a task's members: each is given the keywords that its function names, and no others.

So a task is written without what it has no use for, and one of two arguments is called as ever.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from diloco.errors import DilocoError, SettingsError
from diloco.settings.run import TaskSettings

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def keywords(task: object, member: str, arguments: int, known: Collection[str]) -> frozenset[str]:
    """Return which of the known keywords a member's function names beyond its first ``arguments``.

    Raises:
        SettingsError: it needs one that is not known.
    """
    function = getattr(task, member)
    named = set()
    for parameter in parameters(function)[arguments:]:
        if parameter.kind in NAMED and parameter.name in known:
            named.add(parameter.name)
        elif parameter.kind in (*NAMED, *PLACED) and parameter.default is parameter.empty:
            raise SettingsError(
                f"task: {member}() needs {parameter.name!r}, which nobody gives it: it may name "
                f"{', '.join(known) or 'no keyword'} beyond its first {arguments} arguments{place(function)}"
            )
    return frozenset(named)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters, those that it is given by place first; none if it says nothing of them."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.kind in PLACED] + [p for p in found if p.kind not in PLACED]


def place(function: Callable[..., Any]) -> str:
    """Return where a function is written, as an error ends with it; empty where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


@contextmanager
def users_errors(settings: TaskSettings) -> Iterator[None]:
    """Have an error of a user's task say so, and where it was raised.

    Raises:
        SettingsError: instead of any error that is none of ours.
    """
    try:
        yield
    except DilocoError:
        raise
    except Exception as error:  # raised by the user's code
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
        where = f"{frames[-1].filename}, line {frames[-1].lineno}"
        raise SettingsError(f"task.name = {settings.name!r}: {type(error).__name__}: {error} ({where})") from None
