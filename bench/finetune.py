"""Fine-tuning by learners of a run against one process, on the same learned tokens: held-out loss per assistant token.

    python bench/finetune.py                               # 2 learners, 3 paired seeds; about an hour on two cores
    python bench/finetune.py --seeds 1 --tokens 40000 --pretraining 200 --json

A small Llama is first trained on this project's documentation, as text. Then for each seed a run of ``diloco up`` fine-tunes it
on questions about Python's library, and one process does, with the same model, data, optimizer and schedule. The process's
step has as many rows as a step of all learners together, so both take as many steps and learn about as many tokens. Both are
evaluated on the same held-out conversations. ``ratio`` is the run's loss over the process's.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from harness.console import Bench, Keep, Result, Script, folder, say
from harness.host import machine
from harness.intervals import ratio
from harness.live_run import DILOCO

from diloco.core.learner.schedule import scheduled_rate
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings

ROOT = Path(__file__).parents[1]
TASK = "diloco_learner.causal_lm:make"
WITHIN = 0.01  # of the process's loss
VOCABULARY = 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONTEXT = 128
SHAPE = {"task.context": CONTEXT, "fragments.count": 6, "round.steps": 12, "round.overlap_steps": 4, "inner.optimizer": "adamw"}


def island_of(settings: RunSettings, data: Path) -> Any:
    """Return a model of PyTorch with its task, as a learner has it."""
    from diloco_learner import frameworks
    from diloco_learner.pytorch.island import TorchIsland

    return TorchIsland(frameworks.load(settings.task, str(data), ROOT).task, settings)


def settings_of(model: Path, rows: int, **more: Any) -> RunSettings:
    """Return the settings of a run of this model whose steps have so many rows."""
    return run_settings(overrides={**SHAPE, "task.name": TASK, "task.options.model": str(model), "task.batch": rows, **more})


def train(island: Any, settings: RunSettings, enough: Callable[[int, int], bool]) -> None:
    """Step on the only share until ``enough(steps, tokens)``, at the rates of the run's schedule."""
    batches, steps, tokens = island.task.batches(0, 1, settings.seed, 0), 0, 0
    while not enough(steps, tokens):
        output = island.begin_step(next(batches), scheduled_rate(settings.inner, tokens, settings.tokens), (0, steps))
        output.wait()
        steps, tokens = steps + 1, tokens + (output.tokens() or 0)


def pretrained(place: Path, steps: int) -> Path:
    """Make a small Llama that has been trained on the documentation; return its folder."""
    import torch
    import transformers

    from diloco_learner import frameworks
    from diloco_learner.chats import tiny
    from diloco_learner.pytorch.island import TorchIsland

    fresh, model = place / "fresh", place / "model"
    for each in (fresh, model):
        tiny.write_tokenizer(each, VOCABULARY)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, **SIZES
    )
    transformers.LlamaForCausalLM(config).save_pretrained(fresh)
    rows = 8
    settings = settings_of(fresh, rows, **{"inner.learning_rate": 3e-3, "tokens": steps * rows * CONTEXT})
    text = place / "documentation.txt"
    text.write_text(
        "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))), encoding="utf-8"
    )
    task = frameworks.load(settings.task, str(text), ROOT).task
    module = task.module()
    task.module = lambda: module  # which the island trains in place
    train(TorchIsland(task, settings), settings, lambda taken, _: taken >= steps)
    module.save_pretrained(model)
    return model


def write_questions(file: Path) -> None:
    """Write a conversation about each function and class of Python's library: its name, and the first line of its docstring.

    Such answers cannot be learned by heart in a short run, so losses stay far from zero, where a ratio means something.
    """
    with file.open("w", encoding="utf-8") as out:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    question = {"role": "user", "content": f"What is {path.stem}.{node.name}?"}
                    answer = {"role": "assistant", "content": text.partition("\n")[0]}
                    out.write(json.dumps({"messages": [question, answer]}) + "\n")


def alone(settings: RunSettings, chats: Path) -> float:
    """Train one process on the settings' token budget, and return its held-out loss."""
    island = island_of(settings, chats)
    train(island, settings, lambda _, tokens: tokens >= settings.tokens)
    loss: float = island.evaluation().loss
    return loss


def together(settings: RunSettings, chats: Path, directory: Path) -> float:
    """Return the held-out loss of a run of ``diloco up`` with these settings."""
    given = {**SHAPE, "task.name": TASK, "task.batch": settings.task.batch, "inner.learning_rate": settings.inner.learning_rate}
    sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    command = [
        *DILOCO, "up", "--run-dir", str(directory), "--data", str(chats), "--learners", str(settings.learners), "--tokens",
        str(settings.tokens), "--seed", str(settings.seed), "--json", *sets, "--task",
        f"model={settings.task.options['model']}",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if ended.returncode:
        sys.exit(f"{directory}: {ended.stderr.strip()}")
    loss: float = json.loads(ended.stdout.splitlines()[-1])["val_loss"]
    return loss


def compare(
    *,
    seeds: Annotated[int, "paired seeds: 1, 2, 3 or another number of harness/intervals.py"] = 3,
    learners: int = 2,
    tokens: Annotated[int, "learned tokens of each side"] = 200_000,
    pretraining: Annotated[int, "steps on text, of 1,024 tokens"] = 1500,
    rate: Annotated[float, "learning rate of both sides"] = 1e-3,
    keep: Keep = None,
) -> Result:
    """Fine-tune by learners and by one process, and compare their losses."""
    with folder(keep) as place:
        model, chats, rows = pretrained(place, pretraining), place / "chats.jsonl", 4
        write_questions(chats)
        before = island_of(settings_of(model, rows), chats).evaluation().loss
        ones, others = list[float](), list[float]()
        for seed in range(seeds):
            own = {"seed": seed, "tokens": tokens, "inner.learning_rate": rate}
            ones.append(together(settings_of(model, rows, learners=learners, **own), chats, place / f"run-{seed}"))
            others.append(alone(settings_of(model, rows * learners, learners=1, shards=1, **own), chats))
            say(f"seed {seed}: {learners} learners {ones[-1]:.4f}, one process {others[-1]:.4f} nats per token")
        found = ratio(ones, others)
    return {
        "machine": machine(), "before": before, "learners": ones, "process": others, **found,
        "passed": found["ratio"] <= 1 + WITHIN,
    }  # fmt: skip


def show(result: Result) -> None:
    """Print the losses of each pair, and their ratio."""
    print(f"{result['machine']}\nheld-out loss before fine-tuning: {result['before']:.4f} nats per assistant token")
    for seed, (one, other) in enumerate(zip(result["learners"], result["process"], strict=True)):
        print(f"seed {seed}: learners {one:.4f}, one process {other:.4f}, ratio {one / other:.4f}")
    between = f" ({result['low']:.4f} to {result['high']:.4f})" if "low" in result else ""
    print(f"ratio {result['ratio']:.4f}{between}: {'within' if result['passed'] else 'above'} {WITHIN:.0%} of one process")


SCRIPT = Script(__doc__, Bench(compare, show))

if __name__ == "__main__":
    SCRIPT.run()
