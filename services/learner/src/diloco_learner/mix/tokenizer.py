"""From text to tokens: bytes, a tokenizer's file, or byte-level BPE that is trained on the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.core.tensors.built_in import BYTES
from diloco.errors import DataError, SettingsError
from diloco.process import files
from diloco_learner.mix.documents import Documents
from diloco_learner.mix.file import TokenizerTable
from diloco_learner.text import unreadable

Tokens = NDArray[np.uint32]

TRAINED = "tokenizers"  # folder of the cache
TRAINING_CHARACTERS = 1 << 27  # of each source: more hardly changes which pieces are frequent, and all of it is in memory


class Tokenizer(Protocol):
    """A tokenizer. ``end`` follows each document; ``digest`` tells tokenizers apart; ``file`` is where it lies, if it does."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def digest(self) -> str: ...

    @property
    def file(self) -> Path | None: ...

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, uint32 [tokens]."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; what is none becomes U+FFFD."""


class ByteTokenizer:
    """Bytes as tokens; a zero byte ends a document."""

    vocabulary, end, digest, file = BYTES, 0, "bytes", None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the UTF-8 bytes of each text, uint32 [bytes]."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return bytes as text."""
        return bytes(int(token) for token in tokens).decode("utf-8", "replace")


class NoTokenizer:
    """The tokenizer of sources that consist of tokens. It refuses text."""

    end, digest, file = 0, "none", None

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Refuse: a list of uint32 [tokens] it never is.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            "the data's mix has no tokenizer, so text cannot be tokenized: name the tokenizer's file in [tokenizer]"
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the numbers of tokens."""
        return " ".join(str(int(token)) for token in tokens)


class FileTokenizer:
    """A tokenizer in the format of the library ``tokenizers``.

    Special tokens in a text are text there: only a document's end makes the token for it.

    Raises:
        DataError: the file is none of a tokenizer, or has no token ``end``.
    """

    def __init__(self, file: Path, end: str) -> None:
        import tokenizers

        try:
            stored = file.read_bytes()
        except OSError as error:
            raise unreadable(error, file) from None
        try:
            self._made = tokenizers.Tokenizer.from_str(stored.decode("utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"tokenizer: {file}: not a file that the library tokenizers wrote: {error}") from None
        self._made.encode_special_tokens = True
        self._made.no_truncation()
        self._made.no_padding()
        number = self._made.token_to_id(end)
        if number is None:
            raise DataError(
                f"tokenizer: {file}: has no token {end!r} to end documents with; set tokenizer.end to one of its tokens"
            )
        self.vocabulary = 1 + max(self._made.get_vocab(with_added_tokens=True).values())
        self.end, self.file, self.digest = number, file, blake3(stored + b"\0" + end.encode()).hexdigest(16)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, uint32 [tokens], without any that mark beginning or end."""
        return [np.array(one.ids, np.uint32) for one in self._made.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self._made.decode([int(token) for token in tokens], skip_special_tokens=False))


def make(
    table: TokenizerTable | None,
    vocabulary: int | None,
    find: Callable[[str], Path],
    texts: Sequence[Documents],
    cache: Path,
) -> Tokenizer:
    """Return the tokenizer of a mix: ``find`` returns the path of its file; one that is trained is kept in ``cache``.

    Raises:
        DataError: its file cannot be read, is none, or has not the token that ends a document.
    """
    if table is None:
        return ByteTokenizer() if vocabulary is None else NoTokenizer(vocabulary)
    if table.file is not None:
        return FileTokenizer(find(table.file), table.end)
    assert table.train is not None
    about = f"{table.train.vocabulary} {table.end} " + " ".join(source.digest(cache) for source in texts)
    file = cache / TRAINED / f"{blake3(about.encode()).hexdigest(16)}.json"
    if not file.exists():
        files.replace_text(file, _trained(table.train.vocabulary, table.end, texts))
    return FileTokenizer(file, table.end)


def _trained(vocabulary: int, end: str, texts: Sequence[Documents]) -> str:
    """Return a byte-level BPE tokenizer as JSON: of the same texts the same."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((piece for source in texts for piece in _first(source)), trainer=trainer)
    found = made.get_vocab_size()
    if found < vocabulary:
        raise DataError(
            f"tokenizer.train.vocabulary = {vocabulary}: the sources' text gives {found} tokens only: set it to {found} or less"
        )
    return str(made.to_str())


def _first(source: Documents) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for document in source:
        for piece in document:
            if left <= 0:
                return
            yield piece[:left]
            left -= len(piece)
