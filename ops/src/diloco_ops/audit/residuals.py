"""The residual that rounding leaves of each fragment's last merge, in checkpoints of runs with regions.

A fragment's owner alone knows it, and writes it into the keyframes of its own region. A checkpoint has the log of one region;
the residuals of fragments that others own lie beside it in a file of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import MessageError, RunError
from diloco.log.log import Log
from diloco.process.observe import get_logger
from diloco.transport import Fence
from diloco.wire.entries import Genesis

Residuals = Mapping[int, NDArray[np.float32]]  # by fragment: float32 [size]


async def found(logs: Sequence[Log], genesis: tuple[Genesis, bytes], ends: Sequence[tuple[int, bytes]]) -> Residuals:
    """Return the residuals that keyframes of regions have, of fragments as of the version and entry in ``ends``.

    Others than a fragment's owner write keyframes too, with zeros: these are passed over.
    """
    residuals: dict[int, NDArray[np.float32]] = {}
    for index, (version, entry_hash) in enumerate(ends):
        for log in logs:
            newest = await log.reader.newest_keyframe(index)
            if newest is None or (newest[0].version, newest[0].entry_hash) != (version, entry_hash):
                continue
            try:
                loaded = await log.reader.load(index, *genesis)
            except (MessageError, RunError) as error:
                get_logger().warning("residual_not_read", fragment=index, reason=str(error))
                continue
            if loaded.replica.chain.version == version and loaded.residual.any():
                residuals[index] = loaded.residual
                break
    return residuals


def write(path: Path, residuals: Residuals) -> None:
    """Write them as a safetensors file, whose names are the fragments' numbers."""
    save_file({str(index): np.ascontiguousarray(residual) for index, residual in residuals.items()}, path)


def read(path: Path, fragment_map: FragmentMap) -> Residuals:
    """Read what :func:`write` wrote.

    Raises:
        RunError: the file is none, or is of another fragment map.
    """
    residuals: dict[int, NDArray[np.float32]] = {}
    try:
        with safe_open(path, "numpy") as file:
            for name in list(file.keys()):
                tensor = file.get_tensor(name)
                if tensor.shape != (fragment_map.fragments[int(name)].size,) or tensor.dtype != np.float32:
                    raise ValueError(f"fragment {name} is {tensor.dtype} {list(tensor.shape)}")
                residuals[int(name)] = tensor
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise RunError(f"{path}: holds no residuals of this run's fragments: {error}") from None
    return residuals


async def store(log: Log, residuals: Residuals, genesis: tuple[Genesis, bytes], versions: Sequence[int]) -> None:
    """Store a keyframe of each fragment that has a residual, at the version with which its log ends.

    Raises:
        RunError: the log does not have that version.
    """
    for index, residual in residuals.items():
        replica = await log.reader.state_at(index, versions[index], *genesis)
        fence = Fence(log.subjects.record(index), await log.reader.head_sequence(index))
        await log.writer.append_keyframe(replica, residual, fence)
