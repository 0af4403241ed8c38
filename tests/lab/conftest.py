"""``text``: the path of a text that a tiny model can learn from."""

from __future__ import annotations

import pytest
from tests.made.up_command import some_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trial") / "text.txt"
    path.write_text(some_text())
    return str(path)
