"""The parts of a page, in the style of ``page.css``: one that opens without a network, or one that a server gives out."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from diloco_report.terms import meaning

SCRIPT = ("page.js", "charts.js", "beside.js")  # of a page that stands by itself


def style() -> str:
    """Return the style sheet."""
    return _asset("page.css")


def script(*names: str) -> str:
    """Return files of the page's script, in their order."""
    return "".join(map(_asset, names))


def _asset(name: str) -> str:
    return files("diloco_report").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Assets:
    """Style sheet and script of a page, as HTML: in its head, and below its text."""

    head: str
    foot: str = ""


def inlined(script: str = "") -> Assets:
    """Put style sheet and script into the page, which forbids the browser to fetch anything, or to run any other script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    run = f"script-src 'sha256-{digest}'; " if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {run}img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{style()}</style>'
    return Assets(head, f"{_TIP}\n<script>{script}</script>" if script else "")


def linked(scripts: Sequence[str]) -> Assets:
    """Have the page fetch both from where it came from; the server's headers say what the browser may do."""
    run = "".join(f'\n<script src="{script}" defer></script>' for script in scripts)
    return Assets(f'<link rel="stylesheet" href="page.css">{run}', _TIP)


_TIP = '<div id="tip" hidden></div>'


def document(title: str, header: str, body: str, assets: Assets) -> str:
    """Return the page as text; ``title`` is text, ``header`` and ``body`` are HTML."""
    return f"{opening(title, header, assets)}{body}{closing(assets)}"


def opening(title: str, header: str, assets: Assets) -> str:
    """Return the text of :func:`document` before its body."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)} · diloco</title>
{assets.head}
</head>
<body>
<main>
<header><span class="brand">diloco</span><h1>{escape(title)}</h1>{header}</header>
"""


def closing(assets: Assets) -> str:
    """Return the text of :func:`document` after its body."""
    return f"""
</main>
{assets.foot}
</body>
</html>
"""


def figure(name: str, number: str, unit: str, more: str) -> str:
    """Draw a number in large; ``more`` is HTML, the rest is text."""
    small = f" <small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="figure"><div class="name"{_title(meaning(name))}>{escape(name)}</div>'
        f'<div class="number">{escape(number)}{small}</div><div class="more">{more}</div></div>'
    )


def section(title: str, said: str, body: str) -> str:
    """Draw a card; ``title`` and ``said`` are text, ``body`` is HTML."""
    return f"<section>{heading(title)}{note(said)}{body}</section>"


def heading(title: str) -> str:
    """Draw the heading of a card, which explains itself to a pointer."""
    return f"<h2{_title(meaning(title))}>{escape(title)}</h2>"


def subhead(title: str, meaning_: str | None = None) -> str:
    """Draw a heading within a card; ``meaning_``: what it says to a pointer, where :func:`meaning` does not know it."""
    return f"<h3{_title(meaning(title) if meaning_ is None else meaning_)}>{escape(title)}</h3>"


def _title(text: str) -> str:
    return f' title="{escape(text)}"' if text else ""


def note(text: str) -> str:
    """Draw a paragraph of text below a heading; nothing, if there is none."""
    return f'<p class="note">{escape(text)}</p>' if text else ""


def pair(*parts: str) -> str:
    """Put parts side by side, two in a row, where there is room."""
    return f'<div class="pair">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def wide(body: str, *, newest: bool = False) -> str:
    """Let a part scroll where there is no room; ``newest``: its right end is in sight first."""
    return f'<div class="scroll{" newest" if newest else ""}" tabindex="0">{body}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False, of: str = "") -> str:
    """Draw a table; ``head`` is text, the cells of the rows are HTML.

    ``text``: its cells are words, not numbers. ``of``: what it is of, by which :func:`meaning` knows its heads.
    """
    titles = "".join(f'<th scope="col"{_title(meaning(title, of) if of else "")}>{escape(title)}</th>' for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table{' class=text' if text else ''}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Draw names with their colours."""
    spans = "".join(f'<span><i style="background:{css}"></i>{escape(name)}</span>' for name, css in names)
    return f'<div class="legend">{spans}</div>'


def toggles(names: Iterable[tuple[str, str]]) -> str:
    """Draw names with their colours as buttons; the page's script hides and shows what has the name."""
    buttons = "".join(
        f'<button type="button" data-toggle="{escape(name)}" aria-pressed="true">'
        f'<i style="background:{css}"></i>{escape(name)}</button>'
        for name, css in names
    )
    return f'<div class="legend">{buttons}</div>'


def switch(name: str, parts: Sequence[tuple[str, str]]) -> str:
    """Draw one of up to three parts at a time, (title, HTML) each, and buttons that choose it; it needs no script.

    ``name``: of no other switch of the page. Printed, all parts are there.
    """
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}-{number}"{"" if number else " checked"}>'
        f'<label for="{escape(name)}-{number}">{escape(title)}</label>'
        for number, (title, _) in enumerate(parts)
    )
    return f'<div class="switch">{buttons}{"".join(f"<div>{body}</div>" for _, body in parts)}</div>'
