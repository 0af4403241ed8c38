"""A page with results in it: each block that names an experiment is made from that experiment's raw results."""

from __future__ import annotations

import os
import re
from pathlib import Path

from diloco.errors import FormatError
from diloco_lab.experiment import answer, findings, record
from diloco_lab.experiment.record import SUFFIX

_FINDINGS = re.compile(r"(<!-- findings -->\n).*?(<!-- end -->)", re.DOTALL)
_ANSWERS = re.compile(r"(<!-- answers -->\n).*?(<!-- end -->)", re.DOTALL)
_BLOCK = re.compile(r"(<!-- lab: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, shown_in: Path, folder: Path) -> tuple[str, dict[Path, str]]:
    """Return a page with its blocks made from the raw results in ``folder``, and the pictures that it shows, by path.

    A block is all between ``<!-- lab: NAME -->`` and ``<!-- end -->``. Between ``<!-- findings -->`` and ``<!-- end -->`` are
    the tables of the papers' findings. After ``<!-- answers -->`` is the table of those that have a question of their own.
    Links to pictures are relative to ``shown_in``, the folder of the page.

    Raises:
        FormatError: an experiment's results are missing, or no results.
        SettingsError: an experiment is not one of this version.
    """
    pictures: dict[Path, str] = {}

    def made(block: re.Match[str]) -> str:
        name = block[2]
        path = folder / f"{name}{SUFFIX}"
        if not path.is_file():
            raise FormatError(f"the page names experiment {name!r}, but {path} does not exist; run it: diloco lab run {name}")
        known = record.read(path)
        shown: list[str] = []
        for each in answer.pictures(known.asked, known.played, known.results):
            file = folder / f"{name}{each.suffix}.svg"
            pictures[file] = each.svg
            shown.append(f"![losses of {name} {each.shows}]({os.path.relpath(file, shown_in)})\n")
        return "\n".join([f"{block[1]}{answer.markdown(known)}", *shown]) + block[3]

    page = _FINDINGS.sub(lambda block: f"{block[1]}{findings.tables(folder)}{block[2]}", page)
    page = _ANSWERS.sub(lambda block: f"{block[1]}{findings.summary(folder)}{block[2]}", page)
    return _BLOCK.sub(made, page), pictures
