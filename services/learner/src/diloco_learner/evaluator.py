"""The evaluator: follows the log like a learner, contributes nothing, and says how good the global model is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.errors import SettingsError
from diloco.member.member import Boundary, Member
from diloco.process.observe import Logger
from diloco.service import rundir
from diloco.settings.run import RunSettings
from diloco_learner.evaluation import Evaluation
from diloco_learner.members import users_errors
from diloco_learner.model import Evaluated
from diloco_learner.ngram import ngram_losses
from diloco_learner.task_api import evaluate_every_s, units_of
from diloco_learner.text import Corpus, TextData

IDLE_S = 0.5  # news wake it earlier; it then looks whether it is asked to end
NGRAMS = {1: "unigram", 2: "bigram", 3: "3-gram", 4: "4-gram"}
SAMPLE_TOKENS = 400


class Evaluator:
    """Evaluates the global model every so often, at the very start and at the very end."""

    def __init__(
        self,
        island: Evaluated,
        member: Member,
        settings: RunSettings,
        state_dir: Path,
        log: Logger,
        *,
        stopping: Callable[[], bool],
    ) -> None:
        self.island, self.member, self.settings, self.log, self.stopping = island, member, settings, log, stopping
        self.file = state_dir / "evaluation.json"
        self._initial: Evaluation | None = None
        self._newest: Evaluation | None = None

    def run(self) -> None:
        """Evaluate until the run is over or this process is asked to end.

        Raises:
            SettingsError: the task's own code raised an error; the losses that were found before it are told and saved.
        """
        self._tell_of_text()
        self._evaluate()  # before a version of the log is written into it: learners may be far ahead of this process
        evaluated_s, changed, every_s = -math.inf, True, evaluate_every_s(self.island.task)
        while not self.stopping():
            boundary = self.member.boundary(None)
            changed |= self._apply(boundary)
            now_s = time.monotonic()
            if boundary.finished or (changed and now_s - evaluated_s >= every_s):
                evaluated_s, changed = now_s, False
                self._evaluate()
                self._tell(finished=boundary.finished)
                if boundary.finished:
                    self._save(samples=True)
                    return
            self.member.wait(IDLE_S)

    def _evaluate(self) -> None:
        """Evaluate the model; if the task's own code raises an error, tell and save the losses that are known.

        Raises:
            SettingsError: it did.
        """
        failure: SettingsError | None = None
        try:
            with users_errors(self.settings.task):
                found = self.island.evaluation()
            self._initial, self._newest, failure = self._initial or found, found, found.failure
        except SettingsError as error:
            failure = error
        if failure is not None:
            self._tell(finished=False)
            self._save(samples=False)
            raise failure

    def _tell(self, *, finished: bool) -> None:
        found = self._newest
        if found is not None:
            self.member.report_loss(found.loss)
            self.log.debug("evaluated", val_loss=_rounded(found.loss), values=_shown(found), finished=finished)

    def _tell_of_text(self) -> None:
        """Log how much text is evaluated on; warn if a model may know all of it by heart."""
        if (corpus := self._corpus()) is not None:
            self.log.info("held_out_text", **corpus.describe())
            if corpus.to_evaluate.all_kept:
                self.log.warning(
                    "held_out_text_repeats_training",
                    source=corpus.source,
                    advice="the loss says how well text is remembered, not how well new text is predicted; give other text",
                )

    def _corpus(self) -> Corpus | None:
        """Return the text that the task is trained and evaluated on; None: on other data."""
        data = getattr(self.island.task, "data", None)
        return data.corpus if isinstance(data, TextData) else None

    def _text(self) -> dict[str, Any]:
        """Return the text's hash, and validation losses of n-gram models of it; of other data neither is known."""
        corpus = self._corpus()
        if corpus is None:
            return {"text": None, "baselines": {}}
        losses = ngram_losses(corpus.training_text(), corpus.to_evaluate.text, tuple(NGRAMS))
        return {"text": corpus.digest(), "baselines": {NGRAMS[order]: loss for order, loss in losses.items()}}

    def _apply(self, boundary: Boundary) -> bool:
        for fragment, applied in boundary.applies:
            self.island.write(self.member.map.fragments[fragment], applied.theta)
        return bool(boundary.applies)

    def _save(self, *, samples: bool) -> None:
        """Write for the report how good the global model is: as it was initialised, and as it was last.

        Raises:
            SettingsError: the task's ``sample`` raised an error; all else is written.
        """
        initial, final, sample, failure = self._initial, self._newest, None, None
        if initial is None or final is None:
            return
        try:
            with users_errors(self.settings.task):
                sample = self.island.sample(self.settings.seed, SAMPLE_TOKENS) if samples else None
        except SettingsError as error:
            failure = error
        result = {
            "val_loss_initial": initial.loss,
            "val_loss": final.loss,
            "values_initial": initial.finite_values(),
            "values": final.finite_values(),
            "units": units_of(self.island.task)["loss"],
            "item": units_of(self.island.task)["item"],
            "sample": sample,
        } | self._text()
        rundir.write_json(self.file, result)
        if failure is not None:
            raise failure


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _shown(found: Evaluation) -> dict[str, float | None]:
    return {name: _rounded(value) for name, value in found.finite_values().items()}
