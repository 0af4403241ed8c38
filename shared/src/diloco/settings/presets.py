"""Presets: complete sets of a run's settings, and a preset with overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings
from diloco.settings.validation import all_names, nearest, parse

# the optimizer that the papers name, with its best rate here (docs/quality.md)
_ADAMW = {"optimizer": "adamw", "learning_rate": 0.016}
_UNJUDGED = {"factor": 0.0}  # every offer is merged, as published

_PRESETS: dict[str, dict[str, Any]] = {
    # ours: the published structure, four bits both ways, the overlap kept, defaults that measured best
    "decoupled": {},
    # Decoupled DiLoCo (arXiv 2604.21428): fragments, interval, overlap, quorum, merge, weights and precision of offers are its.
    # It does not say the outer rate and momentum, the inner settings, granularity, gamma of the grace window, the limit of
    # staleness and the precision of records. Momentum 0.9 is the lineage's. There the rate grows with the learners, as their
    # average shrinks; RDA keeps the norm of one learner, so 0.4, the lineage's lowest, and not the 0.7 of `diloco`
    # (docs/quality/histories.md, "The rate of published"). Late offers stay for the next version, and there count against the
    # newest value (docs/user-guide.md): a limit of staleness of 0 would drop them, and with them what slow learners did.
    "published": {
        "inner": _ADAMW,
        "quarantine": _UNJUDGED,
        "round": {"grace_capped": True},
        "merge": {"granularity": "tensor", "against": "current"},
        "outer": {"learning_rate": 0.4, "momentum": 0.9},
        "carry": {"overlap": False},
        "codec": {"offer_bits": 16, "record_bits": 16, "error_feedback": False},
    },
    # Streaming DiLoCo (arXiv 2501.18512): fragments, overlapped; every live learner must answer. A fragment is three layers,
    # strided. Its largest model has 108, so 36 fragments and one for all else; a smaller model has fewer. H = 100, and 30 in
    # its smaller runs. Tau is 1 in its main runs; it studies 1 to 10 and advises 5 at most. Alpha is 0.5, or 0. Its offers are
    # E3M0, of 4 bits: ours are int4.
    "streaming": {
        "inner": _ADAMW,
        "quarantine": _UNJUDGED,
        "fragments": {"count": 37, "strategy": "layers", "layers": 3},
        "round": {"steps": 100, "quorum": "all", "grace_factor": 0.0, "overlap_steps": 1.0},
        "merge": {"method": "average", "weights": "equal", "against": "current"},
        "outer": {"learning_rate": 0.4, "momentum": 0.9},
        "carry": {"overlap": False},
        "apply": {"alpha": 0.5, "at": "overlap"},
        "codec": {"offer_bits": 4, "record_bits": 32, "error_feedback": False},
    },
    # DiLoCo (arXiv 2311.08105): the whole model every 500 steps, and no learner goes on before the new version is there
    "diloco": {
        "inner": _ADAMW,
        "quarantine": _UNJUDGED,
        "shards": 1,
        "fragments": {"count": 1},
        "round": {"steps": 500, "quorum": "all", "grace_factor": 0.0, "learners_wait": True},
        "merge": {"method": "average", "weights": "equal", "against": "current"},
        "outer": {"learning_rate": 0.7, "momentum": 0.9},
        "carry": {"overlap": False},
        "codec": {"offer_bits": 32, "record_bits": 32, "error_feedback": False},
    },
    # the usual way: gradients are averaged at every step, over the same transport, as a reduce-scatter to the fragments' owners
    # and an all-gather from them. So many fragments share the model evenly between the owners of two regions or three.
    "data-parallel": {
        "inner": _ADAMW,
        "quarantine": _UNJUDGED,
        "fragments": {"count": 12},
        "round": {
            "steps": 1,
            "quorum": "all",
            "grace_factor": 0.0,
            "max_staleness_versions": 0,
            "learners_wait": True,
        },
        "merge": {"method": "average", "weights": "tokens"},
        "outer": {"optimizer": "adamw", "learning_rate": 1.0, "momentum": 0.0},
        "carry": {"overlap": False},
        "codec": {"offer_bits": 16, "record_bits": 16, "error_feedback": False},
    },
}


PRESETS = tuple(_PRESETS)


def run_settings(
    preset: str = "decoupled", overrides: Mapping[str, Any] | None = None, source: str = "settings"
) -> RunSettings:
    """Return a preset with overrides, which are nested mappings or dotted names (``{"round.steps": 12}``).

    Raises:
        SettingsError: unknown preset, unknown setting, or a value out of range.
    """
    if preset not in _PRESETS:
        raise SettingsError(f"{source}: no preset {preset!r}{nearest(preset, PRESETS)}; the presets are {', '.join(PRESETS)}")
    values: dict[str, Any] = json.loads(json.dumps(_PRESETS[preset])) | {"preset": preset}
    return _overridden(values, overrides or {}, source)


def changed_settings(settings: RunSettings, overrides: Mapping[str, Any], source: str) -> RunSettings:
    """Return settings with overrides, given as to :func:`run_settings`."""
    return _overridden(settings.model_dump(), overrides, source)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any], source: str) -> RunSettings:
    for key, value in overrides.items():
        if key == "preset":
            raise SettingsError(
                f"{source}: preset = {value!r}: preset is not among the settings to override: choose a "
                "preset by itself, as --preset does"
            )
        _put(values, key, value, source)
    return parse(RunSettings, values, source)


def _put(values: dict[str, Any], key: str, value: Any, source: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise SettingsError(f"{source}: no setting {key!r}{nearest(key, all_names())}")
        values = inner
    if isinstance(value, Mapping):
        for name, item in value.items():
            _put(values, f"{last}.{name}", item, source)
    else:
        values[last] = value
