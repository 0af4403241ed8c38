"""A model's weights as an Orbax checkpoint, written piece by piece. It needs the extra ``diloco-ops[orbax]``.

Orbax itself saves whole arrays, so it writes the checkpoint of a tree of numbers: its structure, and all that says that it is
whole. Then each number's array, which is a zarr array in a folder of its own, is made again in the tensor's shape with
TensorStore, by which Orbax reads and writes them, and parts are written into it. What is not written is noticed: Orbax refuses
an array that lacks a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diloco.core.tensors.fragments import Fragment
from diloco.errors import DilocoError, SettingsError
from diloco.weights_files.naming import Naming
from diloco_ops.weights.weights_file import Precision, Vector, converted, size_bytes

CHUNK_BYTES = 16 << 20  # of an array in a file of its own: a part that ends within one is read and written again with it


def load() -> None:
    """Import Orbax, and JAX with it: for seconds nothing else goes on, so before a connection is open, which would be lost.

    Raises:
        DilocoError: it is not installed.
    """
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of a step that this kind of checkpoint does not need
    try:
        import jax
        import orbax.checkpoint  # noqa: F401
        import tensorstore  # noqa: F401
    except ImportError as error:
        raise DilocoError(f"--format orbax: not installed: {error.name}; pip install 'diloco-ops[orbax]'") from None
    jax.config.update("jax_platforms", "cpu")  # nothing is computed: learners have the accelerators


class OrbaxWeights:
    """An Orbax checkpoint that is being written: a tree of dicts, by the names of tensors, whose keys are joined by ``/``."""

    def __init__(self, folder: Path, naming: Naming, precision: Precision, metadata: Mapping[str, str]) -> None:
        """Begin a checkpoint in ``folder``, which must not be there.

        Raises:
            SettingsError: one tensor's name begins another one's, or two are the same folder.
            OSError: it cannot be written.
        """
        self.precision, self._naming = precision, naming
        _save_tree(folder, _tree(naming), metadata)
        self._stores = {name: _array(folder / _folder_of(name), shape, precision) for name, shape in naming.shapes.items()}

    def put(self, fragment: Fragment, values: Vector) -> None:
        """Write a fragment, float32 [its size], as :meth:`diloco_ops.weights.weights_file.Weights.put` does and raises."""
        for part in self._naming.parts(fragment):
            place, store = part.place, self._stores[part.place.name]
            data = converted(values[part.values], self.precision, place.name).reshape(part.shape)
            if self.precision == "bfloat16":
                data = data.view(store.dtype.numpy_dtype)
            if place.arrangement is not None:
                index, its, rows = place.arrangement.box(part.first, part.stop)
                store[index].write(its.replaced(store[index].read().result(), rows, data)).result()
            else:
                store[part.index].write(part.theirs(data)).result()


@contextmanager
def orbax(folder: Path, naming: Naming, precision: Precision, metadata: Mapping[str, str]) -> Iterator[OrbaxWeights]:
    """Write weights as an Orbax checkpoint, as :class:`OrbaxWeights` says and raises."""
    yield OrbaxWeights(folder, naming, precision, metadata)


def _tree(naming: Naming) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    folders: dict[str, str] = {}
    for name in sorted(naming.shapes):
        *keys, last = name.split("/")
        branch = tree
        for key in keys:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise SettingsError(
                    f"--format orbax: tensor {name!r} would lie within another tensor; give it another name (--names)"
                )
        other = folders.setdefault(_folder_of(name), name)
        if last in branch or other != name:
            raise SettingsError(
                f"--format orbax: tensor {name!r} would have the place of {other!r}; give it another name (--names)"
            )
        branch[last] = np.zeros((), np.float32)
    return tree


def _folder_of(name: str) -> str:
    """Return the folder that Orbax gives to an array."""
    return name.replace("/", ".")


def _save_tree(folder: Path, tree: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata)))


def _array(folder: Path, shape: tuple[int, ...], precision: Precision) -> Any:
    import tensorstore

    row_bytes = size_bytes(shape[1:], precision)
    rows = (max(1, min(shape[0], CHUNK_BYTES // row_bytes)),) if shape else ()
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        "metadata": {
            "shape": shape,
            "chunks": [*rows, *shape[1:]],
            "dtype": "bfloat16" if precision == "bfloat16" else np.dtype(precision).str,
            "compressor": None,
            "fill_value": None,
        },
    }
    return tensorstore.open(spec, create=True, delete_existing=True).result()
