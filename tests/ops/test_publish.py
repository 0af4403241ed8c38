"""Weights are published below a place that one run owns; the last few are kept, and the newest is named after it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.made.object_stores import DyingStore, Killed, memory_store, use

from diloco.errors import ObjectStoreError, SettingsError
from diloco.process import observe
from diloco.process.retry import Complaint
from diloco.service.rundir import RunDirectory
from diloco.settings.places import parse_place
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.storage.cloud_store import CloudStore
from diloco_ops.publish import owner, publisher
from diloco_ops.weights import export
from diloco_ops.weights.versions import Versions

TO = "s3://bucket/published"
PLACE = parse_place(TO)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CloudStore:
    made = memory_store()
    use(monkeypatch, made, owner, publisher)
    return made


def read(store: CloudStore, key: str) -> bytes:
    found = store.head(f"published/{key}")
    return bytes(store.get(found, 0, found.size_bytes))


def send(made: tuple[Path, dict[str, object]], keep: int) -> None:
    publisher.send(made[0], PLACE, made[1], keep)


def folder(path: Path, number: int | str) -> tuple[Path, dict[str, object]]:
    path = path / str(number)
    path.mkdir()
    (path / "model.safetensors").write_text(f"weights {number}")
    (path / "config.json").write_text("{}")
    return path, {"folder": number if isinstance(number, str) else f"{number:08d}"}


def test_one_run_owns_a_place_and_finds_it_its_own_again(store: CloudStore, tmp_path: Path) -> None:
    token = owner.claim(TO, "one", None)
    owner.write(tmp_path, token)
    assert owner.claim(TO, "one", owner.read(tmp_path)) == token
    for run in ("two", "one"):  # a run of the same name on another machine is another run
        with pytest.raises(SettingsError, match=r"publish.to = s3://bucket/published: run 'one' of .* publishes there; choose"):
            owner.claim(TO, run, None)
    assert token not in str(store.head("published/owner.json"))


def test_a_run_that_cannot_be_begun_gives_its_place_back(store: CloudStore, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "one", "", None, run_settings(overrides={"publish.to": TO}))
    with pytest.raises(OSError, match="full"), owner.claimed(directory):
        raise OSError("the disk is full")
    with owner.claimed(directory):
        pass
    with pytest.raises(KeyboardInterrupt), owner.claimed(directory):  # it has begun by now
        raise KeyboardInterrupt
    assert owner.claim(TO, "one", owner.read(tmp_path)) == owner.read(tmp_path)
    with owner.claimed(RunDirectory(tmp_path / "other", "other", "", None, run_settings())):
        pass
    assert not (tmp_path / "other").exists()


def test_a_place_that_cannot_be_written_is_said_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(DyingStore):
        def put(self, key: str, data: bytes, *, create: bool = False) -> None:
            raise ObjectStoreError(f"s3://bucket/{key}: refused (status 403)")

    use(monkeypatch, ReadOnly(memory_store()), owner)
    with pytest.raises(ObjectStoreError, match=r"publish.to = s3://bucket/published: cannot be written: .*refused"):
        owner.claim(TO, "one", None)


def test_the_last_few_versions_and_the_final_weights_stay(store: CloudStore, tmp_path: Path) -> None:
    owner.claim(TO, "one", None)
    for number in (24, 48, 72, "final", 120):
        send(folder(tmp_path, number), keep=2)
    assert sorted(each.key for each in store.list("published")) == [
        "published/00000072/config.json",
        "published/00000072/model.safetensors",
        "published/00000120/config.json",
        "published/00000120/model.safetensors",
        "published/final/config.json",
        "published/final/model.safetensors",
        "published/latest.json",
        "published/owner.json",
    ]
    assert json.loads(read(store, "latest.json"))["folder"] == "00000120"


def test_only_folders_that_the_run_has_published_are_dropped(store: CloudStore, tmp_path: Path) -> None:
    others = ["published/1/manifest.json", "published/2023/thesis.txt", "published/20260101/weights", "published/000000240/x"]
    for key in others:
        store.put(key, b"not the publisher's")
    for number in (24, 48, 72):
        send(folder(tmp_path, number), keep=1)
    assert json.loads(read(store, "latest.json"))["folders"] == ["00000072"]
    weights = ["published/00000072/config.json", "published/00000072/model.safetensors"]
    assert sorted(each.key for each in store.list("published")) == sorted([*others, *weights, "published/latest.json"])


@pytest.mark.parametrize("after", [False, True])
def test_the_latest_weights_are_whole_whenever_a_publisher_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    made = [folder(tmp_path, number) for number in (24, 48)]
    whole = DyingStore(memory_store())
    use(monkeypatch, whole, publisher)
    send(made[0], keep=1)
    for number in range(1, len(whole.requests) + 2):
        inner = memory_store()
        use(monkeypatch, inner, publisher)
        send(made[0], keep=1)
        use(monkeypatch, DyingStore(inner, number, after=after), publisher)
        with pytest.raises(Killed):
            send(made[1], keep=1)
        latest = json.loads(read(inner, "latest.json"))["folder"]
        assert read(inner, f"{latest}/model.safetensors") == f"weights {int(latest)}".encode()
        assert read(inner, f"{latest}/config.json") == b"{}"


def test_a_run_that_publishes_nothing_is_what_it_was_and_one_that_does_trains_the_same() -> None:
    plain, publishing = run_settings(), run_settings(overrides={"publish.to": TO})
    assert "publish" not in plain.model_dump()
    assert publishing.digest() == plain.digest()
    assert publishing.canonical() == plain.canonical()  # what members read, of whatever version they are
    assert RunSettings.model_validate(publishing.model_dump()) == publishing


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("/disk/folder", "expected a place such as s3://"),
        ("s4://bucket", r"did you mean s3://\?"),
        ("https://host/folder", "a web server takes no files"),
        ("s3://key:hidden@bucket/folder", "has user information"),
    ],
)
def test_what_is_no_place_is_refused_as_a_setting(to: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as error:
        run_settings(overrides={"publish.to": to})
    assert "hidden" not in str(error.value)


class Course:
    """A run's log as a publisher looks at it: at each look the versions of two fragments, and whether they are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int, bool]]) -> None:
        self.looks, self.written = iter(looks), list[Versions]()
        monkeypatch.setattr(publisher, "read_chains", self.read)
        monkeypatch.setattr(export, "export_versions", self.write)
        monkeypatch.setattr(publisher, "LOOK_S", 0.0)
        monkeypatch.setattr(publisher, "RETRY_S", 0.0)
        self.log = SimpleNamespace(run=SimpleNamespace(name="one", identity=b"\0" * 8), log=None)

    async def read(self, log: object) -> list[SimpleNamespace]:
        one, other, closed = next(self.looks)
        return [SimpleNamespace(version=version, closed=closed) for version in (one, other)]

    async def write(self, seen: object, draft: Path, asked: object, versions: Versions, ask_task: object) -> list[int]:
        self.written.append(versions)
        await asyncio.to_thread(draft.write_text, f"weights of {versions}")
        return [versions if isinstance(versions, int) else 9] * 2


def publishing(path: Path) -> publisher.Publisher:
    settings = run_settings(overrides={"publish.to": TO, "publish.every_versions": 4, "publish.keep": 1})
    return publisher.Publisher(RunDirectory(path, "one", "", None, settings), settings.publish, observe.get_logger())


def test_weights_are_published_when_all_fragments_have_them_and_at_the_end(
    store: CloudStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(monkeypatch, [(0, 0, False), (4, 3, False), (5, 4, False), (6, 6, False), (13, 12, False), (14, 14, True)])
    asyncio.run(publishing(tmp_path)._follow(course.log))  # type: ignore[arg-type]
    assert course.written == [4, 12, None]
    assert sorted(each.key for each in store.list("published")) == [
        "published/00000012/model.safetensors",
        "published/final/model.safetensors",
        "published/latest.json",
    ]
    assert json.loads(read(store, "latest.json"))["folder"] == "final"
    assert not [*(tmp_path / publisher.DRAFTS).iterdir()]


def test_a_store_that_refuses_is_said_once_and_the_newest_weights_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner, refusals = memory_store(), iter([True, True, True, False, False, False])

    class Expired(DyingStore):
        def send(self, files: Sequence[tuple[str, Path]]) -> None:
            if next(refusals):
                raise ObjectStoreError("s3://bucket/published: the credentials have expired (status 400, ExpiredToken)")
            super().send(files)

    use(monkeypatch, Expired(inner), publisher)
    said, own = list[str](), publishing(tmp_path)
    own._failing = Complaint(SimpleNamespace(warning=lambda event, **values: said.append(event)))
    course = Course(monkeypatch, [(4, 4, False), (8, 8, False), (9, 9, False), (9, 9, False), (9, 9, True)])
    failing, tell = list[dict[str, str]](), own._tell

    def tell_and_look(**values: object) -> None:
        tell(**values)
        failing.append(publisher.failures(tmp_path, "p"))

    monkeypatch.setattr(own, "_tell", tell_and_look)
    own._pause_s = 0.0
    asyncio.run(own._follow(course.log))  # type: ignore[arg-type]
    assert course.written == [4, 8, 8, 8, None]
    assert said == ["publishing_failed"]
    reason = "s3://bucket/published: the credentials have expired (status 400, ExpiredToken)"
    assert failing == [{"p": reason}] * 3 + [{}, {}]


def test_final_weights_that_cannot_be_published_end_with_the_command_that_exports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(DyingStore):
        def send(self, files: Sequence[tuple[str, Path]]) -> None:
            raise ObjectStoreError("s3://bucket/published: refused")

    use(monkeypatch, Refusing(memory_store()), publisher)
    course, own = Course(monkeypatch, [(4, 4, True)] * 3), publishing(tmp_path)
    monkeypatch.setattr(publisher, "END_S", -1.0)
    with pytest.raises(ObjectStoreError, match=f"refused; .*: diloco export {tmp_path} s3://bucket/published/final$"):
        asyncio.run(own._follow(course.log))  # type: ignore[arg-type]
