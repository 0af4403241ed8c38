"""The kernels, imported by their first use: numba takes a second of it, which commands that compute nothing do without."""

from __future__ import annotations

from typing import Any

BLOCK = 64  # values that share a scale


class _Kernels:
    """The functions of :mod:`diloco.core.kernels`, each an attribute from its first use on."""

    def __getattr__(self, name: str) -> Any:
        from diloco.core import kernels

        found = getattr(kernels, name)
        setattr(self, name, found)
        return found

    def load(self) -> None:
        """Import them now, so that no step and no merge waits for it."""
        from diloco.core import kernels  # noqa: F401


kernels = _Kernels()
