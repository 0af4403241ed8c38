"""A run in a notebook and at Python's prompt: it shows itself, and waiting for it can be interrupted without an end of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import DilocoError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.presets import run_settings
from diloco_ops import api
from diloco_ops.api import Metrics, Run, Started, Text
from diloco_ops.weights import evaluating

STATUS = {
    "state": "training", "tokens_processed": 430_000, "tokens_budget": 1_000_000, "units": "nats per byte", "regions": {},
    "learners": {"learner-0": {"loss": 2.25}, "learner-1": {"loss": 2.75}, "<b>": {"loss": None}},
    "loss": {"learner-0": [[0, 0, 4.0], [10, 10, 3.0], [20, 20, 2.25]], "learner-1": [[0, 0, 4.5], [20, 20, None]], "<b>": []},
    "validation": [[5, 5, 3.5], [20, 20, 2.5]],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that was stopped at 43 %."""
    RunDirectory(tmp_path, "mine", "nats://127.0.0.1:1", None, run_settings()).save()
    (tmp_path / "services").mkdir()
    rundir.write_text(tmp_path / "services" / "coordinator.toml", 'page_address = "127.0.0.1:8421"\n')
    rundir.write_json(tmp_path / "status.json", STATUS)
    return Run(tmp_path)


def test_it_shows_where_it_stands(run: Run, tmp_path: Path) -> None:
    said = f"run 'mine' in {tmp_path}: %s, 430k of 1.00M tokens, loss 2.500, validation loss 2.500"
    assert repr(run) == said % "stopped at 43 %"
    assert getattr(run, "page") is None  # noqa: B009  # it changes, which a type checker does not see
    with rundir.locked(tmp_path):
        assert run.page == "http://127.0.0.1:8421/"
        assert repr(run) == said % "running at 43 %" + ", page http://127.0.0.1:8421/"
        assert '<a href="http://127.0.0.1:8421/" target="_blank">' in run._repr_html_()
    (tmp_path / "report.html").touch()
    rundir.write_json(tmp_path / "report.json", {})
    assert run.page == (tmp_path / "report.html").resolve().as_uri()
    assert repr(run).startswith(said % "finished")


def test_its_picture_has_a_curve_of_each_learner_and_of_the_model(run: Run) -> None:
    picture = ET.fromstring(run._repr_html_())
    curves = [each.attrib["points"].split() for each in picture.iter("polyline")]
    assert sorted(map(len, curves)) == [1, 2, 3]  # learner-1 has one finite loss
    ends = {curve[-1].split(",")[0] for curve in curves if len(curve) > 1}
    assert ends == {"560.0"}  # 20 s is the end of the axis
    assert "nats per byte" in ET.tostring(picture, encoding="unicode")


def test_a_run_without_a_loss_shows_itself(run: Run, tmp_path: Path) -> None:
    (tmp_path / "status.json").unlink()
    assert repr(run) == f"run 'mine' in {tmp_path}: stopped"
    assert "no loss yet" in run._repr_html_()


def test_a_sample_is_text_that_shows_its_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def result(*arguments: Any) -> dict[str, str]:
        asked.append((threading.current_thread() is threading.main_thread(), *arguments))
        return {"prompt": "\ndef ", "sample": "run(self):\n    pass\n\n"}

    monkeypatch.setattr(evaluating, "result", result)
    text = run.sample(count=9, version=3)
    assert isinstance(text, Text)
    assert str(text) == repr(text) == "def run(self):\n    pass"
    in_main_thread, which, wanted = asked[0]
    assert not in_main_thread  # where a notebook has a loop of its own
    assert (which.path, which.version, wanted) == (run.directory, "3", {"seed": 0, "count": 9, "prompt": None})


def test_what_a_frame_needs_is_said_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr(Run, "metrics", lambda self: Metrics())
    with pytest.raises(
        DilocoError, match=r"^frame\(\) needs pandas: pip install pandas; the values themselves are a list of dicts$"
    ):
        run.frame()


class Cell:
    """IPython's display in the running cell of a notebook."""

    def __init__(self) -> None:
        self.updates = 0
        self.updated = threading.Event()

    def get_ipython(self) -> object:
        return types.SimpleNamespace(kernel=None)

    def show(self, shown: Run, display_id: bool) -> Cell:
        assert shown._repr_html_()
        return self

    def update(self, shown: Run) -> None:
        self.updates += 1
        self.updated.set()


@pytest.fixture
def started(run: Run) -> Iterator[Started]:
    """A run whose command ends when it is told to."""
    command = [sys.executable, "-c", "import signal; signal.sigwait([signal.SIGINT])"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as the process begins
    process = subprocess.Popen(command, text=True, start_new_session=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    yield Started(run.directory, process, lambda: "")
    process.kill()
    process.wait()
    signal.signal(signal.SIGINT, before)


@pytest.mark.services
def test_waiting_shows_progress_and_is_interrupted_without_an_end_of_the_run(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell()
    ipython = types.SimpleNamespace(get_ipython=cell.get_ipython, display=types.SimpleNamespace(display=cell.show))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(api, "SHOW_EVERY_S", 0.01)

    def interrupt() -> None:
        cell.updated.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        started.wait()
    thread.join()
    assert started._process.poll() is None
    assert capsys.readouterr().out.startswith("interrupted; the run continues: run.wait()")
    started.stop()
    assert started.wait() is None
    assert started._process.poll() == 0
