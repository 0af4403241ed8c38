"""Files that come with the lab, by name: experiments, recordings of paces, and failure tapes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from diloco.errors import SettingsError
from diloco.settings.validation import nearest

TOML = ".toml"


def named(folder: str, suffix: str = TOML) -> dict[str, Path]:
    """Return the files of one of the package's folders, by name."""
    path = Path(str(resources.files("diloco_lab") / folder))
    return {file.stem: file for file in sorted(path.glob(f"*{suffix}"))}


def find(folder: str, name: str, missing: str, suffix: str = TOML) -> Path:
    """Return the file of a name in one of the package's folders, or the file that ``name`` is if it ends in ``suffix``.

    Raises:
        SettingsError: there is none of that name; it begins with ``missing``.
    """
    if name.endswith(suffix):
        return Path(name)
    known = named(folder, suffix)
    if name not in known:
        there = ", ".join(known)
        raise SettingsError(f"{missing}{nearest(name, list(known))}; there are {there}, or name a file {suffix}")
    return known[name]
