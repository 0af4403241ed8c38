"""A run in virtual time: its server, its syncers, and the learners that a test gives it; any of them may die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diloco.control import creation
from diloco.core.learner.accounts import Accounts
from diloco.errors import RunError, SettingsError
from diloco.member.member import Member
from diloco.process.observe import Logger
from diloco.settings.presets import run_settings
from diloco.settings.service import LearnerSettings
from diloco.testing import threads
from diloco.testing.loop import ProcessLoop
from diloco.testing.toy import ToyLearner
from diloco.testing.virtual_transport import CONTROL, VirtualTransport
from diloco.testing.world import VirtualProcess, World

T = TypeVar("T")

RUN = "virtual"
LIMIT_S = 1e6  # virtual: two weeks
LOOK_S = 0.05  # between two looks at what a test waits for, and at a loop's thread
BY_DEFAULT: dict[str, Any] = {
    "tokens": 4096,
    "learners": 2,
    "fragments.count": 2,
    "round.steps": 4,
    "task.batch": 1,
    "task.context": 16,
}


class VirtualRun:
    """A run and its processes, by name. ``settings`` are over those of the preset ``decoupled`` and :data:`BY_DEFAULT`.

    There is one region. Syncers are called ``syncer-0``, ``syncer-1``, and so on.

    Raises:
        SettingsError: a setting is unknown or out of range, or no syncer is installed (the distribution diloco-syncer).
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, *, syncers: int = 1, seed: int = 0) -> None:
        self.settings = run_settings("decoupled", BY_DEFAULT | {"shards": syncers} | dict(settings or {}))
        self._world = _World(seed)
        self._members: dict[str, Member] = {}
        self._processes: dict[str, VirtualProcess] = {}
        self._add("creator", self._create)
        serve = _installed("syncer", "diloco-syncer")
        for index in range(syncers):
            self._add(f"syncer-{index}", partial(serve, run_name=RUN))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._world.dispose()

    # ---- processes

    def add_toy(self, name: str, *, step_s: float = 0.1, tokens: int = 16, founds: bool = False) -> None:
        """Begin a learner without a framework (:class:`diloco.testing.toy.ToyLearner`)."""

        async def serve(process: VirtualProcess) -> None:
            toy = ToyLearner(process, RUN, step_s=step_s, tokens=tokens, founds=founds)
            await toy.serve(partial(self._members.__setitem__, name))

        self._add(name, serve)

    def add_loop(
        self,
        name: str,
        loop: Callable[[Any], object],
        *,
        params: Callable[[], Any],
        tokens: int = 16,
        step_s: float = 0.1,
        before: Callable[[Any], object] | None = None,
        **more: Any,
    ) -> None:
        """Begin a learner that is a loop of one's own: ``loop(run)`` is called in ``with diloco.join(...) as run``.

        Args:
            name: of the learner.
            loop: the training loop. Each :meth:`step` of its run takes ``step_s`` of virtual time. An exception of the loop
                ends the run (:meth:`advance`).
            params: makes the parameters of each process of that name.
            tokens: of each step.
            step_s: seconds of each step.
            before: is called with the run before it is entered, for ``run.load_state_dict``.
            more: other arguments of ``diloco.join``, such as ``data="own"``.
        """
        join = _installed("loop", "diloco-learner")

        async def serve(process: VirtualProcess) -> None:
            around = partial(_Surroundings, process, step_s, partial(self._members.__setitem__, name))

            def work() -> None:
                joined = join(params(), run=RUN, name=name, tokens=tokens, surround=around, **more)
                if before is not None:
                    before(joined)
                with joined as run:
                    loop(run)

            thread = threads.Thread(process.loop, work)
            while not thread.over:
                await asyncio.sleep(LOOK_S)

        self._add(name, serve)

    def kill(self, name: str) -> None:
        """Kill a process at once."""
        process = self._process(name)
        process.crash("by the test")
        process.loop.end_threads()

    def start(self, name: str) -> None:
        """Start a process again that was killed. A loop begins with parameters of its own, as after a real restart."""
        self._process(name).start()

    def freeze(self, name: str) -> None:
        """Have a process stand still, as by SIGSTOP."""
        self._process(name).loop.freeze()

    def thaw(self, name: str) -> None:
        """Have a frozen process go on."""
        self._process(name).loop.thaw()

    def cut(self, name: str) -> None:
        """Cut a process off from the server."""
        self._process(name)
        self._world.cut.add(name)

    def heal(self, name: str) -> None:
        """End the cut of a process."""
        self._process(name)
        self._world.cut.discard(name)
        self._world.wake_all()

    # ---- time

    @property
    def now_s(self) -> float:
        """The virtual time, in seconds since the beginning."""
        return self._world.now_s

    def advance(self, seconds: float = LIMIT_S, *, until: Callable[[], bool] | None = None) -> None:
        """Let time pass: so long, or until something holds, or, without either, until all learners have ended.

        Raises:
            RunError: a process failed, or it did not come so far in that time.
        """
        world, limit_s = self._world, self.now_s + seconds
        world.scheduler.stopped = False
        while world.error is None and not (until is not None and until()):
            if until is None and self._over:
                return
            if self.now_s >= limit_s:
                if until is None and seconds < LIMIT_S:
                    return
                raise RunError(
                    f"virtual run: not there after {seconds:g} s: versions {self.versions()}, learners {self._states()}"
                )
            world.loop.call_later(min(LOOK_S, limit_s - self.now_s), _nothing)
            world.scheduler.run(min(self.now_s + LOOK_S, limit_s))
        if world.error is not None:
            raise RunError(f"virtual run: {type(world.error).__name__}: {world.error}") from world.error

    @property
    def _over(self) -> bool:
        return all(self._processes[name].ended for name in self._members) and bool(self._members)

    # ---- what came of it

    def versions(self) -> list[int]:
        """Return the newest version of each fragment that a learner has; empty before the first has joined."""
        known = [member.versions() for member in self._members.values() if member.learner.fragments]
        return [max(each) for each in zip(*known, strict=True)]

    def merged(self, name: str) -> NDArray[np.int64]:
        """Return a learner's tokens that are in versions, as it knows them, int64 [fragments]."""
        learner = self._member(name).learner
        return np.array([learner.accounts.tokens - s.delta.tokens - s.delta.lost_tokens for s in learner.fragments], np.int64)

    def accounts(self, name: str) -> Accounts:
        """Return a learner's totals: steps, tokens, times."""
        return self._member(name).learner.accounts

    def base(self, name: str, fragment: int) -> NDArray[np.float32]:
        """Return the version of a fragment that a learner holds, float32 [size of the fragment]."""
        values = self._member(name).learner.fragments[fragment].values
        if values is None:
            raise RunError(f"virtual run: learner {name!r} holds no version of fragment {fragment} yet")
        return values.base.copy()

    # ---- inside

    def _add(self, name: str, serve: Callable[[VirtualProcess], Coroutine[Any, Any, None]]) -> None:
        if name in self._processes:
            raise SettingsError(f"virtual run: there is a process {name!r} already")
        process = self._processes[name] = _Process(self._world, name, CONTROL, serve)
        self._world.processes.append(process)
        process.start()

    def _process(self, name: str) -> VirtualProcess:
        if name not in self._processes:
            raise SettingsError(f"virtual run: there is no process {name!r}: {', '.join(self._processes)}")
        return self._processes[name]

    def _member(self, name: str) -> Member:
        self._process(name)
        if name not in self._members:
            raise RunError(f"virtual run: learner {name!r} has not joined yet: advance() before")
        return self._members[name]

    def _states(self) -> dict[str, str]:
        return {name: str(member.heartbeat().state) for name, member in self._members.items() if member.learner.fragments}

    async def _create(self, process: VirtualProcess) -> None:
        await creation.create(process.transport, RUN, self.settings)


class _World(World):
    """Processes that can be cut off."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cut: set[str] = set()

    def look_for_end(self) -> None:
        """Go on: the test says when it is over."""


class _Process(VirtualProcess):
    world: _World

    def reaches(self, server: str) -> bool:
        return self.name not in self.world.cut

    @property
    def hears(self) -> bool:
        return self.name not in self.world.cut


class _Surroundings:
    """Surroundings of a loop in virtual time (``diloco_learner.run.surroundings``): its process, its clock, its server."""

    def __init__(self, process: VirtualProcess, step_s: float, joined: Callable[[Member], None]) -> None:
        self._process, self._step_s, self._joined = process, step_s, joined
        self._loop: ProcessLoop = process.loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = threads.run_coroutine_threadsafe(work, self._loop).result()
        member = getattr(result, "member", None)  # of the side that a loop of one process has
        if isinstance(member, Member):
            self._joined(member)
        return result

    async def connect(self, settings: LearnerSettings, log: Logger, within_s: float) -> VirtualTransport:
        return self._process.transport

    def wait(self, steered: object, timeout_s: float) -> None:
        threads.sleep(min(timeout_s, LOOK_S))

    def end_step(self) -> None:
        threads.sleep(self._step_s)

    def now_s(self) -> float:
        return self._loop.time()

    def close(self) -> None:
        pass


def _installed(name: str, distribution: str) -> Callable[..., Any]:
    for point in entry_points(group="diloco.testing", name=name):
        loaded: Callable[..., Any] = point.load()
        return loaded
    raise SettingsError(f"virtual run: {distribution} is not installed: pip install {distribution}")


def _nothing() -> None:
    pass
