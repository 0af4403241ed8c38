"""The file ``mix.toml``: the sources of a run's data, their weights, and the tokenizer."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from diloco.core.tensors.built_in import BYTES
from diloco.errors import DataError, SettingsError
from diloco.settings.places import checked_place
from diloco.settings.run import MAX_SOURCES, MAX_VOCABULARY, SourceName
from diloco.settings.validation import parse

SUFFIX = ".toml"
BINARY = "bin"  # the kind of source that has tokens already
CHATS = "chats"  # that of conversations: all sources are of it, or none


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Training(_Table):
    """Training of a tokenizer: byte-level BPE on the texts of all sources."""

    vocabulary: int = Field(ge=BYTES + 2, le=MAX_VOCABULARY)


class TokenizerTable(_Table):
    """The tokenizer: a file that the library ``tokenizers`` wrote, or one that is trained here."""

    file: str | None = None
    train: Training | None = None
    end: str = Field("<|endoftext|>", min_length=1, description="token after each document")

    @field_validator("file")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        return value if value is None else checked_place(value, "tokenizer.file")

    @model_validator(mode="after")
    def _one(self) -> TokenizerTable:
        if (self.file is None) == (self.train is None):
            raise ValueError("tokenizer: needs one of file = 'tokenizer.json' and train = { vocabulary = 4096 }")
        return self


class SourceTable(_Table):
    """One source."""

    kind: Literal["chats", "text", "bin", "parquet", "huggingface"]
    path: str | None = Field(None, description="optional for text; default: Python's standard library sources")
    weight: float = Field(1.0, gt=0, le=1e6)
    column: str = Field("text", min_length=1, description="for parquet and huggingface: column of the texts")
    digest: Literal["files", "column"] = Field(
        "files",
        description="of parquet: what the run's digest covers; `column`: only the column's bytes, and only they are read",
    )
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="of bin")
    most_bad: float = Field(0.01, ge=0, le=1, description="of chats: the largest part of its lines that may be unusable")
    most_epochs: float | None = Field(None, gt=0, description="a run that would use more epochs of this source is refused")

    @field_validator("path")
    @classmethod
    def _has_no_credentials(cls, value: str | None) -> str | None:
        return value if value is None else checked_place(value, "path")

    @model_validator(mode="after")
    def _fits_kind(self) -> SourceTable:
        of = {"column": ("parquet", "huggingface"), "dtype": (BINARY,), "digest": ("parquet",), "most_bad": (CHATS,)}
        for key, kinds in of.items():
            if key in self.model_fields_set and self.kind not in kinds:
                raise ValueError(
                    f"{key}: a source of kind {self.kind!r} has no {key}, only {' and '.join(kinds)}; leave it out"
                )
        if self.path is None and self.kind != "text":
            raise ValueError(f"path: required for a source of kind {self.kind!r}")
        return self


class MixFile(_Table):
    """All of ``mix.toml``."""

    vocabulary: int | None = Field(
        None, ge=2, le=MAX_VOCABULARY, description="number of tokens, if all sources are of kind bin"
    )
    tokenizer: TokenizerTable | None = None
    sources: dict[SourceName, SourceTable] = Field(min_length=1, max_length=MAX_SOURCES)

    @model_validator(mode="after")
    def _tokens_from_somewhere(self) -> MixFile:
        chats = [name for name, source in self.sources.items() if source.kind == CHATS]
        if chats and len(chats) < len(self.sources):
            other = min(self.sources.keys() - chats)
            raise ValueError(
                f"sources.{other}.kind: source {chats[0]!r} is of kind chats, and then all are: write {other!r} as lines "
                'of the form {"text": ...}, of kind chats'
            )
        if chats and (self.tokenizer is not None or self.vocabulary is not None):
            raise ValueError(
                "tokenizer: sources of kind chats have the model's tokenizer; leave [tokenizer] and vocabulary out"
            )
        texts = [name for name, source in self.sources.items() if source.kind != BINARY]
        if self.vocabulary is not None and (texts or self.tokenizer):
            raise ValueError(
                "vocabulary: only for mixes in which all sources are of kind bin; leave it out, since the tokenizer "
                "states it (without a tokenizer, 256 bytes)"
            )
        if not texts and self.tokenizer is None and self.vocabulary is None:
            raise ValueError(
                "vocabulary: required, because all sources are of kind bin; set the number of tokens, or name their "
                "[tokenizer] file"
            )
        if not texts and self.tokenizer is not None and self.tokenizer.train is not None:
            raise ValueError("tokenizer.train: no source has text; name the tokenizer's file, or set vocabulary = N")
        return self


def read(path: Path) -> MixFile:
    """Return the content of a ``mix.toml``.

    Raises:
        SettingsError: it is no TOML, or something in it is unknown or out of range; the nearest name is given.
        DataError: it cannot be read.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None
    sources = values.get("sources")
    if isinstance(sources, dict):  # one by one: errors then name the source, and the setting that is nearest
        values["sources"] = {
            name: parse(SourceTable, table, f"{path}: source {name!r}") if isinstance(table, dict) else table
            for name, table in sources.items()
        }
    return parse(MixFile, values, str(path))
