"""The merges of a run that its pictures are drawn from: all of them, or of many an even share.

Pure: no clock, no network, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from diloco.wire.entries import Record

MAX_DRAWN = 2500  # as many as a page draws
MAX_MERGES = 2 * MAX_DRAWN  # that are kept: of more, every second one goes
MAX_MEMBERS = 1 << 15  # of all that are kept together: merges of many learners are large


class Merges:
    """Merges in the order in which they were heard of.

    ``every``: versions that it divides are kept. It doubles when there are too many, or too many members in them. An entry that
    an earlier process of this run has counted is passed over: :attr:`newest` has each fragment's newest version. ``missed``:
    versions that the log had dropped before they were read here, the last of them noticed at ``missed_until_s``.
    """

    def __init__(self, fragments: int) -> None:
        self.kept: list[dict[str, Any]] = []
        self._members = 0  # of all that are kept
        self.every = 1
        self.newest = [0] * fragments
        self.missed, self.missed_until_s = 0, 0.0

    def note(self, record: Record, now_s: float) -> None:
        """Take in a version."""
        before = self.newest[record.fragment]
        if record.version <= before:
            return
        if record.version > before + 1:
            self.missed, self.missed_until_s = self.missed + record.version - before - 1, round(now_s, 1)
        self.newest[record.fragment] = record.version
        if record.version % self.every or record.rolled_back is not None:
            return
        self.kept.append(_described(record, now_s))
        self._members += len(record.members)
        self._bound()

    def _bound(self) -> None:
        while len(self.kept) > MAX_MERGES or self._members > MAX_MEMBERS:
            self.every *= 2
            self.kept = _of_versions(self.kept, self.every)
            self._members = _members(self.kept)

    def dump(self) -> dict[str, Any]:
        """Return all that :meth:`load` needs, as JSON has it."""
        missed = {"merges_missed": self.missed, "merges_missed_until_s": self.missed_until_s}
        return {"merges": self.kept[:], "merges_every": self.every, "newest": self.newest[:], **missed}

    @classmethod
    def load(cls, fragments: int, series: Mapping[str, Any]) -> Merges:
        """Continue what an earlier process kept.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is damaged.
        """
        made = cls(fragments)
        made.kept = [dict(merge) | {"version": int(merge["version"])} for merge in series["merges"]]
        made._members = _members(made.kept)  # so that damage is noticed now
        made.every = max(1, int(series.get("merges_every", 1)))  # an older version keeps all, and names no versions
        newest = [int(version) for version in series.get("newest") or _newest(fragments, made.kept)]
        if len(newest) != fragments:
            raise ValueError(f"newest versions of {len(newest)} fragments, expected {fragments}")
        made.newest = newest
        made.missed = int(series.get("merges_missed", 0))
        made.missed_until_s = float(series.get("merges_missed_until_s", 0.0))
        made._bound()  # an older version kept more
        return made


def thinned(series: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return the merges of dumped series, ``most`` of them at most, and as many members in all of them together."""
    kept, every = series["merges"], series["merges_every"]
    while len(kept) > min(MAX_DRAWN, most) or _members(kept) > most:
        every *= 2
        kept = _of_versions(kept, every)
    return {**_missed(series), "merges": kept, "merges_every": every, "newest": series["newest"]}


def _missed(series: Mapping[str, Any]) -> dict[str, Any]:
    return {key: series[key] for key in ("merges_missed", "merges_missed_until_s") if key in series}


def _of_versions(kept: Iterable[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    return [merge for merge in kept if merge["version"] % every == 0]


def _members(kept: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(merge["members"]) for merge in kept)


def _newest(fragments: int, kept: Iterable[Mapping[str, Any]]) -> list[int]:
    newest = [0] * fragments
    for merge in kept:
        newest[int(merge["fragment"])] = max(newest[int(merge["fragment"])], int(merge["version"]))
    return newest


def _described(record: Record, now_s: float) -> dict[str, Any]:
    total = sum(member.weight for member in record.members)
    return {
        "wall_s": round(now_s, 3),
        "fragment": record.fragment,
        "version": record.version,
        "syncer": record.syncer,
        "members": [
            [m.learner, m.weight / total if total else 0.0, record.version - 1 - m.base_version, m.steps]
            for m in record.members
        ],
        "quorum_s": round(record.quorum_s, 4),
        "duration_s": round(record.round_s, 4),
    }
