"""The computing core: how fast it is, the whole way of a model's delta through it, and the memory that services take.

python bench/core.py kernels                             # a fragment of 4M values; 1 and 2 bits, int4, int8, bfloat16, float32
python bench/core.py kernels --values 100000 --json
python bench/core.py whole-way                           # 100M parameters, 24 fragments, one learner, int4 both ways
python bench/core.py whole-way --parameters 1000000 --repeat 1
python bench/core.py memory                              # 32M parameters, 24 fragments, two learners, int4 both ways
python bench/core.py memory --parameters 1000000 --cycles 1
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from harness.console import Bench, Result, Script
from harness.host import MIB, cpu_s, machine, peak_rss_bytes, reset_peak, rss_bytes, with_allocator
from harness.parties import Event, Parties, model, running
from numba.core.codegen import get_host_cpu_features
from numpy.typing import NDArray

from diloco.core.tensors import codec, outer, quantise
from diloco.core.tensors.fragments import Fragment, build_map
from diloco.core.tensors.merge import Accumulator
from diloco.core.tensors.weights import weight
from diloco.settings.presets import run_settings

Vector = NDArray[np.float32]
FRAGMENTS = 24
SETTINGS = run_settings("decoupled", {})
LEVEL = SETTINGS.codec.zstd_level
TOKENS, STEPS = 100_000, 24
TARGETS = {"encode": 0.8, "decode": 1.5, "merge of 4": 1.2, "merge of 8": 1.2, "fold in place": 0.4, "fold": 0.4}  # int4
WAY_TARGET_S = 2.0  # of 100M parameters
MEMORY_TARGET_BYTES = 16.0
TINY = 100_000
WAIT_S = 600.0  # only ends what hangs
STEP_S = 0.05  # added to each step: those of a small model would outrun all rounds


@dataclass(frozen=True)
class Row:
    """How long one thing takes, by repeat; ``values`` are those of all learners together."""

    name: str
    bits: int
    values: int
    best_s: float
    median_s: float
    target: float | None = None

    @property
    def best(self) -> float:
        """1e9 values a second, of the best repeat."""
        return self.values / self.best_s / 1e9

    @property
    def median(self) -> float:
        """1e9 values a second, of the median repeat."""
        return self.values / self.median_s / 1e9

    @property
    def ratio(self) -> float | None:
        """Best over target."""
        return None if self.target is None else self.best / self.target


def vectors() -> str:
    """Return the widest vector instructions of this processor that are known to matter."""
    features = get_host_cpu_features()
    return next((name for name in ("avx512f", "avx2", "neon") if f"+{name}" in features.split(",")), "neither AVX2 nor NEON")


def timed(
    name: str, bits: int, values: int, repeat: int, call: Callable[[], Any], prepare: Callable[[], Any] | None = None
) -> Row:
    """Time ``call``, after ``prepare``, which does not count."""
    times_s = []
    for _ in range(repeat + 1):
        if prepare is not None:
            prepare()
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    del times_s[0]  # caches are cold, and memory comes from the kernel
    target = TARGETS.get(name) if bits == 4 else None
    return Row(name, bits, values, min(times_s), statistics.median(times_s), target)


def open_body(packed: bytes, content_hash: bytes, n: int, bits: int) -> NDArray[np.uint8]:
    """Open a body as its receiver does."""
    body = codec.unpack([packed], quantise.body_bytes(n, bits))
    if codec.content_hash(body) != content_hash:
        raise SystemExit("core: a body came back as another")
    quantise.validate(body, n, bits)
    return body


def measure_bits(fragment: Fragment, bits: int, repeat: int) -> list[Row]:
    """All rows of one width."""
    n = fragment.size
    rng = np.random.default_rng(bits)
    vectors = [rng.standard_normal(n, np.float32) * np.float32(1e-3) for _ in range(8)]
    bodies = [quantise.quantise(vector, bits) for vector in vectors]
    offers = [(codec.pack(body, LEVEL), codec.content_hash(body)) for body in bodies]
    gradient, out = np.empty_like(vectors[0]), np.empty_like(vectors[0])
    segments = fragment.segments(SETTINGS.merge.granularity)

    def encode() -> None:
        body = quantise.quantise(gradient, bits, error=gradient)
        codec.pack(body, LEVEL)
        codec.content_hash(body)

    def merge(learners: int) -> Vector:
        held = [open_body(*offer, n, bits) for offer in offers[:learners]]  # a round holds them all until it merges
        accumulator = Accumulator(n, segments, SETTINGS.merge.method)
        for body in held:
            accumulator.add(body, bits, weight(TOKENS, STEPS, SETTINGS.merge.weights))
        return accumulator.result()

    theta, momentum = vectors[0].copy(), np.zeros_like(vectors[0])
    step = outer.NESTEROV.at(1, SETTINGS.outer.learning_rate, SETTINGS.outer.momentum)
    fold = partial(outer.fold, theta, momentum, bodies[0], bits, step)
    rows = [
        timed("encode", bits, n, repeat, encode, lambda: np.copyto(gradient, vectors[0])),
        timed("decode", bits, n, repeat, lambda: quantise.dequantise(open_body(*offers[0], n, bits), n, bits, out)),
        timed("merge of 4", bits, 4 * n, repeat, lambda: merge(4)),
        timed("merge of 8", bits, 8 * n, repeat, lambda: merge(8)),
        timed("fold in place", bits, n, repeat, fold),
        timed("fold", bits, n, repeat, lambda: fold(theta_out=np.empty_like(theta))),
    ]
    if bits == 4:
        rows += [
            timed("hash only", bits, n, repeat, lambda: outer.state_hash(theta, momentum)),
            timed("merge of 4, plain NumPy", bits, 4 * n, min(repeat, 3), lambda: naive_merge(bodies[:4], n, segments)),
            timed("float64 mean of 4", 32, 4 * n, min(repeat, 3), lambda: naive_mean(vectors[:4])),
        ]
        np.testing.assert_allclose(merge(4), naive_merge(bodies[:4], n, segments), rtol=1e-3, atol=1e-8)
    return rows


def naive_merge(bodies: list[NDArray[np.uint8]], n: int, segments: NDArray[np.int64]) -> Vector:
    """Radial-directional averaging of int4 bodies as one would write it in NumPy; all weights are equal."""
    sizes = np.diff(segments)
    total, radii = np.zeros(n, np.float32), np.zeros(sizes.size)
    for body in bodies:
        scales, packed = quantise.as_int4(body, n, 4)
        codes = np.concatenate([packed.reshape(-1, 32) & 15, packed.reshape(-1, 32) >> 4], axis=1).astype(np.float32) - 8
        values = (codes * (scales.astype(np.uint32) << 16).view(np.float32)[:, None]).reshape(-1)[:n]
        norms = np.sqrt(np.add.reduceat(values.astype(np.float64) ** 2, segments[:-1]))
        total += values * np.repeat(np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0), sizes).astype(np.float32)
        radii += norms
    lengths = np.sqrt(np.add.reduceat(total.astype(np.float64) ** 2, segments[:-1]))
    return total * np.repeat(radii / len(bodies) / lengths, sizes).astype(np.float32)


def naive_mean(vectors: list[Vector]) -> Vector:
    """Mean of float32 vectors, weighted by tokens, added up in float64."""
    total = np.zeros(vectors[0].size)
    for vector in vectors:
        total += vector.astype(np.float64) * TOKENS
    return (total / (TOKENS * len(vectors))).astype(np.float32)


def kernels(*, values: int = 4_000_000, repeat: int = 15) -> Result:
    """Measure encoding, decoding, merging and folding of a fragment on one core.

    * **encode**: displacement to offer: quantise with error feedback, zstd, hash of the content
    * **decode**: offer to float32: zstd, hash, validation, decoding
    * **merge of M**: M offers to the merged outer gradient, by the default method: for each zstd, hash, validation and weight
    * **fold**: outer step and state hash, in place as a syncer does it and into a new array as a learner does
    * **hash only**: the BLAKE3 of parameters and momentum in it, which no fold can be faster than

    Rates are 1e9 values a second; a merge's values are those of all its learners together. The peers' way is run beside it:
    plain NumPy doing the same as a merge of 4 int4 offers, and a float64 mean of float32 vectors weighted by tokens, which is
    what tsugi-mend 0.1.5 computes (0.17 to 0.225 measured on two cores of another machine, with its own code).
    """
    with_allocator()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    fragments = build_map(model(FRAGMENTS * values), FRAGMENTS).fragments
    fragment = max((f for f in fragments if not f.embedding), key=lambda f: f.size)
    rows = [row for bits in (1, 2, 4, 8, 16, 32) for row in measure_bits(fragment, bits, repeat)]
    by_name = {row.name: row for row in rows if row.bits == 4 or row.name == "float64 mean of 4"}
    ours = by_name["merge of 4"].best
    return {
        "machine": machine() | {"vectors": vectors(), "numpy": np.__version__},
        "values": fragment.size,
        "repeat": repeat,
        "rows": [asdict(row) | {"best": row.best, "median": row.median, "ratio": row.ratio} for row in rows],
        "times_plain_numpy": ours / by_name["merge of 4, plain NumPy"].best,
        "times_float64_mean": ours / by_name["float64 mean of 4"].best,
    }


def show_kernels(result: dict[str, Any]) -> None:
    about = result["machine"]
    print(
        f"{about['cpu']}, 1 of {about['cores']} cores, {about['vectors']}; Python {about['python']}, NumPy {about['numpy']}; "
        f"a fragment of {result['values']:,} values, {result['repeat']} repeats"
    )
    print(f"{'1e9 values/s':28}{'bits':>5}{'best':>9}{'median':>9}{'target':>9}{'ratio':>8}")
    for row in result["rows"]:
        target = f"{row['target']:9.2f}{row['ratio']:8.2f}" if row["target"] else ""
        print(f"{row['name']:28}{row['bits']:5}{row['best']:9.3f}{row['median']:9.3f}{target}")
    print(
        f"merge of 4 int4 offers: {result['times_plain_numpy']:.1f} times as fast as plain NumPy doing the same, "
        f"{result['times_float64_mean']:.1f} times as fast as a float64 mean of float32 vectors"
    )


def whole_way(*, parameters: int = 100_000_000, fragments: int = 24, repeat: int = 5) -> Result:
    """Measure the whole way of a model's delta: from a learner's last step before all rounds are due, to all versions applied.

    Every fragment goes once through snapshot, encode, publish, store, deliver, decode, merge, encode, append, deliver, decode,
    fold and apply; learner, syncer and nats-server are processes of their own on this machine. All rounds are due at once,
    which no run does: there they are spread over the steps between two rounds. Founding the run (a keyframe of 12 bytes a
    parameter) comes before it, and is told but not counted.

    By stage: ``busy_s`` is CPU time summed over its calls, ``wall_s`` the same of wall-clock time (waiting for a core counts),
    ``first_s`` and ``last_s`` when, from the last step's end, the first call began and the last ended.
    """
    settings = run_settings(
        "decoupled",
        {"fragments.count": fragments, "learners": 1, "shards": 1, "round.steps": 1, "tokens": 10**12, "liveness.dead_s": 600},
    )
    rounds: list[Result] = []
    with running(settings, parameters, trace=True) as parties:
        (learner,) = parties.learners
        learner.hear()
        founded_s = float(learner.ask("join"))
        while parties.syncer.ask("fragments") < fragments:
            time.sleep(0.2)
        time.sleep(2 * settings.liveness.heartbeat_s)  # the syncer has heard the learner, and reads the offers' stream
        rounds = [one_way(parties) for _ in range(repeat)]
    best = min(rounds, key=lambda result: float(result["wall_s"]))
    return {
        "parameters": parameters,
        "fragments": fragments,
        "founded_s": founded_s,
        "wall_s": best["wall_s"],
        "wall_median_s": statistics.median(result["wall_s"] for result in rounds),
        "target_s": WAY_TARGET_S * parameters / 1e8,
        "bytes_per_parameter": (best["bytes_up"] + best["bytes_down"]) / parameters,
        "best": best,
        "all_wall_s": [result["wall_s"] for result in rounds],
    }


def one_way(parties: Parties) -> Result:
    """Return what one round of all fragments takes."""
    (learner,), syncer = parties.learners, parties.syncer
    pids = {"learner": learner.pid, "syncer": syncer.pid, "nats-server": parties.server.pid}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    _, out_before, in_before = learner.ask("events")
    began_s, ended_s, stepped_cpu_s = learner.ask("round")
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    used["learner"] -= stepped_cpu_s
    events, out_after, in_after = learner.ask("events")
    stages = {"learner": by_stage(events, began_s), "syncer": by_stage(syncer.ask("events")[0], began_s)}
    for name, known in stages.items():
        known["event loop and rest"] = {"busy_s": used[name] - sum(stage["busy_s"] for stage in known.values())}
    moved = {"bytes_up": out_after - out_before, "bytes_down": in_after - in_before}
    return {"wall_s": ended_s - began_s, "cpu_s": used, **moved, "stages": stages}


def by_stage(events: list[Event], began_s: float) -> dict[str, dict[str, float]]:
    """Return sums of events that began after ``began_s``."""
    stages: dict[str, dict[str, float]] = {}
    for event in events:
        if event.began_s < began_s:
            continue
        stage = stages.setdefault(
            event.stage, {"calls": 0, "busy_s": 0.0, "wall_s": 0.0, "first_s": event.began_s - began_s, "last_s": 0.0}
        )
        stage["calls"] += 1
        stage["busy_s"] += event.cpu_s
        stage["wall_s"] += event.wall_s
        stage["first_s"] = min(stage["first_s"], event.began_s - began_s)
        stage["last_s"] = max(stage["last_s"], event.ended_s - began_s)
    return stages


def show_whole_way(result: dict[str, Any]) -> None:
    best = result["best"]
    print(f"{result['parameters']:,} parameters in {result['fragments']} fragments; founding took {result['founded_s']:.1f} s")
    print(
        f"whole way: {result['wall_s']:.2f} s (best of {len(result['all_wall_s'])}, median {result['wall_median_s']:.2f} s); "
        f"target {result['target_s']:.2f} s"
    )
    print(
        f"bytes: {best['bytes_up']:,} up, {best['bytes_down']:,} down, both ways "
        f"{result['bytes_per_parameter']:.3f} a parameter"
    )
    print("CPU time: " + ", ".join(f"{name} {value:.2f} s" for name, value in best["cpu_s"].items()))
    print(f"{'':28}{'calls':>6}{'busy_s':>9}{'wall_s':>9}{'first_s':>9}{'last_s':>9}")
    for process, stages in best["stages"].items():
        print(process)
        for name, stage in stages.items():
            cells = f"{stage['busy_s']:9.3f}"
            if "calls" in stage:
                cells = f"{stage['calls']:6}{cells}{stage['wall_s']:9.3f}{stage['first_s']:9.3f}{stage['last_s']:9.3f}"
            print(f"  {name:26}{cells if 'calls' in stage else ' ' * 6 + cells}")


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
        bases = [rss_bytes(learner.pid) for learner in parties.learners]

        def stage(name: str, work: Callable[[Parties, int], None]) -> None:
            for party in (parties.syncer, *parties.learners):
                reset_peak(party.pid)
            work(parties, steps * cycles)
            learner_bytes = max(peak_rss_bytes(p.pid) - base for p, base in zip(parties.learners, bases, strict=True))
            result[name] = {"syncer": peak_rss_bytes(parties.syncer.pid), "learner": learner_bytes}

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


def memory(*, parameters: int = 32_000_000, fragments: int = 24, learners: int = 2, cycles: int = 3) -> Result:
    """Measure the memory of a syncer shard by owned parameter, and of a learner above the parameters themselves.

    Peaks of resident memory, as the kernel counts them, of the product's own processes over a real nats-server, in bytes a
    parameter:

    * **joining**: the run is founded and loaded, with 12 bytes of keyframe a parameter
    * **rounds in turn**: one fragment's round after another, as in a run: each is due once in a cycle of as many steps
    * **rounds at once**: every fragment's round is due after the same step, as in a run with a single fragment

    A syncer's base is what a shard of a tiny model takes in the same rounds. A learner's is its process before it joins, which
    holds the parameters, and what a learner of a tiny model takes above that in the same rounds. Both include Python, NumPy and
    compiled loops. A learner's snapshots count, which a device may hold.
    """
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
        "target_bytes": MEMORY_TARGET_BYTES,
        "syncer_base_bytes": base,
        "learner_base_bytes": learner_base,
        "stages": {
            name: {"syncer": (stage["syncer"] - base) / parameters, "learner": (stage["learner"] - learner_base) / parameters}
            for name, stage in stages.items()
        },
    }


def show_memory(result: dict[str, Any]) -> None:
    print(
        f"{result['parameters']:,} parameters in {result['fragments']} fragments, {result['learners']} learners; "
        f"a shard without parameters takes {result['syncer_base_bytes'] / MIB:.0f} MiB, rounds without parameters "
        f"{result['learner_base_bytes'] / MIB:.0f} MiB more of a learner"
    )
    print(f"{'peak, bytes a parameter':24}{'syncer':>9}{'learner':>9}   target {result['target_bytes']:.0f}")
    for name, stage in result["stages"].items():
        print(f"{name:24}{stage['syncer']:9.2f}{stage['learner']:9.2f}")


SCRIPT = Script(__doc__, Bench(kernels, show_kernels), Bench(whole_way, show_whole_way), Bench(memory, show_memory))

if __name__ == "__main__":
    SCRIPT.run()
