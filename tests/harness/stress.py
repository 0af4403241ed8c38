"""``make stress``: repeat tests beside busy processes, and keep one line of each run in a file.

``python -m tests.harness.stress --tests SELECTION --times N --busy N --file FILE``. A selection is a target of the Makefile
(``test``, ``test-services``, ``test-extras``, ``test-all``) or arguments of pytest. Lines of the same selection, number of
busy processes and commit count towards ``--times``, so a call that was cut off is repeated and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.harness import outcomes
from tests.harness.gate import ROOT, TARGETS
from tests.harness.measuring import processor_s
from tests.harness.outcomes import Outcomes

BUSY = "while True: pass"
PROFILE = "--hypothesis-profile=seeded"  # tests/conftest.py: draws by the seed, where `make test` draws the same each time


def main() -> int:
    """Run what is left of the campaign, and print it; the code is 0 if no run of it failed."""
    parser = argparse.ArgumentParser(prog="make stress")
    parser.add_argument("--tests", default="test", help="a target of the Makefile, or arguments of pytest")
    parser.add_argument("--times", type=int, default=20, help="runs in all, with those that the file has")
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside the tests")
    parser.add_argument("--file", type=Path, default=ROOT / "stress.jsonl", help="one line a run")
    options = parser.parse_args()
    campaign = {"tests": options.tests, "busy": options.busy, "commit": commit()}
    with _busy(options.busy):
        while (done := len(_lines(options.file, campaign))) < options.times:
            line = campaign | run(options.tests, done + 1)
            _append(options.file, line)
            print(f"run {done + 1} of {options.times}: {_said(line)}", flush=True)
    lines = _lines(options.file, campaign)
    print(*report(lines), sep="\n")
    return 0 if all(line["code"] == 0 for line in lines) else 1


def report(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a campaign's lines come to: each failed test with its count, and of each failure the seed and the logs."""
    failed: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        for failure in line["failed"]:
            failed[failure["test"]].append(failure | {"seed": line["seed"]})
    said = [f"{sum(line['code'] == 0 for line in lines)} of {len(lines)} runs passed"]
    for test, failures in sorted(failed.items(), key=lambda item: -len(item[1])):
        said.append(f"{test}: failed in {len(failures)} of {len(lines)} runs")
        said += [f"  seed {failure['seed']}, logs {failure['logs']}: {failure['reason']}" for failure in failures]
    return said


def run(selection: str, seed: int) -> dict[str, Any]:
    """Run the selection once, with a seed for what tests draw."""
    folder = Path(tempfile.mkdtemp(prefix="diloco-stress-"))
    written, output = folder / "outcomes.json", folder / "output.txt"
    seeded = [PROFILE, f"--hypothesis-seed={seed}"]
    environment = dict(os.environ) | {outcomes.VARIABLE: str(written)}
    words = shlex.split(selection)
    if selection in TARGETS:
        command = [sys.executable, "-m", "tests.harness.gate", selection, *seeded]
    else:
        command = [str(Path(sys.executable).parent / "pytest"), f"--basetemp={folder / 'logs'}", *seeded, *words]
    began, before, began_s = datetime.now(UTC), processor_s(), time.monotonic()
    with output.open("wb") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    found = Outcomes.read(written) or Outcomes()
    line = {
        "began": began.isoformat(timespec="seconds"),
        "seed": seed,
        "code": code,
        "wall_s": round(time.monotonic() - began_s, 1),
        "processor_s": round(processor_s() - before, 1),
        "pace": found.factor,
        "counts": dict(found.counts),
        "failed": [vars(failure) for failure in found.failures],
        "output": str(output),
    }
    if code == 0:
        shutil.rmtree(folder)
    return line


def _said(line: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{number} {what}" for what, number in line["counts"].items())
    failed = "".join(f"; {failure['test']}" for failure in line["failed"])
    used = f"{line['wall_s']:.0f} s at pace {line['pace']:.2f}, {line['processor_s']:.0f} s of processor time"
    return f"code {line['code']}, {counts or 'no test'}, {used}{failed}"


def _lines(path: Path, campaign: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of this campaign, without a line that was cut off while it was written."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if campaign.items() <= line.items():
                lines.append(line)
    return lines


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, on a line of its own also where the last one was cut off."""
    with path.open("a+b") as file:
        cut_off = file.tell() > 0 and path.read_bytes()[-1:] != b"\n"
        file.write(b"\n" * cut_off + json.dumps(line).encode() + b"\n")


def commit() -> str:
    """Return the commit, marked where files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    running = [subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
