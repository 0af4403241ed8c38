"""A tokenizer of transformers with its chat template: the tokens of ``apply_chat_template``, and which of them are learned.

``transformers`` itself loads the tokenizer and renders: each class of tokenizers has ways of its own, and a copy of them
would go wrong one by one. It is imported here only, in a process that makes tokens or shows them.

Two things differ from ``apply_chat_template`` with nothing said. A special token that is written literally in a message is
text, as with ``sanitize_control_tokens=True``: otherwise a user's text could end a turn. And a template that asks for the date
gets a fixed one: else each day would make other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.errors import DataError, DilocoError
from diloco_learner.chats.conversations import ASSISTANT, BadLineError, Conversation, PlainText, strings
from diloco_learner.chats.turns import PrefixError, Span, find_turns
from diloco_learner.text import unreadable

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
FILES = (  # of a tokenizer, in the folder of a model; those that exist
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
)
TODAY = date(2024, 7, 26)  # in every rendering: the day that templates of Llama have where there is no clock
# around a special token in a message: characters for private use, which transformers has here too
BEGIN, END = "\U000f0000", "\U000f0001"
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


@dataclass(frozen=True)
class EncodedLine:
    """The tokens of a line, uint32 [tokens], and which are learned, bool [tokens]; ``divides`` as of :class:`PlainText`."""

    tokens: NDArray[np.uint32]
    learned: NDArray[np.bool_]
    divides: bool


class ChatTokenizer:
    """A tokenizer in a folder, with its chat template or that of a file.

    ``vocabulary`` is the number of its tokens, ``padding`` fills rows, and ``end`` follows a plain text (None: nothing does).

    Raises:
        DilocoError: the library is not installed.
        DataError: the folder has no tokenizer that transformers reads, or the template's file cannot be read.
    """

    def __init__(self, folder: str | Path, template: str | None = None) -> None:
        missing = [name for name in ("jinja2", "transformers") if find_spec(name) is None]
        if missing:
            raise DilocoError(f"chats: not installed: {', '.join(missing)}; pip install 'diloco[chats]'")
        self.folder = Path(folder)
        self._made = _load(self.folder)
        self._given = None if template is None else _read_template(Path(template))
        self.vocabulary: int = 1 + max(self._made.get_vocab().values())
        self.end: int | None = self._made.eos_token_id
        self.padding: int = next((each for each in (self._made.pad_token_id, self.end) if each is not None), 0)
        special = [token.content for token in self._made.added_tokens_decoder.values() if token.special]
        self._special = sorted(special, key=lambda token: (-len(token), token))
        self._written = re.compile("|".join(map(re.escape, self._special)) or "(?!)")  # (?!) never matches
        self._pieces = re.compile(f"{BEGIN}({self._written.pattern}){END}|[{BEGIN}{END}]")

    @cached_property
    def digest(self) -> str:
        """A digest (hex) of the tokenizer's files and of the template."""
        whole = blake3(f"chats {TODAY}\n".encode())
        for name in FILES:
            path = self.folder / name
            if path.is_file():
                whole.update(f"{name} {blake3(path.read_bytes()).hexdigest()}\n".encode())
        return whole.update((self._given or "").encode()).hexdigest(16)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._given is not None or self._made.chat_template is not None

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return text as tokens, int32 [tokens], with none before or behind it; special tokens in it are text."""
        return np.array(
            self._made(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids, np.int32
        )

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, special ones included."""
        given = [int(token) for token in tokens]
        return str(self._made.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_prompt(self, messages: Sequence[Mapping[str, Any]]) -> NDArray[np.int32]:
        """Return the tokens of messages and of the prompt for an answer, int32 [tokens].

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        template = self._template(None)
        given = list(messages)
        marked = self._marked(given)
        try:
            text, _ = self._rendered(template, marked, None, prompt=True)
            ids = self._batch([text])[0][0] if marked is given else self._tokens(text)[0]
        except BadLineError as error:
            raise DataError(f"prompt: {error}") from None
        return np.array(ids, np.int32)

    def encode_all(self, lines: Sequence[Conversation | PlainText], places: Sequence[str]) -> list[EncodedLine | BadLineError]:
        """Return the tokens of each line, or why it has none; ``places`` are the lines' for errors.

        Raises:
            DataError: there is no chat template, or it does not show what the assistant's turns are.
        """
        found: list[EncodedLine | BadLineError | None] = [None] * len(lines)
        texts: dict[int, tuple[str, list[Span]]] = {}  # of conversations without special tokens in their messages
        for number, (line, place) in enumerate(zip(lines, places, strict=True)):
            try:
                if isinstance(line, PlainText):
                    found[number] = self._plain(line)
                    continue
                text, spans, is_marked = self._with_spans(line, place)
                if is_marked:
                    found[number] = _learned(*self._tokens(text), spans)
                else:
                    texts[number] = text, spans
            except BadLineError as error:
                found[number] = error
            except RecursionError:
                found[number] = BadLineError("not a conversation: JSON that is nested too deeply")
        for (number, (_, spans)), ids, offsets in zip(
            texts.items(), *self._batch([text for text, _ in texts.values()]), strict=True
        ):
            found[number] = _learned(ids, offsets, spans)
        return [each for each in found if each is not None]

    def _plain(self, line: PlainText) -> EncodedLine:
        """Return a text's tokens, with what the tokenizer itself puts before or behind it, and the end."""
        found = self._made(line.text, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
        ids, offsets = found["input_ids"], found["offset_mapping"]
        learned = [end > line.prompt for _, end in offsets]
        if self.end is not None:  # the tokenizer itself may have put it there
            ids, learned = ([*ids, self.end], [*learned, True]) if ids[-1:] != [self.end] else (ids, [*learned[:-1], True])
        if not any(learned[1:]):
            raise BadLineError("makes no token to learn")
        return EncodedLine(np.array(ids, np.uint32), np.array(learned, np.bool_), line.divides)

    def _with_spans(self, line: Conversation, place: str) -> tuple[str, list[Span], bool]:
        """Return a conversation's rendering, which characters are learned, and whether it has marks."""
        given = [line.messages, line.tools]
        messages, tools = marked = self._marked(given)
        template = self._template(tools)
        text, generated = self._rendered(template, messages, tools, prompt=False)
        if MARKS.search(template):
            spans = [generated[number] for number in _chosen(line, len(generated))]
        else:

            def render(part: Sequence[Mapping[str, Any]], prompt: bool) -> str:
                return self._rendered(template, part, tools, prompt=prompt)[0]

            try:
                turns = find_turns(render, messages, text, self._special)
            except PrefixError as error:
                raise DataError(
                    f"{self.folder}: its chat template has no {{% generation %}} marks, and assistant turns cannot be found by "
                    f"rendering parts of a conversation: {place}: {error}: give a template that has the marks"
                ) from None
            spans = [turns[number] for number in sorted(line.learned)]
        if not any(end > begin for begin, end in spans):
            raise BadLineError("the chat template leaves nothing of the assistant's turns")
        return text, spans, marked is not given

    def _rendered(
        self, template: str, messages: Sequence[Mapping[str, Any]], tools: Any, *, prompt: bool
    ) -> tuple[str, list[Span]]:
        """Return a rendering, and the spans that the template marks in it.

        Raises:
            BadLineError: the template refuses the messages.
            DataError: it is no template.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=MARKS.search(template) is not None,
                **self._made.special_tokens_map,
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{self.folder}: its chat template is not Jinja: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a template is foreign code: a part that it expects may be missing, or of another type
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadLineError(f"the chat template refuses it: {reason}") from None
        return texts[0], spans[0] if spans else []

    def _template(self, tools: Any) -> str:
        try:
            return _with_fixed_date(str(self._made.get_chat_template(self._given, tools)))
        except ValueError as error:
            raise DataError(
                f"{self.folder}: has no chat template: take the tokenizer of a chat model, or give a template's file: "
                f"{str(error).split('!')[0]}"
            ) from None

    def _marked(self, found: Any) -> Any:
        """Return messages with marks around the special tokens in their texts, or the same object if there are none."""
        if not any(self._written.search(text) for text in strings(found)):
            return found
        return _changed(found, lambda text: self._written.sub(f"{BEGIN}\\g<0>{END}", re.sub(f"[{BEGIN}{END}]", "", text)))

    def _batch(self, texts: list[str]) -> tuple[list[list[int]], list[list[Span]]]:
        if not texts:
            return [], []
        found = self._made(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return found["input_ids"], found["offset_mapping"]

    def _tokens(self, text: str) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the tokens of a rendering that may have marks, uint32 [tokens], and their characters, int64 [tokens, 2].

        Raises:
            BadLineError: text cannot be told from a special token.
        """
        ids, offsets = list[int](), list[Span]()
        for begin, piece, is_text in self._cut(text):
            own, places = self._piece(piece, is_first=begin == 0, is_text=is_text)
            ids += own
            offsets += [(begin + start, begin + end) for start, end in places]
        return np.array(ids, np.uint32), np.array(offsets, np.int64).reshape(-1, 2)

    def _cut(self, text: str) -> Iterable[tuple[int, str, bool]]:
        """Yield the pieces between marks: where each begins, its text, and whether it is a special token that is text."""
        at = 0
        for found in self._pieces.finditer(text):
            yield at, text[at : found.start()], False
            if found[1] is not None:
                yield found.start() + len(BEGIN), found[1], True
            at = found.end()
        yield at, text[at:], False

    def _piece(self, piece: str, *, is_first: bool, is_text: bool) -> tuple[list[int], list[Span]]:
        """Return the tokens of a piece, and their characters in it.

        All but the first are encoded after a line's end, as transformers does: SentencePiece begins a text with a space.
        """
        if not piece:
            return [], []

        def encoded(text: str) -> tuple[list[int], list[Span]]:
            found = self._made(
                text, add_special_tokens=False, split_special_tokens=is_text, return_offsets_mapping=True, verbose=False
            )
            return found["input_ids"], found["offset_mapping"]

        if is_first:
            return encoded(piece)
        line, _ = encoded("\n")
        ids, offsets = encoded("\n" + piece)
        if ids[: len(line)] == line:
            ids, offsets = ids[len(line) :], [(start - 1, end - 1) for start, end in offsets[len(line) :]]
        else:
            ids, offsets = encoded(piece)
        if is_text and self._made.convert_tokens_to_ids(piece) in ids:
            raise BadLineError(f"{piece!r} in a message cannot be told from the special token: the tokenizer makes it of text")
        return ids, offsets


def _chosen(line: Conversation, marked: int) -> Iterable[int]:
    """Return the numbers of the marked spans that are learned.

    Raises:
        BadLineError: only some turns are learned, and which spans they are does not show.
    """
    assistants = [number for number, message in enumerate(line.messages) if message["role"] == ASSISTANT]
    if len(line.learned) == len(assistants):
        return range(marked)
    if marked != len(assistants):
        raise BadLineError(
            f"some turns are not learned, and the chat template marks {marked} spans for {len(assistants)} assistant turns"
        )
    return [at for at, number in enumerate(assistants) if number in line.learned]


def _learned(ids: Sequence[int] | NDArray[np.uint32], offsets: Any, spans: Sequence[Span]) -> EncodedLine:
    """Return the tokens, of which those that overlap a span are learned, as in transformers' ``assistant_masks``.

    ``offsets``: [tokens, 2], characters from and up to; spans are in order and do not overlap.
    """
    places, edges = np.asarray(offsets, np.int64).reshape(-1, 2), np.asarray(spans, np.int64).reshape(-1, 2)
    nearest = np.searchsorted(edges[:, 1], places[:, 0], side="right")  # the first span that ends behind the token's begin
    begins = np.append(edges[:, 0], np.iinfo(np.int64).max)[nearest]
    return EncodedLine(np.asarray(ids, np.uint32), places[:, 1] > begins, divides=False)


def _changed(found: Any, change: Callable[[str], str]) -> Any:
    """Return messages with each text changed; keys are not."""
    if isinstance(found, str):
        return change(found)
    if isinstance(found, dict):
        return {key: _changed(value, change) for key, value in found.items()}
    return [_changed(value, change) for value in found] if isinstance(found, list) else found


@lru_cache
def _with_fixed_date(template: str) -> str:
    """Return a template whose clock says :data:`TODAY`: a macro before it, in a line of its own, which leaves no trace."""
    formats = sorted({found[2] for found in CLOCK.finditer(template)})
    if "strftime_now" not in template:
        return template
    cases = "".join(
        f"{{% {'elif' if number else 'if'} format == {form!r} %}}{TODAY.strftime(form)}" for number, form in enumerate(formats)
    )
    other = "{{ raise_exception('it asks for the time in a format that its text does not have') }}"
    body = f"{cases}{{% else %}}{other}{{% endif %}}" if formats else other
    return f"{{% macro strftime_now(format) %}}{body}{{% endmacro %}}\n{template}"


def _load(folder: Path) -> Any:
    """Return a tokenizer of transformers.

    Raises:
        DataError: there is none that it reads, or only one without the library ``tokenizers``.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise DataError(f"tokenizer: {folder}: there is no such folder; expected the folder of a model or of its tokenizer")
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise DataError(f"tokenizer: {folder}: has no tokenizer.json, as transformers' save_pretrained writes it")
    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises nothing narrower
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"tokenizer: {folder}: not a tokenizer that transformers reads: {reason}") from None
    if not made.is_fast:
        raise DataError(f"tokenizer: {folder}: has no tokenizer.json: write it by transformers' save_pretrained")
    return made


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(error, path) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: a chat template is text in UTF-8: {error.reason} at byte {error.start}") from None
