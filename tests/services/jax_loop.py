"""The loop of ``torch_ranks.py`` in JAX: ``jax_loop.py URL RUN NAME OUT ABREAST``; it writes the same files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diloco

WIDTH, HIDDEN, ROWS, STEP_S = 9, 14, 16, 0.04
Params = dict[str, Any]


def parameters() -> Params:
    """Return parameters by the names and shapes of the module there."""
    rng = np.random.default_rng(0)

    def linear(inputs: int, outputs: int) -> Params:
        return {"weight": jnp.asarray(rng.normal(size=(outputs, inputs)) / 3, jnp.float32), "bias": jnp.zeros(outputs)}

    return {"first": linear(WIDTH, HIDDEN), "second": linear(HIDDEN, WIDTH), "scale": jnp.float32(1)}


def batches(share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
    """Yield the batches of a share, which are those there."""
    truth = np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    index = start
    while True:
        x = np.random.default_rng((seed, share, index)).normal(size=(ROWS, WIDTH)).astype(np.float32)
        yield x, np.tanh(x @ truth)
        index += 1


def loss_of(params: Params, batch: Any) -> jax.Array:
    x, y = batch
    hidden = jnp.tanh(x @ params["first"]["weight"].T + params["first"]["bias"])
    out = params["scale"] * (hidden @ params["second"]["weight"].T + params["second"]["bias"])
    return jnp.square(out - y).mean()


@jax.jit
def descend(params: Params, batch: Any) -> tuple[Params, jax.Array]:
    """Take a step; return the parameters and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda value, gradient: value - 0.05 * gradient, params, gradients), loss


def main(url: str, run_name: str, name: str, out: Path, abreast: int) -> None:
    params, losses = parameters(), list[float]()
    descend(params, next(batches(0, 1, 0, 0)))  # compiled before the others wait for it
    with diloco.join(url, run=run_name, name=name, params=params, tokens=ROWS) as run:
        out.with_name(f"{name}-0.joined").touch()
        while len(list(out.parent.glob("*.joined"))) < abreast:
            time.sleep(0.01)
        params = run.params
        for batch in run.batches(batches):
            params, loss = descend(params, batch)
            time.sleep(STEP_S)
            params = run.step(params, loss=loss)
            losses.append(float(loss))
        params, steps = run.params, run.steps
    values = {f"{layer}/{kind}": params[layer][kind] for layer in ("first", "second") for kind in ("weight", "bias")}
    np.savez(out.with_suffix(".npz"), **values, scale=params["scale"])
    out.write_text(json.dumps({"steps": steps, "losses": losses}))


if __name__ == "__main__":
    url, run_name, name, out, abreast = sys.argv[1:6]
    main(url, run_name, name, Path(out), int(abreast))
