"""The versions of a run that ``--version`` asks for: a number, a part of the run's tokens, or the newest ones.

A part of the tokens is a moment of the run: the first one at which so many were merged, as the mean over fragments weighted
by parameters, which is how an evaluator and the report count them. Fragments have different versions then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.core.log.chain import Chain
from diloco.core.run.ledger import fragment_mean
from diloco.errors import RunError, SettingsError
from diloco.log.stream import pass_over
from diloco_ops.audit.lineage import Headed
from diloco_ops.reading import run_reader
from diloco_ops.reading.run_reader import RunReader
from diloco_report.units import count, share

LATEST = "latest"


@dataclass(frozen=True)
class VersionShare:
    """The moment of a run at which the first ``percent`` per cent of its merged tokens were merged."""

    percent: int


WantedVersion = int | VersionShare | None  # None: of each fragment the newest
Versions = int | Sequence[int] | None  # of all fragments one, or of each its own; None: of each the newest


@dataclass(frozen=True)
class ChosenVersions:
    """The versions to read, and of a part of a run how many tokens were merged by then."""

    versions: Versions
    tokens: tuple[int, int] | None = None  # merged by then, and merged in all

    @property
    def after(self) -> str:
        """The end of a line about these versions; empty where no part of a run was asked for."""
        if self.tokens is None:
            return ""
        merged, whole = self.tokens
        return f", after {count(merged)} of {count(whole)} merged tokens ({share(merged / max(1, whole), 1)})"

    @property
    def sentence(self) -> str | None:
        """A sentence that says which part of the run it is; None where no part was asked for."""
        if self.tokens is None:
            return None
        assert isinstance(self.versions, Sequence)
        text = f"versions {min(self.versions)} to {max(self.versions)} of {len(self.versions)} fragments{self.after}"
        return text if any(self.versions) else f"{text}: the model as it was initialised"


def parsed_version(version: str) -> WantedVersion:
    """Return the version that ``--version`` asks for; None: of each fragment the newest.

    Raises:
        SettingsError: it is neither a number, a percentage, nor ``latest``.
    """
    if version == LATEST:
        return None
    digits = version.removesuffix("%")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        raise SettingsError(f"--version {version!r}: expected a number, a percentage such as 50%, or latest")
    if digits == version:
        return int(version)
    if int(digits) > 100:
        raise SettingsError(f"--version {version!r}: expected at most 100%")
    return VersionShare(int(digits))


def version_of(versions: Versions, fragment: int) -> int | None:
    """Return the version of a fragment; None: its newest one."""
    return versions if versions is None or isinstance(versions, int) else versions[fragment]


def stated(versions: Versions) -> str:
    """Return the versions as the metadata of a file has them: one number where all are the same."""
    if versions is None:
        return LATEST
    return (
        str(versions) if isinstance(versions, int) else ",".join(map(str, versions if len({*versions}) > 1 else versions[:1]))
    )


async def choose_versions(seen: RunReader, wanted: WantedVersion) -> ChosenVersions:
    """Return the versions that are asked for.

    Raises:
        RunError: the log cannot be read, or begins after the part of the run that is asked for.
    """
    if not isinstance(wanted, VersionShare):
        return ChosenVersions(wanted)
    chains = await run_reader.read_chains(seen.log)
    stop = max(chain.sequence for chain in chains)
    heads = [head async for head in seen.log.entries.heads(pass_over, 1, stop)] if stop else []
    return at_share(chains, heads, [fragment.size for fragment in seen.map.fragments], wanted.percent)


def at_share(chains: Sequence[Chain], heads: Sequence[Headed], sizes: Sequence[int], percent: int) -> ChosenVersions:
    """Return the versions at the first moment at which so many per cent of the merged tokens were merged.

    Args:
        chains: each fragment's newest head.
        heads: of the entries that the log still has, all fragments' together.
        sizes: parameters by fragment.
        percent: from 0 to 100, of the tokens that are merged by now.

    Raises:
        RunError: more were merged by the first entry that the log still has.
    """
    ends = [chain.tokens_merged for chain in chains]
    line = sorted(_line(chains, heads), key=lambda head: head.sequence)
    versions, merged = [chain.version for chain in chains], ends[:]
    for head in reversed(line):  # back to before the first entry
        record = head.record
        versions[record.fragment] = record.version - record.makes_version
        merged[record.fragment] = record.tokens_merged - sum(member.tokens for member in record.members)
    whole, wanted = fragment_mean(ends, sizes), fragment_mean(ends, sizes) * percent / 100
    before = fragment_mean(merged, sizes)
    if any(versions) and before > wanted:
        raise RunError(
            f"--version {percent}%: the log begins after {share(before / whole, 1)} of the merged tokens; how far back it "
            "goes is set by log.keep_keyframes and log.keep_bytes"
        )
    for head in line:
        if percent < 100 and fragment_mean(merged, sizes) >= wanted:
            break
        versions[head.record.fragment], merged[head.record.fragment] = head.record.version, head.record.tokens_merged
    return ChosenVersions(versions, (round(fragment_mean(merged, sizes)), round(whole)))


def _line(chains: Sequence[Chain], heads: Sequence[Headed]) -> list[Headed]:
    """Return the entries that lead to the newest ones; a wrong one (:mod:`diloco_ops.audit.lineage`) leads to none."""
    known = {head.entry_hash: head for head in heads}
    found = list[Headed]()
    for chain in chains:
        at = chain.head
        while at in known:
            found.append(known.pop(at))
            at = found[-1].record.previous
    return found
