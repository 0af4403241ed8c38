"""``diloco data``: what a ``mix.toml`` or conversations hold, as a run would train on them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import Console
from rich.table import Table

from diloco.errors import DataError, DilocoError, SettingsError
from diloco.settings.counts import COUNT, parse_count
from diloco.settings.loading import parse_assignments
from diloco.settings.places import has_scheme, parse_place
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_ops.default_text import default_of
from diloco_ops.reading import chat_rows
from diloco_ops.reading.asking import LEARNER, ask
from diloco_ops.up.environment import learner_environment
from diloco_ops.up.run_summary import printable
from diloco_report.units import count, decimal, share


def data(
    mix: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A mix.toml, as for diloco up --data; or a file of conversations (.jsonl, .json), or a folder of such files; "
            "or the place of one.",
        ),
    ],
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=parse_count,
            metavar=COUNT,
            help=f"Token budget of a run, from which epochs are computed. {default_of('tokens', count)}",
        ),
    ] = None,
    learners: Annotated[int | None, typer.Option(min=1, help=f"Shares of a run's data. {default_of('learners')}")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Of conversations: the folder of the tokenizer, which has the chat template."),
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of a model, in place of --tokenizer.")] = None,
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of conversations: a chat template in place of the tokenizer's.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=8, help=f"Tokens of a row. {default_of('task.context')}")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, any setting of the run; repeatable.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Only print the lines that a coordinator's file needs.")] = False,
) -> None:
    """Prepare a run's data, and show its sources, epochs, speed and first rows."""
    given = {"tokens": tokens, "learners": learners, "task.context": context}
    overrides = parse_assignments(set_ or []) | {key: value for key, value in given.items() if value is not None}
    settings = run_settings(overrides=overrides, source="diloco data")
    folder = tokenizer or model
    if tokenizer is not None and model is not None:
        raise SettingsError("--tokenizer and --model: give one of them; the folder of a model has its tokenizer")
    found = described(mix, settings) if folder is None else described_chats(mix, settings, folder, template)
    if toml:
        print(tomli_w.dumps({"settings": {"task": {"mix": found["mix"]}}}), end="")
    elif json_:
        print(json.dumps(found))
    elif folder is None:
        _show(found, settings)
    else:
        chat_rows.show(found, Console(highlight=False))
        _show_speed(found, settings)


def _existing(data: str) -> str:
    """Return the whole path of data, or their place.

    Raises:
        DataError: there is no such file or folder.
        SettingsError: it is no place.
    """
    if has_scheme(data):
        return str(parse_place(data, "diloco data"))
    if not Path(data).exists():
        raise DataError(f"{data}: there is no such file or folder")
    return str(Path(data).resolve())


def described_chats(data: str, settings: RunSettings, tokenizer: Path, template: Path | None) -> dict[str, Any]:
    """Return what ``python -m diloco_learner.chats.describe`` says.

    Raises:
        DataError: there is no such file or folder.
        ServiceFailed: the conversations cannot be trained on.
    """
    request = {
        "settings": settings.model_dump(),
        "data": _existing(data),
        "tokenizer": str(tokenizer.resolve()),
        "template": None if template is None else str(template.resolve()),
    }
    return ask("chats.describe", request, learner_environment(0, 1, None))


def described(mix: str, settings: RunSettings) -> dict[str, Any]:
    """Return what ``python -m diloco_learner.mix.describe`` says.

    Raises:
        DataError: there is no such file.
        ServiceFailed: the mix cannot be trained on.
    """
    if find_spec(LEARNER) is None:
        raise DilocoError("not installed: diloco-learner, which reads the data; pip install 'diloco[data]'")
    if not mix.endswith(".toml"):
        _existing(mix)
        raise DataError(f"{mix}: expected a mix.toml, or conversations with the tokenizer of the model: --tokenizer DIR")
    request = {"settings": settings.model_dump(), "data": _existing(mix)}
    return ask("mix.describe", request, learner_environment(0, 1, None))


def _show(found: dict[str, Any], settings: RunSettings) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("source", "kind", "documents", "tokens", "held out", "characters a token", "of a batch", "epochs"):
        table.add_column(head, justify="left" if head in ("source", "kind") else "right")
    for name, source in found["sources"].items():
        rate = source["characters_per_token"]
        cells = (
            name,
            source["kind"],
            count(source["documents"]) if source["documents"] else "",
            count(source["tokens"]),
            count(source["held_out"]),
            "" if rate is None else decimal(rate, 2),
            share(source["share"], 1),
            decimal(source["epochs"], 2),
        )
        table.add_row(*cells)
    Console(highlight=False).print(table)
    _show_speed(found, settings)
    print(f"\nthe first window:\n{printable(found['sample'])}")


def _show_speed(found: dict[str, Any], settings: RunSettings) -> None:
    file = f", {found['tokenizer']}" if found["tokenizer"] else ""
    print(f"epochs: of {count(settings.tokens)} tokens; vocabulary {found['vocabulary']}{file}")
    print(f"{count(found['tokens_per_s'])} tokens/s from one thread, in batches of {count(found['batch_tokens'])}")
