"""What all tests share: their bounds, how they are spread over workers, what is said of failures, and servers to speak to."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests.harness import measuring
from tests.harness.outcomes import Failure, Outcomes
from xdist.scheduler import LoadScopeScheduling

from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco_ops.broker import server
from diloco_ops.broker.server import Server

if TYPE_CHECKING:
    from tests.made.fixtures import MakeServer

pytest.register_assert_rewrite("tests.made")  # so that a failed assert in there shows its values, as in a test module

# `make test` draws the same examples each time, so that it tells of the change and not of the draw. `make stress` draws by
# its runs' seeds, `make test-all` the usual number at random. How fast a machine is, is no test's matter.
settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20, derandomize=True, database=None
)
settings.register_profile("seeded", settings.get_profile("same"), derandomize=False)
settings.register_profile("all", settings.get_profile("seeded"), max_examples=100)
settings.load_profile("same")

TESTS = Path(__file__).parent
SPREAD = ("services", "simulation")  # their tests take long, and begin first; what is short fills the gaps at the end
# services' files whose tests share what takes long to make
TOGETHER = ("damage", "doctor", "insider_limits", "security", "up", "verify")
EARLIER_S = 40  # an event loop ends its test so much before pytest-timeout would
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty")  # audit events

_folders = pytest.StashKey[str]()  # of a test: where it works, and its services write their logs
_failed = pytest.StashKey[bool]()  # of a test: whether any phase of it failed
_broken: dict[int, tuple[BaseException, str]] = {}  # errors of fixtures that several tests share, each with its first test
_failures: list[Failure] = []
_counts: Counter[str] = Counter()
_started: list[str] = []  # processes that the running test has started


class Spread(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist is not typed
    """Gives a worker whole files, but tests that take long one by one.

    ``--dist loadgroup`` would do, but for pytest 9.2, which no longer lets pytest-xdist 3.8 rename tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        *_, folder, name = ("", *file.split("/"))
        alone = folder in SPREAD and name.removeprefix("test_").removesuffix(".py") not in TOGETHER
        return nodeid if alone else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    return Spread(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    processes = config.getoption("numprocesses", None) or 0
    measuring.state_pace(max(1, processes))  # before any module of tests is imported
    if processes:  # compiled once, and not by every worker; in a process of its own, which gives its memory back
        subprocess.run([sys.executable, "-c", "from diloco.core.tensors.compiled import kernels; kernels.load()"], check=True)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests import pace

    items.sort(key=lambda item: _folder(item) not in SPREAD)
    for item in items:
        if _folder(item) == "services":
            item.add_marker(pytest.mark.services)
        long = item.get_closest_marker("slow") or item.get_closest_marker("compose")
        bound_s = pace.LONG_TEST_S if long else pace.TEST_S
        item.add_marker(pytest.mark.timeout(bound_s))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj, bound_s - EARLIER_S)


def pytest_collection_finish() -> None:
    """Take what collecting has made out of the garbage collector's sight: no test frees it, and each collection walks it."""
    gc.collect()
    gc.freeze()


def _folder(item: pytest.Item) -> str:
    """Return the folder of ``tests`` that a test is in, or an empty string if the test is elsewhere."""
    return item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""


def _limited(test: Callable[..., Awaitable[None]], limit_s: float) -> Callable[..., Awaitable[None]]:
    """End a test in its own event loop: an error that pytest-timeout raises from a signal is lost if a callback runs."""

    @functools.wraps(test)
    async def limited(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return limited


# ---- processes that tests start


def _note_start(event: str, arguments: tuple[Any, ...], starts: tuple[str, ...] = STARTS) -> None:
    # ``starts`` is bound here: the hook outlives this module's names when the interpreter ends
    if event in starts:
        _started.append(f"{event} {arguments[0] if arguments else ''}")


sys.addaudithook(_note_start)


@pytest.fixture(autouse=True)
def _starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Demand the mark ``services`` of a test that starts processes: `make test` is to stay quick."""
    _started.clear()
    yield
    if _started and not any(request.node.get_closest_marker(mark) for mark in ("services", "tool", "compose")):
        pytest.fail(
            f"this test starts a process ({_started[0]}): mark it `services`, or `tool` if that is a program's own check"
        )


# ---- what is said of failures


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if folder is not None:
        item.stash[_folders] = str(folder)
    if not report.failed:
        return
    error = call.excinfo.value if call.excinfo is not None else None
    if call.when == "setup" and error is not None:
        # the same error again: of a fixture that an earlier test has already waited for in vain
        _, first = _broken.setdefault(id(error), (error, item.nodeid))
        if first != item.nodeid:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"Skipped: its fixture failed in {first}")
            return
    item.stash[_failed] = True
    base = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # pytest has no public way to it
    report.user_properties.append(("logs", item.stash.get(_folders, str(base))))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """Keep what a failed test leaves behind, and nothing else: a run of all tests writes gigabytes."""
    yield
    if not item.stash.get(_failed, False) and (folder := item.stash.get(_folders, None)):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count, in the process that hands out tests."""
    if report.failed:
        reason = str(getattr(report.longrepr, "reprcrash", None) or report.longreprtext).strip()
        logs = dict(report.user_properties).get("logs", "")
        _failures.append(Failure(report.nodeid, str(logs), reason.splitlines()[-1][:300] if reason else ""))
        _counts["failed" if report.when == "call" else "errors"] += 1
    elif report.skipped:
        _counts["skipped"] += 1
    elif report.when == "call":
        _counts["passed"] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a module that cannot be imported as a failure of it."""
    if report.failed:
        _failures.append(Failure(report.nodeid, "", report.longreprtext.strip().splitlines()[-1][:300]))
        _counts["errors"] += 1


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """End with what to do about each failure; ``make`` says it again behind the other checks."""
    from tests import pace

    for failure in _failures:
        terminalreporter.write_line("\n".join(failure.lines))
    Outcomes(pace.FACTOR, _counts, tuple(_failures)).write()


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Take back the destination and level of events that a command has set: the next test reads them all."""
    yield
    observe.reset()


@pytest.fixture(autouse=True)
def _programs_as_before() -> Iterator[None]:
    """Take back the folder that JAX keeps compiled programs in: it may be the test's own, which is gone when it has passed."""
    yield
    if (jax := sys.modules.get("jax")) is not None:
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()  # it goes by the folder that it was first used with


@pytest.fixture(scope="session", autouse=True)
def _patient_servers() -> None:
    """Have a server of a test start as late as it will: what a person waits for is no bound here."""
    from tests import pace

    server.START_TIMEOUT_S = pace.DEADLINE_S


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share: they use names of their own, and leave it running."""
    shared = Server(tmp_path_factory.mktemp("nats"), max_file_bytes=1 << 44)  # each archive of a test's run reserves 16 GiB
    shared.start()
    yield shared
    shared.kill()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """``make_server()``: a server of the test's own, to be frozen, killed or filled; its arguments are those of Server."""
    servers: list[Server] = []

    def make(*, start: bool = True, port: int | None = None, max_file_bytes: int | None = None) -> Server:
        made = Server(tmp_path / f"nats-{len(servers)}", port, max_file_bytes=max_file_bytes)
        servers.append(made)
        if start:
            made.start()
        return made

    yield make
    for each in servers:
        each.kill()  # also ends a frozen one


@pytest.fixture
async def link(nats_server: Server) -> AsyncIterator[NatsTransport]:
    """Connections to the shared server."""
    from tests import pace

    opened = await NatsTransport.open(nats_server.url, nats_server.url, "test", get_logger(), give_up_after_s=pace.DEADLINE_S)
    yield opened
    await opened.close()
