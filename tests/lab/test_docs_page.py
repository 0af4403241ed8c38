"""docs/simulator.md has what the simulators say; `diloco simulate report out.html --svg docs --page FILE` makes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diloco.errors import FormatError
from diloco_lab.published import docs_page, published
from diloco_lab.simulator import goodput
from diloco_lab.simulator.goodput import FleetConditions, points, sweep

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_tables_without_chance_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    for name, made in docs_page.links().items():
        assert f"<!-- simulate: {name} -->\n{made}<!-- end -->" in text, name


def test_the_goodput_table_has_all_published_cells_and_its_first_column_is_simulated_again() -> None:
    text = PAGE.read_text()
    block = text[text.index("<!-- simulate: goodput -->") :].partition("<!-- end -->")[0]
    assert sorted(re.findall(r"\((\d+)\)", block)) == sorted(
        f"{100 * share:.0f}"
        for row in published.CELLS.values()
        for cell in row.values()
        for share in (cell.goodput, cell.uptime)
        if share
    )
    rows = sweep(points(goodput.PUBLISHED, published.LEARNERS, (150_000,)), FleetConditions(), range(1, 9), 3 * 86400.0, 1)
    for quantity in goodput.QUANTITIES:
        for cells in goodput.table(rows, quantity)[1]:
            assert f"| {' | '.join(cells)} |" in block


def test_only_known_blocks_are_filled() -> None:
    made = {"one": "| new |\n"}
    assert (
        docs_page.fill("a\n<!-- simulate: one -->\nold\n<!-- end -->\nb", made)
        == "a\n<!-- simulate: one -->\n| new |\n<!-- end -->\nb"
    )
    with pytest.raises(FormatError, match="of the page: two; known blocks are one"):
        docs_page.fill("<!-- simulate: two -->\n<!-- end -->", made)
