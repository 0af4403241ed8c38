"""Where the files of a learner's states are, below the directory that its settings name ``state_dir``.

    checkpoints/NAME.safetensors            its own checkpoint, and NAME.previous.safetensors the one before it
    checkpoints/NAME.kept.safetensors       what its processes kept when one of them was lost
    checkpoints/7/NAME.safetensors          its state for checkpoint 7 of the whole run
    loans/NAME/                             what it lends to learners that copy its state

A learner of several processes has a file of each: NAME for part 0, ``NAME.part-1`` and so on for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = "checkpoints"
LOANS = "loans"
BEFORE = "before"  # weights and learners' last states of the run that this one continues


@dataclass(frozen=True)
class StateFolder:
    """The paths of a learner's states."""

    state_dir: Path
    learner: str

    def generations(self, part: int = 0) -> tuple[Path, Path]:
        """Return the paths of a part of its own checkpoint, and of the one before it."""
        return generations(self.state_dir / FOLDER, self.learner, part)

    def kept(self, part: int = 0) -> Path:
        """Return the path of a part of the state that its processes kept when one of them was lost."""
        return kept(self.state_dir / FOLDER, self.learner, part)

    def snapshot(self, number: int, part: int = 0) -> Path:
        """Return the path of a part of its state for a checkpoint of the whole run."""
        return part_file(self.state_dir / FOLDER / str(number), self.learner, part)

    def snapshots(self) -> dict[int, list[Path]]:
        """Return the files of its states for checkpoints of the whole run that are here, by the checkpoint's number."""
        found: dict[int, list[Path]] = {}
        for folder in (self.state_dir / FOLDER).glob("[0-9]*"):
            paths = [folder / f"{self.learner}.safetensors", *folder.glob(f"{self.learner}.part-*.safetensors")]
            here = [path for path in paths if path.is_file()]
            if folder.name.isdecimal() and here:
                found[int(folder.name)] = here
        return found

    def loans(self, part: int = 0) -> Path:
        """Return the folder of what one of its processes lends."""
        return self.state_dir / LOANS / _part_name(self.learner, part)


def part_file(folder: Path, learner: str, part: int) -> Path:
    """Return the path of a part of a learner's state in a folder of states."""
    return generations(folder, learner, part)[0]


def generations(folder: Path, learner: str, part: int) -> tuple[Path, Path]:
    """Return the paths of a part of a learner's state in a folder of states, and of the state before it."""
    name = _part_name(learner, part)
    return folder / f"{name}.safetensors", folder / f"{name}.previous.safetensors"


def kept(folder: Path, learner: str, part: int) -> Path:
    """Return the path of a part of what a learner's processes kept, in a folder of states."""
    return folder / f"{_part_name(learner, part)}.kept.safetensors"


def weights_before(directory: Path) -> Path:
    """Return the path of the weights with which the run that this one continues has ended."""
    return directory / BEFORE / "weights.safetensors"


def states_before(directory: Path) -> Path:
    """Return the folder of the states with which learners of the run that this one continues have ended."""
    return directory / BEFORE / "learners"


def _part_name(learner: str, part: int) -> str:
    return learner if part == 0 else f"{learner}.part-{part}"
