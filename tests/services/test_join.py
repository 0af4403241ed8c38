"""``diloco.join``: training loops of one's own as learners of a run, over a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S, scaled_s
from tests.services.cluster import Cluster, small
from tests.services.toy import LEARNING_RATE, SAMPLES, STEP_S, Regression

import diloco
from diloco.core.tensors.fragments import build_map
from diloco.errors import AdmissionError, BrokerError, DilocoError, RunError, SettingsError
from diloco.settings.run import NAME_PATTERN
from diloco_learner import kernels
from diloco_learner.api.trees import Tree
from diloco_learner.joining import JoinedRun
from diloco_learner.run.loop_arguments import default_name
from diloco_learner.tensors import Tensor

Samples = tuple[int, int]


def _samples(share: int, shares: int, seed: int, start: int) -> Iterator[Samples]:
    return ((share, index) for index in itertools.count(start))


def _join(cluster: Cluster, params: Any, **given: Any) -> JoinedRun:
    own: dict[str, Any] = {
        "run": cluster.name,
        "tokens": SAMPLES,
        "tensor": lambda path, shape: Tensor(kind="embedding" if path == "table" else "matrix" if len(shape) > 1 else "vector"),
        "within_s": DEADLINE_S,
    }
    run: JoinedRun = diloco.join(cluster.url, params=params, **own | given)
    return run


class _Loop:
    """A user's training loop: the toy regression with arrays of NumPy, or of JAX with a donated step."""

    def __init__(self, cluster: Cluster, name: str, share: int, kind: str, data: str = "dealt") -> None:
        self.cluster, self.name, self.share, self.kind, self.data = cluster, name, share, kind, data
        self.task = Regression(cluster.settings)
        self.params: Any = dict(self.task.tensors)
        self.losses, self.seen = list[float](), list[Samples]()
        self.before_step: Callable[[_Loop], None] = lambda loop: None
        self.run: JoinedRun

    def train(self) -> None:
        if self.kind == "jax":
            self.params = {path: jnp.asarray(tensor) for path, tensor in self.params.items()}
        with _join(self.cluster, self.params, name=self.name, share=self.share, data=self.data) as run:
            self.run, self.params = run, run.params
            for batch in run.batches(_samples) if self.data == "dealt" else self._own_data(run):
                self.before_step(self)
                self.seen.append(batch)
                loss = self._step(batch)
                time.sleep(STEP_S)
                self.losses.append(float(loss))
                self.params = run.step(self.params, loss=loss)
        self.params = run.params

    @staticmethod
    def _own_data(run: JoinedRun) -> Iterator[Samples]:
        for index in itertools.count():
            if run.over:
                return
            yield 77, index

    def _step(self, batch: Samples) -> Any:
        if self.kind == "numpy":
            self.task.tensors = self.params
            loss = self.task.step(*batch)
            self.params = self.task.tensors
            return loss
        self.task.tensors = {path: np.asarray(tensor) for path, tensor in self.params.items()}
        loss, gradients = self.task.gradients(*batch)
        self.params = _descend(self.params, {path: np.float32(gradient) for path, gradient in gradients.items()})
        return jnp.float32(loss)


@jax.jit
def _descend(params: dict[str, jax.Array], gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: tensor - LEARNING_RATE * gradients[path] for path, tensor in params.items()}


async def _begin(cluster: Cluster) -> None:
    cluster.coordinator()
    cluster.syncers()
    await cluster.link()


def has_left(cluster: Cluster, name: str) -> bool:
    return any(heartbeat.state == "left" for heartbeat in cluster.heartbeats.get(name, ()))


@pytest.mark.promise("an own training loop joins a run")
async def test_loops_of_numpy_and_jax_train_one_model(launch: Launch) -> None:
    cluster = launch(small(learners=2))
    await _begin(cluster)
    loops = [_Loop(cluster, "of-numpy", 0, "numpy"), _Loop(cluster, "of-jax", 1, "jax")]
    abreast = threading.Barrier(len(loops))

    def wait_for_other(loop: _Loop) -> None:
        if len(loop.seen) < 12:
            abreast.wait(DEADLINE_S)

    for loop in loops:
        loop.before_step = wait_for_other
    await asyncio.gather(*(asyncio.to_thread(loop.train) for loop in loops))
    await cluster.ended()

    folded = await cluster.folded()
    for loop in loops:
        assert loop.run.over
        assert loop.losses[-1] < 0.5 * loop.losses[0]
        assert all(log.versions for log in folded)
        for path, tensor in (await cluster.tensors(folded)).items():  # all is merged: each has the run's last version
            np.testing.assert_allclose(np.asarray(loop.params[path]), tensor, atol=1e-6)
    merged = {member.learner for log in folded for record in log.versions for member in record.members}
    assert merged == {"of-numpy", "of-jax"}
    heard = await cluster.finished_heartbeats()
    assert {name: heard[name].step for name in heard} == {loop.name: len(loop.seen) for loop in loops}
    assert sum(heartbeat.tokens for heartbeat in heard.values()) >= cluster.settings.tokens
    assert not set(loops[0].seen) & set(loops[1].seen)  # no batch twice


async def test_a_loop_with_data_of_its_own_beside_other_learners(launch: Launch) -> None:
    cluster = launch(small())
    loop = _Loop(cluster, "own", 2, "numpy", data="own")
    cluster.toy(0)
    cluster.toy(1)
    await _begin(cluster)
    loop.before_step = lambda loop: cluster.gate.open()
    await asyncio.to_thread(loop.train)
    await cluster.ended()
    heard = await cluster.finished_heartbeats()
    own = heard["own"]
    assert own.step == len(loop.seen) > 0
    assert own.tokens == own.step * SAMPLES
    assert own.trained == []  # of no share
    members = [member for log in await cluster.folded() for record in log.versions for member in record.members]
    assert {member.learner for member in members if not member.data} == {"own"}
    assert {member.learner for member in members if member.data} == {"toy-0", "toy-1"}
    series = json.loads((cluster.directory / "series.json").read_text())
    merged = [sum(m.tokens for r in log.versions for m in r.members if m.learner == "own") for log in await cluster.folded()]
    assert series["ledger"]["own"] == [{"own": tokens} for tokens in merged]


async def test_a_loop_s_own_validation_loss_is_the_run_s(launch: Launch) -> None:
    cluster = launch(small(learners=1, tokens=40 * SAMPLES))
    await _begin(cluster)
    loop = _Loop(cluster, "mine", 0, "numpy")
    loop.before_step = lambda loop: loop.run.report(val_loss=2.5 - 0.25 * (len(loop.seen) // 10))
    await asyncio.to_thread(loop.train)
    await cluster.ended()
    series = json.loads((cluster.directory / "series.json").read_text())
    losses = [loss for *_, loss in series["validation"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 2.0
    assert all(tokens <= 40 * SAMPLES + 200 for _, tokens, _ in series["validation"])


async def test_an_error_in_a_loop_leaves_the_run_in_order(launch: Launch) -> None:
    class Mine(Exception):
        pass

    def fail(loop: _Loop) -> None:
        if len(loop.seen) == 8:
            raise Mine

    cluster = launch(small(learners=2))
    other = cluster.toy(1)
    await _begin(cluster)
    cluster.gate.open(100)
    loop = _Loop(cluster, "failing", 0, "numpy")
    loop.before_step = fail
    with pytest.raises(Mine):
        await asyncio.to_thread(loop.train)
    await cluster.until(lambda: has_left(cluster, "failing"), "it has left")
    cluster.gate.open()
    await cluster.ended()  # the other takes its share over, and uses up the budget
    assert other.finished
    with pytest.raises(RunError, match="is not joined: take steps within"):
        loop.run.step(loop.params)


@pytest.mark.parametrize("gives_losses", [True, False])
async def test_a_loop_that_is_not_finite_ends_after_ten_steps(launch: Launch, gives_losses: bool) -> None:
    cluster = launch(small(learners=1, tokens=10**9))
    await _begin(cluster)
    tensors = Regression(cluster.settings).tensors
    steps = list[int]()

    def train() -> None:
        with _join(cluster, dict(tensors), data="own") as run:
            while not run.over:
                steps.append(run.steps)
                params = {path: np.full_like(tensor, np.nan) for path, tensor in run.params.items()}
                time.sleep(STEP_S)
                run.step(params, loss=float("nan") if gives_losses else None)

    with pytest.raises(DilocoError, match=r"losses or parameters of the last 10 or more steps are NaN") as told:
        await asyncio.to_thread(train)
    assert told.value.exit_code == 1
    assert len(steps) == 11  # what a step came to is read one step later


async def test_a_loop_that_ends_early_has_its_work_merged(launch: Launch) -> None:
    cluster = launch(small(learners=2, tokens=200 * SAMPLES))
    cluster.toy(1)
    await _begin(cluster)
    cluster.gate.open(100)
    task = Regression(cluster.settings)

    def train() -> None:
        with _join(cluster, dict(task.tensors), name="brief", share=0) as run:
            task.tensors = run.params
            for batch in itertools.islice(run.batches(_samples), 9):
                task.step(*batch)
                time.sleep(STEP_S)
                task.tensors = run.step(task.tensors)

    await asyncio.to_thread(train)
    await cluster.until(lambda: has_left(cluster, "brief"), "it has left")
    last = cluster.heartbeats["brief"][-1]
    assert last.step == 9
    cluster.gate.open()
    cluster.hurry()
    await cluster.ended()
    for log, lost in zip(await cluster.folded(), last.lost_tokens, strict=True):
        merged = log.before.get("brief", 0)
        merged += sum(member.tokens for record in log.versions for member in record.members if member.learner == "brief")
        assert (
            merged <= 9 * SAMPLES <= merged + lost
        )  # all is merged, or given up as late: an offer so given up may be merged yet


async def test_each_batch_is_booked_once(launch: Launch) -> None:
    cluster = launch(small(learners=1, tokens=10**9))
    await _begin(cluster)
    tensors = Regression(cluster.settings).tensors

    def twice() -> None:
        with _join(cluster, dict(tensors)) as run:
            for _ in run.batches(_samples):
                run.step(run.params)
                run.step(run.params)

    def never() -> None:
        with _join(cluster, dict(tensors)) as run:
            for _ in run.batches(_samples):
                pass

    def own() -> None:
        with _join(cluster, dict(tensors), data="own") as run:
            next(run.batches(_samples))

    for loop, said in ((twice, r"call run\.step once for each batch"), (never, "no step was booked"), (own, "holds no share")):
        with pytest.raises(SettingsError, match=said):
            await asyncio.to_thread(loop)


async def test_what_cannot_join_is_refused(launch: Launch) -> None:
    cluster = launch(small(learners=1))
    await cluster.create()
    tensors = dict(Regression(cluster.settings).tensors)
    within_s = scaled_s(2.0)  # enough to connect
    with pytest.raises(RunError, match=rf"run 'other': not found at nats://.* within {within_s:g} s"):
        await asyncio.to_thread(_join(cluster, tensors, run="other", within_s=within_s).__enter__)
    with pytest.raises(BrokerError):
        await asyncio.to_thread(diloco.join("nats://127.0.0.1:9", run="x", params=tensors, tokens=1, within_s=0.5).__enter__)
    with pytest.raises(AdmissionError, match="a step has 1000000000000 tokens"):
        await asyncio.to_thread(_join(cluster, tensors, tokens=10**12).__enter__)
    gradients = launch(small("data-parallel", learners=1))
    await gradients.create()
    with pytest.raises(SettingsError, match=r"outer\.optimizer = adamw"):
        await asyncio.to_thread(_join(gradients, tensors).__enter__)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "params have no arrays"),
        ({"a": {"b": jnp.zeros(3, jnp.bfloat16)}}, "parameter 'a/b' is bfloat16, expected float32"),
        ({"a": np.zeros(3)}, "parameter 'a' is float64, expected float32"),
        ({"a": [1.0, 2.0]}, "parameter 'a/0' is a float, expected an array"),
    ],
)
def test_parameters_that_are_none(params: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Tree(params)


class Flax:
    tensor = staticmethod(kernels.flax)


@pytest.mark.parametrize("array", [np.array, jnp.asarray])
def test_kernels_of_a_loop_lie_in_the_log_as_a_task_s_do(array: Callable[[Any], Any]) -> None:
    kernel = array(np.array([[1, 2, 3], [4, 5, 6]], np.float32))  # (in, out)
    parameters = Tree({"dense": {"kernel": kernel}, "embed": {"embedding": array(np.zeros((2, 1), np.float32))}})
    specs = parameters.tensors(Flax())
    assert [(each.path, each.shape, each.model_shape, each.embedding) for each in specs] == [
        ("dense/kernel", (3, 2), (2, 3), False),
        ("embed/embedding", (2, 1), (2, 1), True),
    ]
    fragment = build_map(specs, 2).fragments[1]
    assert parameters.snapshot(fragment).to_host().tolist() == [1, 4, 2, 5, 3, 6]
    theta = np.array([10, 40, 20, 50, 30, 60], np.float32)
    parameters.write(fragment, theta)
    assert np.asarray(parameters.tree["dense"]["kernel"]).tolist() == [[10, 20, 30], [40, 50, 60]]
    parameters.write(fragment, 2 * theta, theta - 1)  # a version, with progress of 1 since the offer
    assert np.asarray(parameters.tree["dense"]["kernel"]).tolist() == [[21, 41, 61], [81, 101, 121]]
    if isinstance(kernel, np.ndarray):
        assert parameters.tree["dense"]["kernel"] is kernel, "NumPy arrays are written in place"


def test_what_a_loop_says_of_its_tensors_is_checked_before_it_joins() -> None:
    def says(tensor: Tensor, path: str, shape: tuple[int, ...]) -> Tensor:
        return tensor

    params = {"a": np.zeros((2, 3), np.float32)}
    for tensor, said in {
        Tensor(kind="frozen"): r"tensor\('a'\) is frozen, which a loop expresses by not passing it",
        Tensor(kind="vector", parts=(1,)): r"tensor\('a', \(2, 3\)\) has parts",
    }.items():
        with pytest.raises(SettingsError, match=said):
            diloco.join("nats://127.0.0.1:9", run="x", params=params, tokens=1, tensor=partial(says, tensor))


NUMPY = np.zeros((64, 3), np.float32)
JAX = jnp.zeros((64, 3))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"a": NUMPY, "b": NUMPY}, "parameters 'a' and 'b' are one array, which run.step takes over"),
        ({"a": NUMPY, "b": NUMPY[:32]}, "parameters 'a' and 'b' share memory, so that a version of one would overwrite"),
        ({"a": JAX, "b": JAX}, "parameters 'a' and 'b' are one array, which run.step takes over"),
        ({"a": JAX, "b": jax.device_put(JAX, JAX.device)}, "parameters 'a' and 'b' are one array"),  # two names of one buffer
        ({"a": {"b": NUMPY}, "a/b": NUMPY.copy()}, "two parameters are both 'a/b' in the run's log"),
    ],
)
def test_arrays_that_are_one_are_refused_by_name(params: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Tree(params)


def test_columns_of_one_array_are_apart() -> None:
    whole = np.zeros((4, 6), np.float32)
    Tree({"a": whole[:, :3], "b": whole[:, 3:]})


def test_a_tree_that_is_not_finite_is_seen_beside_an_empty_array() -> None:
    assert np.isnan(Tree({"a": np.zeros(0, np.float32), "b": np.full(2, np.nan, np.float32)}).sample())


def test_parameters_that_change() -> None:
    parameters = Tree({"a": np.zeros(3, np.float32), "b": np.zeros((), np.float32)})
    parameters.take({"a": np.ones(3, np.float32), "b": np.ones((), np.float32)})
    with pytest.raises(SettingsError, match="differ from those at join: c: pass the same"):
        parameters.take(parameters.tree | {"c": np.zeros(1, np.float32)})
    with pytest.raises(SettingsError, match=r"parameter 'a' has shape \(4,\), expected \(3,\)"):
        parameters.take(parameters.tree | {"a": np.zeros(4, np.float32)})
    with pytest.raises(SettingsError, match="parameter 'a' is float64"):
        parameters.take(parameters.tree | {"a": np.zeros(3)})
    pair = Tree({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
    with pytest.raises(SettingsError, match="parameters 'a' and 'b' are one array"):
        pair.take({"a": pair.tree["a"], "b": pair.tree["a"]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 0}, "tokens = 0: expected"),
        ({"data": "mine"}, "data = 'mine': expected 'dealt' or 'own'"),
        ({"name": "no name"}, "join: name = 'no name': expected lower-case letters, digits, - and _, at most 48 characters"),
        ({"run": "Mine"}, "join: run = 'Mine': expected lower-case letters"),
        ({"leave_s": -1}, "leave_s = -1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_reached(given: dict[str, Any], said: str) -> None:
    own: dict[str, Any] = {"run": "x", "params": {"a": np.zeros(3, np.float32)}, "tokens": 8}
    with pytest.raises(SettingsError, match=said):
        diloco.join("nats://127.0.0.1:9", **own | given)


def test_the_name_by_default_fits_and_tells_hosts_and_processes_apart() -> None:
    hosts = [
        "node7",
        "Node7",
        "node7.cluster.example.org",
        "node7-cluster.example.org",
        f"pod-{'a' * 60}",
        f"pod-{'a' * 61}",
        "é",
    ]
    names = [default_name(host, process) for host in hosts for process in (1, 4194304)]
    assert all(re.fullmatch(NAME_PATTERN, name) for name in names)
    assert names[0] == "loop-node7-1"
    assert len(set(names[2:])) == len(names) - 2  # hosts' names are of one case


def test_a_name_that_diloco_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        getattr(diloco, "joyn")  # noqa: B009  # a type checker would see it
