"""``diloco.up`` and ``diloco.open``: runs from Python, in a script or a notebook.

``up`` starts the ``diloco`` command in a separate process, so that runs start in one way only. The command's output appears in
this process, as plain lines if that is not a terminal.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.core.tensors.rows import at
from diloco.errors import BrokerError, DilocoError, RunError, SettingsError
from diloco.process import kernel_cache
from diloco.service import rundir
from diloco.settings import folders
from diloco.settings.loading import assignment
from diloco_ops import notebook
from diloco_ops.reading import attach, inspect, run_reader
from diloco_ops.reading.local_runs import LocalRun, local_run
from diloco_ops.report import build
from diloco_ops.track import values
from diloco_ops.up import pages
from diloco_ops.up.checking import found
from diloco_ops.up.supervise import ServiceFailed, last_words
from diloco_ops.weights import evaluating, export
from diloco_ops.weights.versions import LATEST, choose_versions, parsed_version
from diloco_report.samples import trimmed

T = TypeVar("T")
POLL_S = 0.1  # soon enough for a person who waits for a run to begin
SHOW_EVERY_S = 2.0  # as the page is drawn
STOP_S = 60.0  # learners write their checkpoints meanwhile; then the command is killed, and its services with it
WORDS_BYTES = 1 << 16  # of what a command said, from its end


class Metrics(list[dict[str, Any]]):
    """Values of a run in time: ``owner`` (a learner, or ``run``), ``name``, ``step``, ``value`` and ``wall_s``."""

    def frame(self) -> Any:
        """Return the values as a pandas data frame.

        Raises:
            DilocoError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise DilocoError("frame() needs pandas: pip install pandas; the values themselves are a list of dicts") from None
        return pandas.DataFrame(self, columns=["owner", "name", "step", "value", "wall_s"])


class Text(str):
    """Text whose lines a notebook and Python's prompt show as lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Run:
    """A live, stopped or finished run in a directory. Each call reads its current state."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        """Return the run's state in one line."""
        return notebook.sentence(self._seen(), self.page)

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the loss as a picture."""
        return notebook.picture(self._seen(), self.page)

    def _seen(self) -> LocalRun:
        """Return the run as its directory states it, or, if ``diloco up`` runs elsewhere, as its coordinator states it."""
        seen = local_run(self.directory)
        if seen.standing == "elsewhere":
            with suppress(DilocoError):  # it does not answer now
                seen = replace(seen, status=self.status())
        return seen

    @property
    def page(self) -> str | None:
        """The address of the run's page, or of a finished run's report; None if it has none or it is unknown here."""
        directory = rundir.load(self.directory)
        report = (directory.path / "report.html").resolve()
        return report.as_uri() if directory.finished and report.exists() else pages.link_of(directory)

    @property
    def report(self) -> dict[str, Any] | None:
        """The report (``docs/report.md``); None before the run is finished."""
        directory = rundir.load(self.directory)
        return build.load_json(directory.report) if directory.finished else None

    def status(self) -> dict[str, Any]:
        """Return the coordinator's status of the run, or the last status of a finished run.

        Raises:
            RunError: there is no such run, or it has not been started yet.
            BrokerError: its server, or its coordinator, does not answer.
        """
        directory = rundir.load(self.directory)
        if directory.finished:
            return build.load_json(directory.path / "status.json")
        return _in_a_loop(lambda: inspect.ask(directory))

    def metrics(self) -> Metrics:
        """Return losses over time. For a live run, also return the latest value of everything else that trackers get.

        Raises:
            RunError, BrokerError: as in :meth:`status`.
        """
        if (report := self.report) is not None:
            return Metrics(asdict(value) for value in values.of_report(report))
        status = self.status()
        if "learners" not in status:
            return Metrics()
        now = values.Statuses().read(status)
        known = {(value.owner, value.name, value.step) for value in now}
        before = build.load_json(self.directory / "series.json").get("learners", {})
        points = [
            values.Value(name, "loss", step, loss, at) for name, one in before.items() for at, _, step, loss in one["points"]
        ]
        found = [*now, *(point for point in points if (point.owner, point.name, point.step) not in known)]
        return Metrics(asdict(value) for value in sorted(found, key=lambda value: value.wall_s))

    def frame(self) -> Any:
        """Return :meth:`metrics` as a pandas data frame.

        Raises:
            DilocoError: pandas is not installed; or as in :meth:`metrics`.
        """
        return self.metrics().frame()

    def sample(self, prompt: str | None = None, *, count: int = 400, seed: int = 0, version: int | str = LATEST) -> Text:
        """Return a ``prompt`` and the text that the run's model generates after it. Default: the task's own prompt.

        ``count``: number of characters to generate. ``version``: as in :meth:`params`.

        Raises:
            RunError, SettingsError, BrokerError: as in :meth:`params`.
            ServiceFailed: the task generates no text, or accepts no prompt.
        """
        wanted = {"seed": seed, "count": count, "prompt": prompt}
        asked = evaluating.EvaluationRequest(self.directory, str(version), 1, None, [])
        found = _in_a_thread(lambda: evaluating.result(asked, wanted))
        return Text(trimmed(found["prompt"] + found["sample"]))

    def versions(self) -> list[dict[str, Any]]:
        """Return for each fragment its newest version, its merged tokens, and whether its log is closed.

        Raises:
            RunError: there is no such run, or it has not begun.
            BrokerError: its server does not answer, and its files are not here.
        """

        async def read() -> list[dict[str, Any]]:
            async with run_reader.opened(self.directory) as seen:
                chains = await run_reader.read_chains(seen.log)
            return [
                {"fragment": c.fragment, "version": c.version, "tokens_merged": c.tokens_merged, "closed": c.closed}
                for c in chains
            ]

        return _in_a_loop(read)

    def params(self, version: int | str = LATEST, *, average: int = 1) -> dict[str, NDArray[np.float32]]:
        """Return the parameters by path, float32 [their shapes], as ``diloco export`` writes them.

        ``version``: a version that all fragments have, ``"50%"`` (once half of the run's tokens was merged), or ``"latest"``.
        ``average``: the mean of this many versions, up to that one.

        Raises:
            RunError: there is no such run, or its log does not have the version.
            SettingsError: the version is neither a number, a percentage, nor ``"latest"``.
            BrokerError: its server does not answer, and its files are not here.
        """
        wanted = parsed_version(str(version))

        async def read() -> dict[str, NDArray[np.float32]]:
            async with run_reader.opened(self.directory) as seen:
                weights = _InMemory(seen.map.empty())
                await export.write(seen, weights, (await choose_versions(seen, wanted)).versions, average)
                return weights.tensors

        return _in_a_loop(read)


class Started(Run):
    """A run that this process has started. At the end of a ``with`` statement it is waited for, or stopped after an error."""

    def __init__(self, directory: Path, process: subprocess.Popen[str], said: Callable[[], str]) -> None:
        super().__init__(directory)
        self._process, self._said = process, said
        atexit.register(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.stop()
            return
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise

    def has_begun(self) -> bool:
        """Whether its coordinator answers, or it is finished.

        Raises:
            ServiceFailed: the run could not start.
        """
        if self._process.poll() is not None:
            self.wait()
            return True
        try:
            self.status()
        except (RunError, BrokerError):
            return False
        return True

    def wait(self) -> dict[str, Any] | None:
        """Wait until the run ends. Return its report, or None if it was stopped. A notebook shows the progress meanwhile.

        Ctrl-C, or a notebook's interrupt, ends the waiting but not the run. The run stops cleanly when this process ends.

        Raises:
            ServiceFailed: the run ended with an error.
        """
        handle = notebook.display_handle(self)
        try:
            while (code := self._ended(SHOW_EVERY_S)) is None:
                if handle is not None:
                    handle.update(self)
        except KeyboardInterrupt:
            print("interrupted; the run continues: run.wait() waits for it again, run.stop() stops it cleanly", flush=True)
            raise
        if handle is not None:
            handle.update(self)
        atexit.unregister(self._end)
        if code not in (0, 130):
            raise ServiceFailed(last_words(self._said(), code), code)
        return self.report

    def _ended(self, within_s: float) -> int | None:
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Stop the run cleanly: learners write checkpoints. ``diloco.up(run_dir=...)`` resumes it."""
        self._end()
        atexit.unregister(self._end)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def open_(
    place: str | os.PathLike[str],
    run: str | None = None,
    *,
    bulk: str | None = None,
    identity: str | os.PathLike[str] | None = None,
) -> Run:
    """Return the run in a directory, or the run with the name ``run`` at a server (``nats://host:port``).

    ``bulk``: in a run with regions, the server of one region. ``identity``: file of an operator or observer (``diloco keys``).

    Raises:
        RunError: there is no such run.
        SettingsError: an address without ``run``, or a directory with it.
        BrokerError: the server does not answer.
    """
    kernel_cache.choose(folders.cache_dir())
    text = os.fspath(place)
    if "://" not in text:
        for name, given in (("run", run), ("bulk", bulk), ("identity", identity)):
            if given is not None:
                raise SettingsError(
                    f"diloco.open({text!r}, {name}={given!r}): a directory belongs to one run; leave {name} out"
                )
        rundir.load(Path(text))
        return Run(Path(text))
    if run is None:
        raise SettingsError(f"diloco.open({text!r}): name the run: diloco.open({text!r}, run='NAME')")
    folder = folders.temporary()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / run
    file = None if identity is None else str(Path(identity).resolve())
    _in_a_loop(lambda: attach.attached(path, run, text, () if bulk is None else (bulk,), file))
    return Run(path)


def up(
    task: str | os.PathLike[str] | Callable[..., Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    output: bool = True,
    **given: Any,
) -> Started:
    """Start a run on this machine, as ``diloco up`` does, and return it once its coordinator answers.

    ``task``: MODULE:MAKE, a file, or the factory itself; None: the built-in task. ``settings``: as ``--set``. ``options``: as
    ``--task``. Other keywords are the command's options: ``learners=4``, ``tokens=10**6``, ``data=...``, ``preset=...``.

    Raises:
        SettingsError: the factory is not in a module that other processes can import.
        ServiceFailed: the command refused its arguments, or could not start; with its exit code.
    """
    path = Path(run_dir if run_dir is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    name, folder = (None, None) if task is None else _named(task)
    environment = dict(os.environ)
    places = [*([] if folder is None else [str(folder)]), *filter(None, [environment.get("PYTHONPATH")])]
    if callable(task):  # learners find its module where this process did
        places += [place for place in sys.path if place]
    environment["PYTHONPATH"] = os.pathsep.join(places)
    command = [sys.executable, "-m", "diloco_ops.cli", "up", "--run-dir", str(path)]
    command += [] if name is None else ["--set", f"task.name={name}"]
    for option, assignments in (("--set", settings), ("--task", options)):
        for key, value in (assignments or {}).items():
            command += [option, assignment(key, value)]
    for key, value in ({"page": pages.ANYWHERE} | given).items():  # without output, too: run.page is its address
        command += _option(key, value)
    begun = _begin(command, environment, output=output)
    started = Started(path, begun.process, begun.said)
    try:
        while not started.has_begun():
            time.sleep(POLL_S)
    except BaseException:
        started.stop()
        raise
    return started


def _named(task: str | os.PathLike[str] | Callable[..., Any]) -> tuple[str, Path | None]:
    if not callable(task):
        return found(os.fspath(task))
    module, name = task.__module__, task.__qualname__
    if module == "__main__" or "<" in name:
        raise SettingsError(
            f"diloco.up({name}): learners are separate processes and cannot import it from {module}; write it to a file "
            "beside this one (in a notebook: %%writefile my_task.py) and pass that file: diloco.up('my_task.py')"
        )
    return f"{module}:{name}", None


def _option(key: str, value: Any) -> list[str]:
    option = f"--{key.rstrip('_').replace('_', '-')}"
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    many = value if isinstance(value, list | tuple) else [value]
    return [word for one in many for word in (option, str(one))]


class _Begun:
    """The command's process, and its output on stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self._words = process, ""
        self._pumps = [threading.Thread(target=self._keep, daemon=True)]
        if process.stdout is not None:
            self._pumps.append(threading.Thread(target=self._show, daemon=True))
        for pump in self._pumps:
            pump.start()

    def poll(self) -> int | None:
        return self.process.poll()

    def said(self) -> str:
        for pump in self._pumps:
            pump.join(1.0)  # what the command said is read by then; a service that it left behind may hold the pipe
        return self._words

    def _keep(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._words = (self._words + line)[-WORDS_BYTES:]

    def _show(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                print(line, end="", flush=True)


def _begin(command: list[str], environment: Mapping[str, str], *, output: bool) -> _Begun:
    """Start the command in its own session, so that only :meth:`Started.stop` interrupts it, once."""
    terminal = output and sys.stdout.isatty()
    if not terminal:
        command = [*command, "--plain" if output else "--json"]
    stdout = None if terminal else subprocess.PIPE if output else subprocess.DEVNULL
    return _Begun(
        subprocess.Popen(
            command, env=dict(environment), stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    )


class _InMemory:
    """Weights in memory, as :class:`diloco_ops.weights.weights_file.Weights`."""

    def __init__(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        self.tensors = tensors

    def put(self, fragment: Any, values: NDArray[np.float32]) -> None:
        """Copy a fragment's values, float32 [its size], to where they belong."""
        for piece in fragment.pieces:
            tensor = self.tensors[piece.path]
            rows = tensor[piece.row_start : piece.row_stop] if tensor.ndim else tensor
            rows[...] = at(values, piece)


def _in_a_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run work in a loop of its own, in another thread: a notebook has one in this thread."""
    return _in_a_thread(lambda: asyncio.run(work()))


def _in_a_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
