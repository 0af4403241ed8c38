"""Numbers for people: counts, bytes, durations and shares, three significant digits, nothing known as a dash."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TypeGuard

MISSING = "–"


def _scaled(value: float, prefixes: tuple[str, ...], small: str) -> str:
    for prefix in ("", *prefixes):
        if abs(value) < 999.5 or prefix == prefixes[-1]:
            if prefix == "":
                return f"{value:{small}}"
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f}{prefix}"
        value /= 1000
    raise AssertionError("the last prefix takes what is left")


def finite(value: object) -> TypeGuard[int | float]:
    """Return whether this is a number, and neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _known(value: object) -> float | None:
    return float(value) if finite(value) else None


def count(value: object) -> str:
    """Format ``1234567`` as ``1.23M``."""
    number = _known(value)
    return MISSING if number is None else _scaled(number, ("k", "M", "G", "T", "P"), ".0f")


def model_size(parameters: object, state_values: object) -> str:
    """Format a model's size with the state that is merged, if any: ``1.23M parameters and 40 values of state``."""
    return f"{count(parameters)} parameters" + (f" and {count(state_values)} values of state" if state_values else "")


def size(value_bytes: object) -> str:
    """Format ``1234567`` bytes as ``1.23 MB``."""
    number = _known(value_bytes)
    return (
        MISSING
        if number is None
        else _scaled(number, (" kB", " MB", " GB", " TB", " PB"), ".0f") + (" B" if abs(number) < 999.5 else "")
    )


def times(ratio: float) -> tuple[str, str]:
    """Return how many times less something is than another: ``("22.1", "less")``; of 0.5 ``("2.0", "more")``."""
    return (f"{ratio:.1f}", "less") if ratio >= 1 else (f"{1 / ratio:.1f}", "more")


def duration(value_s: object) -> str:
    """Format seconds as ``0:42``, ``12:05`` or ``3:04:05``."""
    number = _known(value_s)
    if number is None or number < 0:
        return MISSING
    minutes, seconds = divmod(round(number), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def clock(end_s: float) -> str:
    """Return what the parts of a time are that :func:`duration` formats, on an axis from 0 to ``end_s``."""
    return "h:min:s" if end_s >= 3600 else "min:s"


def lasting(value_s: object) -> str:
    """Format a length of time in words, which is not taken for a time of the run: ``40 s``, ``12 min``, ``3 h 5 min``."""
    number = _known(value_s)
    if number is None or number < 0:
        return MISSING
    if number < 99.5:
        return f"{round(number)} s"
    hours, minutes = divmod(round(number / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def moment(value_s: object) -> str:
    """Format Unix time as ``2026-11-22 08:30:00`` UTC."""
    number = _known(value_s)
    if number is None:
        return MISSING
    try:
        return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # after the year 9999
        return MISSING


def share(value: object, digits: int = 0) -> str:
    """Format a fraction as per cent: ``0.941`` as ``94 %``."""
    number = _known(value)
    return MISSING if number is None else f"{100 * number:.{digits}f} %"


def decimal(value: object, digits: int = 3) -> str:
    """Format a figure with a fixed number of digits, such as a loss."""
    number = _known(value)
    return MISSING if number is None else f"{number:.{digits}f}"
