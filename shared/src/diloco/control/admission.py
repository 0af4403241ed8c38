"""Admission: each learner writes under its name which incarnation of it takes part, and with which settings and map."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from diloco.control.creation import KnownRun, find_map
from diloco.control.tables import BucketTable
from diloco.core.tensors.fragments import FragmentMap, check_same_map
from diloco.errors import AdmissionError, FenceError, FormatError
from diloco.nats import grants
from diloco.nats.registry import MAX_WRITTEN_BYTES
from diloco.wire.fields import Count, Hash, MemberName
from diloco.wire.grants import Grant, SignedGrant
from diloco.wire.plain import decoded


class Admission(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Value of a learner's key; syncers merge only offers of this incarnation with the run's digests."""

    learner: MemberName
    incarnation: Count
    settings_digest: Hash
    map_digest: Hash
    grant: SignedGrant | None  # None: the run has no identities


@dataclass(frozen=True)
class LearnerStanding:
    """A learner's standing in a run."""

    incarnation: int | None  # in which it is admitted; None: it is not
    grant: Grant | None = None  # None: the run has no identities
    reason: str = ""  # for which it is not admitted
    lacks_grant: bool = False  # whether that is its grant


async def join(
    run: KnownRun,
    learner: str,
    incarnation: int,
    ours: FragmentMap,
    settings_digest: bytes,
    *,
    founds: bool = True,
    grant: SignedGrant | None = None,
) -> int:
    """Propose the fragment map, or find that it is the run's already, and admit the learner; return its incarnation.

    That is ``incarnation``, or one more than the one admitted before where that is larger: a clock may have jumped back. A
    learner that may not found a run waits until it has a map.

    Raises:
        AdmissionError: this learner's model is not the run's; the first differing tensor is named.
    """
    packed = ours.pack()
    if len(packed) > MAX_WRITTEN_BYTES:
        raise AdmissionError(
            f"run {run.name!r}: the list of this model's {len(ours.tensors)} tensors has {len(packed)} bytes, at most "
            f"{MAX_WRITTEN_BYTES} are allowed; use fewer tensors, or shorter names"
        )
    if not founds or not await _propose(run, packed):
        check_same_map(ours, await find_map(run), run.name)
    if settings_digest != run.created.digest():
        raise AdmissionError(f"run {run.name!r}: learner {learner} was admitted with settings that differ from the run's")

    def admit(before: Admission | None) -> Admission:
        number = incarnation if before is None else max(incarnation, before.incarnation + 1)
        return Admission(learner, number, settings_digest, ours.digest, grant)

    admission = await _table(run, learner).change(admit)  # of two processes of this name the later one is admitted
    assert admission is not None
    return admission.incarnation


async def _propose(run: KnownRun, packed: bytes) -> bool:
    """Propose a fragment map; return whether it has become the run's.

    The key is read first: once a run was founded, its founder may write it no more, and the server answers nothing.
    """
    if await run.registry.get("map") is not None:
        return False
    try:
        await run.registry.create("map", packed)
    except FenceError:
        return False
    return True


async def admitted_incarnation(run: KnownRun, learner: str) -> int | None:
    """Return the incarnation that a learner was admitted in last, to whatever settings and map; None: it never was."""
    try:
        admission, _ = await _table(run, learner).read()
    except FormatError:
        return None
    return None if admission is None else admission.incarnation


async def admitted(run: KnownRun, learner: str, map_digest: bytes) -> LearnerStanding:
    """Return a learner's standing: admitted to this run's settings and map, with a grant where the run has identities."""
    try:
        admission, _ = await _table(run, learner).read()
    except FormatError as error:
        return LearnerStanding(None, reason=str(error))
    if admission is None:
        return LearnerStanding(None, reason="it has not joined")
    if (admission.learner, admission.settings_digest, admission.map_digest) != (learner, run.created.digest(), map_digest):
        return LearnerStanding(None, reason="it has joined with another name, other settings or another fragment map")
    if run.authority is None:
        return LearnerStanding(admission.incarnation)
    try:
        return LearnerStanding(admission.incarnation, grants.opened(admission.grant, run.authority, run.name, learner))
    except FormatError as error:
        return LearnerStanding(None, reason=str(error), lacks_grant=True)


_DECODER = msgspec.msgpack.Decoder(Admission)


def _table(run: KnownRun, learner: str) -> BucketTable[Admission | None]:
    def unpack(stored: bytes | None) -> Admission | None:
        return None if stored is None else decoded(stored, _DECODER)

    return BucketTable(run.registry, f"member.{learner}", unpack, msgspec.msgpack.encode)
