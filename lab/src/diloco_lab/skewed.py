"""The built-in task with shares of different kinds of text: each learner trains on neighbouring folders alone.

Files of a corpus are sorted by path, and the usual share takes every M-th of them. Here share i is the i-th of M equal parts
of the text in that order: of Python's standard library one learner has asyncio and the tables of codecs, another one the
parsers. An experiment names it: ``task.name = "diloco_lab.skewed:task"``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from diloco.errors import SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner.task import GptTask
from diloco_learner.text import TextData, Windows


class SkewedTask(GptTask):
    """:class:`diloco_learner.task.GptTask` whose shares are neighbouring files."""

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Return windows int32 [batch, context + 1], or ``rows``, of the share-th of ``shares`` equal parts of the sorted text.

        Raises:
            DataError: the part is too short for one batch.
            SettingsError: the data are a mix.
        """
        if not isinstance(self.data, TextData):
            raise SettingsError("data: shares of one's own files are made of text, and not of a mix: give a file or a folder")
        text = self.data.corpus.training_text()
        part = text[text.size * share // shares : text.size * (share + 1) // shares]
        what = f"{self.data.corpus.source}, part {share} of {shares}"
        return Windows(part, self.data.context, self.data.batch, seed=seed, share=share, what=what).iterate(start, rows)


def task(settings: TaskSettings, data: str | None) -> SkewedTask:
    """Return the task of a run whose shares are skewed."""
    return SkewedTask(settings, data)
