"""Files, shares and windows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from diloco.errors import DataError, SettingsError
from diloco_learner.data.repeats import HeldOut
from diloco_learner.text import Windows, load_corpus, validation_batches


def folder(path: Path, files: int, size: int = 100) -> Path:
    """``files`` files, the i-th of ``size`` bytes i."""
    path.mkdir(exist_ok=True)
    for i in range(files):
        (path / f"{i:03}.txt").write_bytes(bytes([i + 1]) * size)
    return path


def test_every_twentieth_file_is_held_out(tmp_path: Path) -> None:
    corpus = load_corpus(str(folder(tmp_path, 41)))
    assert [path.stem for path in corpus.held_out] == ["019", "039"]
    assert len(corpus.training) == 39
    assert corpus.training_bytes == corpus.training_text().size == 3900
    assert set(corpus.to_evaluate.text) == {20, 40}


def test_shares_are_files_in_turn(tmp_path: Path) -> None:
    corpus = load_corpus(str(folder(tmp_path, 20)))
    assert list(corpus.share(1, 4)[::100]) == [2, 6, 10, 14, 18]
    texts = np.concatenate([corpus.share(share, 4) for share in range(4)])
    assert sorted(texts) == sorted(corpus.training_text())


def test_single_file_holds_out_its_end_and_is_cut_into_parts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert list(corpus.to_evaluate.text) == [96, 97, 98, 99, 100]
    parts = [corpus.share(share, 3) for share in range(3)]
    assert [part.size for part in parts] == [31, 32, 32]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(1, 96))


def test_hidden_files_and_binaries_are_left_out(tmp_path: Path) -> None:
    folder(tmp_path, 1)
    (tmp_path / ".hidden").write_bytes(b"secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"config")
    (tmp_path / "image.png").write_bytes(b"PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert [path.name for path in load_corpus(str(tmp_path)).training] == ["000.txt"]


def test_order_follows_relative_paths(tmp_path: Path) -> None:
    for name in ("b/1.txt", "a.txt", "b.txt", "a/z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    names = [path.relative_to(tmp_path).as_posix() for path in load_corpus(str(tmp_path)).training]
    assert names == ["a.txt", "a/z.txt", "b.txt", "b/1.txt"]


def test_default_is_the_standard_library_without_its_tests() -> None:
    corpus = load_corpus(None)
    paths = corpus.training + corpus.held_out
    assert any(path.name == "argparse.py" for path in paths)
    assert all(path.suffix == ".py" and not {"test", "tests", "site-packages"} & set(path.parts[-3:]) for path in paths)
    assert corpus.describe()["source"] == "Python standard library"


def test_texts_have_one_digest_if_all_their_bytes_are_equal(tmp_path: Path) -> None:
    one, copy = load_corpus(str(folder(tmp_path / "one", 21))), load_corpus(str(folder(tmp_path / "copy", 21)))
    assert one.digest() == copy.digest()
    with (tmp_path / "copy" / "000.txt").open("ab") as file:
        file.write(b"\n")
    assert load_corpus(str(tmp_path / "copy")).digest() != one.digest()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        load_corpus(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="holds no text: 0 files"):
        load_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match="is empty or not text"):
        load_corpus(str(tmp_path / "empty.txt"))


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DataError, match="loop"):
        load_corpus(str(tmp_path / "loop"))


def test_deleted_after_the_listing(tmp_path: Path) -> None:
    corpus = load_corpus(str(folder(tmp_path, 1)))
    (tmp_path / "000.txt").unlink()
    with pytest.raises(DataError, match=r"000\.txt: cannot be read: No such file"):
        corpus.training_text()


def test_no_such_share(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="share 4: the run's data has 4 shares"):
        load_corpus(str(folder(tmp_path, 3))).share(4, 4)


def windows(size: int = 1000, *, context: int = 8, batch: int = 4, seed: int = 0, share: int = 0) -> Windows:
    text = (np.arange(size) % 251).astype(np.uint8)
    return Windows(text, context, batch, seed=seed, share=share, what="text")


def test_batch_depends_on_its_index_alone() -> None:
    source = windows()
    whole = list(itertools.islice(source.iterate(0), 3 * source.batches_per_epoch))
    for start in (1, source.batches_per_epoch, 2 * source.batches_per_epoch - 1):
        for got, expected in zip(itertools.islice(windows().iterate(start), 5), whole[start:], strict=False):
            np.testing.assert_array_equal(got, expected)


def test_seeds_shares_and_epochs_differ() -> None:
    first = next(windows().iterate(0))
    assert first.shape == (4, 9)
    assert first.dtype == np.int32
    for other in (windows(seed=1).iterate(0), windows(share=1).iterate(0), windows().iterate(windows().batches_per_epoch)):
        assert not np.array_equal(first, next(other))


def test_an_epoch_predicts_no_byte_twice() -> None:
    source = Windows(np.arange(200).astype(np.uint8), 8, 4, seed=0, share=0, what="text")
    batches = itertools.islice(source.iterate(0), source.batches_per_epoch)
    predicted = np.concatenate([batch[:, 1:].reshape(-1) for batch in batches])
    assert len(set(predicted)) == predicted.size >= 200 - 4 * 8 - 2 * 8
    batch = next(source.iterate(0))
    np.testing.assert_array_equal(batch - batch[:, :1], np.broadcast_to(np.arange(9), (4, 9)))


def test_too_short_says_how_much_is_there_and_needed() -> None:
    needed = 8 * 5 + 1
    assert windows(needed).batches_per_epoch == 1
    next(windows(needed).iterate(0))
    with pytest.raises(DataError, match=r"text: 40 bytes of text.*takes at least 41"):
        windows(needed - 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_validation_is_spread_evenly_over_the_same_windows_whatever_the_batch(batch: int) -> None:
    text = (np.arange(1 + 8 * 30) // 8).astype(np.uint8)
    batches = validation_batches(HeldOut(text, 0, all_kept=False), 8, batch, 6, "text")
    assert [one.shape for one in batches] == [(batch, 9)] * (6 // batch)
    assert [int(row[0]) for one in batches for row in one] == [0, 5, 10, 15, 20, 25]


def test_a_batch_of_more_windows_than_are_validated_on_is_one() -> None:
    assert [one.shape for one in validation_batches(HeldOut(np.zeros(241, np.uint8), 0, all_kept=False), 8, 7, 6, "text")] == [
        (7, 9)
    ]


def test_validation_too_short() -> None:
    def of(size: int, repeated_bytes: int = 0, *, all_kept: bool = False) -> int:
        return len(validation_batches(HeldOut(np.zeros(size, np.uint8), repeated_bytes, all_kept), 8, 2, 6, "text"))

    assert of(17) == 1
    with pytest.raises(DataError, match=r"text: 16 bytes are held out for validation, one batch.*takes 17"):
        of(16)
    with pytest.raises(
        DataError, match=r"16 bytes .* without 1024 bytes of passages that the training text also contains, one batch"
    ):
        of(16, 1024)
    with pytest.raises(DataError, match="16 bytes are held out for validation, one batch"):
        of(16, 16, all_kept=True)


def test_what_the_training_text_has_too_is_not_evaluated_on(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table, own = (random.integers(32, 127, 2048, dtype=np.uint8).tobytes() for _ in range(2))
    folder(tmp_path, 18)
    (tmp_path / "a table.txt").write_bytes(table)
    (tmp_path / "zz.txt").write_bytes(own[:1024] + table[500:1524] + own[1024:])
    corpus = load_corpus(str(tmp_path))
    assert [path.name for path in corpus.held_out] == ["zz.txt"]
    assert corpus.to_evaluate.text.tobytes() == own
    described = corpus.describe()
    assert (described["held_out_bytes"], described["repeated_bytes"], described["evaluated_bytes"]) == (3072, 1024, 2048)
    assert table in corpus.training_text().tobytes()
