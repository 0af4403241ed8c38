"""``transformers.Trainer`` and its subclasses, as learners of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from diloco.errors import SettingsError
from diloco.integrations.joined_trainer import JoinedTrainer

PART = "diloco-rank-"  # prefix of the files with this learner's state in a checkpoint, one for each rank


def save_part(folder: Path, rank: int, ranks: int, part: dict[str, Any]) -> None:
    """Save a rank's part of a learner's state in a trainer's checkpoint, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{PART}{rank}.draft"
    torch.save(part, draft)
    draft.replace(folder / f"{PART}{rank}.pt")
    if rank == 0:  # a checkpoint of that name by more ranks may have been there
        for number, file in _parts(folder).items():
            if number >= ranks:
                file.unlink()


def load_parts(folder: Path, rank: int, ranks: int) -> dict[str, Any] | None:
    """Return a rank's own part in a checkpoint, or all parts if the number of ranks has changed; None: there are none."""
    files = _parts(folder)
    wanted = [files[rank]] if sorted(files) == list(range(ranks)) else list(files.values())
    state: dict[str, Any] = {}
    for file in wanted:
        state |= torch.load(file, map_location="cpu", weights_only=True)
    return state or None


def _parts(folder: Path) -> dict[int, Path]:
    """Return the files with parts of a learner's state in a checkpoint, by rank."""
    found = {file.stem.removeprefix(PART): file for file in folder.glob(f"{PART}*.pt")}
    return {int(rank): found[rank] for rank in sorted(found) if rank.isdecimal()}


class DilocoCallback(JoinedTrainer, TrainerCallback):
    """A callback: ``Trainer(..., callbacks=[DilocoCallback(url, run="mine", tokens=4096)])``.

    Args:
        url: URL of the run's NATS server.
        keeps_state: whether the trainer's checkpoints contain this learner's state, from which it continues.
        join: further arguments of ``diloco.join``: ``run``, and ``tokens``, those of an optimizer's step over all ranks.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **more: Any
    ) -> None:
        """Join the run. If the trainer has read a checkpoint with a learner's state, continue as that learner.

        Raises:
            SettingsError: ``load_best_model_at_end`` is set, or the checkpoint's state is of another run, learner or model.
        """
        if args.load_best_model_at_end:
            raise SettingsError(
                "diloco: load_best_model_at_end would replace the run's weights by those of this learner's checkpoint: "
                "leave it out, and get the run's weights with diloco export"
            )
        reads = self.keeps_state and state.global_step > 0
        saved = load_parts(_checkpoint(args, state), args.process_index, args.world_size) if reads else None
        self.begin(model, more["optimizer"], saved, [more["lr_scheduler"]])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Save this learner's state in the checkpoint that the trainer has just saved; each rank saves its part."""
        if self.keeps_state and self.run is not None:
            save_part(_checkpoint(args, state), args.process_index, args.world_size, self.run.state_dict())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Stop the trainer once the run is over."""
        control.should_training_stop |= self.over

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **more: Any
    ) -> None:
        """Report the loss that the trainer logs to the run."""
        if self.run is not None and logs and "loss" in logs:
            self.run.note_loss(float(logs["loss"]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Leave the run once the last work is merged."""
        self.end()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the current step's checkpoint."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
