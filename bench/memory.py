"""Memory: a syncer shard's per owned parameter, and a learner's per parameter above the parameters themselves.

    python bench/memory.py                       # 32M parameters, 24 fragments, two learners, int4 both ways
    python bench/memory.py --parameters 1000000 --cycles 1 --json

Peaks of resident memory, as the kernel counts them, of the product's own processes over a real nats-server (see
:mod:`parties`), in bytes a parameter:

* **joining**: the run is founded and loaded, with 12 bytes of keyframe a parameter
* **rounds in turn**: one fragment's round after another, as in a run: each fragment's is due once in a cycle of as many steps
* **rounds at once**: every fragment's round is due after the same step, as in a run of one fragment

A syncer's base is what a shard of a tiny model takes in the same rounds. A learner's is its process before it joins, which
holds the parameters, and what a learner of a tiny model takes above that in the same rounds. Both include Python, NumPy and
compiled loops. A learner's snapshots count, which a device may hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import script
from parties import Parties, running

from diloco.settings.presets import run_settings

TARGET_BYTES = 16.0
TINY = 100_000
WAIT_S = 600.0  # only ends what hangs
STEP_S = 0.05  # added to each step: those of a small model would outrun all rounds
MIB = 1 << 20


def peaks(parameters: int, fragments: int, learners: int, steps: int, cycles: int) -> dict[str, dict[str, int]]:
    """Peaks in bytes by stage and role, a learner's without its base; rounds are due every ``steps`` steps."""
    settings = run_settings(
        "decoupled",
        {
            "fragments.count": fragments,
            "learners": learners,
            "shards": 1,
            "round.steps": steps,
            "tokens": 10**12,
            "liveness.dead_s": 600,
            "liveness.lease_s": 600,
        },
    )
    result: dict[str, dict[str, int]] = {}
    with running(settings, parameters) as parties:
        for learner in parties.learners:
            learner.hear()
        bases = [learner.rss_bytes()[0] for learner in parties.learners]

        def stage(name: str, work: Callable[[Parties, int], None]) -> None:
            for party in (parties.syncer, *parties.learners):
                party.reset_peak()
            work(parties, steps * cycles)
            learner_bytes = max(p.rss_bytes()[1] - base for p, base in zip(parties.learners, bases, strict=True))
            result[name] = {"syncer": parties.syncer.rss_bytes()[1], "learner": learner_bytes}

        stage("joining", _join)
        stage("rounds at once" if steps == 1 else "rounds in turn", _step)
    return result


def _join(parties: Parties, _: int) -> None:
    for learner in parties.learners:
        learner.pipe.send(("join",))
    for learner in parties.learners:
        learner.hear()
    deadline_s = time.monotonic() + WAIT_S
    while parties.syncer.ask("fragments") < parties.run_settings.fragments.count:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the syncer has not taken over all fragments after {WAIT_S:.0f} s")
        time.sleep(0.1)


def _step(parties: Parties, steps: int) -> None:
    """Take steps until every learner has applied as many versions as they make due."""
    wanted = parties.run_settings.fragments.count * steps // parties.run_settings.round.steps
    applied = [0] * len(parties.learners)
    deadline_s = time.monotonic() + WAIT_S
    while min(applied) < wanted:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{min(applied)} of {wanted} versions after {WAIT_S:.0f} s")
        for learner in parties.learners:
            learner.pipe.send(("step",))
        applied = [known + int(learner.hear()) for known, learner in zip(applied, parties.learners, strict=True)]
        time.sleep(STEP_S)


def measure(parameters: int, fragments: int, learners: int, cycles: int) -> dict[str, Any]:
    """Both patterns of rounds, and the base that a shard has without parameters to speak of."""
    tiny = peaks(TINY, fragments, learners, fragments, 1)
    base, learner_base = (max(stage[role] for stage in tiny.values()) for role in ("syncer", "learner"))
    stages = peaks(parameters, fragments, learners, fragments, cycles) | {
        name: stage for name, stage in peaks(parameters, fragments, learners, 1, cycles).items() if name == "rounds at once"
    }
    return {
        "parameters": parameters,
        "fragments": fragments,
        "learners": learners,
        "cycles": cycles,
        "target_bytes": TARGET_BYTES,
        "syncer_base_bytes": base,
        "learner_base_bytes": learner_base,
        "stages": {
            name: {"syncer": (stage["syncer"] - base) / parameters, "learner": (stage["learner"] - learner_base) / parameters}
            for name, stage in stages.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print a result as text."""
    print(
        f"{result['parameters']:,} parameters in {result['fragments']} fragments, {result['learners']} learners; "
        f"a shard without parameters takes {result['syncer_base_bytes'] / MIB:.0f} MiB, rounds without parameters "
        f"{result['learner_base_bytes'] / MIB:.0f} MiB more of a learner"
    )
    print(f"{'peak, bytes a parameter':24}{'syncer':>9}{'learner':>9}   target {result['target_bytes']:.0f}")
    for name, stage in result["stages"].items():
        print(f"{name:24}{stage['syncer']:9.2f}{stage['learner']:9.2f}")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--parameters", type=int, default=32_000_000)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=3)
    arguments = parser.parse_args()
    result = measure(arguments.parameters, arguments.fragments, arguments.learners, arguments.cycles)
    script.print_result(result, arguments, show)


if __name__ == "__main__":
    main()
