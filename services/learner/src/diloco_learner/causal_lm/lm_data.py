"""The data of the task: conversations, which are packed into rows, or text as windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.errors import DataError, SettingsError
from diloco.process import files
from diloco.settings import folders
from diloco.settings.run import TaskSettings
from diloco.storage import model_folder
from diloco.storage.fetching import local_path
from diloco.storage.model_folder import ModelFolder
from diloco.weights_files import naming
from diloco_learner.causal_lm.options import CausalLmOptions
from diloco_learner.chats.chats import Chats, PackedRows, is_chats
from diloco_learner.mix.mix import Mix, is_mix
from diloco_learner.mix.tokenizer import FileTokenizer

TokenWindows = NDArray[np.int32]
PROMPT_TOKENS = 16  # of held-out text, which a sample continues


class CausalLmData(Protocol):
    """The members of its data that the task uses."""

    @property
    def vocabulary(self) -> int:
        """Tokens of the tokenizer."""

    @property
    def mix(self) -> Mix | Chats:
        """The data, of which all learners of the run have the same content."""

    @property
    def end(self) -> int:
        """The token that ends an answer, or a document."""

    @property
    def before_answer(self) -> str:
        """The text between a prompt and its answer, for people."""

    @property
    def prompt(self) -> str:
        """The text that samples continue where no other is given."""

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[PackedRows]:
        """Yield the batches of a share from the ``start``-th on, without end: arrays int32 [batch, context]."""

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return held-out batches by source, arrays int32 [batch, context]."""

    def render_prompt(self, text: str) -> Sequence[int]:
        """Return the tokens that the model is given of a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""


def open_data(settings: TaskSettings, data: str | None, folder: ModelFolder, options: CausalLmOptions) -> CausalLmData:
    """Return the data: conversations, a mix, or a file or folder of text.

    Raises:
        DataError: there is none, or it cannot be read.
        SettingsError: the mix has another tokenizer than the model.
    """
    data = model_folder.check_data(options.model, data)
    data = data if is_mix(data) else str(local_path(data))
    if is_chats(data):
        return Conversations(settings, data, folder, options)
    return TextWindows(settings, data, folder)


class Conversations:
    """Conversations in packed rows. A sample answers a prompt as the assistant does."""

    before_answer = "\n"
    prompt = "Hello!"

    def __init__(self, settings: TaskSettings, data: str, folder: ModelFolder, options: CausalLmOptions) -> None:
        self.mix = Chats(
            settings,
            data,
            tokenizer=folder.path,
            context=settings.context,
            batch=settings.batch,
            template=options.template or None,
        )
        self.vocabulary = self.mix.vocabulary
        self.end = self.mix.tokenizer.padding if self.mix.tokenizer.end is None else self.mix.tokenizer.end

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[PackedRows]:
        """Yield packed rows of a share, arrays int32 [batch, context]."""
        return self.mix.batches(share, shares, seed, start)

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return packed rows of held-out conversations by source, arrays int32 [batch, context]."""
        return self.mix.validation()

    def render_prompt(self, text: str) -> list[int]:
        """Return the tokens after which the model answers a user's text."""
        return list(map(int, self.mix.render_prompt(text)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer up to its end."""
        ends = list(tokens).index(self.end) if self.end in tokens else len(tokens)
        return self.mix.decode(tokens[:ends])


class TextWindows:
    """Text as windows of the model's tokens, one document after another; a mix, or a file or folder of which one is made."""

    before_answer = ""

    def __init__(self, settings: TaskSettings, data: str, folder: ModelFolder) -> None:
        end = end_token(folder)
        own = FileTokenizer(folder.path / model_folder.TOKENIZER, end)
        self.mix = Mix(settings, data if is_mix(data) else str(_mix_of_text(data, folder, end)))
        self.vocabulary, self.end = own.vocabulary, own.end
        its = self.mix.tokenizer
        if its.file is not None and its.digest != own.digest:
            raise SettingsError(
                f"--data {data}: its tokenizer {its.file} is not that of the model: set file = "
                f'"{folder.path / model_folder.TOKENIZER}" and end = "{end}" in [tokenizer]'
            )
        if its.file is None and its.digest == "bytes":
            raise SettingsError(f"--data {data}: has no [tokenizer]: name the model's file and its end {end!r} there")

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[PackedRows]:
        """Yield windows of a share, arrays int32 [batch, context]."""
        return map(_rows_of, self.mix.batches(share, shares, seed, start))

    def validation(self) -> dict[str, list[PackedRows]]:
        """Return held-out windows by source, arrays int32 [batch, context]."""
        found = self.mix.validation()
        by_source = found if isinstance(found, dict) else {"text": found}
        return {name: [_rows_of(batch) for batch in batches] for name, batches in by_source.items()}

    @property
    def prompt(self) -> str:
        """The beginning of the held-out text."""
        first = next(iter(self.validation().values()))[0]["input_ids"][0, :PROMPT_TOKENS]
        return self.decode(list(map(int, first)))

    def render_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(map(int, self.mix.encode(text)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ends = list(tokens).index(self.end) if self.end in tokens else len(tokens)
        return self.mix.decode(np.asarray(tokens[:ends], np.int32))


def _rows_of(windows: TokenWindows) -> PackedRows:
    """Return windows, int32 [batch, context + 1], as rows of one document each, int32 [batch, context].

    The last token of a window is left out: a model may have no position for it.
    """
    tokens = np.ascontiguousarray(windows[:, :-1])
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return PackedRows(
        input_ids=tokens, labels=tokens, position_ids=np.ascontiguousarray(positions), documents=np.ones_like(tokens)
    )


def _mix_of_text(data: str, folder: ModelFolder, end: str) -> Path:
    """Return a mix file of one source, the text, with the model's tokenizer; it is kept in the cache."""
    place = Path(data).resolve()
    if not place.exists():
        raise DataError(f"--data {data}: there is no such file or folder")
    tokenizer, source = (json.dumps(str(each)) for each in ((folder.path / model_folder.TOKENIZER).resolve(), place))
    text = f'[tokenizer]\nfile = {tokenizer}\nend = {json.dumps(end)}\n\n[sources.text]\nkind = "text"\npath = {source}\n'
    file = folders.made(folders.cache_dir() / "text") / f"{blake3(text.encode()).hexdigest(16)}.toml"
    if not file.exists():
        files.replace_text(file, text)
    return file


def end_token(folder: ModelFolder) -> str:
    """Return the token that ends a document, as the tokenizer's configuration names it.

    Raises:
        SettingsError: it names none.
    """
    file = folder.path / model_folder.TOKENIZER_CONFIG
    said = naming.read_object(file, f"--model {folder.name}: {file.name}")[0] if file.is_file() else {}
    end = said.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if not isinstance(end, str):
        raise SettingsError(
            f"--model {folder.name}: {model_folder.TOKENIZER_CONFIG} has no eos_token, with which documents end: set it there"
        )
    return end
