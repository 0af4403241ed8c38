"""Parameters that require no gradient: fixed tensors of the fragment map, so that learners with other ones are not admitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from diloco.core.tensors.fragments import FixedSpec
from diloco.errors import SettingsError
from diloco_learner.pytorch.names import ModuleTensor


def fixed_specs(frozen: Iterable[ModuleTensor]) -> list[FixedSpec]:
    """Return path, type, shape and hash of each; a tensor is on the host while it is hashed, one after the other.

    Raises:
        SettingsError: a tensor is not dense, or is made of a tensor that is not.
    """
    return [spec for each in frozen for spec in _specs(each.path, each.tensor.detach())]


def check_dense(what: str, tensor: torch.Tensor) -> None:
    """Find out that a tensor has a place in memory for each value; ``what`` it is begins the sentence.

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
        f"{what} is a {type(tensor).__name__} {kind}, expected a plain dense tensor: hand over a dense one (to_dense(), "
        "dequantize(), or a tensor for each part), or make it a plain attribute of the module, and it is no part of the "
        "run"
    )


def _specs(path: str, tensor: torch.Tensor) -> Iterator[FixedSpec]:
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as those of torchao are
        for name in tensor.__tensor_flatten__()[0]:
            yield from _specs(f"{path}/{name}", getattr(tensor, name))
        return
    check_dense(f"parameter {path!r}, which is not trained,", tensor)
    # a conjugate or negative view has the other values in memory
    values = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    yield FixedSpec.of(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values.data)
