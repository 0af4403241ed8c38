"""The settings of a run in its page, and what was changed while it went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_report import html
from diloco_report.facts import Report
from diloco_report.units import moment


def settings(report: Report) -> str:
    """Draw the settings that a run was created with, and their values by now."""
    created: Mapping[str, Any] = report.get("settings") or {}
    if not created:
        return ""
    in_force: Mapping[str, Any] = report.get("in_force") or {}
    groups = {"run": {key: value for key, value in created.items() if not isinstance(value, Mapping)}}
    groups |= {key: dict(value) for key, value in created.items() if isinstance(value, Mapping)}
    body = "".join(_group(str(group), values, in_force) for group, values in groups.items() if values)
    said = "As the run was created with them" + ("; struck out: changed since." if in_force else ".")
    return html.section("Settings", said, f'<div class="settings">{body}</div>')


def _group(group: str, values: Mapping[str, Any], in_force: Mapping[str, Any]) -> str:
    head = "" if group == "run" else f"{group}."
    rows = "".join(_setting(str(key), value, in_force.get(f"{head}{key}")) for key, value in values.items())
    return f"<div><h3>{escape(group)}</h3><dl>{rows}</dl></div>"


def _setting(key: str, value: object, changed: object) -> str:
    first = escape(str(value))
    shown = first if changed is None else f"<del>{first}</del> <ins>{escape(str(changed))}</ins>"
    return f"<dt>{escape(str(key))}</dt><dd>{shown}</dd>"


def changes(report: Report) -> str:
    """Draw what was changed while the run went on, when, by whom and why."""
    found: Sequence[Mapping[str, Any]] = report.get("changes") or []
    if not found:
        return ""
    rows = [
        [moment(change.get("at_s")), *(escape(str(change.get(key, ""))) for key in ("text", "author", "reason"))]
        for change in found
    ]
    head = ["when", "what", "by", "why"]
    return html.section("Changes", "What was changed while the run went on.", html.wide(html.table(head, rows, of="changes")))
