"""Pages of ``docs/`` as tests type them: a block of commands names the hosts on which it is typed (```` ```sh us eu ````)."""

from __future__ import annotations

import re
from pathlib import Path

Block = tuple[list[str], str]  # hosts, and what is typed on each

_BLOCK = re.compile(r"^( *)```sh ([a-z]+(?: [a-z]+)*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def sections(page: Path) -> dict[str, str]:
    """Return the texts of a page by their headings of the second level."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str) -> list[Block]:
    """Return the blocks of a text that name hosts. Their lines have no indentation."""
    return [
        (hosts.split(), re.sub(rf"^{indent}", "", lines, flags=re.MULTILINE)) for indent, hosts, lines in _BLOCK.findall(text)
    ]


def block_with(text: str, words: str) -> str:
    """Return the one block of commands in a text that has the words, whether it names hosts or not."""
    found = [block for block in re.findall(r"^```sh[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if words in block]
    assert len(found) == 1, f"{len(found)} blocks have {words!r}"
    return str(found[0])
