"""Calls of a task's members. Each gets only the keywords that its function names.

So a task is written without what it has no use for, and one of two arguments is called as ever.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco import errors
from diloco.errors import DilocoError, SettingsError
from diloco.settings.run import TaskSettings

MOST_TEXT = 300  # characters of an error's: those of libraries go on for pages
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# beginnings of the files of code that is not the user's: ours, Python's and libraries'; "<" begins what is in no file
OTHERS = (
    "<",
    *(str(folder) + os.sep for folder in (Path(errors.__file__).parent, Path(__file__).parents[1])),
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def keywords(task: object, member: str, arguments: int, known: Collection[str]) -> frozenset[str]:
    """Return the known keywords that a member's function names after its first ``arguments``.

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
                f"task: {member}() requires {parameter.name!r}, which diloco does not pass: beyond {_first(arguments)} it "
                f"may have {', '.join(known) or 'no keyword'}{place(function)}"
            )
    return frozenset(named)


def _first(arguments: int) -> str:
    return f"its first {arguments} arguments" if arguments > 1 else ("its first argument" if arguments else "none")


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a function's parameters, those that it is given by place first; none if it says nothing of them."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.kind in PLACED] + [p for p in found if p.kind not in PLACED]


def factory(task: str) -> tuple[str, str]:
    """Return module and name of the factory that ``task.name`` names, ``MODULE:MAKE``; no module: the task is built in."""
    module, colon, attribute = task.partition(":")
    return (module, attribute) if colon else ("", module)


def place(function: Callable[..., Any]) -> str:
    """Return the file and line of a function or class, as the end of an error; empty if unknown."""
    if isinstance(function, type):
        return place_of_class(function)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def place_of_class(cls: type[Any]) -> str:
    """Return the file and line of a class, as the end of an error; empty if unknown."""
    try:
        return f" ({inspect.getsourcefile(cls)}, line {inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return ""


@contextmanager
def users_errors(settings: TaskSettings, member: Callable[..., Any] | None = None) -> Iterator[None]:
    """Turn an error in a user's task into one that names the task and the line.

    ``member``: of the task, which is named where the error has passed through no line of the user's own code.

    Raises:
        SettingsError: instead of any error that is none of ours.
    """
    try:
        yield
    except DilocoError:
        raise
    except (Exception, SystemExit) as error:  # raised by the user's code
        where = raised_at(error, settings.name) or ("" if member is None else place(member))
        raise SettingsError(f"task.name = {settings.name!r}: {brief(error)}{where}") from None


def brief(error: BaseException) -> str:
    """Return the kind of an error, and the first line of its text."""
    text = textwrap.shorten(str(error).strip().partition("\n")[0], MOST_TEXT, placeholder=" ...")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def raised_at(error: BaseException, task: str) -> str:
    """Return the innermost line of the user's own code that an error passed through, as a message ends with it; or nothing.

    ``task``: the setting ``task.name``, whose module is the user's wherever it is installed.
    """
    package = sys.modules.get(factory(task)[0].partition(".")[0])
    file = getattr(package, "__file__", None)
    users = "" if file is None else str(Path(file).parent) + os.sep if hasattr(package, "__path__") else file
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (users and frame.filename.startswith(users)) or not frame.filename.startswith(OTHERS):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
