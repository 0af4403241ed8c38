"""``lightning.Trainer`` as a learner of a run."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from diloco.errors import SettingsError
from diloco.integrations.joined_trainer import JoinedTrainer


class DilocoLightningCallback(JoinedTrainer, Callback):
    """A callback: ``Trainer(..., callbacks=[DilocoLightningCallback(url, run="mine", tokens=4096)])``.

    Args:
        url: of the run's NATS server.
        keeps_state: Lightning's checkpoints have this learner's state, and it goes on from it.
        join: further arguments of ``diloco.join``: ``run``, and ``tokens`` of an optimizer's step of all ranks.
    """

    _loaded: dict[str, Any] | None = None  # the state of a checkpoint, until training begins

    def state_dict(self) -> dict[str, Any]:
        """Return this learner's state for Lightning's checkpoint, which has the first rank's of several."""
        return {} if self.run is None or not self.keeps_state else dict(self.run.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of a checkpoint when training begins."""
        self._loaded = state_dict if self.keeps_state else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, once the strategy has moved and wrapped the module.

        Raises:
            SettingsError: the module has several optimizers, or none, or the checkpoint's state is that of another run, learner
                or model.
        """
        if len(trainer.optimizers) != 1:
            raise SettingsError(
                f"diloco: the module has {len(trainer.optimizers)} optimizers, expected one: a step of the run is a step of it"
            )
        loaded, self._loaded = self._loaded, None
        self.begin(pl_module, trainer.optimizers[0], loaded, [each.scheduler for each in trainer.lr_scheduler_configs])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the run the loss, and have the trainer stop once the run is over."""
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
