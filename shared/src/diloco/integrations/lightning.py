"""``lightning.Trainer`` as a learner of a run."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from diloco.errors import SettingsError
from diloco.integrations.joined_trainer import JoinedTrainer


class DilocoLightningCallback(JoinedTrainer, Callback):
    """A callback: ``Trainer(..., callbacks=[DilocoLightningCallback(url, run="mine", tokens=4096)])``.

    Args:
        url: URL of the run's NATS server.
        keeps_state: whether Lightning's checkpoints contain this learner's state, from which it continues.
        join: further arguments of ``diloco.join``: ``run``, and ``tokens``, those of an optimizer's step over all ranks.
    """

    _loaded: dict[str, Any] | None = None  # the state of a checkpoint, until training begins

    def state_dict(self) -> dict[str, Any]:
        """Return this learner's state for Lightning's checkpoint, which stores that of the first rank only."""
        return {} if self.run is None or not self.keeps_state else dict(self.run.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint when training begins."""
        self._loaded = state_dict if self.keeps_state else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, once the strategy has moved and wrapped the module.

        Raises:
            SettingsError: the module does not have exactly one optimizer, or the checkpoint's state is of another run, learner
                or model.
        """
        if len(trainer.optimizers) != 1:
            raise SettingsError(
                f"diloco: the module has {len(trainer.optimizers)} optimizers, expected one, whose steps are the run's steps"
            )
        loaded, self._loaded = self._loaded, None
        self.begin(pl_module, trainer.optimizers[0], loaded, [each.scheduler for each in trainer.lr_scheduler_configs])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss to the run, and stop the trainer once the run is over."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.run is not None and loss is not None:
            # by automatic optimization the loss is divided by the number of accumulated batches
            self.run.note_loss(loss * trainer.accumulate_grad_batches if pl_module.automatic_optimization else loss)
        trainer.should_stop |= self.over

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run once the last work is merged."""
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run at once."""
        self.end(exception)
