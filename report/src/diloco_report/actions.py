"""The actions of a page that an operator's machine serves: a form for each, and the dialog that asks before it is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

MAX_NAMES = 512  # that a field suggests


@dataclass(frozen=True)
class Field:
    """A field of a form. ``suggested``: values that it offers; ``placeholder``: what an empty one stands for."""

    name: str
    label: str
    kind: str = "text"
    placeholder: str = ""
    suggested: Sequence[str] = ()
    required: bool = True


@dataclass(frozen=True)
class Action:
    """An action. ``ask``: the question before it is sent, {NAME} being a field; ``preview``: one that tells its effect."""

    name: str
    title: str
    said: str
    ask: str
    fields: Sequence[Field]
    preview: str = ""


WHY = Field("reason", "Why", placeholder="no reason", required=False)


def form(operator: str, actions: Iterable[Action]) -> str:
    """Draw actions that are done in the name of ``operator``."""
    forms = "".join(_form(action) for action in actions)
    return (
        f'<section id="actions"><h2>Actions</h2><p class="note">Done from this machine, in the name of {escape(operator)}, '
        f"which stands in the run's changes. Each asks before it is done.</p><details><summary>Show all</summary>"
        f'<div class="forms">{forms}</div></details>'
        '<pre id="said" role="status" aria-live="polite"></pre></section>'
        '<dialog id="confirm" aria-labelledby="asked"><form method="dialog"><h2 id="asked"></h2><pre id="lines"></pre>'
        '<p class="choice"><button value="" formnovalidate>No</button> <button value="yes" class="yes">Yes, do it</button></p>'
        "</form></dialog>"
    )


def _form(action: Action) -> str:
    fields = "".join(_field(action.name, field) for field in action.fields)
    preview = f' data-preview="{escape(action.preview)}"' if action.preview else ""
    return (
        f'<form data-act="{escape(action.name)}" data-ask="{escape(action.ask)}"{preview}><h3>{escape(action.title)}</h3>'
        f'<p class="note">{escape(action.said)}</p>{fields}<button type="submit">{escape(action.title)}</button></form>'
    )


def _field(action: str, field: Field) -> str:
    name, listed = escape(field.name), f"{action}-{field.name}"
    options = "".join(f'<option value="{escape(value)}"></option>' for value in field.suggested[:MAX_NAMES])
    suggestions = f'<datalist id="{escape(listed)}">{options}</datalist>' if options else ""
    rest = f' list="{escape(listed)}"' if options else ""
    rest += " required" if field.required else ""
    rest += ' min="0"' if field.kind == "number" else ""
    shown = f'type="{escape(field.kind)}" placeholder="{escape(field.placeholder)}"'
    return f'<label>{escape(field.label)} <input name="{name}" {shown} autocomplete="off"{rest}></label>{suggestions}'
