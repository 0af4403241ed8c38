"""Conversations as a task's data: packed rows, held-out rows by source, and what all learners of a run have alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from diloco.settings.run import MixSettings, RunSettings, TaskSettings

IGNORED = -100  # the label of a token that is not learned, as in transformers


class PackedRows(TypedDict):
    """A batch of rows, each of several documents that do not see each other. All are int32 [batch, context].

    ``labels`` are as transformers has them: not shifted, and -100 where nothing is learned, which a document's first token never
    is. ``position_ids`` begin at 0 at each document. ``documents`` are the numbers of documents within a row, from 1 on; 0 is
    padding at a row's end.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    documents: NDArray[np.int32]


class Chats:
    """The conversations of a file, a folder of files or a ``mix.toml``, tokenised and packed. Made the first time, then cached.

    Args:
        settings: of the run's task; with ``settings.mix``, data of other content are refused.
        data: path of a ``.jsonl`` or ``.json`` file (also ``.gz`` and ``.zst``), a folder of them, or a ``mix.toml``.
        tokenizer: folder of a tokenizer as transformers saves it.
        context: tokens of a row.
        batch: rows of a batch.
        template: file of a chat template (Jinja) in place of the tokenizer's.
        cache_dir: where tokens are kept; None: the account's.
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
        raise NotImplementedError

    @property
    def settings(self) -> MixSettings:
        """What all learners of a run have alike: ``task.mix`` of its settings."""
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer: 0 to this number less one."""
        raise NotImplementedError

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[PackedRows]:
        """Return the batches of a share from the ``start``-th on, without end, or ``rows`` of each."""
        raise NotImplementedError

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return batches of rows of held-out conversations, by the name of their source."""
        raise NotImplementedError

    def check_epochs(self, settings: RunSettings) -> None:
        """Find out that a run goes over no source more often than the ``mix.toml`` allows."""
        raise NotImplementedError

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return text as tokens, int32 [tokens]; special tokens in it are text."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, special ones included."""
        raise NotImplementedError

    def render_prompt(self, prompt: str | Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """Return the tokens after which a model answers, int32 [tokens]: of a user's text, or of messages."""
        raise NotImplementedError


def is_chats(data: str | None) -> bool:
    """Return whether data are conversations: such a file, a folder with one, or a ``mix.toml`` of sources of kind ``chats``."""
    raise NotImplementedError
