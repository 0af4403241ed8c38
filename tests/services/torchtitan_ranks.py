"""Training with torchtitan's model, parallelisms and optimizers on CPUs: ``torchtitan_ranks.py URL RUN NAME OUT``.

Each rank is started as torchrun does. torchtitan's trainer itself needs a GPU: a loop like its own stands in for it here. The
first rank writes to OUT what came of it, as JSON, and beside it all parameters as ``.npz``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import parallel_dims
from torchtitan.tools import utils

utils.device_type = parallel_dims.device_type = "cpu"  # a machine without a GPU counts as one with CUDA there

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import _debugmodel, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

from diloco.integrations.torchtitan import join  # noqa: E402

CONTEXT, BATCH, WORDS, LEARNING_RATE = 16, 4, 64, 3e-3


def model_config() -> Any:
    """Return torchtitan's smallest Llama, with a single layer, and attention that a CPU computes."""
    config = _debugmodel("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=CONTEXT)
    config.layers = config.layers[:1]
    set_llama3_sharding_config(config, enable_sp=False)
    return config


class CpuTrainer:
    """What torchtitan's trainer has, and its loop: it reads its checkpoint within ``train``, then asks whether to go on."""

    def __init__(self, world: int) -> None:
        parallelism, training = ParallelismConfig(), TrainingConfig(mixed_precision_param="float32")
        dims = parallel_dims.ParallelDims.from_config(parallelism, world)
        dims.build_mesh()
        dist_utils.set_spmd_backend(parallelism.spmd_backend)
        with torch.device("meta"):
            model = model_config().build()
        given: dict[str, Any] = {"parallel_dims": dims, "training": training, "parallelism": parallelism, "dump_folder": ""}
        model = parallelize_llama(model, compile_config=CompileConfig(enable=False), ac_config=None, **given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other one
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.model_parts = [model]
        groups = [
            ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": LEARNING_RATE}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": LEARNING_RATE}),
        ]
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.optimizers = OptimizersContainer(config, model_parts=self.model_parts)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=200).build(
            optimizers=self.optimizers, training_steps=10_000
        )
        self.step, self.rates = 0, list[float]()

    def train(self) -> None:
        # a checkpoint is read here
        while self.should_continue_training():
            self.step += 1
            self.optimizers.zero_grad()
            rng = np.random.default_rng((distributed.get_rank(), self.step))
            first = torch.from_numpy(rng.integers(WORDS, size=(BATCH, 1)))
            tokens = (first + 3 * torch.arange(CONTEXT + 1)) % WORDS
            predicted = self.model_parts[0](tokens[:, :-1], torch.arange(CONTEXT).expand(BATCH, CONTEXT))
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            self.rates.append(self.optimizers.optimizers[0].param_groups[0]["lr"])
            self.optimizers.step()
            self.lr_schedulers.step()

    def should_continue_training(self) -> bool:
        return self.step < 10_000


def main(url: str, run: str, name: str, out: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    world = distributed.get_world_size()
    torch.manual_seed(0)
    trainer: Any = CpuTrainer(world)
    with join(trainer, url, run=run, name=name, tokens=BATCH * CONTEXT * world) as joined:
        before = joined.run
        assert before is None, "it joins after the checkpoint has been read"
        trainer.lr_schedulers = LRSchedulersContainer(trainer.optimizers, joined.learning_rate_factor)
        trainer.train()
        steps = joined.run.steps
    whole: dict[str, Any] = {
        path.replace(".", "/"): (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy()
        for path, value in trainer.model_parts[0].named_parameters()
    }
    if distributed.get_rank() == 0:
        np.savez(out.with_suffix(".npz"), **whole)
        found = {"steps": trainer.step, "booked": steps, "optimizers": len(trainer.optimizers), "rates": trainer.rates}
        out.write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    url, run, name, out = sys.argv[1:]
    assert os.environ["WORLD_SIZE"]
    main(url, run, name, Path(out))
