"""Whether Hugging Face's libraries take a model's own head, by what a folder's configuration says of tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from diloco.core.tensors.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco.weights_files import tying
from diloco.weights_files.naming import Names, Naming

EMBED, BODY, HEAD = TensorSpec("embed", (50, 8), embedding=True), TensorSpec("body", (8, 8)), TensorSpec("head", (50, 8))
PLACES, CAUSAL = TensorSpec("places", (20, 8), embedding=True), {"architectures": ["LlamaForCausalLM"]}
NAMES = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
FALSE, TRUE = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}


def named(*tensors: TensorSpec, **names: Any) -> Naming:
    entries = {path: name for path, name in (NAMES | names).items() if path in {tensor.path for tensor in tensors}}
    return Naming(tensors, Names(entries, "--names"))


@pytest.mark.parametrize("config", [FALSE | CAUSAL, CAUSAL | {"text_config": FALSE}, FALSE | CAUSAL | {"vocab_size": 50}])
def test_a_head_that_would_be_made_at_random_is_refused_and_the_embedding_named(config: Mapping[str, Any]) -> None:
    said = r"^here: tie_word_embeddings is false, but .* 'model.embed_tokens.weight' of shape \(50, 8\), .* set .* to true; "
    with pytest.raises(SettingsError, match=said):
        tying.check_head(named(EMBED, BODY), config, "here")


def test_the_embedding_of_words_is_known_by_their_number_and_by_it_alone_where_the_task_names_none() -> None:
    with pytest.raises(SettingsError, match=r"embed_tokens.weight' of shape \(50, 8\)"):
        tying.check_head(named(PLACES, EMBED), FALSE | CAUSAL | {"vocab_size": 50}, "here")
    plain = TensorSpec("embed", (50, 8))
    with pytest.raises(SettingsError, match="embed_tokens"):
        tying.check_head(named(plain, BODY), FALSE | CAUSAL | {"vocab_size": 50}, "here")
    tying.check_head(named(plain, HEAD), FALSE | CAUSAL | {"vocab_size": 50}, "here")


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ((EMBED, BODY), TRUE),
        ((EMBED, BODY), {}),  # the libraries' own default
        ((EMBED, BODY), {"tie_word_embeddings": None}),
        ((EMBED, HEAD), FALSE | CAUSAL),
        ((EMBED, TensorSpec("scores", (50, 8))), FALSE | CAUSAL),  # a head by another name
        ((EMBED, TensorSpec("scores", (8, 50))), FALSE | CAUSAL),
        ((EMBED, BODY), FALSE | {"architectures": ["BertModel"]}),  # has no head
        ((BODY,), FALSE | CAUSAL),
    ],
)
def test_a_model_that_is_made_as_it_was_is_left_alone(tensors: tuple[TensorSpec, ...], config: Mapping[str, Any]) -> None:
    tying.check_head(named(*tensors), config, "here")
    assert tying.heads_to_be_ignored(named(*tensors), config) is None


@pytest.mark.parametrize("config", [FALSE, FALSE | {"architectures": None}, FALSE | {"architectures": []}])
def test_a_model_without_a_head_is_told_where_nobody_knows_whether_it_should_have_one(config: Mapping[str, Any]) -> None:
    tying.check_head(named(EMBED, BODY), config, "here")
    said = tying.unsaid(named(EMBED, BODY), config, "here")
    assert said is not None
    assert said.startswith("here: tie_word_embeddings is false, architectures names no model, and the model has no head beside")
    assert tying.unsaid(named(EMBED, HEAD), config, "here") is None


def test_a_model_that_has_no_head_by_its_name_is_told_nothing() -> None:
    for tie in (FALSE, {}):
        assert tying.unsaid(named(EMBED, BODY), tie | {"architectures": ["LlamaModel"]}, "here") is None


def test_a_configuration_that_leaves_the_head_to_the_libraries_is_told() -> None:
    said = tying.unsaid(named(EMBED, BODY), CAUSAL, "here")
    assert said is not None
    assert said.startswith(
        "here: does not say tie_word_embeddings, and the model has no head beside its embedding 'model.embed"
    )
    silent: tuple[Mapping[str, Any], ...] = (CAUSAL | TRUE, {}, {"architectures": None})
    for tensors, config in (((EMBED, HEAD), CAUSAL), *(((EMBED, BODY), each) for each in silent)):
        assert tying.unsaid(named(*tensors), config, "here") is None


def test_a_head_that_the_embedding_would_replace_is_told() -> None:
    assert tying.heads_to_be_ignored(named(EMBED, HEAD), TRUE) == ("model.embed_tokens.weight", "lm_head.weight")
    assert tying.heads_to_be_ignored(named(EMBED, HEAD, head="model.lm_head.weight"), TRUE) is not None
    assert tying.heads_to_be_ignored(named(PLACES, HEAD), TRUE) is None  # of another shape
    assert tying.heads_to_be_ignored(named(EMBED, HEAD), FALSE) is None
