"""What ``kubectl kustomize`` makes of a folder, for the few of its features that ``deploy/kubernetes`` uses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
_CLUSTER_WIDE = {"Namespace"}
_KNOWN = {"resources", "configMapGenerator", "generatorOptions", "namespace", "images", "patches"}


def build(folder: Path) -> list[Resource]:
    """All resources of a kustomization.

    Raises:
        ValueError: it uses what is not done here.
    """
    spec = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = spec.keys() - _KNOWN
    if unknown:
        raise ValueError(f"{folder}: {', '.join(unknown)} is not rendered here")
    found: list[Resource] = []
    for name in spec["resources"]:
        path = folder / name
        found += build(path) if path.is_dir() else [dict(item) for item in yaml.safe_load_all(path.read_text())]
    for generated in spec.get("configMapGenerator", ()):
        if spec.get("generatorOptions") != {"disableNameSuffixHash": True}:
            raise ValueError(f"{folder}: names with hashes are not rendered here")
        data = {name: (folder / name).read_text() for name in generated["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    for patch in spec.get("patches", ()):
        change = yaml.safe_load((folder / patch["path"]).read_text())
        (target,) = [item for item in found if _key(item) == _key(change)]
        target.update(_merged(target, change))
    if "namespace" in spec:
        for item in found:
            if item["kind"] not in _CLUSTER_WIDE:
                item["metadata"]["namespace"] = spec["namespace"]
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in spec.get("images", ())}
    return [_with_images(item, images) for item in found]


def _key(item: Resource) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def _merged(old: Any, new: Any) -> Any:
    """A strategic merge: mappings by key, lists of named things by name, changed ones first, all else replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {
            key: _merged(old[key], new[key]) if key in old and key in new else {**old, **new}[key] for key in {**old, **new}
        }
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(item, dict) and "name" in item for item in old + new):
        were = {item["name"]: item for item in old}
        merged = [_merged(were.pop(item["name"], {}), item) for item in new]
        return merged + list(were.values())
    return copy.deepcopy(new)


def _with_images(item: Any, images: dict[str, str]) -> Any:
    if isinstance(item, list):
        return [_with_images(part, images) for part in item]
    if isinstance(item, dict):
        return {key: images.get(part, part) if key == "image" else _with_images(part, images) for key, part in item.items()}
    return item
