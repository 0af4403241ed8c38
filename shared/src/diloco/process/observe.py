"""Structured events of a process, and its end.

An event is one stable snake_case name with key-values: ``log.info("round_closed", fragment=3, members=4)``. In a file, and on
stderr with ``fmt="json"``, it is one JSON object a line; :mod:`diloco.process.logs` merges the files of a run. Uncaught
exceptions of any thread or task, and messages of libraries through ``logging``, become events too, with their tracebacks
inside. No traceback reaches a user's terminal. Lines that repeat are written once, and then counted (:mod:`.repeats`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import ssl
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast

import msgspec
import structlog
from rich.console import Console
from structlog.typing import EventDict, FilteringBoundLogger

from diloco.errors import DilocoError
from diloco.process import logs
from diloco.process.repeats import WriteOnce
from diloco.process.sender_counts import MAX_PAIRS, SenderCounts

Logger = FilteringBoundLogger
Level = Literal["debug", "info", "warning", "error"]

PROGRESS_S = 30.0  # a few thousand lines of progress a day: enough for a rate, and still readable
EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h

CONNECTION_ENDS = (ConnectionError, ssl.SSLError, TimeoutError, EOFError)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_log_place: str | None = None
_log_file: IO[bytes] | None = None
_write_once: WriteOnce | None = None
_in_words = True  # whether stderr also gets the reason of an end as a sentence


def get_logger(**values: Any) -> Logger:
    """Return a logger whose every event has ``values``; it may be made before :func:`configure`."""
    return cast(Logger, structlog.get_logger(**values))


log = get_logger()


def configure(
    service: str,
    run: str,
    *,
    role: str | None = None,
    region: str = "",
    level: Level = "info",
    fmt: Literal["json", "console"] = "json",
    file: Path | None = None,
) -> None:
    """Set the destination of this process's events, at its start. The last call counts.

    Args:
        service: name of the process, in every event.
        run: name of the run, in every event.
        role: kind of the service, in every event; None if its name is its kind.
        region: of the process, in every event; empty in a run without regions.
        level: events below it are not written.
        fmt: format of stderr: JSON lines, or coloured lines for people. With a ``file``, no JSON goes to stderr.
        file: receives JSON lines, with any ``fmt``; its folder is made.

    Raises:
        DilocoError: the file cannot be opened.
    """
    global _log_place, _log_file, _write_once, _in_words
    reset()
    writers: list[Callable[[EventDict], None]] = []
    if file is not None:
        _log_file = _open(file)
        writers.append(_JsonLines(_log_file).write)
    if fmt == "console":
        writers.append(_console_writer(sys.stderr))
    elif file is None:
        writers.append(_JsonLines(sys.stderr.buffer).write)
    _log_place = str(file) if file is not None else "the events above"
    _in_words = file is not None or fmt == "console" or sys.stderr.isatty()
    stamp, fan = _Stamp(service, role or service, run, region), _Fan(writers)
    _write_once = WriteOnce(lambda values: fan.msg(**stamp(None, "", values)))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _describe_exception,
            _write_once,
            stamp,
            _hand_over,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: fan,
        cache_logger_on_first_use=False,
    )
    _catch_the_uncaught()


def reset() -> None:
    """Revert :func:`configure`: close the file, take the hooks out. For a process that outlives its run."""
    global _log_place, _log_file, _write_once, _in_words
    write_counts()
    structlog.reset_defaults()
    if _log_file is not None:
        _log_file.close()
    _log_place = _log_file = _write_once = None
    _in_words = True
    logging.captureWarnings(False)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _LibraryHandler)]:
        root.removeHandler(handler)
    for module, hook, ours in _HOOKS:
        if getattr(module, hook) is ours:
            setattr(module, hook, _hooks_before.pop((module, hook)))


def write_counts() -> None:
    """Write how many repeated lines were left out until now: this process ends, or another one takes its place."""
    if _write_once is not None:
        _write_once.end()


class Counted(SenderCounts):
    """Counts refusals, and logs the first of each (sender, kind)."""

    def __init__(
        self,
        logger: Logger,
        event: str = "message_refused",
        *,
        limit: int = MAX_PAIRS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limit, clock)
        self._log, self._event = logger, event

    def note(self, sender: str, kind: str, **values: Any) -> int:
        """Count one; log it, with ``values``, if it is the first of this sender and kind. Return their count."""
        counted, count = self.add(sender, kind)
        if count == 1:
            self._log.warning(self._event, sender=counted[0], kind=counted[1], **values)
        return count


class Progress:
    """Logs a process's progress every half minute: event ``progress``, at level info, alike for all services.

    Events that come more often than that in a healthy run are logged at level debug.
    """

    def __init__(self, logger: Logger, now_s: float, read: Callable[[], tuple[Mapping[str, int], Mapping[str, Any]]]) -> None:
        """Begin to count. ``read`` returns counts, which are logged with their rates, and further values."""
        self._log, self._logged_s, self._read = logger, now_s, read
        self._before, _ = read()

    def look(self, now_s: float) -> None:
        """Log the progress if it is time to."""
        elapsed_s = now_s - self._logged_s
        if elapsed_s < PROGRESS_S:
            return
        counts, values = self._read()
        rates = {f"{name}_per_s": round((count - self._before[name]) / elapsed_s, 3) for name, count in counts.items()}
        self._logged_s, self._before = now_s, counts
        self._log.info("progress", **values, **counts, **rates)


def run_main(main: Callable[[], int | None], program: str = "diloco") -> int:
    """Run a command or a service to its end and return the process's exit code, for ``sys.exit``.

    A :class:`DilocoError` becomes the event ``process_ended``, one line on stderr, and its own code; Ctrl-C 130; a reader that
    went away (``| head``) 0. Any other exception is a defect: an event with the traceback, one line on stderr with its place,
    and 70. Groups of exceptions (``asyncio.TaskGroup``) are opened: if every leaf is a :class:`DilocoError`, the first one is
    shown. A code that ``main`` returns is its own to explain.
    """
    try:
        return _run(main, program)
    finally:
        write_counts()


def _run(main: Callable[[], int | None], program: str) -> int:
    try:
        return main() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            return say_end(program, end.code, 1)
        if end.code:
            _note_end(f"sys.exit({end.code}) was called", end.code)
        return end.code or 0
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # stdout is flushed once more at exit, which must not fail loudly
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except BaseException as error:
        leaves = list(_leaves(error))
        if all(isinstance(leaf, DilocoError) for leaf in leaves):
            return say_end(program, str(leaves[0]), cast(DilocoError, leaves[0]).exit_code)
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            return _interrupted()
        place = _record_defect(program, error)
        defect = next(leaf for leaf in leaves if not isinstance(leaf, DilocoError))
        return say_end(program, f"internal error: {_brief(defect)}; see {place}", EXIT_INTERNAL)


def say_end(program: str, reason: str, code: int) -> int:
    """Log why this process ends and with which code, say it on stderr, and return the code."""
    _note_end(reason, code)
    say(program, reason)
    return code


def say(program: str, message: str) -> None:
    """Print a sentence for people on stderr, unless that is collected as JSON lines, which the events are in."""
    if _in_words:
        begins = "" if re.match(rf"{program}( [a-z]+)+: ", message) else f"{program}: "  # it names the command itself
        print(f"{begins}{logs.printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


def _interrupted() -> int:
    if _log_place is not None:
        log.info("process_ended", code=EXIT_INTERRUPTED, reason="interrupted")
    return EXIT_INTERRUPTED


def _note_end(reason: str, code: int) -> None:
    write_counts()
    if _log_place is not None:
        log.critical("process_ended", code=code, reason=reason)


def _record_defect(program: str, error: BaseException) -> str:
    if _log_place is not None:
        log.critical("internal_error", exc_info=error)
        return _log_place
    values: EventDict = {"event": "internal_error", "level": "critical", "exc_info": error}
    for process in (_describe_exception, _Stamp(program, program, "", "")):
        process(None, "critical", values)
    try:
        handle, path = tempfile.mkstemp(prefix="diloco-", suffix=".jsonl")
    except OSError:  # no folder for temporary files can be written
        print(values["traceback"], file=sys.stderr)
        return "the traceback above"
    with os.fdopen(handle, "wb") as file:
        _JsonLines(file).write(values)
    return path


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _brief(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _open(file: Path) -> IO[bytes]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("ab+", buffering=0)
        if opened.tell():
            opened.seek(-1, os.SEEK_END)
            if opened.read(1) != b"\n":  # the process before was killed in the middle of a line
                opened.write(b"\n")
    except OSError as error:
        raise DilocoError(f"{file}: the log cannot be written: {error.strerror}") from None
    return opened


class _JsonLines:
    """Writes events as JSON lines, each by one write, so that two processes may share a file.

    A log that cannot be written (disk full, reader gone) must not end a run: its events are dropped and counted, and the next
    event that fits has their number.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._dropped = 0
        self._torn = False

    def write(self, values: EventDict) -> None:
        with self._lock:
            extra = {"events_dropped": self._dropped} if self._dropped else {}
            line = (b"\n" if self._torn else b"") + _encode({**values, **extra}) + b"\n"
            try:
                written = self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):
                self._dropped += 1
                return
            self._torn = written < len(line)
            self._dropped = self._dropped + 1 if self._torn else 0


def _console_writer(stream: IO[str]) -> Callable[[EventDict], None]:
    console = Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def write(values: EventDict) -> None:
        entry = logs.LogLine(
            time_s=datetime.fromisoformat(values["time"]).timestamp(),
            service=values["service"],
            level=values["level"],
            event=values["event"],
            values={key: value for key, value in values.items() if key not in logs.FIXED_KEYS},
            raw="",
        )
        with contextlib.suppress(OSError, ValueError):
            console.print(logs.render(entry))

    return write


class _Fan:
    """structlog's end of the chain: an event goes to every writer."""

    def __init__(self, writers: list[Callable[[EventDict], None]]) -> None:
        self._writers = writers

    def msg(self, **values: Any) -> None:
        for write in self._writers:
            write(values)

    debug = info = warning = error = critical = exception = msg


class _Stamp:
    """Puts the fixed keys in front of an event's own ones."""

    def __init__(self, service: str, role: str, run: str, region: str) -> None:
        self._about = {"service": service, "role": role, "run": run, "region": region}

    def __call__(self, logger: Any, method: str, values: EventDict) -> EventDict:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        first = {"time": now, "level": values.pop("level"), **self._about}
        own = {f"{key}_" if key in first else key: value for key, value in values.items() if key != "event"}
        event = values["event"]
        values.clear()
        values.update(first, event=event, **own)
        return values


def _hand_over(logger: Any, method: str, values: EventDict) -> tuple[tuple[()], EventDict]:
    return (), values


def _describe_exception(logger: Any, method: str, values: EventDict) -> EventDict:
    found = values.pop("exc_info", None)
    if found is True:
        found = sys.exc_info()[1]
    elif isinstance(found, tuple):
        found = found[1]
    if isinstance(found, BaseException):
        values.setdefault("error", _brief(found))
        values["traceback"] = "".join(traceback.format_exception(found))
    return values


def _encode(values: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode({key: _plain(value) for key, value in values.items()}, enc_hook=_other)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        plain = {key: value if key in logs.FIXED_KEYS else ascii(value) for key, value in values.items()}
        return json.dumps(plain, default=ascii).encode()


def _plain(value: Any) -> Any:
    return bytes(value).hex() if isinstance(value, bytes | bytearray | memoryview) else value


def _other(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else str(value)


class _LibraryHandler(logging.Handler):
    """Makes events of the messages of libraries through ``logging``, asyncio's unretrieved exceptions included."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = record.exc_info[1] if record.exc_info else None
            if record.name == "asyncio" and isinstance(error, CONNECTION_ENDS):  # who lost the connection logs that as well
                log.warning("library_message", library=record.name, message=record.getMessage(), error=_brief(error))
                return
            write = getattr(log, record.levelname.lower(), log.warning)
            write("library_message", library=record.name, message=record.getMessage(), exc_info=record.exc_info)
        except Exception as error:  # a record whose arguments do not fit its text
            log.warning("library_message_damaged", library=record.name, exc_info=error)


def _catch_the_uncaught() -> None:
    logging.getLogger().addHandler(_LibraryHandler(logging.WARNING))
    logging.captureWarnings(True)
    for module, hook, ours in _HOOKS:
        _hooks_before[module, hook] = getattr(module, hook)
        setattr(module, hook, ours)


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, KeyboardInterrupt):
        log.critical("internal_error", exc_info=error)
        say("diloco", f"internal error: {_brief(error)}; see {_log_place}")


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        log.critical("internal_error", thread=args.thread.name if args.thread else None, exc_info=args.exc_value)


def _unraisablehook(args: sys.UnraisableHookArgs) -> None:
    log.error("unraisable_error", message=args.err_msg, where=repr(args.object), exc_info=args.exc_value)


_HOOKS: tuple[tuple[Any, str, Callable[..., None]], ...] = (
    (sys, "excepthook", _excepthook),
    (threading, "excepthook", _thread_excepthook),
    (sys, "unraisablehook", _unraisablehook),
)
_hooks_before: dict[tuple[Any, str], Callable[..., None]] = {}
