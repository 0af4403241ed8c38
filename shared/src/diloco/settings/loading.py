"""Load settings: the only place that reads the environment and TOML files."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError as EnvironmentValueError

from diloco.errors import SettingsError
from diloco.settings import cluster
from diloco.settings.folders import KEYS_VARIABLE, PASSPHRASE_VARIABLE
from diloco.settings.service import LearnerSettings, ServiceSettings
from diloco.settings.validation import explain, nearest


def parse_assignments(assignments: Sequence[str], source: str = "--set", example: str = "round.steps=12") -> dict[str, Any]:
    """Return ``["round.steps=12", "merge.method=rda"]`` as a mapping; values are TOML if they parse as such, else text.

    Raises:
        SettingsError: an item without ``=``.
    """
    values: dict[str, Any] = {}
    for item in assignments:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{source} {item}: expected KEY=VALUE, for example {example}")
        try:
            values[key.strip()] = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):
            values[key.strip()] = text.strip()
    return values


def assignment(key: str, value: Any) -> str:
    """Return ``KEY=VALUE`` as :func:`parse_assignments` reads it; ``value`` is a text, a number, a bool or a list of these."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


V = TypeVar("V", bound=ServiceSettings)
LOGGING = ("name", "run", "region", "role", "log_to", "log_format")
OF_TESTS = "DILOCO_TEST_"  # variables of the project's tests, which services inherit from them
OF_KEYS = (KEYS_VARIABLE, PASSPHRASE_VARIABLE)  # variables of `diloco keys`, which services of the same shell inherit


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        SettingsError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 and numbers of thousands of digits included
        raise SettingsError(f"{path}: not TOML: {error}") from None


def logging_settings(config: Path | None) -> dict[str, str]:
    """Return a service's settings that its log needs, as far as they can be read at all; they are not checked."""
    try:
        values = {} if config is None else read_toml(config)
    except SettingsError:
        values = {}
    found = {key: os.environ.get(f"DILOCO_{key.upper()}", values.get(key)) for key in LOGGING}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def names_service() -> bool:
    """Whether the environment names the service whose settings it has."""
    return "DILOCO_NAME" in os.environ


def _explained(cls: type[ServiceSettings], detail: Any) -> str:
    """Describe one error of a service's settings; a missing one by what gives it."""
    if detail["type"] == "missing" and len(detail["loc"]) == 1:
        name = detail["loc"][0]
        return f"{name} is missing: give it as DILOCO_{name.upper()}, or as {name} in the TOML file of --config"
    return explain(cls, detail)


def load_service(cls: type[V], config: Path | None) -> V:
    """Read a service's settings from a TOML file and the environment.

    Raises:
        SettingsError: file missing or not TOML, unknown or wrong settings, unknown ``DILOCO_*`` variable.
    """
    values = {} if config is None else read_toml(config)
    known = {f"DILOCO_{name.upper()}": name for name in cls.model_fields}
    for variable in os.environ:
        if variable in OF_KEYS or variable.startswith(OF_TESTS):
            continue
        if variable.startswith("DILOCO_") and variable not in known:
            raise SettingsError(f"environment: no setting {variable}{nearest(variable, list(known))}")
    try:
        settings = cls(**values)
    except ValidationError as error:
        source = str(config) if config else "environment"
        raise SettingsError(f"{source}: " + "; ".join(_explained(cls, detail) for detail in error.errors())) from None
    except EnvironmentValueError as error:
        raise SettingsError(f"environment: {error}") from None
    if isinstance(settings, LearnerSettings):
        settings = settings.model_copy(update={"processes": cluster.resolved(settings.processes, os.environ)})
    return settings
