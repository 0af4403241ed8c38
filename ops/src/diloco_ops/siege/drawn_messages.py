"""Messages of every kind, drawn from the types of their fields, so that each field is within its bounds. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from diloco.wire import control, entries, offers
from diloco.wire.framing import Message

KINDS: tuple[type[Message], ...] = tuple(
    cls
    for module in (control, entries, offers)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, Message) and cls is not Message
)
LONGEST = 4  # elements of a drawn list, where its type allows so few
USUAL_MOST = 100  # of half of the numbers; the others are anything that their type allows


def draw_message(cls: type[Message], drawn: random.Random, names: Sequence[str]) -> list[Any]:
    """Return the fields of a message as its frame has them, each within the bounds of its type.

    Args:
        cls: the message's class.
        drawn: where choices come from.
        names: the texts that a field may hold; the first one that is fit stands for the sender.
    """
    described = inspect.type_info(cls)
    assert isinstance(described, inspect.StructType)
    return [_value(field.type, drawn, names) for field in described.fields]


def _value(type_: inspect.Type, drawn: random.Random, names: Sequence[str]) -> Any:
    """Return a value of a type: a single one, one of several types, or a container of drawn values."""
    match type_:
        case inspect.Metadata(type=inner):
            return _value(inner, drawn, names)
        case inspect.UnionType():
            return _value(drawn.choice(type_.types), drawn, names)
        case inspect.ListType() | inspect.VarTupleType():
            least = type_.min_length or 0
            most = min(type_.max_length if type_.max_length is not None else LONGEST, least + LONGEST)
            return [_value(type_.item_type, drawn, names) for _ in range(drawn.randint(least, most))]
        case inspect.TupleType():
            return [_value(item, drawn, names) for item in type_.item_types]
        case inspect.StructType():
            assert type_.array_like, type_
            fields = [_value(field.type, drawn, names) for field in type_.fields]
            return fields if type_.tag is None else [type_.tag, *fields]
    return _single_value(type_, drawn, names)


def _single_value(type_: inspect.Type, drawn: random.Random, names: Sequence[str]) -> Any:
    match type_:
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return drawn.random() < 0.5
        case inspect.IntType():
            return _integer(type_, drawn)
        case inspect.FloatType():
            low, high = type_.ge if type_.ge is not None else -1e9, type_.le if type_.le is not None else 1e9
            return drawn.choice([low, high, drawn.uniform(low, min(high, low + USUAL_MOST))])
        case inspect.StrType():
            fitting = [name for name in names if not type_.pattern or re.search(type_.pattern, name)]
            return drawn.choice(fitting or [""])[: type_.max_length]
        case inspect.BytesType():
            return drawn.randbytes(max(type_.min_length or 0, min(type_.max_length or LONGEST, 32)))
        case inspect.LiteralType():
            return drawn.choice(type_.values)
    raise AssertionError(type_)


def _integer(type_: inspect.IntType, drawn: random.Random) -> int:
    low = type_.ge if type_.ge is not None else (type_.gt + 1 if type_.gt is not None else -(2**63))
    high = type_.le if type_.le is not None else (type_.lt - 1 if type_.lt is not None else 2**63 - 1)
    return drawn.choice([low, high, drawn.randint(low, min(high, low + USUAL_MOST)), drawn.randint(low, high)])
