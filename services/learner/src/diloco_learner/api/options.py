"""A task's own options: a frozen dataclass, filled from the run's ``task.options``.

Its fields are ``bool``, ``int``, ``float``, ``str``, a ``Literal`` of these, or a ``tuple`` of one of them.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from pydantic import TypeAdapter, ValidationError

from diloco.errors import SettingsError
from diloco.settings.validation import nearest, shown
from diloco_learner.api.members import parameters, place

PLAIN = (bool, int, float, str)
PARAMETER = "options"
BUILT_IN = "the built-in task has no options; set task.layers and the like with --set"


def of(make: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword that a task's factory gets for its options, if it has the parameter.

    Raises:
        SettingsError: an option is not known, missing or of another type; or the parameter has no frozen dataclass for a type.
    """
    if not any(parameter.name == PARAMETER for parameter in parameters(make)):
        refuse(values, f"the task has no options, because its factory has no parameter 'options'{place(make)}")
        return {}
    return {PARAMETER: filled(_dataclass_of(make), values)}


def refuse(values: Mapping[str, Any], reason: str) -> None:
    """Refuse the options of a task that has none.

    Raises:
        SettingsError: there are some.
    """
    if values:
        raise SettingsError(f"--task {', '.join(values)}: {reason}")


def filled(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance of a dataclass with these values.

    Raises:
        SettingsError: an option is not known, missing or of another type.
    """
    hints, fields = typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name in values:
        if name not in fields:
            known = f"; its options are {', '.join(fields)}" if fields else ""
            raise SettingsError(f"--task {name}: {cls.__name__} has no option {name!r}{nearest(name, list(fields))}{known}")
    for name, field in fields.items():
        if not _is_option(hints[name]):
            raise SettingsError(
                f"task: option {name!r} of {cls.__name__} is {_shown_type(hints[name])}, expected bool, int, float, str, "
                "a Literal of these, or a tuple of one of them"
            )
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise SettingsError(f"--task {name}=VALUE: option {name!r} of {cls.__name__} has no default, so it has to be given")
    given = {name: _value(cls, name, hints[name], value) for name, value in values.items()}
    try:
        return cls(**given)
    except ValueError as error:  # of the user's __post_init__
        raise SettingsError(f"--task: {cls.__name__}: {error}") from None


def _dataclass_of(make: Callable[..., Any]) -> type[Any]:
    function = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    try:
        cls = typing.get_type_hints(function).get(PARAMETER)
    except NameError as error:
        raise SettingsError(f"task: the annotation of its factory's parameter 'options': {error}{place(function)}") from None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise SettingsError(
            f"task: the annotation of its factory's parameter 'options' is {_shown_type(cls)}, expected a class that "
            f"@dataclass(frozen=True) makes{place(function)}"
        )
    return cls


def _is_option(hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return all(type(value) in PLAIN for value in arguments)
    if origin is tuple:
        return len(arguments) == 2 and arguments[1] is Ellipsis and _is_option(arguments[0])
    if origin in (Union, types.UnionType):
        return False
    return hint in PLAIN


def _value(cls: type[Any], name: str, hint: Any, value: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)  # of JSON, since lists are tuples there
    except ValidationError:
        quoted = f"; quote text that looks like a number or bool: --task '{name}=\"{value}\"'" if hint is str else ""
        raise SettingsError(
            f"--task {name} = {shown(value)}: option {name!r} of {cls.__name__} is {_shown_type(hint)}{quoted}"
        ) from None


def _shown_type(hint: Any) -> str:
    if hint is None:
        return "missing"
    return hint.__name__ if hint in PLAIN else str(hint).removeprefix("typing.")
