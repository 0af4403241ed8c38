"""``diloco init``: a project of one's own, from a template: a task, its settings, a program that trains it, and a test."""

from __future__ import annotations

import enum
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import RunError

FOLDER = Path(__file__).parents[1] / "templates"
COMMON, IMAGES = "common", "images"  # the files that all have; those that have images to train on


class Template(enum.StrEnum):
    """The templates that there are."""

    GPT = "gpt"
    FLAX = "flax"
    EQUINOX = "equinox"
    TORCH = "torch"
    VISION = "vision"


@dataclass(frozen=True)
class TemplateInfo:
    """A template as people see it."""

    about: str
    folders: tuple[str, ...] = ()  # whose files it has, beside its own and the common ones
    needs: str = ""  # the package of this name, which diloco[all] does not bring
    install: str = ""  # how to install it

    def missing(self) -> str:
        """Return how to install the package that it needs, where that is not there; else nothing."""
        return self.install if self.needs and find_spec(self.needs) is None else ""


PROJECTS = {
    Template.GPT: TemplateInfo("a small GPT on text, in plain JAX"),
    Template.FLAX: TemplateInfo(
        "a small network in Flax NNX that classifies shapes in images", (IMAGES,), "flax", "pip install flax"
    ),
    Template.EQUINOX: TemplateInfo(
        "a small network in Equinox that classifies shapes in images", (IMAGES,), "equinox", "pip install equinox"
    ),
    Template.TORCH: TemplateInfo(
        "a small network in PyTorch that classifies shapes in images", (IMAGES,), "torch", "pip install 'diloco[torch]'"
    ),
    Template.VISION: TemplateInfo("a small network in plain JAX that classifies shapes in images", (IMAGES,)),
}
README = """# {name}

{about}, trained by several learners with Decoupled DiLoCo.

    python -m pytest            # the task is fit (pip install pytest{install})
    diloco check task.py        # its tensors, memory, and what is unusual
    python train.py             # train it on this machine; Ctrl-C stops in order, the report is in runs/

`task.py` has {parts}; `settings.py` has tokens, learners and settings.
Take the weights with `diloco export runs/... model.safetensors`.
"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="Folder to create.")],
    template: Annotated[Template, typer.Option(help="Template of the project.")] = Template.GPT,
) -> None:
    """Make a project that trains and tests itself."""
    if folder.exists():
        raise RunError(f"{folder}: exists; name a new folder")
    project = PROJECTS[template]
    try:
        folder.mkdir(parents=True)
        for name in (COMMON, *project.folders, template):
            for source in sorted((FOLDER / name).glob("*.py")):
                shutil.copyfile(source, folder / source.name)
        (folder / "README.md").write_text(_readme(folder.name, project), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: could not be created: {error}") from None
    first = f"{project.missing()} && " if project.missing() else ""
    print(f"{folder}: {project.about}; next: {first}cd {folder} && python train.py")


def _readme(name: str, project: TemplateInfo) -> str:
    install = f"; {project.install}" if project.install else ""
    parts = "the model and its loss, `images.py` the data" if IMAGES in project.folders else "the model, its loss and its data"
    return README.format(name=name, about=project.about[0].upper() + project.about[1:], install=install, parts=parts)
