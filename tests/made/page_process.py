"""``diloco page`` in a process of its own, and a client of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.pace import DEADLINE_S


class PageProcess:
    """A process of ``diloco page``, and a client of it that has its token."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        words = [sys.executable, "-m", "diloco_ops.cli", "page", *arguments]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=folder, text=True, env=environment)
        assert self.process.stdout is not None
        self.said = next(line for line in self.process.stdout if "http" in line)
        found = re.search(r"(http://\S+)#(\w+)", self.said)
        assert found is not None
        self.url, self.token = found.groups()

    def fetch(self, path: str = "", values: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
        """Status and text of an answer; ``values``: of a form that is posted."""
        given = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        body = None if values is None else json.dumps(values).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body, given), timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def act(self, name: str, **values: str) -> Any:
        """The lines of an action, or the text of its error."""
        _, text = self.fetch(f"act/{name}", values)
        answered = json.loads(text)
        return answered.get("lines") or answered["error"]

    async def shows(self, *texts: str) -> str:
        """Wait until the page has all of these."""
        ends_s = time.monotonic() + DEADLINE_S
        while True:
            _, found = await asyncio.to_thread(self.fetch)
            if all(text in found for text in texts):
                return found
            assert time.monotonic() < ends_s, f"{texts} not in {found}"
            await asyncio.sleep(0.1)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
