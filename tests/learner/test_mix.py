"""Mixes of sources: their tokens, who is dealt which windows, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from diloco.errors import AdmissionError, DataError, DilocoError, SettingsError
from diloco.process import locks
from diloco.settings.presets import run_settings
from diloco.settings.run import MixSettings, TaskSettings

pytest.importorskip("grain", reason="the extra `data` is not installed: make extras")

from diloco_learner.check import PlannedRun, check
from diloco_learner.mix import drafts, file, pipeline, stored
from diloco_learner.mix import mix as mixes
from diloco_learner.mix.describe import describe
from diloco_learner.mix.mix import Mix
from diloco_learner.mix.pipeline import TokenWindows
from diloco_learner.task import load_task

TASK = TaskSettings(layers=1, width=8, heads=2, context=8, batch=2)
MakeMix = Callable[..., Mix]


def texts(folder: Path, words: str, count: int = 45) -> Path:
    """``count`` files; the i-th says ``words`` and i, ten times."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"{words} {i}\n" * 10)
    return folder


@pytest.fixture
def make(tmp_path: Path) -> MakeMix:
    """``make(toml)``: the mix of a file in ``tmp_path``, where ``one`` and ``two`` are folders of text."""
    texts(tmp_path / "one", "to be or not to be")
    texts(tmp_path / "two", "all the world is a stage")

    def made(toml: str, task: TaskSettings = TASK) -> Mix:
        (tmp_path / "mix.toml").write_text(toml)
        return Mix(task, str(tmp_path / "mix.toml"), tmp_path / "cache")

    return made


def spelt(tokens: Any) -> str:
    """The text of bytes as tokens."""
    return bytes(tokens.astype(np.uint8)).decode()


ONE = '[sources.one]\nkind = "text"\npath = "one"\n'
TWO = ONE + '[sources.two]\nkind = "text"\npath = "two"\nweight = 3\n'
TRAINED = "[tokenizer]\ntrain = { vocabulary = 270 }\n"


def counting(windows: int, context: int) -> TokenWindows:
    """A source whose i-th window begins with ``i * context``."""
    return TokenWindows(np.arange(windows * context + 1, dtype=np.uint32), context)


@given(
    size=some.integers(0, 25),
    shares=some.integers(1, 7),
    seed=some.integers(0, 2**32 - 1),
    epoch=some.integers(0, 3),
)
def test_shares_are_disjoint_and_together_are_each_epoch_once(size: int, shares: int, seed: int, epoch: int) -> None:
    size += shares  # each has a window
    dealt = []
    for share in range(shares):
        own = len(range(share, size, shares))
        order = pipeline.mixed([counting(size, 4)], [1], share, shares, seed)
        dealt += [int(order[at][0]) // 4 for at in range(epoch * own, (epoch + 1) * own)]
    assert sorted(dealt) == list(range(size))


def test_any_start_and_any_rows_are_those_of_iteration_from_the_beginning() -> None:
    sources = [counting(20, 4), counting(9, 4)]

    def batches(share: int, start: int, rows: range, count: int) -> list[Any]:
        made = pipeline.batches(sources, [3, 1], 3, share=share, shares=3, seed=5, start=start, rows=rows)
        return list(itertools.islice(made, count))

    whole = [batches(share, 0, range(3), 40) for share in range(3)]

    @given(
        share=some.integers(0, 2),
        start=some.integers(0, 38),
        rows=some.sampled_from([range(3), range(2), range(1, 3), range(2, 3)]),
    )
    def same(share: int, start: int, rows: range) -> None:
        for got, expected in zip(batches(share, start, rows, 2), whole[share][start : start + 2], strict=True):
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, expected[rows.start : rows.stop])

    same()


def test_sources_take_turns_by_their_weights_and_epochs_have_orders_of_their_own() -> None:
    first, second = counting(50, 2), TokenWindows(np.full(21, 7000, np.uint16), 2)
    order = pipeline.mixed([first, second], [300, 100], 0, 1, 0)
    drawn = [int(order[at][0]) for at in range(400)]
    for at in range(0, 400, 40):  # everywhere, not only on the whole
        assert sum(value == 7000 for value in drawn[at : at + 40]) == 10
    firsts = [value for value in drawn if value != 7000]
    epochs = [firsts[at : at + 50] for at in range(0, 300, 50)]
    assert all(sorted(epoch) == list(range(0, 100, 2)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    other = pipeline.mixed([first, second], [300, 100], 0, 1, 1)
    assert [int(other[at][0]) for at in range(400)] != drawn


def test_windows_predict_each_token_once() -> None:
    windows = counting(10, 4)
    predicted = [int(token) for at in range(len(windows)) for token in windows[at][1:]]
    assert predicted == list(range(1, 41))
    assert len(TokenWindows(np.arange(40, dtype=np.uint16), 4)) == 9


def test_documents_are_followed_by_the_end_and_every_twentieth_is_held_out(make: MakeMix) -> None:
    mix = make(ONE)
    stored = mix.sources["one"].stored
    assert mix.vocabulary == 256
    assert stored.documents == 45
    held_out = spelt(stored.held_out).split("\0")[:-1]
    assert [text.split()[6] for text in held_out] == ["19", "39"]
    training = spelt(stored.training).split("\0")
    assert training[0] == "to be or not to be 0\n" * 10
    assert len(training) == 44
    assert training[-1] == ""


def test_of_few_documents_the_last_twentieth_is_held_out(make: MakeMix, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"{i:03}\n" for i in range(500)))
    stored = make(ONE.replace('"one"', '"book.txt"')).sources["one"].stored
    assert spelt(stored.held_out) == "".join(f"{i:03}\n" for i in range(475, 500))[-99:] + "\0"
    assert stored.training.size + stored.held_out.size == 2001


def test_a_large_document_is_read_in_pieces_and_stays_whole(make: MakeMix, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("diloco_learner.mix.documents.PIECE_CHARACTERS", 7)
    text = "äöü and more\nß\n\n" * 40 + "no line's end"
    (tmp_path / "book.txt").write_text(text)
    stored = make(ONE.replace('"one"', '"book.txt"')).sources["one"].stored
    assert spelt(np.concatenate([stored.training, stored.held_out])) == text + "\0"


def test_a_trained_tokenizer_gives_the_text_back(make: MakeMix) -> None:
    mix = make(TRAINED + TWO)
    assert mix.vocabulary == 270
    text = "to be, or <|endoftext|> — that is ß\n"
    tokens = mix.encode(text)
    assert mix.tokenizer.end not in tokens
    assert mix.decode(tokens.astype(np.int32)) == text
    stored = mix.sources["one"].stored
    assert mix.decode(np.asarray(stored.training[:200], np.int32)).startswith("to be or not to be 0\n")
    assert np.count_nonzero(stored.training == mix.tokenizer.end) == 43
    again = json.loads(mix.tokenizer.file.read_text()) if mix.tokenizer.file else {}
    assert again["model"]["type"] == "BPE"


def test_tokens_are_made_once_and_again_when_a_text_changes(make: MakeMix, tmp_path: Path) -> None:
    before = make(TRAINED + TWO)
    folders = sorted((tmp_path / "cache" / "data" / "tokens").iterdir())
    times = [(folder / "about.json").stat().st_mtime_ns for folder in folders]
    same = make(TRAINED + TWO)
    assert [(folder / "about.json").stat().st_mtime_ns for folder in folders] == times
    assert same.settings == before.settings
    (tmp_path / "two" / "000.txt").write_text("another text\n")
    changed = make(TWO)
    assert changed.settings.sources["two"].digest != before.settings.sources["two"].digest
    assert changed.settings.sources["one"].digest == make(ONE).settings.sources["one"].digest


def test_tokens_whose_making_was_broken_off_are_made_again(make: MakeMix, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise DataError("the disk is full")

    monkeypatch.setattr("diloco_learner.mix.stored._write", broken)
    with pytest.raises(DataError, match="disk is full"):
        make(ONE)
    monkeypatch.undo()
    assert make(ONE).sources["one"].stored.documents == 45


def test_two_processes_make_the_same_tokens_at_once(make: MakeMix, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(locks, "wait_for", lambda path, chosen: nullcontext())  # on machines that share the cache
    fill, others = stored._fill, list[Mix]()

    def interrupted(*arguments: Any) -> None:
        fill(*arguments)
        monkeypatch.setattr(stored, "_fill", fill)
        others.append(make(ONE))

    monkeypatch.setattr(stored, "_fill", interrupted)
    mine, (theirs,) = make(ONE), others
    assert spelt(mine.sources["one"].stored.training) == spelt(theirs.sources["one"].stored.training)
    assert len(list((tmp_path / "cache" / "data" / "tokens").iterdir())) == 1


def test_a_draft_that_a_killed_process_left_is_removed(make: MakeMix, tmp_path: Path) -> None:
    tokens = tmp_path / "cache" / "data" / "tokens"
    for name, age_s in (("left", drafts.LEFT_S + 60), ("young", 60)):
        draft = tokens / f"{name}.draft"
        draft.mkdir(parents=True)
        (draft / "training.bin").write_bytes(b"ab")
        for path in (draft / "training.bin", draft):
            os.utime(path, (time.time() - age_s,) * 2)
    make(ONE)
    assert [path.name for path in tokens.glob("*.draft")] == ["young.draft"]


@pytest.mark.parametrize("name", ["about.json", "training.bin"])
def test_a_damaged_cache_is_made_again(make: MakeMix, tmp_path: Path, name: str) -> None:
    before = make(ONE).sources["one"].stored.training.copy()
    (damaged,) = (tmp_path / "cache" / "data" / "tokens").glob(f"*/{name}")
    damaged.write_bytes(b"{")
    for note in (tmp_path / "cache" / "data" / "seen").iterdir():
        note.write_text("[]")
    np.testing.assert_array_equal(make(ONE).sources["one"].stored.training, before)


def test_parquet_and_hugging_face_give_the_tokens_of_the_same_texts(make: MakeMix, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed: make extras")
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed: make extras")
    from pyarrow import parquet

    rows = [path.read_text() for path in sorted((tmp_path / "one").iterdir())]
    (tmp_path / "rows").mkdir()
    for number, part in enumerate((rows[:20], rows[20:])):
        table = pyarrow.table({"body": part, "id": list(range(len(part)))})
        parquet.write_table(table, tmp_path / "rows" / f"{number}.parquet")
    datasets.Dataset.from_dict({"body": rows}).save_to_disk(str(tmp_path / "saved"))
    sources = (
        '[sources.a]\nkind = "parquet"\npath = "rows"\ncolumn = "body"\n'
        '[sources.b]\nkind = "huggingface"\npath = "saved"\ncolumn = "body"\n'
    )
    mix = make(ONE + sources)
    for name in ("a", "b"):
        for side in ("training", "held_out"):
            expected = getattr(mix.sources["one"].stored, side)
            np.testing.assert_array_equal(getattr(mix.sources[name].stored, side), expected)
    with pytest.raises(DataError, match=r"source 'a'.*no column 'text'; it has body, id: set sources\.a\.column"):
        make(sources.replace('column = "body"\n', "", 1))
    with pytest.raises(DataError, match=r"source 'a'.*column 'id' is of type int64, expected string"):
        make(sources.replace('"body"', '"id"', 1))
    parquet.write_table(pyarrow.table({"body": ["", None]}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"source 'a': .*none\.parquet: has no text: all rows are empty"):
        make(sources.replace('"rows"', '"none.parquet"'))
    with pytest.raises(DataError, match=r"source 'b'.*no column 'bodies'; it has body"):
        make(sources.replace('"saved"\ncolumn = "body"', '"saved"\ncolumn = "bodies"'))
    (tmp_path / "rows" / "2.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"source 'a'.*2\.parquet: cannot be read as Parquet"):
        make(sources)


BIN = 'vocabulary = 1000\n[sources.b]\nkind = "bin"\npath = "b.bin"\n'


def test_a_bin_is_read_as_it_lies(make: MakeMix, tmp_path: Path) -> None:
    np.arange(900, dtype=np.uint16).tofile(tmp_path / "b.bin")
    mix = make(BIN)
    assert (mix.vocabulary, mix.sources["b"].stored.training.size, mix.sources["b"].stored.held_out.size) == (1000, 855, 45)
    batch = next(mix.batches(0, 1, 0, 0))
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(9))
    assert not (tmp_path / "cache" / "data" / "tokens").exists()
    (tmp_path / "b.bin").unlink()  # a thread reads ahead in the mapped file: cut short, it would be a bus error
    np.arange(900, dtype=np.uint32).tofile(tmp_path / "b.bin")
    assert make(BIN + 'dtype = "uint32"\n').sources["b"].stored.training.size == 855


def test_held_out_windows_are_by_source(make: MakeMix) -> None:
    mix = make(TWO)
    for name, batches in mix.validation().items():
        held_out = spelt(mix.sources[name].stored.held_out)
        assert batches[0].shape == (2, 9)
        assert all(spelt(row) in held_out for batch in batches for row in batch)


def test_a_mix_is_the_same_wherever_it_lies(make: MakeMix, tmp_path: Path) -> None:
    there = make(TWO)
    elsewhere = tmp_path / "elsewhere"
    texts(elsewhere / "one", "to be or not to be")
    texts(elsewhere / "two", "all the world is a stage")
    (elsewhere / "mix.toml").write_text(TWO)
    here = Mix(TASK.model_copy(update={"mix": there.settings}), str(elsewhere / "mix.toml"), tmp_path / "other cache")
    assert here.settings == there.settings
    np.testing.assert_array_equal(next(here.batches(1, 2, 3, 4)), next(there.batches(1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (TRAINED + TWO, "the vocabulary is 270 here, the run's is 256: take the tokenizer's file from where the run was begun"),
        (ONE, "the list of sources is one here, the run's is one, two: take the mix.toml that the run has"),
        (TWO.replace("= 3", "= 2"), "the weight of source 'two' is 200 here, the run's is 300"),
        (TWO.replace('"two"', '"one"'), r"the content of source 'two' is [0-9a-f]{32} \(\d+ tokens\) here, the run's is"),
    ],
)
def test_other_data_than_the_runs_is_refused_by_name(make: MakeMix, toml: str, said: str) -> None:
    runs: MixSettings = make(TWO).settings
    with pytest.raises(AdmissionError, match=said):
        make(toml, TASK.model_copy(update={"mix": runs}))


def test_another_tokenizer_of_the_same_size_is_refused(make: MakeMix, tmp_path: Path) -> None:
    runs = make(TRAINED + TWO).settings
    (made,) = (tmp_path / "cache" / "data" / "tokenizers").iterdir()
    (tmp_path / "tokenizer.json").write_text(made.read_text().replace('"ĠbeĠ"', '"Ġbex"') + "\n")
    own = '[tokenizer]\nfile = "tokenizer.json"\n' + TWO
    with pytest.raises(AdmissionError, match=r"the tokenizer is [0-9a-f]{32} here, the run's is"):
        make(own, TASK.model_copy(update={"mix": runs}))


@pytest.mark.parametrize(
    ("toml", "error", "said"),
    [
        ("[sources", SettingsError, "not TOML"),
        ("[source.a]\nkind = 'text'\n", SettingsError, "no setting 'source'"),
        (ONE + "wieght = 2\n", SettingsError, r"source 'one': no setting 'wieght' \(did you mean 'weight'\?\)"),
        (ONE + "weight = -1\n", SettingsError, "source 'one': weight = -1: .*greater than 0"),
        (ONE + "weight = 0\n", SettingsError, "source 'one': weight = 0: .*greater than 0"),
        (ONE + 'column = "text"\n', SettingsError, "column: a source of kind 'text' has no column"),
        ("[sources.a]\nkind = 'parquet'\n", SettingsError, "required for a source of kind 'parquet'"),
        ("[sources.a]\nkind = 'txt'\n", SettingsError, r"source 'a': kind = 'txt'.*'text', 'bin', 'parquet' or 'huggingface'"),
        ("vocabulary = 9\n" + ONE, SettingsError, "vocabulary: only for mixes in which all sources are of kind bin"),
        (
            "[sources.a]\nkind = 'bin'\npath = 'b.bin'\n",
            SettingsError,
            "vocabulary: required, because all sources are of kind bin",
        ),
        ("[tokenizer]\n" + ONE, SettingsError, "tokenizer: needs one of file"),
        (TRAINED.replace("270", "200") + ONE, SettingsError, "vocabulary = 200"),
        (TRAINED.replace("270", "60000") + ONE, DataError, r"vocabulary = 60000: the sources' text gives \d+ tokens only"),
        ('[tokenizer]\nfile = "no.json"\n' + ONE, DataError, r"no\.json: cannot be read"),
        ('[tokenizer]\nfile = "mix.toml"\n' + ONE, DataError, r"mix\.toml: not a file that the library tokenizers wrote"),
        (ONE.replace('"one"', '"nowhere"'), DataError, r"source 'one': .*nowhere: there is no such file or folder"),
        (
            "[sources.a]\nkind = 'parquet'\npath = 'one'\n",
            DataError,
            "source 'a': .*one: has no files; expected a Parquet file",
        ),
        ("[sources.a]\nkind = 'huggingface'\npath = 'no'\n", DataError, "source 'a': .*no: does not exist; expected a folder"),
        ("vocabulary = 9\n[sources.a]\nkind = 'bin'\npath = 'no.bin'\n", DataError, r"source 'a': .*no\.bin: cannot be read"),
    ],
)
def test_what_is_refused(make: MakeMix, toml: str, error: type[DilocoError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        make(toml)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.arange(900, dtype=np.uint16).tobytes()[:-1], r"b\.bin: has 1799 bytes, not a multiple of the 2 bytes of uint16"),
        (b"", r"b\.bin: is empty"),
        (np.full(900, 1000, np.uint16).tobytes(), r"has the token 1000, and the vocabulary ends with 999.*sources\.b\.dtype"),
        (
            np.zeros(200, np.uint16).tobytes(),
            r"10 tokens held out for validation, but one batch of 2 windows of 8 tokens takes 17",
        ),
        (np.zeros(9, np.uint16).tobytes(), r"source 'b': 9 tokens for training, but one batch"),
    ],
)
def test_bins_that_are_refused(make: MakeMix, tmp_path: Path, tokens: bytes, said: str) -> None:
    (tmp_path / "b.bin").write_bytes(tokens)
    with pytest.raises(DataError, match=said):
        make(BIN)


def test_a_changed_bin_is_looked_at_again(make: MakeMix, tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    np.zeros(900, np.uint16).tofile(path)
    make(BIN)
    np.full(900, 2000, np.uint16).tofile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="token 2000"):
        make(BIN)


def test_more_shares_than_windows(make: MakeMix, tmp_path: Path) -> None:
    np.zeros(400, np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(DataError, match=r"source 'b'.*make 47 windows of 8 tokens, and each of 48 shares needs at least one"):
        make(BIN).batches(0, 48, 0, 0)


def test_a_run_that_would_go_over_a_source_more_often_than_allowed_is_refused(make: MakeMix, tmp_path: Path) -> None:
    tokens = make(TWO).settings.sources["two"].tokens
    small = {"task.context": 8, "task.batch": 2, "task.layers": 1, "task.width": 8, "task.heads": 2, "learners": 2}
    (tmp_path / "mix.toml").write_text(TWO + "most_epochs = 2\n")
    os.environ["DILOCO_CACHE_DIR"] = str(tmp_path / "cache")
    try:
        found = check(PlannedRun(run_settings(overrides=small | {"tokens": 2 * tokens}), str(tmp_path / "mix.toml")))
        assert found.units == "nats per token"
        assert found.mix is not None
        assert found.mix.epochs(2 * tokens)["two"] == 1.5  # three windows in four are its
        with pytest.raises(DataError, match=r"source 'two': ends before the run does: \d+ tokens go over it 2\.25 times, and"):
            check(PlannedRun(run_settings(overrides=small | {"tokens": 3 * tokens}), str(tmp_path / "mix.toml")))
        described = describe(run_settings(overrides=small | {"tokens": tokens}), str(tmp_path / "mix.toml"))
    finally:
        del os.environ["DILOCO_CACHE_DIR"]
    assert described["sources"]["two"]["epochs"] == pytest.approx(0.75)
    assert described["sources"]["one"]["share"] == 0.25
    assert described["tokens_per_s"] > 0
    assert len(described["sample"]) == 9


def test_the_model_has_the_tokenizers_vocabulary(make: MakeMix, tmp_path: Path) -> None:
    import jax

    make(TRAINED + TWO)
    task: Any = load_task(TASK, str(tmp_path / "mix.toml"), tmp_path / "cache")
    params = task.init(jax.random.key(0))
    assert params["embedding"].shape == params["head"].shape == (270, 8)
    batch = next(task.batches(0, 1, 0, 0))
    assert float(task.loss(params, batch)) == pytest.approx(np.log(270))
    assert task.units.loss == "nats per token"


def test_the_example_is_a_mix_of_two() -> None:
    found = file.read(Path(__file__).parents[2] / "examples" / "mix.toml")
    assert {name: source.weight for name, source in found.sources.items()} == {"code": 3, "prose": 1}


def test_a_library_that_is_missing_is_named(make: MakeMix, monkeypatch: Any) -> None:
    monkeypatch.setattr(mixes, "find_spec", lambda name: None)
    with pytest.raises(DilocoError, match=r"not installed: grain, tokenizers; pip install 'diloco\[data\]'"):
        make(TRAINED + ONE)
