"""A loop keeps its learner's state in its own checkpoint: nothing that it holds is lost or merged twice."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import diloco
from diloco.errors import RunError, SettingsError
from diloco.testing import VirtualRun
from diloco_learner.run.loop_state import agreed_moment, bare_fragments

TOKENS = 16
RARE = {"tokens": 4096, "learners": 1, "round.steps": 64}  # no version in the first steps


def count(share: int, shares: int, seed: int, start: int) -> Iterator[int]:
    return itertools.count(start)


class Loop:
    """A loop that adds 1 to each value at each step, and saves itself after ``saves_at`` of its steps."""

    def __init__(self, saves_at: int) -> None:
        self.saves_at, self.saved = saves_at, dict[str, Any]()
        self.goes_on = True  # from what was saved
        self.seen, self.begun = list[int](), list[tuple[int, float]]()

    def params(self) -> dict[str, Any]:
        if self.goes_on and self.saved:
            return {"w": self.saved["w"].copy()}
        return {"w": np.zeros(64, np.float32)}

    def before(self, run: Any) -> None:
        if self.goes_on and self.saved:
            run.load_state_dict(pickle.loads(self.saved["run"]))

    def __call__(self, run: Any) -> None:
        self.begun.append((run.steps, float(run.params["w"][0])))
        for batch in run.batches(count):
            self.seen.append(batch)
            after = run.step({"w": run.params["w"] + np.float32(1)}, loss=1.0)
            if run.steps == self.saves_at and not self.saved:
                self.saved = {"w": after["w"].copy(), "run": pickle.dumps(run.state_dict())}


def killed_after(virtual: VirtualRun, loop: Loop, steps: int) -> None:
    """Run until the loop has taken so many steps, and kill it."""
    virtual.add_loop("ann", loop, params=loop.params, before=loop.before, tokens=TOKENS)
    virtual.advance(until=lambda: len(loop.seen) > steps)
    virtual.kill("ann")


def accounts_hold(virtual: VirtualRun) -> None:
    """All that was processed is merged or lost by the time that the run is over."""
    learner = virtual._member("ann").learner
    for state in learner.fragments:
        cursor = state.newest.chain.cursors["ann"]
        assert state.delta.tokens == 0
        assert cursor.tokens + state.delta.lost_tokens == learner.accounts.tokens


def test_a_loop_that_is_killed_at_its_checkpoint_loses_nothing() -> None:
    loop = Loop(saves_at=10)
    with VirtualRun(RARE) as virtual:
        killed_after(virtual, loop, 10)
        virtual.start("ann")
        virtual.advance()
        assert loop.begun == [(0, 0.0), (10, 10.0)], "steps and values are those of the checkpoint"
        first, again = loop.seen[:10], loop.seen[11:]
        assert first + again == list(range(len(first + again))), "the data go on where they were"
        learner = virtual._member("ann").learner
        assert learner.accounts.tokens == TOKENS * learner.accounts.step
        assert [state.delta.lost_tokens for state in learner.fragments] == [0, 0]
        accounts_hold(virtual)


def test_without_its_state_the_same_loop_is_new_and_its_work_is_lost() -> None:
    loop = Loop(saves_at=10)
    with VirtualRun(RARE) as virtual:
        killed_after(virtual, loop, 10)
        loop.goes_on = False
        virtual.start("ann")
        virtual.advance()
        assert loop.begun == [(0, 0.0), (0, 0.0)]
        accounts_hold(virtual)


@pytest.mark.parametrize("more", [1, 7, 20, 60])
def test_what_was_merged_since_the_checkpoint_counts_and_is_offered_no_more(more: int) -> None:
    loop = Loop(saves_at=30)
    with VirtualRun({"tokens": 8192, "learners": 1, "round.steps": 8}) as virtual:
        killed_after(virtual, loop, 30 + more)
        virtual.start("ann")
        virtual.advance()
        accounts_hold(virtual)
        assert loop.begun[1][0] == 30
        learner = virtual._member("ann").learner
        assert learner.accounts.tokens >= TOKENS * 30
        ledger = [state.newest.chain.ends for state in learner.fragments]
        assert all(ends[0] <= max(loop.seen) + 1 for ends in ledger)


def has_seen(loop: Loop, steps: int) -> bool:
    """Whether the loop has taken more steps than so many."""
    return len(loop.seen) > steps


def test_a_loop_goes_on_again_and_again_from_one_checkpoint() -> None:
    loop = Loop(saves_at=30)
    with VirtualRun({"tokens": 8192, "learners": 1, "round.steps": 8}) as virtual:
        killed_after(virtual, loop, 40)
        for steps in (50, 75):
            virtual.start("ann")
            virtual.advance(until=partial(has_seen, loop, steps))
            virtual.kill("ann")
        virtual.start("ann")
        virtual.advance()
        accounts_hold(virtual)


def test_error_feedback_goes_along() -> None:
    """With 4 bits a value most of a small step is left over by quantisation, and comes with the next offer."""
    kept = list[Any]()

    def loop(run: Any) -> None:
        step = np.linspace(0.01, 1.0, 64, dtype=np.float32)
        while not run.over:
            run.step({"w": run.params["w"] + step}, loss=1.0)
            if run.steps == 40:
                kept.append(run.state_dict())

    with VirtualRun({"tokens": 2048, "learners": 1, "round.steps": 8, "fragments.count": 1}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(64, np.float32)}, data="own", tokens=TOKENS)
        virtual.advance()
    facts, arrays = kept[0]["rank-0"]
    assert facts["accounts"]["step"] == 40
    assert arrays["accounts/0/error"].dtype == np.uint8
    assert arrays["accounts/0/error"].any()


def test_a_state_taken_while_an_offer_is_made_has_that_offer() -> None:
    """It is asked for after each step, so at all moments of an offer's life; each is a state that a learner goes on from."""
    states = list[Any]()

    def loop(run: Any) -> None:
        while not run.over:
            run.step({"w": run.params["w"] + np.float32(1)}, loss=1.0)
            states.append(copy.deepcopy(run.state_dict()["rank-0"][0]["accounts"]))

    with VirtualRun({"tokens": 4096, "round.steps": 8}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(64, np.float32)}, data="own", tokens=TOKENS)
        virtual.add_toy("bob", step_s=0.37)  # rounds wait for it
        virtual.advance()
        accounts_hold(virtual)
    assert any(fragment["pending"] for state in states for fragment in state["fragments"])
    for state in states:
        assert state["tokens"] == TOKENS * state["step"]


def join(**given: Any) -> Any:
    own: dict[str, Any] = {"run": "virtual", "params": {"w": np.zeros(64, np.float32)}, "tokens": TOKENS, "name": "ann"}
    return diloco.join("nats://127.0.0.1:9", **own | given)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    loop = Loop(saves_at=10)
    with VirtualRun(RARE) as virtual:
        killed_after(virtual, loop, 10)
    return {"w": loop.saved["w"], "run": pickle.loads(loop.saved["run"])}


def change(**facts: Any) -> Callable[[Any], Any]:
    def changed(state: Any) -> Any:
        own, arrays = state["rank-0"]
        return {"rank-0": (own | facts, arrays)}

    return changed


def without(name: str) -> Callable[[Any], Any]:
    def changed(state: Any) -> Any:
        own, arrays = state["rank-0"]
        return {"rank-0": ({key: value for key, value in own.items() if key != name}, arrays)}

    return changed


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change(run="other"), "the state is of run 'other', but this loop joins 'virtual': leave out load_state_dict"),
        (change(learner="bob"), "the state is of learner 'bob', but this loop is 'ann': join with name='bob'"),
        (change(format="diloco-loop-2"), "the state has the format 'diloco-loop-2', expected 'diloco-loop-1': install the ver"),
        (without("format"), "the state has the format None"),
        (without("accounts"), "'rank-0' is damaged: Object missing required field `accounts`"),
        (change(more=1), "'rank-0' is damaged: Object contains unknown field `more`"),
        (change(accounts=3), "'rank-0' is damaged: Expected `object`, got `int`"),
        (lambda state: [], "state is a list, expected what run.state_dict"),
        (lambda state: {}, r"the state has no accounts \(keys none\): load what"),
        (lambda state: {"model": 1}, r"the state has no accounts \(keys model\)"),
        (lambda state: {"rank-0": ()}, r"the state has no accounts \(keys rank-0\): .* within the with statement"),
        (lambda state: {"rank-1": change(accounts={})(state)["rank-0"]}, "the state has no accounts .* that of the first one"),
        (lambda state: {"rank-0": 3}, "'rank-0' is damaged: expected plain values and arrays"),
        (lambda state: {"rank-0": (state["rank-0"][0], {"w": np.zeros(3)})}, "'rank-0' is damaged: invalid literal"),
        (lambda state: state | {"rests": {"w": 1}}, "parameter 'w' was bfloat16 when the state was taken"),
        (
            lambda state: state | {"rank-1": change(moment="another")(state)["rank-0"]},
            "rank 0's part is of ann, another, and rank 0's of ann, .*: load parts of one checkpoint",
        ),
    ],
)
def test_what_is_no_state_of_this_loop_is_refused_at_once(saved: Any, damage: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"load_state_dict: {said}"):
        join().load_state_dict(damage(saved["run"]))


def test_a_loop_without_a_name_takes_that_of_its_state(saved: Any) -> None:
    run = join(name=None)
    run.load_state_dict(saved["run"])
    assert run.settings.name == "ann"


def begin(saved: Any, w: Any, tokens: int) -> str:
    """Begin a loop from a state in a run, whose identity goes by its settings; return the error with which it ends."""
    with VirtualRun(RARE | {"tokens": tokens}) as virtual:
        virtual.add_loop(
            "ann", len, params=lambda: {"w": w.copy()}, before=lambda run: run.load_state_dict(saved["run"]), tokens=TOKENS
        )
        with pytest.raises(RunError) as told:
            virtual.advance()
    return str(told.value.__cause__)


def test_a_state_of_another_run_of_that_name_and_of_other_values_is_refused_when_the_run_is_entered(saved: Any) -> None:
    assert "load_state_dict: the state is of run 'virtual' with the identity" in begin(saved, saved["w"], 8192)
    assert "load_state_dict: the parameters are not those of the moment of this" in begin(saved, saved["w"] + 1, 4096)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda own, arrays: own["accounts"].pop("step"), "KeyError: 'step'"),
        (lambda own, arrays: own["accounts"]["fragments"].pop(), "it has 1 fragments, the run 2"),
        (lambda own, arrays: own["accounts"]["fragments"][0].pop("tokens"), "KeyError: 'tokens'"),
        (lambda own, arrays: arrays.update({"accounts/0/base": np.zeros(3, np.float32)}), "a fragment of 3 parameters"),
    ],
)
def test_a_damaged_state_is_refused_when_the_run_is_entered(damage: Callable[[Any, Any], Any], said: str) -> None:
    loop = Loop(saves_at=10)
    with VirtualRun(RARE) as virtual:
        killed_after(virtual, loop, 10)
        state = pickle.loads(loop.saved["run"])
        damage(*state["rank-0"])
        loop.saved["run"] = pickle.dumps(state)
        virtual.start("ann")
        with pytest.raises(RunError) as told:
            virtual.advance()
    assert "load_state_dict: the state does not fit the run (" in str(told.value.__cause__)
    assert said in str(told.value.__cause__)


def test_a_state_is_taken_and_loaded_at_its_time() -> None:
    runs = list[Any]()

    def loop(run: Any) -> None:
        runs.append(run)
        with pytest.raises(RunError, match=r"is joined already: call load_state_dict before the with statement"):
            run.load_state_dict({})

    with VirtualRun(RARE) as virtual:
        virtual.add_loop("ann", loop, params=lambda: {"w": np.zeros(64, np.float32)}, before=runs.append, data="own")
        virtual.advance()
    with pytest.raises(RunError, match="is not joined"):
        runs[0].state_dict()
    assert join().state_dict() == {"rank-0": ()}, "what there will be to load"


def test_fragments_of_which_a_part_is_missing_go_on_without_their_arrays() -> None:
    """As where a loop of two ranks begins again as one, with the first rank's file alone."""
    loop = Loop(saves_at=10)
    with VirtualRun(RARE) as virtual:
        killed_after(virtual, loop, 10)
        own, arrays = pickle.loads(loop.saved["run"])["rank-0"]
        left = {name: array for name, array in arrays.items() if name.startswith("accounts/0/")}
        loop.saved["run"] = pickle.dumps({"rank-0": (own, left)})
        virtual.start("ann")
        virtual.advance()
        assert loop.begun[1] == (10, 10.0), "nothing was under way, so all that it holds stays"
        accounts_hold(virtual)


def test_ranks_agree_on_the_state_that_they_begin_from() -> None:
    assert agreed_moment(["7, boundary 3", "7, boundary 3", ""]) == "7, boundary 3", "a rank may have come since"
    assert agreed_moment(["", ""]) == ""
    with pytest.raises(SettingsError, match="rank 1 has loaded the state of 7, boundary 4, and rank 0 7, boundary 3"):
        agreed_moment(["7, boundary 3", "7, boundary 4"])
    with pytest.raises(SettingsError, match="rank 1 has loaded the state of 7, boundary 4, and rank 0 none"):
        agreed_moment(["", "7, boundary 4"])
    assert bare_fragments([0, 1, 1, 0], [[0, 1], [1]]) == [2, 3]


def test_a_torch_loop_saves_tensors_that_load_without_pickle(saved: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    states = list[Any]()

    def loop(run: Any) -> None:
        for _ in range(40):
            run.step(module, loss=1.0)
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
        states.append(file.getvalue())

    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    with VirtualRun({"tokens": 4096, "learners": 1, "round.steps": 8}) as virtual:
        virtual.add_loop("ann", loop, params=lambda: module, data="own", tokens=TOKENS)
        virtual.advance()
    state = torch.load(io.BytesIO(states[0]), weights_only=True)
    facts, arrays = state["rank-0"]
    assert facts["accounts"]["tokens"] == 40 * TOKENS
    assert all(isinstance(array, torch.Tensor) for array in arrays.values())
    assert {path: (rest.dtype, tuple(rest.shape)) for path, rest in state["rests"].items()} == {
        "weight": (torch.float32, (2, 3)), "bias": (torch.float32, (2,)),
    }  # fmt: skip
    again = join(params=module)
    again.load_state_dict(state)
    for path, rest in again.state_dict()["rests"].items():
        assert torch.equal(rest, state["rests"][path])
    with pytest.raises(SettingsError, match="parameter 'bias' is float32, but was bfloat16 when the state was taken"):
        join(params=torch.nn.Linear(3, 2)).load_state_dict(state)
    with pytest.raises(
        SettingsError, match=r"the rounding error of parameter 'weight' does not have this rank's shape \(2, 4\)"
    ):
        join(params=torch.nn.Linear(4, 2).to(torch.bfloat16)).load_state_dict(
            state | {"rests": state["rests"] | {"weight": torch.zeros(2, 3)}}
        )
