"""The tables of docs/simulator.md: each block is made from what was simulated, and a test compares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from diloco.errors import FormatError
from diloco_lab import bandwidth
from diloco_lab.bandwidth import ModelJob
from diloco_lab.published import comparison, mixed, published
from diloco_lab.published.comparison import Errors
from diloco_lab.simulator import goodput, recovery

_BLOCK = re.compile(r"(<!-- simulate: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks(rows: Sequence[goodput.GoodputRow], of_mixed: Sequence[mixed.Found]) -> dict[str, str]:
    """Return all blocks by name: Table 1 from ``rows``, Table 5 from ``of_mixed``, the others by themselves."""
    shown = [f"{quantity}, %:\n\n{markdown(*goodput.table(rows, quantity))}" for quantity in goodput.QUANTITIES]
    return {
        "goodput": "\n".join([*shown, _errors(comparison.of_goodput(rows))]),
        "mixed": markdown(*mixed.table(of_mixed)),
        **links(),
    }


def links() -> dict[str, str]:
    """Return the blocks that depend on no chance: bandwidth, Table 13, recovery."""
    job, every, found = ModelJob(), bandwidth.all_schedules(), comparison.links()
    tables = [
        f"{bandwidth.of(one)[0].upper()}{bandwidth.of(one)[1:]}:\n\n{markdown(*bandwidth.table(named, rates))}"
        for one, named, rates in found
    ]
    return {
        "bandwidth": markdown(*bandwidth.table(every, bandwidth.needed(job, every, published.UTILISATIONS))),
        "published-bandwidth": "\n".join([*tables, _errors(comparison.of_links(comparison.link_rows(found)))]),
        "recovery": markdown(*recovery.table(recovery.rows(recovery.NAMED, job.parameters, job.step_s))),
    }


def fill(page: str, made: Mapping[str, str]) -> str:
    """Return a page with its blocks made again: all between ``<!-- simulate: NAME -->`` and ``<!-- end -->``.

    Raises:
        FormatError: the page names a block that there is not, or has none.
    """
    names = [name for _, name, _ in _BLOCK.findall(page)]
    if not names or not set(names) <= set(made):
        found = ", ".join(names) or "none"
        raise FormatError(f"blocks `<!-- simulate: NAME -->` of the page: {found}; known blocks are {', '.join(made)}")
    return _BLOCK.sub(lambda block: f"{block[1]}{made[block[2]]}{block[3]}", page)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _errors(found: Sequence[Errors]) -> str:
    return markdown(comparison.HEAD, [each.texts() for each in found])
