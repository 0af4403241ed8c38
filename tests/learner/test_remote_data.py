"""Data at a place is that of the same files on a disk: a learner with copies and one with the bucket are in the same run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.made.object_stores import DyingStore, memory_store, use

from diloco.errors import AdmissionError, DataError, SettingsError
from diloco.settings import folders
from diloco.settings.run import MixSettings, TaskSettings
from diloco.storage.cloud_store import CloudStore
from diloco_learner.data.data import open_data
from diloco_learner.text import load_corpus

TEXTS = 21  # one of them is held out
SETTINGS = TaskSettings(context=32, batch=2)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    monkeypatch.setenv(folders.CACHE_VARIABLE, str(tmp_path / "cache of the account"))
    made = memory_store()
    use(monkeypatch, made)
    return made


def put_folder(store: CloudStore, folder: Path) -> None:
    """Put all files of a folder below ``copy``."""
    store.send([(f"copy/{path.relative_to(folder)}", path) for path in sorted(folder.rglob("*")) if path.is_file()])


def texts(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    for number in range(TEXTS):
        name = f"sub/{number}.txt" if number % 2 else f"{number}.txt"
        (folder / name).write_text(f"text number {number} of a few words, which are many enough\n" * (number + 20))
    return folder


def test_text_of_a_place_is_that_of_its_copy(store: CloudStore, tmp_path: Path) -> None:
    local = texts(tmp_path / "local")
    put_folder(store, local)
    there, here = load_corpus("s3://bucket/copy", tmp_path / "cache"), load_corpus(str(local))
    assert there.digest() == here.digest()
    assert there.describe()["source"] == "s3://bucket/copy"
    for share in range(2):
        np.testing.assert_array_equal(there.share(share, 2), here.share(share, 2))


def mix(folder: Path, web: str = "web", digest: str = "files") -> Path:
    """Write a mix of text and of a Parquet file most of whose bytes are of another column."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("grain")
    from pyarrow import parquet

    if not (folder / "texts").exists():
        texts(folder / "texts")
        (folder / "web").mkdir()
        rows = [f"row {number} of the web, with some words more than it needs" for number in range(2000)]
        images = [os.urandom(1000) for _ in rows]
        table = pyarrow.table({"content": rows, "image": images})
        parquet.write_table(table, folder / "web" / "0.parquet", row_group_size=500, compression="none")
    path = folder / f"mix-{digest}.toml"
    path.write_text(
        f'[sources.texts]\nkind = "text"\npath = "texts"\n'
        f'[sources.web]\nkind = "parquet"\npath = "{web}"\ncolumn = "content"\ndigest = "{digest}"\n'
    )
    return path


@pytest.mark.parametrize("digest", ["files", "column"])
def test_a_mix_of_a_place_is_that_of_its_copy(store: CloudStore, tmp_path: Path, digest: str) -> None:
    path = mix(tmp_path / "local", digest=digest)
    put_folder(store, tmp_path / "local")
    here = open_data(SETTINGS, str(path), tmp_path / "here")
    there = open_data(SETTINGS, f"s3://bucket/copy/{path.name}", tmp_path / "there")  # its paths are relative to the place
    assert there.settings == here.settings  # type: ignore[union-attr]
    mine = path.with_name("own.toml")
    mine.write_text(path.read_text().replace('path = "web"', 'path = "s3://bucket/copy/web"'))
    mixed = open_data(SETTINGS, str(mine), tmp_path / "mixed")
    assert mixed.settings == here.settings  # type: ignore[union-attr]
    for one, other in zip(here.batches(0, 2, 0, 3), there.batches(0, 2, 0, 3), strict=False):
        np.testing.assert_array_equal(one, other)
        break


def test_of_a_column_only_its_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mix(tmp_path / "local", digest="column")
    inner = memory_store()
    put_folder(inner, tmp_path / "local")
    read = {"all": 0}

    class Counting(DyingStore):
        def get(self, of, start, stop):  # type: ignore[no-untyped-def]
            if of.key.endswith(".parquet"):
                read["all"] += stop - start
            return super().get(of, start, stop)

    use(monkeypatch, Counting(inner))
    size = (tmp_path / "local" / "web" / "0.parquet").stat().st_size
    assert size > 2_000_000
    data = open_data(SETTINGS, f"s3://bucket/copy/{path.name}", tmp_path / "cache")
    assert 10_000 < read["all"] < size // 5
    before = read["all"]
    again = open_data(SETTINGS, f"s3://bucket/copy/{path.name}", tmp_path / "cache")
    assert (read["all"], again.settings) == (before, data.settings)  # type: ignore[union-attr]


def test_other_bytes_of_the_column_are_another_run(store: CloudStore, tmp_path: Path) -> None:
    path = mix(tmp_path / "local", digest="column")
    put_folder(store, tmp_path / "local")
    runs = open_data(SETTINGS, str(path), tmp_path / "here").settings  # type: ignore[union-attr]
    content = (tmp_path / "local" / "web" / "0.parquet").read_bytes()
    at = content.index(b"row 7 ")
    store.put("copy/web/0.parquet", content[:at] + b"ROW" + content[at + 3 :])
    with pytest.raises(AdmissionError, match=r"s3://bucket/copy/mix-column.toml: the content of source 'web' is"):
        open_data(SETTINGS.model_copy(update={"mix": runs}), f"s3://bucket/copy/{path.name}", tmp_path / "there")


def test_what_a_mix_names_wrongly_is_said_with_the_source(store: CloudStore, tmp_path: Path) -> None:
    path = mix(tmp_path / "local", web="s3://key:hidden@bucket/web")
    with pytest.raises(SettingsError, match=r"source 'web': path = s3://bucket: has user information") as error:
        open_data(SETTINGS, str(path), tmp_path / "cache")
    assert "hidden" not in str(error.value)
    put_folder(store, tmp_path / "local")
    store.put("copy/mix.toml", mix(tmp_path / "local", web="../../web").read_bytes())
    with pytest.raises(SettingsError, match=r"\.\./\.\./web: leads out of s3://bucket"):
        open_data(SETTINGS, "s3://bucket/copy/mix.toml", tmp_path / "cache")
    store.put("copy/web/0.parquet", b"PAR1 is no Parquet file PAR1")
    mix(tmp_path / "local", web="s3://bucket/copy/web", digest="column")
    with pytest.raises(DataError, match=r"s3://bucket/copy/web: copy/web/0.parquet: cannot be read as Parquet"):
        open_data(SETTINGS, str(tmp_path / "local" / "mix-column.toml"), tmp_path / "cache")


def test_conversations_of_a_place_are_those_of_their_copy(store: CloudStore, tmp_path: Path) -> None:
    pytest.importorskip("grain")
    pytest.importorskip("transformers")
    from diloco_learner.chats import tiny
    from diloco_learner.chats.chats import Chats, is_chats

    local = tmp_path / "local"
    (local / "tokenizer").mkdir(parents=True)
    (local / "chats").mkdir()
    tiny.write_tokenizer(local / "tokenizer")
    tiny.write_chats(local / "chats" / "one.jsonl", 60)
    (local / "mix.toml").write_text('[sources.talk]\nkind = "chats"\npath = "chats"\n')
    put_folder(store, local)
    task = TaskSettings(layers=1, width=8, heads=2, context=64, batch=2)

    def settings(data: str, tokenizer: str) -> MixSettings:
        return Chats(task, data, tokenizer=tokenizer, context=64, batch=2, cache_dir=tmp_path / "cache").settings

    for data in ("chats/one.jsonl", "chats", "mix.toml"):
        place = f"s3://bucket/copy/{data}"
        assert is_chats(place)
        assert settings(place, "s3://bucket/copy/tokenizer") == settings(str(local / data), str(local / "tokenizer"))
