"""The modules that a user's task is made of: its module, and all that it imports from the same folder.

They are found in the text of the code, wherever in it an import stands: a result depends on what a factory or a method
imports, too. A module that is imported by a name which the code puts together is not found.
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco_ops.up.project import parsed

LIBRARIES = frozenset(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


@dataclass(frozen=True)
class _Module:
    """A module by its whole name, and its file."""

    name: str
    file: Path

    @property
    def package(self) -> str:
        """The package that relative imports in it begin at."""
        return self.name if self.file.stem == "__init__" else self.name.rpartition(".")[0]


def modules_of(name: str, file: Path) -> dict[str, Path]:
    """Return the files of a module and of all that it imports, directly or not, from the folder that it is found in.

    They are by whole name. Of a module that is installed among libraries, the folder is that of its outermost package.

    Raises:
        SettingsError: a file cannot be read, or is no Python.
    """
    folder = file.parents[name.count(".") + (file.stem == "__init__")]
    only = name.partition(".")[0] if folder in LIBRARIES else None
    found: dict[str, Path] = {}
    left = list(_with_packages(name))
    while left:
        own = left.pop()
        its = file if own == name else _file_of(folder, own)
        if own not in found and its is not None and only in (None, own.partition(".")[0]):
            found[own] = its
            left += _imported(_Module(own, its))
    return found


def _with_packages(name: str) -> Iterator[str]:
    """Yield the names of the packages that a module is in, and its own: each is imported."""
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _imported(module: _Module) -> Iterator[str]:
    """Yield the whole names that may be modules which a module imports: of ``from a.b import c``, a, a.b and a.b.c."""
    if module.file.suffix != ".py":
        return  # compiled
    for node in ast.walk(parsed(module.file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _resolved(node, module)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        else:
            continue
        for name in names:
            yield from _with_packages(name)


def _resolved(node: ast.ImportFrom, module: _Module) -> str:
    """Return the whole name of the module that something is imported from; nothing: it is above the outermost package."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), module.package)
    except ImportError:
        return ""


def _file_of(folder: Path, name: str) -> Path | None:
    place = folder.joinpath(*name.split("."))
    return next((file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file()), None)
