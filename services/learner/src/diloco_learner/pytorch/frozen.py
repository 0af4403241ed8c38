"""Parameters that require no gradient: fixed tensors of the fragment map, so that learners with other ones are not admitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from diloco.core.fragments import FixedSpec
from diloco_learner.pytorch.names import Held


def fixed_specs(frozen: Iterable[Held]) -> list[FixedSpec]:
    """Return path, type, shape and hash of each; a tensor is on the host while it is hashed, one after the other."""
    return [spec for each in frozen for spec in _specs(each.path, each.tensor.detach())]


def _specs(path: str, tensor: torch.Tensor) -> Iterator[FixedSpec]:
    if hasattr(tensor, "__tensor_flatten__"):  # made of other tensors, as those of torchao are
        for name in tensor.__tensor_flatten__()[0]:
            yield from _specs(f"{path}/{name}", getattr(tensor, name))
        return
    values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    yield FixedSpec.of(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values.data)
