"""A model's folder as Hugging Face's libraries write it: its configuration, tokenizer and sizes, from its files alone.

Nothing of those libraries is imported for a folder. A name of the hub is looked up by ``huggingface_hub``, in its cache first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from diloco.errors import DataError, DilocoError, SettingsError
from diloco.storage.fetching import fetched, is_remote
from diloco.weights_files import naming

CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ALLOW_CODE = "DILOCO_ALLOW_CODE"  # of the environment: the model whose own Python code may run on this machine
# what a tokenizer is made of; a file that is not there is not needed
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, "special_tokens_map.json", "added_tokens.json")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.py", "*.model", "README.md")  # of a repository: no pickles
TABLES = re.compile(r"embed|lm_head|\bwte$|\bwpe$")  # in the names of layers that "all-linear" leaves out
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MAX_AXIS = 1 << 48  # values along an axis of a tensor
MAX_HEADER = 100 << 20  # bytes of a safetensors header, as its own library bounds it
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a folder's weights: how many values they have, and how many bytes they take there."""

    values: int
    stored_bytes: int


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder; ``name`` is what a user called it, a path or a name of the hub."""

    name: str
    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``.

        Raises:
            SettingsError: there is none, or it names no type of model.
        """
        found, _ = naming.read_object(self.path / CONFIG, f"--model {self.name}: {CONFIG}")
        if not isinstance(found.get("model_type"), str):
            raise SettingsError(
                f"--model {self.name}: {CONFIG} has no model_type: name a folder that transformers' save_pretrained() wrote"
            )
        return found

    @property
    def own_code(self) -> bool:
        """Whether the folder brings Python code of its own for its model."""
        return bool(self.config.get("auto_map"))

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that has the language model's sizes."""
        text = self.config.get("text_config")
        return text if isinstance(text, Mapping) else self.config

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model was made for, in tokens; None: its configuration does not say."""
        said = self.text_config.get("max_position_embeddings")
        return said if type(said) is int and said > 0 else None

    def tokenizer_digest(self) -> str:
        """Return a hash, 32 hexadecimal digits, of the tokenizer and its chat template: other ones make other tokens.

        Truncation and padding, which a user may have left switched on in the file, are no part of it.

        Raises:
            SettingsError: there is no ``tokenizer.json``, or it is damaged.
        """
        file = self.path / TOKENIZER
        if not file.is_file():
            raise SettingsError(
                f"--model {self.name}: has no {TOKENIZER}, which is the only form of tokenizer that is read: write it with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
            )
        said, _ = naming.read_object(file, f"--model {self.name}: {TOKENIZER}")
        made = {key: value for key, value in said.items() if key not in ("truncation", "padding")}
        text = json.dumps([made, self.chat_template()], sort_keys=True, ensure_ascii=True)
        return blake3(text.encode()).hexdigest(16)

    def chat_template(self) -> str | None:
        """Return the chat template of the tokenizer, as the file of its own has it, or else the tokenizer's configuration.

        Raises:
            SettingsError: a file is damaged.
        """
        file = self.path / TEMPLATE
        if file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise SettingsError(
                    f"--model {self.name}: {TEMPLATE} is not UTF-8 ({error}): write it again as UTF-8"
                ) from None
        if not (self.path / TOKENIZER_CONFIG).is_file():
            return None
        said, _ = naming.read_object(self.path / TOKENIZER_CONFIG, f"--model {self.name}: {TOKENIZER_CONFIG}")
        template = said.get("chat_template")
        return template if isinstance(template, str) else None

    def weights_files(self) -> list[Path]:
        """Return the safetensors files with the model's weights.

        Raises:
            SettingsError: there are none.
        """
        if (self.path / INDEX).is_file():
            said, _ = naming.read_object(self.path / INDEX, f"--model {self.name}: {INDEX}")
            shards = said.get("weight_map")
            given = list(shards.values()) if isinstance(shards, Mapping) else []
            if not given or not all(isinstance(name, str) and Path(name).name == name for name in given):
                raise SettingsError(f"--model {self.name}: {INDEX} has no weight_map from tensors to files in its folder")
            names = sorted(set(given))
        else:
            names = [WHOLE]
        for name in names:
            if not (self.path / name).is_file():
                raise SettingsError(
                    f"--model {self.name}: {name} does not exist: weights are read from safetensors files; write them with "
                    "transformers' save_pretrained(FOLDER), or download the rest of the repository"
                )
        return [self.path / name for name in names]

    def stored(self) -> StoredTensors:
        """Return the size of the weights, from the heads of their files.

        Raises:
            SettingsError: a file is missing or damaged.
        """
        values = size = 0
        for _, kind, shape in self._tensors():
            count = math.prod(shape)
            values, size = values + count, size + count * BYTES.get(kind, 4)
        return StoredTensors(values, size)

    def adapter_values(self, rank: int, targets: Sequence[str]) -> int:
        """Return about how many values an adapter of a rank has on layers whose names end so; (): on all but tables and heads.

        Raises:
            SettingsError: a file is missing or damaged.
        """
        layers = ((name.removesuffix(".weight"), shape) for name, _, shape in self._tensors() if len(shape) == 2)
        if targets:
            wanted = (shape for name, shape in layers if any(f".{name}".endswith(f".{target}") for target in targets))
        else:
            wanted = (shape for name, shape in layers if TABLES.search(name) is None)
        return sum(rank * sum(shape) for shape in wanted)

    def _tensors(self) -> Iterator[tuple[str, str, list[int]]]:
        for file in self.weights_files():
            yield from _tensors(file, self.name)


def _tensors(file: Path, name: str) -> Iterator[tuple[str, str, list[int]]]:
    """Yield the name, type and shape of each tensor of a safetensors file."""
    try:
        with file.open("rb") as opened:
            length, size_bytes = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if not 2 <= length <= min(MAX_HEADER, size_bytes - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            stated_bytes = 8 + length + max((int(about["data_offsets"][1]) for about in header.values()), default=0)
            if stated_bytes != size_bytes:
                raise ValueError(f"it has {size_bytes} bytes, and its header states {stated_bytes}: copy it here again")
            for tensor, about in header.items():
                shape = [int(size) for size in about["shape"]]
                if not all(0 <= size < MAX_AXIS for size in shape):
                    raise ValueError(f"tensor {tensor!r} would have the shape {about['shape']!r:.200}")
                yield tensor, str(about["dtype"]), shape
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise SettingsError(f"--model {name}: {file.name} cannot be read as a safetensors file: {error}") from None


def open_model(name: str) -> ModelFolder:
    """Return the folder of a model: a path of this machine, a place, or ``NAME`` or ``NAME@REVISION`` of the hub.

    A repository is downloaded if it is not in the hub's cache, and what a place has if it is not in ours.

    Raises:
        SettingsError: there is neither; the repository is gated or missing, or there is no network and no copy of it.
        DilocoError: ``huggingface_hub`` is not installed.
        ObjectStoreError: the place cannot be read.
    """
    if is_remote(name):
        return ModelFolder(name, fetched(name, only=PATTERNS))
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFolder(name, path)
    if path.exists():
        raise SettingsError(f"--model {name}: is a file; name the folder with its {CONFIG}")
    repository, _, revision = name.partition("@")
    if HUB_NAME.fullmatch(repository) is None:
        raise SettingsError(f"--model {name}: there is no such folder")
    return ModelFolder(name, _downloaded(repository, revision))


def check_data(model: str, data: str | None) -> str:
    """Return the data to train a model on, once they are known to be named and, on this machine, to be there.

    Raises:
        DataError: they are not.
    """
    if data is None:
        raise DataError(f"--model {model}: needs --data, a file of conversations (.jsonl), or a file or folder of text")
    if not is_remote(data) and not Path(data).exists():
        raise DataError(f"--data {data}: there is no such file or folder; expected a file of conversations, or text")
    return data


def _downloaded(name: str, revision: str) -> Path:
    """Return the folder in the hub's cache that has a repository; the token is that of ``HF_TOKEN`` or ``hf auth login``."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise DilocoError(
            f"--model {name}: there is no such folder, and huggingface_hub is not installed, which would look for it on the "
            "hub; pip install 'diloco[finetune]'"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=list(PATTERNS)))
    except errors.GatedRepoError:
        why = "is gated: accept its terms on its page, and set HF_TOKEN to a token of that account"
    except errors.RevisionNotFoundError:
        why = f"has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        why = "is neither a folder here nor a repository that this account may read: correct the name, or set HF_TOKEN"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError):
        why = "is no folder here, is not in the hub's cache, and the hub cannot be reached: copy it here, and name its folder"
    except errors.HfHubHTTPError as error:
        why = f"cannot be downloaded: {str(error).splitlines()[0]}"
    raise SettingsError(f"--model {name}: {why}") from None
