"""Types of fixtures: what a test annotates its arguments with. The fixtures are in ``conftest.py`` of the folders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from diloco_ops.broker.server import Server

if TYPE_CHECKING:  # tests without a run load no learner
    from tests.services.apart import Region
    from tests.services.cluster import Cluster


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str


MakeServer = Callable[..., Server]
Diloco = Callable[..., Ended]
Launch: TypeAlias = "Callable[..., Cluster]"
Regions: TypeAlias = "Callable[..., Awaitable[Region]]"
