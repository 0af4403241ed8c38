"""``diloco serve``: loops join by the line that it prints, and the run ends with a report."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tests.pace import DEADLINE_S

import diloco

TOKENS = 64


def _train(url: str, name: str) -> int:
    values = np.zeros((8, 8), np.float32)
    with diloco.join(url, run="mine", name=name, params={"w": values}, tokens=TOKENS, data="own", within_s=DEADLINE_S) as run:
        params: Any = run.params
        while not run.over:
            params["w"] += np.float32(0.1) * (1 - params["w"])
            params = run.step(params, loss=float(np.square(1 - params["w"]).mean()))
        steps: int = run.steps
        return steps


async def test_loops_join_by_the_line_that_is_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "diloco_ops.cli", "serve", "--run", "mine", "--run-dir", str(tmp_path / "mine")]
    options = ["--tokens", "20k", "--learners", "2", "--set", "fragments.count=2", "--plain", "--page", "none"]
    process = await asyncio.create_subprocess_exec(*command, *options, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            url = None
            while url is None:
                found = re.search(r'diloco\.join\("(.*)", run="mine"', (await process.stdout.readline()).decode())
                url = found[1] if found else None
            steps = await asyncio.gather(*(asyncio.to_thread(_train, url, name) for name in ("ann", "bob")))
            said = (await process.stdout.read()).decode()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert {name: its["steps"] for name, its in report["learners"].items()} == dict(zip(("ann", "bob"), steps, strict=True))
    assert "report:" in said
