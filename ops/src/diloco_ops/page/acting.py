"""The actions of an operator's page: what the commands of the same names do, by the same functions and the same identity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diloco.core.run.changes import SETTABLE, Effective
from diloco.errors import DilocoError, SettingsError
from diloco.process.observe import Logger
from diloco.settings.loading import parse_assignments
from diloco.settings.places import loggable
from diloco.settings.validation import value_of
from diloco.wire.plain import json_object
from diloco_ops.checkpoints import checkpoint
from diloco_ops.operate import operate, rollback
from diloco_ops.operate.changing import Say
from diloco_ops.reading.run_reader import LiveRun
from diloco_report import actions
from diloco_report.actions import WHY, Action, Field

MAX_BYTES = 8192  # of what a form sends
Given = Mapping[str, str]


class OperatorActions:
    """Actions on the run of a directory, one after another; each is logged by this process, and its changes by the run.

    Args:
        directory: of the run.
        live: the run, for the names and settings that forms suggest.
        operator: in whose name it is acted.
        log: of this process.
    """

    def __init__(self, directory: Path, live: LiveRun, operator: str, log: Logger) -> None:
        self.directory, self.live, self.operator, self.log = directory, live, operator, log
        self._one_at_a_time = asyncio.Lock()
        self._known: dict[str, Callable[[Given, Say], Awaitable[int | None]]] = {
            "checkpoint": self._checkpoint,
            "set": self._set,
            "eject": self._eject,
            "readmit": self._readmit,
            "rollback": self._rollback,
            "preview": self._preview,
        }

    def form(self, report: Mapping[str, Any]) -> str:
        """Return the actions as HTML."""
        return actions.form(self.operator, _actions(report, self.live.run.now))

    async def act(self, request: Request) -> Response:
        """Carry out the action that a request names, and answer with its lines, or with the one line of its error."""
        name = request.path_params["name"]
        known = self._known.get(name)
        if known is None:
            return JSONResponse({"error": f"no such action; the actions are {', '.join(self._known)}"}, 404)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse({"error": "expected application/json"}, 415)
        given = await _given(request)
        if given is None:
            return JSONResponse({"error": f"expected a JSON object of strings, of at most {MAX_BYTES} bytes"}, 400)
        lines: list[str] = []
        async with self._one_at_a_time:
            self.log.info(
                "page_action", action=name, operator=self.operator, **{f"given_{key}": loggable(given[key]) for key in given}
            )
            try:
                code = await known(given, lines.append)
            except DilocoError as error:
                self.log.warning("page_action_failed", action=name, reason=str(error))
                return JSONResponse({"error": "\n".join([*lines, str(error)])}, 409)
        return JSONResponse({"lines": lines, "code": code or 0})

    async def _checkpoint(self, given: Given, say: Say) -> None:
        out = _text(given, "out")
        await checkpoint.take_and_tell(self.directory, checkpoint.target_of(out), say)

    async def _set(self, given: Given, say: Say) -> None:
        wanted = parse_assignments([f"{_needed(given, 'key')}={_needed(given, 'value')}"], operate.COMMAND)
        await operate.apply_settings(self.directory, wanted, _text(given, "reason"), say)

    async def _eject(self, given: Given, say: Say) -> None:
        await operate.exclude(self.directory, _needed(given, "learner"), _text(given, "reason"), say)

    async def _readmit(self, given: Given, say: Say) -> None:
        await operate.take_back(self.directory, _needed(given, "learner"), _text(given, "reason"), say)

    async def _rollback(self, given: Given, say: Say) -> int:
        return await rollback.go_back(self.directory, _version(given), _text(given, "reason"), say)

    async def _preview(self, given: Given, say: Say) -> None:
        await rollback.foretell(self.directory, _version(given), say)


async def _given(request: Request) -> Given | None:
    """Return the fields of a form, or None if a request has none."""
    sent = b""
    async for piece in request.stream():
        sent += piece
        if len(sent) > MAX_BYTES:
            return None
    found = json_object(sent)
    if found is None or not all(isinstance(value, str) and key.isidentifier() for key, value in found.items()):
        return None
    return found


def _text(given: Given, field: str) -> str:
    return given.get(field, "").strip()


def _needed(given: Given, field: str) -> str:
    text = _text(given, field)
    if not text:
        raise SettingsError(f"{field}: is missing")
    return text


def _version(given: Given) -> int:
    text = _needed(given, "version")
    if not text.isdecimal() or len(text) > 15:
        raise SettingsError(f"version: {text[:40]!r}: expected a whole number, 0 or more")
    return int(text)


def _actions(report: Mapping[str, Any], now: Effective) -> list[Action]:
    learners = sorted(map(str, report.get("learners") or {}))
    excluded = sorted(now.excluded)
    values = ", ".join(f"{key} = {value_of(now.settings, key)}" for key in ("tokens", "round.steps", "round.quorum"))
    return [
        Action(
            "checkpoint",
            "Checkpoint",
            "Saves the whole run without a pause, so that it can be resumed from there.",
            "Take a checkpoint of the whole run into {out}?",
            [Field("out", "Folder", placeholder="the next free number in the run's directory", required=False)],
        ),
        Action(
            "set",
            "Set",
            f"Changes a setting of the run, or its token budget. Now: {values}.",
            "Set {key} to {value}? Why: {reason}",
            [Field("key", "Setting", suggested=("tokens", *SETTABLE)), Field("value", "Value"), WHY],
        ),
        Action(
            "eject",
            "Eject",
            "Excludes a learner: its offers are refused, rounds do not wait for it, and its process ends.",
            "Eject {learner}? Why: {reason}",
            [Field("learner", "Learner", suggested=learners), WHY],
        ),
        Action(
            "readmit",
            "Readmit",
            "Readmits a learner that was ejected or quarantined.",
            "Readmit {learner}? Why: {reason}",
            [Field("learner", "Learner", suggested=excluded), WHY],
        ),
        Action(
            "rollback",
            "Roll back",
            "Takes every later fragment back to a version.",
            "Go back to version {version}, and lose the work listed below? Why: {reason}",
            [Field("version", "Version", kind="number"), WHY],
            preview="preview",
        ),
    ]
