"""Tied weights in folders of Hugging Face's libraries: ``config.json`` says whether a model's head is its embedding.

With ``tie_word_embeddings`` true the libraries take the embedding for the head, whatever else the files have. With false they
look for a head, and where there is none they make one at random and say so in a warning at most. Either way another model
comes out than the one that was trained. A configuration that does not say it is left to the libraries, whose models have
defaults of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.errors import SettingsError
from diloco.weights_files.naming import Naming

KEY = "tie_word_embeddings"
# ends of the names that heads have there
HEADS = ("lm_head.weight", "lm_head.decoder.weight", "embed_out.weight", "predictions.decoder.weight", "proj_out.weight")
# ends of the names of models that have a head
WITH_HEAD = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")


def check_head(named: Naming, config: Mapping[str, Any], source: str) -> None:
    """Find out that no head is made up for a model of these tensors.

    Raises:
        SettingsError: the configuration names a model with a head, and says that the head is no embedding, and there is none;
            ``source`` begins the sentence.
    """
    embedding = _lone_embedding(named, config)
    if is_tied(config) is not False or not _names_a_head(config) or embedding is None:
        return
    raise SettingsError(
        f"{source}: {KEY} is false, but the model has no head beside its embedding {embedding!r} of shape "
        f"{named.shapes[embedding]}, so Hugging Face's libraries would make one at random: if the embedding is the head, set "
        f"{KEY} to true; if not, let the model have a tensor for its head, such as 'lm_head.weight'"
    )


def unsaid(named: Naming, config: Mapping[str, Any], source: str) -> str | None:
    """Say that the libraries may make a head for a model without one; None: they do not, or the configuration says nothing.

    It says so where only one of the two is known: that the model has a head, or that its head is no embedding. ``source``
    begins the sentence.
    """
    embedding, tied, has_head = _lone_embedding(named, config), is_tied(config), _names_a_head(config)
    if embedding is not None and tied is False and has_head is None:
        return (
            f"{source}: {KEY} is false, architectures names no model, and the model has no head beside its embedding "
            f"{embedding!r}: Hugging Face's libraries make a head at random if they load it as a model with one; set {KEY} to "
            "true if the embedding is the head, or name the model in architectures"
        )
    if embedding is None or tied is not None or not has_head:
        return None
    return (
        f"{source}: does not say {KEY}, and the model has no head beside its embedding {embedding!r}: Hugging Face's "
        f"libraries use their own default, and may make a head at random; set {KEY} to true if the embedding is the head"
    )


def heads_to_be_ignored(named: Naming, config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the embedding and the head that the libraries would replace by it; None if there is no such head."""
    if is_tied(config) is not True:
        return None
    for head in named.shapes:
        if _is_head(head):
            tied = (name for name in _embeddings(named, config) if named.shapes[name] == named.shapes[head] and name != head)
            embedding = next(tied, None)
            if embedding is not None:
                return embedding, head
    return None


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether a configuration says that the head is the embedding; None: it does not say."""
    text = config.get("text_config")  # of models that have other parts beside
    for said in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(said.get(KEY), bool):
            return bool(said[KEY])
    return None


def _names_a_head(config: Mapping[str, Any]) -> bool | None:
    """Return whether a configuration names a model that has a head; None: it names no model."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return any(str(name).endswith(WITH_HEAD) for name in architectures)


def _lone_embedding(named: Naming, config: Mapping[str, Any]) -> str | None:
    """Return the name of the word embedding of a model that has no tensor for a head; None: it has, or has no embedding."""
    embedding = next(iter(_embeddings(named, config)), None)
    return None if embedding is None or _has_head(named, embedding) else embedding


def _embeddings(named: Naming, config: Mapping[str, Any]) -> list[str]:
    """Return the names of matrices with a row for each word, in order; of all embeddings where the number is not known."""
    words = config.get("vocab_size")
    matrices = [name for name, shape in named.shapes.items() if len(shape) == 2]
    of_words = [name for name in matrices if named.shapes[name][0] == words and not _is_head(name)]
    known = [name for name in matrices if name in named.embeddings]
    return [name for name in known if name in of_words] or known or of_words


def _has_head(named: Naming, embedding: str) -> bool:
    shape = named.shapes[embedding]
    others = {name: its for name, its in named.shapes.items() if name != embedding and name not in named.embeddings}
    return any(_is_head(name) for name in named.shapes) or any(its in (shape, shape[::-1]) for its in others.values())


def _is_head(name: str) -> bool:
    return any(name == head or name.endswith(f".{head}") for head in HEADS)
