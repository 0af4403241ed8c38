"""Sizes of what ``bench/accelerator.py`` measures, as settings of a run. Nothing of the project is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

BENCH = Path(__file__).parents[1]
PATHS = (str(BENCH), str(BENCH.parent / "examples"))  # of tasks
VOCABULARY = 256  # bytes
ONE, TWO = 3, 5  # processes that share a device: one learner or two, as many bare loops, and the evaluator
MULTIPLE = 8  # of sequences


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of all parts.

    ``large``: numbers of layers of the large model. The first one that the device has room for is measured.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    dtype: str
    interval: int  # H, steps of a round; there are as many fragments
    turns: int
    turn_s: float
    blocks: int  # of steps, of each loop, in turns
    values: int  # of a fragment whose encoding is timed
    replayed_steps: int  # of both learners
    large: tuple[int, ...]
    large_width: int
    large_heads: int
    large_batch: int
    dry: bool
    device_bytes: int = 0  # of memory, as far as a framework may take it; 0: unknown

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return parameters(self.layers, self.width)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def sets(self, framework: str, **changed: object) -> dict[str, object]:
        """Return a run's settings by name; ``changed`` has ``_`` for a name's dot."""
        found: dict[str, object] = {
            "task.name": f"on_device.task:make_{framework}", "task.layers": self.layers, "task.width": self.width,
            "task.heads": self.heads, "task.context": self.context, "task.batch": self.batch, "task.dtype": self.dtype,
            "round.steps": self.interval, "fragments.count": self.interval, "inner.optimizer": "adamw",
        }  # fmt: skip
        return found | {name.replace("_", ".", 1): value for name, value in changed.items()}

    def dump(self) -> str:
        """Return it as text for a child."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Plan:
        """Return the plan of a :meth:`dump`."""
        values = json.loads(text)
        return cls(**values | {"large": tuple(values["large"])})

    def of_two(self) -> Plan:
        """Return the same with a batch for two learners and two bare loops, of whose device one has less."""
        return replace(self, batch=max(MULTIPLE, self.batch * ONE // TWO // MULTIPLE * MULTIPLE))

    def smaller(self) -> Plan:
        """Return the same with half of the batch, after a device had no room for it."""
        return replace(self, batch=max(1, self.batch // 2), large_batch=max(1, self.large_batch // 2))


def parameters(layers: int, width: int) -> int:
    """Return the parameters of the built-in model."""
    hidden = -(-8 * width // 48) * 16  # diloco.core.tensors.built_in.hidden_width
    return layers * (4 * width * width + 3 * width * hidden + 2 * width) + 2 * VOCABULARY * width + width


FULL = Plan(
    layers=10, width=1024, heads=16, context=512, batch=32, dtype="bfloat16", interval=24, turns=3, turn_s=4.0, blocks=4,
    values=5_000_000, replayed_steps=50, large=(20, 10, 5), large_width=2048, large_heads=16, large_batch=4, dry=False,
)  # fmt: skip
DRY = Plan(
    layers=1, width=32, heads=2, context=32, batch=4, dtype="bfloat16", interval=4, turns=1, turn_s=3.0, blocks=2,
    values=4096, replayed_steps=20, large=(2, 1), large_width=32, large_heads=2, large_batch=4, dry=True,
)  # fmt: skip
