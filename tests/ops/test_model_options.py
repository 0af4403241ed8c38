"""``--model`` and its companions: the settings that they give, memory, projects, and what people start elsewhere."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from diloco.errors import SettingsError
from diloco.settings.presets import run_settings
from diloco.settings.run import TaskSettings
from diloco.storage.model_folder import ALLOW_CODE, open_model
from diloco_ops.finetune import memory_need, model_options
from diloco_ops.finetune.elsewhere import learner_text, model_of
from diloco_ops.finetune.model_options import TASK, ModelRequest
from diloco_ops.up.project import settings_here

WIDTH, WORDS = 4, 10
NEGATIVE = b'{"a":{"dtype":"F32","shape":[-5,4],"data_offsets":[0,0]}}'  # the head of a safetensors file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a model: an embedding and one layer of two matrices and a vector."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 300, "vocab_size": WORDS}))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    shapes = {
        "model.embed_tokens.weight": (WORDS, WIDTH), "model.layers.0.self_attn.q_proj.weight": (WIDTH, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (3 * WIDTH, WIDTH), "model.norm.weight": (WIDTH,),
    }  # fmt: skip
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path / "model.safetensors")
    return path


def test_a_model_gives_the_settings_of_its_task(folder: Path) -> None:
    assert model_options.choose(ModelRequest(None)) is None
    chosen = model_options.choose(ModelRequest(str(folder)))
    assert chosen is not None
    assert chosen.settings["task.name"] == TASK
    assert chosen.settings["task.context"] == 300, "no longer than the model was made for"
    assert chosen.settings["task.options.model"] == str(folder)
    assert chosen.settings["task.options.tokenizer"] == open_model(str(folder)).tokenizer_digest()
    settings = run_settings(overrides=chosen.settings)
    assert (settings.inner.optimizer, settings.inner.learning_rate) == ("adamw", 2e-5)
    assert "lora" not in settings.task.options


def test_an_adapter_gives_its_own(folder: Path) -> None:
    chosen = model_options.choose(ModelRequest(str(folder), lora="rank=8,targets=q_proj+up_proj,alpha=4,dropout=0.1"))
    assert chosen is not None
    options = run_settings(overrides=chosen.settings).task.options
    own = {name: value for name, value in options.items() if name.startswith("lora")}
    assert own == {"lora": 8, "lora_targets": ["q_proj", "up_proj"], "lora_alpha": 4.0, "lora_dropout": 0.1}
    assert chosen.settings["inner.learning_rate"] == 2e-4
    quantised = model_options.choose(ModelRequest(str(folder), qlora="rank=8"))
    assert quantised is not None
    assert quantised.settings["task.options.dtype"] == "4bit"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lora": "rank=8"}, "--lora rank=8: needs --model PATH-OR-NAME"),
        ({"model": "MODEL", "lora": "rank=8", "qlora": "rank=8"}, "--lora rank=8, --qlora rank=8: leave one of them out"),
        ({"model": "MODEL", "lora": "rnk=8"}, "'rnk=8' is none of rank, targets, alpha, dropout (did you mean 'rank'?)"),
        ({"model": "MODEL", "lora": "rank=4,alpha=nan"}, "--lora rank=4,alpha=nan: alpha = 'nan' is no number"),
        ({"model": "MODEL", "lora": "rank=4,alpha=inf"}, "--lora rank=4,alpha=inf: alpha = 'inf' is no number"),
        ({"model": "MODEL", "lora": "rank=many"}, "--lora rank=many: rank = 'many' is no number"),
        ({"model": "MODEL", "qlora": "targets=q_proj"}, "--qlora targets=q_proj: needs a rank of at least 1"),
        ({"model": "MODEL", "allow_code": "other"}, "--allow-code other: does not name the model of --model"),
        ({"model": "MODEL/config.json"}, "config.json: is a file; name the folder with its config.json"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(folder: Path, asked: dict[str, str], said: str) -> None:
    given = {name: value.replace("MODEL", str(folder)) for name, value in asked.items()}
    with pytest.raises(SettingsError) as caught:
        model_options.choose(ModelRequest(**{"model": None, **given}))
    assert said in str(caught.value)


def test_code_is_allowed_however_the_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for named, allowed in ((folder.name, f"./{folder.name}"), (f"{folder.name}/", str(folder))):
        monkeypatch.setenv(ALLOW_CODE, "")
        chosen = model_options.choose(ModelRequest(named, allow_code=allowed))
        assert chosen is not None
        assert os.environ[ALLOW_CODE] == chosen.settings["task.options.model"] == str(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": ["x"]}}', "has no weight_map from tensors to files"),
        ("model.safetensors", len(NEGATIVE).to_bytes(8, "little") + NEGATIVE, "tensor 'a' would have the shape [-5, 4]"),
    ],
)
def test_damaged_files_are_said_in_one_line(folder: Path, file: str, content: bytes, said: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(SettingsError, match=re.escape(said)) as caught:
        _ = model_options.choose(ModelRequest(str(folder))), open_model(str(folder)).stored()
    assert "\n" not in str(caught.value)


def test_a_file_of_weights_that_was_cut_short_is_refused_at_once(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    said = f"it has {len(whole) - 9} bytes, and its header states {len(whole)}: copy it here again"
    with pytest.raises(SettingsError, match=said):
        open_model(str(folder)).stored()


def test_memory_is_estimated_from_the_heads_of_the_files(folder: Path) -> None:
    values = WORDS * WIDTH + WIDTH * WIDTH + 3 * WIDTH * WIDTH + WIDTH  # 108
    need = memory_need.estimate(open_model(str(folder)), {}, learners=2)
    assert (need.trained, need.base_bytes, need.step_bytes, need.host_bytes) == (values, 0, 16 * values, int(14.7 * values))
    assert need.machine_bytes == 2 * (need.step_bytes + need.host_bytes) + 28 * values
    adapter = memory_need.estimate(open_model(str(folder)), {"lora": 2, "lora_targets": ["q_proj"]}, learners=1)
    assert adapter.trained == 2 * (WIDTH + WIDTH), "two matrices of rank 2 beside q_proj"
    assert adapter.base_bytes == 4 * values
    every = memory_need.estimate(open_model(str(folder)), {"lora": 2}, learners=1)
    assert every.trained == 2 * (WIDTH + WIDTH) + 2 * (3 * WIDTH + WIDTH), "beside all matrices but the embedding"
    assert memory_need.estimate(open_model(str(folder)), {"lora": 2, "dtype": "bfloat16"}, learners=1).base_bytes == 2 * values


def test_too_little_memory_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_need, "available_bytes", lambda: 1000)
    need = memory_need.estimate(open_model(str(folder)), {}, learners=2)
    lines = memory_need.memory_lines(need, {"JAX_PLATFORMS": "cpu"})
    assert lines[-1].startswith("warning: that is more than this machine has free: train an adapter (--lora)")
    monkeypatch.setattr(memory_need, "available_bytes", lambda: 10**12)
    assert len(memory_need.memory_lines(need, {"JAX_PLATFORMS": "cpu"})) == 2


def test_gpus_are_shared_where_they_are_fewer_than_learners(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = memory_need.estimate(open_model(str(folder)), {}, learners=4)  # 108 values of 16 bytes each
    monkeypatch.setattr(memory_need, "gpu_bytes", lambda: 3000)
    lines = memory_need.memory_lines(need, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert lines[1] == "memory: a GPU needs 3.46 kB of 3.00 kB for 2 learners, and room for activations"
    assert lines[2].startswith("warning: that is more than a GPU has")
    monkeypatch.setattr(memory_need, "gpu_bytes", lambda: None)
    alone = memory_need.memory_lines(need, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert alone[1:] == ["memory: a GPU needs 1.73 kB, and room for activations"]


def test_a_project_is_trained_where_its_folder_is_the_current_one(tmp_path: Path) -> None:
    given: dict[str, Any] = {"seed": 3}
    assert settings_here(given, tmp_path) == given
    (tmp_path / "task.py").write_text("")
    assert settings_here(given, tmp_path) == given, "without settings it is no project"
    (tmp_path / "settings.py").write_text("LEARNERS, TOKENS = 2, 5\nSETTINGS = {'seed': 1, 'round.steps': 7}\n")
    both = {"task.name": "task:make", "seed": 3, "round.steps": 7, "learners": 2, "tokens": 5}
    assert settings_here(given, tmp_path) == both
    assert settings_here({"task.name": "gpt"}, tmp_path) == {"task.name": "gpt"}, "another task is asked for"


def test_what_people_start_elsewhere_names_the_model_or_where_their_copy_is(folder: Path) -> None:
    here = TaskSettings(name=TASK, options={"model": str(folder)})
    text = learner_text("mine", "nats://10.0.0.5:4222", here, "from anywhere")
    assert "diloco-torch-learner --config learner.toml" in text
    assert 'nats_url = "nats://10.0.0.5:4222"' in text
    assert 'model = "PATH OF YOUR COPY OF model"' in text
    assert str(folder) not in text
    hub = TaskSettings(name=TASK, options={"model": "owner/name", "dtype": "4bit"})
    text = learner_text("mine", "tls://10.0.0.5:4222", hub, "from anywhere")
    assert "model =" not in text
    assert "HF_TOKEN" in text
    assert "bitsandbytes" in text
    assert "diloco keys add" in text
    assert model_of(TaskSettings(name="own:make", options={"model": "small"})) is None
    assert model_of(TaskSettings(name="task:make", options={"model": str(folder)})) == str(folder)
