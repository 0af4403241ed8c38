"""Measure learners on an accelerator, most important first, in as many minutes as there are.

    python bench/accelerator.py --out DIR                     # six minutes on a machine with a GPU
    python bench/accelerator.py --out DIR --only replay large # these parts alone: the others' results in DIR stay
    python bench/accelerator.py --out DIR --dry               # all of it in small, on a CPU: its figures mean nothing

It needs no network, and takes the JAX and the PyTorch that are there. After each part it writes DIR/accelerator.json, which has
everything, and DIR/accelerator.md, which has tables. A part is a process with a time limit of its own. One that fails, hangs or
has no memory says why in one line of both files, and the next one begins; DIR/PART.log is the end of what it wrote.

The code is 0 if nothing failed and both files are complete, and 1 otherwise.

Results are of a GPT of 127 million parameters in bfloat16. Its batch fills the device with a learner, the bare loop with which
it takes turns, and an evaluator; two learners and two bare loops have a smaller one. A bare loop is the learner's own step
without a run. Where neither JAX nor PyTorch has a GPU, everything is measured in small.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from on_device import child, page
from on_device.child import Outcome
from on_device.plan import DRY, FULL, PATHS, Plan

SPARE_S = child.LEAVE_S + 1.0  # of the time that is left: for the end of a child that is asked to end, and for writing
DRY_LEAST, DRY_MOST = 0.2, 4.0  # of a part's seconds: everything is small, on a machine that may be busy with other work


@dataclass(frozen=True)
class Part:
    """A part, the least time in which it is worth beginning, and the most that it is given."""

    name: str
    least_s: float
    most_s: float
    frameworks: tuple[str, ...]


PARTS = (
    Part("machine", 5, 90, ()),
    Part("jax-fit", 15, 120, ("jax",)),
    Part("jax-pace", 45, 150, ("jax",)),
    Part("torch-pace", 45, 150, ("torch",)),
    Part("jax-device", 25, 120, ("jax",)),
    Part("torch-device", 25, 120, ("torch",)),
    Part("torch-loop", 20, 90, ("torch",)),
    Part("jax-two", 45, 150, ("jax",)),
    Part("torch-two", 45, 150, ("torch",)),
    Part("replay", 45, 180, ("jax",)),
    Part("mixed", 40, 120, ("jax", "torch")),
    Part("host", 5, 60, ()),
    Part("large", 60, 240, ("jax",)),
    Part("jax-plain", 20, 90, ("jax",)),
    Part("torch-plain", 15, 90, ("torch",)),
    Part("replay-deterministic", 45, 180, ("jax",)),
)


# by part: the function of a module of on_device, which is imported in the part's own process alone, and what it is given
FUNCTIONS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "jax-fit": ("loops", "fit", ()),
    "host": ("loops", "host", ()),
    "torch-loop": ("torch_loop", "loop", ()),
    "replay": ("runs", "returned", ()),
    "replay-deterministic": ("runs", "deterministic", ()),
    "mixed": ("runs", "mixed", ()),
    "large": ("runs", "large_model", ()),
}
for _name in page.NAMES:
    FUNCTIONS |= {f"{_name}-pace": ("runs", "paced", (_name, 1)), f"{_name}-two": ("runs", "paced", (_name, 2))}
    FUNCTIONS |= {f"{_name}-device": ("loops", "device", (_name,)), f"{_name}-plain": ("loops", "plain", (_name,))}


def measure(name: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the results of a part, in the process that is made for it."""
    if name == "machine":
        yield from machine()
        return
    module, function, arguments = FUNCTIONS[name]
    work: Callable[..., Iterator[dict[str, Any]]] = getattr(importlib.import_module(f"on_device.{module}"), function)
    yield from work(plan, *arguments)


def machine() -> Iterator[dict[str, Any]]:
    """Yield what there is: the GPU by its driver, and by JAX and PyTorch."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "driver": driver()}
    yield found
    for name, ask in (("jax", _jax), ("torch", _torch)):
        try:
            found[name] = ask()
        except Exception as error:  # whatever a half-installed library raises
            found[name] = {"missing": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        yield found


def driver() -> str:
    """Return what nvidia-smi says of the GPUs, or why it says nothing."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no driver: {error}"
    return done.stdout.strip().replace("\n", "; ") or f"no driver: {done.stderr.strip()}"


def _jax() -> dict[str, Any]:
    import jax

    device = jax.local_devices()[0]
    return {"version": jax.__version__, "platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}


def _torch() -> dict[str, Any]:
    import torch

    there = torch.cuda.is_available()
    found = {"version": torch.__version__, "platform": "gpu" if there else "cpu"}
    return found | {"kind": torch.cuda.get_device_name(0) if there else "cpu", "count": torch.cuda.device_count()}


class Session:
    """All parts, one after another; ``results`` is what both files are made of."""

    def __init__(self, out: Path, minutes: float, plan: Plan, results: dict[str, Any]) -> None:
        self.out, self.plan, self.results = out, plan, results
        self.ends_s = time.monotonic() + 60 * minutes
        self.stored = False  # whether both files have all results

    def run(self, part: Part) -> None:
        """Measure a part, or say why it is not measured, and write both files."""
        outcome = self._measured(part)
        if outcome.full and self.plan.batch > 1:
            print(f"{part.name}: the device has no room: once more with half of the batch", flush=True)
            self.plan = self.plan.smaller()
            again = self._measured(part)
            outcome = again if again.state != "not measured" else outcome
        self._take(part, outcome)
        line = {key: value for key, value in asdict(outcome).items() if key != "said"}
        self.results["parts"][part.name] = line | {"batch": self.plan.batch}
        self.write()
        print(f"{part.name}: {outcome.state} in {outcome.took_s:.0f} s{': ' if outcome.why else ''}{outcome.why}", flush=True)
        if outcome.state == "failed" and outcome.said:
            self._write(f"{part.name}.log", outcome.said)

    def _measured(self, part: Part) -> Outcome:
        why = self._missing(part)
        if why:
            return Outcome("not measured", why)
        left_s = self.ends_s - time.monotonic() - SPARE_S
        least_s, most_s = (part.least_s * DRY_LEAST, part.most_s * DRY_MOST) if self.plan.dry else (part.least_s, part.most_s)
        if left_s < least_s:
            return Outcome("not measured", f"{max(0, left_s):.0f} s are left, and it needs {least_s:.0f}")
        command = [sys.executable, str(Path(__file__)), "--part", part.name, "--plan", self.plan.dump()]
        return child.run(command, environment(), min(left_s, most_s))

    def _missing(self, part: Part) -> str:
        """Return why a part cannot be measured; empty: nothing is known that hinders it."""
        there = self.results["parts"].get("machine", {}).get("result", {})
        for name in part.frameworks:
            said = there.get(name, {})
            if "missing" in said:
                return f"{page.NAMES[name]} is not there: {said['missing']}"
            if not self.plan.dry and said.get("platform", "gpu") == "cpu":
                return f"{page.NAMES[name]} has no GPU; the driver says: {there.get('driver')}"
        first = self.results["parts"].get("replay", {}).get("result", {})
        if part.name == "replay-deterministic" and first.get("same_bits") is not False:
            return "replay has not found other bits"
        return ""

    def _take(self, part: Part, outcome: Outcome) -> None:
        """Go by what a part has found."""
        found = outcome.result
        if part.name == "machine" and not self.plan.dry and all(name in found for name in page.NAMES):
            platforms = [found[name].get("platform", "none") for name in page.NAMES]
            if all(platform in ("cpu", "none") for platform in platforms):
                self.plan = DRY
                outcome.why = f"no GPU for JAX or PyTorch, so everything is small; the driver says: {found.get('driver')}"
        if part.name == "jax-fit" and found and not self.plan.dry:
            self.plan = replace(self.plan, batch=found["batch"], device_bytes=found["limit_bytes"])
        self.results["plan"] = asdict(self.plan)

    def write(self) -> None:
        """Write both files; where they cannot be written, say so, and print the results."""
        self.results["written"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        text = json.dumps(self.results, indent=1)
        self.stored = all([self._write("accelerator.json", text), self._write("accelerator.md", page.render(self.results))])
        if not self.stored:
            print(json.dumps(self.results), flush=True)

    def _write(self, name: str, text: str) -> bool:
        draft = self.out / f"{name}.draft"
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self.out / name)
        except OSError as error:
            why = f"{error.strerror}: free some room; it goes on"
            print(f"{self.out / name} cannot be written: {why}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            return False
        return True


def environment() -> dict[str, str]:
    """Return the environment of a part: tasks are found, no process takes a device's memory ahead, and learners leave soon."""
    paths = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "DILOCO_LEAVE_S": "1",
    }
    return {**os.environ, **own}


def known(file: Path, plan: Plan) -> tuple[dict[str, Any], Plan]:
    """Return the results in a folder's file, to which others are added, and their plan; fresh ones where it has none.

    The plan stays as it is where theirs is small and it is not, or the other way round.
    """
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        theirs = Plan.load(json.dumps(found["plan"]))
        return {"parts": dict(found["parts"])}, theirs if theirs.dry == plan.dry else plan
    except (OSError, ValueError, KeyError, TypeError):
        return {"parts": {}}, plan


def parser() -> argparse.ArgumentParser:
    """Return the parser of the script's arguments; the project's own harness may be missing here."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="a folder, for accelerator.json and accelerator.md")
    made.add_argument("--minutes", type=float, default=6.0)
    made.add_argument("--dry", action="store_true", help="all of it in small, on a CPU, too")
    made.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="these parts")
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--plan", help=argparse.SUPPRESS)
    return made


def main() -> None:
    asked = parser().parse_args()
    if asked.part:
        raise SystemExit(child.serve(lambda: measure(asked.part, Plan.load(asked.plan))))
    if asked.out is None:
        parser().error("--out is missing: a folder, for accelerator.json and accelerator.md")
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser().error(f"--out {asked.out}: {error.strerror}: name a folder that can be written")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(measured(asked))


def measured(asked: argparse.Namespace) -> int:
    """Measure all parts that are asked for, and return the exit code."""
    results: dict[str, Any] = {"parts": {}}
    plan = DRY if asked.dry else FULL
    if asked.only:
        results, plan = known(asked.out / "accelerator.json", plan)
    results |= {"dry": asked.dry, "minutes": asked.minutes}
    session = Session(asked.out, asked.minutes, plan, results)
    wanted = [part for part in PARTS if asked.only is None or part.name in (*asked.only, "machine")]
    for index, part in enumerate(wanted):
        try:
            session.run(part)
        except KeyboardInterrupt:
            for other in wanted[index:]:
                said = {"state": "not measured", "why": "interrupted", "took_s": 0.0, "result": {}}
                results["parts"].setdefault(other.name, said)
            session.write()
            print(f"interrupted in {part.name}; what was measured is in {asked.out}", file=sys.stderr)
            return 130
    failed = any(results["parts"][part.name]["state"] == "failed" for part in wanted)
    return 1 if failed or not session.stored else 0


if __name__ == "__main__":
    main()
