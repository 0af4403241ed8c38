"""Results of trials, kept by all that they depend on: settings, pace, seed, data, code and libraries."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import msgspec

from diloco.errors import FormatError, SettingsError
from diloco.process import files
from diloco.settings.run import RunSettings
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.own_code import modules_of
from diloco_lab.experiment.spec import Arm
from diloco_learner.api.members import factory

PACKAGES = ("diloco", "diloco_learner", "diloco_syncer", "diloco_lab")
LIBRARIES = ("jax", "jaxlib", "optax", "numpy")
MAX_BYTES = 1 << 16  # of a result


@cache
def code_digest() -> str:
    """Return a hash of all code and libraries that a result depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        folder = Path(str(resources.files(package)))
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder)}\0".encode() + path.read_bytes())
    for library in LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}\0".encode())
    return digest.hexdigest()


def module_file(module: str) -> Path | None:
    """Return the file of a user's module; None: there is none, here or where PYTHONPATH says."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if found is None or found.origin is None else Path(found.origin)


@cache
def task_digest(name: str) -> str:
    """Return a hash of the code of a user's task, ``MODULE:MAKE``; "" for one that comes with the learner.

    That is the module, and all that it imports from the same folder (:mod:`diloco_lab.experiment.own_code`).

    Raises:
        SettingsError: no such module is found, or its code cannot be read.
    """
    module, _ = factory(name)
    if not module:
        return ""
    found = module_file(module)
    if found is None:
        raise SettingsError(f"task.name = {name!r}: no module {module!r}, here or where PYTHONPATH says")
    digest = hashlib.blake2b(digest_size=16)
    for own, file in sorted(modules_of(module, found).items()):
        code = file.read_bytes()
        digest.update(f"{own} {len(code)}\0".encode() + code)
    return digest.hexdigest()


class TrialStore:
    """A folder with a file for each trial. A result of other code has another name, so it is never taken for this one's."""

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            SettingsError: it cannot be made.
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{folder}: cannot be made: {error.strerror}; name another folder with --out") from None

    def path(self, arm: Arm, settings: RunSettings, data: str | None) -> Path:
        """Return the file of a trial.

        Raises:
            SettingsError: its task's module is not found.
        """
        changes = [change.model_dump(mode="json") for change in arm.changes]
        values: list[Any] = [arm.method, arm.pace.said(), changes, settings.model_dump(mode="json"), data, code_digest()]
        after = arm.post_training and arm.post_training.model_dump(mode="json")
        values += filter(None, [task_digest(settings.task.name), arm.sample_s, after])
        said = msgspec.json.encode(values)
        return self.folder / f"{hashlib.blake2b(said, digest_size=16).hexdigest()}.json"

    def get(self, path: Path) -> Measured | None:
        """Return a result; None: it was not measured yet.

        Raises:
            FormatError: the file is damaged.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES)
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=Measured)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path}: not a trial's result: {error}; delete the file to have it measured again") from None

    def put(self, path: Path, measured: Measured) -> None:
        """Store a result as a whole."""
        files.replace_text(path, msgspec.json.encode(measured).decode() + "\n")
