"""Decoupled DiLoCo: one model, trained over many data centers on ordinary links.

``diloco.core`` decides (pure: no clock, no network, no file), ``diloco.wire`` is what travels, ``diloco.nats`` carries it,
``diloco.member.member`` is a learner's protocol side. None of them needs an accelerator library.

``__init__.pyi`` has the types of the functions of other distributions.
"""

from typing import Any

__version__ = "0.2.0"
__all__ = ["__version__", "join", "open", "up"]


def __getattr__(name: str) -> Any:
    """Return a function of other distributions that belongs to ``import diloco``: they name it as an entry point."""
    from importlib.metadata import entry_points

    for point in entry_points(group="diloco.api", name=name):
        return point.load()
    raise AttributeError(f"module 'diloco' has no attribute {name!r}; install all of diloco with: pip install 'diloco[all]'")


def __dir__() -> list[str]:
    """Return the module's names, with those that the installed distributions add."""
    from importlib.metadata import entry_points

    return sorted({*globals(), *(point.name for point in entry_points(group="diloco.api"))})
