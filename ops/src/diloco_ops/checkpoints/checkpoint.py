"""Checkpoints of a whole run, taken while it is live: ``diloco checkpoint DIR``.

A checkpoint is a consistent cut in the sense of Chandy and Lamport (Distributed Snapshots, 1985). The *cut* is a vector of
versions, one of each fragment, read from the log; up to it the log is kept, later entries never happened. The vector
goes to all learners (the marker), and each saves its state at its first step boundary with all of these versions applied.
The state of all others is a fold of the log. The log is copied last, so that it holds all that any state is based on. No member
waits for anything.

Offers in flight need no recording: an offer is cumulative and its work is in its learner's value until a version merges it,
and which of a learner's offers are merged at the cut stands in the log's cursors. So offers are not in a checkpoint.

A learner may have gone beyond the cut when the marker reaches it. Then the marker is repeated with a newer vector, some times;
after that the state is taken as it is, and the part that belongs to later versions is lost, and counted, when it is resumed.

States of learners on other machines stay there: the manifest has their names, sizes and hashes as the learners state them, and
:mod:`diloco_ops.checkpoints.collecting` brings the files.

Files: ``manifest.json`` (written last: without it a folder is no checkpoint), ``log.snapshot``, ``bucket.snapshot``,
``learners/<name>.safetensors``, of a learner that is several processes ``learners/<name>.part-<process>.safetensors`` too, and
of a run with regions ``residuals.safetensors`` (:mod:`diloco_ops.audit.residuals`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from diloco import __version__
from diloco.control.changes import read_changes
from diloco.control.whole import read_whole
from diloco.errors import MessageError, ObjectStoreError, RunError, SettingsError
from diloco.nats.transport import NatsTransport
from diloco.process import files
from diloco.settings.places import StoragePlace, has_scheme, parse_place
from diloco.states import state, statefolder
from diloco.states.statefolder import StateFolder
from diloco.wire.control import MarkerAnswer
from diloco_ops.audit import residuals
from diloco_ops.broker import snapshot
from diloco_ops.broker.snapshot import StreamSnapshot
from diloco_ops.checkpoints import collecting, in_bucket, manifest
from diloco_ops.checkpoints.in_bucket import ClaimedNumber
from diloco_ops.checkpoints.manifest import FragmentCut, Manifest, RunCheckpoint, SavedFile, SavedLearner, SavedStream, hash_of
from diloco_ops.checkpoints.marker import Marking, States, heads
from diloco_ops.operate.changing import Say
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader
from diloco_report.units import duration, size


async def take(path: Path, out: Path | None = None, *, of_finished: bool = False) -> tuple[RunCheckpoint, list[str]]:
    """Take a checkpoint of the run in ``path``: live, or stopped. Also return notes on its defects.

    ``of_finished``: of one that is over, too, to begin again at an earlier version of its log.

    Raises:
        RunError: there is no run, it has ended, or ``out`` is taken.
        BrokerError: its server is not there, or fell silent.
        OSError: the disk is full; nothing is left behind.
    """
    async with run_reader.opened(path) as run:
        if run.directory.finished and not of_finished:
            raise RunError(
                f"{path}: this run is finished, so no checkpoint can be taken; for more tokens: diloco up --continue "
                f"{path} --tokens N; to go on from an earlier checkpoint: diloco up --resume"
            )
        wholes = run.directory.path / manifest.FOLDER
        used = [*manifest.numbered(wholes), *manifest.numbered(run.directory.path / statefolder.FOLDER)]
        known = await read_whole(run.run.registry)  # learners drop states of smaller numbers than this one
        number = max([0, *used, 0 if known is None else known.newest]) + 1
        folder = out or wholes / str(number)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder}: exists and is not empty; choose another --out")
        with suppress(MessageError, SettingsError):  # a list that makes no sense changes nothing, here as elsewhere
            run.run.adopt((await read_changes(run.run)).records)
        with _made(folder):
            saver = _Saver(run, folder)
            if run.live and not run.directory.finished:
                marking = Marking(run, number, saver.problems)
                learners = await saver.copy(await marking.states())
                marking.forget()
                elsewhere = marking.number if saver.elsewhere else None
                await saver.save(learners, marking.cuts, elsewhere, marking.keeps_own)
                if elsewhere is None:
                    saver.problems += await collecting.noted_whole(run.run.registry, marking.number)
            else:
                await saver.save(await saver.copy(left_states(run, saver.problems)), await heads(run))
        return manifest.load(folder), saver.problems


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; remove it again if anything goes wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def left_states(run: RunReader, problems: list[str]) -> States:
    """Return the states that learners of a run saved when they ended: of each the newest whole one."""
    directory = run.directory.path
    folder = directory / statefolder.FOLDER
    names = {path.name.split(".")[0] for path in folder.glob("*.safetensors")} if folder.is_dir() else set()
    found: States = {}
    for name in sorted(names):
        for path in StateFolder(directory, name).generations():
            if path.exists() and name not in found:
                try:
                    loaded = state.load(path, run.run.identity, name)
                    if loaded.missing:
                        raise RunError(
                            f"{path}: {loaded.missing} of its parts are missing here, because other processes saved them"
                        )
                except RunError as error:
                    problems.append(f"{error}; passed over")
                else:
                    found[name] = (loaded.files, None)
    return found


@dataclass
class _Saver:
    """Writes one checkpoint into its folder."""

    run: RunReader
    folder: Path
    problems: list[str] = field(default_factory=list)
    elsewhere: bool = False  # a state, or a part of one, is on another machine

    async def copy(self, states: States) -> dict[str, SavedLearner]:
        """Copy the states that are here, and describe the others as their learners do.

        A state that cannot be read, or is not what its learner says that it wrote, is a problem.
        """
        learners: dict[str, SavedLearner] = {}
        for name, (paths, answer) in states.items():
            targets = [statefolder.part_file(Path("learners"), name, part) for part in range(len(paths))]
            stated = None if answer is None else _stated_files(answer, targets)
            files = []
            try:
                for part, path in enumerate(paths):
                    if stated is not None and not path.exists():
                        files.append(stated[part])
                        self.elsewhere = True
                        continue
                    files.append(await asyncio.to_thread(self._copy, path, targets[part]))
                    if stated is not None and files[-1] != stated[part]:
                        raise RunError(f"{path}: differs from what {name} reports to have written")
            except (FileNotFoundError, RunError) as error:
                self.problems.append(f"{name}: no state ({error}); the learner will begin from the log")
                continue
            step, versions = (None, None) if answer is None else (answer.step, answer.versions)
            learners[name] = SavedLearner(files[0], step, versions, files[1:])
        return learners

    async def save(
        self,
        learners: dict[str, SavedLearner],
        cuts: list[FragmentCut],
        number: int | None = None,
        keep_own: Sequence[str] = (),
    ) -> None:
        """Copy the bucket and then the log, and write the manifest."""
        directory = self.run.directory
        subjects = self.run.log.subjects
        bucket = await self._stream(f"KV_{subjects.bucket}", "bucket")
        log = await self._stream(subjects.log_stream, "log")
        unsigned = Manifest(
            format=manifest.FORMAT,
            version=self._version(learners, others=number is not None or bool(keep_own)),
            made_by=__version__,
            run=directory.name,
            settings=directory.settings.for_members().model_dump(),
            data=directory.data,
            map_digest=self.run.map.digest.hex(),
            created_at_s=time.time(),
            fragments=cuts,
            log=log,
            bucket=bucket,
            learners=learners,
            hash="",
            residuals=await self._residuals(cuts),
            number=number,
            keep_own=list(keep_own),
        )
        encoded = msgspec.json.encode(msgspec.structs.replace(unsigned, hash=unsigned.right_hash()))
        files.replace(self.folder / manifest.MANIFEST, lambda draft: _write(draft, encoded))

    def _version(self, learners: dict[str, SavedLearner], *, others: bool) -> int:
        if others:
            return manifest.OF_OTHERS
        if any(learner.parts for learner in learners.values()):
            return manifest.OF_PARTS
        return manifest.OF_REGIONS if self.run.run.regions else manifest.VERSION

    async def _residuals(self, cuts: Sequence[FragmentCut]) -> SavedFile | None:
        """Save what only the logs of other regions have of the cut."""
        run = self.run
        others = [log for log in run.regions.values() if log is not run.log]
        ends = [(cut.version, bytes.fromhex(cut.entry_hash)) for cut in cuts]
        genesis = run.genesis, run.genesis_check
        kept = await residuals.found([run.log], genesis, ends) if others else {}
        elsewhere = {i: each for i, each in (await residuals.found(others, genesis, ends)).items() if i not in kept}
        if not elsewhere:
            return None
        path = self.folder / "residuals.safetensors"
        await asyncio.to_thread(residuals.write, path, elsewhere)
        return SavedFile(path.name, path.stat().st_size, hash_of(path))

    async def _stream(self, stream: str, name: str) -> SavedStream:
        """Save a stream: of the bucket's server where it is the bucket, and else of the log's."""
        file = f"{name}.snapshot"
        link = self.run.transport
        if name == "bucket" and self.run.run.regions:
            link = NatsTransport(link.control, link.control, link.name, link.identity)
        taken: StreamSnapshot = await snapshot.save(link, stream, self.folder / file)
        return SavedStream(SavedFile(file, taken.size_bytes, taken.blake3), dict(taken.config), dict(taken.state))

    def _copy(self, source: Path, name: Path) -> SavedFile:
        target = self.folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
        return SavedFile(str(name), target.stat().st_size, hash_of(target))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _stated_files(answer: MarkerAnswer, targets: Sequence[Path]) -> list[SavedFile]:
    """Return the files of a learner's state as it describes them, under the names that they have in a checkpoint."""
    described = [(answer.size_bytes, answer.file_hash), *(answer.parts or ())]
    return [SavedFile(str(target), size, hash_.hex()) for target, (size, hash_) in zip(targets, described, strict=True)]


def _send(claimed: ClaimedNumber, taken: RunCheckpoint, say: Say) -> None:
    """Send a checkpoint to a place, and say so.

    Raises:
        ObjectStoreError: the place cannot be written; the folder stays.
    """
    began_s = time.monotonic()
    try:
        claimed.upload(taken)
    except ObjectStoreError as error:
        place = claimed.place.parent
        raise ObjectStoreError(
            f"{error}; the checkpoint stays in {taken.path}; to send it: diloco checkpoint collect {taken.path} --out {place}"
        ) from None
    say(
        f"sent to {claimed.place} in {duration(time.monotonic() - began_s)}; go on from it with: diloco up --resume "
        f"{claimed.place} --run-dir NEW"
    )


def checkpoint(
    words: Annotated[list[Path], typer.Argument(metavar="DIR", help="The run's directory. Or: collect CHECKPOINT FOLDER...")],
    out: Annotated[
        str | None,
        typer.Option(
            help="Where to put it; default: the next number in DIR/whole. At a place (s3://, gs://, az://, hf://): the next "
            "number below it. With collect: only a place, to which the checkpoint is sent when it is whole."
        ),
    ] = None,
) -> int:
    """Take a checkpoint of a whole run, without a pause. Exit code 1 if learners' states are still on other machines.

    `diloco checkpoint collect CHECKPOINT FOLDER...` completes the checkpoint with these states from folders.
    """
    target = target_of(out)
    place = target if isinstance(target, StoragePlace) else None
    if place is not None:
        in_bucket.lower_priority()
    if words[0] == Path("collect") and len(words) > 1:
        if out is not None and place is None:
            raise SettingsError(f"--out {out}: diloco checkpoint collect takes only a place, such as s3://BUCKET/FOLDER")
        code = asyncio.run(collecting.collect(words[1], words[2:]))
        if place is not None and code == 0:
            _send(in_bucket.claim_number(place), manifest.load(words[1]), print)
        return code
    if len(words) > 1:
        raise SettingsError(f"diloco checkpoint: one DIR, or: collect CHECKPOINT FOLDER...; not {' '.join(map(str, words))}")
    return 1 if asyncio.run(take_and_tell(words[0], target)) else 0


def target_of(out: str | None) -> Path | StoragePlace | None:
    """Return the folder or the place that ``--out`` names.

    Raises:
        SettingsError: it is a place that may hold credentials, or of an unknown scheme.
    """
    if not out:
        return None
    return parse_place(out, "--out") if has_scheme(out) else Path(out)


async def take_and_tell(path: Path, out: Path | StoragePlace | None = None, say: Say = print) -> list[str]:
    """Take a checkpoint, and print its place and how to continue from it. Return the learners with states on other machines.

    At a place, the next number below it is filled if all states are here; the folder on this machine is removed then.

    Raises:
        RunError, BrokerError: as :func:`take`; or the disk is full.
        ObjectStoreError: the place cannot be written. It is said before anything is taken, if it is known then.
    """
    began_s = time.monotonic()
    claimed = await asyncio.to_thread(in_bucket.claim_number, out) if isinstance(out, StoragePlace) else None
    try:
        taken, problems = await take(path, None if isinstance(out, StoragePlace) else out)
    except BaseException as error:
        if claimed is not None:
            claimed.give_back()
        if not isinstance(error, OSError):
            raise
        raise RunError(f"{path}: no checkpoint was taken: {error}; the run goes on") from None
    saved, absent = taken.manifest, taken.absent()
    versions = [cut.version for cut in saved.fragments]
    here = [file for file in saved.files if (taken.path / file.file).is_file()]
    for problem in problems:
        say(f"note: {problem}")
    say(
        f"checkpoint of run {saved.run}: versions {min(versions)} to {max(versions)} of {len(versions)} fragments, "
        f"{len(saved.learners) - len(absent)} learners' states, {size(sum(file.size_bytes for file in here))}, "
        f"in {duration(time.monotonic() - began_s)}"
    )
    if saved.keep_own:
        say(f"with checkpoints of their own: {', '.join(saved.keep_own)}")
    if absent:
        collecting.tell_absent(taken, say)
        if claimed is not None:
            await asyncio.to_thread(claimed.give_back)
            say(f"it is not sent before it is whole: add --out {out} to that command")
    elif claimed is not None:
        await asyncio.to_thread(_send, claimed, taken, say)
        shutil.rmtree(taken.path)
    else:
        say(f"go on from it with: diloco up --resume {taken.path} --run-dir NEW")
    return list(absent)
