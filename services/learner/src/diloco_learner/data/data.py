"""The built-in task's data: text, or a mix of sources. Needs no JAX."""

from __future__ import annotations

from pathlib import Path

from diloco.errors import SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner.mix.mix import Mix, is_mix
from diloco_learner.text import TextData


def open_data(settings: TaskSettings, data: str | None, cache_dir: Path | None = None) -> TextData | Mix:
    """Return the built-in task's data: text, or a mix where a ``mix.toml`` is named.

    Raises:
        SettingsError: the mix says something that cannot be, or the run's data is one and none is named.
        DataError: missing, unreadable or too small.
        AdmissionError: the run's learners have another mix.
        ObjectStoreError: it lies at a place that cannot be read.
    """
    if is_mix(data):
        assert data is not None
        return Mix(settings, data, cache_dir)
    if settings.mix is not None:
        raise SettingsError("task.mix: the run's data is a mix: give its mix.toml as data (--data, or a learner's `data`)")
    return TextData(settings, data, cache_dir)
