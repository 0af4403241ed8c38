"""The built-in task for causal language models of transformers: its data, its loss, adapters, and what it refuses."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.made.tiny_models import VOCABULARY, libraries, write_chats, write_llama

from diloco.errors import AdmissionError, DataError, SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import RunSettings
from diloco.storage.model_folder import check_data, open_model
from diloco_learner import frameworks
from diloco_learner.api.options import filled
from diloco_learner.causal_lm import CausalLmOptions

torch, transformers = libraries()
peft = pytest.importorskip("peft", reason="peft is not installed: make torch")
pytest.importorskip("grain", reason="grain is not installed: make extras")

# peft 0.21 asks for what transformers 5 calls otherwise
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
RANK = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_chats(tmp_path_factory.mktemp("chats")))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def settings_of(model: Path | str, **options: Any) -> RunSettings:
    given = {"model": str(model), **options}
    small = {"task.context": 96, "task.batch": 4, "learners": 1, "shards": 1, "fragments.count": 3}
    named = {f"task.options.{name}": value for name, value in given.items()}
    return run_settings(overrides=small | named | {"task.name": "diloco_learner.causal_lm:make"})


def task_of(settings: RunSettings, data: str | None) -> Any:
    return frameworks.load(settings.task, data, Path("unused")).task


def island_of(settings: RunSettings, data: str) -> Any:
    from diloco_learner.pytorch.island import TorchIsland

    return TorchIsland(task_of(settings, data), settings)


def alone(module: Any, batch: Mapping[str, Any]) -> tuple[float, int]:
    """Return the sum of losses of a batch's documents, each by itself as transformers computes it, and the tokens learned."""
    total, count = 0.0, 0
    for row in range(len(batch["input_ids"])):
        for document in range(1, batch["documents"][row].max() + 1):
            inside = batch["documents"][row] == document
            tokens, labels = (
                torch.tensor(batch[name][row][inside], dtype=torch.long)[None] for name in ("input_ids", "labels")
            )
            learned = int((labels[0, 1:] != -100).sum())
            if learned:
                with torch.no_grad():
                    total += module(tokens, labels=labels).loss.item() * learned
            count += learned
    return total, count


def test_the_loss_of_packed_conversations_is_that_of_each_alone(llama: Path, chats: str) -> None:
    task = task_of(settings_of(llama), chats)
    module = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    batch = next(task.batches(0, 1, 0, 0))
    assert batch["documents"].max() > 1, "several conversations share a row"
    total, count = alone(module, batch)
    assert 0 < count < batch["input_ids"].size, "only the assistant's tokens are learned"
    with torch.no_grad():
        loss, _ = task.loss(module, batch)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def test_rows_that_are_computed_one_after_another_are_one_step(llama: Path, chats: str) -> None:
    whole, parts = (island_of(settings_of(llama, micro_batch=rows), chats) for rows in (0, 1))
    batch = next(whole.task.batches(0, 1, 0, 0))
    losses = [island.begin_step(batch, 1e-3).wait() for island in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for fragment in whole.fragments().fragments:
        one, other = (island.read(fragment).to_host() for island in (whole, parts))
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_text_is_learned_whole_and_validated_as_the_checkpoint_itself(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number * 7} are numbers.\n" for number in range(3000)))
    settings = settings_of(llama)
    island = island_of(settings, str(text))
    module = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    batch = next(island.task.batches(0, 1, 0, 0))
    assert batch["input_ids"].shape == (settings.task.batch, settings.task.context)
    assert (batch["labels"] == batch["input_ids"]).all()
    with torch.no_grad():
        losses = [
            module(tokens := torch.tensor(batch["input_ids"], dtype=torch.long), labels=tokens).loss.item()
            for batch in island.task.validation()["text"]
        ]
    assert island.evaluation().loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert task_of(settings, str(text)).mix.settings.vocabulary <= VOCABULARY


def test_an_adapter_trains_itself_alone_and_its_base_is_known_by_its_hash(llama: Path, chats: str, tmp_path: Path) -> None:
    island = island_of(settings_of(llama, lora=RANK, lora_targets=["q_proj", "v_proj"]), chats)
    layers = 2 * (RANK * (32 + 32) + RANK * (32 + 16))  # of each layer q_proj (32, 32) and v_proj (16, 32)
    assert sum(spec.size for spec in island.specs()) == layers
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    assert sum(np.prod(fixed.shape) for fixed in island.fragments().fixed) == base.num_parameters()
    batch = next(island.task.batches(0, 1, 0, 0))
    island.check(batch)
    before = [island.read(fragment).to_host().copy() for fragment in island.fragments().fragments]
    assert np.isfinite(island.begin_step(batch, 1e-2).wait())
    after = [island.read(fragment).to_host() for fragment in island.fragments().fragments]
    assert any(not np.array_equal(one, other) for one, other in zip(before, after, strict=True))

    same = island_of(
        settings_of(shutil.copytree(llama, tmp_path / "same"), lora=RANK, lora_targets=["q_proj", "v_proj"]), chats
    )
    other = island_of(settings_of(write_llama(tmp_path / "other", seed=1), lora=RANK, lora_targets=["q_proj", "v_proj"]), chats)
    digest = island.fragments().fixed_digest
    assert same.fragments().fixed_digest == digest != other.fragments().fixed_digest


def test_the_adapters_configuration_is_that_of_peft(llama: Path) -> None:
    task = task_of(settings_of(llama, lora=RANK, lora_targets=["q_proj"], lora_alpha=16.0), None)
    config = task.adapter_config()
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 16)
    assert config["target_modules"] == ["q_proj"]
    assert config["base_model_name_or_path"] == str(llama)
    assert task_of(settings_of(llama), None).adapter_config() is None


def test_files_of_the_tokenizer_go_with_the_model(llama: Path) -> None:
    task = task_of(settings_of(llama), None)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= task.files().keys()
    assert task.names()["model/layers/0/self_attn/q_proj/weight"] == "model.layers.0.self_attn.q_proj.weight"
    assert task.config()["model_type"] == "llama"


def test_samples_answer_the_prompts_of_the_run(llama: Path, chats: str) -> None:
    island = island_of(settings_of(llama, prompts=["What is one plus one?", "Which colour has snow?"]), chats)
    assert island.task.prompt == "What is one plus one?"
    text = island.sample(0, 5)
    assert text.startswith("\n")
    assert text.count("Which colour has snow?") == 1
    assert island.sample(0, 5, "Which colour has coal?").startswith("\n")


def test_bfloat16_weights_have_masters(llama: Path, chats: str) -> None:
    island = island_of(settings_of(llama, dtype="bfloat16"), chats)
    assert "model/layers/0/self_attn/q_proj/weight" in island.rounded_tensors()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "4bit"}, "dtype = 4bit: a base of 4 bits is frozen, so an adapter has to be trained on it"),
        ({"lora": -1}, "lora = -1: expected the rank of the adapter, or 0"),
        ({"lora": 4, "lora_targets": ["all-linear", "q_proj"]}, "expected names of layers, or all-linear alone"),
        ({"lora": 4, "lora_dropout": 1.0}, "lora_dropout = 1.0: expected 0 or more, and less than 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        filled(CausalLmOptions, {"model": "somewhere"} | options)


def test_layers_that_the_model_does_not_have_are_refused_by_name(llama: Path, chats: str) -> None:
    with pytest.raises(SettingsError, match=r"--lora targets=nothing: Target modules .*nothing.* not found"):
        task_of(settings_of(llama, lora=RANK, lora_targets=["nothing"]), chats).module()


def test_another_tokenizer_or_template_is_refused(llama: Path, tmp_path: Path) -> None:
    digest = open_model(str(llama)).tokenizer_digest()
    task_of(settings_of(llama, tokenizer=digest), None)
    other = shutil.copytree(llama, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(AdmissionError, match="its tokenizer or chat template is not the run's"):
        task_of(settings_of(other, tokenizer=digest), None)
    padded = shutil.copytree(llama, tmp_path / "padded")
    said = json.loads((padded / "tokenizer.json").read_text()) | {"truncation": {"max_length": 3}}
    (padded / "tokenizer.json").write_text(json.dumps(said))
    assert open_model(str(padded)).tokenizer_digest() == digest, "truncation is no part of what tokens a text has"


def test_a_learner_may_have_the_model_in_another_place(llama: Path) -> None:
    from diloco.settings.service import TorchLearnerSettings
    from diloco_learner.pytorch.beginning import own_task

    run = settings_of("/where/the/run/was/begun", lora=RANK).task
    own = own_task(TorchLearnerSettings(name="ann", model=str(llama)), run)
    assert (own.options["model"], own.options["lora"], own.name) == (str(llama), RANK, run.name)
    assert own_task(TorchLearnerSettings(name="ann"), run) == run


def test_code_of_a_repository_runs_only_where_this_machine_allows_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shutil.copytree(llama, tmp_path / "own")
    ran = tmp_path / "ran"
    config = json.loads((own / "config.json").read_text()) | {
        "model_type": "made_up", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    }  # fmt: skip
    (own / "config.json").write_text(json.dumps(config))
    (own / "code.py").write_text(
        f"import pathlib, transformers\npathlib.Path({str(ran)!r}).touch()\n"
        "class Config(transformers.LlamaConfig):\n    model_type = 'made_up'\n"
        "class Model(transformers.LlamaForCausalLM):\n    config_class = Config\n"
    )
    with pytest.raises(SettingsError, match=f"--model {own}: needs Python code of its own repository"):
        task_of(settings_of(own), None).module()
    assert not ran.exists()
    monkeypatch.setenv("DILOCO_ALLOW_CODE", "another/model")
    with pytest.raises(SettingsError, match="allow it with --allow-code"):
        task_of(settings_of(own), None).module()
    assert not ran.exists()
    monkeypatch.setenv("DILOCO_ALLOW_CODE", str(own))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert task_of(settings_of(own), None).module() is not None
    assert ran.exists()


def test_a_model_whose_layers_carry_a_document_into_the_next_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "mamba")
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1)
    transformers.MambaForCausalLM(config).save_pretrained(folder)
    with pytest.raises(SettingsError, match="conversations that are packed into one row would see each other in this model"):
        task_of(settings_of(folder), None).module()


def test_a_base_of_four_bits_needs_a_gpu(llama: Path) -> None:
    from diloco_learner.causal_lm import modeling

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingsError, match="--qlora: a base of 4 bits needs a GPU, and PyTorch finds none here"):
        modeling.load(open_model(str(llama)), CausalLmOptions(str(llama), lora=RANK, dtype="4bit"))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("config.json", "config.json: cannot be read"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "model.safetensors does not exist: weights are read from safetensors files"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_by_it(llama: Path, tmp_path: Path, broken: str, said: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "folder")
    (folder / broken).unlink()
    found = open_model(str(folder))
    with pytest.raises(SettingsError, match=said):
        (found.config, found.tokenizer_digest(), found.stored())


def test_a_name_that_is_no_folder_and_not_in_the_cache_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"--model \./nothing: there is no such folder"):
        open_model("./nothing")
    with pytest.raises(
        SettingsError, match="--model somebody/something: is no folder here, is not in the hub's cache"
    ) as caught:
        open_model("somebody/something")
    assert "\n" not in str(caught.value)


class _Hub(BaseHTTPRequestHandler):
    """A hub without anything that this account may read: a gated repository, and no other one."""

    def do_GET(self) -> None:
        gated = "/models/owner/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/gated", "is gated: accept its terms on its page, and set HF_TOKEN"),
        ("owner/missing", "is neither a folder here nor a repository that this account may read"),
    ],
)
def test_a_gated_or_missing_repository_is_refused_in_one_line(hub: None, name: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"--model {name}: {said}") as caught:
        open_model(name)
    assert "\n" not in str(caught.value)


def test_rows_longer_than_the_model_was_made_for_are_refused(llama: Path) -> None:
    settings = settings_of(llama)
    longer = settings.model_copy(update={"task": settings.task.model_copy(update={"context": 512})})
    with pytest.raises(SettingsError, match=r"task.context = 512: the model .* was made for at most 256 tokens"):
        task_of(longer, None)


def test_data_has_to_be_named(llama: Path) -> None:
    with pytest.raises(DataError, match="needs --data, a file of conversations"):
        _ = task_of(settings_of(llama), None).data


def test_data_that_is_not_there_is_said_before_anything_is_loaded(llama: Path, tmp_path: Path) -> None:
    missing = tmp_path / "chats.jsonl"
    with pytest.raises(DataError, match=f"--data {missing}: there is no such file or folder"):
        check_data(str(llama), str(missing))
    missing.write_text("")
    assert check_data(str(llama), str(missing)) == str(missing)
    assert check_data(str(llama), "s3://bucket/chats") == "s3://bucket/chats", "its reader looks for it"
