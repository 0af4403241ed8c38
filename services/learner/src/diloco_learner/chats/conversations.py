"""From a line to a conversation: the usual forms, and what is wrong with a line that has none of them.

========================  ============================================================================================
``messages``              a list of ``role`` and ``content``, as of OpenAI and transformers; ``tools`` beside it
``conversations``         the same, or ShareGPT's ``from`` and ``value``
``prompt, completion``    two texts, or two lists of messages: what is asked, and what is learned
``text``                  a text that is learned whole
========================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

ASSISTANT = "assistant"
# of ShareGPT, and what transformers calls them
ROLES = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", ASSISTANT, "tool")}
SPOKEN = ("content", "reasoning_content", "thinking", "reasoning")  # that a turn says something in


class BadLineError(Exception):
    """A line that no tokens are made of, and why."""


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them, which of them are learned (their numbers), and the tools that it is given."""

    messages: list[dict[str, Any]]
    learned: frozenset[int]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PlainText:
    """A text that no template is applied to; its first ``prompt`` characters are not learned.

    ``divides``: one that is longer than a row is divided among rows, since any part of it is worth learning.
    """

    text: str
    prompt: int = 0
    divides: bool = True


def parse(line: bytes, *, templated: bool) -> Conversation | PlainText:
    """Return what a line says. ``templated``: there is a chat template, so a prompt and its completion are two turns.

    Raises:
        BadLineError: it is not JSON, or has none of the forms, or a part of it has another type; or nothing to learn.
    """
    try:
        found = msgspec.json.decode(line.decode())
    except UnicodeDecodeError as error:
        raise BadLineError(f"invalid UTF-8: {error.reason} at byte {error.start}") from None
    except msgspec.DecodeError as error:
        raise BadLineError(f"not JSON: {error}") from None
    except RecursionError:
        raise BadLineError("not a conversation: JSON that is nested too deeply") from None
    if not isinstance(found, dict):
        raise BadLineError(f"expected a JSON object, got {_kind(found)}")
    for key in ("messages", "conversations"):
        if found.get(key) is not None:
            return _conversation(_messages(found[key], key), _tools(found))
    if found.get("prompt") is not None and found.get("completion") is not None:
        return _completion(found, templated=templated)
    if found.get("text") is not None:
        text = _string(found["text"], "text")
        if not text:
            raise BadLineError("text: is empty")
        return PlainText(text)
    has = ", ".join(f"{key} = null" if found[key] is None else key for key in sorted(found)[:8]) or "nothing"
    raise BadLineError(f"has none of messages, conversations, prompt and completion, and text; it has {has}")


def _completion(found: Mapping[str, Any], *, templated: bool) -> Conversation | PlainText:
    prompt, completion = found["prompt"], found["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = _messages(prompt, "prompt")
        return _conversation(asked + _messages(completion, "completion"), _tools(found), after=len(asked))
    prompt, completion = _string(prompt, "prompt"), _string(completion, "completion")
    if not completion.strip():
        raise BadLineError("completion: is empty")
    if not templated:
        return PlainText(prompt + completion, len(prompt), divides=False)
    turns = [{"role": "user", "content": prompt}, {"role": ASSISTANT, "content": completion}]
    return _conversation(turns, _tools(found))


def _conversation(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, after: int = 0) -> Conversation:
    """Return messages as a conversation; of the first ``after`` nothing is learned."""
    assistants = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    for number in assistants:
        message = messages[number]
        if not message.get("tool_calls") and not any(str(message.get(key, "")).strip() for key in SPOKEN):
            raise BadLineError(f"message {number + 1}: an empty assistant turn")
    if not assistants:
        raise BadLineError("has no assistant turn, so nothing to learn")
    weights = {number: messages[number].pop("weight", 1) for number in assistants}
    learned = frozenset(number for number, weight in weights.items() if number >= after and weight)
    if not learned:
        raise BadLineError("every assistant turn has weight 0, or belongs to the prompt: nothing to learn")
    return Conversation(messages, learned, tools)


def _messages(found: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(found, list):
        raise BadLineError(f"{key}: expected a list of messages, got {_kind(found)}")
    return [_message(message, f"{key}: message {number}") for number, message in enumerate(found, 1)]


def _message(found: Any, place: str) -> dict[str, Any]:
    """Return a message as transformers has it, without keys that are null."""
    if not isinstance(found, dict):
        raise BadLineError(f"{place}: expected an object, got {_kind(found)}")
    message = {key: value for key, value in found.items() if value is not None}
    if "from" in message and "role" not in message:
        said = _string(message.pop("from"), f"{place}: from")
        if said not in ROLES:
            raise BadLineError(f"{place}: from = {said[:40]!r}: expected one of {', '.join(ROLES)}")
        message["role"] = ROLES[said]
        if "value" in message:
            message["content"] = message.pop("value")
    if "role" not in message:
        raise BadLineError(f"{place}: has no role")
    message["role"] = _string(message["role"], f"{place}: role")
    if "content" in message:
        message["content"] = _content(message["content"], f"{place}: content")
    elif not message.get("tool_calls"):
        raise BadLineError(f"{place}: has no content")
    if message.get("weight", 1) not in (0, 1):
        raise BadLineError(f"{place}: weight: expected 0 or 1")
    if message["role"] != ASSISTANT:
        message.pop("weight", None)
    return message


def _content(found: Any, place: str) -> str:
    """Return a content as text; it may be a list of parts, which are joined."""
    if not isinstance(found, list):
        return _string(found, place)
    texts = []
    for number, part in enumerate(found, 1):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            raise BadLineError(f"{place}: part {number} is {str(kind)[:40]!r}: only parts of type 'text' are supported")
        texts.append(_string(part.get("text"), f"{place}: part {number}: text"))
    return "".join(texts)


def _tools(found: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = found.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadLineError(f"tools: expected a list of objects, got {_kind(tools)}")
    return tools or None


def _string(found: Any, place: str) -> str:
    if not isinstance(found, str):
        raise BadLineError(f"{place}: expected text, got {_kind(found)}")
    return found


def _kind(found: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(found), "a number")


def strings(found: Any) -> Iterable[str]:
    """Yield all texts in messages, tool calls and tools; not keys."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from strings(value)
    elif isinstance(found, list):
        for value in found:
            yield from strings(value)
