"""``diloco export``: the weights of a run, going on or over, as one safetensors file.

Fragments are read from the log one after another, as every learner folds them, and their state hashes are compared. Each is
written at once, so that two fragments at most are in memory, whatever the model's size.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from diloco.core.chain import WrongEntries
from diloco.core.fold import Replica
from diloco.errors import FormatError, HashError, RunError, SettingsError
from diloco.log.follower import LogFollower
from diloco.log.stream import pass_over
from diloco.process import files, observe
from diloco_ops import run_reader
from diloco_ops.run_reader import RunReader
from diloco_ops.weights_file import Precision, WeightsFile, names_in
from diloco_report.units import count, size

LATEST = "latest"
TASK = "diloco_task"  # in a file's metadata: the settings of the task, as JSON

Vector = NDArray[np.float32]


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write.")],
    version: Annotated[str, typer.Option(help="A version, which all fragments have; or latest: of each the newest.")] = LATEST,
    average: Annotated[int, typer.Option(min=1, help="The mean of so many versions, which end with this one.")] = 1,
    precision: Annotated[Precision, typer.Option(help="Of the values.")] = "float32",
    names: Annotated[
        Path | None, typer.Option(help="JSON file of tensors' paths and the names that they get; others keep their path.")
    ] = None,
) -> None:
    """Write the weights of a run, going on or over, as a safetensors file."""
    wanted = parsed_version(version)
    if file.is_dir():
        raise SettingsError(f"{file}: is a folder; name the file to write")
    try:
        files.replace(file, lambda draft: asyncio.run(_export(directory, draft, wanted, average, precision, names)))
    except OSError as error:
        raise RunError(f"{file}: was not written: {error}") from None
    print(f"{file}: {size(file.stat().st_size)}")


def parsed_version(version: str) -> int | None:
    """Return the version that ``--version`` asks for; None: of each fragment the newest.

    Raises:
        SettingsError: it is neither a number nor ``latest``.
    """
    if version == LATEST:
        return None
    if not (version.isascii() and version.isdigit() and len(version) < 16):
        raise SettingsError(f"--version {version!r}: expected a number, or latest")
    return int(version)


async def _export(path: Path, draft: Path, version: int | None, average: int, precision: Precision, names: Path | None) -> None:
    async with run_reader.opened(path) as seen:
        named = {} if names is None else names_in(names, seen.map.tensors)
        versions = await write(seen, draft, version, average, precision, named)
        over = "over" if seen.directory.finished else "going on" if seen.live else "stopped"
        mean = f", each the mean of {average}" if average > 1 else ""
        print(
            f"run {seen.run.name} ({over}): {count(seen.map.parameters)} parameters in {len(seen.map.tensors)} tensors, "
            f"versions {min(versions)} to {max(versions)} of {len(versions)} fragments{mean}"
        )


async def write(
    seen: RunReader,
    path: Path,
    version: int | None,
    average: int,
    precision: Precision,
    names: dict[str, str],
) -> list[int]:
    """Write a run's weights as of a version, None being the newest of each fragment; return the version of each.

    Raises:
        RunError: the log does not have a version, or not any more.
        OSError: the file cannot be written.
    """
    fragment_map, versions = seen.map, list[int]()
    with WeightsFile(path, fragment_map.tensors, names, precision, metadata_of(seen, version, average)) as weights:
        for fragment in fragment_map.fragments:
            theta, at = await _values(seen, fragment.index, version, average)
            await asyncio.to_thread(weights.put, fragment, theta)
            versions.append(at)
    return versions


def metadata_of(seen: RunReader, version: int | None, average: int = 1) -> dict[str, str]:
    """Return what a file of a run's weights says of them: ``diloco eval`` and ``diloco sample`` make the task by it."""
    return {
        "format": "pt",  # what transformers asks for: how arrays lie in the file
        "diloco_run": seen.run.name,
        "diloco_identity": seen.run.identity.hex(),
        "diloco_version": LATEST if version is None else str(version),
        "diloco_average": str(average),
        "diloco_map": seen.map.digest.hex(),
        TASK: seen.run.created.task.model_dump_json(),
    }


async def newest(seen: RunReader, fragment: int) -> Replica:
    """Return the newest state that the log has of a fragment, as every learner folds it."""
    reading = LogFollower(seen.log, (seen.genesis, seen.genesis_check), pass_over, observe.get_logger(), in_place=True)
    return (await reading.load_once(fragment)).replica


async def _values(seen: RunReader, fragment: int, version: int | None, average: int) -> tuple[Vector, int]:
    """Return a fragment's values, float32 [its size], and the version that they are of."""
    genesis = seen.genesis, seen.genesis_check
    if version is None:
        replica = await newest(seen, fragment)
        if average == 1:
            return replica.theta, replica.chain.version
        version = replica.chain.version
    if average == 1:
        return (await seen.log.reader.state_at(fragment, version, *genesis)).theta, version
    return await _mean(seen, fragment, version, average), version


async def _mean(seen: RunReader, fragment: int, version: int, average: int) -> Vector:
    """Return the mean of the versions up to one, float32 [size of the fragment]; it is summed up in float64."""
    first = version - average + 1
    if first < 0:
        raise RunError(
            f"run {seen.run.name!r}, fragment {fragment}: a mean of {average} versions up to {version} would begin before "
            f"version 0; ask for at most {version + 1}"
        )
    replica = await seen.log.reader.state_at(fragment, first, seen.genesis, seen.genesis_check)
    total, summed = replica.theta.astype(np.float64), 1
    end = await seen.log.reader.end_sequence(fragment)
    try:
        async for entry in seen.log.entries.fold_missed(replica, end, pass_over, WrongEntries(), judge=True):
            if entry.record.makes_version:
                total += replica.theta
                summed += 1
            if summed == average:
                break
    except (FormatError, HashError) as error:
        raise RunError(f"run {seen.run.name!r}: {error}") from None
    if summed < average:
        raise RunError(
            f"run {seen.run.name!r}, fragment {fragment}: its log ends with version {replica.chain.version}, expected {version}"
        )
    return (total / average).astype(np.float32)
