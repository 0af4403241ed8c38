"""Publish a run's weights each time that all fragments have ``publish.every_versions`` versions more, and at its end.

``TO/VERSION/`` has the weights of one version of all fragments, ``TO/final/`` those at the run's end. ``TO/latest.json`` names
the newest, and is written after it. Of the numbered ones the last ``publish.keep`` stay. The weights come from the log, as
those of ``diloco export``, so no member of the run waits for the publisher or knows of it.

An error of the store ends nothing: it is logged once, and the newest weights are tried again later, with credentials that are
looked up again.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from diloco.errors import BrokerError, ObjectMissingError, ObjectStoreError, RunError, SettingsError
from diloco.process import files
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.service.rundir import RunDirectory
from diloco.settings.places import StoragePlace, parse_place
from diloco.settings.publish import PublishSettings
from diloco.storage.object_store import ObjectStore
from diloco.storage.opening import open_store
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader, read_chains
from diloco_ops.weights import export, in_place, model_files
from diloco_ops.weights.export import ExportRequest
from diloco_ops.weights.versions import Versions

FINAL, LATEST_NAME = "final", "latest.json"
NUMBERED = re.compile(r"[0-9]{8,}", re.ASCII)  # the folder of a version
MOST_LATEST_BYTES = 1 << 16
DRAFTS = "publishing"  # folder of a run's directory
STATE = "publishing-state.json"  # beside it: what `diloco up` shows
LOOK_S = 1.0  # between looks at the log: small beside the time that weights take to be sent
RETRY_S, RETRY_MAX_S = 5.0, 60.0  # pauses after an error
END_S = 60.0  # after the run's end the final weights are tried for so long


class Publisher:
    """Publishes the weights of the run in a directory until it is over, as ``wanted`` says."""

    def __init__(self, directory: RunDirectory, wanted: PublishSettings, log: Logger) -> None:
        self.directory, self.log, self.wanted = directory, log, wanted
        self.place = parse_place(self.wanted.to, "publish.to =")
        self._newest = 0  # version that was published, or cannot be any more
        self._failing, self._waiting = Complaint(log), Complaint(log)
        self._pause_s = RETRY_S
        self._said_by_task = functools.cache(model_files.facts_of)  # asking takes a process

    async def run(self) -> None:
        """Publish until the run is over.

        Raises:
            ObjectStoreError, SettingsError: the final weights could not be published.
        """
        shutil.rmtree(self.directory.path / DRAFTS, ignore_errors=True)  # of a process that was killed
        self._tell()
        self._newest = await self._newest_there()
        while True:
            try:
                async with run_reader.reached(self.directory.path):  # else a server would be started over a copy
                    pass
                async with run_reader.opened(self.directory.path) as seen:
                    await self._follow(seen)
                    return
            except BrokerError as error:
                self._waiting.warn("publisher_waits", reason=str(error))
            except RunError as error:  # it has no version yet
                self.log.debug("publisher_waits", reason=str(error))
            await asyncio.sleep(LOOK_S)

    async def _newest_there(self) -> int:
        """Return the newest version that an earlier process of this run published; 0: none, or it cannot be known."""
        try:
            store = await asyncio.to_thread(open_store, self.place)
            return int((await asyncio.to_thread(_read_latest, store, self.place))["folder"])
        except (ObjectStoreError, SettingsError, ValueError, LookupError, TypeError):
            return 0

    async def _follow(self, seen: RunReader) -> None:
        """Publish what becomes due until the run is over and its final weights are published."""
        over_s: float | None = None
        while True:
            chains = await read_chains(seen.log)
            self._waiting.over()
            version = min((chain.version for chain in chains), default=0)
            due = version // self.wanted.every_versions * self.wanted.every_versions
            is_over = bool(chains) and all(chain.closed for chain in chains)
            try:
                if is_over:
                    over_s = over_s or time.monotonic()
                    await self._publish(seen, FINAL, None)
                    return
                if due > self._newest:
                    await self._publish(seen, f"{due:08d}", due)
                    self._newest = due
            except RunError as error:  # the log was shortened beyond that version meanwhile
                self.log.warning("version_not_published", version=due, reason=str(error))
                self._newest = due
            except (ObjectStoreError, SettingsError, OSError) as error:
                self._note_failure(str(error))
                if over_s is not None and time.monotonic() - over_s > END_S:
                    raise ObjectStoreError(
                        f"the final weights are not published: {error}; when that is fixed: diloco export "
                        f"{self.directory.path} {self.place.below(FINAL)}"
                    ) from None
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
            else:
                await asyncio.sleep(LOOK_S)

    def _note_failure(self, reason: str) -> None:
        self._failing.warn("publishing_failed", place=str(self.place), reason=reason)
        self._tell(failure=reason)

    def _tell(self, **values: Any) -> None:
        files.replace_text(self.directory.path / STATE, json.dumps({"failure": None} | values))

    async def _publish(self, seen: RunReader, folder: str, versions: Versions) -> None:
        """Write weights on this machine, and send them.

        Raises:
            RunError: the log does not have the version.
            ObjectStoreError: the store cannot be reached or refuses.
            SettingsError: it is not configured, or the task says nothing that the format needs.
            OSError: the disk is full.
        """
        began_s = time.monotonic()
        draft = self.directory.path / DRAFTS / folder
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.parent.mkdir(exist_ok=True)
            made = draft
            if self.wanted.format == "safetensors":
                draft.mkdir()
                made = draft / "model.safetensors"
            written = await export.export_versions(seen, made, self._asked(), versions, self._said_by_task)
            latest = {
                "run": seen.run.name,
                "identity": seen.run.identity.hex(),
                "folder": folder,
                "versions": [min(written), max(written)],
                "format": self.wanted.format,
                "published_at_s": time.time(),
            }
            await asyncio.to_thread(send, draft, self.place, latest, self.wanted.keep)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._failing.over()
        self._pause_s = RETRY_S
        self._tell(newest=folder)
        self.log.info("published", place=str(self.place.below(folder)), took_s=round(time.monotonic() - began_s, 3))

    def _asked(self) -> ExportRequest:
        return ExportRequest(
            format=self.wanted.format,
            version=None,
            average=1,
            precision="float32",
            names=None,
            config=None,
            shard_bytes=None,
        )


def failures(directory: Path, name: str) -> dict[str, str]:
    """Return by the publisher's name why it cannot publish now, for a run's status; empty if it can."""
    try:
        reason = json.loads((directory / STATE).read_text())["failure"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return {name: str(reason)} if reason else {}


def send(draft: Path, place: StoragePlace, latest: dict[str, Any], keep: int) -> None:
    """Send a folder of weights, then name it as the latest, then drop this run's numbered folders beyond the newest ``keep``.

    ``latest.json`` lists the folders that this run has published, and no other ones are dropped.

    Raises:
        ObjectStoreError: the store cannot be reached or refuses.
    """
    store, folder = open_store(place), place.below(latest["folder"])
    store.send([(folder.below(name).key, path) for name, path in in_place.files_of(draft).items()])
    own = sorted({*_published(store, place, latest.get("identity")), latest["folder"]})
    dropped = [name for name in own if NUMBERED.fullmatch(name)][:-keep]
    _write_latest(store, place, latest, own)
    for name in dropped:
        prefix = place.below(name).key
        store.delete([each.key for each in store.list(prefix) if each.key.startswith(f"{prefix}/")])
    if dropped:
        _write_latest(store, place, latest, [name for name in own if name not in dropped])


def _write_latest(store: ObjectStore, place: StoragePlace, latest: dict[str, Any], folders: list[str]) -> None:
    store.put(place.below(LATEST_NAME).key, json.dumps(latest | {"folders": folders}, indent=1).encode())


def _read_latest(store: ObjectStore, place: StoragePlace) -> dict[str, Any]:
    """Return what ``latest.json`` states.

    Raises:
        ObjectStoreError, ValueError: it is not there, or damaged.
    """
    found = store.head(place.below(LATEST_NAME).key)
    latest = json.loads(bytes(store.get(found, 0, min(found.size_bytes, MOST_LATEST_BYTES))))
    if not isinstance(latest, dict):
        raise ValueError(f"{LATEST_NAME} is no table")
    return latest


def _published(store: ObjectStore, place: StoragePlace, identity: object) -> list[str]:
    """Return the folders that the run with this identity has published, as far as ``latest.json`` lists them."""
    try:
        latest = _read_latest(store, place)
    except (ObjectMissingError, ValueError):
        return []
    folders = latest.get("folders") if latest.get("identity") == identity else None
    if not isinstance(folders, list):
        return []
    return [name for name in folders if isinstance(name, str) and (name == FINAL or NUMBERED.fullmatch(name))]
