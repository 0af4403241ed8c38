"""The frame that the pictures of all experiments share: their question above them, and their place in a file of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from diloco_lab.experiment.spec import Experiment
from diloco_lab.published.pictures import standalone
from diloco_report.drawing.frame import text_at

LINE, LETTER = 19, 8.4  # pixels of a line of the question, and of a letter at most
MAX_LINES = 4


def picture(parts: Sequence[str], wide: int, high: int, question: str) -> str:
    """Return SVG as a file, with the question above: ``parts`` are drawn within ``wide`` x ``high`` pixels below it."""
    lines = textwrap.wrap(question, int(wide / LETTER), max_lines=MAX_LINES, placeholder=" …")
    above = LINE * len(lines) + 8
    title = "".join(text_at("title", 4, LINE * (number + 1) - 5, "start", line) for number, line in enumerate(lines))
    body = f'{title}<g transform="translate(0 {above})">{"".join(parts)}</g>'
    shape = f'viewBox="0 0 {wide} {high + above}" role="img" aria-label="{escape(question)}"'
    return standalone(f'<svg class="rows" {shape}>{body}</svg>')


def loss_of(experiment: Experiment) -> str:
    """Return what an experiment's losses are, with their units where the task is the one that comes with this version."""
    task = experiment.settings_of(next(iter(experiment.arms)), experiment.first_seed).task.name
    return "validation loss, nats per byte" if task == "gpt" else "validation loss"
