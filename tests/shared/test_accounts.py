"""A learner's totals."""

from __future__ import annotations

from diloco.core.learner.accounts import Accounts, StepDone
from diloco.core.log.chain import Chain
from diloco.wire.entries import Cursor


def test_a_step_takes_all_the_time_until_the_next_one_whatever_it_waits_for() -> None:
    accounts = Accounts()
    accounts.book(StepDone(7, 0, 0, 1.0, 6.0, 1.0, steps=2, data_s=3.0))
    assert accounts.step_average.get() == 5.0  # (6 + 1 + 3) / 2
    assert (accounts.done.busy_s, accounts.done.blocked_s, accounts.done.data_s) == (6.0, 1.0, 3.0)
    assert (accounts.busy_s, accounts.blocked_s) == (6.0, 1.0)


def test_a_loss_that_is_not_finite_is_counted_and_the_last_finite_one_is_kept() -> None:
    accounts = Accounts()
    for loss in (None, 2.0, float("nan"), float("inf"), None):
        accounts.book(StepDone(7, 0, 0, loss, 1.0, 0.0))
    assert (accounts.loss, accounts.done.not_finite, accounts.done.steps) == (2.0, 2, 5)


def test_a_learner_whose_steps_are_not_finite_says_so_until_one_is() -> None:
    accounts, nan, said = Accounts(), float("nan"), list[str | None]()
    for loss, steps in ((nan, 9), (None, 1), (nan, 1), (2.0, 1)):  # None: its loss is not known yet
        accounts.book(StepDone(7, 0, 0, loss, 1.0, 0.0, steps=steps))
        said.append(accounts.failure)
    assert said == [
        None,
        None,
        "the loss or gradients of its last 10 or more steps were not finite, and such a step changes nothing: "
        "check its data, or begin again with a lower inner.learning_rate",
        None,
    ]


def test_a_learner_without_losses_is_stuck_once_its_values_have_not_been_finite_for_ten_steps() -> None:
    accounts, stuck = Accounts(), list[bool]()
    for finite, steps in ((False, 9), (True, 1), (False, 9), (None, 1), (False, 1), (True, 1)):  # None: not looked at
        accounts.book(StepDone(7, 0, 0, None, 1.0, 0.0, steps=steps, finite=finite))
        stuck.append(accounts.is_stuck)
    assert stuck == [False, False, False, False, True, False]


def test_a_learner_that_begins_again_counts_steps_by_the_mean_tokens_of_its_merged_ones() -> None:
    heads = [
        Chain(0, 1, 0, bytes(32), 1, bytes(32), cursors={"ann": Cursor("ann", 1, 3, 2, 60, 20, 12)}),  # 5 tokens a step
        Chain(1, 1, 0, bytes(32), 1, bytes(32), cursors={"bob": Cursor("bob", 1, 3, 2, 900, 0, 1)}),
    ]
    accounts = Accounts(tokens=80)  # merged and lost
    accounts.count_steps("ann", heads)
    assert accounts.step == 16
    accounts.count_steps("cat", heads)
    assert accounts.step == 0
