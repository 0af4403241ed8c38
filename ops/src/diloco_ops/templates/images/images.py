"""Images of four shapes in noise, drawn as they are needed: put your own data here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from diloco_learner.task_api import Units

SIZE, CLASSES = 16, 4  # pixels of a side; square, cross, diagonal cross, ring


class Images:
    """Data of a task: batches of ``x``, float32 [rows, SIZE, SIZE], and ``y``, int32 [rows]."""

    units = Units(item="image", loss="nats per image")

    def __init__(self, rows: int, noise: float) -> None:
        self.tokens_per_batch, self.noise = rows, noise

    def images(self, seed: tuple[int, ...]) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        y = rng.integers(CLASSES, size=self.tokens_per_batch)
        x = rng.normal(0, self.noise, (len(y), SIZE, SIZE))
        for image, kind in zip(x, y, strict=True):
            row, column = rng.integers(SIZE - 7, size=2)
            image[row : row + 7, column : column + 7] += SHAPES[kind]
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def batches(self, share: int, shares: int, seed: int, start: int) -> Iterator[Any]:
        return (self.images((seed, share, number)) for number in itertools.count(start))

    def validation(self) -> list[Any]:
        return [self.images((2**32, number)) for number in range(8)]


def shapes() -> Any:
    """Return the shapes to tell, float64 [CLASSES, 7, 7]."""
    square, cross, diagonal = np.ones((7, 7)), np.zeros((7, 7)), np.eye(7)
    cross[3], cross[:, 3] = 1, 1
    ring = square.copy()
    ring[2:5, 2:5] = 0
    return 2 * np.stack([square, cross, np.maximum(diagonal, diagonal[::-1]), ring])


SHAPES = shapes()
