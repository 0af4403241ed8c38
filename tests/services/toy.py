"""A toy learner: a member of a run like any other, whose model is two small regressions in NumPy.

``python -m tests.services.toy --config FILE`` runs one as a process, configured as a learner is. ``Toy`` in a thread does the
same in the test's own process, where a test can hold it between two steps.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from tests.made.fragment_vectors import scatter

from diloco.core.learner.accounts import StepDone
from diloco.core.learner.learner import Dump
from diloco.core.run.leases import RoundRobin
from diloco.core.run.tape import Copied, End, Restored, state_digest
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, cut_model
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.process import observe, telemetry
from diloco.process.observe import Logger
from diloco.process.tape import TapeFile
from diloco.process.telemetry import Telemetry
from diloco.service import skeleton as service
from diloco.settings.run import RunSettings
from diloco.settings.service import LearnerSettings
from diloco.states import state
from diloco.states.state import Content
from diloco.states.statefolder import StateFolder
from diloco.wire.control import MarkerAnswer

Vector = NDArray[np.float32]
Tensors = dict[str, Vector]

SAMPLES = 16  # of a step; each is a token
TABLE_WIDTH = 4
STEP_S = 0.02
HURRIED_STEP_S = 0.002
SLOW_STEP_S = 0.15
SLOW = SLOW_STEP_S / STEP_S  # as a process's setting
LEARNING_RATE = 0.1
NOISE = 0.05
IDLE_S = 0.2
ALLOWED_POLL_S = 0.02
ALLOWED_FILE = "steps-allowed"  # in the folder of a test's learners: after how many steps each waits


def allow_steps(directory: Path, until_step: float) -> None:
    """Let learners in processes take steps until each has taken so many."""
    draft = directory / f"{ALLOWED_FILE}.draft"
    draft.write_text(str(until_step))
    draft.replace(directory / ALLOWED_FILE)


def wait_for_step(toy: Toy) -> None:
    """Wait until the file allows one more step; where there is none it is allowed."""
    assert toy.member is not None
    file = toy.settings.state_dir / ALLOWED_FILE
    while file.exists() and toy.member.step >= float(file.read_text()) and not toy.stopping:
        time.sleep(ALLOWED_POLL_S)


class Regression:
    """Learn y = W x + b and a table, from noisy samples. The truth is the seed's, the samples are their batch's.

    ``task.width`` is that of W, which stays small: a matrix product of some size would keep other threads from their cores.
    ``task.context`` is the number of the table's rows, and may be large.
    """

    def __init__(self, run: RunSettings) -> None:
        settings, seed = run.task, run.seed
        width, self.rate = settings.width, LEARNING_RATE
        truth, self.seed = np.random.default_rng(seed), seed
        self.true_weight, self.true_bias = truth.normal(size=(width, width)), truth.normal(size=width)
        self.true_table = truth.normal(size=(settings.context, TABLE_WIDTH)).astype(np.float32)
        self.tensors: Tensors = {
            "linear/weight": np.zeros((width, width), np.float32),
            "linear/bias": np.zeros(width, np.float32),
            "table": np.zeros((settings.context, TABLE_WIDTH), np.float32),
        }
        # gradients since a version was written, for an outer AdamW: they are offered, and no step is taken here
        self.held: Tensors | None = None
        if run.outer.optimizer == "adamw":
            self.held = {path: np.zeros_like(tensor) for path, tensor in self.tensors.items()}

    @property
    def offered(self) -> Tensors:
        """What offers are made of."""
        return self.tensors if self.held is None else self.held

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors; the table is embedding-like."""
        return [TensorSpec(path, tensor.shape, path == "table") for path, tensor in self.tensors.items()]

    def step(self, share: int, batch: int) -> float:
        """One step of gradient descent on a batch of a share; the loss of its samples."""
        loss, gradients = self.gradients(share, batch)
        if np.isfinite(loss):  # as a learner's guarded step does: what is invalid stays, and spoils nothing else
            for path, gradient in gradients.items():
                if self.held is None:
                    self.tensors[path] -= (self.rate * gradient).astype(np.float32)
                else:
                    self.held[path] += gradient.astype(np.float32)
        return loss

    def gradients(self, share: int, batch: int) -> tuple[float, dict[str, NDArray[Any]]]:
        """Loss and gradients of a batch of a share."""
        width, rng = len(self.true_bias), np.random.default_rng((self.seed, share, batch))
        x = rng.normal(size=(SAMPLES, width))
        error = x @ self.tensors["linear/weight"].T + self.tensors["linear/bias"]
        error -= x @ self.true_weight.T + self.true_bias + NOISE * rng.normal(size=(SAMPLES, width))
        table_error = self.tensors["table"] - self.true_table
        table_error += np.float32(NOISE * rng.normal())
        loss = float((error**2).mean() + (table_error**2).mean())
        return loss, {"linear/weight": error.T @ x / SAMPLES, "linear/bias": error.mean(0), "table": table_error}

    def digest(self, fragments: FragmentMap) -> bytes:
        """Of the parameters, as a tape ends with it."""
        vectors = {str(fragment.index): fragment.gather(self.tensors) for fragment in fragments.fragments}
        return state_digest({name: blake3(vector.tobytes()).digest() for name, vector in vectors.items()})

    def distance(self, tensors: Mapping[str, NDArray[Any]]) -> float:
        """Mean squared error of ``tensors`` against the truth, relative to that of the initial zeros."""
        truth: dict[str, NDArray[Any]] = {
            "linear/weight": self.true_weight,
            "linear/bias": self.true_bias,
            "table": self.true_table,
        }
        wrong = sum(float(np.square(tensors[path] - true).sum()) for path, true in truth.items())
        return wrong / sum(float(np.square(true).sum()) for true in truth.values())


@dataclass
class Toy:
    """One toy learner. ``start()`` runs it in a thread; ``failure`` is what ended it, if it was an error."""

    settings: LearnerSettings
    log: Logger
    before_step: Callable[[Toy], None] = lambda toy: None  # in the trainer's thread; may wait, or spoil the parameters
    may_step: Callable[[Toy], bool] = lambda toy: True  # one that may not applies versions, answers and saves meanwhile
    hands_over: Callable[[Toy], bool] = lambda toy: True  # whether snapshots are handed over at this boundary
    specs: Callable[[Regression], list[TensorSpec]] = lambda task: task.specs
    initialise: Callable[[Regression], None] = lambda task: None  # before it joins
    before_restore: Callable[[Toy], None] = lambda toy: None  # in a thread: it has joined, and is heard meanwhile
    finished: bool = False
    failure: BaseException | None = None
    member: Member | None = None
    task: Regression | None = None
    thetas: dict[int, Vector] = field(default_factory=dict)  # by fragment: the version last applied
    step_s: float = STEP_S  # what a step takes at least
    step_tokens: int = SAMPLES  # what it says that a step has: a larger island's has more
    _stopping: threading.Event = field(default_factory=threading.Event)
    _leaving: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _main: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def stopping(self) -> bool:
        """Whether it has been ended, wherever it is."""
        return self._stopping.is_set()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Run in a thread."""
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Ask it to end as a learner does: its last work is merged first, and its state is saved."""
        self._leaving.set()

    def stop(self) -> None:
        """End it wherever it is, and wait for its thread."""
        self._stopping.set()
        if self._thread is not None and self._loop is not None and self._main is not None:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(10)

    def _run(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as error:
            self.failure = error

    async def serve(self) -> None:
        """Join the run, and train to its end."""
        self._loop, self._main = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
        kept = telemetry.begin(self.settings, self.settings.role, self.log)
        link = await service.connect(self.settings, self.settings.role, self.log)
        try:
            await self._take_part(link, kept)
        finally:
            await link.close()
            if kept is not None:
                await asyncio.to_thread(kept.close)

    async def _take_part(self, link: NatsTransport, kept: Telemetry | None) -> None:
        run = await service.find_run(link, self.settings, self.log)
        task = self.task = Regression(run.created)
        self.initialise(task)
        fragments = cut_model(self.specs(task), run.created.fragments)
        tape = TapeFile(self.settings.state_dir, self.settings.name, run.identity, self.log)
        member = self.member = Member(link, run, fragments, self.settings, self.log, tape, kept)
        try:
            await member.join(lambda fragment: fragment.gather(task.tensors))
            await asyncio.to_thread(self.before_restore, self)
            self._restore(member, task)
            await asyncio.to_thread(self._train, member, task, run.created)
        finally:
            self._stopping.set()  # a cancelled wait does not end the thread
            await member.close()
            tape.close()

    def _train(self, member: Member, task: Regression, settings: RunSettings) -> None:
        with self.diary(self.settings.state_dir, self.name).open("a", buffering=1) as diary:
            self._step_on(member, task, settings, diary)

    def _step_on(self, member: Member, task: Regression, settings: RunSettings, diary: TextIO) -> None:
        done: StepDone | None = None
        round_robin = RoundRobin()
        leaving = False
        save_at_s = time.monotonic() + (self.settings.checkpoint_s or math.inf)
        while not self._stopping.is_set():
            if not leaving and self._leaving.is_set():
                leaving = True
                member.leave(self.settings.leave_s)
            if done is not None:
                diary.write(f"{done.share} {done.batch}\n")
            boundary = member.boundary(done)
            done = None
            self._write(boundary, member.map, task, settings.apply.alpha)
            if self.hands_over(self):
                for index in boundary.reads:
                    snapshot = member.map.fragments[index].gather(task.offered)
                    member.submit(index, lambda snapshot=snapshot: snapshot)  # type: ignore[misc]
            if boundary.finished:
                member.tape.record(End(True, task.digest(member.map)))
                self.finished = True
                return
            if boundary.ended:
                member.tape.record(End(False, task.digest(member.map)))
                self._save(member, task, member.checkpoint())
                return
            self._answer_marker(member, task)
            dump = member.dump() if time.monotonic() >= save_at_s else None
            if dump is not None:
                self._save(member, task, dump)
                save_at_s = time.monotonic() + self.settings.checkpoint_s
            if boundary.stop or boundary.wait or not self.may_step(self):
                member.wait(IDLE_S)
                continue
            self.before_step(self)
            began_s = time.perf_counter()
            batch = round_robin.next(member.leased())
            loss = task.step(*batch)
            time.sleep(max(0.0, self.step_s * self.settings.slow + began_s - time.perf_counter()))
            done = StepDone(self.step_tokens, *batch, loss, time.perf_counter() - began_s, 0.0)

    def _answer_marker(self, member: Member, task: Regression) -> None:
        marker = member.marker_due()
        dump = None if marker is None else member.dump()
        if marker is None or dump is None:
            return
        member.note_copied(marker)
        plain, arrays = dump
        path = StateFolder(self.settings.state_dir, self.name).snapshot(marker.number)
        saved = state.save(path, member.run.identity, self.name, plain, Content.of(arrays | self._params(task)))
        member.answer_marker(
            MarkerAnswer(self.name, marker.number, plain["step"], member.versions(), saved.size_bytes, state.file_hash(path))
        )

    def _params(self, task: Regression) -> Tensors:
        kinds = {"params": task.tensors} | ({} if task.held is None else {"gradients": task.held})
        return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def _save(self, member: Member, task: Regression, dump: Dump) -> None:
        plain, arrays = dump
        path, previous = StateFolder(self.settings.state_dir, self.name).generations()
        saved = state.save(path, member.run.identity, self.name, plain, Content.of(arrays | self._params(task)), previous)
        member.tape.record(Copied())
        member.note_saved(saved.digest)
        self.log.debug("checkpoint_saved", step=plain["step"])

    def _restore(self, member: Member, task: Regression) -> None:
        # killed between two renames, it has the generation before alone
        path = next((each for each in StateFolder(self.settings.state_dir, self.name).generations() if each.exists()), None)
        if path is None:
            return
        saved = state.load(path, member.run.identity, self.name)
        arrays = saved.arrays()
        member.restore(saved.accounts, arrays)
        for name in task.tensors:
            task.tensors[name] = arrays[f"params/{name}"]
            if task.held is not None:
                task.held[name] = arrays[f"gradients/{name}"]
        member.tape.record(Restored(saved.digest))
        self.log.info("checkpoint_restored", step=member.step)

    @staticmethod
    def diary(directory: Path, name: str) -> Path:
        """Where a learner notes share and index of each batch that it is about to report as trained, whatever becomes of it."""
        return directory / f"{name}.diary"

    def _write(self, boundary: Boundary, fragments: FragmentMap, task: Regression, alpha: float) -> None:
        for index, applied in boundary.applies:
            fragment = fragments.fragments[index]
            old = fragment.gather(task.tensors)
            new = applied.theta
            if applied.reference is not None:
                new = new + (old - applied.reference[:])
            if alpha and not applied.reset:
                new = np.float32(alpha) * old + np.float32(1 - alpha) * new
            scatter(fragment, new, task.tensors)
            if task.held is not None and applied.reference is None:
                scatter(fragment, np.zeros_like(new), task.held)
            self.thetas[index] = applied.theta

    def result(self) -> dict[str, Any]:
        """What a process of this learner leaves behind."""
        assert self.member is not None
        return {
            "finished": self.finished,
            "heartbeat": msgspec.to_builtins(self.member.heartbeat()),
            "thetas": {str(index): blake3(theta.tobytes()).hexdigest() for index, theta in sorted(self.thetas.items())},
        }


def _process() -> int:
    settings = service.parse_settings(LearnerSettings, "toy")
    toy = Toy(settings, observe.get_logger(), before_step=wait_for_step)
    signal.signal(signal.SIGTERM, lambda number, frame: toy.leave())
    asyncio.run(toy.serve())
    (settings.state_dir / f"{settings.name}.json").write_text(json.dumps(toy.result()))
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_process, "toy"))
