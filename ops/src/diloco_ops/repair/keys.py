"""The keys of a run's bucket: which of them are damaged, and what each can be made again from.

=====================================  ====================================================================
``run``                                the settings in the directory's ``run.json``, if the log's genesis is of theirs
``protocol``                           this version's, if it reads the log's genesis
``genesis``                            the genesis record in the region's log
``changes``                            its records before the first one that is damaged
``map``                                removed: the next learner that may found sets it, and all compare it with genesis
``founder``, ``owners``,               removed: the services make it again; a value that cannot be read
``coordinator``, ``history``,          counts as none for them anyway
``member.LEARNER``, ``share.LEARNER``,
``refused.LEARNER``
=====================================  ====================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from diloco import __version__
from diloco.control import creation
from diloco.core.run import changes
from diloco.core.tensors.fragments import unpack_map
from diloco.errors import DilocoError, FormatError, MessageError, RunError
from diloco.nats.transport import NatsTransport
from diloco.service.rundir import RunDirectory
from diloco.settings.run import RunSettings
from diloco.settings.validation import parse
from diloco.transport import Bucket
from diloco.wire import framing
from diloco.wire.entries import Genesis
from diloco.wire.subjects import Subjects

CHECKED = ("run", "protocol", "map", "genesis", "changes")  # a process that finds them damaged does not make them again
_REMOVABLE = re.compile(r"founder|owners|coordinator|history|(member|share|refused)\.[a-z0-9_-]+")
_ALL = 2**62  # a sequence beyond all


@dataclass(frozen=True)
class Remedy:
    """A damaged or unwanted key, and the value that it is to have."""

    key: str
    reason: str  # what is wrong with it
    text: str  # what is done
    value: bytes | None  # None: it is removed
    revision: int | None  # that was looked at; None: its value is too large to be read


class LiveBucket:
    """The bucket of a live run, and its genesis record."""

    def __init__(self, directory: RunDirectory, transport: NatsTransport, registry: Bucket, genesis: bytes | None) -> None:
        """``transport`` reaches the control store; ``genesis`` is the frame in the region's log."""
        self.directory, self.transport, self.registry, self._frame = directory, transport, registry, genesis
        self.name = directory.name
        self.identity = framing.run_id(directory.name, directory.settings.digest())
        self._genesis: Genesis | None = None
        self._fault = "the log has no genesis record"
        if genesis is not None:
            try:
                self._genesis, _, _ = framing.unpack(genesis, Genesis, self.identity)
            except MessageError as error:
                self._fault = f"the log's genesis record: {error}"

    async def damaged(self) -> list[Remedy]:
        """Return the keys that services cannot begin with; a key that does not exist yet is none."""
        found = [await self.remedy(key) for key in CHECKED]
        return [remedy for remedy in found if remedy is not None]

    async def remedy(self, key: str) -> Remedy | None:
        """Return what is to become of a key; None: it is as it should be.

        Raises:
            RunError: it is none that can be repaired, or that cannot be made again.
        """
        if key not in CHECKED and not _REMOVABLE.fullmatch(key):
            raise RunError(
                f"run {self.name!r}: no key {key!r} that can be repaired; repairable are {', '.join(CHECKED)}, and "
                "removable founder, owners, coordinator, history, member.LEARNER, share.LEARNER, refused.LEARNER"
            )
        try:
            stored = await self.registry.get(key)
        except FormatError as error:
            return self._made(key, str(error), b"", None)
        if key not in CHECKED:
            return None if stored is None else Remedy(key, "not wanted", "removed; the services make it again", None, stored[1])
        if stored is None:
            return self._made(key, "it is missing", b"", 0) if key in ("run", "genesis") and self._is_missing(key) else None
        try:
            self._check(key, stored[0])
        except (DilocoError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._made(key, str(error), *stored)
        return None

    async def carry_out(self, remedy: Remedy) -> None:
        """Write or remove the key.

        Raises:
            FenceError: another process has set it meanwhile.
        """
        if remedy.value is None:
            bucket = Subjects(self.name).bucket
            below = _ALL if remedy.revision is None else remedy.revision + 1
            await self.transport.purge(f"KV_{bucket}", f"$KV.{bucket}.{remedy.key}", below)
        elif remedy.revision is None:
            await self.registry.put(remedy.key, remedy.value)
        elif remedy.revision == 0:
            await self.registry.create(remedy.key, remedy.value)
        else:
            await self.registry.update(remedy.key, remedy.value, remedy.revision)

    def _is_missing(self, key: str) -> bool:
        """Whether a key that does not exist should."""
        regions = bool(self.directory.settings.regions.names)
        return self._frame is not None and (key == "run" or regions)

    def _check(self, key: str, value: bytes) -> None:
        """Raise an error that says what is wrong with a key's value."""
        match key:
            case "run":
                settings = parse(RunSettings, creation.settings_of(self.name, value), f"run {self.name!r}")
                difference = creation.difference_from(self.directory.settings, settings.model_dump())
                if difference and settings.digest() != self.directory.settings.digest():
                    raise FormatError(f"it has other settings than {self.directory.path}/run.json: {difference}")
            case "protocol":
                msgspec.json.decode(value, type=creation.Protocol)
            case "map":
                digest = unpack_map(value).digest
                if self._genesis is not None and digest != self._genesis.map_digest:
                    raise FormatError(f"it is map {digest.hex()[:16]}, genesis is of {self._genesis.map_digest.hex()[:16]}")
            case "genesis":
                framing.unpack(value, Genesis, self.identity)
                if self._frame is not None and value != self._frame:
                    raise FormatError("it is not the genesis record of the region's log")
            case "changes":
                changes.in_force(self.directory.settings, changes.unpack(value, self.identity).records)

    def _made(self, key: str, reason: str, value: bytes, revision: int | None) -> Remedy:
        match key:
            case "run":
                self._demand_genesis(key)
                return Remedy(key, reason, "written again from run.json", self.directory.settings.canonical(), revision)
            case "protocol":
                self._demand_genesis(key)
                requires = self.directory.settings.requires
                made = msgspec.json.encode(creation.Protocol(framing.VERSION, __version__, requires))
                return Remedy(key, reason, f"set to protocol {framing.VERSION}, which the log speaks", made, revision)
            case "genesis":
                self._demand_genesis(key)
                return Remedy(key, reason, "written again from the region's log", self._frame, revision)
            case "changes":
                kept = changes.readable(value, self.identity, self.directory.settings)
                text = f"its first {len(kept.records)} changes are kept; repeat the later settings and ejections"
                return Remedy(key, reason, text, kept.pack(), revision)
            case "map":
                text = "removed; start a learner that may found the run (diloco keys), which sets the key again"
                return Remedy(key, reason, text, None, revision)
        return Remedy(key, reason, "removed; the services make it again", None, revision)

    def _demand_genesis(self, key: str) -> None:
        """Demand that the log proves which run this is.

        Raises:
            RunError: it does not.
        """
        if self._genesis is None:
            raise RunError(
                f"run {self.name!r}: the key {key!r} cannot be restored, because nothing confirms that this is the run of "
                f"{self.directory.path}/run.json: {self._fault}; go on from a checkpoint (diloco up --resume)"
            )
