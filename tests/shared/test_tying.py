"""Whether Hugging Face's libraries take a model's own head, by what a folder's configuration says of tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from diloco.core.fragments import TensorSpec
from diloco.errors import SettingsError
from diloco.member import tying
from diloco.member.naming import Names, Naming

EMBED, BODY, HEAD = TensorSpec("embed", (50, 8), embedding=True), TensorSpec("body", (8, 8)), TensorSpec("head", (50, 8))
PLACES, CAUSAL = TensorSpec("places", (20, 8), embedding=True), {"architectures": ["LlamaForCausalLM"]}
NAMES = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
FALSE, TRUE = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}


def named(*tensors: TensorSpec, **names: Any) -> Naming:
    entries = {path: name for path, name in (NAMES | names).items() if path in {tensor.path for tensor in tensors}}
    return Naming(tensors, Names(entries, "--names"))


@pytest.mark.parametrize("config", [FALSE, FALSE | CAUSAL, {"text_config": FALSE}, FALSE | {"vocab_size": 50}])
def test_a_head_that_would_be_made_at_random_is_refused_and_the_embedding_named(config: Mapping[str, Any]) -> None:
    said = r"^here: tie_word_embeddings is false, but .* 'model.embed_tokens.weight' of shape \(50, 8\), .* set .* to true; "
    with pytest.raises(SettingsError, match=said):
        tying.check_head(named(EMBED, BODY), config, "here")


def test_the_embedding_of_words_is_known_by_their_number_and_by_it_alone_where_the_task_names_none() -> None:
    with pytest.raises(SettingsError, match=r"embed_tokens.weight' of shape \(50, 8\)"):
        tying.check_head(named(PLACES, EMBED), FALSE | {"vocab_size": 50}, "here")
    plain = TensorSpec("embed", (50, 8))
    with pytest.raises(SettingsError, match="embed_tokens"):
        tying.check_head(named(plain, BODY), FALSE | {"vocab_size": 50}, "here")
    tying.check_head(named(plain, HEAD), FALSE | {"vocab_size": 50}, "here")


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ((EMBED, BODY), TRUE),
        ((EMBED, BODY), {}),  # the libraries' own default
        ((EMBED, BODY), {"tie_word_embeddings": None}),
        ((EMBED, HEAD), FALSE),
        ((EMBED, TensorSpec("scores", (50, 8))), FALSE),  # a head by another name
        ((EMBED, TensorSpec("scores", (8, 50))), FALSE),
        ((EMBED, BODY), FALSE | {"architectures": ["BertModel"]}),  # has no head
        ((BODY,), FALSE),
    ],
)
def test_a_model_that_is_made_as_it_was_is_left_alone(tensors: tuple[TensorSpec, ...], config: Mapping[str, Any]) -> None:
    tying.check_head(named(*tensors), config, "here")
    assert tying.heads_to_be_ignored(named(*tensors), config) is None


def test_a_configuration_that_leaves_the_head_to_the_libraries_is_told() -> None:
    said = tying.unsaid(named(EMBED, BODY), CAUSAL, "here")
    assert said is not None
    assert said.startswith(
        "here: does not say tie_word_embeddings, and the model has no head beside its embedding 'model.embed"
    )
    for tensors, config in (((EMBED, HEAD), CAUSAL), ((EMBED, BODY), CAUSAL | TRUE), ((EMBED, BODY), {})):
        assert tying.unsaid(named(*tensors), config, "here") is None


def test_a_head_that_the_embedding_would_replace_is_told() -> None:
    assert tying.heads_to_be_ignored(named(EMBED, HEAD), TRUE) == ("model.embed_tokens.weight", "lm_head.weight")
    assert tying.heads_to_be_ignored(named(EMBED, HEAD, head="model.lm_head.weight"), TRUE) is not None
    assert tying.heads_to_be_ignored(named(PLACES, HEAD), TRUE) is None  # of another shape
    assert tying.heads_to_be_ignored(named(EMBED, HEAD), FALSE) is None
