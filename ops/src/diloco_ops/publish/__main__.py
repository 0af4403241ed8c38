"""``python -m diloco_ops.publish --config FILE``: publish the weights of the run in ``directory``, as ``publish.to`` says.

``diloco up`` starts it beside its services, with the settings that the run's directory has. For a run that others started, the
directory is that of ``diloco attach``, and the file has a table ``[publish]`` with ``to`` and the other settings of that name.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tomllib
from pathlib import Path

from diloco.errors import SettingsError
from diloco.process import observe
from diloco.service import rundir
from diloco.settings.publish import PublishSettings
from diloco.settings.validation import parse
from diloco_ops.checkpoints.in_bucket import lower_priority
from diloco_ops.publish import owner
from diloco_ops.publish.publisher import Publisher


def _main() -> int:
    parser = argparse.ArgumentParser(prog="diloco_ops.publish")
    parser.add_argument("--config", type=Path, required=True)
    config = parser.parse_args().config
    try:
        given = tomllib.loads(config.read_text(encoding="utf-8"))
        path = Path(given["directory"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingsError(f'{config}: expected TOML with directory = "a run\'s directory": {error}') from None
    lower_priority()
    directory = rundir.load(path)
    wanted = directory.settings.publish
    if "publish" in given:
        wanted = parse(PublishSettings, given["publish"], f"{config}: publish")
    if not wanted.to:
        raise SettingsError(f'{config}: names no place: set to = "s3://BUCKET/FOLDER" in its table [publish]')
    observe.configure("publisher", directory.name, file=path / "logs" / "publisher.jsonl")
    owner.write(path, owner.claim(wanted.to, directory.name, owner.read(path)))
    asyncio.run(Publisher(directory, wanted, observe.get_logger()).run())
    return 0


if __name__ == "__main__":
    sys.exit(observe.run_main(_main, "diloco publish"))
