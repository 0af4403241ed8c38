"""A Llama: RMSNorm, RoPE, SwiGLU, grouped-query attention. Its weights are those of Hugging Face's ``LlamaForCausalLM``.

PYTHONPATH=examples diloco up --set task.name=llama:make --task width=128 --tokens 400000 --plain --run-dir runs/llama
PYTHONPATH=examples diloco export runs/llama llama --format hf        # LlamaForCausalLM.from_pretrained("llama")
PYTHONPATH=examples diloco up --set task.name=llama:make --task width=128 --init llama    # and back
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from diloco.settings.run import TaskSettings
from diloco_learner.task import Units
from diloco_learner.text import TextData

Params = dict[str, Any]
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Options:
    """The sizes of a model, as its config.json has them."""

    vocabulary: int = 256  # the text's bytes are its tokens
    width: int = 64
    hidden: int = 176  # of SwiGLU
    layers: int = 2
    heads: int = 4
    key_heads: int = 2  # each is shared by heads / key_heads heads
    theta: float = 10000.0  # of RoPE
    epsilon: float = 1e-5  # of RMSNorm
    tied: bool = False  # the embedding is the head, too

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.key_heads:
            raise ValueError("heads has to divide width, and key_heads heads")


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Return float32 [..., width] over its root mean square, scaled."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * scale


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotate vectors, float32 [rows, length, heads, size], by position: value i of each half by position / theta^(2i/size)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x: jax.Array, p: Params, o: Options) -> jax.Array:
    """Return causal attention of float32 [rows, length, width] to itself, of the same shape."""
    rows, length, width = x.shape
    size, group = width // o.heads, o.heads // o.key_heads
    q = rotated((x @ p["q"].T).reshape(rows, length, o.heads, size), o.theta)
    k = rotated((x @ p["k"].T).reshape(rows, length, o.key_heads, size), o.theta)
    v = (x @ p["v"].T).reshape(rows, length, o.key_heads, size)
    q = q.reshape(rows, length, o.key_heads, group, size)
    scores = jnp.einsum("rtkgs,ruks->rkgtu", q, k) / math.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("rkgtu,ruks->rtkgs", jax.nn.softmax(scores), v)
    result: jax.Array = mixed.reshape(rows, length, width) @ p["o"].T
    return result


def logits(params: Params, tokens: jax.Array, o: Options) -> jax.Array:
    """Return scores of each next token, float32 [rows, length, vocabulary], for int32 [rows, length]."""
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = x + attention(rms_norm(x, p["norm"], o.epsilon), p, o)
        y = rms_norm(x, p["mlp_norm"], o.epsilon)
        x = x + (jax.nn.silu(y @ p["gate"].T) * (y @ p["up"].T)) @ p["down"].T
    scores: jax.Array = rms_norm(x, params["norm"], o.epsilon) @ params["embedding" if o.tied else "head"].T
    return scores


class Llama:
    units = Units(item="byte", loss="nats per byte")

    def __init__(self, settings: TaskSettings, data: str | None, options: Options) -> None:
        self.options, self.data = options, TextData(settings, data)
        self.context = settings.context
        self.tokens_per_batch = settings.batch * settings.context

    def init(self, key: jax.Array) -> Params:
        o = self.options
        shared = o.width // o.heads * o.key_heads
        shapes = {"q": (o.width, o.width), "k": (shared, o.width), "v": (shared, o.width), "o": (o.width, o.width)}
        shapes |= {"gate": (o.hidden, o.width), "up": (o.hidden, o.width), "down": (o.width, o.hidden)}
        keys = iter(jax.random.split(key, 2 + o.layers * len(shapes)))

        def normal(shape: tuple[int, ...]) -> jax.Array:  # (out, in), as torch's Linear
            return jax.random.normal(next(keys), shape) * 0.02

        params = {"embedding": normal((o.vocabulary, o.width)), "norm": jnp.ones(o.width)}
        if not o.tied:
            params["head"] = normal((o.vocabulary, o.width))
        norms = {"norm": jnp.ones(o.width), "mlp_norm": jnp.ones(o.width)}
        layers = [norms | {name: normal(shape) for name, shape in shapes.items()} for _ in range(o.layers)]
        return params | {"layers": layers}

    def loss(self, params: Params, batch: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(logits(params, batch[:, :-1], self.options))
        return -jnp.mean(jnp.take_along_axis(scores, batch[:, 1:, None], -1))

    def batches(self, share: int, shares: int, seed: int, start: int, rows: range | None = None) -> Iterator[Tokens]:
        return self.data.batches(share, shares, seed, start, rows)

    def validation(self) -> Sequence[Tokens]:
        return self.data.validation()

    def is_embedding(self, path: str) -> bool:
        return path == "embedding"

    def matrices(self, path: str) -> int:
        return 0 if path in ("embedding", "head") else 1

    def names(self) -> dict[str, str]:
        """Return the names that ``transformers`` gives to the tensors, by path: the same tensors, in the same shapes."""
        within = {"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        within |= {name: f"self_attn.{name}_proj" for name in "qkvo"} | {
            name: f"mlp.{name}_proj" for name in ("gate", "up", "down")
        }
        found = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
        if not self.options.tied:
            found["head"] = "lm_head.weight"
        for layer in range(self.options.layers):
            found |= {f"layers/{layer}/{ours}": f"model.layers.{layer}.{theirs}.weight" for ours, theirs in within.items()}
        return found

    def config(self) -> dict[str, Any]:
        """Return the config.json with which ``transformers`` makes this model."""
        o = self.options
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": o.vocabulary,
            "hidden_size": o.width,
            "intermediate_size": o.hidden,
            "num_hidden_layers": o.layers,
            "num_attention_heads": o.heads,
            "num_key_value_heads": o.key_heads,
            "rope_theta": o.theta,
            "rms_norm_eps": o.epsilon,
            "tie_word_embeddings": o.tied,
            "max_position_embeddings": self.context,
            "bos_token_id": None,
            "eos_token_id": None,
        }


def make(settings: TaskSettings, data: str | None, options: Options) -> Llama:
    """Return the task that `task.name` names."""
    return Llama(settings, data, options)
