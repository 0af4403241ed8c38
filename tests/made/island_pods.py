"""Pods of ``deploy/kubernetes/island``, as the kubelet starts them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.made import kustomize

ISLAND = Path(__file__).parents[2] / "deploy" / "kubernetes" / "island"
OVERLAY = ISLAND.parent / "overlays" / "island"
POD_SCRIPT = ISLAND / "learner.sh"
LEFT = 143  # the script's own exit code: the processes left with notice


def pod_environment(index: int, **other: str) -> dict[str, str]:
    """Return the environment of a pod's container, as the kubelet makes it; ``other`` are values that an overlay may change."""
    built = kustomize.build(OVERLAY)
    config = next(item for item in built if item["metadata"]["name"] == "datacenter")
    job = next(item for item in built if item["kind"] == "Job")
    values: dict[str, str] = dict(config["data"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        name, value = variable["name"], variable["value"]
        values[name] = other.get(name, re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value))
    return values | other | {"JOB_COMPLETION_INDEX": str(index)}
