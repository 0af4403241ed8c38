"""Checks of the tensors that a loop passes: each has its values here, and trained ones have a supported type."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from diloco.errors import SettingsError
from diloco_learner.pytorch.shards import local_of
from diloco_learner.pytorch.tensors import FLOATS, shown


def check_present(what: str, tensor: Any) -> None:
    """Check that a tensor has values that can be read and written, and all of them here; ``what`` it is begins the sentence.

    Raises:
        SettingsError: it has not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SettingsError(f"{what} is a {type(tensor).__name__}, expected a tensor like the others")
    tensor = local_of(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise SettingsError(f"{what} has no shape yet: call the module once on a batch, and join then")
    if tensor.is_meta:
        raise SettingsError(
            f"{what} is on the meta device, so it has no memory: call module.to_empty(device=...), then load or initialise "
            "the frozen parameters, and all others too if this loop founds the run"
        )
    check_dense(what, tensor)
    if tensor.is_inference():
        raise SettingsError(
            f"{what} was made under torch.inference_mode(), so it can be neither trained nor written: make it outside, or "
            "pass a copy that is made outside (copy.deepcopy)"
        )


def check_type(path: str, tensor: torch.Tensor) -> None:
    """Check that a trained tensor is float32 or bfloat16, in memory of its own.

    Raises:
        SettingsError: it is not.
    """
    tensor = local_of(tensor)
    if not is_plain(tensor):
        raise SettingsError(
            f"parameter {path!r} is a {type(tensor).__name__}, which consists of other tensors, expected a plain dense "
            "tensor: freeze it, and train float32 tensors beside it, such as adapters"
        )
    if tensor.dtype in FLOATS:
        return
    if tensor.is_floating_point():
        do = "keep float32 masters (module.float(), or copies of yours by name), and compute in other types by autocast"
    elif tensor.is_complex():
        do = "pass torch.view_as_real(parameter) by name"
    else:
        do = "leave out what is not trained"
    raise SettingsError(f"parameter {path!r} is {shown(tensor.dtype)}, expected float32 or bfloat16: {do}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, with a place for each value."""
    tensor = local_of(tensor)
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def check_dense(what: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has a place in memory for each value; ``what`` it is begins the sentence.

    Raises:
        SettingsError: it is sparse, nested or quantized, or of another layout with a form of its own.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "that is nested" if tensor.is_nested else f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
        kind = "that is quantized"
    else:
        return
    raise SettingsError(
        f"{what} is a {type(tensor).__name__} {kind}, expected a plain dense tensor: pass a dense one (to_dense(), "
        "dequantize(), or a tensor for each part), or make it a plain attribute of the module, which is not part of the "
        "run"
    )
