"""A mix of sources as a task's data: batches, held-out batches by source, vocabulary, and what all learners have alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diloco.errors import DataError, DilocoError, SettingsError
from diloco.settings import folders
from diloco.settings.run import MixedSource, MixSettings, RunSettings, TaskSettings
from diloco.storage.fetching import local_path
from diloco_learner.mix import agreement, documents, file, stored, tokenizer
from diloco_learner.mix.agreement import digest_of
from diloco_learner.mix.drafts import locked
from diloco_learner.mix.file import BINARY, CHATS, MixFile, SourceTable
from diloco_learner.mix.source_paths import find_path
from diloco_learner.mix.stored import StoredTokens
from diloco_learner.mix.tokenizer import Tokenizer
from diloco_learner.text import VALIDATION_WINDOWS, evenly

HUNDREDTHS = 100  # of the smallest weight, to which weights are rounded: sources take turns by whole numbers
MOST_WINDOWS = 1 << 32  # of a source: Grain shuffles 32-bit numbers


def is_mix(data: str | None) -> bool:
    """Return whether data are named by a ``mix.toml``."""
    return data is not None and data.endswith(file.SUFFIX)


@dataclass(frozen=True)
class MixSource:
    """A source of a mix, with its tokens; ``weight`` is in hundredths of the smallest one."""

    table: SourceTable
    stored: StoredTokens
    weight: int


class Mix:
    """The data of a ``mix.toml``, in windows int32 [batch, context + 1]. Making it the first time makes its tokens.

    Raises:
        SettingsError: the file says something that cannot be.
        DataError: a source is missing, unreadable or too small, or does not fit the tokenizer; it is named.
        AdmissionError: the run's learners have other data.
        ObjectStoreError: something of it lies at a place that cannot be read.
    """

    def __init__(self, settings: TaskSettings, data: str, cache_dir: Path | None = None) -> None:
        self.batch, self.context, self.data = settings.batch, settings.context, data
        self._cache_dir = cache_dir or folders.cache_dir()
        said = file.read(local_path(data, self._cache_dir))
        if CHATS in {table.kind for table in said.sources.values()}:
            raise SettingsError(
                f"{data}: its sources are conversations: train a model of transformers on them (diloco up --model), or "
                "see what they hold by diloco data --tokenizer DIR"
            )
        _check_installed(said)
        with locked(self._cache_dir / "data") as cache:
            texts = {
                name: documents.documents(name, table, self._place(name, table))
                for name, table in said.sources.items()
                if table.kind != BINARY
            }
            self.tokenizer: Tokenizer = tokenizer.make(
                said.tokenizer,
                said.vocabulary,
                lambda name: find_path(data, "tokenizer.file", name, self._cache_dir),
                list(texts.values()),
                cache,
            )
            smallest = min(table.weight for table in said.sources.values())
            self.sources = {
                name: MixSource(table, self._stored(name, table, texts, cache), int(table.weight * HUNDREDTHS / smallest))
                for name, table in sorted(said.sources.items())
            }
        self.settings = MixSettings(
            vocabulary=self.tokenizer.vocabulary,
            tokenizer=digest_of(self.tokenizer.digest),
            sources={name: _mixed(source) for name, source in self.sources.items()},
        )
        for name, source in self.sources.items():
            self._check_windows(name, source)
        if settings.mix is not None:
            agreement.check_same(self.settings, settings.mix, data)

    units = "nats per token"

    @property
    def vocabulary(self) -> int:
        """Tokens that the model tells apart: 0 to this number less one."""
        return self.tokenizer.vocabulary

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return text as tokens, uint32 [tokens].

        Raises:
            SettingsError: the mix has no tokenizer.
        """
        return self.tokenizer.encode([text])[0]

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Return the text of tokens, int32 [tokens]."""
        return self.tokenizer.decode(tokens)

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[NDArray[np.int32]]:
        """Return the batches of a share from the ``start``-th on, without end: int32 [batch, context + 1], or ``rows`` of each.

        Raises:
            DataError: a source has no window for the share.
        """
        from diloco_learner.mix import pipeline

        windows = {name: pipeline.TokenWindows(source.stored.training, self.context) for name, source in self.sources.items()}
        for name, source in windows.items():
            if len(source) < shares:
                raise DataError(
                    f"source {name!r}: its {source.tokens.size} training tokens make {len(source)} windows of "
                    f"{self.context} tokens, and each of {shares} shares needs at least one: give more data, a smaller "
                    "task.context or fewer learners"
                )
        weights = [source.weight for source in self.sources.values()]
        own = range(self.batch) if rows is None else rows
        return pipeline.batches(
            list(windows.values()), weights, self.batch, share=share, shares=shares, seed=seed, start=start, rows=own
        )

    def validation(self) -> dict[str, list[NDArray[np.int32]]]:
        """Return batches of windows, int32 [batch, context + 1], evenly spread over what each source holds out, by its name."""
        most = VALIDATION_WINDOWS // len(self.sources)
        return {name: self._held_out(source, most) for name, source in self.sources.items()}

    def check_epochs(self, settings: RunSettings) -> None:
        """Check that a run goes over no source more often than the file allows.

        Raises:
            DataError: it does; the source is named.
        """
        agreement.check_epochs(settings, self.settings, {name: each.table.most_epochs for name, each in self.sources.items()})

    def _place(self, name: str, table: SourceTable) -> Path | None:
        path = table.path
        return None if path is None else find_path(self.data, f"source {name!r}: path", path, self._cache_dir, table)

    def _stored(self, name: str, table: SourceTable, texts: dict[str, documents.Documents], cache: Path) -> StoredTokens:
        if table.kind != BINARY:
            return stored.of_documents(texts[name], self.tokenizer, cache)
        place = self._place(name, table)
        assert place is not None
        return stored.of_binary(name, table, place, self.vocabulary, cache)

    def _check_windows(self, name: str, source: MixSource) -> None:
        needed = self.context * self.batch + 1
        parts = {"for training": source.stored.training, "held out for validation": source.stored.held_out}
        for what, tokens in parts.items():
            if tokens.size < needed:
                raise DataError(
                    f"source {name!r}: {tokens.size} tokens {what}, but one batch of {self.batch} windows of "
                    f"{self.context} tokens takes {needed}: give more data, or a smaller task.batch or task.context"
                )
        if source.stored.training.size // self.context >= MOST_WINDOWS:
            raise DataError(f"source {name!r}: more than 2^32 windows of {self.context} tokens: divide it into several sources")

    def _held_out(self, source: MixSource, most: int) -> list[NDArray[np.int32]]:
        tokens = source.stored.held_out
        starts = evenly((tokens.size - 1) // self.context, self.batch, most, self.context)
        windows = np.asarray(tokens[starts[:, None] + np.arange(self.context + 1)], np.int32)
        return list(windows.reshape(-1, self.batch, self.context + 1))


def _mixed(source: MixSource) -> MixedSource:
    return MixedSource(digest=digest_of(source.stored.digest), tokens=source.stored.training.size, weight=source.weight)


def _check_installed(said: MixFile) -> None:
    """Check that the libraries are there that a mix needs.

    Raises:
        DilocoError: some are not; they are named.
    """
    kinds = {table.kind for table in said.sources.values()}
    needed = {"grain": True, "tokenizers": said.tokenizer is not None, "pyarrow": "parquet" in kinds}
    needed |= {"datasets": "huggingface" in kinds}
    missing = [name for name, is_needed in needed.items() if is_needed and find_spec(name) is None]
    if missing:
        raise DilocoError(f"--data: not installed: {', '.join(missing)}; pip install 'diloco[data]'")
