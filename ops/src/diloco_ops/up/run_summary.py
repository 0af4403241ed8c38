"""The end of a run in a few lines of text, from its report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.core.run.run_length import SAMPLE_PARTS
from diloco_ops.finetune import harness
from diloco_report import compared
from diloco_report.facts import natural
from diloco_report.samples import trimmed
from diloco_report.units import count, decimal, duration, share, size, times

SAMPLE_NEAR = 0.15  # of the merged tokens: how far from one of the parts a sample may have been drawn
SAMPLE_LINES = 5  # of each of several samples
MISSED = 0.1  # of its rounds, by each learner: worth a sentence


def summarise(report: dict[str, Any], path: Path) -> None:
    """Print what came out of a run."""
    traffic, initial = report["traffic"], report["values_initial"]
    print(f"\n{_validation(report)}")
    for name, value in report["values"].items():
        print(f"  {name} {decimal(value)} (began at {decimal(initial.get(name))})")
    for sentence in compared.sentences(report, brief=True):
        print(f"  {sentence}")
    print(
        f"{count(report['tokens_processed'])} {report['item'] or 'token'}s in {duration(report['wall_s'])}, "
        f"{share(report['tokens_merged'] / max(1, report['tokens_processed']), 1)} of them merged, "
        f"{report['versions']} versions of {len(report['fragments'])} fragments"
    )
    if epochs := report["data"]["epochs"]:
        print(f"epochs by source: {', '.join(f'{name} {decimal(value, 2)}' for name, value in epochs.items())}")
    if continued := report["settings"].get("continues"):
        in_all = count(report["tokens_before"] + report["tokens_merged"])
        print(f"it continues run {continued['run']}, whose model had {count(report['tokens_before'])}: {in_all} merged in all")
    ratio = ", {} times {} than data-parallel".format(*times(traffic["ratio"])) if traffic["ratio"] else ""
    print(f"learners sent {size(traffic['bytes_up'])} and received {size(traffic['bytes_down'])}{ratio}")
    for name, learner in sorted(report["learners"].items(), key=lambda item: natural(item[0])):
        merged = learner["tokens_merged"] / max(1, learner["tokens_processed"])
        print(
            f"  {name}: {learner['steps']} steps of {learner['step_s']:.3f} s, "
            f"{share(learner['blocked_fraction'], 2)} blocked, {share(merged, 1)} of its tokens merged, "
            f"in {learner['rounds_merged']} versions, missed {learner['rounds_missed']}"
        )
    if missed := on_missed(report):
        print(missed)
    for line in harness.result_lines(path):
        print(line)
    for part, text in samples(report):
        lines = printable(trimmed(text)).split("\n")
        shown = lines[:SAMPLE_LINES] if part is not None else lines
        print(f"\na sample after {share(part)} of the tokens:" if part is not None else "\na sample:", *shown, sep="\n")
    print(f"\nreport: {path / 'report.html'}\nopen it: {(path / 'report.html').resolve().as_uri()}")
    print(f"serve it, at the page's address: diloco page {path}")


def on_missed(report: Mapping[str, Any]) -> str | None:
    """Return a sentence on rounds that every learner missed; None: they are few, or one learner alone was late or away."""
    pairs = [(learner["rounds_missed"], learner["rounds_merged"]) for learner in report["learners"].values()]
    least = min((missed / max(1, missed + merged) for missed, merged in pairs), default=0.0)
    if len(pairs) < 2 or least < MISSED:
        return None
    rounds = report["settings"]["round"]
    steps = rounds["overlap_steps"]
    capped = rounds.get("grace_capped", False)
    remedy = " and at most one step (round.grace_capped); with a larger round.quorum" if capped else "; with more of them"
    return (
        f"each learner missed {share(least)} of the versions or more: its offers came after the grace window, which is "
        f"part of round.overlap_steps ({steps:g}) steps{remedy} versions wait for more offers, and less work is dropped"
    )


def _validation(report: dict[str, Any]) -> str:
    """Return the validation loss as a sentence, or the reason why there is none."""
    if report["val_loss"] is None:
        return "no validation loss: the task has no validation set, or no version was evaluated"
    units = f" {report['units']}" if report["units"] else ""
    counted = "".join(f", {name} {value:.3f}" for name, value in report["baselines"].items())
    return f"validation loss {report['val_loss']:.4f}{units} (began at {decimal(report['val_loss_initial'])}{counted})"


def samples(report: Mapping[str, Any]) -> list[tuple[float | None, str]]:
    """Return samples with the part of the merged tokens after which each was drawn: near a tenth, a half, and the last.

    The last one alone has no part, where no earlier one was drawn near these.
    """
    last, whole = report["sample"], report["tokens_merged"]
    drawn = [(tokens / whole, str(text)) for _, tokens, _, text in report["series"].get("samples", [])] if whole else []
    found: list[tuple[float | None, str]] = []
    for wanted in SAMPLE_PARTS:
        near = min(drawn, key=lambda sample: abs(sample[0] - wanted), default=None)
        if near is not None and abs(near[0] - wanted) < SAMPLE_NEAR and near not in found:
            found.append(near)
    return [*found, *([(1.0 if found else None, str(last))] if last else [])]


def printable(text: str) -> str:
    """Return generated text without control characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text.expandtabs(4))
