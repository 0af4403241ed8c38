"""A checkpoint of a whole run as a folder, of made-up bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from diloco.settings.presets import run_settings
from diloco_ops.checkpoints import manifest
from diloco_ops.checkpoints.manifest import FragmentCut, Manifest, RunCheckpoint, SavedFile, SavedLearner, SavedStream


def described(name: str, content: bytes) -> SavedFile:
    return SavedFile(name, len(content), blake3(content).hexdigest())


def file_of(learner: str, part: int) -> str:
    return f"{learner}.safetensors" if not part else f"{learner}.part-{part}.safetensors"


def make_checkpoint(path: Path, states: Mapping[str, Sequence[bytes]], *, here: bool, log: bytes = b"log") -> RunCheckpoint:
    """Write a checkpoint of learners with these states, by the parts of each; ``here``: its files lie in the folder, too."""
    path.mkdir(parents=True)
    streams = {}
    for name, stream, content in (("log", "DILOCO_run_LOG", log), ("bucket", "KV_DILOCO_run", b"bucket")):
        (path / f"{name}.snapshot").write_bytes(content)
        streams[name] = SavedStream(described(f"{name}.snapshot", content), {"name": stream}, {"last_seq": 9})
    learners = {}
    for name, contents in states.items():
        saved = [described(f"learners/{file_of(name, part)}", content) for part, content in enumerate(contents)]
        learners[name] = SavedLearner(saved[0], 5, [1], saved[1:])
        for file, content in zip(saved, contents, strict=True) if here else ():
            (path / file.file).parent.mkdir(exist_ok=True)
            (path / file.file).write_bytes(content)
    unsigned = Manifest(
        manifest.FORMAT, manifest.OF_OTHERS, "0.2.0", "run", run_settings("decoupled").model_dump(), None, "", 0.0,
        [FragmentCut(1, 2, "")], streams["log"], streams["bucket"], learners, "", None, 7, ["carl"],
    )  # fmt: skip
    signed = msgspec.structs.replace(unsigned, hash=unsigned.right_hash())
    (path / manifest.MANIFEST).write_bytes(msgspec.json.encode(signed))
    return manifest.load(path)
