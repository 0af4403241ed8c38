"""Conversations as a run's data: packed rows, by share and position; what is cut, left out and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from diloco.errors import AdmissionError, DataError, DilocoError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import MixSettings, TaskSettings
from diloco_learner.chats import stored, tiny

pytest.importorskip("grain", reason="the extra `data` is not installed: make extras")
pytest.importorskip("transformers", reason="PyTorch and transformers are not installed: make torch")

from diloco_learner.chats.chats import IGNORED, Chats, PackedRows, is_chats
from diloco_learner.chats.describe import describe
from diloco_learner.mix.mix import Mix

TASK = TaskSettings(layers=1, width=8, heads=2, context=64, batch=2)
MakeChats = Callable[..., Chats]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> MakeChats:
    """``make(lines)``: conversations of a file of these lines; ``make()``: of 60 tiny ones."""

    def made(*lines: Any, data: Path = tmp_path / "chats.jsonl", mix: MixSettings | None = None, **options: Any) -> Chats:
        if lines:
            data.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
        elif not data.exists():
            tiny.write_chats(data, 60)
        task = TASK.model_copy(update={"mix": mix})
        given: dict[str, Any] = {"tokenizer": tokenizer, "context": 64, "batch": 2, "cache_dir": tmp_path / "cache"} | options
        return Chats(task, str(data), **given)

    return made


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


CHATS = [chat("How are you?", "Very well."), chat("And you?", "Well."), chat("Who?", "Me.")]


def rows(batch: PackedRows) -> list[dict[str, Any]]:
    return [{name: batch[name][row] for name in batch} for row in range(len(batch["labels"]))]  # type: ignore[literal-required]


def documents(row: dict[str, Any]) -> list[list[int]]:
    return [row["input_ids"][row["documents"] == number].tolist() for number in range(1, row["documents"].max() + 1)]


def epoch(chats: Chats, share: int = 0, shares: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a share, once each."""
    (source,) = chats.sources.values()
    own = len(range(share, len(source.training), shares))
    batches = chats.batches(share, shares, seed, 0)
    return [row for batch in islice(batches, -(-own // chats.batch)) for row in rows(batch)][:own]


def test_rows_hold_whole_conversations_that_begin_anew(make: MakeChats) -> None:
    chats = make(*CHATS, context=64, batch=1)  # the last one is held out
    (row,) = epoch(chats)
    first, second = (
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n"
        for q, a in [("How are you?", "Very well."), ("And you?", "Well.")]
    )
    assert [chats.decode(document) for document in documents(row)] == [first, second]
    lengths = [len(document) for document in documents(row)]
    padding = 64 - sum(lengths)
    assert row["documents"].tolist() == [1] * lengths[0] + [2] * lengths[1] + [0] * padding
    assert row["position_ids"].tolist() == [*range(lengths[0]), *range(lengths[1]), *range(padding)]
    learned = row["labels"] != IGNORED
    assert (row["labels"][learned] == row["input_ids"][learned]).all()
    assert chats.decode(row["labels"][learned]) == "Very well.<|im_end|>Well.<|im_end|>"
    assert {name: value.dtype for name, value in row.items()} == dict.fromkeys(row, np.dtype(np.int32))
    assert chats.settings.sources["chats"].tokens == np.count_nonzero(learned)
    ((batch,),) = (chats.validation()["chats"],)
    assert "Me.<|im_end|>" in chats.decode(batch["input_ids"][0])


def test_any_start_and_any_rows_are_those_of_iteration_from_the_beginning(make: MakeChats) -> None:
    chats = make(batch=3)
    whole = [list(islice(chats.batches(share, 2, 5, 0), 30)) for share in range(2)]

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(share=some.integers(0, 1), start=some.integers(0, 28), own=some.sampled_from([range(3), range(1, 3), range(2, 3)]))
    def same(share: int, start: int, own: range) -> None:
        for got, expected in zip(islice(chats.batches(share, 2, 5, start, own), 2), whole[share][start:], strict=False):
            for name in expected:
                np.testing.assert_array_equal(got[name], expected[name][own.start : own.stop])  # type: ignore[literal-required]

    same()


def test_shares_are_disjoint_and_together_all_conversations_once_an_epoch(make: MakeChats) -> None:
    chats = make()
    (source,) = chats.sources.values()
    dealt = [document for share in range(3) for row in epoch(chats, share, 3) for document in documents(row)]
    ends = source.training.chats.ends.tolist()
    kept = [source.training.chats.tokens[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]
    assert len(kept) == 57  # of 60, three are held out
    assert sorted(dealt) == sorted(conversation[:64] for conversation in kept)


def test_what_is_longer_than_a_row_is_cut_and_said(make: MakeChats) -> None:
    long = chat("Why?", "because " * 40)
    late = chat("so " * 80, "Yes.")
    chats = make(CHATS[0], long, late, {"text": "once upon " * 40}, CHATS[1])
    counts = chats.sources["chats"].training.rows.counts
    assert (counts.cut, counts.dropped, counts.divided) == (1, 1, 1)
    (source,) = chats.sources.values()
    _, cut, dropped, divided = np.diff(source.training.chats.ends, prepend=0).tolist()
    assert counts.lost == cut - 64 + dropped + (divided % 64 == 1)
    assert counts.tokens + counts.lost == source.counts.training.tokens
    assert cut > dropped
    assert chats.notes() == [
        "source 'chats': cut at 64 tokens: 1 of 5 conversations; left out, since nothing before that is learned: 1; "
        f"tokens lost: {counts.lost} of {source.counts.training.tokens + source.counts.held_out.tokens}. The longest is "
        f"chats.jsonl, line 2, with {cut} tokens. A larger context keeps more"
    ]
    lengths = sorted(len(document) for row in epoch(chats) for document in documents(row))
    assert lengths == sorted([int(source.training.chats.ends[0]), 64, *[64] * (divided // 64), divided % 64])


def test_lines_that_cannot_be_used_are_counted_and_named_and_too_many_refused(make: MakeChats) -> None:
    good = [CHATS[0]] * 200
    chats = make(*good[:99], b'{"messages": [', *good[99:], b"\xff")
    counts = chats.sources["chats"].counts
    assert (counts.lines, counts.bad) == (202, 2)
    assert counts.named == [
        "chats.jsonl, line 100: not JSON: Input data was truncated",
        "chats.jsonl, line 202: invalid UTF-8: invalid start byte at byte 0",
    ]
    assert chats.notes() == [
        f"source 'chats': 2 of 202 lines cannot be used; the first: {counts.named[0]}",
    ]
    with pytest.raises(DataError) as caught:
        make(*good, b"{", {"text": 3}, chat("a", ""))
    assert str(caught.value).startswith(
        "source 'chats': chats.jsonl, line 201: not JSON: Input data was truncated; chats.jsonl, line 202: text: expected "
        "text, got a number; chats.jsonl, line 203: message 2: an empty assistant turn: 3 of 203 lines of "
    )
    assert str(caught.value).endswith(
        "chats.jsonl cannot be used, more than 1 %: repair or remove them, or allow more by most_bad in a mix.toml"
    )


def test_too_long_a_line_is_a_bad_line(make: MakeChats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_learner.chats.lines.MOST_LINE_BYTES", 1000)
    chats = make(*CHATS, chat("a" * 1000, "b"))
    assert chats.sources["chats"].counts.named == ["chats.jsonl, line 4: is longer than 1,000 bytes"]


def test_tokens_are_made_once_and_again_when_something_changes(make: MakeChats, tmp_path: Path, tokenizer: Path) -> None:
    def made() -> list[int]:
        return sorted(path.stat().st_mtime_ns for path in (tmp_path / "cache" / "data" / stored.TOKENS).glob("*/about.json"))

    before = make()
    once = made()
    assert make().settings == before.settings
    assert made() == once
    make(context=32)  # other rows of the same tokens
    assert made() == once
    other = tmp_path / "template.jinja"
    other.write_text(tiny.TEMPLATE.replace("im_end|>' }}", "im_end|> ' }}"))
    assert make(template=str(other)).settings != before.settings
    assert len(made()) == 2
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write(json.dumps(CHATS[0]))
    assert make().settings.sources["chats"].digest != before.settings.sources["chats"].digest


@pytest.mark.parametrize("name", ["about.json", "tokens.bin", "pieces.bin"])
def test_a_damaged_cache_is_made_again(make: MakeChats, tmp_path: Path, name: str) -> None:
    before = epoch(make())
    for damaged in (tmp_path / "cache" / "data").glob(f"**/{name}"):
        damaged.unlink()
        damaged.write_bytes(b"{")
    for expected, got in zip(before, epoch(make()), strict=True):
        np.testing.assert_array_equal(got["input_ids"], expected["input_ids"])


MIX = '[sources.a]\nkind = "chats"\npath = "a.jsonl"\n[sources.b]\nkind = "chats"\npath = "b"\nweight = 3\n'


def mix_of(folder: Path, toml: str = MIX) -> Path:
    """A mix of short conversations and of longer ones in a folder of two files."""
    (folder / "b").mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps(chat(f"{n}?", "Yes.")) + "\n" for n in range(200)))
    for name in "xy":
        tiny.write_chats(folder / "b" / f"{name}.jsonl", 100, seed=ord(name))
    (folder / "mix.toml").write_text(toml)
    return folder / "mix.toml"


def test_sources_take_turns_so_that_what_is_learned_is_by_their_weights(make: MakeChats, tmp_path: Path) -> None:
    chats = make(data=mix_of(tmp_path), batch=8)
    assert {name: source.weight for name, source in chats.settings.sources.items()} == {"a": 100, "b": 300}
    short = {tuple(chats.encode(f"{n}?")) for n in range(200)}
    learned = {"a": 0, "b": 0}
    for batch in islice(chats.batches(0, 1, 0, 0), 150):
        for row in rows(batch):
            text = chats.decode(row["input_ids"])
            learned["a" if "\nYes.<|im_end|>" in text else "b"] += int((row["labels"] != IGNORED).sum())
    assert len(short) == 200
    assert learned["b"] / learned["a"] == pytest.approx(3, rel=0.03)
    assert chats.validation().keys() == {"a", "b"}
    budget = chats.settings.sources["b"].tokens
    assert chats.settings.epochs(4 * budget)["b"] == pytest.approx(3)


def test_held_out_conversations_fill_whole_batches(make: MakeChats) -> None:
    chats = make(batch=4)
    (source,) = chats.sources.values()
    batches = chats.validation()["chats"]
    assert {batch["labels"].shape for batch in batches} == {(4, 64)}
    held_out = [document for batch in batches for row in rows(batch) for document in documents(row)]
    assert len(held_out) == source.counts.held_out.documents == 3
    trained = [document for row in epoch(chats) for document in documents(row)]
    assert [document for document in held_out if document in trained] in ([], held_out[:1])  # tiny chats may repeat


def test_data_are_the_same_wherever_they_lie(make: MakeChats, tmp_path: Path, tokenizer: Path) -> None:
    runs = make(data=mix_of(tmp_path)).settings
    (tmp_path / "elsewhere").mkdir()
    copy = mix_of(tmp_path / "elsewhere")
    shutil.copytree(tokenizer, tmp_path / "copy")
    there = make(data=copy, mix=runs, tokenizer=tmp_path / "copy", cache_dir=tmp_path / "other")
    assert there.settings == runs


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("a.jsonl", "Yes.", "No.", r"mix\.toml: the content of source 'a' is \w{32} \(\d+ tokens\) here, the run's is"),
        ("mix.toml", "weight = 3", "weight = 2", "the weight of source 'b' is 200 here, the run's is 300"),
        (
            "tokenizer/chat_template.jinja",
            "assistant",
            "helper",
            r"the tokenizer or its chat template is \w{32} here, the run's",
        ),
    ],
)
def test_other_data_than_the_runs_are_refused(
    make: MakeChats, tmp_path: Path, tokenizer: Path, file: str, old: str, new: str, said: str
) -> None:
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    data = mix_of(tmp_path)
    runs = make(data=data, tokenizer=tmp_path / "tokenizer").settings
    path = tmp_path / file
    path.write_text(path.read_text().replace(old, new).replace("'helper' %}", "'assistant' %}"))
    with pytest.raises(AdmissionError, match=said) as caught:
        make(data=data, tokenizer=tmp_path / "tokenizer", mix=runs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "error", "said"),
    [
        (
            MIX + '[sources.c]\nkind = "text"\n',
            SettingsError,
            r"sources\.c\.kind: source 'a' is of kind chats, and then all are",
        ),
        ('[tokenizer]\nfile = "t.json"\n' + MIX, SettingsError, "sources of kind chats have the model's tokenizer"),
        (MIX + "most_bad = 2\n", SettingsError, "source 'b': most_bad = 2: .*less than or equal to 1"),
        (MIX + 'column = "a"\n', SettingsError, "column: a source of kind 'chats' has no column"),
        (MIX.replace('"a.jsonl"', '"c.jsonl"'), DataError, r"source 'a': .*c\.jsonl: there is no such file or folder"),
        ('[sources.c]\nkind = "text"\n', SettingsError, r"source 'c' is of kind 'text': expected kind = 'chats'"),
    ],
)
def test_mixes_that_are_refused(make: MakeChats, tmp_path: Path, toml: str, error: type[DilocoError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        make(data=mix_of(tmp_path, toml))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        ([CHATS[0]], {}, r"source 'chats': .*chats\.jsonl: 1 conversations can be used, and two are needed"),
        ([{"messages": []}], {}, r"0 conversations can be used.*: chats\.jsonl, line 1: has no assistant turn"),
        (
            CHATS,
            {"context": 8},
            "no conversation to train on has an assistant turn within its first 8 tokens: set a larger context",
        ),
    ],
)
def test_too_few_conversations_are_refused(make: MakeChats, lines: list[Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        make(*lines, **options)


def test_more_shares_than_rows_are_refused(make: MakeChats) -> None:
    with pytest.raises(DataError, match=r"source 'chats': its conversations make 1 rows of 64 tokens, and each of 2 shares"):
        make(*CHATS).batches(0, 2, 0, 0)


def test_a_mix_of_conversations_is_no_mix_of_texts(make: MakeChats, tmp_path: Path) -> None:
    assert is_chats(str(mix_of(tmp_path)))
    assert is_chats(str(tmp_path / "b"))
    assert is_chats("anything.jsonl.zst")
    assert not is_chats(None)
    assert not is_chats(str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"its sources are conversations: train a model of transformers on them"):
        Mix(TASK, str(tmp_path / "mix.toml"), tmp_path / "cache")
    (tmp_path / "mix.toml").write_text('[sources.c]\nkind = "text"\n')
    assert not is_chats(str(tmp_path / "mix.toml"))


def test_a_folder_is_what_most_of_its_bytes_are(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "story.txt").write_text("once upon a time " * 20)
    (text / "package.json").write_text('{"name": "story"}')
    assert not is_chats(str(text))
    conversations = tmp_path / "conversations"
    conversations.mkdir()
    (conversations / "a.jsonl").write_text('{"prompt": "Hello!", "completion": "Good morning."}\n' * 20)
    (conversations / "README.md").write_text("Greetings.\n")
    assert is_chats(str(conversations))
    assert not is_chats(str(tmp_path / "empty"))


def test_a_run_that_goes_over_a_source_too_often_is_refused(make: MakeChats, tmp_path: Path) -> None:
    chats = make(data=mix_of(tmp_path, MIX + "most_epochs = 2\n"))
    tokens = chats.settings.sources["b"].tokens
    chats.check_epochs(run_settings(overrides={"tokens": 2 * tokens}))
    with pytest.raises(DataError, match=r"source 'b': ends before the run does: \d+ tokens go over it 3\.00 times"):
        chats.check_epochs(run_settings(overrides={"tokens": 4 * tokens}))


def test_a_prompt_is_a_users_turn(make: MakeChats) -> None:
    chats = make()
    expected = "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    assert chats.decode(chats.render_prompt("How?")) == expected
    assert chats.decode(chats.render_prompt([{"role": "user", "content": "How?"}])) == expected


def test_a_description_has_the_first_rows_and_lengths(
    make: MakeChats, tmp_path: Path, tokenizer: Path, monkeypatch: Any
) -> None:
    chats = make()
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "cache"))
    overrides = {"task.context": 64, "task.batch": 4, "learners": 1, "tokens": 10 * chats.settings.sources["chats"].tokens}
    found = describe(run_settings(overrides=overrides), str(tmp_path / "chats.jsonl"), str(tokenizer), None)
    assert len(found["rows"]) == 10
    for row, expected in zip(found["rows"], epoch(chats), strict=False):
        assert [part["text"] for part in row if part["learned"]] == [
            part + "<|im_end|>"
            for part in chats.decode(expected["labels"][expected["labels"] != IGNORED]).split("<|im_end|>")[:-1]
        ]
    assert sum(number for _, number in found["lengths"]) == 60
    assert found["sources"]["chats"]["epochs"] == pytest.approx(10)
    assert found["mix"] == chats.settings.model_dump()
