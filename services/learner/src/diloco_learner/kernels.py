"""The tensors of models of Flax, Haiku and Equinox, by the names that these libraries give them.

``tensor = staticmethod(kernels.flax)`` in a task says so of all its parameters. A tensor of another name is treated as if the
task said nothing of it.
"""

from __future__ import annotations

from diloco_learner.tensors import Kind, Shape, Tensor, tensor_of

HEADS = ("head", "lm_head", "logits", "classifier")  # layers of scores, as most call them
PROJECTIONS = ("query", "key", "value")  # Flax's kernels of attention: (in, heads, width of a head)


def flax(path: str, shape: Shape) -> Tensor:
    """Return the tensor of a module of Flax, linen or NNX: kernels are (..., in, out), and tables of vectors ``embedding``."""
    *layers, name = [part for part in path.split("/") if part != "value"]  # NNX keeps a parameter's array there
    if name == "embedding":
        return Tensor(kind="embedding")
    if name in ("bias", "scale"):  # of attention they have two axes
        return Tensor(kind="vector")
    if name not in ("kernel", "lora_a", "lora_b") or len(shape) < 2:
        return tensor_of(None, path, shape)
    if len(shape) == 3 and layers and layers[-1] in PROJECTIONS:
        return Tensor(kind="matrix", output_axis=(1, 2))
    return Tensor(kind=_kind(layers), output_axis=-1)


def haiku(path: str, shape: Shape) -> Tensor:
    """Return the tensor of a module of Haiku: ``w`` is (..., in, out), or (..., out, in) where a convolution is transposed."""
    *layers, name = path.split("/")
    if name == "embeddings":
        return Tensor(kind="embedding")
    if name != "w" or len(shape) < 2:
        return tensor_of(None, path, shape)
    transposed = bool(layers) and "transpose" in layers[-1]
    return Tensor(kind=_kind(layers), output_axis=-2 if transposed else -1)


def equinox(path: str, shape: Shape) -> Tensor:
    """Return the tensor of a module of Equinox: ``weight`` is (out, in, ...), of a layer with ``embed`` in its name a table."""
    *layers, name = path.split("/")
    if name != "weight" or len(shape) < 2:
        return tensor_of(None, path, shape)
    if any("embed" in layer for layer in layers):
        return Tensor(kind="embedding")
    return Tensor(kind=_kind(layers), output_axis=0)


def _kind(layers: list[str]) -> Kind:
    return "head" if any(layer in HEADS for layer in layers) else "matrix"
