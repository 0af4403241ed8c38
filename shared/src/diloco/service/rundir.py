"""A run's directory: its settings, its server's address, its logs and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco import __version__
from diloco.errors import RunError, SettingsError
from diloco.process import locks
from diloco.settings import folders
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse

FORMAT = 3  # grows with the settings of runs, too
LOCK = "lock"


@dataclass(frozen=True)
class RunDirectory:
    """The content of ``run.json``: the run as it was created."""

    path: Path
    name: str
    nats_url: str
    data: str | None
    settings: RunSettings
    learners: int | None = None  # that are started here; None: as many as the data has shares; 0: they are loops elsewhere
    devices_per_learner: int | None = None  # None: as many as JAX finds
    processes_per_learner: int | None = None  # None: one
    least_processes: int | None = None  # of each learner, that go on where others are lost; None: all begin again together
    torch_processes: int | None = None  # of each learner that computes with PyTorch; None: one
    nats_bulk_url: str | None = None  # of the region from which the log is read, in a run with regions
    region_urls: dict[str, str] | None = None  # of each region's own server, where all are known
    identity: str | None = None  # file of the identity of commands
    wan_control: str | None = None  # control address of emulated links between regions
    init: str | None = None  # file or folder of the weights that it begins with; None: as the task makes them
    init_names: str | None = None  # file of the names that tensors have there
    framework: str | None = None  # name of the one that computes the run's task; None: the task has not been looked at
    torch: dict[str, str] | None = None  # by learner: the task of one that computes with PyTorch; None: none does
    units: str | None = None  # of the loss, as the task says them; None: it does not, or was not asked
    command: str | None = None  # command line of the `diloco up` that worked on it last
    host: str | None = None  # and its machine's name
    began_at_s: float | None = None  # Unix time at which the run was begun

    @property
    def learner_names(self) -> list[str]:
        return [f"learner-{i}" for i in range(self.settings.learners if self.learners is None else self.learners)]

    @property
    def starts_learners(self) -> bool:
        """Whether learners are started here, and an evaluator of their task; else they are loops that join by themselves."""
        return self.learners != 0

    @property
    def shrinks(self) -> bool:
        """Whether learners go on with fewer processes than they have."""
        return self.least_processes is not None and self.least_processes < (self.processes_per_learner or 1)

    @property
    def replicas(self) -> int:
        """Replicas in a learner's mesh, if nothing else is said: one in each process where fewer may go on."""
        return self.processes_per_learner or 1 if self.shrinks else 1

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def finished(self) -> bool:
        return self.report.exists()

    def with_learners_of(self, old: RunDirectory) -> RunDirectory:
        """Return it with learners that have devices, processes and torch tasks as those of another run have."""
        torch = {name: task for name, task in (old.torch or {}).items() if name in self.learner_names}
        return replace(
            self,
            devices_per_learner=old.devices_per_learner,
            processes_per_learner=old.processes_per_learner,
            least_processes=old.least_processes,
            torch_processes=old.torch_processes,
            torch=torch or None,
        )

    def save(self) -> None:
        """Write ``run.json``."""
        self.path.mkdir(parents=True, exist_ok=True)
        values = {"format": FORMAT, "version": __version__} | asdict(self) | {"settings": self.settings.model_dump()}
        write_json(self.path / "run.json", {key: value for key, value in values.items() if key != "path"})


def load(path: Path) -> RunDirectory:
    """Read a run's directory.

    Raises:
        RunError: there is none, it is damaged, or another version made it.
    """
    file = path / "run.json"
    try:
        values: dict[str, Any] = json.loads(file.read_text())
        if values["format"] != FORMAT:
            raise RunError(
                f"{path}: made by version {values.get('version')} of diloco (format {values['format']}); this is "
                f"{__version__} (format {FORMAT}): continue with the version that made it, or begin another run"
            )
        settings = parse(RunSettings, values["settings"], str(file))
        kinds: dict[str, Any] = {"name": str, "nats_url": str, "data": str | None, "init": str | None, "learners": int | None}
        kinds |= {"nats_bulk_url": str | None, "wan_control": str | None, "identity": str | None}
        kinds |= {"devices_per_learner": int | None, "processes_per_learner": int | None, "least_processes": int | None}
        kinds |= {"torch_processes": int | None}
        kinds |= {"command": str | None, "host": str | None, "began_at_s": float | None, "framework": str | None}
        kinds |= {"region_urls": dict | None, "units": str | None, "init_names": str | None, "torch": dict | None}
        for key, kind in kinds.items():
            if not isinstance(values.get(key), kind):
                raise TypeError(f"{key} = {values.get(key)!r}")
        for key in ("region_urls", "torch"):
            if not all(isinstance(value, str) for value in (values.get(key) or {}).values()):
                raise TypeError(f"{key} = {values[key]!r}")
        own: dict[str, Any] = {key: values.get(key) for key in kinds}
        return RunDirectory(path, settings=settings, **own)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{path}: not a run's directory (it has no run.json)") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SettingsError) as error:
        raise RunError(f"{file}: damaged: {error}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a run's directory until the process ends, and make it if need be, so that no two commands start its services.

    Raises:
        RunError: another process holds it; or it cannot be written, or its file system has no locks.
    """
    lock = locks.take_alone(path / LOCK, folders.RUN)
    if lock is None:
        raise _in_use(path)
    with lock:
        yield


def check_free(path: Path) -> None:
    """Find out that no process has locked a run's directory, which may not be there, as :func:`locked` does.

    Raises:
        RunError: one has.
    """
    if is_locked(path):
        raise _in_use(path)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run's directory, as :func:`locked` does; False where that cannot be known."""
    return locks.is_taken(path / LOCK)


def _in_use(path: Path) -> RunError:
    return RunError(
        f"{path}: another `diloco up` is at work on this run: look at it with `diloco status {path}`, stop it, or choose "
        "another --run-dir"
    )


def write_json(path: Path, value: Any) -> None:
    """Replace a file by ``value`` as JSON; a reader sees the old or the new file, whole."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Replace a file by ``text``, likewise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)
