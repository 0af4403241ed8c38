"""Loading tasks, and the built-in one."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.errors import DataError, SettingsError
from diloco.settings.run import TaskSettings
from diloco_learner.task import GptTask, load_task
from diloco_learner.tensors import tensor_of

SMALL = TaskSettings(layers=1, width=16, heads=2, context=8, batch=4)


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"for i in range(10):\n    print(i)\n" * 100)
    return str(path)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's module ``my_model`` can be written."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    return tmp_path / "my_model.py"


def test_built_in_task(data: str) -> None:
    task = load_task(SMALL, data)
    assert isinstance(task, GptTask)
    assert task.tokens_per_batch == 32
    params = task.init(jax.random.key(0))
    batch = next(task.batches(0, 4, 0, 0))
    assert batch.shape == (4, 9)
    assert float(task.loss(params, jnp.asarray(batch))) == pytest.approx(np.log(256), rel=1e-5)
    assert len(task.validation()) == 5  # 165 of 3300 bytes are held out: 20 windows of 8, 4 a batch
    assert len(task.sample(params, jax.random.key(1), 20)) <= 20


def test_only_the_table_of_bytes_is_embedding_like(data: str) -> None:
    task = load_task(SMALL, data)
    kinds = {path: tensor_of(task, path, (6, 8)).kind for path in ("embedding", "head", "blocks/0/attention/qkv")}
    assert kinds == {"embedding": "embedding", "head": "head", "blocks/0/attention/qkv": "matrix"}


def test_share_too_short(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * 160)
    with pytest.raises(DataError, match=r"short\.txt, share 1 of 4: 38 bytes of text"):
        load_task(SMALL, str(tmp_path / "short.txt")).batches(1, 4, 0, 0)


def test_users_task(user_module: Path) -> None:
    user_module.write_text(
        "class Model:\n"
        "    tokens_per_batch = 1\n"
        "    init = loss = batches = validation = is_embedding = lambda self, *arguments: None\n"
        "    def __init__(self, settings, data):\n"
        "        self.settings, self.data = settings, data\n"
    )
    settings = TaskSettings(name="my_model:Model")
    task = load_task(settings, "somewhere")
    assert vars(task) == {"settings": settings, "data": "somewhere"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "my_model cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def", "my_model cannot be imported: SyntaxError"),
        ("", "'Model' does not exist in my_model"),
        ("Model = 1", "'Model' is not callable in my_model"),
        (
            "class Model:\n    init = loss = tokens_per_batch = None\n    def __init__(self, *_): pass",
            r"what Model returns lacks batches \(.*/my_model\.py, line 1\)$",
        ),
        (
            "class Model:\n    init = loss = validation = is_embedding = None\n    tokens_per_batch = 1\n"
            "    def __init__(self, *_): pass\n    def batches(self, share, shares, seed, start, rows): pass",
            r"batches\(\.\.\., rows\) needs the default None, which stands for whole batches",
        ),
    ],
)
def test_users_mistakes(user_module: Path, source: str, message: str) -> None:
    user_module.write_text(source)
    with pytest.raises(SettingsError, match=message):
        load_task(TaskSettings(name="my_model:Model"), None)


def test_no_such_task() -> None:
    with pytest.raises(SettingsError, match=r"task\.name = 'bert': expected 'gpt' or 'package\.module:attribute'"):
        load_task(TaskSettings(name="bert"), None)


def test_a_task_whose_folder_is_elsewhere_is_said_with_its_remedy() -> None:
    with pytest.raises(SettingsError, match=r"elsewhere\.mine cannot be .* in the folder that has elsewhere, or add"):
        load_task(TaskSettings(name="elsewhere.mine:Model"), None)
