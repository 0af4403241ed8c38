"""Every number in every message has a bound: one test for each row of the table, and none without a row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast, get_type_hints

import msgspec
import pytest
from msgspec import inspect, structs
from tests.made.message_bounds import BOUNDS, NumberBound
from tests.made.message_examples import EXAMPLES

from diloco.control.admission import Admission
from diloco.core.run.leases import ClaimedShare, ShareClaim
from diloco.errors import FormatError
from diloco.wire import control, entries, framing, offers
from diloco.wire.body import Body
from diloco.wire.fields import MAX_COUNT
from diloco.wire.framing import Message
from diloco.wire.grants import Grant
from diloco.wire.quarantines import OutlierStatement, SeenOutlier
from diloco.wire.refusals import Refusals, RefusedOffers

ARRAYS: dict[str, type[msgspec.Struct]] = {
    "answer": offers.Answer,
    "member": offers.MergeMember,
    "regional_members": offers.RegionalMembers,
    "rolled_back": entries.RolledBack,
    "repaired": entries.Repaired,
    "cursor": entries.Cursor,
    "body": Body,
    "grant": Grant,
    "refused_offers": RefusedOffers,
    "refusals": Refusals,
    "outlier_statement": OutlierStatement,
    "seen_outlier": SeenOutlier,
    "admission": Admission,
    "share_claim": ShareClaim,
    "claimed_share": ClaimedShare,
}
KINDS: dict[str, type[msgspec.Struct]] = ARRAYS | {
    made.kind: made
    for module in (control, offers, entries)
    for made in vars(module).values()
    if isinstance(made, type) and issubclass(made, Message) and made is not Message
}
JUDGED = [bound for bound in BOUNDS if bound.judge is not None]
FORMS = [(bound.message, number) for bound in BOUNDS if bound.judge is None for number in bound.numbers]


def extremes(of: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the largest value of a type and one beyond, of each number in it; nothing where there is none, or no bound."""
    match of:
        case inspect.Metadata():
            yield from extremes(of.type)
        case inspect.IntType():
            most = MAX_COUNT if of.le is None and of.lt is None else of.le if of.lt is None else of.lt - 1
            yield most, (most or 0) + 1
        case inspect.FloatType(le=float() | int() as most):
            yield most, 1.1 * most
        case inspect.LiteralType(values=(int(), *_) as values):
            most = max(value for value in values if isinstance(value, int))
            yield most, 2 * most
        case inspect.ListType():
            yield from (([at], [above]) for at, above in extremes(of.item_type))
        case inspect.UnionType():
            for one in of.types:
                yield from extremes(one)
        case inspect.TupleType(item_types=items):
            usual = [next(extremes(item), (usual_value(item), None))[0] for item in items]
            for place, item in enumerate(items):
                for at, above in extremes(item):
                    yield (*usual[:place], at, *usual[place + 1 :]), (*usual[:place], above, *usual[place + 1 :])


def usual_value(of: Any) -> Any:
    """Return a value of a type that is no number."""
    match of:
        case inspect.LiteralType():
            return of.values[0]
        case inspect.StrType():
            return "ann"
    return bytes(32)


def is_number(of: Any) -> bool:
    """Return whether a type has a number in it that has no row of its own in another array."""
    match of:
        case inspect.Metadata():
            return is_number(of.type)
        case inspect.IntType() | inspect.FloatType():
            return True
        case inspect.ListType():
            return is_number(of.item_type)
        case inspect.TupleType():
            return any(map(is_number, of.item_types))
        case inspect.UnionType():
            return any(map(is_number, of.types))
        case inspect.LiteralType():
            return any(isinstance(value, int) for value in of.values)
    return False


def test_each_number_of_each_message_has_one_row() -> None:
    numbers = Counter((bound.message, number) for bound in BOUNDS for number in bound.numbers)
    fields = {name: cast(inspect.StructType, inspect.type_info(kind)).fields for name, kind in KINDS.items()}
    expected = {(name, each.name) for name, its in fields.items() for each in its if is_number(each.type)}
    assert set(numbers) == expected
    assert set(numbers.values()) == {1}


@pytest.mark.parametrize("bound", JUDGED, ids=lambda bound: f"{bound.message}-{'-'.join(bound.numbers)}")
def test_a_number_at_its_bound_counts_and_one_beyond_does_not(bound: NumberBound) -> None:
    assert bound.judge is not None
    assert bound.judge(bound.at)
    assert not bound.judge(bound.above)


@pytest.mark.parametrize(("message", "number"), FORMS)
def test_no_number_is_beyond_its_field(message: str, number: str) -> None:
    hints = get_type_hints(KINDS[message], include_extras=True)
    decoder, tried = msgspec.msgpack.Decoder(hints[number]), 0
    for at, above in extremes(inspect.type_info(hints[number])):
        tried += 1
        decoder.decode(msgspec.msgpack.encode(at))
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(above))
    if not tried:  # a float without a bound is finite
        example = EXAMPLES[KINDS[message]]  # type: ignore[index]
        for value in (math.inf, -math.inf, math.nan):
            frame = framing.pack(structs.replace(example, **{number: 1.0}), bytes(8))
            framing.unpack(frame, type(example), bytes(8))
            with pytest.raises((FormatError, ValueError), match="not finite"):
                structs.replace(example, **{number: value})
