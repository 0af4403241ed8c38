"""An experiment's answer: a table, a picture with intervals, and a sentence for each claim."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from diloco.errors import SettingsError
from diloco_lab.experiment import curve_picture, curves, seed_picture, time_picture
from diloco_lab.experiment.generation import GENERATION, remark
from diloco_lab.experiment.methods import Measured
from diloco_lab.experiment.record import ExperimentRecord
from diloco_lab.experiment.runner import STOP_SEEDS, Results, compared, stopped
from diloco_lab.experiment.spec import Experiment, LossClaim
from diloco_lab.experiment.statistics import Paired, paired, seeds_for
from diloco_lab.experiment.tuning import wording
from diloco_lab.loss_history import reached_s

MARGIN = 0.01  # the difference that a claim should be able to tell


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim and what came of it; ``holds`` is None where there are fewer than two pairs."""

    claim: LossClaim
    paired: Paired
    holds: bool | None

    def sentence(self) -> str:
        """Return it in words."""
        claim, found = self.claim, self.paired
        if claim.of == "time":
            sooner = "later" if found.mean >= 0 else "sooner"
            mean = f"{claim.arm} reaches the loss of both {_percent(abs(found.mean))} {sooner} than {claim.against}"
        else:
            mean = f"{claim.arm} ends {_percent(abs(found.mean))} {'above' if found.mean >= 0 else 'below'} {claim.against}"
        if found.bound is None or found.spread is None:
            return f"{mean} in one pair of seeds: nothing is decided."
        enough = seeds_for(found.spread, MARGIN) or "More than 1,000"
        said = "holds" if self.holds else "does not hold"
        return (
            f"{mean} over {found.pairs} pairs (95 % bound {_signed(found.bound)}, spread of a pair {_percent(found.spread)}): "
            f"at most {_signed(claim.below)} {said}. {enough} pairs tell a difference of {_percent(MARGIN)}."
        )

    def number(self) -> str:
        """Return the mean difference with half of its 95 % interval, its one-sided bound, and the claim."""
        found = self.paired
        pairs = f"{found.pairs} pairs" if found.pairs > 1 else "1 pair"
        bound = "no bound" if found.bound is None else f"at most {_signed(found.bound)} with 95 %"
        return f"{_above(found)} ({pairs}), {bound}; claimed: at most {_signed(self.claim.below)}"


def verdicts(experiment: Experiment, results: Results) -> list[ClaimVerdict]:
    """Judge the claims by the seeds that both arms have ended; what diverged is in no average."""
    judged: list[ClaimVerdict] = []
    for claim in experiment.claims:
        compare = compared_times if claim.of == "time" else compared
        found = compare(results, claim.arm, claim.against)
        if found is not None:
            judged.append(ClaimVerdict(claim, found, None if found.bound is None else found.bound <= claim.below))
    return judged


def stops(experiment: Experiment, results: Results) -> list[str]:
    """Return a sentence for each arm that was not played on all seeds because of its first ones."""
    said: list[str] = []
    for arm, above in stopped(experiment, results).items():
        why = "diverged in each" if above is None else f"ended {_percent(above)} above {' and '.join(experiment.bars)}, or more"
        said.append(f"{arm} stopped after {STOP_SEEDS} seeds: it {why}.")
    return said


def compared_times(results: Results, arm: str, against: str) -> Paired | None:
    """Compare when two arms reach the higher one of their last losses, over the seeds whose losses along the way are known."""
    times: list[tuple[float, float]] = []
    for seed in sorted(results.losses(arm).keys() & results.losses(against).keys()):
        pair = [results.measured[name, seed] for name in (arm, against)]
        target = max(measured.loss or 0.0 for measured in pair)
        reached = [reached_s(measured.history or [], target) for measured in pair]
        if reached[0] is not None and reached[1]:
            times.append((reached[0], reached[1]))
    return paired(*zip(*times, strict=True)) if times else None


def rows(experiment: Experiment, results: Results) -> list[list[str]]:
    """Return the table's rows, one an arm, as :func:`head` names them."""
    made: list[list[str]] = []
    for arm in experiment.arms:
        known = results.losses(arm)
        measured = [m for (name, _), m in results.measured.items() if name == arm]
        diverged = sum(m.loss is None for m in measured)
        failed = sum(name == arm for name, _ in results.failed)
        values = list(known.values())
        mean = f"{np.mean(values):.4f}" if values else "-"
        spread = f"{np.std(values, ddof=1):.4f}" if len(values) > 1 else "-"
        members = [m.members for m in measured if m.members is not None]
        merged = [m.merged for m in measured if m.merged is not None]
        sent = [m.bytes_up * experiment.settings_of(arm, 0).learners / m.tokens for m in measured if m.bytes_up is not None]
        made.append(
            [
                arm,
                str(len(values)),
                mean,
                spread,
                *(_above(compared(results, arm, bar)) for bar in experiment.bars),
                f"{np.mean(members):.2f}" if members else "-",
                _percent(float(np.mean(merged))) if merged else "-",
                f"{np.mean(sent):.2f}" if sent else "-",
                *_times(measured, shown=_knows_times(results)),
                f"{diverged}" if not failed else f"{diverged}, {failed} failed",
            ]
        )
    return made


def head(experiment: Experiment, results: Results) -> list[str]:
    """Return the names of the table's columns."""
    above = [f"above {bar}" for bar in experiment.bars]
    times = ["goodput", "virtual s"] if _knows_times(results) else []
    return ["arm", "seeds", "loss", "spread", *above, "learners a version", "merged", "bytes sent a token", *times, "diverged"]


def _knows_times(results: Results) -> bool:
    """Whether trials measured their goodput, as those of earlier versions did not."""
    return any(measured.goodput is not None for measured in results.measured.values())


def _times(measured: Sequence[Measured], *, shown: bool) -> list[str]:
    """Return an arm's mean goodput and virtual time."""
    goodput = [m.goodput for m in measured if m.goodput is not None]
    times_s = [m.virtual_s for m in measured if m.virtual_s is not None]
    known = [_percent(float(np.mean(goodput))) if goodput else "-", f"{np.mean(times_s):.1f}" if times_s else "-"]
    return known if shown else []


def markdown(record: ExperimentRecord) -> str:
    """Return the page: question, table, sentences, what was tried to tune the arms, and where and when it was measured."""
    experiment, results = record.played, record.results
    lines = [experiment.question, "", *table(head(experiment, results), rows(experiment, results)), ""]
    if record.generation == GENERATION:
        lines += [f"* {verdict.sentence()}" for verdict in verdicts(experiment, results)]
    else:
        lines += [f"* {remark(record.generation)}: `diloco lab run {record.name}` plays them again."]
    lines += [f"* {sentence}" for sentence in stops(experiment, results)]
    lines += [f"* {arm}, seed {seed}, failed: {reason}" for (arm, seed), reason in sorted(results.failed.items())]
    lines += [f"* {arm}: {how}." for arm, how in record.chosen.items()]
    lines += [f"* {sentence}" for sentence in _post_trainings(experiment)]
    if record.asked.curves is not None:
        lines += _curves(record)
    if record.tried:
        said = [[one.arm, wording(one.values), f"{one.mean:.4f}", str(len(one.losses))] for one in record.tried]
        lines += ["", *table(["tuned arm", "tried", "loss", "seeds"], said)]
    lines += ["", ", ".join(f"{key} {value}" for key, value in record.where.items()) + ".", ""]
    return "\n".join(lines)


def _post_trainings(experiment: Experiment) -> list[str]:
    """Return a sentence for each post-training: its arms, its text, and what it changes."""
    arms: dict[str, list[str]] = {}
    for name, arm in experiment.arms.items():
        if arm.post_training is not None:
            said = f"`{arm.post_training.text}` of Python's library, {wording(arm.post_training.settings)}"
            arms.setdefault(said, []).append(name)
    return [
        f"Losses of {', '.join(names)} are those after further training on {said}, on held-out files of it."
        for said, names in arms.items()
    ]


def _curves(record: ExperimentRecord) -> list[str]:
    try:
        fit = curves.ScalingFit(curves.points(record.asked, record.results))
    except SettingsError as error:
        return [f"* {error}"]
    law = "`loss = E + A parameters^-alpha + B tokens^-beta`, with one E for all"
    said = [f"* {sentence}" for sentence in curves.sentences(record.asked, fit)]
    return [*said, f"* A point is {_percent(fit.scatter)} off its curve, {law}.", "", *table(curves.HEAD, curves.rows(fit))]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def _above(found: Paired | None) -> str:
    """Return a paired difference with half of its 95 % interval."""
    if found is None:
        return "-"
    half = "" if found.interval is None else f" ± {100 * (found.interval[1] - found.mean):.1f}"
    return f"{100 * found.mean:+.1f}{half} %"


@dataclass(frozen=True)
class Picture:
    """An SVG of an experiment, the end of its file's name, and what it shows."""

    suffix: str
    shows: str
    svg: str


def pictures(asked: Experiment, played: Experiment, results: Results) -> list[Picture]:
    """Return the pictures: of each arm that was ``played`` the losses by seed, their mean and its 95 % interval; or the curves.

    ``asked`` has the curves that are fitted, if any are. An experiment with claims of time also has the losses by time.
    """
    if asked.curves is not None:
        with contextlib.suppress(SettingsError):  # too few points yet
            svg = curve_picture.picture(asked, curves.ScalingFit(curves.points(asked, results)))
            return [Picture("", "by size and tokens, with fitted curves", svg)]
    made = [Picture("", "by seed, with 95 % intervals", seed_picture.picture(played, results))]
    if any(claim.of == "time" for claim in played.claims):
        made.append(Picture("-by-time", "by virtual time", time_picture.picture(played, results)))
    return made


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _signed(part: float) -> str:
    return f"{100 * part:+.1f} %"
