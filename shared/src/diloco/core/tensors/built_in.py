"""The tensors of the built-in model, a GPT: by them, members without a framework tell its runs from those of other models."""

from __future__ import annotations

from diloco.core.tensors.fragments import FragmentMap
from diloco.settings.run import TaskSettings

BUILT_IN = "gpt"  # the setting ``task.name`` of the built-in task
BYTES = 256  # the kinds of tokens where the tokens are bytes


def hidden_width(width: int) -> int:
    """Return the channels of the feed-forward layer.

    SwiGLU (arXiv 2002.05202) has 8/3 of the width. Rounding up to a multiple of 16 suits vector units.
    """
    return -(-8 * width // 48) * 16


def tensor_shapes(task: TaskSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the built-in model, by its path."""
    width, hidden = task.width, hidden_width(task.width)
    vocabulary = BYTES if task.mix is None else task.mix.vocabulary
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width), "norm": (width,), "head": (vocabulary, width)}
    for layer in range(task.layers):
        shapes |= {
            f"blocks/{layer}/attention/norm": (width,),
            f"blocks/{layer}/attention/qkv": (3 * width, width),
            f"blocks/{layer}/attention/out": (width, width),
            f"blocks/{layer}/mlp/norm": (width,),
            f"blocks/{layer}/mlp/gate_up": (2 * hidden, width),
            f"blocks/{layer}/mlp/down": (width, hidden),
        }
    return shapes


def is_built_in(task: TaskSettings, fragments: FragmentMap) -> bool:
    """Return whether a run of these settings trains the built-in model."""
    if task.name != BUILT_IN or fragments.fixed:
        return False
    return {tensor.path: tensor.model_shape for tensor in fragments.tensors} == tensor_shapes(task)
