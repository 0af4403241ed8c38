"""The default of an option that stands for a setting, for its help: read from the presets, so that none is written twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco.settings.presets import PRESETS, run_settings
from diloco.settings.validation import value_of


def default_of(setting: str, form: Callable[[Any], str] = str) -> str:
    """Return the sentence ``Default: 2; 1 with preset diloco.`` about a setting of a run; ``form`` writes a value."""
    values = {preset: form(value_of(run_settings(preset), setting)) for preset in PRESETS}
    first = next(iter(values.values()))
    others = dict.fromkeys(value for value in values.values() if value != first)
    parts = [f"{value} with preset {', '.join(p for p in PRESETS if values[p] == value)}" for value in others]
    return f"Default: {'; '.join([first, *parts])}."
