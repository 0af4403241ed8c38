"""Weights that a run begins with: a safetensors file, or a folder of them as Hugging Face's libraries write it.

In a file tensors have the paths of the model's, as ``diloco export`` writes them; in a folder the names that the task's
``names()`` says. A names map (:mod:`diloco.weights_files.naming`) says other ones. Values are read by fragment, so a host has
no more of them in memory than that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import Fragment, FragmentMap
from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco.storage.fetching import MODEL_FILES, is_remote, local_path
from diloco.weights_files import naming, tying
from diloco.weights_files.naming import Names, Naming
from diloco_learner.api.model import Evaluated
from diloco_learner.task_api import said_of_files

FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ROWS = 1024  # compared at a time

Files = Mapping[str, Any]  # by tensor the open file that has it


def begin(given: str, model: Evaluated, fragments: FragmentMap, names: Path | None, cache_dir: Path) -> None:
    """Write the weights that a run begins with into a model: of a path, or of a place, which are kept in ``cache_dir``.

    Raises:
        SettingsError: as :func:`put`.
        ObjectStoreError: the place cannot be read.
    """
    path = local_path(given, cache_dir, only=MODEL_FILES)
    put(path, model, fragments, names, f"init = {given}, here " if is_remote(given) else "init = ")


def put(path: Path, model: Evaluated, fragments: FragmentMap, names: Path | None = None, setting: str = "init = ") -> None:
    """Write the values of a file or folder into a model; its optimizer is not touched.

    ``names``: a file that says tensors' names. Errors begin with the ``setting``.

    Raises:
        SettingsError: it cannot be read, its tensors are not the model's, or hold NaN or infinity; a folder's configuration
            says that its head is another one.
    """
    named = _naming(path, model, fragments, names, setting)
    with _opened(path, setting) as files:
        _check(path, files, named, setting)
        _check_tied(path, files, named, setting)
        for fragment in fragments.fragments:
            model.write(fragment, _values(path, files, fragment, named, setting), None, 0.0)


def _naming(path: Path, model: Evaluated, fragments: FragmentMap, names: Path | None, setting: str) -> Naming:
    if names is not None:
        source = f"names of {setting}{path}: {names}"
        return Naming(fragments.tensors, naming.read_names(names, source))
    if path.is_dir():
        return Naming(fragments.tensors, Names(said_of_files(model.task, "names") or {}, "task: names()"))
    return Naming(fragments.tensors, Names({}, f"{setting}{path}"))


@contextmanager
def _opened(path: Path, setting: str) -> Iterator[Files]:
    with ExitStack() as stack:
        try:
            files = _by_tensor(path, stack)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise SettingsError(f"{setting}{path}: cannot be read as a safetensors file: {error}") from None
        yield files


def _by_tensor(path: Path, stack: ExitStack) -> Files:
    if not path.is_dir():
        names = [path]
    elif (path / INDEX).exists():
        names = [path / name for name in sorted(_shards(path / INDEX))]
    else:
        names = [path / WHOLE]
    found: dict[str, Any] = {}
    for name in names:
        file = stack.enter_context(safe_open(name, "numpy"))
        found |= dict.fromkeys(file.keys(), file)
    return found


def _shards(index: Path) -> set[str]:
    if index.stat().st_size > naming.MAX_BYTES:
        raise ValueError(f"{index.name} has more than {naming.MAX_BYTES >> 20} MiB")
    said = json.loads(index.read_text(encoding="utf-8"))
    shards = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) and Path(name).name == name for name in shards.values()):
        raise ValueError(f"{index.name} has no weight_map from tensors to files in its folder")
    return set(shards.values())


def _check(path: Path, files: Files, named: Naming, setting: str) -> None:
    for missing in sorted(named.shapes.keys() - files.keys()):
        raise SettingsError(
            f"{setting}{path}: it lacks tensor {missing!r} of shape {named.shapes[missing]}{nearest(missing, sorted(files))}"
            + named.origin(missing)
        )
    for unknown in sorted(files.keys() - named.shapes.keys()):
        raise SettingsError(f"{setting}{path}: the model has no tensor {unknown!r}{nearest(unknown, sorted(named.shapes))}")
    for name, shape in named.shapes.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise SettingsError(
                f"{setting}{path}: tensor {name!r} has the shape {tuple(found.get_shape())}, the model's has {shape}"
                + named.origin(name)
            )
        if found.get_dtype() not in FLOATS:
            raise SettingsError(
                f"{setting}{path}: tensor {name!r} is {found.get_dtype()}, expected one of {', '.join(FLOATS)}"
                + named.origin(name)
            )


def _check_tied(path: Path, files: Files, named: Naming, setting: str) -> None:
    """Check that a folder's head is the one that Hugging Face's libraries would take, or say that it may be another.

    Without a configuration it is that one.

    Raises:
        SettingsError: they would make it up, or put the embedding in its place.
    """
    if not (path / CONFIG).exists():
        return
    source = f"{setting}{path}: {CONFIG}"
    config, _ = naming.read_object(path / CONFIG, source)
    tying.check_head(named, config, source)
    # where the key is not there the libraries' default stands: a folder that they wrote is right
    unsaid = tying.unsaid(named, config, source) if tying.is_tied(config) is False else None
    if unsaid is not None:
        print(unsaid, file=sys.stderr)
    ignored = tying.heads_to_be_ignored(named, config)
    if ignored is not None and not _are_equal(files, *ignored):
        embedding, head = ignored
        raise SettingsError(
            f"{source}: {tying.KEY} is true, but the head {head!r} has other values than the embedding {embedding!r}, "
            f"which Hugging Face's libraries put in its place: set {tying.KEY} to false to begin with both, or take a "
            "task whose head is its embedding"
        )


def _are_equal(files: Files, first: str, second: str) -> bool:
    """Return whether two tensors of one shape have the same values; few rows of them are in memory."""
    one, other = (files[name].get_slice(name) for name in (first, second))
    rows = one.get_shape()[0]
    parts = (slice(at, min(at + ROWS, rows)) for at in range(0, rows, ROWS))
    return all(np.array_equal(one[part], other[part]) for part in parts)


@exact
def _values(path: Path, files: Files, fragment: Fragment, named: Naming, setting: str) -> NDArray[np.float32]:
    """Return a fragment's values, float32 [its size]."""
    vector = np.empty(fragment.size, np.float32)
    for part in named.parts(fragment):
        place = part.place
        file = files[place.name]
        if place.arrangement is not None:
            index, its, wanted = place.arrangement.box(part.first, part.stop)
            rows = its.stored(file.get_slice(place.name)[index])[wanted]
        elif part.index:
            rows = file.get_slice(place.name)[part.index]
            rows = np.asarray(rows).T if place.transposed else rows
        else:
            rows = file.get_tensor(place.name)
        with np.errstate(over="ignore"):
            values = np.asarray(rows, np.float32).reshape(-1)
        if not np.isfinite(values).all():
            raise SettingsError(
                f"{setting}{path}: tensor {place.name!r} holds NaN, infinity, or a value beyond the range of float32"
                + named.origin(place.name)
            )
        vector[part.values] = values
    return vector
