"""``diloco init``: a project of one's own, from a template: a task, its settings, a program that trains it, and a test."""

from __future__ import annotations

import enum
import shutil
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import RunError

TEMPLATES = Path(__file__).parent / "templates"
COMMON = "common"  # the files that all have


class Template(enum.StrEnum):
    """The templates that there are."""

    GPT = "gpt"
    VISION = "vision"


ABOUT = {Template.GPT: "a small GPT on text", Template.VISION: "a small network that tells shapes in images"}
README = """# {name}

{about}, trained by several learners with Decoupled DiLoCo.

    python -m pytest            # the task is fit (pip install pytest)
    diloco check task.py        # its tensors, memory, and what is unusual
    python train.py             # train it on this machine; Ctrl-C stops in order, the report is in runs/

`task.py` has model, loss and data; `settings.py` has tokens, learners and settings.
Take the weights with `diloco export runs/... model.safetensors`.
"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="Folder to make.")],
    template: Annotated[Template, typer.Option(help="What it begins with.")] = Template.GPT,
) -> None:
    """Make a project that trains and tests itself."""
    if folder.exists():
        raise RunError(f"{folder}: exists; name a new folder")
    try:
        folder.mkdir(parents=True)
        for source in sorted([*(TEMPLATES / COMMON).glob("*.py"), *(TEMPLATES / template).glob("*.py")]):
            shutil.copyfile(source, folder / source.name)
        (folder / "README.md").write_text(README.format(name=folder.name, about=ABOUT[template].capitalize()), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: was not made: {error}") from None
    print(f"{folder}: {ABOUT[template]}; next: cd {folder} && python train.py")
