"""``diloco export``: the weights of a run, going on or over, as safetensors, for Hugging Face's libraries, peft, or Orbax.

Fragments are read from the log one after another, as every learner folds them, and their state hashes are compared. Each is
written at once. So a fragment's parameters are in memory, and the entry that is folded, whatever the model's size. Its
momentum, and sums of versions, are in files beside the output; the system has them in memory as long as it has room.
"""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from diloco.core.log.chain import WrongEntries
from diloco.core.log.fold import Replica
from diloco.core.tensors.built_in import BUILT_IN
from diloco.core.tensors.float_mode import exact
from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import FormatError, HashError, MachineError, RunError, SettingsError
from diloco.log.follower import LogFollower
from diloco.log.reader import Room, in_memory
from diloco.log.stream import pass_over
from diloco.process import files, observe
from diloco.settings.places import has_scheme, parse_place
from diloco.weights_files import naming, tying
from diloco.weights_files.naming import Names, Naming
from diloco_ops.reading import run_reader
from diloco_ops.reading.local_runs import newest_run
from diloco_ops.reading.run_reader import RunReader
from diloco_ops.up.supervise import ServiceFailed
from diloco_ops.weights import in_place, model_files, orbax_weights, peft_weights, scratch, weights_file
from diloco_ops.weights.versions import LATEST, Versions, WantedVersion, choose_versions, parsed_version, stated, version_of
from diloco_ops.weights.weights_file import SHARD_BYTES, Precision, Weights
from diloco_report.units import model_size, size

M_MMAP_THRESHOLD, BUFFER_BYTES = -3, 128 << 10  # glibc's mallopt; buffers of parts are larger
TASK = "diloco_task"  # in a file's metadata: the settings of the task, as JSON

Vector = NDArray[np.float32]
AskTask = Callable[[RunReader], model_files.ModelFacts]
Format = Literal["safetensors", "hf", "peft", "orbax"]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="A safetensors file, a folder for Hugging Face's libraries, a folder with a LoRA adapter for peft, or a "
        "folder of Orbax.",
    ),
]
NamesOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON file that maps tensor paths to names; other tensors keep their path. Or torch: the names that "
        "PyTorch's state_dict() has."
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(help="With --format hf: the config.json, if the task has none. With --format peft: the adapter_config.json."),
]
TORCH = Path("torch")  # as --names: the names that PyTorch's state_dict() has


@dataclass(frozen=True)
class ExportRequest:
    """The weights that are asked for, and the form in which they are to be written."""

    format: Format
    version: WantedVersion
    average: int
    precision: Precision
    names: Path | None
    config: Path | None
    shard_bytes: int | None


def export(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="[DIR] OUT",
            help="The run's directory (default: the newest in runs/), and the file or folder to write, or its place "
            "(s3://, gs://, az://, hf://).",
        ),
    ],
    format_: FormatOption = "safetensors",
    version: Annotated[
        str,
        typer.Option(
            help="Number of a version that all fragments have; or a percentage such as 50%, the versions "
            "when that part of the tokens was merged; or latest."
        ),
    ] = LATEST,
    average: Annotated[int, typer.Option(min=1, help="Average over this many versions, up to --version.")] = 1,
    precision: Annotated[Precision, typer.Option(help="Dtype of the values.")] = "float32",
    names: NamesOption = None,
    config: ConfigOption = None,
    shard_bytes: Annotated[
        int | None, typer.Option(min=1, help=f"With --format hf: greatest size of a file. Default: {SHARD_BYTES}.")
    ] = None,
) -> None:
    """Write the weights of a live, stopped or finished run."""
    if len(places) > 2:
        raise SettingsError(f"diloco export: {places[2]}: one argument too many; expected [DIR] OUT")
    *directories, out = places
    place = parse_place(out, "diloco export:") if has_scheme(out) else None
    _check_options(format_, names, config, shard_bytes)
    if format_ == "orbax":
        orbax_weights.load()
    asked = ExportRequest(
        format=format_,
        version=parsed_version(version),
        average=average,
        precision=precision,
        names=names,
        config=config,
        shard_bytes=shard_bytes,
    )
    _give_buffers_back()
    directory = Path(directories[0]) if directories else newest_run("diloco export")
    if place is None:
        written = _write_here(directory, Path(out), asked)
    else:
        in_place.check_free(place, folder=format_ != "safetensors")
        with in_place.draft_in(directory, place.name) as draft:
            written = _write_here(directory, draft, asked)
            in_place.send(draft, place)
    print(f"{out}: {size(written)}")


def _write_here(directory: Path, out: Path, asked: ExportRequest) -> int:
    """Write what is asked for on this machine; return its bytes."""
    write_draft = _new_folder if asked.format != "safetensors" else _new_file
    try:
        write_draft(out, lambda draft: asyncio.run(_export(directory, draft, asked)))
    except OSError as error:
        raise RunError(f"{out}: was not written: {error}") from None
    return sum(each.stat().st_size for each in in_place.files_of(out).values())


def _check_options(format_: Format, names: Path | None, config: Path | None, shard_bytes: int | None) -> None:
    """Check that the options fit together.

    Raises:
        SettingsError: they do not.
    """
    for option, given, formats in (("--config", config, ("hf", "peft")), ("--shard-bytes", shard_bytes, ("hf",))):
        if given is not None and format_ not in formats:
            raise SettingsError(f"{option} {given}: is for --format {' and '.join(formats)}")
    if format_ == "peft" and names is not None:
        raise SettingsError(f"--names {names}: leave it out with --format peft, whose names are those of peft's files")


def _give_buffers_back() -> None:
    """Have this process's buffers go back to the system when they are free: kept ones would be as much as a fragment."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, BUFFER_BYTES)


def _new_file(path: Path, write: Callable[[Path], None]) -> None:
    if path.is_dir():
        raise SettingsError(f"{path}: is a folder; name the file to write")
    files.replace(path, write)


def _new_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Have a folder written that is there once it is whole.

    Raises:
        SettingsError: something is there.
        OSError: it cannot be written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise SettingsError(f"{path}: exists, and is not an empty folder; name a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        write(draft)
        draft.replace(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


async def _export(path: Path, draft: Path, asked: ExportRequest) -> None:
    async with run_reader.opened(path) as seen:
        chosen = await choose_versions(seen, asked.version)
        versions = await export_versions(seen, draft, asked, chosen.versions)
        over = await seen.state()
        mean = f", each the mean of {asked.average}" if asked.average > 1 else ""
        print(
            f"run {seen.run.name} ({over}): {model_size(seen.map.parameters, seen.map.state_values)} in "
            f"{len(seen.map.tensors)} tensors, "
            f"versions {min(versions)} to {max(versions)} of {len(versions)} fragments{mean}{chosen.after}"
        )


async def export_versions(
    seen: RunReader, draft: Path, asked: ExportRequest, versions: Versions, ask_task: AskTask | None = None
) -> list[int]:
    """Write a run's weights as of these versions into a draft that is not there yet; return the version of each fragment.

    ``ask_task`` returns what the run's task says of its files; by default :func:`model_files.facts_of`.

    Raises:
        MachineError, RunError: as :func:`write`.
        SettingsError, ServiceFailed: the names or the configuration do not fit, or the task does not say them.
        OSError: they cannot be written.
    """
    with await asyncio.to_thread(_opened, seen, draft, asked, versions, ask_task or model_files.facts_of) as weights:
        return await write(seen, weights, versions, asked.average, scratch.in_folder(draft.parent))


def _opened(
    seen: RunReader, draft: Path, asked: ExportRequest, versions: Versions, ask_task: AskTask
) -> AbstractContextManager[Weights]:
    """Return the weights to be written.

    Raises:
        SettingsError: the names do not fit the model; there is no configuration, or it is of another model.
        ServiceFailed: the task does not say them.
    """
    metadata, tensors = metadata_of(seen, versions, asked.average), seen.map.tensors
    config = None if asked.config is None else naming.read_object(asked.config, f"--config {asked.config}")[0]
    if asked.format == "peft":
        return _adapter(seen, draft, asked, metadata, config, ask_task=ask_task)
    names = _given_names(tensors, asked.names)
    if asked.format == "hf":
        return _model_folder(seen, draft, asked, metadata, config, names, ask_task=ask_task)
    named = Naming(tensors, names or Names({}, ""))
    if asked.format == "orbax":
        return orbax_weights.orbax(draft, named, asked.precision, metadata)
    return weights_file.one_file(draft, named, asked.precision, metadata)


def _adapter(
    seen: RunReader,
    draft: Path,
    asked: ExportRequest,
    metadata: Mapping[str, str],
    config: dict[str, Any] | None,
    *,
    ask_task: AskTask,
) -> AbstractContextManager[Weights]:
    """Return the weights of an adapter to be written, by the configuration that was given or that the run's task has."""
    source = "task: adapter_config()" if config is None else f"--config {asked.config}"
    said, why = model_files.ModelFacts(), ""
    if config is None and not _is_loops(seen):
        try:
            said = ask_task(seen)
        except (SettingsError, ServiceFailed) as error:
            why = f"; the run's task does not give it: {error}"
    config = said.adapter_config if config is None else config
    if config is None:
        raise SettingsError(
            "--format peft: needs --config FILE, the adapter_config.json; model.peft_config['default'].save_pretrained(FOLDER) "
            f"writes it{why}"
        )
    named = peft_weights.adapter_naming(seen.map.tensors, config, source)
    written = peft_weights.peft(draft, named, asked.precision, metadata, config)
    return model_files.with_companions(draft, written, seen, said, "peft")


def _is_loops(seen: RunReader) -> bool:
    """Whether the run's task says nothing of its model: learners are loops that joined, and the task is the built-in one."""
    return seen.run.created.task.name == BUILT_IN


def _model_folder(
    seen: RunReader,
    draft: Path,
    asked: ExportRequest,
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None,
    names: Names | None,
    *,
    ask_task: AskTask,
) -> AbstractContextManager[Weights]:
    """Return the weights of a whole model to be written, as Hugging Face's libraries read it."""
    tensors, said = seen.map.tensors, model_files.ModelFacts()
    if names is None or config is None:
        said = ask_task(seen)
        if said.adapter_config is not None:
            model_files.check_mergeable(asked.precision)
            adapter = draft.with_name(f"{draft.name}.adapter")
            shutil.rmtree(adapter, ignore_errors=True)
            named = peft_weights.adapter_naming(tensors, said.adapter_config, "task: adapter_config()")
            written = peft_weights.peft(adapter, named, "float32", metadata, said.adapter_config)
            whole = model_files.merged(draft, seen, written, adapter, asked.precision)
            return model_files.with_companions(draft, whole, seen, said, "hf")
        names = Names(said.names or {}, "task: names()") if names is None else names
        config = said.config if config is None else config
    if config is None:
        raise SettingsError(
            f"task.name = {seen.run.created.task.name!r}: has no config() for Hugging Face's libraries: give a "
            "config.json with --config FILE"
        )
    named = Naming(tensors, names)
    _check_tied(named, config, "task: config()" if asked.config is None else f"--config {asked.config}")
    draft.mkdir()
    shard_bytes, config = asked.shard_bytes or SHARD_BYTES, model_files.config_in(config, asked.precision)
    written = weights_file.hugging_face(draft, named, asked.precision, metadata, config, shard_bytes)
    return model_files.with_companions(draft, written, seen, said, "hf")


def _given_names(tensors: Sequence[TensorSpec], names: Path | None) -> Names | None:
    """Return the names that ``--names`` says; None: it was not given.

    Raises:
        SettingsError: it is a file that cannot be read.
    """
    if names is None:
        return None
    source = f"--names {names}"
    return naming.torch_names(tensors, source) if names == TORCH else naming.read_names(names, source)


def _check_tied(named: Naming, config: Mapping[str, Any], source: str) -> None:
    """Check that Hugging Face's libraries make the same model of a configuration and these tensors, or say what they go by.

    Raises:
        SettingsError: they would make up its head, or take the embedding for it.
    """
    tying.check_head(named, config, source)
    unsaid = tying.unsaid(named, config, source)
    if unsaid is not None:
        print(unsaid, file=sys.stderr)
    ignored = tying.heads_to_be_ignored(named, config)
    if ignored is not None:
        embedding, head = ignored
        raise SettingsError(
            f"{source}: {tying.KEY} is true, but the model's head {head!r} is trained by itself, and Hugging "
            f"Face's libraries would replace it by the embedding {embedding!r}: set {tying.KEY} to false"
        )


@contextmanager
def in_one_file(seen: RunReader, path: Path, versions: Versions = None, average: int = 1) -> Iterator[Weights]:
    """Write a run's weights into a safetensors file of float32, each tensor by its path.

    Raises:
        OSError: it cannot be written.
    """
    named = Naming(seen.map.tensors, Names({}, str(path)))
    with weights_file.one_file(path, named, "float32", metadata_of(seen, versions, average)) as weights:
        yield weights


async def write(seen: RunReader, weights: Weights, versions: Versions, average: int, room: Room = in_memory) -> list[int]:
    """Write a run's weights as of these versions; return the version of each fragment.

    ``room`` is for the arrays that are not written: momenta, and sums of versions.

    Raises:
        MachineError, RunError: the log does not have a version, or not any more, or it cannot be read up to it.
        OSError: they cannot be written.
    """
    written = list[int]()
    seen.log.reader.room_for_moments = room
    for fragment in seen.map.fragments:
        theta, at = await _values(seen, fragment.index, version_of(versions, fragment.index), average, room)
        await asyncio.to_thread(weights.put, fragment, theta)
        del theta  # before the next one is read
        written.append(at)
    return written


def metadata_of(seen: RunReader, versions: Versions, average: int = 1) -> dict[str, str]:
    """Return what a file of a run's weights says of them: ``diloco eval`` and ``diloco sample`` make the task by it."""
    return {
        "format": "pt",  # what transformers asks for: how arrays lie in the file
        "diloco_run": seen.run.name,
        "diloco_identity": seen.run.identity.hex(),
        "diloco_version": stated(versions),
        "diloco_average": str(average),
        "diloco_map": seen.map.digest.hex(),
        TASK: seen.run.created.task.model_dump_json(),
    }


async def newest(seen: RunReader, fragment: int) -> Replica:
    """Return the newest state that the log has of a fragment, as every learner folds it.

    Raises:
        MachineError: the log goes on with versions that fold to other states here than at learners that went on with them.
        RunError: its newest versions fold to other states than they state.
    """
    reading = LogFollower(seen.log, (seen.genesis, seen.genesis_check), pass_over, observe.get_logger(), in_place=False)
    replica, wrong = (await reading.load_once(fragment)).replica, reading.wrong[fragment]
    unread = wrong.unread_after(replica.chain)
    if unread is not None:
        kind = MachineError if wrong.vouchers else RunError
        raise kind(f"run {seen.run.name!r}, fragment {fragment}: {unread}")
    return replica


async def _values(seen: RunReader, fragment: int, version: int | None, average: int, room: Room) -> tuple[Vector, int]:
    """Return a fragment's values, float32 [its size], and the version that they are of."""
    genesis = seen.genesis, seen.genesis_check
    if version is None:
        replica = await newest(seen, fragment)
        if average == 1:
            return replica.theta, replica.chain.version
        version = replica.chain.version
    if average == 1:
        return (await seen.log.reader.state_at(fragment, version, *genesis)).theta, version
    return await _mean(seen, fragment, version, average, room), version


async def _mean(seen: RunReader, fragment: int, version: int, average: int, room: Room) -> Vector:
    """Return the mean of the versions up to one, float32 [size of the fragment]; it is summed up in float64."""
    first = version - average + 1
    if first < 0:
        raise RunError(
            f"run {seen.run.name!r}, fragment {fragment}: a mean of {average} versions up to {version} would begin before "
            f"version 0; ask for at most {version + 1}"
        )
    replica = await seen.log.reader.state_at(fragment, first, seen.genesis, seen.genesis_check)
    total, summed = room(8 * replica.theta.size).view(np.float64), 1
    total[:] = replica.theta
    end = await seen.log.reader.end_sequence(fragment)
    try:
        async for entry in seen.log.entries.fold_missed(replica, end, pass_over, WrongEntries(), judge=True):
            if entry.record.makes_version:
                _add(replica.theta, total)
                summed += 1
            if summed == average:
                break
    except (FormatError, HashError) as error:
        raise RunError(f"run {seen.run.name!r}: {error}") from None
    if summed < average:
        raise RunError(
            f"run {seen.run.name!r}, fragment {fragment}: its log ends with version {replica.chain.version}, expected {version}"
        )
    del replica  # before its mean is rounded
    return _rounded_mean(total, average)


@exact
def _add(theta: Vector, total: NDArray[np.float64]) -> None:
    """Add a version, float32 [size], to ``total``, float64 [size]."""
    total += theta


@exact
def _rounded_mean(total: NDArray[np.float64], count: int) -> Vector:
    """Return the mean, float32 [size], of ``count`` versions with this sum, float64 [size], which is overwritten."""
    total /= count
    return total.astype(np.float32)
