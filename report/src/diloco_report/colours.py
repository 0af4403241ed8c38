"""Colours and short names of learners: of its own among those that are shown, and a shade of its region's.

Pure. The page and the terminal assign alike; a page's colour is a CSS value, a terminal's ``#rrggbb``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HUES = 8  # --s0 to --s7 of the style sheet, and as many of a terminal
MIX = 0.9  # of a shade with what it is mixed with, at most


def assigned(names: Sequence[str], regions: Mapping[str, str], order: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the hue and the number of the shade of each name, no two of them alike.

    Args:
        names: in the order in which they are shown.
        regions: the region by name; a name without one is in none.
        order: all regions, whose hues follow each other; without any, the names' hues do.
    """
    hues = {region: number % HUES for number, region in enumerate(order)}
    members: dict[int, int] = {}
    found = {}
    for place, name in enumerate(names):
        hue = hues.get(regions.get(name, ""), place % HUES)
        found[name] = hue, members.get(hue, 0)
        members[hue] = members.get(hue, 0) + 1
    return found


def css(hue: int, shade: int) -> str:
    """Return the CSS value of a shade: shade 0 is the hue itself, others are mixed with ink or paper in turn."""
    base = f"var(--s{hue})"
    if not shade:
        return base
    other = "ink" if shade % 2 else "paper"
    return f"color-mix(in oklab, {base} {round(100 * (1 - _mixed(shade)))}%, var(--{other}))"


def terminal(palette: Sequence[str], hue: int, shade: int) -> str:
    """Return ``#rrggbb`` of a shade of one of a palette's colours: shade 0 is that colour, others are lighter or darker."""
    base = palette[hue % len(palette)]
    if not shade:
        return base
    other, part = (255 if shade % 2 else 0), _mixed(shade)
    return "#" + "".join(f"{round((1 - part) * int(base[i : i + 2], 16) + part * other):02x}" for i in (1, 3, 5))


def _mixed(shade: int) -> float:
    """Return how much of a shade is ink or paper: a half, a quarter, three quarters and so on of ``MIX``."""
    number, part, size = (shade + 1) // 2, 0.0, 0.5
    while number:
        number, bit = divmod(number, 2)
        part, size = part + size * bit, size / 2
    return MIX * part


def short_names(names: Sequence[str], room: int) -> dict[str, str]:
    """Return names of at most ``room`` characters, where they differ: without their common beginning, or cut in the middle."""
    longest = max(map(len, names), default=0)
    if longest <= room:
        return {name: name for name in names}
    first, last = min(names), max(names)
    alike = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), 0)  # 0: a single name
    dropped = first.rfind("-", 0, alike) + 1
    return {name: cut_middle(name[dropped:], room) for name in names}


def cut_middle(text: str, room: int) -> str:
    """Return text of at most ``room`` characters, with an ellipsis in place of its middle."""
    if len(text) <= room:
        return text
    end = room // 2
    return f"{text[: room - end - 1]}…{text[len(text) - end :] if end else ''}"
