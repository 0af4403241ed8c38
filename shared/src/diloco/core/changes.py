"""Changes of a run while it goes on: a list that only grows, and what follows from it.

A run's settings stay as it was created with them: their digest is its identity. What an operator or a syncer changes
afterwards is a numbered record, chained to the one before it by its hash, so that everybody who reads the list comes to the
same state, and nobody can take a record out. :class:`Effective` is the fold of the list.

Only what decides neither the hashes nor the bits of what is folded can be set (:data:`SETTABLE`); the token budget, which the
learning rate follows, has an action of its own, and learners' tapes say from which step on each went by which record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.errors import ChainError, FormatError, RunError, SettingsError
from diloco.settings import RunSettings, all_names, changed_settings, nearest
from diloco.wire.messages import MAX_FRAGMENTS, Count, FragmentIndex, Hash, MemberName, Seconds

MAX_CHANGES = 4096
MAX_BYTES = 1 << 19  # of the whole list: half of what a key may hold
MAX_CHANGE_BYTES = 1 << 14
MAX_REASON = 400  # characters, as MAX_AUTHOR
MAX_AUTHOR = 100
_DOMAIN = b"DLC1change\x00"

# a line that can be shown: no control characters
_LINE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
Reason = Annotated[str, Meta(pattern=_LINE, max_length=MAX_REASON)]
Author = Annotated[str, Meta(pattern=_LINE, min_length=1, max_length=MAX_AUTHOR)]
Key = Annotated[str, Meta(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)*\Z", max_length=64)]
Text = Annotated[str, Meta(pattern=_LINE, max_length=200)]
Value = bool | int | float | Text
Norm = Annotated[float, Meta(ge=0)]

SETTABLE = (
    "shards",
    "round.steps",
    "round.overlap_steps",
    "round.quorum",
    "round.grace_factor",
    "round.max_staleness_versions",
    "outer.learning_rate",
    "outer.momentum",
    "log.keyframe_factor",
    "log.keep_keyframes",
    "log.keep_bytes",
    "liveness.pulse_s",
    "liveness.dead_s",
    "liveness.lease_s",
    "liveness.takeover_s",
    "regions.away_s",
    "regions.min_bits",
    "regions.max_pace",
    "quarantine.factor",
    "quarantine.offers",
)
_NEW_RUN = "it decides what every member trains or folds, bit by bit, and with that the run's identity; begin a new run with it"
_WITH_START = "it is settled when services start; stop the run, and go on with diloco up NEW --resume DIR --set {key}=..."
_WITH_START_KEYS = ("log.", "regions.")


class _Action(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all actions; on the wire an array whose first element is its name."""


class Set(_Action, frozen=True, tag="set"):
    """A setting has another value from now on."""

    key: Key
    value: Value


class Tokens(_Action, frozen=True, tag="tokens"):
    """The run's token budget is another one."""

    budget: Annotated[int, Meta(ge=1, le=10**18)]


class Eject(_Action, frozen=True, tag="eject"):
    """A learner takes no part any more: its offers are refused, nobody waits for it, and it ends."""

    learner: MemberName


class Quarantine(_Action, frozen=True, tag="quarantine"):
    """A learner's outer gradients are outliers: as if ejected, but it trains on and may be looked at."""

    learner: MemberName
    fragment: FragmentIndex
    norm: Norm  # of its offer
    threshold: Norm  # what it was above


class Readmit(_Action, frozen=True, tag="readmit"):
    """A learner that was ejected or quarantined takes part again."""

    learner: MemberName


class Rollback(_Action, frozen=True, tag="rollback"):
    """Fragments go back to what they were at a version.

    They are named, since a fragment that is not beyond it by now may be by the time that its owner hears of this.
    """

    version: Count
    fragments: Annotated[list[FragmentIndex], Meta(min_length=1, max_length=MAX_FRAGMENTS)]


Action: TypeAlias = Set | Tokens | Eject | Quarantine | Readmit | Rollback


class Change(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One record of the list."""

    number: Annotated[int, Meta(ge=1, le=MAX_CHANGES)]  # 1, 2, ...
    previous: Hash  # of the record before; of the run's identity for the first
    at_s: Seconds  # Unix time at the author: a label
    author: Author
    reason: Reason
    action: Action

    @property
    def label(self) -> str:
        """Who made it, and why, as messages name it."""
        return f"change {self.number} by {self.author}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Changes:
    """The list as it is stored. Records are kept as the bytes that were hashed."""

    run: bytes  # the run's identity
    records: tuple[Change, ...] = ()
    packed: tuple[bytes, ...] = ()

    @property
    def head(self) -> bytes:
        """What the next record names as the one before it."""
        return blake3(_DOMAIN + (self.packed[-1] if self.packed else self.run)).digest()

    def pack(self) -> bytes:
        """The value that is stored."""
        return msgspec.msgpack.encode(self.packed)

    def extends(self, other: Changes) -> bool:
        """Whether this is ``other``, or goes on from it."""
        return self.packed[: len(other.packed)] == other.packed

    def without_rollbacks(self, version: int, carried_out: Sequence[int]) -> Changes:
        """The list up to the first order that would take a log, which begins again at ``version``, back behind that.

        ``carried_out``: by fragment, the change by which its log was rolled back last.
        """
        for change in self.records:
            action, kept = change.action, change.number - 1
            if not isinstance(action, Rollback) or action.version >= version:
                continue
            if any(number < change.number for index, number in enumerate(carried_out) if index in action.fragments):
                return replace(self, records=self.records[:kept], packed=self.packed[:kept])
        return self

    def then(self, action: Action, *, at_s: float, author: str, reason: str = "") -> Changes:
        """The list with a record more.

        Raises:
            RunError: the reason or the author cannot be stored, or the list is full.
        """
        number = len(self.records) + 1
        try:
            # by way of the wire, which has the bounds
            change = _decode(msgspec.msgpack.encode((number, self.head, at_s, author, reason, action)), f"change {number}")
        except (FormatError, UnicodeEncodeError) as error:
            raise RunError(f"{error}; a reason is one line of at most {MAX_REASON} characters") from None
        longer = replace(self, records=(*self.records, change), packed=(*self.packed, msgspec.msgpack.encode(change)))
        if number > MAX_CHANGES or len(longer.pack()) > MAX_BYTES:
            raise RunError(
                f"the run has {number - 1} changes, and at most {MAX_CHANGES} of {MAX_BYTES} bytes in all are possible; take "
                "the settings that are in force into a new run"
            )
        return longer


def unpack(data: bytes, run: bytes) -> Changes:
    """What :meth:`Changes.pack` gave, checked record by record. ``run``: the run's identity.

    Raises:
        FormatError: it is no such list.
        ChainError: a record does not follow the one before it.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"the run's changes: {len(data)} bytes, at most {MAX_BYTES} are possible")
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the run's changes: {error}") from None
    changes = Changes(run)
    for item in packed:
        number = len(changes.records) + 1
        change = _decode(item, f"change {number}")
        if change.number != number or change.previous != changes.head:
            raise ChainError(
                f"change {number}: expected number {number} after {changes.head.hex()[:16]}, got number {change.number} after "
                f"{change.previous.hex()[:16]}"
            )
        changes = replace(changes, records=(*changes.records, change), packed=(*changes.packed, item))
    return changes


_Packed = Annotated[list[Annotated[bytes, Meta(max_length=MAX_CHANGE_BYTES)]], Meta(max_length=MAX_CHANGES)]


def _decode(data: bytes, what: str) -> Change:
    try:
        change = msgspec.msgpack.decode(data, type=Change)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{what}: {error}") from None
    action = change.action
    numbers = [change.at_s, *(value for value in msgspec.structs.astuple(action) if isinstance(value, float))]
    if not all(map(math.isfinite, numbers)):
        raise FormatError(f"{what}: a number is not finite")
    return change


@dataclass(frozen=True)
class Effective:
    """What is in force after ``number`` changes."""

    settings: RunSettings
    number: int = 0
    ejected: Mapping[str, Change] = field(default_factory=dict)  # by learner: what ejected it
    quarantined: Mapping[str, Change] = field(default_factory=dict)
    rollbacks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # by fragment: the newest change that orders it back, and to which version

    def after(self, change: Change) -> Effective:
        """What is in force once ``change``, the next one, is.

        Raises:
            SettingsError: it sets what cannot be set, or to what cannot be.
        """
        assert change.number == self.number + 1, (change.number, self.number)
        return replace(self._after(change), number=change.number)

    def _after(self, change: Change) -> Effective:
        action, what = change.action, f"change {change.number}"
        if isinstance(action, Set):
            return replace(self, settings=with_setting(self.settings, action.key, action.value, what))
        if isinstance(action, Tokens):
            return replace(self, settings=changed_settings(self.settings, {"tokens": action.budget}, what))
        if isinstance(action, Rollback):
            orders = dict.fromkeys(action.fragments, (change.number, action.version))
            return replace(self, rollbacks=dict(self.rollbacks) | orders)
        ejected = {name: other for name, other in self.ejected.items() if name != action.learner}
        quarantined = {name: other for name, other in self.quarantined.items() if name != action.learner}
        if isinstance(action, Eject):
            ejected[action.learner] = change
        elif isinstance(action, Quarantine):
            quarantined[action.learner] = change
            ejected = dict(self.ejected)  # of a learner that an operator ejected before, nothing changes
        return replace(self, ejected=ejected, quarantined=quarantined)

    @property
    def barred(self) -> frozenset[str]:
        """Learners whose offers are refused, and that nobody waits for."""
        return frozenset(self.ejected) | frozenset(self.quarantined)


def in_force(settings: RunSettings, changes: Sequence[Change]) -> Effective:
    """The fold of changes of a run that was created with ``settings``.

    Raises:
        SettingsError: one of them sets what cannot be set: it was written by another version, or by somebody else.
    """
    effective = Effective(settings)
    for change in changes:
        effective = effective.after(change)
    return effective


def with_setting(settings: RunSettings, key: str, value: Any, source: str) -> RunSettings:
    """Settings with one that may be changed while a run goes on.

    Raises:
        SettingsError: it may not be, and why; it is unknown; or the value is out of range, or contradicts another setting.
    """
    names = all_names()
    if key not in names:
        sections = {name.partition(".")[0] for name in names if "." in name}
        inside = f"; set one of its members, {key}.NAME=VALUE" if key in sections else nearest(key, SETTABLE)
        raise SettingsError(f"{source}: no setting {key!r}{inside}")
    if key not in SETTABLE:
        reason = _WITH_START.format(key=key) if key.startswith(_WITH_START_KEYS) else _NEW_RUN
        raise SettingsError(f"{source}: {key} cannot be changed while the run goes on: {reason}")
    changed = changed_settings(settings, {key: value}, source)
    if changed.round.lockstep != settings.round.lockstep:
        raise SettingsError(
            f"{source}: {key} = {value}: with round.learners_wait, one step a round is another kind of training"
        )
    if key == "round.max_staleness_versions" and settings.merge.against == "current":
        raise SettingsError(
            f"{source}: {key} cannot be changed with merge.against = current: owners keep the values of as many versions, and "
            "with others the same offers would merge otherwise"
        )
    return changed


def described(change: Change) -> tuple[str, dict[str, Any]]:
    """The event that a change is in logs, and its fields."""
    action = change.action
    match action:
        case Set():
            return "settings_changed", {"key": action.key, "value": action.value}
        case Tokens():
            return "settings_changed", {"key": "tokens", "value": action.budget}
        case Eject():
            return "learner_ejected", {"learner": action.learner}
        case Readmit():
            return "learner_readmitted", {"learner": action.learner}
        case Quarantine():
            norms = {"norm": action.norm, "threshold": action.threshold}
            return "learner_quarantined", {"learner": action.learner, "fragment": action.fragment} | norms
        case Rollback():
            return "rollback_ordered", {"version": action.version}


def text_of(change: Change) -> str:
    """What a change does, in a line."""
    _, values = described(change)
    if "key" in values:
        return f"{values['key']} = {values['value']}"
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values())
    return f"{type(change.action).__name__.lower()} {', '.join(shown)}"
