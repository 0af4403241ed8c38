"""A learner's own checkpoint: parameters, optimizer state, data position and books, so that it can go on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco.errors import DilocoError
from diloco.member import Member
from diloco.observe import Logger
from diloco_learner.island import Island

FORMAT = "diloco-learner-1"


def save(directory: Path, name: str, run: bytes, island: Island, member: Member, log: Logger) -> None:
    """Write the checkpoint; the one before stays whole until the new one is."""
    books, arrays = member.checkpoint()
    arrays |= island.state()
    path = _path(directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    metadata = {"format": FORMAT, "run": run.hex(), "books": json.dumps(books)}
    save_file({key: np.array(value, order="C") for key, value in arrays.items()}, draft, metadata)
    draft.replace(path)
    log.info("checkpoint_saved", file=path.name, step=books["step"], bytes=path.stat().st_size)


def restore(directory: Path, name: str, run: bytes, island: Island, member: Member, log: Logger) -> bool:
    """Go on from the checkpoint; False if there is none of this run, and the learner begins from the global model.

    A damaged or foreign one is named and left alone.
    """
    path = _path(directory, name)
    if not path.exists():
        return False
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("run") != run.hex():
                raise ValueError(f"is of format {metadata.get('format')!r} and run {metadata.get('run')!r}, not this run's")
            arrays: dict[str, NDArray[Any]] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        books = json.loads(metadata["books"])
        island.load_state({key: array for key, array in arrays.items() if not key.startswith("books/")})
        member.restore(books, arrays)
    except (DilocoError, SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint_refused", file=str(path), reason=str(error))
        return False
    log.info("checkpoint_restored", file=path.name, step=member.step)
    return True


def _path(directory: Path, name: str) -> Path:
    return directory / "checkpoints" / f"{name}.safetensors"
