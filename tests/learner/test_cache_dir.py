"""``cache_dir`` where it cannot be written: what a learner refuses, and what commands do without."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from diloco.errors import SettingsError
from diloco.settings.run import RunSettings, TaskSettings
from diloco_learner.check import PlannedRun, check
from diloco_learner.jax import programs
from diloco_learner.mix import mix
from diloco_learner.mix.mix import Mix

REFUSED = r"^cache_dir: .*file/cache.* cannot be written: Not a directory; set cache_dir \(DILOCO_CACHE_DIR\)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache_dir that cannot be made, as the environment states it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def never() -> bool:
    return False


def test_a_learner_refuses_a_folder_for_its_programs(cache: Path) -> None:
    with pytest.raises(SettingsError, match=REFUSED):
        programs.keep(cache)
    with pytest.raises(SettingsError, match=REFUSED), programs.compiled_once(cache, "model", never):
        pass


def test_a_mark_of_another_user_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.compiled").mkdir()  # as little a file that can be written as another user's
    with (
        pytest.raises(SettingsError, match=r"^cache_dir: .*model.compiled cannot be written: Is a directory; set cache_dir"),
        programs.compiled_once(tmp_path, "model", never),
    ):
        pass


def test_a_command_that_needs_no_programs_goes_on(cache: Path) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    programs.keep_if_possible(cache)
    assert jax.config.values["jax_compilation_cache_dir"] == before


@pytest.mark.usefixtures("cache")
def test_a_run_is_refused_before_it_begins() -> None:
    with pytest.raises(SettingsError, match=REFUSED):
        check(PlannedRun(RunSettings()))


@pytest.mark.usefixtures("cache")
def test_tokens_of_a_mix_need_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "_check_installed", lambda said: None)
    (tmp_path / "mix.toml").write_text('[sources.one]\nkind = "text"\npath = "~nosuchuser/text"\n')
    with pytest.raises(SettingsError, match=REFUSED):
        Mix(TaskSettings(), str(tmp_path / "mix.toml"))
    with pytest.raises(SettingsError, match=r"mix.toml: source 'one': path = ~nosuchuser/text: no home directory is known for"):
        Mix(TaskSettings(), str(tmp_path / "mix.toml"), tmp_path / "elsewhere")
