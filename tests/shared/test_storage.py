"""Places are told from paths and keep no secrets; what lies there is brought once, goes on where it stopped, and has room."""

from __future__ import annotations

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.made.object_stores import DyingStore, Killed, folder_store, memory_store, use

from diloco.errors import ObjectExistsError, ObjectMissingError, ObjectStoreError, SettingsError
from diloco.process import locks
from diloco.settings import folders
from diloco.settings.places import is_remote, parse_place
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import parse
from diloco.storage import aws_profiles, fetching
from diloco.storage.fetching import fetched
from diloco.storage.object_store import StoredObject
from diloco.storage.opening import open_store

if TYPE_CHECKING:
    from typing_extensions import Buffer


@pytest.mark.parametrize(
    ("text", "bucket", "key", "name"),
    [
        ("s3://b/data/a.txt", "b", "data/a.txt", "a.txt"),
        ("gs://b/data/", "b", "data", "data"),
        ("az://container", "container", "", "container"),
        ("https://host:8443/a%20b.txt", "host:8443", "a b.txt", "a b.txt"),
        ("hf://org/model", "org/model", "", "model"),
        ("hf://org/model@v1/config.json", "org/model@v1", "config.json", "config.json"),
        ("hf://datasets/org/chats/train.jsonl", "datasets/org/chats", "train.jsonl", "train.jsonl"),
    ],
)
def test_a_place_has_a_bucket_and_a_key(text: str, bucket: str, key: str, name: str) -> None:
    place = parse_place(text)
    assert (place.bucket, place.key, place.name) == (bucket, key, name)
    assert is_remote(text)


@pytest.mark.parametrize("text", ["data/a.txt", "/data", "mine://thing", "s3:/b/k", "https:", None, Path("a")])
def test_a_path_is_no_place(text: object) -> None:
    assert not is_remote(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s4://b/k", "did you mean s3://?"),
        ("gcs://b/k", "did you mean gs://?"),
        ("s3://AKIAKEY:hidden@b/k", "has user information"),
        ("https://me:hidden@host/k", "has user information"),
        ("s3://AKIAKEY:hid/den@b/k", "names no bucket"),
        ("https://host/k?X-Amz-Signature=hidden", "has a query"),
        ("s3://b/k#hidden", "has a fragment"),
        ("s3:///k", "names no bucket"),
        ("hf://model", "names no repository"),
        ("s3://b/../k", "relative part"),
    ],
)
def test_what_is_no_place_is_refused_and_secrets_are_not_repeated(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=r"^--data ") as error:
        parse_place(text, "--data")
    assert said in str(error.value)
    assert "hid" not in str(error.value)
    assert "AKIA" not in str(error.value)


def test_a_learner_keeps_no_credentials_and_passes_on_what_its_task_understands() -> None:
    for data in ("hf://corpus", "mine://user:word@thing?x", "s3://bucket/text", "/data/text"):
        assert LearnerSettings(name="one", data=data).data == data
    for place in ("s3://key:hidden@bucket/text", "https://host/text?token=hidden"):
        for name in ("data", "init"):
            with pytest.raises(SettingsError, match=f"{name} = (s3://bucket|https://host): has") as error:
                parse(LearnerSettings, {"name": "learner-0", name: place}, "learner.toml")
            assert "hidden" not in str(error.value)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.storage.opening.find_spec", lambda name: None)
    for place, library in (("s3://b/k", "obstore"), ("hf://o/n", "huggingface_hub")):
        with pytest.raises(Exception, match=f"{library}; pip install 'diloco\\[storage\\]'$"):
            open_store(parse_place(place))


def test_a_folder_has_the_names_and_bytes_that_it_has_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    use(monkeypatch, store)
    large = bytes(range(256)) * (fetching.RANGE_BYTES // 256) * 2 + b"end"  # two ranges and a bit
    for key, data in {"data/a.txt": b"A", "data/sub/large": large, "data/empty": b"", "data2": b"not this"}.items():
        store.put(key, data)
    found = fetched("s3://bucket/data", tmp_path)
    assert found.name == "data"
    assert {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()} == {
        "a.txt": b"A",
        "sub/large": large,
        "empty": b"",
    }
    assert fetched("s3://bucket/data/a.txt", tmp_path).read_bytes() == b"A"
    assert {path.name for path in fetched("s3://bucket/data", tmp_path, only=("*.txt",)).iterdir()} == {"a.txt"}
    with pytest.raises(ObjectMissingError, match="s3://bucket/dat: there is no such object, and no folder"):
        fetched("s3://bucket/dat", tmp_path)


def test_objects_that_mark_folders_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    use(monkeypatch, store)
    for key, data in {"data/sub": b"", "data/sub/a": b"A", "data/b": b"B"}.items():
        store.put(key, data)
    found = fetched("s3://bucket/data", tmp_path)
    assert {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} == {"b", "sub/a"}
    store.put("data/b/c", b"C")
    with pytest.raises(ObjectStoreError, match="has an object 'b' and objects below it, which no local folder can have"):
        fetched("s3://bucket/data", tmp_path / "another")


def test_what_was_brought_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DyingStore(memory_store())
    use(monkeypatch, store)
    store.put("data/a", b"1")
    store.put("data/b", b"2")
    first = fetched("s3://bucket/data", tmp_path)
    before = len(store.requests)
    assert fetched("s3://bucket/data", tmp_path) == first
    assert not [each for each in store.requests[before:] if each.startswith("get")]
    store.put("data/b", b"3")
    second = fetched("s3://bucket/data", tmp_path)
    assert [each for each in store.requests[before:] if each.startswith("get")] == ["get data/b 0"]
    assert ((first / "b").read_bytes(), (second / "b").read_bytes()) == (b"2", b"3")  # who reads the first goes on with it


def test_a_download_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "RANGE_BYTES", 10)
    inner, data = memory_store(), bytes(range(95))
    inner.put("file", data)
    dying = DyingStore(inner, 8)  # the head, and six ranges before
    use(monkeypatch, dying)
    with pytest.raises(Killed):
        fetched("s3://bucket/file", tmp_path)
    [part] = tmp_path.rglob("*.part")
    kept = part.stat().st_size
    assert kept > 0
    later = DyingStore(inner)
    use(monkeypatch, later)
    assert fetched("s3://bucket/file", tmp_path).read_bytes() == data
    assert next(each for each in later.requests if each.startswith("get")) == f"get file {kept}"


def test_processes_that_begin_together_read_a_place_once(tmp_path: Path) -> None:
    """As the learners of a run do: each locks with files of its own, so threads stand for them."""
    store, read = memory_store(), list[str]()

    class Counting(DyingStore):
        def get(self, of: StoredObject, start: int, stop: int) -> Buffer:
            read.append(of.key)
            return super().get(of, start, stop)

    for number in range(20):
        store.put(f"data/{number}", b"x" * number)
    place = parse_place("s3://bucket/data")
    cached = fetching._CachedPlace(tmp_path, place, (), None)
    counting = Counting(store)
    with ThreadPoolExecutor(8) as pool:
        found = {
            each.result()
            for each in [pool.submit(cached.fill, counting, fetching.find_objects(store, place)) for _ in range(8)]
        }
    [path] = found
    assert len([*path.iterdir()]) == 20
    assert sorted(read) == sorted(f"data/{number}" for number in range(20))


def test_an_object_that_changes_while_it_is_read_is_no_mixture(tmp_path: Path) -> None:
    store = memory_store()
    store.put("file", b"old content")
    seen = store.head("file")
    store.put("file", b"new content")
    with pytest.raises(ObjectMissingError, match="s3://bucket/file: was replaced while it was read"):
        store.get(seen, 0, 5)


@pytest.mark.parametrize(("blocks", "said"), [([b"123", b"45"], None), ([b"1234"], "only 4"), ([b"123", b"456"], "more")])
def test_a_server_that_sends_other_than_was_asked_is_refused(blocks: list[bytes], said: str | None) -> None:
    endless = itertools.chain(blocks, [] if said != "more" else itertools.repeat(b"more"))
    if said is None:
        assert memory_store()._whole("file", endless, 5) == b"12345"
    else:
        with pytest.raises(ObjectStoreError, match=f"s3://bucket/file: the server sent {said} bytes, expected 5"):
            memory_store()._whole("file", endless, 5)


def test_what_was_brought_serves_while_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    store.put("file", b"content")
    use(monkeypatch, store)
    before = fetched("s3://bucket/file", tmp_path)

    class Away:
        def head(self, key: str) -> StoredObject:
            raise ObjectStoreError("s3://bucket/file: the server does not answer")

    use(monkeypatch, Away())  # type: ignore[arg-type]
    assert fetched("s3://bucket/file", tmp_path) == before
    with pytest.raises(ObjectStoreError):
        fetched("s3://bucket/other", tmp_path)


def test_a_full_disk_drops_only_what_no_process_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    use(monkeypatch, store)
    for name in ("old", "used", "new"):
        store.put(name, b"x" * 1000)
    old, used = fetched("s3://bucket/old", tmp_path), fetched("s3://bucket/used", tmp_path)
    [lock] = [each for each in locks._held if each.name.endswith(f"{old.parent.parent.name}.used")]
    locks._held.remove(lock)
    lock.close()  # as if the process that uses it had ended
    monkeypatch.setattr(fetching, "room_bytes", lambda folder: 500 if old.exists() else 1500)
    assert fetched("s3://bucket/new", tmp_path).exists()
    assert not old.exists()
    assert used.exists()
    monkeypatch.setattr(fetching, "room_bytes", lambda folder: 500)
    store.put("large", b"x" * 1_000_000)
    with pytest.raises(SettingsError, match=r"0\.001 GB are to be kept in .*room for 0\.000 GB.*DILOCO_CACHE_DIR"):
        fetched("s3://bucket/large", tmp_path)


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def head(self, key: str) -> StoredObject:
            raise ObjectMissingError(key)

        def list(self, prefix: str) -> list[StoredObject]:
            return [StoredObject("data/../../etc/passwd", 1, "e")]

    with pytest.raises(ObjectStoreError, match="no local folder can have"):
        fetching.find_objects(Hostile(), parse_place("s3://bucket/data"))  # type: ignore[arg-type]


def test_an_object_is_created_once_and_deleted_twice(tmp_path: Path) -> None:
    for store in (memory_store(), folder_store(tmp_path / "bucket")):
        store.put("owner", b"me", create=True)
        with pytest.raises(ObjectExistsError, match="s3://bucket/owner: exists already"):
            store.put("owner", b"you", create=True)
        (tmp_path / "file").write_bytes(b"12345")
        store.send([("folder/file", tmp_path / "file")])
        assert [(each.key, each.size_bytes) for each in store.list("folder")] == [("folder/file", 5)]
        store.delete(["folder/file"])
        store.delete(["folder/file"])
        assert [*store.list("folder")] == []


def test_a_profile_gives_keys_where_the_environment_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = A\naws_secret_access_key = B\n")
    (tmp_path / "config").write_text(
        "[profile work]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:9\n[profile sso]\nsso_session = x\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert aws_profiles.of_environment() == {}
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert aws_profiles.of_environment() == {
        "access_key_id": "A",
        "secret_access_key": "B",
        "region": "eu-west-1",
        "endpoint": "http://127.0.0.1:9",
    }
    monkeypatch.setenv("AWS_PROFILE", "sso")
    monkeypatch.setattr("diloco.storage.aws_profiles.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="sso_session, which needs boto3"):
        aws_profiles.of_environment()
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(SettingsError, match="there is no such profile"):
        aws_profiles.of_environment()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment")
    assert aws_profiles.of_environment() == {}


def test_the_cache_is_below_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    store.put("file", b"1")
    use(monkeypatch, store)
    monkeypatch.setenv(folders.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "storage") in fetched("s3://bucket/file").parents
    shutil.rmtree(tmp_path / "mine")
