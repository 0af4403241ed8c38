"""Arrays beside parameters and batches: frozen tensors, constants, and a state, of which some is merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.core.tensors.fragments import FragmentMap, check_same_map, unpack_map
from diloco.errors import AdmissionError, FormatError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.jax.fixed import check_finite
from diloco_learner.jax.island import Island
from diloco_learner.task import Aux, check_members
from diloco_learner.tensors import Tensor

SETTINGS: RunSettings = run_settings(
    overrides={"shards": 1, "fragments.count": 1, "inner.optimizer": "adamw", "inner.clip_norm": 1e6}
)
BASE = np.arange(6, dtype=np.float32).reshape(2, 3)


class Adapted:
    """A frozen base and frozen indices in the parameters, a constant, and a count of steps with a mean of what was seen."""

    tokens_per_batch = 2
    base, scale = BASE, np.float32(2)

    def init(self, key: jax.Array) -> Any:
        return {"base": jnp.asarray(self.base), "index": jnp.array([2, 0, 1]), "own": jnp.ones(3)}

    def init_state(self, key: jax.Array) -> Any:
        return {"steps": jnp.int32(0), "mean": jnp.zeros(3)}

    def merge_state(self, path: str) -> str:
        return "local"

    def constants(self) -> Any:
        return {"scale": self.scale}

    def loss(self, params: Any, batch: Any, *, state: Any, constants: Any, train: bool) -> Any:
        shown = jnp.mean(batch[:, params["index"]], 0)
        loss = jnp.sum(params["base"] @ params["own"]) * constants["scale"] + jnp.sum(params["own"] * shown)
        after = {"steps": state["steps"] + 1, "mean": (state["mean"] + shown) / 2}
        return loss, Aux({"steps": state["steps"]}, after)

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        while True:
            yield np.full((2, 3), 4, np.float32)

    def validation(self) -> Any:
        return [np.full((2, 3), 4, np.float32)]

    def tensor(self, path: str, shape: tuple[int, ...]) -> Tensor:
        return Tensor(kind="vector" if path == "own" else "frozen")


BATCH = np.array([[1, 2, 3], [3, 4, 5]], np.float32)


@pytest.mark.parametrize("apart", [False, True])
def test_a_step_moves_what_is_trained_and_the_state_and_nothing_else(apart: bool) -> None:
    island = Island(Adapted(), SETTINGS, apart=apart)
    output = island.step(BATCH, 0.0)
    assert output.wait() == 2 * BASE.sum() + 4 + 2 + 3  # the columns 2, 0 and 1 have the means 4, 2 and 3
    assert output.metric_values() == {"steps": 0}
    assert island.step(BATCH, 0.5).metric_values() == {"steps": 1}
    params, arrays = island.params(), island.state()
    np.testing.assert_array_equal(params["base"], BASE)
    assert list(params["index"]) == [2, 0, 1]
    assert not np.array_equal(params["own"], np.ones(3))
    assert arrays["state/steps"] == 2
    np.testing.assert_allclose(arrays["state/mean"], np.array([4, 2, 3]) * 0.75)
    assert {name for name in arrays if name.startswith("params/")} == {"params/own"}
    [fragment] = island.fragments().fragments
    assert [piece.path for piece in fragment.pieces] == ["own"]


def test_where_a_step_is_not_finite_the_state_stays_too() -> None:
    island = Island(Adapted(), SETTINGS)
    island.step(BATCH, 0.5).wait()
    before = island.state()
    assert np.isnan(island.step(BATCH * np.float32("nan"), 0.5).wait())
    for name, values in island.state().items():
        np.testing.assert_array_equal(values, before[name])


def test_the_state_is_in_checkpoints_and_goes_on_to_the_bit_and_begins_afresh_after_a_rehearsal() -> None:
    one, other = Island(Adapted(), SETTINGS), Island(Adapted(), SETTINGS)
    for _ in range(3):
        one.step(BATCH, 0.5).wait()
    other.load_state(one.state())
    for island in (one, other):
        island.step(2 * BATCH, 0.5).wait()
    for name, values in one.state().items():
        np.testing.assert_array_equal(values, other.state()[name])
    assert not any(name.startswith("state/") for name in one.arrays(optimizer_only=True))  # it is not lent
    one.rehearse(BATCH)
    assert one.state()["state/steps"] == 0
    island = one.twin()
    one.step(BATCH, 0.5).wait()
    assert island.state()["state/steps"] == 0


def test_validation_leaves_the_state_as_it_is() -> None:
    island = Island(Adapted(), SETTINGS)
    first, again = island.evaluation(), island.evaluation()
    assert first == again
    assert first.values == {"val/steps": 0}


def test_they_are_arguments_of_the_program_and_not_compiled_into_it() -> None:
    class Large(Adapted):
        base = np.ones((64, 3), np.float32) * np.float32(1.234567)

    island = Island(Large(), SETTINGS)
    [program] = island.trace(BATCH)
    assert "dense_resource" not in program.as_text()
    assert "1.234567" not in program.as_text()


def map_of(**members: Any) -> FragmentMap:
    return Island(type("Made", (Adapted,), members)(), SETTINGS).fragments()


def test_a_learner_with_other_values_is_not_admitted() -> None:
    there = unpack_map(map_of().pack())
    check_same_map(map_of(), there, "r")
    assert [(each.path, each.dtype, each.shape) for each in there.fixed] == [
        ("base", "float32", (2, 3)),
        ("constants/scale", "float32", ()),
        ("index", "int32", (3,)),
    ]
    with pytest.raises(AdmissionError, match=r"tensor 'base', which is not trained, differs from the founder's: .*same file"):
        check_same_map(map_of(base=BASE + 1), there, "r")
    with pytest.raises(AdmissionError, match=r"tensor 'constants/scale', which is not trained, differs"):
        check_same_map(map_of(scale=np.float32(3)), there, "r")


def test_a_map_that_is_damaged_there_is_refused() -> None:
    packed = map_of().pack()
    with pytest.raises(FormatError):
        unpack_map(packed.replace(b"\xc4\x20", b"\xc4\x1f"))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            {"merge_state": lambda self, path: "average"},
            r"state 'steps' is averaged and must be float32, but is int32: make it float32, or return 'local'.*\(.*line",
        ),
        ({"merge_state": lambda self, path: "newest"}, r"merge_state\('mean'\) is 'newest', expected 'average' or 'local' \("),
        ({"merge_state": lambda self, path: "latest"}, r"merge_state\('mean'\) is 'latest', .* depends on chance"),
        (
            {"merge_state": None, "init_state": lambda self, key: {"mean": jnp.zeros(3, jnp.bfloat16)}},
            r"state 'mean' is averaged by default and must be float32, but is bfloat16.*\(.*line",
        ),
        ({"init_state": lambda self, key: {"mean": "none"}}, r"init_state\(\) returned 'mean' as a str, expected an array"),
        ({"init_state": lambda self, key: {"key": key}}, r"returned 'key' as key<fry>, which cannot be saved.*key_data"),
        ({"constants": lambda self: {"scale": "two"}}, r"constants\(\) returned 'scale' as a str, expected an array"),
        ({"tensor": lambda self, path, shape: Tensor(kind="frozen")}, "has no parameters that are trained"),
        (
            {"tensor": lambda self, path, shape: Tensor(kind="vector")},
            r"'index' is int32.*Tensor\(kind='frozen'\) if the parameter is",
        ),
    ],
)
def test_what_cannot_be_is_named(members: Mapping[str, Any], says: str) -> None:
    kept = {name: value for name, value in members.items() if value is not None}
    made: Any = type("Made", (Adapted,), kept)
    if len(kept) < len(members):
        bare = {n: v for n, v in vars(Adapted).items() if n not in {*members, "__dict__", "__weakref__"}}
        made = type("Bare", (), bare | kept)
    with pytest.raises(SettingsError, match=says):
        Island(made(), SETTINGS).check(BATCH)


def test_values_that_are_no_numbers_are_named_with_the_line() -> None:
    with pytest.raises(SettingsError, match=r"init\(\) returned 'a/b' with NaN or infinity, expected numbers \(.*line \d+\)"):
        check_finite(Adapted().init, {"a": {"b": np.full(2, np.nan, np.float32), "c": jnp.int32(1)}})
    check_finite(Adapted().init, Adapted().init(jax.random.key(0)))


def _with(change: Callable[[Any], Any]) -> Any:
    def loss(self: Any, params: Any, batch: Any, *, state: Any, constants: Any) -> Any:
        return jnp.sum(params["own"]), change(state)

    return loss


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: Aux(), r"loss\(\) returned the state's 'mean' as nothing, expected float32\[3\], as before the step"),
        (lambda state: Aux(state=state | {"mean": jnp.zeros(4)}), r"'mean' as float32\[4\], expected float32\[3\]"),
        (lambda state: Aux(state=state | {"steps": 1.5}), r"'steps' as float32\[\], expected int32\[\]"),
        (lambda state: Aux(state=state | {"new": 1}), r"'new' as int32\[\], expected nothing"),
    ],
)
def test_a_state_that_changes_its_structure_is_named_with_the_line(change: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says + r".*\(.*test_fixed.py, line \d+\)"):
        Island(type("Made", (Adapted,), {"loss": _with(change)})(), SETTINGS).check(BATCH)


def test_a_weak_type_is_no_other_type_and_compiles_no_second_program() -> None:
    def loss(self: Any, params: Any, batch: Any, *, state: Any, constants: Any) -> Any:
        return jnp.sum(params["own"]), Aux(state={"steps": jnp.where(True, 7, 8), "mean": state["mean"] * 0})

    island = Island(type("Made", (Adapted,), {"loss": loss})(), SETTINGS)
    for _ in range(3):
        island.step(BATCH, 0.5).wait()
    assert island._step._cache_size() == 1


def test_weights_are_one_for_each_row_and_rows_are_what_the_task_says() -> None:
    class Weighed(Adapted):
        rows_per_batch = 2

        def loss(self, params: Any, batch: Any, *, weights: Any, constants: Any, state: Any) -> Any:  # type: ignore[override]
            assert weights.shape == (2,)
            assert weights.dtype == jnp.float32
            return jnp.sum(params["own"]) * jnp.sum(weights), Aux(state=state)

    assert Island(Weighed(), SETTINGS).step({"x": BATCH, "wide": np.zeros((5, 7))}, 0.0).wait() == 6
    with pytest.raises(SettingsError, match="rows_per_batch = 0, expected a whole number above 0, or None"):
        check_members(type("Made", (Weighed,), {"rows_per_batch": 0})(), "task")


def test_evaluate_and_sample_are_given_what_they_name() -> None:
    class Told(Adapted):
        def evaluate(self, params: Any, *, state: Any, constants: Any) -> Any:
            return {"told": state["steps"] + constants["scale"]}

        def sample(self, params: Any, key: Any, count: int, *, constants: Any) -> str:
            return f"{float(constants['scale'])} {count}"

    island = Island(Told(), SETTINGS)
    assert island.evaluation().values["told"] == 2
    assert island.sample(0, 5) == "2.0 5"
