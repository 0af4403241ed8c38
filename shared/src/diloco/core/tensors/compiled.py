"""The kernels, imported by their first use: numba takes a second of it, which commands that compute nothing do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

BLOCK = 64  # values that share a scale


class _Kernels:
    """The functions of the modules of kernels, each an attribute from its first use on.

    ``announce`` is called before the first kernel is compiled. It is not called where all of them are loaded from the cache.
    """

    announce: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        for module in self._imported():
            if hasattr(module, name):
                found = getattr(module, name)
                setattr(self, name, found)
                return found
        raise AttributeError(name)

    def load(self) -> None:
        """Import them now, so that no step and no merge waits for it."""
        self._imported()

    def _imported(self) -> tuple[ModuleType, ...]:
        with nullcontext() if self.announce is None else announced_compilation(self.announce):
            from diloco.core.tensors import kernels, narrow_kernels, progress
        return kernels, narrow_kernels, progress


@contextmanager
def announced_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Call ``announce`` once, before the first function that numba compiles in the block."""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc] # numba has no types
        announced = False

        def on_start(self, event: Any) -> None:
            if not self.announced:
                self.announced = True
                announce()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield


kernels = _Kernels()
