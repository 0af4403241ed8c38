"""Settings: complete presets, errors that name the setting and the nearest name, services from files and environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import SettingsError
from diloco.settings.loading import load_service, parse_assignments
from diloco.settings.presets import PRESETS, run_settings
from diloco.settings.run import RunSettings
from diloco.settings.service import CoordinatorSettings, LearnerSettings, SyncerSettings
from diloco.settings.validation import all_names, parse


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("DILOCO_"):
            monkeypatch.delenv(variable)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_complete_set(preset: str) -> None:
    settings = run_settings(preset)
    assert settings.preset == preset
    # what is stored with a run is all of it, and reads back as the same
    again = parse(RunSettings, settings.model_dump(mode="json"), "test")
    assert again == settings
    assert again.digest() == settings.digest()


def test_presets_are_the_published_methods() -> None:
    published = run_settings("published")
    assert (published.fragments.count, published.round.steps, published.round.quorum) == (24, 24, 1)
    assert (published.round.overlap_steps, published.merge.method, published.merge.weights) == (2, "rda", "quality")
    assert (published.carry.overlap, published.apply.alpha) == (False, 0)
    assert (published.codec.offer_bits, published.merge.against) == (16, "current")
    # the lineage's for one learner, whose norm RDA keeps; of an average of several, as in DiLoCo, it is higher
    assert (published.outer.learning_rate, published.outer.momentum) == (0.4, 0.9)
    streaming = run_settings("streaming")
    assert (streaming.round.quorum, streaming.merge.method, streaming.apply.alpha) == ("all", "average", 0.5)
    assert (streaming.round.steps, streaming.round.overlap_steps, streaming.apply.at) == (100, 1, "overlap")
    assert (streaming.fragments.strategy, streaming.fragments.layers, streaming.fragments.count) == ("layers", 3, 1 + 108 // 3)
    diloco = run_settings("diloco")
    assert diloco.round.steps == 500
    assert (diloco.fragments.count, diloco.round.learners_wait, diloco.codec.offer_bits) == (1, True, 32)


@pytest.mark.parametrize(
    ("quorum", "live", "needed"), [(1, 4, 1), (3, 4, 3), (3, 1, 3), ("all", 4, 4), ("all", 1, 1), ("all", 0, 1)]
)
def test_the_quorum(quorum: object, live: int, needed: int) -> None:
    assert run_settings(overrides={"round.quorum": quorum}).quorum(live) == needed


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        SettingsError, match=r"no preset 'decouple' \(did you mean 'decoupled'\?\); the presets are decoupled, "
    ):
        run_settings("decouple")
    with pytest.raises(SettingsError, match="no preset 'zzz'; the presets are"):
        run_settings("zzz")


def test_a_preset_is_not_a_setting_among_others() -> None:
    # it would give its name to a run without its values
    with pytest.raises(SettingsError, match="preset"):
        run_settings("decoupled", {"preset": "published"})


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"round.step": 12}, r"no setting 'round.step' \(did you mean 'round.steps'\?\)"),
        ({"round": {"stepz": 12}}, r"no setting 'round.stepz' \(did you mean 'round.steps'\?\)"),
        ({"steps": 3}, r"no setting 'steps' \(did you mean 'round.steps'\?\)"),
        ({"learnerz": 3}, r"no setting 'learnerz' \(did you mean 'learners'\?\)"),
        ({"qqqqqq": 3}, "no setting 'qqqqqq'$"),
        ({"seed.x": 1}, "seed = "),
        ({"round": 3}, "round = 3"),
        ({"round.steps": 0}, "round.steps = 0: Input should be greater than or equal to 1"),
        ({"round.steps": "x"}, "round.steps = 'x': Input should be a valid integer"),
        ({"round.steps": 1.5}, "round.steps = 1.5"),
        ({"round.grace_factor": 1}, "round.grace_factor = 1: Input should be less than 1"),
        ({"round.quorum": "some"}, "round.quorum = 'some': .* 'all'"),
        ({"codec.offer_bits": 5}, "codec.offer_bits = 5: Input should be 1, 2, 4, 8, 16 or 32"),
        ({"merge.method": "mean"}, "merge.method = 'mean': Input should be 'rda' or 'average'"),
        ({"carry.overlap": 0.5}, "carry.overlap = 0.5: Input should be a valid boolean"),
        ({"task.name": "a b"}, "task.name = 'a b'"),
        ({"task.dtype": "float16"}, "task.dtype = 'float16': Input should be 'float32' or 'bfloat16'"),
        ({"outer.learning_rate": float("nan")}, "outer.learning_rate = nan"),
        ({"inner.weight_decay": float("inf")}, "inner.weight_decay = inf"),
        ({"round.overlap_steps": float("inf")}, "round.overlap_steps = inf"),
        ({"round.steps": 0, "seed": -1}, "seed = -1: .*; round.steps = 0"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=f"^here: .*{expected}"):
        run_settings("decoupled", overrides, "here")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"round.quorum": 5}, "round.quorum = 5 must be between 1 and learners = 4"),
        ({"round.quorum": 0}, "round.quorum = 0 must be between 1 and learners = 4"),
        ({"round.quorum": 3, "learners": 2}, "round.quorum = 3 must be between 1 and learners = 2"),
        ({"shards": 25}, "shards = 25 is more than fragments.count = 24"),
        (
            {"fragments.layers": 3},
            "fragments.layers = 3 requires fragments.strategy = layers, but the strategy is balanced: set fragments.strategy = "
            "layers, or fragments.layers = 1",
        ),
        ({"task.width": 97}, "width 97 must be an even multiple of heads 4"),
        (
            {"regions.merge": True},
            "regions.merge: the run has no regions: list them in regions.names, or do not set regions.merge",
        ),
        (
            {"regions": {"merge": True, "names": ["us", "eu"]}, "merge.against": "current"},
            "regions.merge = true with merge.against = current: an owner can take only single offers against its current "
            "value, and a region sends merged ones; set merge.against = base",
        ),
        ({"task.width": 12}, "width 12 must be an even multiple of heads 4"),  # three a head: not even
    ],
)
def test_settings_that_contradict_each_other(overrides: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=f"^settings: {expected}$"):
        run_settings("decoupled", overrides)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("round.steps", 2, 1),
        ("round.learners_wait", False, True),
        ("carry.overlap", True, False),
        ("apply.alpha", 0.5, 0.0),
        ("outer.learning_rate", 0.7, 1.0),
        ("outer.momentum", 0.5, 0.0),
    ],
)
def test_an_outer_adamw_takes_gradients_only(name: str, value: object, needed: object) -> None:
    expected = f"outer.optimizer = adamw is for gradients \\(preset data-parallel\\): {name} = {value} must be {needed}"
    with pytest.raises(SettingsError, match=f"^settings: {expected}$"):
        run_settings("data-parallel", {name: value})


def test_all_that_an_outer_adamw_lacks_is_named() -> None:
    with pytest.raises(
        SettingsError, match=r"round.steps = 24 .*round.learners_wait = .*carry.overlap = True .*outer.learning_rate = 0.5"
    ):
        run_settings("decoupled", {"outer.optimizer": "adamw"})
    assert not run_settings("diloco").round.lockstep
    assert run_settings("data-parallel").round.lockstep


@pytest.mark.parametrize("name", all_names())
def test_every_setting_can_be_set_by_its_dotted_name(name: str) -> None:
    if name == "preset":
        return
    settings = run_settings()
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    assert run_settings(overrides={name: value}) == settings


def test_overrides_are_dotted_or_nested_and_leave_the_rest_of_a_preset() -> None:
    dotted = run_settings("published", {"merge.method": "average", "seed": 3})
    nested = run_settings("published", {"merge": {"method": "average"}, "seed": 3})
    assert dotted == nested
    assert (dotted.merge.method, dotted.merge.against, dotted.seed) == ("average", "current", 3)
    assert run_settings("published").merge.method == "rda"


def test_equal_settings_have_equal_digests_and_others_do_not() -> None:
    first = run_settings(overrides={"round.steps": 12, "outer.momentum": 0})
    second = run_settings(overrides={"outer": {"momentum": 0.0}, "round.steps": "12"})
    assert first.digest() == second.digest()
    assert len(first.digest()) == 32
    changed: list[dict[str, Any]] = [
        {"seed": 1},
        {"round.steps": 13},
        {"carry.overlap": False},
        {"merge.method": "average"},
        {"merge.embedding": "rda"},
        {"round.quorum": "all"},
    ]
    digests = {run_settings(overrides={"round.steps": 12} | change).digest() for change in changed}
    assert len(digests | {first.digest()}) == 7
    assert run_settings("published").digest() != run_settings("decoupled").digest()


def test_a_setting_that_the_first_runs_did_not_have_is_part_of_the_identity_where_it_is_set() -> None:
    later = run_settings(overrides={"task.dtype": "bfloat16"})
    assert b'"dtype":"bfloat16"' in later.canonical()
    assert b"dtype" not in RunSettings().canonical()  # so a run of before has the identity that it was made with
    assert b'"embedding"' not in RunSettings().canonical()
    assert later.digest() != RunSettings().digest() == run_settings(overrides={"task.dtype": "float32"}).digest()
    for settings in (later, RunSettings()):
        assert parse(RunSettings, settings.model_dump(), "settings") == settings


def test_assignments() -> None:
    items = ["round.steps=12", "outer.momentum=0.25", "round.learners_wait=true", "round.quorum=all", ' task.name = "gpt" ']
    values = parse_assignments(items)
    assert values == {
        "round.steps": 12,
        "outer.momentum": 0.25,
        "round.learners_wait": True,
        "round.quorum": "all",
        "task.name": "gpt",
    }
    settings = run_settings(overrides=values)
    assert (settings.round.steps, settings.round.quorum, settings.round.learners_wait) == (12, "all", True)
    assert parse_assignments(["a=b=c", "d=", "e=1", "e=2"]) == {"a": "b=c", "d": "", "e": 2}
    deep, long = "[" * 100_000, "1" + "0" * 5000
    assert parse_assignments([f"a={deep}", f"b={long}"]) == {"a": deep, "b": long}


@pytest.mark.parametrize("item", ["round.steps", "=3", " =3", ""])
def test_an_assignment_without_a_key_or_a_value_is_refused(item: str) -> None:
    with pytest.raises(SettingsError, match=r"--set .*: expected KEY=VALUE"):
        parse_assignments([item])


def config(path: Path, text: str) -> Path:
    file = path / "service.toml"
    file.write_text(text)
    return file


def test_a_service_reads_its_file_and_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path, 'name = "ann"\nrun = "r"\nshare = 3\nslow = 2\nlog_level = "debug"\n')
    monkeypatch.setenv("DILOCO_RUN", "other")
    monkeypatch.setenv("DILOCO_SHARE", "5")
    settings = load_service(LearnerSettings, file)
    assert (settings.name, settings.run, settings.share, settings.slow) == ("ann", "other", 5, 2)
    assert (settings.log_level, settings.role, settings.data) == ("debug", "learner", None)


def test_a_service_may_have_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "syncer-1")
    settings = load_service(SyncerSettings, None)
    assert (settings.name, settings.run) == ("syncer-1", "run")
    assert settings.bulk_url == settings.nats_url == "nats://127.0.0.1:4222"
    monkeypatch.setenv("DILOCO_NATS_BULK_URL", "nats://far:1")
    assert load_service(SyncerSettings, None).bulk_url == "nats://far:1"


def test_a_service_without_a_name_is_told_how_to_give_one() -> None:
    with pytest.raises(SettingsError) as caught:
        load_service(SyncerSettings, None)
    assert str(caught.value) == "environment: name is missing: give it as DILOCO_NAME, or as name in the TOML file of --config"


def test_the_coordinator_has_the_run_s_settings(tmp_path: Path) -> None:
    settings = load_service(CoordinatorSettings, config(tmp_path, 'name = "c"\n[settings.round]\nsteps = 7\n'))
    assert settings.settings == run_settings(overrides={"round.steps": 7})
    with pytest.raises(SettingsError, match=r"no setting 'settings.round.step' .*settings.round.steps"):
        load_service(CoordinatorSettings, config(tmp_path, 'name = "c"\n[settings.round]\nstep = 7\n'))


def test_a_preset_in_the_coordinator_s_file_brings_its_values(tmp_path: Path) -> None:
    text = 'name = "c"\n[settings]\npreset = "published"\nlearners = 3\n[settings.outer]\nmomentum = 0.8\n'
    settings = load_service(CoordinatorSettings, config(tmp_path, text)).settings
    assert settings == run_settings("published", {"learners": 3, "outer.momentum": 0.8})
    assert settings.carry.overlap is False  # the preset's, not the default's
    # as `diloco up` writes it: all values, under the name of the preset that they began with
    changed = run_settings("published", {"carry.overlap": True})
    whole = CoordinatorSettings.model_validate({"name": "c", "settings": changed.model_dump()})
    assert whole.settings == changed
    with pytest.raises(SettingsError, match=r"no preset 'publishd' .did you mean 'published'"):
        load_service(CoordinatorSettings, config(tmp_path, 'name = "c"\n[settings]\npreset = "publishd"\n'))
    with pytest.raises(SettingsError, match=r"no setting 'round.step'"):
        load_service(CoordinatorSettings, config(tmp_path, 'name = "c"\n[settings]\npreset = "diloco"\nround.step = 7\n'))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name = ", "not TOML"),
        ("name = " + "[" * 100_000, "not TOML: maximum recursion"),
        ("name = 1" + "0" * 5000, "not TOML: Exceeds the limit"),
        ("name = 0x" + "f" * 5000, "name = a value of type int that is too large to show"),
        ('name = "ann"\nshares = 1', r"no setting 'shares' \(did you mean 'share'\?\)"),
        ('name = "ann"\nshare = -1', "share = -1: Input should be greater than or equal to 0"),
        ('name = "Ann"', "name = 'Ann': String should match pattern"),
        ('name = "ann\\n"', "name = 'ann.n': String should match pattern"),
        ('name = "a.b"', "name = 'a.b': String should match pattern"),
        ("share = 1", "name"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(tmp_path: Path, text: str, expected: str) -> None:
    file = config(tmp_path, text)
    with pytest.raises(SettingsError, match=f"service.toml: .*{expected}"):
        load_service(LearnerSettings, file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing.toml: cannot be read: No such file"):
        load_service(LearnerSettings, tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"binary.toml: not TOML"):
        load_service(LearnerSettings, tmp_path / "binary.toml")


def test_an_unknown_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "ann")
    monkeypatch.setenv("DILOCO_SHRAE", "1")
    with pytest.raises(SettingsError, match=r"environment: no setting DILOCO_SHRAE \(did you mean 'DILOCO_SHARE'\?\)"):
        load_service(LearnerSettings, None)


def test_variables_of_tests_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "ann")
    monkeypatch.setenv("DILOCO_RUN", "run")
    monkeypatch.setenv("DILOCO_TEST_PACE", "2.5")
    assert load_service(LearnerSettings, None).name == "ann"


def test_a_variable_of_another_service_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "ann")
    monkeypatch.setenv("DILOCO_SHARD", "1")
    with pytest.raises(SettingsError, match="no setting DILOCO_SHARD"):
        load_service(LearnerSettings, None)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("DILOCO_LOG_LEVEL", "loud", "log_level = 'loud'"),
        ("DILOCO_SETTINGS", "not json", "settings"),
        ("DILOCO_SETTINGS", '{"round": {"steps": 0}}', "settings.round.steps = 0"),
    ],
)
def test_a_wrong_value_in_the_environment(variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "c")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^environment: .*{expected}"):
        load_service(CoordinatorSettings, None)


def test_the_run_before_is_part_of_the_identity_and_of_no_other_runs_settings() -> None:
    plain = run_settings("decoupled", {})
    before = {"run": "old", "identity": "0123456789abcdef", "tokens": 5, "batches": [3]}
    continued = run_settings("decoupled", {"continues": before})
    assert b"continues" not in plain.canonical()  # as members know them that do not have this setting
    assert plain.requires == []
    assert run_settings("decoupled", {"codec.offer_bits": 1, "codec.record_bits": 2}).requires == ["one_bit", "two_bits"]
    assert continued.requires == ["continues"]
    assert continued.digest() != plain.digest()
    assert (continued.tokens_before, continued.first_batch(0), continued.first_batch(1)) == (5, 3, 0)
    assert run_settings("decoupled", continued.model_dump(exclude={"preset"})) == continued
    with pytest.raises(SettingsError, match=r"continues\.identity = 'x'"):
        run_settings("decoupled", {"continues": before | {"identity": "x"}})
