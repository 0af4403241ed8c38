"""``diloco export --format peft``: a run's LoRA adapter as the library peft saves it, by the names in its files.

A module of peft calls a tensor ``base_model.model.q_proj.lora_A.default.weight``, where ``default`` is the adapter's name. In
its files the adapter has no name: ``base_model.model.q_proj.lora_A.weight``. peft says nothing of a tensor in a file for which
its model has no place, so the tensors are compared with the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco.weights_files.naming import Names, Naming, torch_names
from diloco_ops.weights.weights_file import NamedWeights, Precision, one_file, write_config

PREFIX = "base_model.model."  # of all names in peft's files
SAVED = "modules_to_save"
EVERY_LINEAR = "all-linear"  # stands for modules that only the model knows
INSTEAD = "export it with --names torch"


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter: the module that it adapts, and what it is there, by the names of peft's files.

    ``kind`` is a part of a name such as ``lora_A``, or ``modules_to_save``, or ``bias``; ``adapter`` is empty for a bias.
    """

    module: str
    kind: str
    adapter: str
    rest: str  # of its name

    @property
    def name(self) -> str:
        """Its name in peft's files."""
        # the magnitudes of DoRA were no module once, and have the name from then
        weight = "" if self.kind == "lora_magnitude_vector" else self.rest
        middle = [] if self.kind in (SAVED, "bias") else [self.kind]
        return PREFIX + ".".join(part for part in (self.module, *middle, weight) if part)


def adapter_naming(tensors: Sequence[TensorSpec], config: Mapping[str, Any], source: str) -> Naming:
    """Return the names that a run's tensors have in the files of peft.

    Args:
        tensors: those of the run.
        config: of the adapter, as in ``adapter_config.json``.
        source: of the configuration; it begins the sentences about it.

    Raises:
        SettingsError: the run trains more than an adapter, or several of them; or the configuration is of another one.
    """
    if config.get("peft_type") != "LORA":
        raise SettingsError(f"{source}: peft_type is {config.get('peft_type')!r}, expected 'LORA': for another kind {INSTEAD}")
    in_module = torch_names(tensors, "--format peft").entries
    found = {spec.path: _adapter_tensor(in_module[spec.path], config, source) for spec in tensors}
    adapters = sorted({each.adapter for each in found.values() if each.adapter})
    if len(adapters) != 1:
        names = f"the adapters {', '.join(adapters)}" if adapters else f"no adapter: its first tensor is {tensors[0].path!r}"
        raise SettingsError(f"--format peft: the run trains {names}, expected one adapter: {INSTEAD}")
    for spec in tensors:
        _check_place(spec, found[spec.path], config, source)
    return Naming(tensors, Names({path: each.name for path, each in found.items()}, "--format peft"))


def _adapter_tensor(name: str, config: Mapping[str, Any], source: str) -> AdapterTensor:
    """Return the tensor of an adapter that has this name in PyTorch.

    Raises:
        SettingsError: it is of no adapter.
    """
    parts = name.removeprefix(PREFIX).split(".")
    for at, part in enumerate(parts[:-1]):
        if part.startswith("lora_") or part == SAVED:
            return AdapterTensor(".".join(parts[:at]), part, parts[at + 1], ".".join(parts[at + 2 :]))
    if parts[-1] == "bias":
        if config.get("bias", "none") == "none":
            raise SettingsError(f"{source}: bias is 'none', but the run trains {name!r}: take the file of this adapter")
        return AdapterTensor(".".join(parts[:-1]), "bias", "", "bias")
    raise SettingsError(
        f"--format peft: the run has {name!r}, which is not a tensor of a LoRA adapter, so peft would not load it: {INSTEAD}"
    )


def _check_place(spec: TensorSpec, found: AdapterTensor, config: Mapping[str, Any], source: str) -> None:
    """Check that peft makes a place for a tensor by this configuration.

    Raises:
        SettingsError: it does not.
    """
    if found.kind == "bias":
        return
    key, ends = (SAVED, "{}") if found.kind == SAVED else ("target_modules", ".{}")
    if not _names_module(config, key, found.module, ends, source):
        raise SettingsError(
            f"{source}: {key} does not have {found.module!r}, whose {spec.path!r} the run trains: take the file of this adapter"
        )
    patterns = config.get("rank_pattern")
    ranks = {config.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())}
    if found.kind in ("lora_A", "lora_embedding_A") and spec.model_shape[0] not in ranks:
        raise SettingsError(
            f"{source}: r is {config.get('r')!r}, but {spec.path!r} of the run has the rank {spec.model_shape[0]}: take the "
            "file of this adapter"
        )


def _names_module(config: Mapping[str, Any], key: str, module: str, ends: str, source: str) -> bool:
    """Whether a setting of peft names a module: a regular expression, or a list of names or of how names end (``ends``).

    Raises:
        SettingsError: it is no regular expression.
    """
    wanted = config.get(key)
    if wanted is None:
        return bool(config.get("target_parameters"))  # names parameters instead
    if isinstance(wanted, str):
        try:
            return wanted == EVERY_LINEAR or re.fullmatch(wanted, module) is not None
        except re.error as error:
            raise SettingsError(f"{source}: {key} is {wanted!r}, which is not a regular expression: {error}") from None
    return isinstance(wanted, list) and any(module == each or module.endswith(ends.format(each)) for each in wanted)


@contextmanager
def peft(
    folder: Path, naming: Naming, precision: Precision, metadata: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[NamedWeights]:
    """Write an adapter into a new folder as peft loads it: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir()
    write_config(folder / "adapter_config.json", config)
    with one_file(folder / "adapter_model.safetensors", naming, precision, metadata) as weights:
        yield weights
