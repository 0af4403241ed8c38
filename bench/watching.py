"""The look that a joined loop of PyTorch has at all its tensors at each step: that nothing was swapped behind its back.

    python bench/watching.py                     # 300 tensors; ten seconds
    python bench/watching.py --tensors 3000 --json

*module*, *named*: the median of a look at a module, or at its tensors by name, where nothing has changed; target at most 0.1 ms
for 300 tensors. *swapped*: the same where one tensor has other memory, so that all are taken over. *hashed*: a gigabyte of
frozen parameters, when the loop joins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from diloco_learner.pytorch.parameters import TorchParameters

TARGET_S = 0.0001  # of 300 tensors
FROZEN_BYTES = 1 << 30


def median_s(work: Callable[[], object], times: int) -> float:
    """Return how long a piece of work usually takes."""
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def measure(tensors: int, times: int) -> dict[str, float]:
    """Return seconds by what was measured."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(tensors // 4)))
    named = dict(module.named_parameters())
    of_module, of_named = TorchParameters(module), TorchParameters(named)
    weight = next(module.parameters())

    def swapped() -> None:
        weight.data = weight.data.clone()
        of_module.take(module)

    frozen = nn.Linear(FROZEN_BYTES // 4096, 1024, bias=False).requires_grad_(False)
    based = TorchParameters(nn.ModuleList([frozen, nn.Linear(1, 1)]))
    return {
        "module": median_s(lambda: of_module.take(module), times),
        "named": median_s(lambda: of_named.take(named), times),
        "swapped": median_s(swapped, max(1, times // 20)),
        "hashed": median_s(based.fixed, 1),
    }


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.tensors, given.times)
    if given.json:
        print(json.dumps(found))
        return
    for what, seconds in found.items():
        print(f"{what:8} {1000 * seconds:9.3f} ms")
    print(f"a look at a module takes {found['module'] / (TARGET_S * given.tensors / 300):.2f} of its target")


if __name__ == "__main__":
    main()
