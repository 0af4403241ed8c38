"""A process of several: which errors tell that another one is gone, and which are its own."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import pytest

from diloco.errors import IslandError, SettingsError
from diloco.processes.group import Group
from diloco_learner.jax.beginning import room_for_steps
from diloco_learner.jax.together import lost_processes
from diloco_learner.run.several import own_errors_first

GLOO = "Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:7050: Connection reset"


class Ended(BaseException):
    """The end of a process that has told the others."""


class Others:
    """The group as far as an error concerns it."""

    def __init__(self) -> None:
        self.told: IslandError | None = None
        self.leaves = False

    def end(self, error: IslandError) -> None:
        self.told = error
        raise Ended

    def ending(self) -> None:
        self.leaves = True


def failing(error: BaseException) -> tuple[Others, type[BaseException]]:
    """Return what becomes of the others when this process fails, and of it."""
    others = Others()
    try:
        with own_errors_first(cast(Group, others)), lost_processes():
            raise error
    except BaseException as ended:
        return others, type(ended)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError(f"UNKNOWN: {GLOO}"),  # where the result of a program is awaited
        ValueError(f"UNKNOWN: {GLOO}"),  # where a program is called
        jax.errors.JaxRuntimeError(f"INTERNAL: {GLOO}"),
        IslandError("process 1 is gone"),
    ],
)
def test_where_another_process_is_gone_this_one_ends_as_the_others_do(error: Exception) -> None:
    others, kind = failing(error)
    assert kind is Ended
    assert isinstance(others.told, IslandError)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"),
        ValueError("UNKNOWN label 7 in the data"),
        SettingsError("a wrong setting"),
        KeyboardInterrupt(),
    ],
)
def test_an_error_of_its_own_is_what_it_ends_with(error: BaseException) -> None:
    others, kind = failing(error)
    assert kind is type(error)
    assert others.told is None
    assert others.leaves


@pytest.mark.parametrize(
    ("present", "kind", "says"),
    [
        (3, SettingsError, r"no room for a step \(RESOURCE_EXHAUSTED.*: take fewer rows a batch"),
        (
            2,
            IslandError,
            r"^only 2 of 3 processes are present, .*continue once .*; set processes.least = 3 to make them wait",
        ),
    ],
)
def test_devices_without_room_for_a_step_end_the_learner_or_wait_for_the_missing_ones(
    present: int, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says), room_for_steps(present, 3):
        jnp.ones(1 << 46).block_until_ready()  # more bytes than a process can have addresses for


def test_other_errors_of_jax_are_no_lack_of_room() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), room_for_steps(1, 1):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
