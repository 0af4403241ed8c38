"""Validation of settings, with errors that have the setting's name, its value, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings

SHOWN_CHARACTERS = 500  # of a wrong value, in an error


S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], values: Mapping[str, Any], source: str) -> S:
    """Validate ``values`` as ``cls``.

    Raises:
        SettingsError: with ``source``, every wrong setting, the expected value and, for an unknown name, the nearest one.
    """
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise SettingsError(f"{source}: " + "; ".join(explain(cls, detail) for detail in error.errors())) from None


def all_names(cls: type[BaseModel] = RunSettings, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings below ``cls``."""
    names: list[str] = []
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += all_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def value_of(settings: RunSettings, key: str) -> Any:
    """Return a setting by its dotted name."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def nearest(name: str, known: Sequence[str]) -> str:
    """Return an error's hint at the known name nearest to an unknown one; empty if none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        leaf = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [leaf[m] for m in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaf), n=1, cutoff=0.6)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def explain(cls: type[BaseModel], detail: Any) -> str:
    parts = [str(part) for part in detail["loc"] if not str(part).startswith(("literal[", "int", "constrained"))]
    name = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        own = f"; give an option of your own task as --task {parts[-1]}=VALUE" if parts[:-1] == ["task"] else ""
        return f"no setting {name!r}{nearest(name, all_names(cls))}{own}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message if not name or detail["type"] == "value_error" else f"{name} = {shown(detail['input'])}: {message}"


def shown(value: object) -> str:
    """Return a value as an error shows it, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
