"""The evaluator: follows the log like a learner, contributes nothing, and says how good the global model is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.member.member import Boundary, Member
from diloco.process.observe import Logger
from diloco.service import rundir
from diloco.settings.run import RunSettings
from diloco_learner.island import Island
from diloco_learner.ngram import ngram_losses
from diloco_learner.task import GptTask, Task

EVERY_S = 8.0  # often enough for a curve, seldom enough to leave the processor to learners
IDLE_S = 0.5  # news wake it earlier; it then looks whether it is asked to end
NGRAMS = {1: "unigram", 2: "bigram", 3: "3-gram", 4: "4-gram"}
SAMPLE_TOKENS = 400


def units_of(task: Task) -> str | None:
    """Return the units of a task's loss, if it says them."""
    return getattr(getattr(task, "units", None), "loss", None)


class Evaluator:
    """Evaluates the global model every so often, at the very start and at the very end."""

    def __init__(
        self,
        island: Island,
        member: Member,
        settings: RunSettings,
        state_dir: Path,
        log: Logger,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        self.island, self.member, self.settings, self.log, self.stopping = island, member, settings, log, stopping
        self.file = state_dir / "evaluation.json"

    def run(self) -> None:
        """Evaluate until the run is over or this process is asked to end."""
        self._tell_of_text()
        # before a version of the log is written into it: learners may be far ahead of this process
        initial = self.island.evaluate()
        evaluated_s, changed = -EVERY_S, True
        while not self.stopping():
            boundary = self.member.boundary(None)
            changed |= self._apply(boundary)
            now_s = time.monotonic()
            if boundary.finished or (changed and now_s - evaluated_s >= EVERY_S):
                evaluated_s, changed = now_s, False
                loss = self.island.evaluate()
                self.member.report_loss(loss)
                self.log.debug("evaluated", val_loss=round(loss, 4), finished=boundary.finished)
                if boundary.finished:
                    self._save(initial, loss)
                    return
            self.member.wait(IDLE_S)

    def _tell_of_text(self) -> None:
        """Log how much text is evaluated on; warn if a model may know all of it by heart."""
        if isinstance(self.island.task, GptTask):
            corpus = self.island.task.data.corpus
            self.log.info("held_out_text", **corpus.describe())
            if corpus.to_evaluate.all_kept:
                self.log.warning(
                    "held_out_text_repeats_training",
                    source=corpus.source,
                    advice="the loss says how well text is remembered, not how well new text is predicted; give other text",
                )

    def _text(self) -> dict[str, Any]:
        """Return the text's hash, and validation losses of n-gram models of it; of a user's own task neither is known."""
        if not isinstance(self.island.task, GptTask):
            return {"text": None, "baselines": {}}
        corpus = self.island.task.data.corpus
        losses = ngram_losses(corpus.training_text(), corpus.to_evaluate.text, tuple(NGRAMS))
        return {"text": corpus.digest(), "baselines": {NGRAMS[order]: loss for order, loss in losses.items()}}

    def _apply(self, boundary: Boundary) -> bool:
        for fragment, applied in boundary.applies:
            self.island.write(self.member.map.fragments[fragment], applied.theta)
        return bool(boundary.applies)

    def _save(self, initial: float, final: float) -> None:
        """Write for the report how good the global model is: as it was initialised, and as the log ends."""
        result = {
            "val_loss_initial": initial,
            "val_loss": final,
            "units": units_of(self.island.task),
            "sample": self.island.sample(self.settings.seed, SAMPLE_TOKENS),
        } | self._text()
        rundir.write_json(self.file, result)
