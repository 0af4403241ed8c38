"""Parameters that require no gradient: fixed tensors of the fragment map, so that learners with other ones are not admitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from diloco.core.tensors.fragments import FixedSpec
from diloco_learner.pytorch.names import ModuleTensor
from diloco_learner.pytorch.shards import is_sharded
from diloco_learner.pytorch.tensor_checks import check_dense


def fixed_specs(frozen: Iterable[ModuleTensor]) -> list[FixedSpec]:
    """Return path, type, shape and hash of each; a tensor is on the host while it is hashed, one after the other.

    Raises:
        SettingsError: a tensor is not dense, or is made of a tensor that is not.
    """
    return [spec for each in frozen for spec in _specs(each.path, each.tensor.detach())]


def _specs(path: str, tensor: torch.Tensor) -> Iterator[FixedSpec]:
    if is_sharded(tensor):
        tensor = tensor.full_tensor()  # all ranks do so at join, one tensor after another
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as those of torchao are
        for name in tensor.__tensor_flatten__()[0]:
            yield from _specs(f"{path}/{name}", getattr(tensor, name))
        return
    check_dense(f"parameter {path!r}, which is not trained,", tensor)
    # a conjugate or negative view has the other values in memory
    values = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    yield FixedSpec.of(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values.data)
