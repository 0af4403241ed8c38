"""Versions in each second of a run whose links are all cut for a minute, by the simulator, as a picture.

    python bench/even_rounds.py                    # prints the figures, and draws docs/even-rounds.svg; two seconds
    python bench/even_rounds.py --counts FILE      # writes the versions in each second as JSON instead

Eight learners, ``--preset published`` (24 fragments, H = 24), steps of 1.00 to 1.07 s, 0.3 s one way, a commit in 0.05 s. All
links are cut from 120 s to 180 s. The upper panel has the rule of earlier versions: a fragment was due H steps after its owner
had heard that its last version was applied. Its counts are in ``even_rounds_before.json``, with the commit whose modules made
them by ``--counts``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diloco.settings.presets import run_settings
from diloco_lab.published.pictures import WIDTH, standalone
from diloco_lab.simulator import simulation
from diloco_lab.simulator.cluster import MICROS, ClusterLearner, LearnerLink, RoundTerms
from diloco_lab.simulator.outcome import MergedVersion, Scenario
from diloco_report.drawing.charts import time_axis
from diloco_report.drawing.frame import across, nice_ticks, text_at

BEFORE = Path(__file__).with_name("even_rounds_before.json")
PICTURE = Path(__file__).parents[1] / "docs" / "even-rounds.svg"
LEARNERS, FRAGMENTS, H = 8, 24, 24
STEP_S, SLOWER_S, ONE_WAY_S, ANSWER_S, COMMIT_S = 1.0, 0.01, 0.3, 0.02, 0.05
CUT_S, HEALED_S, END_S = 120, 180, 420
BEGUN_S = 2 * H  # from then on rounds are in full swing
LEFT, TOP, HIGH, BETWEEN = 52, 34, 150, 56  # pixels: left margin, top margin, height of a panel, gap between two panels


def counts() -> list[int]:
    """Simulate the run; return the versions in each second."""
    learners = [
        ClusterLearner(f"learner-{n}", 1, 1, STEP_S + n * SLOWER_S, link=LearnerLink(delay_s=ONE_WAY_S))
        for n in range(LEARNERS)
    ]
    settings = run_settings("published", {"learners": LEARNERS, "fragments.count": FRAGMENTS, "round.steps": H})
    rounds = RoundTerms(settings, [1] * FRAGMENTS, answer_s=ANSWER_S, commit_s=COMMIT_S)
    cut = (CUT_S * MICROS, HEALED_S * MICROS)
    versions: list[MergedVersion] = []
    cuts = {learner.name: [cut] for learner in learners}
    simulation.simulate(Scenario(learners, float(END_S), 1, rounds, {}, cuts, on_version=versions.append))
    each = Counter(version.committed_us // MICROS for version in versions)
    return [each[second] for second in range(END_S)]


def evenness(each: Sequence[int], begin: int, end: int) -> tuple[int, int]:
    """Return the most versions in a second, and how many seconds have none."""
    part = each[begin:end]
    return max(part), part.count(0)


def picture(panels: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Draw the versions in each second, one panel for each named run."""
    scale = (WIDTH - 2 * LEFT) / END_S
    parts, top = [], TOP
    for name, each in panels:
        base = top + HIGH
        parts.append(text_at("region", LEFT, top - 12, "start", name))
        for tick in nice_ticks(0, FRAGMENTS, 5):
            y = base - HIGH * tick / FRAGMENTS
            parts += [across("grid", LEFT, WIDTH - LEFT, y), text_at("tick", LEFT - 8, y + 4, "end", f"{tick:g}")]
        x, wide = LEFT + CUT_S * scale, (HEALED_S - CUT_S) * scale
        parts.append(f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{HIGH}" style="fill:var(--soft);opacity:.13"/>')
        parts.append(text_at("label", x + wide / 2, top + 18, "middle", "all links are cut"))
        for second, versions in enumerate(each):
            if versions:
                begin, end = (round(LEFT + at_s * scale) for at_s in (second, second + 1))  # whole pixels: no gaps between
                tall = HIGH * versions / FRAGMENTS
                place = f'x="{begin}" y="{base - tall:.1f}" width="{end - begin}" height="{tall:.1f}"'
                parts.append(f'<rect {place} style="fill:var(--s0)"/>')
        top = base + BETWEEN
    high = top - BETWEEN
    parts.insert(0, time_axis(END_S, LEFT, scale, high))
    parts.append(text_at("axis", WIDTH / 2, high + 36, "middle", "time; upwards: versions of all fragments in a second"))
    body, label = "".join(parts), "Versions in each second, before and after all links were cut for a minute"
    return f'<svg class="rows" viewBox="0 0 {WIDTH} {high + 44}" role="img" aria-label="{label}">{body}</svg>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=Path, metavar="FILE", help="write the counts, and draw nothing")
    arguments = parser.parse_args()
    now = counts()
    if arguments.counts is not None:
        arguments.counts.write_text(json.dumps({"commit": "", "versions": now}) + "\n")
        return
    before = json.loads(BEFORE.read_text())
    panels = [
        (f"Due H steps after the last version (the earlier rule, commit {before['commit']})", before["versions"]),
        ("Due in a slot of the cycle", now),
    ]
    for name, each in panels:
        print(name)
        for what, begin, end in (
            ("undisturbed", BEGUN_S, CUT_S),
            ("two cycles after the cut", HEALED_S, HEALED_S + 2 * H),
            ("from then on", HEALED_S + 2 * H, END_S),
        ):
            most, without = evenness(each, begin, end)
            print(f"  {what:25} at most {most:2} versions in a second, {without:3} of {end - begin} seconds without one")
    PICTURE.write_text(standalone(picture(panels)))


if __name__ == "__main__":
    main()
