"""Checks of the arguments of a loop that joins a run, at join and at each step."""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias, get_args

from blake3 import blake3

from diloco.core.learner.accounts import LEAST_TOKENS
from diloco.errors import SettingsError
from diloco.settings.run import MAX_NAME, NAME_PATTERN
from diloco.settings.service import LearnerSettings
from diloco.settings.validation import nearest, parse

Data: TypeAlias = Literal["dealt", "own"]


def check_said(tokens: int, data: str, optimizer: object) -> None:
    """Check the arguments about a loop's steps and data.

    Raises:
        SettingsError: one is invalid.
    """
    if tokens < 1:
        raise SettingsError(f"join: tokens = {tokens}: expected the number of tokens of each step, at least 1")
    if data not in get_args(Data):
        raise SettingsError(f"join: data = {data!r}: expected 'dealt' or 'own'{nearest(str(data), get_args(Data))}")
    if optimizer is not None and not hasattr(optimizer, "register_step_post_hook"):
        raise SettingsError(
            f"join: optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer: leave it out, and call "
            "run.step after each step"
        )


def settings_of(*, name: str, run: str, **given: Any) -> LearnerSettings:
    """Return a learner's settings from the ``given`` values that are not None.

    Raises:
        SettingsError: one is wrong.
    """
    for what, said in (("name", name), ("run", run)):
        if not re.fullmatch(NAME_PATTERN, said):
            raise SettingsError(
                f"join: {what} = {said!r}: expected lower-case letters, digits, - and _, at most {MAX_NAME} characters, of "
                "which the first is a letter or digit"
            )
    said_ones = {key: value for key, value in given.items() if value is not None}
    return parse(LearnerSettings, {"name": name, "run": run, **said_ones}, "join")


def default_name(host: str, process: int) -> str:
    """Return a learner's name made from host and process, with a hash of the host's name if that does not fit."""
    plain = f"loop-{host}-{process}".lower()
    if re.fullmatch(NAME_PATTERN, plain):
        return plain
    end = f"-{blake3(host.encode()).hexdigest()[:8]}-{process}"
    return f"loop-{re.sub('[^a-z0-9_-]+', '-', host.lower())}"[: MAX_NAME - len(end)] + end


def check_loss(loss: Any, what: str = "step: loss") -> None:
    """Check that a loss is one number, on a device or not, without waiting for it; ``what`` it is begins the sentence.

    Raises:
        SettingsError: it is something else.
    """
    shape = getattr(loss, "shape", None)
    if loss is None or isinstance(loss, int | float) or (shape is not None and not len(shape)):
        return
    came = f"a {type(loss).__name__}" if shape is None else f"an array of shape {tuple(shape)}"
    raise SettingsError(f"{what} is {came}, expected one number, the mean loss of the batch")


def tokens_of(said: int | None, most: int) -> int:
    """Return the tokens that a step is booked with, of which a loop has ``said`` how many (None: the ``most``, as at join).

    The protocol has no step without tokens, so a step of zero tokens is booked as one token.

    Raises:
        SettingsError: they are fewer than zero, or more than at join.
    """
    if said is None:
        return most
    if not 0 <= said <= most:
        raise SettingsError(
            f"step: tokens = {said}: expected 0 to {most}, the tokens of diloco.join: join with the most that a step may have"
        )
    return max(LEAST_TOKENS, said)
