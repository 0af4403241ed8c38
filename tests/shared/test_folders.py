"""Folders of an account: with a home directory, without one, and with one that cannot be written."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

import diloco.core
from diloco.core.tensors import compiled, kernels
from diloco.errors import SettingsError
from diloco.process import kernel_cache
from diloco.settings import folders
from diloco.settings.loading import load_service
from diloco.settings.service import LearnerSettings, SyncerSettings

INSTALLED = Path(diloco.core.__file__).parent / "__pycache__"
DEFAULT = Path("~/.cache/diloco/jax")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory; nothing else of the environment concerns folders."""
    for name in [name for name in os.environ if name.startswith(("DILOCO_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an account of the user id."""

    def unknown(user_id: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_the_default_is_in_the_home_directory(home: Path) -> None:
    assert LearnerSettings(name="ann").cache_dir == folders.cache_dir() == DEFAULT
    assert folders.made(DEFAULT / "data") == home / ".cache/diloco/jax/data"
    assert (home / ".cache/diloco/jax/data").is_dir()
    assert folders.user_cache() == home / ".cache"


def test_the_environment_names_another_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert LearnerSettings(name="ann").cache_dir == folders.cache_dir() == Path("elsewhere")
    assert folders.user_cache() == Path("/caches")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folders.user_cache() == home / ".cache"


@pytest.mark.usefixtures("no_home")
def test_without_a_home_settings_are_read_and_only_a_use_of_the_default_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_NAME", "ann")
    load_service(SyncerSettings, None)
    settings = load_service(LearnerSettings, None)
    assert folders.user_cache() is None
    with pytest.raises(SettingsError, match=r"^cache_dir \(DILOCO_CACHE_DIR\) = ~/.cache/diloco/jax: no home directory"):
        folders.made(settings.cache_dir)
    assert folders.made(tmp_path / "cache") == tmp_path / "cache"
    with pytest.raises(SettingsError, match=r"^the file = ~other/x: no home directory is known for ~other \(there is no such"):
        folders.expanded(Path("~other/x"), "the file")


def test_a_home_that_is_missing_or_read_only_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/missing")
    with pytest.raises(SettingsError, match=r"^cache_dir: /proc/missing/.cache/diloco/jax cannot be written: No such file"):
        folders.made(DEFAULT)
    monkeypatch.setenv("HOME", str(home))

    def read_only(dir: Path) -> NoReturn:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(SettingsError, match=r"cannot be written: Read-only file system; set cache_dir \(DILOCO_CACHE_DIR\) to"):
        folders.made(DEFAULT)


def test_a_folder_can_be_written_or_made_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert folders.can_write(tmp_path)
    assert folders.can_write(tmp_path / "a/b")
    assert not folders.can_write(tmp_path / "file/a")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert not folders.can_write(tmp_path / "a/b")


def test_no_temporary_folder_is_an_error_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/missing")
    with pytest.raises(SettingsError, match=r"^TMPDIR: no temporary file can be made: No such file or directory; set TMPDIR"):
        folders.temporary()


@pytest.mark.parametrize(
    ("writable", "named", "chosen"),
    [
        (["/home/.cache"], None, None),
        ([INSTALLED], None, None),
        (["/named"], "/named", "/named"),
        (["/cache", "/state"], None, "/cache/kernels"),
        (["/state"], None, "/state/kernels"),
        (["/state"], "/named", "/state/kernels"),
        ([], None, None),
        ([], "/named", "/named"),
    ],
)
def test_kernels_are_kept_where_numba_finds_a_folder_else_in_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, writable: list[Any], named: str | None, chosen: str | None
) -> None:
    places = [Path(place) for place in writable]
    monkeypatch.setattr(folders, "can_write", lambda folder: any(folder.is_relative_to(place) for place in places))
    monkeypatch.setattr(os, "environ", {"HOME": "/home"} | ({} if named is None else {"NUMBA_CACHE_DIR": named}))
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    kernel_cache.choose(DEFAULT, Path("/cache"), Path("/state"))
    assert os.environ.get("NUMBA_CACHE_DIR") == chosen


@pytest.mark.usefixtures("no_home")
def test_without_a_home_kernels_are_kept_below_a_folder_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "can_write", lambda folder: folder.is_relative_to(tmp_path))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.chdir(tmp_path)
    kernel_cache.choose(DEFAULT, Path("state"))
    assert os.environ == {"NUMBA_CACHE_DIR": str(tmp_path / "state" / "kernels")}


def test_a_kernel_that_cannot_be_kept_is_compiled_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def full(self: Any, key: Any, data: Any) -> NoReturn:
        tried.append(self._index_name)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)

    def double(value: Any) -> Any:
        return value + value

    assert kernels._kernel("float64(float64)")(double)(1.5) == 3.0
    assert len(tried) == 1


def test_compilation_is_announced_once_and_loading_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_kernels.py").write_text(
        "from diloco.core.tensors.kernels import _kernel\n\n\n"
        "@_kernel('float64(float64)')\ndef double(value):\n    return value + value\n\n\n"
        "@_kernel('float64(float64)')\ndef square(value):\n    return value * value\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    announced: list[None] = []
    for _ in range(2):  # compiled and kept; loaded
        monkeypatch.delitem(sys.modules, "two_kernels", raising=False)
        with compiled.announced_compilation(lambda: announced.append(None)):
            module = importlib.import_module("two_kernels")
        assert module.square(module.double(1.5)) == 9.0
        assert len(announced) == 1
