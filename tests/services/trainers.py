"""Training by the trainers that people have: ``trainers.py KIND URL RUN NAME OUT``; it writes what came of it as JSON.

It goes on from the newest checkpoint in the folder of OUT. With ``--stop`` it waits to be killed once it has saved one.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

VOCABULARY, CONTEXT, BATCH, LEARNING_RATE = 16, 8, 4, 1e-2
SAVE_STEPS = 10
Trained = tuple[Any, int, dict[str, Any]]  # module, steps of its optimizer in the run, and what else a test looks at
TOKENS = 2 * BATCH * CONTEXT  # of a step, for which two batches are accumulated


def rows(seed: int) -> Iterator[torch.Tensor]:
    """Yield rows of a language in which the next word follows from the last one."""
    for number in itertools.count():
        first = np.random.default_rng((seed, number)).integers(VOCABULARY)
        yield torch.tensor([(3 * at + first) % VOCABULARY for at in range(CONTEXT)])


class Rows(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for row in rows(1):
            yield {"input_ids": row, "labels": row}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Notes the part of the run that is over and the next learning rate at each step, and says that a checkpoint is there.

    ``before`` are the steps that the run has of an earlier process of this name.
    """

    def __init__(self, joining: Any) -> None:
        self.joining, self.rates, self.before = joining, list[tuple[float, float]](), 0

    def on_step_end(self, *state: Any, **more: Any) -> None:
        if not self.rates:
            self.before = self.joining.run.steps - 1
        self.rates.append((self.joining.run.progress, more["optimizer"].param_groups[0]["lr"]))

    def on_save(self, *state: Any, **more: Any) -> None:
        note_saved()


def note_saved() -> None:
    """Say that a checkpoint is there, and wait to be killed if that is asked for."""
    print("saved", flush=True)
    if "--stop" in sys.argv:
        threading.Event().wait()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=16, **sizes))


SHARED: dict[str, Any] = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2, "max_steps": 100_000}
SHARED |= {"logging_steps": 5, "report_to": [], "use_cpu": True, "disable_tqdm": True}


class Failing(Rows):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from itertools.islice(super().__iter__(), 20 * BATCH)
        raise ValueError("the data are at fault")


def transformers(url: str, run: str, name: str, folder: Path, rows: Rows | None = None) -> Trained:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from diloco.integrations.transformers import DilocoCallback

    model, joining = llama(), DilocoCallback(url, run=run, name=name, tokens=TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, joining.learning_rate_factor)
    arguments = TrainingArguments(str(folder / name), save_steps=SAVE_STEPS, save_total_limit=1, **SHARED)
    steps = Steps(joining)
    own: dict[str, Any] = {"callbacks": [joining, steps], "optimizers": (optimizer, schedule)}
    trainer = Trainer(model=model, args=arguments, train_dataset=rows or Rows(), **own)
    before = get_last_checkpoint(str(folder / name)) if (folder / name).exists() else None
    taken = trainer.train(resume_from_checkpoint=before).global_step
    trainer.save_model(str(folder / "saved"))
    [adam_steps] = {int(state["step"]) for state in optimizer.state.values()}
    own_steps = taken if before is None else taken - int(before.rpartition("-")[2])
    more = {"adam_steps": adam_steps, "trainer_steps": taken, "steps_before": steps.before}
    return model, own_steps, {"rates": steps.rates, **more}


def failing(url: str, run: str, name: str, folder: Path) -> Trained:
    return transformers(url, run, name, folder, Failing())


def trl(url: str, run: str, name: str, folder: Path) -> Trained:
    """Train an adapter with TRL, of texts that its tokenizer reads; its base is saved, and the adapter as peft saves it."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from diloco.integrations.transformers import DilocoCallback

    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
    texts = [{"text": " ".join(f"w{word}" for word in row)} for row in itertools.islice(rows(1), 64)]
    base = llama()
    base.save_pretrained(folder / "base")
    lora = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    arguments = SFTConfig(str(folder / name), learning_rate=LEARNING_RATE, save_strategy="no", max_length=CONTEXT, **SHARED)
    trainer = SFTTrainer(
        model=base,
        args=arguments,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[DilocoCallback(url, run=run, name=name, tokens=TOKENS)],
    )
    taken = trainer.train().global_step
    trainer.save_model(str(folder / "adapter"))
    return trainer.model, taken, {}


def lightning(url: str, run: str, name: str, folder: Path) -> Trained:
    import lightning as package
    from lightning.pytorch.callbacks import ModelCheckpoint

    from diloco.integrations.lightning import DilocoLightningCallback

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = words()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), LEARNING_RATE)

    module = Module()
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_steps": 100_000, "accumulate_grad_batches": 2}
    given |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callback, begun = DilocoLightningCallback(url, run=run, name=name, tokens=TOKENS), list[int]()

    class Saved(ModelCheckpoint):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if not begun:
                begun.extend((callback.run.steps, trainer.global_step))
            super().on_train_batch_end(trainer, *arguments)
            if self.last_model_path:
                note_saved()

    saver = Saved(folder / name, every_n_train_steps=SAVE_STEPS, save_last=True)
    trainer = package.Trainer(callbacks=[callback, saver], default_root_dir=str(folder), **given)
    last = folder / name / "last.ckpt"
    batches = torch.utils.data.DataLoader(Batches(), batch_size=None)
    trainer.fit(module, batches, ckpt_path=last if last.exists() else None)
    before, at = begun
    return module, trainer.global_step - at, {"steps_before": before}


def accelerate(url: str, run: str, name: str, folder: Path) -> Trained:
    from accelerate import Accelerator

    from diloco.integrations import accelerate as joining

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = words()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), LEARNING_RATE))
    steps, saved = 0, folder / name
    joined = joining.join(accelerator, model, optimizer, url, run=run, name=name, tokens=TOKENS)
    accelerator.register_for_checkpointing(joined)
    if saved.exists():
        accelerator.load_state(saved)
    with joined:
        before = joined.steps
        for batch in Batches():
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                joined.note_loss(loss)
                steps += accelerator.sync_gradients
                optimizer.step()
                optimizer.zero_grad()
            if steps == SAVE_STEPS and not saved.exists():
                accelerator.save_state(saved)
                note_saved()
            if joined.over:
                break
    return net, steps, {"steps_before": before}


class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        stream = rows(1)
        while True:
            yield torch.stack(list(itertools.islice(stream, BATCH)))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch[:, :-1]).reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


KINDS = {"transformers": transformers, "failing": failing, "trl": trl, "lightning": lightning, "accelerate": accelerate}

if __name__ == "__main__":
    kind, url, run, name, out = sys.argv[1:6]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained, steps, more = KINDS[kind](url, run, name, Path(out).parent)
    values = {path.replace(".", "/"): value.detach().numpy().tolist() for path, value in trained.named_parameters()}
    Path(out).write_text(json.dumps({"steps": steps, "values": values, **more}))
