"""The evaluator: follows the log like a learner, contributes nothing, and evaluates the global model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.core.run.run_length import SAMPLE_PARTS
from diloco.errors import SettingsError
from diloco.member.arrays import Boundary
from diloco.member.member import Member
from diloco.process.observe import Logger
from diloco.service import rundir
from diloco.settings.run import RunSettings
from diloco_learner.api.evaluation import Evaluation
from diloco_learner.api.members import users_errors
from diloco_learner.api.model import Evaluated
from diloco_learner.data.ngram import ngram_losses
from diloco_learner.task_api import default_prompt, evaluate_every_s, units_of
from diloco_learner.text import Corpus, TextData

IDLE_S = 0.5  # news wake it earlier; it then looks whether it is asked to end
NGRAMS = {1: "unigram", 2: "bigram", 3: "3-gram", 4: "4-gram"}
SAMPLE_TOKENS = 400
NOTHING = Evaluation(None, {})
SAMPLE_SHARE = 0.02  # of an evaluator's time for samples while the run goes on, at most; those at SAMPLE_PARTS do not count


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
        sample_every_s: float,
        stopping: Callable[[], bool],
    ) -> None:
        """``sample_every_s``: between two samples while the run goes on; 0: none."""
        self.island, self.member, self.settings, self.log, self.stopping = island, member, settings, log, stopping
        self.file = state_dir / "evaluation.json"
        self._initial = self._newest = NOTHING
        self._failure: SettingsError | None = None  # of the newest evaluation, or of a sample since
        self._bigram: float | None = None  # its loss, once it is known
        self._sample_every_s = sample_every_s
        self._sample_s = math.inf  # that one takes: the quickest of them, as the first one compiles its program
        self._sample_due_s = time.monotonic() + sample_every_s if sample_every_s else math.inf
        self._part = 1.0  # of the run's tokens that the model has: those before the first boundary are past

    def run(self) -> None:
        """Evaluate until the run is over or this process is asked to end.

        An error of the task's own code ends nothing: it is logged and told, and the next evaluation begins again.

        Raises:
            SettingsError: the last evaluation of a finished run failed so; all that was found is saved.
        """
        self._tell_of_text()
        self._evaluate()  # before a version of the log is written into it: learners may be far ahead of this process
        self._initial = self._newest
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
                    self._save()
                    return
            if self._reaches_part() or now_s >= self._sample_due_s:
                self._tell_sample()
            self.member.wait(IDLE_S)

    def _evaluate(self) -> None:
        """Evaluate the model, as far as the task's own code does not fail; log its error, once."""
        try:
            with users_errors(self.settings.task):
                self._newest = self.island.evaluation()
            self._note(self._newest.failure)
        except SettingsError as error:
            self._note(error)

    def _note(self, failure: SettingsError | None) -> None:
        if failure is not None and str(failure) != str(self._failure):
            self.log.error("evaluation_failed", reason=str(failure))
        self._failure = failure

    def _tell(self, *, finished: bool) -> None:
        found, failure = self._newest, self._failure
        self.member.report_evaluation(found.loss, None if failure is None else str(failure))
        self.log.debug("evaluated", val_loss=_rounded(found.loss), values=_shown(found), finished=finished)

    def _reaches_part(self) -> bool:
        """Whether the model has come to one of the parts of the run at which samples are drawn."""
        moment, before = self.member.moment(), self._part
        self._part = moment.tokens / moment.budget
        return self._sample_due_s < math.inf and any(before < part <= self._part for part in SAMPLE_PARTS)

    def _tell_sample(self) -> None:
        """Draw a sample and tell it; the longer one takes, the later is the next one. After an error only the last one is."""
        began_s = time.monotonic()
        try:
            text = self._draw()
        except SettingsError as error:
            self._sample_due_s = math.inf
            self._note(error)
            self._tell(finished=False)
            return
        took_s = time.monotonic() - began_s
        self._sample_s = min(self._sample_s, took_s)
        self._sample_due_s = began_s + max(self._sample_every_s, self._sample_s / SAMPLE_SHARE)
        if text is None:
            self._sample_due_s = math.inf
        else:
            self.member.report_sample(text)
            self.log.debug("sampled", characters=len(text), took_s=round(took_s, 3))

    def _draw(self) -> str | None:
        """Return text of the model's own behind its prompt, or why it is too early for text; None if the task draws none.

        Raises:
            SettingsError: the task's ``sample`` raised an error.
        """
        with users_errors(self.settings.task):
            if self._bigram is None and self._newest.loss is not None:
                self._bigram = bigram_loss(self.island.task)
            early = too_early(self._newest.loss, self._bigram)
            if early is not None:
                return early
            drawn, prompt = self.island.sample(self.settings.seed, SAMPLE_TOKENS), default_prompt(self.island.task)
            return None if drawn is None else prompt.lstrip("\n") + drawn

    def _tell_of_text(self) -> None:
        """Log how much text is evaluated on; warn if a model may know all of it by heart."""
        if (corpus := corpus_of(self.island.task)) is not None:
            self.log.info("held_out_text", **corpus.describe())
            if corpus.to_evaluate.all_kept:
                self.log.warning(
                    "held_out_text_repeats_training",
                    source=corpus.source,
                    advice="the validation text repeats the training text, so the loss measures memory rather than "
                    "prediction; give other text",
                )

    def _text(self) -> dict[str, Any]:
        """Return the text's hash, and validation losses of n-gram models of it; of other data neither is known."""
        corpus = corpus_of(self.island.task)
        if corpus is None:
            return {"text": None, "baselines": {}}
        losses = ngram_losses(corpus.training_text(), corpus.to_evaluate.text, tuple(NGRAMS))
        return {"text": corpus.digest(), "baselines": {NGRAMS[order]: loss for order, loss in losses.items()}}

    def _apply(self, boundary: Boundary) -> bool:
        for fragment, applied in boundary.applies:
            self.island.write(self.member.map.fragments[fragment], applied.theta)
        return bool(boundary.applies)

    def _save(self) -> None:
        """Write for the report how good the global model is: as it was initialised, and as it was last.

        Raises:
            SettingsError: the last evaluation failed, or the task's ``sample`` does; all else is written.
        """
        initial, final, sample = self._initial, self._newest, None
        try:
            sample = self._draw()
        except SettingsError as error:
            self._failure = self._failure or error
        result = {
            "val_loss_initial": initial.loss,
            "val_loss": final.loss,
            "values_initial": initial.finite_values(),
            "values": final.finite_values(),
            "units": units_of(self.island.task)["loss"],
            "item": units_of(self.island.task)["item"],
            "sample": sample,
            "failure": None if self._failure is None else str(self._failure),
        } | self._text()
        rundir.write_json(self.file, result)
        if self._failure is not None:
            raise self._failure


def corpus_of(task: object) -> Corpus | None:
    """Return the text that a task is trained and evaluated on; None: on other data."""
    data = getattr(task, "data", None)
    return data.corpus if isinstance(data, TextData) else None


def bigram_loss(task: object) -> float | None:
    """Return the validation loss of a model that counts pairs of bytes; None: the task is trained on other data than text."""
    corpus = corpus_of(task)
    return None if corpus is None else ngram_losses(corpus.training_text(), corpus.to_evaluate.text, (2,))[2]


def too_early(loss: float | None, bigram: float | None) -> str | None:
    """Return why a model has no text to show yet: its loss is that of a count of pairs of bytes, or above; None: it may."""
    if loss is None or bigram is None or loss < bigram:
        return None
    return f"too early for text: loss {loss:.2f}, counting pairs of bytes gives {bigram:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _shown(found: Evaluation) -> dict[str, float | None]:
    return {name: _rounded(value) for name, value in found.finite_values().items()}
