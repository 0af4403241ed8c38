"""A decoder-only GPT over bytes, or the tokens of a mix: RoPE, RMSNorm, SwiGLU. Read it from top to bottom.

Parameters are nested dicts of arrays. Weights are stored (out, in), so that a row belongs to one output unit, which is what
radial-directional averaging by row takes its norms over. Shapes below: B sequences, T tokens each, V kinds of tokens, D model
width, A attention heads of K = D / A channels, F channels of the feed-forward layer.

Matrices are float32 or bfloat16, and activations between layers are of their type. The scales of norms, all that is near one,
are float32 always, and so are norms, softmax and loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.core.tensors.built_in import BYTES, hidden_width

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6

Params = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Size of the model. ``width`` is an even multiple of ``heads``."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = BYTES

    @property
    def hidden(self) -> int:
        """F."""
        return hidden_width(self.width)


def init(key: jax.Array, shape: Shape, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Random parameters: normal with deviation ``1/sqrt(in)``; what writes to the residual stream is scaled down by depth.

    ``dtype`` is that of matrices: those of bfloat16 are those of float32, rounded.
    """
    keys = iter(jax.random.split(key, 1 + 4 * shape.layers))

    def matrix(rows: int, columns: int, deviation: float) -> jax.Array:
        return (deviation * jax.random.normal(next(keys), (rows, columns), jnp.float32)).astype(dtype)

    width, hidden = shape.width, shape.hidden
    residual = 1 / math.sqrt(2 * shape.layers)
    blocks = {
        str(layer): {
            "attention": {
                "norm": jnp.ones(width),
                "qkv": matrix(3 * width, width, 1 / math.sqrt(width)),
                "out": matrix(width, width, residual / math.sqrt(width)),
            },
            "mlp": {
                "norm": jnp.ones(width),
                "gate_up": matrix(2 * hidden, width, 1 / math.sqrt(width)),
                "down": matrix(width, hidden, residual / math.sqrt(hidden)),
            },
        }
        for layer in range(shape.layers)
    }
    return {
        "embedding": matrix(shape.vocabulary, width, 1.0),
        "blocks": blocks,
        "norm": jnp.ones(width),
        "head": jnp.zeros((shape.vocabulary, width), dtype),  # every token equally likely: the first loss is ln 256 for bytes
    }


def logits(params: Params, tokens: jax.Array, shape: Shape) -> jax.Array:
    """[B, T] tokens to [B, T, V] logits of the token after each."""
    table = params["embedding"]
    # looked up in float32: the gradient of a token's vector is a sum over its places, and in bfloat16 would come to a halt
    x = table.astype(jnp.float32)[tokens].astype(table.dtype)
    rotation = rope_table(tokens.shape[1], shape.width // shape.heads)
    for layer in range(shape.layers):
        block = params["blocks"][str(layer)]
        x = x + attention(block["attention"], rms_norm(x, block["attention"]["norm"]), rotation, shape.heads)
        x = x + mlp(block["mlp"], rms_norm(x, block["mlp"]["norm"]))
    return linear(rms_norm(x, params["norm"]), params["head"], jnp.float32)


def loss(params: Params, windows: jax.Array, shape: Shape) -> jax.Array:
    """Mean cross-entropy in nats a token over [B, T+1] windows: each token is predicted from those before it."""
    scores = logits(params, windows[:, :-1], shape)
    picked = jnp.take_along_axis(scores, windows[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - picked)


def linear(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """``x @ weight.T`` for a weight of shape (out, in), of their type if no other is given."""
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """``scale * x / sqrt(mean(x^2))`` over the last axis (arXiv 1910.07467), of the type of ``x``, computed in float32."""
    wide = x.astype(jnp.float32)
    return (scale * wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + NORM_EPSILON)).astype(x.dtype)


def rope_table(length: int, channels: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [T, K/2] of position times frequency (RoPE, arXiv 2104.09864)."""
    frequencies = ROPE_BASE ** (-np.arange(0, channels, 2) / channels)
    angles = np.arange(length)[:, None] * frequencies
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn the pairs (j, j + K/2) of [..., T, K] by their position's angles; dot products then depend on distance alone."""
    cos, sin = table
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).astype(x.dtype)


def attention(params: Params, x: jax.Array, rotation: tuple[jax.Array, jax.Array], heads: int) -> jax.Array:
    """Causal multi-head attention, [B, T, D] to [B, T, D]."""
    batch, length, width = x.shape
    qkv = linear(x, params["qkv"]).reshape(batch, length, 3, heads, width // heads)
    query, key, value = qkv.transpose(2, 0, 3, 1, 4)  # each [B, A, T, K]
    query = rotate(query * (width // heads) ** -0.5, rotation)
    scores = jnp.matmul(query, rotate(key, rotation).mT, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = (weights.astype(x.dtype) @ value).transpose(0, 2, 1, 3).reshape(batch, length, width)
    return linear(mixed, params["out"])


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """SwiGLU (arXiv 2002.05202), [B, T, D] to [B, T, D]."""
    gate, up = jnp.split(linear(x, params["gate_up"]), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, params["down"])


@partial(jax.jit, static_argnames=("shape", "count"))
def generate(params: Params, key: jax.Array, prompt: jax.Array, *, shape: Shape, count: int, temperature: float) -> jax.Array:
    """``count`` tokens drawn one by one after a prompt of 1 to T tokens; the model sees the last T tokens."""
    start = prompt.shape[0]
    window = jnp.zeros(shape.context, jnp.int32).at[:start].set(prompt)

    def draw(state: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, length = state
        scores = logits(params, window[None], shape)[0, length - 1]
        token = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
        full = length == shape.context
        window = jnp.where(full, jnp.roll(window, -1), window)
        at = jnp.minimum(length, shape.context - 1)
        return (window.at[at].set(token), at + 1), token

    return jax.lax.scan(draw, (window, jnp.int32(start)), jax.random.split(key, count))[1]
