"""Changes of a run while it goes on: a list that only grows, and its fold.

A run keeps the settings with which it was created: their digest is its identity. A later change by an operator or a syncer is
a numbered record, chained to the one before it by its hash. So all readers of the list come to the same state, and none can
take a record out. :class:`Effective` is the fold of the list.

Only settings on which neither hashes nor bits of versions depend can be set (:data:`SETTABLE`). The token budget, which the
learning rate follows, has an action of its own; learners' tapes have the step from which on each record was in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.core.run.quarantine import Outlying, Statements, outlying
from diloco.errors import ChainError, FormatError, RunError, SettingsError
from diloco.settings.presets import changed_settings
from diloco.settings.run import RunSettings
from diloco.settings.validation import all_names, nearest
from diloco.wire.fields import MAX_FRAGMENTS, Count, FragmentIndex, Hash, MemberName, Seconds

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
    "liveness.heartbeat_s",
    "liveness.dead_s",
    "liveness.lease_s",
    "liveness.takeover_s",
    "regions.away_s",
    "regions.min_bits",
    "regions.max_pace",
    "quarantine.factor",
    "quarantine.offers",
    "quarantine.merge_factor",
)
_NEW_RUN = "it is part of the run's identity, because every member's results depend on it; begin a new run with it"
_WITH_START = (
    "services read it when they start; stop the run, and continue with diloco up --run-dir NEW --resume DIR --set {key}=..."
)
_WITH_START_KEYS = ("log.", "regions.")


class _Action(Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of all actions; on the wire an array whose first element is its name."""


class Set(_Action, frozen=True, tag="set"):
    """Give a setting another value."""

    key: Key
    value: Value


class Tokens(_Action, frozen=True, tag="tokens"):
    """Give the run another token budget."""

    budget: Annotated[int, Meta(ge=1, le=10**18)]


class Eject(_Action, frozen=True, tag="eject"):
    """Exclude a learner: its offers are refused, it is not waited for, and it ends."""

    learner: MemberName


class Quarantine(_Action, frozen=True, tag="quarantine"):
    """Exclude a learner whose outer gradients are outliers; it trains on, so that it can be examined."""

    learner: MemberName
    fragment: FragmentIndex
    norm: Norm  # of its offer
    threshold: Norm  # that the norm exceeds


class Readmit(_Action, frozen=True, tag="readmit"):
    """Let an ejected or quarantined learner take part again."""

    learner: MemberName


class Rollback(_Action, frozen=True, tag="rollback"):
    """Take fragments back to their states at a version.

    The record names the fragments, since others may pass that version before their owners read it.
    """

    version: Count
    fragments: Annotated[list[FragmentIndex], Meta(min_length=1, max_length=MAX_FRAGMENTS)]


class Repair(_Action, frozen=True, tag="repair"):
    """Have a fragment go on from a version, the newest one or an earlier one, by an entry behind all that its subject holds."""

    fragment: FragmentIndex
    version: Count
    sequence: Count  # label: of the message for which it is repaired; 0: none


Action: TypeAlias = Set | Tokens | Eject | Quarantine | Readmit | Rollback | Repair


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
        """Author and reason, as messages name them."""
        return f"change {self.number} by {self.author}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Changes:
    """The stored list. Records are kept as the bytes that were hashed."""

    run: bytes  # the run's identity
    records: tuple[Change, ...] = ()
    packed: tuple[bytes, ...] = ()

    @property
    def head(self) -> bytes:
        """Hash of the last record, which the next one names as its previous one."""
        return blake3(_DOMAIN + (self.packed[-1] if self.packed else self.run)).digest()

    def pack(self) -> bytes:
        """Return the stored form."""
        return msgspec.msgpack.encode(self.packed)

    def extends(self, other: Changes) -> bool:
        """Whether this list is ``other``, or continues it."""
        return self.packed[: len(other.packed)] == other.packed

    def without_rollbacks(self, version: int, carried_out: Sequence[int]) -> Changes:
        """Return the list before the first order to roll back behind ``version``, or to repair, that the log does not have.

        The log begins again at ``version``. ``carried_out``: by fragment, the change by which its log was rolled back last.
        """
        for change in self.records:
            action, kept = change.action, change.number - 1
            if isinstance(action, Repair):
                fragments = [action.fragment]
            elif isinstance(action, Rollback) and action.version < version:
                fragments = action.fragments
            else:
                continue
            if any(number < change.number for index, number in enumerate(carried_out) if index in fragments):
                return replace(self, records=self.records[:kept], packed=self.packed[:kept])
        return self

    def then(self, action: Action, *, at_s: float, author: str, reason: str = "") -> Changes:
        """Return the list with one more record.

        Raises:
            RunError: the reason or the author cannot be stored, or the list is full.
        """
        number = len(self.records) + 1
        try:
            # encoded and decoded, which checks the bounds
            change = _decode(msgspec.msgpack.encode((number, self.head, at_s, author, reason, action)), f"change {number}")
        except (FormatError, UnicodeEncodeError) as error:
            raise RunError(f"{error}; a reason is one line of at most {MAX_REASON} characters") from None
        longer = replace(self, records=(*self.records, change), packed=(*self.packed, msgspec.msgpack.encode(change)))
        if number > MAX_CHANGES or len(longer.pack()) > MAX_BYTES:
            raise RunError(
                f"the run has {number - 1} changes, at most {MAX_CHANGES} changes of {MAX_BYTES} bytes in all are "
                "allowed; begin a new run with the settings that are in force"
            )
        return longer


def unpack(data: bytes, run: bytes) -> Changes:
    """Return the list that :meth:`Changes.pack` wrote, checked record by record. ``run``: the run's identity.

    Raises:
        FormatError: the bytes are no such list.
        ChainError: a record does not follow the one before it.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"the run's changes: {len(data)} bytes, at most {MAX_BYTES} are possible")
    try:
        packed = _PACKED_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the run's changes: {error}") from None
    changes, fault = _joined(packed, run)
    if fault is not None:
        raise fault
    return changes


_PACKED_DECODER = msgspec.msgpack.Decoder(
    Annotated[list[Annotated[bytes, Meta(max_length=MAX_CHANGE_BYTES)]], Meta(max_length=MAX_CHANGES)]
)
_CHANGE_DECODER = msgspec.msgpack.Decoder(Change)


def readable(data: bytes, run: bytes, settings: RunSettings) -> Changes:
    """Return the changes before the first one of a stored list that is damaged, does not follow, or cannot be in force.

    Of what is no list there are none. ``settings``: those that the run was created with.
    """
    try:
        listed, _ = _joined(_PACKED_DECODER.decode(data[:MAX_BYTES]), run)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Changes(run)
    effective = Effective(settings)
    for kept, change in enumerate(listed.records):
        try:
            effective = effective.after(change)
        except SettingsError:
            return replace(listed, records=listed.records[:kept], packed=listed.packed[:kept])
    return listed


def _joined(packed: Sequence[bytes], run: bytes) -> tuple[Changes, FormatError | ChainError | None]:
    """Return the list of these records up to the first one that is damaged or does not follow, and what is wrong with that."""
    changes = Changes(run)
    for item in packed:
        number = len(changes.records) + 1
        try:
            change = _decode(item, f"change {number}")
        except FormatError as error:
            return changes, error
        if change.number != number or change.previous != changes.head:
            return changes, ChainError(
                f"change {number}: expected number {number} after {changes.head.hex()[:16]}, got number {change.number} after "
                f"{change.previous.hex()[:16]}"
            )
        changes = replace(changes, records=(*changes.records, change), packed=(*changes.packed, item))
    return changes, None


def _decode(data: bytes, what: str) -> Change:
    try:
        change = _CHANGE_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{what}: {error}") from None
    action = change.action
    numbers = [change.at_s, *(value for value in msgspec.structs.astuple(action) if isinstance(value, float))]
    if not all(map(math.isfinite, numbers)):
        raise FormatError(f"{what}: a number is not finite")
    return change


@dataclass(frozen=True)
class Effective:
    """State of a run after ``number`` changes: settings in force, and excluded learners."""

    settings: RunSettings
    number: int = 0
    ejected: Mapping[str, Change] = field(default_factory=dict)  # by learner: the change that ejected it
    quarantined: Mapping[str, Change] = field(default_factory=dict)  # by an operator, or a syncer of an earlier version
    readmitted: Mapping[str, int] = field(default_factory=dict)  # by learner: the number of the change that did so last
    outlying: Outlying = field(default_factory=Outlying)  # what syncers have stated of outliers, as of these changes
    rollbacks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # by fragment: the newest change that orders it back, and to which version
    repairs: Mapping[int, tuple[int, Repair]] = field(default_factory=dict)  # by fragment: the newest such change
    features: frozenset[str] | None = None  # that the run requires of its members; None: those of ``settings``

    def after(self, change: Change) -> Effective:
        """Return the state after ``change``, the next one.

        Raises:
            SettingsError: it sets a fixed setting, or an impossible value.
        """
        assert change.number == self.number + 1, (change.number, self.number)
        return replace(self._after(change), number=change.number)

    def _after(self, change: Change) -> Effective:
        action, what = change.action, f"change {change.number}"
        if isinstance(action, Set):
            return self._with(with_setting(self.settings, action.key, action.value, what), what)
        if isinstance(action, Tokens):
            return replace(self, settings=changed_settings(self.settings, {"tokens": action.budget}, what))
        if isinstance(action, Rollback):
            orders = dict.fromkeys(action.fragments, (change.number, action.version))
            return replace(self, rollbacks=dict(self.rollbacks) | orders)
        if isinstance(action, Repair):
            return replace(self, repairs=dict(self.repairs) | {action.fragment: (change.number, action)})
        ejected = {name: other for name, other in self.ejected.items() if name != action.learner}
        quarantined = {name: other for name, other in self.quarantined.items() if name != action.learner}
        readmitted = self.readmitted
        if isinstance(action, Eject):
            ejected[action.learner] = change
        elif isinstance(action, Quarantine):
            quarantined[action.learner] = change
            ejected = dict(self.ejected)  # a learner that an operator ejected before stays ejected
        else:
            readmitted = dict(readmitted) | {action.learner: change.number}
        return replace(self, ejected=ejected, quarantined=quarantined, readmitted=readmitted)

    def _with(self, settings: RunSettings, what: str) -> Effective:
        features = frozenset(self.settings.requires) if self.features is None else self.features
        lacking = sorted(set(settings.requires) - features)
        if lacking:
            raise SettingsError(
                f"{what}: the run does not require {', '.join(lacking)} of its members, as it would with that setting; begin a "
                "new run with it"
            )
        return replace(self, settings=settings, features=features)

    def judged(self, statements: Statements, owners: Sequence[str] | None) -> Effective:
        """Return the same with what syncers have stated of outliers; ``owners``: by fragment, or None if they are not known."""
        if not self.settings.quarantine.factor or not statements:
            return replace(self, outlying=Outlying())
        found = outlying(statements, owners, self.readmitted, number=self.number, judged_by_all=self.settings.regions.merge)
        return replace(self, outlying=found)

    @property
    def excluded(self) -> frozenset[str]:
        """Excluded learners: their offers are not merged, and they are not waited for."""
        return frozenset(self.ejected) | frozenset(self.quarantined) | frozenset(self.outlying.quarantined)

    @property
    def on_trial(self) -> frozenset[str]:
        """Excluded learners whose offers are judged on: sound ones end the quarantine."""
        return frozenset(self.outlying.quarantined) - self.ejected.keys() - self.quarantined.keys()

    def quarantines(self) -> dict[str, str]:
        """Return why each quarantined learner is, by name."""
        found = {name: outlier.label for name, outlier in self.outlying.quarantined.items()}
        return dict(sorted((found | {name: change.label for name, change in self.quarantined.items()}).items()))


def in_force(settings: RunSettings, changes: Sequence[Change]) -> Effective:
    """Fold the changes of a run that was created with ``settings``.

    Raises:
        SettingsError: one of them sets a fixed setting, so another version or a stranger wrote it.
    """
    effective = Effective(settings)
    for change in changes:
        effective = effective.after(change)
    return effective


def with_setting(settings: RunSettings, key: str, value: Any, source: str) -> RunSettings:
    """Return settings with another value of one that may be changed while a run goes on.

    Raises:
        SettingsError: the setting is fixed (with the reason) or unknown, or the value is out of range or contradicts another.
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
            f"{source}: {key} = {value}: with round.learners_wait, a change between one step per round and several "
            "changes the kind of training; begin a new run with it"
        )
    if key == "round.max_staleness_versions" and settings.merge.against == "current":
        raise SettingsError(
            f"{source}: {key} cannot be changed with merge.against = current: owners keep the values of that many "
            "versions, and the same offers would merge differently with another number"
        )
    return changed


def described(change: Change) -> tuple[str, dict[str, Any]]:
    """Return a change as an event of the logs: its name and its fields."""
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
        case Repair():
            return "repair_ordered", {"fragment": action.fragment, "version": action.version, "sequence": action.sequence}


def text_of(change: Change) -> str:
    """Describe a change in a line."""
    _, values = described(change)
    if "key" in values:
        return f"{values['key']} = {values['value']}"
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values.values())
    return f"{type(change.action).__name__.lower()} {', '.join(shown)}"
