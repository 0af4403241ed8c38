"""Which part of a rendered conversation each assistant turn is: what a model writes itself, and so what it learns.

A template may mark it by ``{% generation %}``. Of another one the turns are found by rendering beginnings of the conversation:
turn k is what follows the rendering of all messages before it, with the prompt for an answer, up to the end of the rendering
that ends with it. That holds if each such rendering is the beginning of the whole, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from diloco_learner.chats.conversations import ASSISTANT

Span = tuple[int, int]  # characters from, and up to
Render = Callable[[Sequence[Mapping[str, Any]], bool], str]  # messages, and whether the prompt for an answer follows them

SHOWN = 24  # characters of a difference


class PrefixError(Exception):
    """A template renders the beginning of a conversation in another way than the whole: where and how."""


def find_turns(render: Render, messages: Sequence[Mapping[str, Any]], whole: str, ends: Collection[str]) -> dict[int, Span]:
    """Return the spans of the assistant turns of a conversation, by their message's number.

    ``whole`` is its rendering. A turn ends with the token that ends it (one of ``ends``), if it has one: white space behind
    that belongs to the form, as no model is asked to write it.

    Raises:
        PrefixError: a rendering of a part is not the beginning of the whole.
    """
    spans = {}
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = render(messages[:number], True)
        _check(before, whole, number, len(messages), "with the prompt for an answer")
        until = whole if number == len(messages) - 1 else render(messages[: number + 1], False)
        _check(until, whole, number + 1, len(messages), "alone")
        if len(until) < len(before):
            raise PrefixError(f"message {number + 1} ends before its prompt does")
        bare = until.rstrip()
        is_ended = len(bare) > len(before) and bare.endswith(tuple(ends))
        spans[number] = (len(before), len(bare) if is_ended else len(until))
    return spans


def _check(part: str, whole: str, count: int, of: int, how: str) -> None:
    if whole.startswith(part):
        return
    at = next((place for place, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
    found, expected = part[at : at + SHOWN], whole[at : at + SHOWN]
    raise PrefixError(
        f"the first {count} of {of} messages {how} render to {found!r} at character {at}, where all messages have {expected!r}"
    )
