"""Values written into a loop's tensors from outside: averaged weights for an evaluation, rounding errors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from diloco.errors import SettingsError
from diloco_learner.pytorch.names import parameters_of, plain_path
from diloco_learner.pytorch.shards import local_of

Views = dict[str, torch.Tensor]


@contextmanager
def swapped(views: Views, values: Any) -> Iterator[None]:
    """Put ``values`` into ``views``, by path, inside the ``with`` statement: of a module with the same parameters, or by name.

    They are written in place, so that whatever keeps a tensor's memory has them too. Copies of the views are kept meanwhile.

    Raises:
        SettingsError: a tensor is missing, or of another shape.
    """
    given = _by_path(values)
    for path, view in views.items():
        if path not in given:
            raise SettingsError(f"averaged: parameter {path!r} is missing: give the averaged weights of all parameters")
        if given[path].shape != view.shape:
            raise SettingsError(
                f"averaged: parameter {path!r} has shape {tuple(given[path].shape)}, expected {tuple(view.shape)}"
            )
    own = {path: view.clone() for path, view in views.items()}
    try:
        _write(views, given)
        yield
    finally:
        _write(views, own)


def check_rests(own: Mapping[str, torch.Tensor], rests: Mapping[str, Any]) -> None:
    """Check that ``rests``, of rounding to bfloat16, are of the tensors that have ``own`` ones here, and spread as they are.

    Raises:
        SettingsError: they are not.
    """
    for path in sorted(own.keys() | rests.keys()):
        if path not in own or path not in rests:
            now, then = ("bfloat16", "float32") if path in own else ("float32", "bfloat16")
            raise SettingsError(
                f"load_state_dict: parameter {path!r} is {now}, but was {then} when the state was taken: join with the "
                "earlier types, or leave out load_state_dict"
            )
        here, came = local_of(own[path]), rests[path]
        if not isinstance(came, torch.Tensor) or local_of(came).shape != here.shape or came.shape != own[path].shape:
            raise SettingsError(
                f"load_state_dict: the rounding error of parameter {path!r} does not have this rank's shape "
                f"{tuple(here.shape)}: load it with torch.distributed.checkpoint, which reshards it"
            )


def _write(views: Views, values: Views) -> None:
    with torch.no_grad():
        for path, view in views.items():
            view.copy_(values[path])


def _by_path(values: Any) -> Views:
    if isinstance(values, torch.nn.Module):
        return {each.path: local_of(each.tensor) for each in parameters_of(values)}
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"averaged: weights are a {type(values).__name__}, expected a module with the same parameters, or tensors by name"
        )
    return {plain_path(str(name)): local_of(tensor) for name, tensor in values.items()}
