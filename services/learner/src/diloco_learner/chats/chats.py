"""Conversations as a task's data: packed rows, held-out rows by source, and what all learners of a run have alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from diloco.errors import AdmissionError, DataError, DilocoError, SettingsError
from diloco.process import observe
from diloco.settings import folders
from diloco.settings.run import MixedSource, MixSettings, RunSettings, TaskSettings
from diloco.storage.fetching import TOKENIZER_FILES, local_path
from diloco_learner.chats import stored
from diloco_learner.chats.chat_tokenizer import ChatTokenizer
from diloco_learner.chats.lines import chat_files, is_chat_file, is_chat_folder
from diloco_learner.chats.stored import SourceCounts, StoredChats, StoredRows
from diloco_learner.mix import agreement, file
from diloco_learner.mix.drafts import locked
from diloco_learner.mix.file import CHATS, SourceTable
from diloco_learner.mix.mix import HUNDREDTHS, is_mix
from diloco_learner.mix.source_paths import find_path
from diloco_learner.text import VALIDATION_WINDOWS

IGNORED = -100  # the label of a token that is not learned, as in transformers
NAME = "chats"  # of the only source, where no mix.toml names one
IDS, LABELS, POSITIONS, DOCUMENTS = range(4)  # planes of a row


class PackedRows(TypedDict):
    """A batch of rows, each of several documents that do not see each other. All are int32 [batch, context].

    ``labels`` are as transformers has them: not shifted, and -100 where nothing is learned. A document's first token never is.
    ``position_ids`` begin at 0 at each document. ``documents`` are the numbers of documents within a row, from 1 on; 0 is
    padding at a row's end.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    documents: NDArray[np.int32]


@dataclass(frozen=True)
class RowSource:
    """The rows of a source by their number: a random-access source of Grain."""

    chats: StoredChats
    rows: StoredRows
    context: int
    padding: int

    def __len__(self) -> int:
        return len(self.rows.ends)

    def __getitem__(self, index: Any) -> NDArray[np.int32]:
        """Return a row, int32 [4, context]: the fields of :class:`PackedRows`."""
        number = int(index)
        row = self.empty()
        first = int(self.rows.ends[number - 1]) if number else 0
        at = 0
        for document, (begin, length) in enumerate(self.rows.pieces[first : int(self.rows.ends[number])].tolist(), 1):
            end = at + length
            ids = self.chats.tokens[begin : begin + length]
            row[IDS, at:end] = ids
            row[LABELS, at + 1 : end] = np.where(
                self.chats.learned[begin + 1 : begin + length], ids[1:].astype(np.int32), IGNORED
            )
            row[POSITIONS, at:end] = np.arange(length)
            row[DOCUMENTS, at:end] = document
            at = end
        row[POSITIONS, at:] = np.arange(self.context - at)
        return row

    def empty(self) -> NDArray[np.int32]:
        """Return a row of padding, int32 [4, context]."""
        row = np.zeros((4, self.context), np.int32)
        row[IDS], row[LABELS], row[POSITIONS] = self.padding, IGNORED, np.arange(self.context)
        return row


@dataclass(frozen=True)
class ChatSource:
    """A source of conversations, with its rows. ``weight`` is in hundredths of the smallest one."""

    table: SourceTable
    counts: SourceCounts
    weight: int
    training: RowSource
    held_out: RowSource


class Chats:
    """The conversations of a file, a folder of files or a ``mix.toml``, tokenised and packed. Made the first time, then cached.

    Args:
        settings: of the run's task; with ``settings.mix``, data of other content are refused.
        data: path or place of a ``.jsonl`` or ``.json`` file (also ``.gz`` and ``.zst``), a folder of them, or a ``mix.toml``.
        tokenizer: folder of a tokenizer as transformers saves it.
        context: tokens of a row.
        batch: rows of a batch.
        template: file of a chat template (Jinja) in place of the tokenizer's.
        cache_dir: where tokens are kept; None: the account's.

    Raises:
        SettingsError: the ``mix.toml`` says something that cannot be.
        DataError: a source or the tokenizer is missing or unreadable, or too many lines cannot be used; the first is named.
        AdmissionError: the run's learners have other data.
    """

    units = "nats per token"

    def __init__(
        self,
        settings: TaskSettings,
        data: str,
        *,
        tokenizer: str | Path,
        context: int,
        batch: int,
        template: str | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        if find_spec("grain") is None:
            raise DilocoError("--data: not installed: grain; pip install 'diloco[chats]'")
        self.batch, self.context, self.data = batch, context, data
        self._cache_dir = cache_dir or folders.cache_dir()
        own = None if template is None else str(local_path(template, self._cache_dir))
        self.tokenizer = ChatTokenizer(local_path(tokenizer, self._cache_dir, only=TOKENIZER_FILES), own)
        tables = _tables(data, self._cache_dir)
        smallest = min(table.weight for table in tables.values())
        with locked(self._cache_dir / "data") as cache:
            self.sources = {
                name: self._source(name, table, int(table.weight * HUNDREDTHS / smallest), cache)
                for name, table in sorted(tables.items())
            }
        self.settings = MixSettings(
            vocabulary=self.tokenizer.vocabulary,
            tokenizer=self.tokenizer.digest,
            sources={name: _mixed(source) for name, source in self.sources.items()},
        )
        if settings.mix is not None:
            self._check_same(settings.mix)
        for note in self.notes():
            observe.log.info("data_left_out", note=note)

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer: 0 to this number less one."""
        return self.tokenizer.vocabulary

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[PackedRows]:
        """Return the batches of a share from the ``start``-th on, without end, or ``rows`` of each.

        Raises:
            DataError: a source has no row for the share.
        """
        from diloco_learner.mix import pipeline

        for name, source in self.sources.items():
            if len(source.training) < shares:
                raise DataError(
                    f"source {name!r}: its conversations make {len(source.training)} rows of {self.context} tokens, and each "
                    f"of {shares} shares needs at least one: give more data, a smaller context or fewer learners"
                )
        own = range(self.batch) if rows is None else rows
        made = pipeline.batches(
            [source.training for source in self.sources.values()],
            self._row_weights(),
            self.batch,
            share=share,
            shares=shares,
            seed=seed,
            start=start,
            rows=own,
        )
        return (_packed(batch) for batch in made)

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return batches of held-out rows, evenly spread over what each source holds out, by its name.

        The last batch of a source is filled with rows of padding.
        """
        most = max(VALIDATION_WINDOWS // len(self.sources), 1)
        return {name: self._held_out(source.held_out, most) for name, source in self.sources.items()}

    def check_epochs(self, settings: RunSettings) -> None:
        """Check that a run goes over no source more often than the ``mix.toml`` allows.

        Raises:
            DataError: it does; the source is named.
        """
        agreement.check_epochs(settings, self.settings, {name: each.table.most_epochs for name, each in self.sources.items()})

    def notes(self) -> list[str]:
        """Return a sentence for each thing that is left out of each source: lines, conversations, and ends of them."""
        return [note for name, source in self.sources.items() for note in _notes(name, source, self.context)]

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return text as tokens, int32 [tokens]; special tokens in it are text."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self.tokenizer.decode(tokens)

    def render_prompt(self, prompt: str | Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """Return the tokens after which a model answers, int32 [tokens]: of a user's text, or of messages.

        Without a chat template, a text's own tokens.

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        if isinstance(prompt, str):
            if not self.tokenizer.has_template:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        return self.tokenizer.render_prompt(prompt)

    def _source(self, name: str, table: SourceTable, weight: int, cache: Path) -> ChatSource:
        assert table.path is not None
        root = self._place(name, table.path)
        try:
            files = chat_files(root)
        except DataError as error:
            raise DataError(f"source {name!r}: {error}") from None
        counts, sides = stored.of_files(name, root, files, self.tokenizer, most_bad=table.most_bad, cache=cache)
        training, held_out = (self._rows(sides[side], cache) for side in stored.SIDES)
        for what, rows in (("to train on", training), ("held out", held_out)):
            if not len(rows):
                raise DataError(
                    f"source {name!r}: {root}: no conversation {what} has an assistant turn within its first {self.context} "
                    "tokens: set a larger context"
                )
        return ChatSource(table, counts, weight, training, held_out)

    def _place(self, name: str, path: str) -> Path:
        """Return where a source lies: ``path``, which is relative to the folder of a ``mix.toml``."""
        if not is_mix(self.data):
            return local_path(self.data, self._cache_dir).resolve()
        return find_path(self.data, f"source {name!r}: path", path, self._cache_dir)

    def _rows(self, chats: StoredChats, cache: Path) -> RowSource:
        return RowSource(chats, stored.rows_of(chats, self.context, cache), self.context, self.tokenizer.padding)

    def _row_weights(self) -> list[int]:
        """Return in which proportion sources take turns by rows, so that trained tokens are in proportion to the weights."""
        wanted = [
            source.weight * source.training.rows.counts.rows / source.training.rows.counts.trained
            for source in self.sources.values()
        ]
        return [round(HUNDREDTHS * each / min(wanted)) for each in wanted]

    def _held_out(self, rows: RowSource, most: int) -> list[PackedRows]:
        count = min(most, len(rows))
        chosen = [rows[number * len(rows) // count] for number in range(count)]
        chosen += [rows.empty()] * (-count % self.batch)
        return [_packed(np.stack(chosen[at : at + self.batch])) for at in range(0, len(chosen), self.batch)]

    def _check_same(self, runs: MixSettings) -> None:
        if self.settings.tokenizer != runs.tokenizer:
            raise AdmissionError(
                f"{self.tokenizer.folder}: the tokenizer or its chat template is {self.settings.tokenizer} here, the run's is "
                f"{runs.tokenizer}: take its files from where the run was begun"
            )
        versions = f"{agreement.COPY}, and use its versions of transformers and tokenizers"
        agreement.check_same(self.settings, runs, self.data, versions)


def is_chats(data: str | None) -> bool:
    """Return whether data are conversations: such a file, a folder of them, or a ``mix.toml`` of sources of kind ``chats``.

    Raises:
        SettingsError, DataError: a ``mix.toml`` cannot be read.
    """
    if data is None:
        return False
    if is_mix(data):
        return any(table.kind == CHATS for table in file.read(local_path(data)).sources.values())
    path = local_path(data)
    return is_chat_folder(path) if path.is_dir() else is_chat_file(path)


def _tables(data: str, cache_dir: Path) -> dict[str, SourceTable]:
    """Return the sources of data by their names."""
    if not is_mix(data):
        return {NAME: SourceTable(kind=CHATS, path=data)}
    tables = file.read(local_path(data, cache_dir)).sources
    for name, table in tables.items():
        if table.kind != CHATS:
            raise SettingsError(f"{data}: source {name!r} is of kind {table.kind!r}: expected kind = 'chats'")
    return dict(tables)


def _mixed(source: ChatSource) -> MixedSource:
    digest = agreement.digest_of(f"{source.training.chats.counts.digest} {source.held_out.chats.counts.digest}")
    return MixedSource(digest=digest, tokens=source.training.rows.counts.trained, weight=source.weight)


def _notes(name: str, source: ChatSource, context: int) -> Iterator[str]:
    counts, sides = source.counts, (source.training, source.held_out)
    if counts.bad:
        yield f"source {name!r}: {counts.bad} of {counts.lines} lines cannot be used; the first: {counts.named[0]}"
    documents, tokens = (sum(getattr(side.chats.counts, each) for side in sides) for each in ("documents", "tokens"))
    cut, dropped, lost = (sum(getattr(side.rows.counts, each) for side in sides) for each in ("cut", "dropped", "lost"))
    if cut or dropped:
        yield (
            f"source {name!r}: cut at {context} tokens: {cut} of {documents} conversations; left out, since nothing before "
            f"that is learned: {dropped}; tokens lost: {lost} of {tokens}. The longest is {counts.longest}, with "
            f"{counts.longest_tokens} tokens. A larger context keeps more"
        )


def _packed(batch: NDArray[np.int32]) -> PackedRows:
    """Return a batch int32 [rows, 4, context] by its fields."""
    ids, labels, positions, documents = (np.ascontiguousarray(batch[:, plane]) for plane in range(4))
    return PackedRows(input_ids=ids, labels=labels, position_ids=positions, documents=documents)
