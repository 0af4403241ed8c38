"""Cuts and heals of emulated links, as events of a run: from what the relay says of its links each time that it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

LOOK_S = 1.0  # between two looks


class Cuts:
    """The links that are cut, as known by the last look."""

    def __init__(self) -> None:
        self.links: frozenset[str] = frozenset()

    def look(self, status: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Take in the relay's links, and return what changed: the links' names, and what happened to them, in words.

        Without an answer (no links) nothing is known to have changed.
        """
        if not status:
            return []
        cut = frozenset(name for name, link in status.items() if link.get("state") == "cut")
        before, self.links = self.links, cut
        found = (("cut", cut - before), ("healed", before - cut))
        return [(_named(names), f"{_verb(names)} {what}") for what, names in found if names]


async def watch(ask: Callable[[], Mapping[str, Any]], tell: Callable[[str, str], None]) -> None:
    """Tell which links are cut and healed, again and again; ``ask`` returns the relay's links, in a thread."""
    cuts = Cuts()
    while True:
        for links, what in cuts.look(await asyncio.to_thread(ask)):
            tell(links, what)
        await asyncio.sleep(LOOK_S)


def _named(names: frozenset[str]) -> str:
    return f"link{'s' if len(names) > 1 else ''} {', '.join(sorted(names))}"


def _verb(names: frozenset[str]) -> str:
    return "are" if len(names) > 1 else "is"
