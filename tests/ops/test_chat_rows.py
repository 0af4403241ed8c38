"""``diloco data`` of conversations, as a user sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.made.command_line import Command, commanding

from diloco_learner.chats import tiny
from diloco_ops.reading import chat_rows
from diloco_ops.up.data import data

pytest.importorskip("grain", reason="the extra `data` is not installed: make extras")
pytest.importorskip("transformers", reason="PyTorch and transformers are not installed: make torch")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """``diloco data`` in a folder with a tokenizer and conversations."""
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "cache"))
    tiny.write_tokenizer(tmp_path / "model")
    tiny.write_chats(tmp_path / "chats.jsonl", 120)
    with commanding(data, ("data",), 100, tmp_path, monkeypatch, capfd) as made:
        yield made


@pytest.mark.services
def test_rows_show_what_is_learned_and_notes_what_is_not(command: Command, tmp_path: Path) -> None:
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('{"messages": [\n')
    shown = command("chats.jsonl", "--model", "model", "--context", "64", "--learners", "1")
    assert shown.code == 0, shown.err
    assert "note: source 'chats': 1 of 121 lines cannot be used; the first: chats.jsonl, line 121: not JSON" in shown.out
    assert "note: source 'chats': cut at 64 tokens: " in shown.out
    assert "longer than a row" in shown.out
    assert "the first 10 rows; what is learned is between [[ and ]]" in shown.out
    rows = shown.out.split("\nrow ")[1:]
    assert len(rows) == 10
    assert all("<|im_start|>assistant\n[[" in row for row in rows)
    assert "tokens/s from one thread" in shown.out
    toml = command("chats.jsonl", "--tokenizer", "model", "--context", "64", "--learners", "1", "--toml")
    assert toml.out.startswith("[settings.task.mix]\nvocabulary = ")
    answer = json.loads(command("chats.jsonl", "--tokenizer", "model", "--context", "64", "--learners", "1", "--json").out)
    assert answer["sources"]["chats"]["bad"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["chats.jsonl"],
            3,
            "chats.jsonl: expected a mix.toml, or conversations with the tokenizer of the model: --tokenizer DIR",
        ),
        (["none.jsonl", "--tokenizer", "model"], 3, "none.jsonl: there is no such file or folder"),
        (["chats.jsonl", "--tokenizer", "model", "--model", "model"], 2, "--tokenizer and --model: give one of them"),
    ],
)
def test_what_is_refused_in_one_line(command: Command, arguments: list[str], code: int, said: str) -> None:
    shown = command(*arguments)
    assert shown.code == code
    assert said in " ".join(shown.err.split())


@pytest.mark.services
def test_a_tokenizer_that_is_not_there_is_named(command: Command) -> None:
    shown = command("chats.jsonl", "--tokenizer", "nowhere")
    assert shown.code == 3
    assert "nowhere: there is no such folder; expected the folder of a model" in " ".join(shown.err.split())


def test_colours_take_the_place_of_marks_and_nothing_obeys_a_text() -> None:
    row = [
        {"document": 1, "tokens": 3, "learned": False, "text": "a \x1b[31m[bold]b"},
        {"document": 1, "tokens": 1, "learned": True, "text": "c" * 500},
        {"document": 2, "tokens": 1, "learned": True, "text": "d"},
    ]
    source = dict.fromkeys(("conversations", "held_out", "tokens", "trained", "rows", "filled", "cut", "dropped"), 1)
    source |= dict.fromkeys(("lost", "divided", "bad", "share", "epochs"), 1)
    found = {
        "sources": {"s": source | {"named": []}},
        "notes": [],
        "context": 8,
        "lengths": [(8, 4), (16, 1)],
        "rows": [row],
    }

    def shown(colour: str | None) -> str:
        console = Console(width=100, force_terminal=colour is not None, color_system=colour, record=True)  # type: ignore[arg-type]
        with console.capture() as caught:
            chat_rows.show(found, console)
        return caught.get()

    plain, coloured = shown(None), shown("standard")
    assert "row 1: 5 of 8 tokens" in plain
    assert "document 1: 4 tokens, 1 learned\na  [31m[bold]b[[" + "c" * 400 + " ... (100 characters more)]]" in plain
    assert "document 2: 1 tokens, 1 learned\n[[d]]" in plain
    assert " to 8  4  ########################################" in plain
    assert "to 16  1  ##########  longer than a row" in plain
    assert "what is learned is green" in coloured
    assert "\x1b[32md\x1b[0m" in coloured
    assert "[[" not in coloured
