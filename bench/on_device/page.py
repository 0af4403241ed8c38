"""The page of ``bench/accelerator.py``: tables of its results, in Markdown. Nothing of the project is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NAMES = {"jax": "JAX", "torch": "PyTorch"}
GIB, MB = 1 << 30, 10**6
PACE, BLOCKED = 0.98, 0.005  # what a learner is to reach beside the bare loop
NONE = "not measured"
PEAKS = {  # bfloat16 without sparsity, FLOP/s, by a part of the device's name; the first that fits
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
    "A10G": 70e12, "4090": 165e12,
}  # fmt: skip

Found = Mapping[str, Any]
Cell = Callable[[Found], str | None]


def peak_flops(kind: str) -> float | None:
    """Return the operations a second that a device of this name can do in bfloat16; None: it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)


def utilisation(plan: Found, tokens_per_s: float, kind: str) -> float | None:
    """Return the share of a device's operations that are those of the model (MFU); None: its peak is not known."""
    peak = peak_flops(kind)
    a_token = 6.0 * parameters_of(plan) + 12.0 * plan["layers"] * plan["width"] * plan["context"]
    return None if peak is None else tokens_per_s * a_token / peak


def parameters_of(plan: Found) -> int:
    """Return the parameters of a plan that was stored."""
    from on_device.plan import parameters

    return parameters(plan["layers"], plan["width"])


def render(results: Found) -> str:
    """Return the page."""
    parts: Found = results["parts"]
    return (
        "\n".join([*_head(results), *_targets(parts), *_pace(results), *_device(parts), *_whole(parts), *_states(parts)]) + "\n"
    )


def _head(results: Found) -> Iterator[str]:
    there: Found = results["parts"].get("machine", {}).get("result", {})
    yield "# A learner on an accelerator"
    yield ""
    if results.get("plan", {}).get("dry"):
        yield "**Everything is small, so these figures mean nothing for an accelerator.**"
        yield ""
    yield f"`bench/accelerator.py`, {results.get('written', '')}. The driver says: {there.get('driver', NONE)}."
    for name, shown in NAMES.items():
        said = there.get(name, {"missing": NONE})
        yield f"{shown} {said['version']} on {said['kind']}." if "version" in said else f"{shown}: {said['missing']}."
    if "plan" in results:
        plan = results["plan"]
        yield (
            f"A GPT of {parameters_of(plan):,} parameters in {plan['dtype']}, {plan['batch']} sequences of "
            f"{plan['context']} bytes a step, H = {plan['interval']}."
        )
    yield ""


def _targets(parts: Found) -> Iterator[str]:
    yield "| | target | " + " | ".join(NAMES.values()) + " |"
    yield "|---|---|---|---|"
    rows: list[tuple[str, str, str, Cell]] = [
        (
            "tokens/s of a learner, of the bare loop",
            f"at least {100 * PACE:.0f} %",
            "pace",
            lambda its: _reached(its.get("ratio"), PACE, 1),
        ),
        ("blocked", f"at most {100 * BLOCKED:.1f} %", "pace", lambda its: _reached(its.get("blocked"), BLOCKED, -1)),
        ("peak of device memory above the bare loop's, in fragments", "at most 1", "device", _above),
    ]
    for title, target, part, cell in rows:
        yield _row(title, [target, *(_cell(parts, f"{name}-{part}", cell) for name in NAMES)])
    yield ""


def _reached(value: float | None, target: float, sign: int) -> str | None:
    if value is None:
        return None
    return f"{100 * value:.2f} %" if sign * (value - target) >= 0 else f"**{100 * value:.2f} %**"


def _above(its: Found) -> str | None:
    if "peak_bytes" not in its:
        return None
    above = (its["peak_bytes"] - its["bare_peak_bytes"]) / its["fragment_bytes"]
    return f"{above:.2f}" if above <= 1 else f"**{above:.2f}**"


def _pace(results: Found) -> Iterator[str]:
    parts, there = results["parts"], results["parts"].get("machine", {}).get("result", {})
    yield (
        "| one learner, and two that share the device | "
        + " | ".join(f"{shown}, {count}" for shown in NAMES.values() for count in ("one", "two"))
        + " |"
    )
    yield "|---|---|---|---|---|"
    names = [(name, f"{name}-{part}") for name in NAMES for part in ("pace", "two")]

    def mfu(name: str) -> Cell:
        return lambda its: share_of(its, name)

    def share_of(its: Found, name: str) -> str | None:
        share = (
            utilisation(results["plan"], its["tokens_per_s"], there.get(name, {}).get("kind", ""))
            if "plan" in results
            else None
        )
        return None if share is None else f"{100 * share:.1f} %"

    rows: list[tuple[str, Cell]] = [
        ("sequences a step", lambda its: f"{its['batch']}"),
        ("tokens/s", lambda its: f"{its['tokens_per_s']:,.0f}"),
        ("tokens/s of bare loops", lambda its: f"{its['bare_tokens_per_s']:,.0f}"),
        ("ratio of a step's times, interval of 95 %", lambda its: interval(its)),
        ("step, bare step", lambda its: f"{1e3 * its['step_s']:.1f}, {1e3 * its['bare_step_s']:.1f} ms"),
        ("blocked", lambda its: f"{100 * its['blocked']:.2f} %"),
        ("peak of device memory, bare", lambda its: f"{_gib(its.get('peak_bytes'))}, {_gib(its.get('bare_peak_bytes'))}"),
        ("processor time of a step, bare", lambda its: f"{1e3 * its['host_s']:.1f}, {1e3 * its['bare_host_s']:.1f} ms"),
    ]
    for title, cell in rows:
        yield _row(title, [_cell(parts, part, cell) for _, part in names])
    yield _row("model FLOP utilisation", [_cell(parts, part, mfu(name)) for name, part in names])
    yield ""


def interval(its: Found) -> str:
    """Return a ratio with its interval, as far as there is one."""
    return f"{its['ratio']:.3f}" + (f" ({its['low']:.3f} to {its['high']:.3f})" if "low" in its else "")


def _gib(size_bytes: float | None) -> str:
    return NONE if size_bytes is None else f"{size_bytes / GIB:.2f} GiB"


def _device(parts: Found) -> Iterator[str]:
    yield "| a fragment written and one read at each step, without a run | " + " | ".join(NAMES.values()) + " |"
    yield "|---|---|---|"
    rows: list[tuple[str, Cell]] = [
        ("steps, of bare ones", lambda its: interval(its)),
        ("the trainer's thread, a boundary", lambda its: f"{1e3 * its['boundary_s']:.2f} ms"),
        (
            "a fragment's copy to the host, alone",
            lambda its: f"{1e3 * its['to_host_s']:.2f} ms of {its['fragment_bytes'] / MB:.1f} MB",
        ),
        ("first step; all programs of fragments", lambda its: f"{its['first_step_s']:.1f} s; {its['prepare_s']:.1f} s"),
        ("copies to the host, beside kernels", lambda its: _copies(its["trace"], "to_host")),
        ("copies to the device, beside kernels", lambda its: _copies(its["trace"], "to_device")),
        ("device idle in a step, bare", lambda its: _idle(its)),
    ]
    for title, cell in rows:
        yield _row(title, [_cell(parts, f"{name}-device", cell) for name in NAMES])
    yield ""


def _copies(traced: Found | None, kind: str) -> str | None:
    if traced is None:
        return "no device in the trace"
    beside = traced[f"{kind}_beside_kernels"]
    return (
        "none"
        if beside is None
        else f"{1e3 * traced[f'{kind}_s']:.2f} ms a step, {100 * beside:.0f} % ({traced[f'{kind}_about']})"
    )


def _idle(its: Found) -> str | None:
    if its["trace"] is None or its["bare_trace"] is None:
        return "no device in the trace"
    return ", ".join(
        f"{1e3 * its[name]['idle_s']:.2f} ms ({100 * its[name]['idle']:.1f} %)" for name in ("trace", "bare_trace")
    )


def _whole(parts: Found) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for title, part, cell in WHOLE:
        yield _row(title, [_cell(parts, part, cell)])
    yield ""


def _replay(its: Found) -> str | None:
    if "same_bits" not in its:
        return None
    said = "the same bits" if its["same_bits"] else f"**other bits**: {its['differs']}"
    return f"{its['replayed_steps']} steps in {its['replay_s']:.1f} s: {said}" + (
        f"; {its['unchecked']}" if its["unchecked"] else ""
    )


def _none_torn(its: Found) -> str | None:
    if "torn" not in its:
        return None
    return "none" if not its["torn"] else f"**{its['torn']:,}**"


def _stages(its: Found) -> str | None:
    if "stages" not in its:
        return None
    rows = ", ".join(f"{name} {row['s']:.1f} s" for name, row in its["stages"].items())
    smaller = f" ({its['smaller_because']})" if its["smaller_because"] else ""
    return f"{its['parameters']:,} parameters{smaller}: {rows}; peak of device memory {_gib(its.get('peak_bytes'))}"


WHOLE: Sequence[tuple[str, str, Cell]] = (
    ("a killed learner steps again", "replay", lambda its: f"after {its['return_s']:.1f} s"),
    ("its checkpoint", "replay", lambda its: f"{its['checkpoint_bytes'] / MB:.1f} MB"),
    ("`diloco verify`", "replay", lambda its: "holds" if its["verified"] else "**does not hold**"),
    ("`diloco replay --learners`", "replay", _replay),
    ("the same with `--xla_gpu_deterministic_ops=true`", "replay-deterministic", _replay),
    (
        "JAX and PyTorch in one run",
        "mixed",
        lambda its: f"in {100 * its['jax']:.0f} % and {100 * its['torch']:.0f} % of the versions",
    ),
    (
        "encoding, folding, processor time a step",
        "host",
        lambda its: f"{1e3 * its['encode_s']:.1f}, {1e3 * its['fold_s']:.1f} ms",
    ),
    ("a large model", "large", _stages),
    (
        "steps of a loop of PyTorch's own with a fragment written and one read, of bare ones",
        "torch-loop",
        lambda its: interval(its),
    ),
    ("in its thread, a boundary", "torch-loop", lambda its: f"{1e3 * its['boundary_s']:.2f} ms"),
    ("its copies to the host, beside kernels", "torch-loop", lambda its: _copies(its["trace"], "to_host")),
    ("its copies to the device, beside kernels", "torch-loop", lambda its: _copies(its["trace"], "to_device")),
    ("device idle in a step of it, bare", "torch-loop", lambda its: _idle(its)),
    ("peak of device memory above the bare loop's, in fragments", "torch-loop", lambda its: _above(its)),
    ("values that a later step has changed in a copy", "torch-loop", lambda its: _none_torn(its)),
    ("a plain loop of JAX and optax by a learner's step", "jax-plain", lambda its: interval(its)),
    ("a data-parallel loop of PyTorch by a learner's step", "torch-plain", lambda its: interval(its)),
)


def _states(parts: Found) -> Iterator[str]:
    yield "| part | | seconds | why not, or not all |"
    yield "|---|---|---|---|"
    for name, part in parts.items():
        yield _row(name, [part["state"], f"{part['took_s']:.0f}", part["why"].replace("|", "/").replace("\n", " ")])


def _cell(parts: Found, part: str, cell: Cell) -> str:
    """Return what a part has found; a part that failed may have found this all the same."""
    its = parts.get(part, {}).get("result", {})
    try:
        return (cell(its) if its else None) or NONE
    except KeyError:
        return NONE


def _row(title: str, cells: Sequence[str]) -> str:
    return f"| {title} | " + " | ".join(cells) + " |"
