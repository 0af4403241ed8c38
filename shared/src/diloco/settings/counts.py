"""Counts as people write them: ``600k``, ``7.5M`` and ``1e6`` are whole numbers wherever a count is taken."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

EXAMPLES = "such as 600000, 600k, 7.5M or 1e6"
COUNT = "COUNT"  # what an option's help calls it
MAX_COUNT = 10**18
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"([0-9][0-9_]{0,30}(?:\.[0-9]{1,30})?(?:e\+?[0-9]{1,2})?) ?([kmgbt]?)", re.IGNORECASE | re.ASCII)


def parse_count(value: Any) -> Any:
    """Return a count for text, with a suffix (k, M, G or B, T; powers of 1000) or an exponent, and for a whole ``float``.

    Other values are returned as they are, for pydantic to judge. It is a ``parser`` of a command's options, too.

    Raises:
        ValueError: a text is no count, no whole number, or more than ``MAX_COUNT``.
    """
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else value
    if not isinstance(value, str):
        return value
    match = _COUNT.fullmatch(value.strip())
    if match is None:
        raise PydanticCustomError("count", f"expected a count, {EXAMPLES}")
    number = Decimal(match[1].replace("_", "")) * SUFFIXES[match[2].lower()]
    if number > MAX_COUNT:
        raise PydanticCustomError("count", f"expected a count of at most {MAX_COUNT:g}")
    if number != int(number):
        raise PydanticCustomError("count", "expected a whole number")
    return int(number)


Count = Annotated[int, BeforeValidator(parse_count)]
