"""Checkpoints and weights in a bucket: whatever request an upload is killed at, the newest whole checkpoint can be loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.made.object_stores import DyingStore, Killed, memory_store, use
from tests.made.whole_checkpoints import make_checkpoint

from diloco.errors import ObjectStoreError, RunError, SettingsError
from diloco.settings import folders
from diloco.settings.places import StoragePlace, parse_place
from diloco.storage.cloud_store import CloudStore
from diloco_ops.checkpoints import checkpoint, in_bucket
from diloco_ops.checkpoints.manifest import RunCheckpoint
from diloco_ops.up import resume
from diloco_ops.weights import in_place

PLACE = parse_place("s3://bucket/runs/one")
STATES = {"ann": [b"state of ann", b"its second part"], "bob": [b"state of bob"]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    monkeypatch.setenv(folders.CACHE_VARIABLE, str(tmp_path / "cache"))
    made = memory_store()
    use(monkeypatch, made, in_bucket, in_place)
    return made


def content(found: RunCheckpoint) -> bytes:
    return (found.path / found.manifest.log.saved.file).read_bytes()


def newest() -> RunCheckpoint:
    return in_bucket.find(PLACE, RunCheckpoint.check)[0]


def upload(taken: RunCheckpoint) -> StoragePlace:
    claimed = in_bucket.claim_number(PLACE)
    claimed.upload(taken)
    return claimed.place


def test_a_checkpoint_comes_back_as_it_was_and_the_newest_first(store: CloudStore, tmp_path: Path) -> None:
    old = make_checkpoint(tmp_path / "old", STATES, here=True, log=b"old log")
    new = make_checkpoint(tmp_path / "new", STATES, here=True, log=b"new log")
    assert [str(upload(taken)) for taken in (old, new)] == [f"{PLACE}/1", f"{PLACE}/2"]
    found = resume.find(str(PLACE))
    assert content(found.checkpoint) == b"new log"
    for saved in new.manifest.files:
        assert (found.checkpoint.path / saved.file).read_bytes() == (new.path / saved.file).read_bytes()
    assert content(resume.find(f"{PLACE}/1").checkpoint) == b"old log"


@pytest.mark.parametrize("after", [False, True])
def test_an_upload_that_is_killed_at_any_request_leaves_the_newest_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setenv(folders.CACHE_VARIABLE, str(tmp_path / "cache"))
    old = make_checkpoint(tmp_path / "old", STATES, here=True, log=b"old log")
    new = make_checkpoint(tmp_path / "new", STATES, here=True, log=b"new log")
    whole = DyingStore(memory_store())
    use(monkeypatch, whole, in_bucket)
    upload(new)
    assert [each.split()[0] for each in whole.requests] == ["list", "put", *["send"] * len(new.manifest.files), "put"]
    for number in range(1, len(whole.requests) + 1):
        inner = memory_store(f"s3://bucket-{number}-{after}")
        use(monkeypatch, inner, in_bucket)
        upload(old)
        use(monkeypatch, DyingStore(inner, number, after=after), in_bucket)
        with pytest.raises(Killed):
            upload(new)
        use(monkeypatch, inner, in_bucket)
        is_whole = after and number == len(whole.requests)
        assert content(newest()) == (b"new log" if is_whole else b"old log"), whole.requests[number - 1]
        upload(new)  # the next one takes a number of its own
        assert content(newest()) == b"new log"


def test_a_damaged_checkpoint_is_passed_over_and_named(store: CloudStore, tmp_path: Path) -> None:
    for log in (b"old log", b"new log"):
        upload(make_checkpoint(tmp_path / log.decode(), STATES, here=True, log=log))
    store.put(f"{PLACE.key}/2/log.snapshot", b"bad log")
    found, notes = in_bucket.find(PLACE, RunCheckpoint.check)
    assert content(found) == b"old log"
    assert "log.snapshot: is damaged" in notes[0]
    store.delete([f"{PLACE.key}/1/manifest.json"])
    with pytest.raises(RunError, match=r"log.snapshot: is damaged.*s3://bucket/runs/one/1: .* upload was never finished"):
        newest()


def test_a_checkpoint_whose_states_are_elsewhere_is_not_sent_before_it_is_whole(store: CloudStore, tmp_path: Path) -> None:
    taken = make_checkpoint(tmp_path / "whole" / "3", STATES, here=False)
    with pytest.raises(RunError, match="the states of ann, bob are on other machines"):
        upload(taken)
    teams = tmp_path / "teams" / "checkpoints" / "7"
    teams.mkdir(parents=True)
    for saved in taken.manifest.files:
        if saved.file.startswith("learners/"):
            name, _, part = Path(saved.file).stem.partition(".part-")
            (teams / Path(saved.file).name).write_bytes(STATES[name][int(part or 0)])
    assert checkpoint.checkpoint([Path("collect"), taken.path, tmp_path / "teams"], str(PLACE)) == 0
    assert newest().manifest == taken.manifest
    with pytest.raises(SettingsError, match=r"--out folder: .*collect takes only a place"):
        checkpoint.checkpoint([Path("collect"), taken.path], "folder")


def test_a_bucket_that_refuses_is_known_before_a_checkpoint_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class ReadOnly(DyingStore):
        def put(self, key: str, data: bytes, *, create: bool = False) -> None:
            raise ObjectStoreError(f"s3://bucket/{key}: refused (status 403)")

    use(monkeypatch, ReadOnly(memory_store()), in_bucket)
    with pytest.raises(ObjectStoreError, match=r"claim.json: refused"):  # the run's directory is not even looked for
        asyncio.run(checkpoint.take_and_tell(tmp_path / "run", PLACE))


def test_a_folder_of_weights_is_sent_with_its_configuration_last(
    store: CloudStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, place = tmp_path / "model", parse_place("s3://bucket/model")
    written.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (written / name).write_text(name)
    in_place.check_free(place, folder=True)
    watched = DyingStore(store)
    use(monkeypatch, watched, in_place)
    in_place.send(written, place)
    assert watched.requests == ["send model/model.safetensors", "send model/tokenizer.json", "send model/config.json"]
    with pytest.raises(SettingsError, match=r"s3://bucket/model: is no empty folder, it has model/"):
        in_place.check_free(place, folder=True)
    for text, said in (("https://host/model", "a web server takes no files"), ("s3://bucket", "names a bucket alone")):
        with pytest.raises(SettingsError, match=said):
            in_place.check_free(parse_place(text), folder=False)
