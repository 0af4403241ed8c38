"""References: losses of data-parallel training with its best rates, measured once by ``diloco lab``, beside a run's own loss.

Data-parallel training of the default model takes longer than the run itself, so it is not done again for each report. A
reference is of one model, token budget, global batch and text, and is compared with runs of just these.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from blake3 import blake3

from diloco.errors import FormatError
from diloco.settings.run import RunSettings

SUFFIX = ".reference.json"
LAB = "lab"  # the folder beside a run's directory in which `diloco lab run` leaves its results
MAX_BYTES = 1 << 20


class Losses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Final losses of one way of data-parallel training, one a seed; ``tuned``: how its settings were chosen."""

    losses: Annotated[list[float], msgspec.Meta(min_length=1)]
    tuned: str


class ReferenceLosses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Losses by arm. ``conditions`` are those of :func:`conditions`; ``where``: date, code and machine of the measurement."""

    conditions: dict[str, Any]
    arms: dict[str, Losses]
    where: dict[str, str]

    @property
    def key(self) -> str:
        """A short name of its conditions."""
        return blake3(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:8]

    def encode(self) -> str:
        """Return the file's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def conditions(settings: RunSettings, tokens: int, text: str) -> dict[str, Any]:
    """Return all that must be equal for losses to compare: model, batch, learners (so the global batch), tokens, text's hash.

    All else, outer settings and the inner optimizer for instance, is what is being compared.
    """
    return {"tokens": tokens, "learners": settings.learners, "task": settings.task.model_dump(), "text": text}


def shipped() -> Path:
    """Return the folder of the references that come with this version."""
    return Path(str(resources.files("diloco_ops.report") / "references"))


def files(folders: Sequence[Path]) -> list[Path]:
    """Return the references' files in these folders; a folder may be missing."""
    return [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]


def read(path: Path) -> ReferenceLosses:
    """Read a reference.

    Raises:
        FormatError: it is none, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=ReferenceLosses)
    except (OSError, msgspec.MsgspecError) as error:
        raise FormatError(
            f"{path}: not a reference for reports: {error}; delete it, and measure it again with diloco lab"
        ) from None


def compare(
    references: Sequence[ReferenceLosses], settings: RunSettings, tokens: int, text: str | None, data: str | None
) -> dict[str, Any]:
    """Return the reference of a run's conditions, or the reason that there is none; ``docs/report.md`` has the keys.

    ``tokens``: the run's budget at its end. ``text``: the hash of its text; None: it is not known. ``data``: its text's path.
    """
    if settings.continues is not None:
        return _missing("the run continues another run, but data-parallel training starts from the task's own weights", None)
    if text is None:
        return _missing("data-parallel training is compared only for the built-in task on text", None)
    own = conditions(settings, tokens, text)
    for reference in references:
        if reference.conditions == own:
            arms = {
                name: {
                    "loss": float(np.mean(arm.losses)),
                    "spread": float(np.std(arm.losses, ddof=1)) if len(arm.losses) > 1 else None,
                    "seeds": len(arm.losses),
                    "tuned": arm.tuned,
                }
                for name, arm in reference.arms.items()
            }
            return {"arms": arms, "where": reference.where, "missing": None, "command": None}
    other_text = any(reference.conditions | {"text": text} == own for reference in references)
    of = "this text (the standard library differs from one Python release to the next)" if other_text else "these settings"
    return _missing(f"data-parallel training was not measured yet with {of}", _command(settings, tokens, data))


def _missing(reason: str, command: str | None) -> dict[str, Any]:
    return {"arms": {}, "where": {}, "missing": reason, "command": command}


def _command(settings: RunSettings, tokens: int, data: str | None) -> str:
    """Return the command that makes the reference: ``default`` for another Python's library, else ``search``.

    The best rates move little from one release's library to the next, and much with model, batch and tokens.
    """
    usual = dict(_flat(conditions(RunSettings(), RunSettings().tokens, "")))
    changed = [
        f"{name}={json.dumps(value) if not isinstance(value, str) else value}"
        for name, value in _flat(conditions(settings, tokens, ""))
        if value != usual.get(name)
    ]
    words = [word for item in changed for word in ("--set", item)] + (["--data", data] if data else [])
    return shlex.join(["diloco", "lab", "run", "search" if words else "default", *words])


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value
