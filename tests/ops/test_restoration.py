"""What ``diloco restore`` refuses before it connects to any server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from diloco.errors import RunError, SettingsError
from diloco.settings.presets import run_settings
from diloco_ops.checkpoints import manifest
from diloco_ops.checkpoints.manifest import FragmentCut, Manifest, SavedFile, SavedStream
from diloco_ops.checkpoints.restoration import restore_to
from diloco_ops.reading.region_logs import urls_of

REGIONS = ("ap", "eu", "us")


def checkpoint(path: Path, version: int = manifest.OF_REGIONS) -> Path:
    path.mkdir()
    saved: list[SavedStream] = []
    for name, stream in (("log", "DILOCO_run_LOG"), ("bucket", "KV_DILOCO_run")):
        content = name.encode()
        (path / f"{name}.snapshot").write_bytes(content)
        file = SavedFile(f"{name}.snapshot", len(content), blake3(content).hexdigest())
        saved.append(SavedStream(file, {"name": stream}, {"last_seq": 9}))
    settings = run_settings("decoupled", {"regions.names": list(REGIONS)}).model_dump()
    log, bucket = saved
    unsigned = Manifest(
        manifest.FORMAT, version, "0.9.0", "run", settings, None, "", 0.0, [FragmentCut(1, 2, "")], log, bucket, {}, ""
    )
    signed = msgspec.structs.replace(unsigned, hash=unsigned.right_hash())
    (path / manifest.MANIFEST).write_bytes(msgspec.json.encode(signed))
    return path


def restored(path: Path, *bulk: str, overrides: dict[str, object] | None = None) -> None:
    asyncio.run(restore_to(path, "nats://127.0.0.1:1", bulk, None, overrides or {}, lambda _: None))


def test_servers_are_named_by_region() -> None:
    assert urls_of(["us=tls://us:4222", "ap=tls://ap:4222"], ["us", "ap"]) == {
        "ap": "tls://ap:4222",
        "us": "tls://us:4222",
    }
    assert urls_of([], []) == {}


@pytest.mark.parametrize(
    ("bulk", "message"),
    [
        (["tls://us:4222"], r"--bulk tls://us:4222: expected REGION=URL, such as us="),
        (["us="], r"--bulk us=: expected REGION=URL"),
        (["usa=tls://us:4222"], r"no region 'usa' of this run \(did you mean 'us'\?\); its regions are ap, eu, us"),
        (["us=tls://us:4222", "us=tls://us:4223"], r"region 'us' already has tls://us:4222"),
        (["us=tls://us:4222"], r"the servers of ap, eu are missing: give each with --bulk REGION=URL; .*regions\.names"),
    ],
)
def test_servers_that_are_missing_or_unknown_are_refused(tmp_path: Path, bulk: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        restored(checkpoint(tmp_path / "1"), *bulk)


def test_a_run_without_regions_has_one_server() -> None:
    with pytest.raises(SettingsError, match=r"it has no regions, so --nats is enough"):
        urls_of(["us=tls://us:4222"], [])


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"made by version 0\.9\.0 of diloco \(format 6\).*with the version that made it"):
        restored(checkpoint(tmp_path / "1", version=6))


def test_a_checkpoint_that_was_copied_by_half_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "1")
    (path / "log.snapshot").write_bytes(b"lo")
    with pytest.raises(RunError, match=r"log\.snapshot: has 2 bytes, the checkpoint's manifest says 3"):
        restored(path)
    (path / "log.snapshot").unlink()
    with pytest.raises(RunError, match=r"log\.snapshot: missing"):
        restored(path)
    (path / manifest.MANIFEST).unlink()
    with pytest.raises(RunError, match=r"is not a checkpoint, or is incomplete"):
        restored(path)


def test_settings_that_make_the_run_another_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot go on with another setting: round\.steps"):
        restored(checkpoint(tmp_path / "1"), overrides={"round.steps": 12})
    with pytest.raises(SettingsError, match=r"diloco restore: .*regions\.name"):
        restored(checkpoint(tmp_path / "2"), overrides={"regions.name": ["a", "b"]})
