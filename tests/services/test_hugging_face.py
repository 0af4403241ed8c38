"""Weights to and from ``transformers``, which reads and writes the files itself: the same logits, and the same loss."""

from __future__ import annotations

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.made.fixtures import Diloco
from tests.made.founded_runs import found_run
from tests.made.tiny_models import libraries

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner.check import PlannedRun, check
from diloco_learner.jax.island import Island
from diloco_learner.run import weights
from diloco_learner.task import load_task
from diloco_ops.broker.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"task.context": 32, "task.batch": 2, "fragments.count": 5, "learners": 1, "shards": 1, "task.name": "llama:make"}
SMALL |= {f"task.options.{key}": value for key, value in {"width": 48, "hidden": 80, "heads": 6, "key_heads": 3}.items()}
TOLERANCE = 2e-5  # of logits of a few units: float32 sums in another order


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Data of a few batches: torch takes its time for each."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(300)))
    return str(file)


def island_of(settings: RunSettings, text: str) -> Island:
    return Island(load_task(settings.task, text), settings)


async def founded(server: Server, path: Path, settings: RunSettings, text: str) -> Island:
    """Write the log of a run as its founder does: version 0 of what the task makes. Return the founder's model."""
    island = island_of(settings, text)
    await found_run(server, path, settings, text, island)
    return island


def loss_by_torch(torch: Any, model: Any, batches: Any) -> float:
    """The mean over batches of transformers' own loss, which shifts the labels itself."""
    with torch.no_grad():
        tokens = [torch.tensor(np.asarray(batch), dtype=torch.long) for batch in batches]
        return float(np.mean([model(batch, labels=batch).loss.item() for batch in tokens]))


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_the_logits_of_an_exported_llama(tied: bool, text: str, tmp_path: Path, diloco: Diloco) -> None:
    torch, transformers = libraries()
    settings = run_settings(overrides=SMALL | {"task.options.tied": tied})
    server = Server(tmp_path / "nats")
    server.start()
    try:
        island = asyncio.run(founded(server, tmp_path / "run", settings, text))
        exported = diloco("export", str(tmp_path / "run"), str(tmp_path / "hf"), "--format", "hf", "--shard-bytes", "50000")
        assert exported.code == 0, exported
    finally:
        server.stop()
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    llama = importlib.import_module("llama")
    batch = next(island.task.batches(0, 1, 0, 0))[:, :-1]
    ours = np.asarray(llama.logits(island.params(), batch, island.task.options))  # type: ignore[attr-defined]
    with torch.no_grad():
        theirs = model(torch.tensor(np.asarray(batch), dtype=torch.long)).logits.numpy()
    assert ours.std() > 0.01
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    assert island.evaluate() == pytest.approx(loss_by_torch(torch, model, island.task.validation()), abs=1e-5)  # type: ignore[attr-defined]


def test_a_run_begins_with_weights_that_transformers_wrote(text: str, tmp_path: Path) -> None:
    torch, transformers = libraries()
    settings = run_settings(overrides=SMALL)
    island = island_of(settings, text)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**island.task.config()))  # type: ignore[attr-defined]
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    check(PlannedRun(settings, text, init=str(tmp_path / "theirs")))
    weights.put(tmp_path / "theirs", island, island.fragments())
    theirs = loss_by_torch(torch, model, island.task.validation())  # type: ignore[attr-defined]
    assert island.evaluate() == pytest.approx(theirs, abs=1e-5)
    other = island_of(run_settings(overrides=SMALL | {"task.options.hidden": 96}), text)
    with pytest.raises(SettingsError, match=r"model.layers.0.mlp.*_proj.weight' has the shape .*, the model's has"):
        weights.put(tmp_path / "theirs", other, other.fragments())


def test_a_folder_needs_a_configuration_and_is_new(text: str, tmp_path: Path, diloco: Diloco) -> None:
    general = {key: value for key, value in SMALL.items() if not key.startswith("task.options")}
    settings = run_settings(overrides=general | {"task.name": "own_model:make"})
    server = Server(tmp_path / "nats")
    server.start()
    try:
        island = asyncio.run(founded(server, tmp_path / "run", settings, text))
        run, out = str(tmp_path / "run"), tmp_path / "hf"
        refused = diloco("export", run, str(out), "--format", "hf")
        assert (refused.code, out.exists()) == (2, False)
        assert "task.name = 'own_model:make': has no config() for Hugging Face's libraries" in refused.err
        refused = diloco("export", run, str(out), "--shard-bytes", "7")
        assert (refused.code, "--shard-bytes 7: is for --format hf" in refused.err) == (2, True)
        (tmp_path / "config.json").write_text('{"model_type": "mine"}')
        (tmp_path / "names.json").write_text('{"head": {"transposed": "lm_head.kernel"}}')
        options = ["--config", str(tmp_path / "config.json"), "--names", str(tmp_path / "names.json")]
        written = diloco("export", run, str(out), "--format", "hf", *options)
        assert written.code == 0, written
        refused = diloco("export", run, str(out), "--format", "hf", *options)
        assert (refused.code, "exists, and is not an empty folder; name a new one" in refused.err) == (2, True)
    finally:
        server.stop()
    assert json.loads((out / "config.json").read_text()) == {"model_type": "mine"}
    read = load_file(out / "model.safetensors")
    assert read.keys() == {"embedding", "recurrent", "lm_head.kernel"}
    assert np.array_equal(read["lm_head.kernel"].T, island.params()["head"])


@pytest.mark.parametrize(
    ("tied", "said"),
    [
        (True, "tie_word_embeddings is false, but the model has no head beside its embedding 'model.embed_tokens.weight'"),
        (False, "tie_word_embeddings is true, but the model's head 'lm_head.weight' is trained by itself"),
    ],
)
def test_a_configuration_by_which_another_head_is_read_is_refused(
    tied: bool, said: str, text: str, tmp_path: Path, diloco: Diloco
) -> None:
    server = Server(tmp_path / "nats")
    server.start()
    try:
        settings = run_settings(overrides=SMALL | {"task.options.tied": tied})
        island = asyncio.run(founded(server, tmp_path / "run", settings, text))
        config = island.task.config()  # type: ignore[attr-defined]
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": not tied}))
        run, out = str(tmp_path / "run"), tmp_path / "hf"
        refused = diloco("export", run, str(out), "--format", "hf", "--config", str(tmp_path / "config.json"))
        assert (refused.code, out.exists(), f"--config {tmp_path / 'config.json'}: {said}" in refused.err) == (2, False, True)
        assert diloco("export", run, str(out), "--format", "hf").code == 0
    finally:
        server.stop()
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == (not tied)
