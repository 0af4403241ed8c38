"""Lines of chat files, and the forms that conversations have in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from diloco.errors import DataError
from diloco_learner.chats import lines
from diloco_learner.chats.conversations import BadLineError, Conversation, PlainText, parse

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}
CHAT = {"messages": [ASKED, ANSWERED]}


def read(path: Path) -> list[lines.Line]:
    return list(lines.read_lines(path, path.name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"])
def test_lines_have_their_numbers_in_every_form(tmp_path: Path, name: str) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}\r\n{"c": 3}'
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    packed = packers.get(Path(name).suffix, bytes)(data)
    (tmp_path / name).write_bytes(packed)
    found = [(f"{name}, line 1", b'{"a": 1}'), (f"{name}, line 4", b'{"b": 2}\r'), (f"{name}, line 5", b'{"c": 3}')]
    assert read(tmp_path / name) == found


def test_blocks_and_frames_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 3)
    monkeypatch.setattr(lines, "ZSTD_BLOCK_BYTES", 5)
    data = [b"abcdefgh\n", b"ij", b"k\n\nlmnopq"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(data))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, data)))
    for name in ("a.jsonl", "a.jsonl.zst"):
        assert [line for _, line in read(tmp_path / name)] == [b"abcdefgh", b"ijk", b"lmnopq"]


def test_an_array_is_read_item_by_item(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(' [ {"a": 1},\n {"b": [2]} ]')
    assert read(tmp_path / "a.json") == [("a.json, item 1", b'{"a": 1}'), ("a.json, item 2", b'{"b": [2]}')]


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 10)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 4)
    (tmp_path / "a.jsonl").write_bytes(b"0123456789\n" + b"x" * 11 + b"\nshort\n" + b"y" * 99)
    assert [line for _, line in read(tmp_path / "a.jsonl")] == [b"0123456789", None, b"short", None]
    assert [place for place, _ in read(tmp_path / "a.jsonl")][2:] == ["a.jsonl, line 3", "a.jsonl, line 4"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.json", b"[1, 2", r"a\.json: a JSON array that is broken: Input data was truncated"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], r"a\.jsonl\.gz: cannot be unpacked as gzip"),
        ("a.jsonl.gz", b"{}\n", r"a\.jsonl\.gz: cannot be unpacked as gzip: Not a gzipped file"),
        ("a.jsonl.zst", zstandard.compress(b"{}\n" * 99)[:-3], r"unpacked as zstd: it ends in the middle of a frame"),
        ("a.jsonl.zst", b"{}\n\n", "unpacked as zstd"),
    ],
)
def test_files_that_are_broken_are_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_an_array_that_is_too_long_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_ARRAY_BYTES", 8)
    (tmp_path / "a.json").write_text("[" + "1, " * 9 + "1]")
    with pytest.raises(DataError, match=r"one JSON array of more than .* write each of its items on a line"):
        read(tmp_path / "a.json")


def test_a_folder_has_the_chat_files_below_it(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/c.json.gz", "a/b.jsonl.zst", "a/notes.txt", ".hidden/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in lines.chat_files(tmp_path)] == [
        "a/b.jsonl.zst",
        "a/c.json.gz",
        "b.jsonl",
    ]
    with pytest.raises(DataError, match=r"notes\.txt: not a file of conversations: expected a name that ends with \.jsonl"):
        lines.chat_files(tmp_path / "a" / "notes.txt")
    with pytest.raises(DataError, match=r"\.hidden/none: there is no such file or folder"):
        lines.chat_files(tmp_path / ".hidden" / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: holds no conversations: none of its files"):
        lines.chat_files(tmp_path / "empty")


def parsed(line: Any, *, templated: bool = True) -> Conversation | PlainText:
    return parse(line if isinstance(line, bytes) else json.dumps(line).encode(), templated=templated)


@pytest.mark.parametrize(
    "line",
    [
        CHAT,
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [ASKED, ANSWERED], "id": 7},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {
            "messages": [{**ASKED, "name": None}, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}],
            "text": None,
        },
    ],
)
def test_the_usual_forms_are_one_conversation(line: dict[str, Any]) -> None:
    assert parsed(line) == Conversation([ASKED, ANSWERED], frozenset({1}))


def test_a_text_is_learned_whole_and_without_a_template_a_completion_is() -> None:
    assert parsed({"text": "once"}) == PlainText("once")
    assert parsed({"prompt": "2 + 2 = ", "completion": "4"}, templated=False) == PlainText("2 + 2 = 4", 8, divides=False)


def test_turns_of_weight_0_and_of_a_prompt_are_not_learned() -> None:
    first = {"role": "assistant", "content": "5"}
    assert parsed({"messages": [ASKED, {**first, "weight": 0}, ASKED, {**ANSWERED, "weight": 1}]}) == Conversation(
        [ASKED, first, ASKED, ANSWERED], frozenset({3})
    )
    found = parsed({"prompt": [ASKED, first, ASKED], "completion": [ANSWERED]})
    assert found == Conversation([ASKED, first, ASKED, ANSWERED], frozenset({3}))


def test_tools_and_calls_of_them_are_kept() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    told = {"role": "tool", "content": "4"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = parsed({"messages": [ASKED, {**call, "content": None}, told, ANSWERED], "tools": tools})
    assert found == Conversation([ASKED, call, told, ANSWERED], frozenset({1, 3}), tools)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a', "not JSON: Input data was truncated"),
        (b'{"text": "a\xffb"}', "invalid UTF-8: invalid start byte at byte 11"),
        (b'{"text": "\\ud800"}', "not JSON"),
        (b"[" * 99999, "not a conversation: JSON that is nested too deeply"),
        ([1], "expected a JSON object, got a list"),
        ({"messages": None}, "has none of messages, conversations, prompt and completion, and text; it has messages = null"),
        ({}, "has none of messages, conversations, prompt and completion, and text; it has nothing"),
        ({"prompt": "a", "reply": "b"}, "it has prompt, reply"),
        ({"text": 7}, "text: expected text, got a number"),
        ({"text": ""}, "text: is empty"),
        ({"messages": "hello"}, "messages: expected a list of messages, got text"),
        ({"messages": [ASKED, 7]}, "messages: message 2: expected an object, got a number"),
        ({"messages": [{"content": "a"}]}, "messages: message 1: has no role"),
        ({"messages": [{"role": "user"}]}, "messages: message 1: has no content"),
        ({"messages": [{"role": 7, "content": "a"}]}, "message 1: role: expected text, got a number"),
        ({"messages": [{"role": "user", "content": {}}]}, "message 1: content: expected text, got an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content: part 1 is 'image_url': only parts of type 'text' are supported",
        ),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "message 1: from = 'bot': expected one of human, gpt"),
        ({"messages": [ASKED]}, "has no assistant turn, so nothing to learn"),
        ({"messages": []}, "has no assistant turn, so nothing to learn"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, "message 2: an empty assistant turn"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "every assistant turn has weight 0"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 2}]}, "message 2: weight: expected 0 or 1"),
        ({**CHAT, "tools": "add"}, "tools: expected a list of objects, got text"),
        ({"prompt": "a", "completion": " "}, "completion: is empty"),
        ({"prompt": "a", "completion": [ANSWERED]}, "completion: expected text, got a list"),
    ],
)
def test_lines_that_are_no_conversations_say_why(line: Any, said: str) -> None:
    with pytest.raises(BadLineError) as caught:
        parsed(line)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
