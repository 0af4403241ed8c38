"""Disturbances of an emulated WAN's links: the kinds of a failure tape, and how several compose.

Links are named FROM-TO, one for each direction. On a tape their targets are ``link/FROM-TO`` or a pattern of it
(``link/us-*``, ``link/*``).

| kind | values | while it lasts |
|---|---|---|
| ``link_cut`` | | nothing moves, in this direction |
| ``link_slow`` | ``factor`` >= 1 | the rate is divided by it; an unlimited rate stays so |
| ``link_set`` | ``rate_bits_per_s``, ``delay_s``, ``jitter_s``: at least one | these hold instead of what held before |

A cut or a slowing lasts for ``duration_s``, which must be above 0. A setting without one stays. Where several overlap, a link
is cut while any cut lasts, factors multiply, and of settings the one that began last holds.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from diloco.errors import SettingsError
from diloco.settings.validation import nearest
from diloco_ops.failures import Failure, FailureTape
from diloco_ops.wan.link import MAX_DELAY_S, MAX_RATE_BITS_PER_S, MIN_RATE_BITS_PER_S, LinkConditions

CUT, SLOW, SET = "link_cut", "link_slow", "link_set"
KINDS = (CUT, SLOW, SET)
MAX_FACTOR = 1e6
UNLIMITED = "unlimited"

_BOUNDS = {
    "factor": (1.0, MAX_FACTOR),
    "rate_bits_per_s": (MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S),
    "delay_s": (0.0, MAX_DELAY_S),
    "jitter_s": (0.0, MAX_DELAY_S),
}
_VALUES = {CUT: (), SLOW: ("factor",), SET: ("rate_bits_per_s", "delay_s", "jitter_s")}


@dataclass(frozen=True)
class Turn:
    """A failure begins or ends."""

    at_s: float
    failure: Failure
    begins: bool


def meant(words: Iterable[str], links: Sequence[str]) -> list[str]:
    """Return the links that words mean: a region (all links from and to it), a link, or a pattern of links.

    Raises:
        SettingsError: a word means none; the nearest region or link is named.
    """
    regions = sorted({region for link in links for region in link.split("-")})
    chosen: set[str] = set()
    for word in words:
        found = {link for link in links if fnmatchcase(link, word) or word in link.split("-")}
        if not found:
            hint = nearest(word, [*regions, *links])
            there_are = f"regions: {', '.join(regions)}; links: {', '.join(links)}"
            raise SettingsError(f"{word}: no such region or link{hint}; {there_are}")
        chosen |= found
    return [link for link in links if link in chosen]


def targets(failure: Failure, links: Sequence[str]) -> list[str]:
    """Return the links that a failure of a tape meets."""
    return [link for link in links if fnmatchcase(f"link/{link}", failure.target)]


def complaint(failure: Failure, links: Sequence[str]) -> str | None:
    """Return why a failure of a known kind cannot be brought about on these links; None: it can."""
    if not targets(failure, links):
        names = [f"link/{link}" for link in links]
        return f"target {failure.target!r} matches no link{nearest(failure.target, names)}; the links are {', '.join(names)}"
    allowed = _VALUES[failure.kind]
    for name, value in failure.values.items():
        if name not in allowed:
            return (
                f"{failure.kind} has no value {name!r}{nearest(name, allowed)}; its values are {', '.join(allowed) or 'none'}"
            )
        low, high = _BOUNDS[name]
        unlimited = name == "rate_bits_per_s" and value == UNLIMITED
        if not unlimited and (isinstance(value, str) or not low <= value <= high):
            also = f", or {UNLIMITED!r}" if name == "rate_bits_per_s" else ""
            return f"{name} = {value!r}, expected a number from {low:g} to {high:g}{also}"
    if failure.kind != CUT and not failure.values:
        return f"{failure.kind} changes nothing: it needs {' or '.join(allowed)}"
    if failure.kind != SET and failure.duration_s == 0:
        return f"{failure.kind} needs a duration_s above 0"
    return None


def timeline(tape: FailureTape) -> list[Turn]:
    """Return beginnings and ends of a tape's failures, in the order of time. A failure that lasts for ever has no end."""
    turns = [Turn(failure.at_s, failure, True) for failure in tape.failures]
    turns += [Turn(f.at_s + f.duration_s, f, False) for f in tape.failures if f.duration_s > 0]
    return sorted(turns, key=lambda turn: turn.at_s)


def is_cut(lasting: Iterable[Failure]) -> bool:
    """Whether a link that these failures meet is cut."""
    return any(failure.kind == CUT for failure in lasting)


def left(conditions: LinkConditions, lasting: Iterable[Failure]) -> LinkConditions:
    """Return a link's conditions under failures, given in the order in which they began."""
    factor = 1.0
    for failure in lasting:
        if failure.kind == SET:
            conditions = changed(conditions, failure)
        elif failure.kind == SLOW:
            factor *= failure.number("factor", 1.0)
    return slowed(conditions, factor)


def changed(conditions: LinkConditions, setting: Failure) -> LinkConditions:
    """Return the conditions with the values of a ``link_set``."""
    values: dict[str, Any] = {name: None if value == UNLIMITED else value for name, value in setting.values.items()}
    return replace(conditions, **values)


def slowed(conditions: LinkConditions, factor: float) -> LinkConditions:
    """Return the conditions with the rate divided by a factor."""
    if conditions.rate_bits_per_s is None:
        return conditions
    return replace(conditions, rate_bits_per_s=conditions.rate_bits_per_s / factor)
