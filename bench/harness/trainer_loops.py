"""The training of a trainer that people have, in a run or without one, each in a process of its own."""

from __future__ import annotations

import itertools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from diloco.process import observe
from harness.loops import SquareLayers, TakenStep
from harness.parties import RUN, STEP_TOKENS

NAME = "loop-0"
ENDLESS_STEPS = 10**9
Taken = Callable[[], None]  # called by a trainer after each step
Joined = Callable[[], None]  # called once training has begun


def trainer_main(
    kind: str, pipe: Connection, url: str | None, index: int, parameters: int, step_s: float, rows: int | None
) -> None:
    """Train with a trainer as :func:`harness.loops.loop_main` does by itself; a step's ``call_s`` is not known."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layers = SquareLayers(parameters)
    if url is None:
        rows = layers.rows(step_s) if rows is None else rows
        pipe.send(rows)
    else:
        observe.configure(NAME, RUN, level="warning", fmt="console", file=None)
        pipe.send("here")
        pipe.recv()
    began_s, taken = time.monotonic(), list[TakenStep]()

    def begun() -> None:
        if url is not None:
            pipe.send(time.monotonic() - began_s)

    def step_taken() -> None:
        taken.append(TakenStep(time.monotonic(), 0.0, 0.0, time.thread_time()))
        if pipe.poll():
            pipe.recv()
            pipe.send(list(taken))
            taken.clear()

    TRAINERS[kind](layers.module, layers.batch(rows or 1), url, begun, step_taken)


def _given(url: str) -> dict[str, Any]:
    return {"url": url, "run": RUN, "name": NAME, "tokens": STEP_TOKENS}


def _loss(module: Any, batch: Any) -> Any:
    return (module(batch) - batch).square().mean()


def _transformers(module: Any, batch: Any, url: str | None, begun: Joined, step_taken: Taken) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from diloco.integrations.transformers import DilocoCallback

    class Scored(torch.nn.Sequential):  # type: ignore[misc]
        def forward(self, batch: Any) -> dict[str, Any]:
            return {"loss": (super().forward(batch) - batch).square().mean()}

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return itertools.repeat({"batch": batch})

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *of_trainer: Any, **more: Any) -> None:
            begun()

        def on_step_end(self, *of_trainer: Any, **more: Any) -> None:
            step_taken()

    callbacks = [*([] if url is None else [DilocoCallback(**_given(url))]), Steps()]
    given: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": ENDLESS_STEPS, "optim": "sgd", "max_grad_norm": 0}
    given |= {"learning_rate": 1e-3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, logging_strategy="no", **given)
        model = Scored(*module)
        rows = {"train_dataset": Batches(), "data_collator": lambda items: items[0]}
        Trainer(model=model, args=arguments, callbacks=callbacks, **rows).train()


def _lightning(module: Any, batch: Any, url: str | None, begun: Joined, step_taken: Taken) -> None:
    import lightning
    import torch

    from diloco.integrations.lightning import DilocoLightningCallback

    class Layers(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, layer in module.named_children():
                self.add_module(name, layer)

        def training_step(self, batch: Any, number: int) -> Any:
            return _loss(module, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)

    class Steps(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, *of_trainer: Any) -> None:
            begun()

        def on_train_batch_end(self, *of_trainer: Any) -> None:
            step_taken()

    callbacks = [*([] if url is None else [DilocoLightningCallback(**_given(url))]), Steps()]
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": ENDLESS_STEPS, "logger": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(callbacks=callbacks, default_root_dir=folder, **given)
        trainer.fit(Layers(), _Endless(batch))


class _Endless:
    """The same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch)


def _accelerate(module: Any, batch: Any, url: str | None, begun: Joined, step_taken: Taken) -> None:
    import contextlib

    import torch
    from accelerate import Accelerator

    from diloco.integrations import accelerate as joining

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9))
    joined: Any = contextlib.nullcontext() if url is None else joining.join(accelerator, model, optimizer, **_given(url))
    with joined as run:
        begun()
        while run is None or not run.over:
            loss = _loss(model, batch)
            accelerator.backward(loss)
            if run is not None:
                run.note_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            step_taken()


TRAINERS = {"transformers": _transformers, "lightning": _lightning, "accelerate": _accelerate}
