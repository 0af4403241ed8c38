"""The part of a page that shows text of the model's own: as of now, or at the end, and what it was before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from diloco_report import html
from diloco_report.facts import Report
from diloco_report.units import count, duration

Drawn = tuple[str, str]  # when, and the text


def samples(report: Report) -> str:
    """Draw the samples that a run has; nothing, if it has none."""
    kept: Sequence[Sequence[Any]] = (report.get("series") or {}).get("samples") or []
    drawn = [
        (f"{duration(at_s)}, version {count(version)}, {count(tokens)} tokens merged", str(text))
        for at_s, tokens, version, text in kept
    ]
    if report.get("sample"):
        drawn.append(("At the end", str(report["sample"])))
    if not drawn:
        return ""
    *before, newest = drawn
    earlier = f"<details><summary>Show earlier ones</summary>{_texts(reversed(before))}</details>" if before else ""
    said = "Text that the global model made up, with the same random numbers each time."
    return html.section("Samples", said, _texts([newest]) + earlier)


def trimmed(text: str) -> str:
    """Return text without blank lines at its beginning and blanks at its end."""
    return re.sub(r"^(\s*\n)+", "", text).rstrip()


def _texts(drawn: Iterable[Drawn]) -> str:
    return "".join(f'<h3>{escape(when)}</h3><pre tabindex="0">{escape(trimmed(text))}</pre>' for when, text in drawn)
