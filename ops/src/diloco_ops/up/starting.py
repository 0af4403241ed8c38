"""``diloco init``: a project of one's own, from a template: a task, its settings, a program that trains it, and a test."""

from __future__ import annotations

import enum
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from diloco.errors import RunError

FOLDER = Path(__file__).parents[1] / "templates"
PREPARE = "make_model.py"
COMMON, IMAGES = "common", "images"  # the files that all have; those that have images to train on


class Template(enum.StrEnum):
    """The templates that there are."""

    GPT = "gpt"
    FLAX = "flax"
    EQUINOX = "equinox"
    TORCH = "torch"
    VISION = "vision"
    SFT = "sft"


@dataclass(frozen=True)
class TemplateInfo:
    """A template as people see it."""

    about: str
    folders: tuple[str, ...] = ()  # whose files it has, beside its own and the common ones
    needs: str = ""  # the package of this name, which diloco[all] does not bring
    install: str = ""  # how to install it
    parts: str = "the model, its loss and its data"  # in task.py
    prepares: bool = False  # make_model.py makes files with which it begins

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
    Template.SFT: TemplateInfo(
        "a small causal language model of transformers, fine-tuned on conversations",
        needs="transformers",
        install="pip install 'diloco[finetune]'",
        parts="the task, `make_model.py` has made `model/` and `chats.jsonl`, with which it begins",
        prepares=True,
    ),
}
README = """# {name}

{about}, trained by several learners with Decoupled DiLoCo.

    python -m pytest            # the task is fit (pip install pytest{install})
    diloco check task.py        # its tensors, memory, and what is unusual
    diloco up                   # train it on this machine; Ctrl-C stops in order, the report is in runs/
    python train.py             # the same from Python

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
    if project.prepares:
        first += _prepared(folder, project)
    print(f"{folder}: {project.about}; next: {first}cd {folder} && diloco up")


def _prepared(folder: Path, project: TemplateInfo) -> str:
    """Make the files with which a project begins; return the command that makes them, where that is not possible yet.

    Raises:
        RunError: they cannot be made.
    """
    if project.missing():
        return f"python {folder / PREPARE} && "
    ended = subprocess.run([sys.executable, PREPARE], cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        words = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise RunError(f"{folder / PREPARE}: failed: {words[-1]}")
    print(ended.stdout, end="")
    return ""


def _readme(name: str, project: TemplateInfo) -> str:
    install = f"; {project.install}" if project.install else ""
    parts = "the model and its loss, `images.py` the data" if IMAGES in project.folders else project.parts
    return README.format(name=name, about=project.about[0].upper() + project.about[1:], install=install, parts=parts)
