"""The models that ``diloco replay --learners`` trains again, each in a process like the one that its life was.

Threads, XLA's flags, the devices of a CPU and the order in which collectives add up are a process's for good once JAX has begun
in it, and lives of a run differ in them. So JAX begins in a process of its own, which lives that are alike share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.delta import VersionWrite
from diloco.core.learner.schedule import Moment
from diloco.core.run import tape
from diloco.core.run.lives import Life
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import DilocoError, RunError
from diloco.process import observe
from diloco.settings.run import RunSettings
from diloco_ops.up.environment import CPU_DEVICES

Vector = NDArray[np.float32]
State = Mapping[str, NDArray[Any]]
MODELS, LEARNER = "diloco.models", "learner"  # entry points of what can be trained again, and the one that there is
END_S = 10.0  # in which a process that has closed its end of the pipe is gone

MakeModel = Callable[[RunSettings, str | None, Life], "TrainableModel"]


class TrainableModel(Protocol):
    """A model that can be trained again.

    An entry point of the group ``diloco.models`` makes it, from the run's settings and data, the mesh of its devices, whether
    its steps are two programs, and the number of processes that the learner was.
    """

    @property
    def map(self) -> FragmentMap:
        """The run's fragments."""

    @property
    def machine(self) -> tape.Machine:
        """All that its bits depend on here."""

    @property
    def tokens_per_batch(self) -> int:
        """The most tokens of a step; the tape has those of the steps that counted fewer."""

    def step(self, share: int, batch: int, at: Moment) -> None:
        """Take an inner step on a batch, at the learning rate of that moment."""

    def write(self, fragment: int, applied: VersionWrite) -> None:
        """Write a version into the model."""

    def snapshot(self, fragment: int) -> Vector:
        """Return what an offer is made of, float32 [size of the fragment]: values; gradients for an outer AdamW."""

    def parameters_digest(self) -> bytes:
        """Return the digest of all parameters, as a learner's tape has it."""

    def state(self) -> State:
        """Return parameters and optimizer state by name, any dtype [...], copied."""

    def load_state(self, state: State) -> None:
        """Take over a :meth:`state`: arrays by name, any dtype [...]."""

    def load_optimizer(self, state: State) -> None:
        """Take over the optimizer state alone, any dtype [...] by name."""


class Retraining:
    """Makes the models of lives, each in a process like the life's: the latest one can be used, until the next one is made.

    Use it in a ``with`` statement, at whose end the process ends.
    """

    def __init__(self) -> None:
        self._process: _Process | None = None

    def __enter__(self) -> Retraining:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, settings: RunSettings, data: str | None, life: Life) -> TrainableModel:
        """Return the model that a learner of ``diloco up`` trained in a life.

        Raises:
            RunError: nothing that is installed can train it, it computed with PyTorch, or there are too few devices.
        """
        machine = life.machine
        if machine is not None and machine.text.startswith(f"{tape.TORCH} "):
            raise RunError(
                "the training of a PyTorch learner cannot be repeated: replay supports only JAX learners; verify checks "
                "this learner's offers"
            )
        if not any(point.name == LEARNER for point in entry_points(group=MODELS)):
            raise RunError("the distribution diloco-learner is not installed, which trains the models of runs")
        environment = {} if machine is None else machine.environment(1 if life.mesh is None else life.mesh.devices)
        kind = environment, life.processes > 1
        if self._process is None or self._process.kind != kind or self._process.ended:
            self._end()
            self._process = _Process(kind)
        model = _Distant(self._process, settings, data, life)
        if machine is not None and model.machine != machine:
            observe.get_logger().warning("other_machine", here=model.machine.text, tape=machine.text)
        return model

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """A process that has a model, and is asked for its methods. ``kind``: its environment, and whether its life was several."""

    def __init__(self, kind: tuple[Mapping[str, str], bool]) -> None:
        self.kind, self.ended = kind, False
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, kind[0]), name="replay")
        self._process.start()
        theirs.close()  # or this process would hold open what the other one closes when it dies

    def ask(self, method: str, *arguments: object) -> Any:
        """Return what a method of the model returns.

        Raises:
            RunError: the process has died.
        """
        try:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.ended = True
            self._process.join(END_S)
            raise RunError(
                f"the process that repeated its training has died (exit code {self._process.exitcode}; -9 often means "
                "that memory ran out): read its output on stderr, and replay on a machine with more memory"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End the process: it has nothing to keep."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


class _Distant:
    """The model that a process has made."""

    def __init__(self, process: _Process, settings: RunSettings, data: str | None, life: Life) -> None:
        self._ask = process.ask
        about: tuple[FragmentMap, tape.Machine, int]
        about = process.ask(_MAKE, settings, data, life.mesh, life.apart, life.processes)
        self.map, self.machine, self.tokens_per_batch = about

    def step(self, share: int, batch: int, at: Moment) -> None:
        self._ask("step", share, batch, at)

    def write(self, fragment: int, applied: VersionWrite) -> None:
        self._ask("write", fragment, applied)

    def snapshot(self, fragment: int) -> Vector:
        """Return what an offer is made of, float32 [size of the fragment]."""
        vector: Vector = self._ask("snapshot", fragment)
        return vector

    def parameters_digest(self) -> bytes:
        digest: bytes = self._ask("parameters_digest")
        return digest

    def state(self) -> State:
        """Return parameters and optimizer state by name, any dtype [...]."""
        state: State = self._ask("state")
        return state

    def load_state(self, state: State) -> None:
        """Take over parameters and optimizer state by name, any dtype [...]."""
        self._ask("load_state", state)

    def load_optimizer(self, state: State) -> None:
        """Take over optimizer state by name, any dtype [...]."""
        self._ask("load_optimizer", state)


_MAKE = "make"


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """Make models and call their methods, as the other end of the pipe asks, until that one is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process that asks ends this one
    os.dup2(2, 1)  # libraries write there, and the command's output is for its caller
    if tape.CPU_DEVICES in environment.get(tape.XLA_FLAGS, ""):
        os.environ.pop(CPU_DEVICES, None)  # it would count more than the tape's
    os.environ.update(environment)
    [found] = [point for point in entry_points(group=MODELS) if point.name == LEARNER]
    model: TrainableModel | None = None
    with contextlib.suppress(EOFError, OSError):  # the other process has ended
        while True:
            method, arguments = pipe.recv()
            answer: object
            try:
                if method == _MAKE:
                    model = None  # its memory is the next one's
                    model = found.load()(*arguments)
                    answer = model.map, model.machine, model.tokens_per_batch
                else:
                    answer = getattr(model, method)(*arguments)
            except DilocoError as error:
                answer = error
            except Exception as error:  # of JAX, or of the user's task
                observe.get_logger().error("not_trained_again", exc_info=error)
                answer = RunError(f"repeating its training failed: {type(error).__name__}: {error}")
            pipe.send(answer)
