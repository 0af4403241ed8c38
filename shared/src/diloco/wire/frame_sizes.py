"""How large a frame of each kind can be, by the bounds that its fields have: a larger one is refused before it is decoded."""

from __future__ import annotations

import functools
from typing import Any

from msgspec import inspect

from diloco.wire.fields import BY_FRAGMENT, MAX_FRAGMENTS
from diloco.wire.framing import Message

_AROUND_BYTES = 128  # magic, version, kind, run, hash, and the sizes of all of these
_NUMBER_BYTES = 9
_HEADER_BYTES = 5  # the size of a text, of bytes or of a list
_CHARACTER_BYTES = 4


@functools.cache
def largest_bytes(kind: type[Message], fragments: int = MAX_FRAGMENTS) -> int:
    """Return the most bytes of a frame of ``kind`` without a body, in a run of so many fragments."""
    return _AROUND_BYTES + _most(inspect.type_info(kind), fragments)


def _most(of: Any, fragments: int) -> int:
    """Return the most bytes that a value of a type takes.

    Raises:
        TypeError: a type of the protocol has no bound.
    """
    match of:
        case inspect.Metadata(type=inspect.ListType() as by_fragment, extra=extra) if extra == BY_FRAGMENT:
            return _HEADER_BYTES + fragments * _most(by_fragment.item_type, fragments)
        case inspect.Metadata():
            return _most(of.type, fragments)
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType():
            return _NUMBER_BYTES
        case inspect.StrType(max_length=int(characters)):  # patterns are of ASCII
            return _HEADER_BYTES + characters * (_CHARACTER_BYTES if of.pattern is None else 1)
        case inspect.BytesType(max_length=int(length)):
            return _HEADER_BYTES + length
        case inspect.LiteralType():
            return max(_HEADER_BYTES + len(str(value)) for value in of.values)
        case inspect.ListType(max_length=int(length)):
            return _HEADER_BYTES + length * _most(of.item_type, fragments)
        case inspect.TupleType():
            return _HEADER_BYTES + sum(_most(item, fragments) for item in of.item_types)
        case inspect.UnionType():
            return max(_most(one, fragments) for one in of.types)
        case inspect.StructType():
            return _HEADER_BYTES + sum(_most(each.type, fragments) for each in of.fields)
    raise TypeError(f"{of}: a value of this type can be of any size")
