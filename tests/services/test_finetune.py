"""Fine-tuning from a model's folder to a folder that transformers and peft read, by real processes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.fixtures import Diloco
from tests.made.founded_runs import found_run
from tests.made.tiny_models import libraries, write_chats, write_llama

from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco_learner import frameworks
from diloco_ops.broker.server import Server

torch, transformers = libraries()
peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
pytest.importorskip("grain", reason="grain is not installed: make extras")

# peft 0.21 asks for what transformers 5 calls otherwise
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
LM_EVAL = Path(__file__).parents[2] / ".venv-lm-eval/bin/lm_eval"  # its packages' versions are not those of the tests
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}  # of logits of a few units


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def settings_of(model: Path, **options: Any) -> RunSettings:
    small = {"task.context": 64, "task.batch": 4, "learners": 1, "shards": 1, "fragments.count": 3}
    named = {f"task.options.{name}": value for name, value in {"model": str(model), **options}.items()}
    return run_settings(overrides=small | named | {"task.name": "diloco_learner.causal_lm:make"})


async def founded(server: Server, path: Path, settings: RunSettings, data: str) -> Any:
    """Write the log of a run whose version 0 is a model after two steps. Return that model, a module."""
    from diloco_learner.pytorch.island import TorchIsland

    task = frameworks.load(settings.task, data, path).task
    island = TorchIsland(task, settings)
    batch = next(task.batches(0, 1, 0, 0))
    for _ in range(2):
        island.begin_step(batch, 0.01).wait()
    await found_run(server, path, settings, data, island)
    return island._module.eval()


def logits(model: Any, text: str, tokenizer: Any) -> Any:
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits.float().numpy()


@pytest.fixture
def server(tmp_path: Path) -> Any:
    begun = Server(tmp_path / "nats")
    begun.start()
    yield begun
    begun.stop()


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_gives_the_logits_of_an_exported_model_with_its_tokenizer(
    tied: bool, server: Server, tmp_path: Path, diloco: Diloco
) -> None:
    base, chats = write_llama(tmp_path / "base", tied=tied), write_chats(tmp_path)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    trained = asyncio.run(founded(server, tmp_path / "run", settings_of(base), str(chats)))
    chats.unlink()  # an export needs no data
    before = transformers.AutoModelForCausalLM.from_pretrained(base)
    for precision, tolerance in TOLERANCES.items():
        out = tmp_path / precision
        done = diloco("export", str(tmp_path / "run"), str(out), "--format", "hf", "--precision", precision)
        assert done.code == 0, done
        model, tokenizer = (
            kind.from_pretrained(out) for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
        )
        assert str(model.dtype) == f"torch.{precision}"
        theirs = logits(model, "What is two plus three?", tokenizer)
        ours = logits(trained, "What is two plus three?", tokenizer)
        np.testing.assert_allclose(theirs, ours, atol=tolerance)
        assert np.abs(ours - logits(before, "What is two plus three?", tokenizer)).max() > 5 * tolerance, "it has been trained"
        message = [{"role": "user", "content": "Which colour has snow?"}]
        assert "Which colour has snow?" in tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| trained | all weights |" in card
    assert str(tmp_path) not in card, "a path of this machine is nobody else's business"


def test_an_adapter_is_exported_for_peft_and_merged_into_its_base(server: Server, tmp_path: Path, diloco: Diloco) -> None:
    base, chats = write_llama(tmp_path / "base"), write_chats(tmp_path)
    trained = asyncio.run(founded(server, tmp_path / "run", settings_of(base, lora=4), str(chats)))
    run, question = str(tmp_path / "run"), "Which colour has grass?"

    done = diloco("export", run, str(tmp_path / "adapter"), "--format", "peft")
    assert done.code == 0, done
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    ours = logits(trained, question, tokenizer)
    np.testing.assert_allclose(logits(model, question, tokenizer), ours, atol=TOLERANCES["float32"])
    assert np.abs(ours - logits(transformers.AutoModelForCausalLM.from_pretrained(base), question, tokenizer)).max() > 1e-3
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4

    for precision, tolerance in TOLERANCES.items():
        out = tmp_path / precision
        done = diloco("export", run, str(out), "--format", "hf", "--precision", precision)
        assert done.code == 0, done
        whole = transformers.AutoModelForCausalLM.from_pretrained(out)
        np.testing.assert_allclose(logits(whole, question, tokenizer), ours, atol=tolerance)
        assert "adapter of rank 4, merged into the model" in (out / "README.md").read_text()
        assert not (tmp_path / f"{precision}.draft.adapter").exists()
    refused = diloco("export", run, str(tmp_path / "half"), "--format", "hf", "--precision", "float16")
    assert (refused.code, "a merged adapter is written as float32 or bfloat16" in refused.err) == (2, True)


def test_a_project_of_conversations_trains_at_once_and_its_adapter_has_a_known_base(
    tmp_path: Path, diloco: Diloco, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    assert diloco("init", str(project), "--template", "sft").code == 0
    monkeypatch.chdir(project)
    small = [
        "--set",
        "task.batch=4",
        "--set",
        "task.context=64",
        "--set",
        "fragments.count=3",
        "--task",
        "lora=4",
        "--learners",
        "1",
        "--shards",
        "1",
    ]
    done = diloco("up", "--tokens", "3000", *small, "--run-dir", "run", "--plain", "--page", "none")
    assert done.code == 0, done
    assert "memory: all processes here take about" in done.out
    report = json.loads((project / "run" / "report.json").read_text())
    base = transformers.AutoModelForCausalLM.from_pretrained(project / "model")
    assert report["val_loss_initial"] == pytest.approx(np.log(512), abs=0.3), "that of random weights"
    assert report["val_loss"] < report["val_loss_initial"]
    status = json.loads((project / "run" / "status.json").read_text())
    assert status["frozen"]["model"] == str(project / "model")
    assert status["frozen"]["values"] == base.num_parameters()
    shown = diloco("status", "run")
    assert status["frozen"]["hash"][:16] in shown.out

    refused = diloco("up", "--model", "./nowhere", "--data", "chats.jsonl", "--run-dir", "other")
    assert refused.code == 2
    assert "diloco: --model ./nowhere: there is no such folder\n" in refused.err
    assert not (project / "other").exists()


def test_first_validation_loss_is_the_checkpoints_own(tmp_path: Path, diloco: Diloco) -> None:
    base, chats = write_llama(tmp_path / "base"), write_chats(tmp_path)
    settings = settings_of(base)
    task = frameworks.load(settings.task, str(chats), tmp_path).task
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    total = tokens = 0.0
    for batch in task.validation()["chats"]:
        with torch.no_grad():
            loss, aux = task.loss(model, batch)
        total, tokens = total + float(loss) * float(aux.tokens), tokens + float(aux.tokens)
    done = diloco(
        "up", "--model", str(base), "--data", str(chats), "--learners", "1", "--shards", "1", "--tokens", "1000", "--plain",
        "--page", "none", "--run-dir", str(tmp_path / "run"), "--set", "task.context=64", "--set", "task.batch=4",
        "--set", "fragments.count=3",
    )  # fmt: skip
    assert done.code == 0, done
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["val_loss_initial"] == pytest.approx(total / tokens, abs=1e-3)


def test_tasks_of_lm_eval_evaluate_the_model_in_a_process_of_its_own(
    tmp_path: Path, diloco: Diloco, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LM_EVAL.exists():
        pytest.skip("lm_eval is not installed: make test-extras")
    monkeypatch.setenv("PATH", os.pathsep.join((os.environ["PATH"], str(LM_EVAL.parent))))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    base, chats, tasks = write_llama(tmp_path / "base"), write_chats(tmp_path), tmp_path / "tasks"
    tasks.mkdir()
    questions = [{"question": f"Which colour has {thing}?", "answer": index} for index, thing in enumerate(("snow", "coal"))]
    (tasks / "colours.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tasks / "colours.yaml").write_text(
        f"task: colours\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tasks / 'colours.jsonl'}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: ['Snow is white.', 'Coal is black.']\ndoc_to_target: '{{answer}}'\nmetric_list:\n  - metric: acc\n"
    )
    done = diloco(
        "up", "--model", str(base), "--data", str(chats), "--learners", "1", "--shards", "1", "--tokens", "1000", "--plain",
        "--page", "none", "--run-dir", str(tmp_path / "run"), "--set", "task.context=64", "--set", "task.batch=4",
        "--set", "fragments.count=3", "--eval", "lm_eval:colours", "--eval-args", f"--include_path {tasks}",
    )  # fmt: skip
    assert done.code == 0, done
    newest = json.loads((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert newest["tokens"] >= 1000 * 0.9, "the last evaluation is of the last model"
    assert 0 <= newest["results"]["colours"]["acc"] <= 1
    assert "lm_eval after" in done.out
