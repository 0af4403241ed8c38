"""How far norms of outer gradients and of merges stand out in a run: which ``quarantine.*`` would tolerate them.

    diloco up --run-dir runs/mixed --set log.archive=true --slow learner-3=5
    python bench/outliers.py runs/mixed

The largest ratio of a merged offer's norm to what the rule compares it with (``core/syncer/outliers.py``), by learner, where
above 1. And the largest ratios of a merge's norm to the usual one (``core/syncer/excess.py``), over all versions of all
fragments. That needs no archive, but all of the log (``--set log.keep_keyframes=1000000``).
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from pathlib import Path

from diloco.core.syncer import excess
from diloco.core.syncer.outliers import Norms
from diloco.log.entries import fold
from diloco.log.stream import LogEntry
from diloco.settings.run import QuarantineSettings
from diloco_ops.audit.refold import refold
from diloco_ops.reading.run_reader import opened


async def ratios(path: Path) -> dict[str, float]:
    """Return the largest ratio of each learner."""
    largest: dict[str, float] = defaultdict(float)
    async with opened(path) as outside:
        for fragment in outside.map.fragments if outside.run.created.log.archive else ():
            entries: list[LogEntry] = []
            await refold(outside, fragment.index, entries.append)
            norms, heard = Norms(), set[str]()
            for entry in entries:
                offers = []
                for member in entry.record.members:
                    archived = await outside.log.archive.offer(
                        fragment.index, member.learner, member.incarnation, member.number
                    )
                    if archived is not None:
                        offer, body = archived
                        offers.append((offer, excess.norm_of(body, fragment.size, offer.bits)))
                        heard.add(member.learner)
                for found in norms.judge(offers, heard, QuarantineSettings(factor=1.0)):
                    largest[found.learner] = max(largest[found.learner], found.norm / found.threshold)
    return dict(largest)


async def moves(path: Path) -> list[tuple[float, int, int]]:
    """Return for each version the ratio of its norm to the usual, with its fragment and number."""
    found: list[tuple[float, int, int]] = []
    async with opened(path) as outside:
        genesis, settings = await outside.log.reader.genesis(), outside.run.created
        assert genesis is not None
        for fragment in outside.map.fragments:
            entries: list[LogEntry] = []
            await refold(outside, fragment.index, entries.append)
            replica = await outside.log.reader.state_at(fragment.index, 0, *genesis)
            for entry in entries:
                record, usual = entry.record, excess.usual(replica)
                if entry.body is not None and record.entry == "version" and usual:
                    moved = excess.norm_of(entry.body, fragment.size, record.bits)
                    steps = max(member.steps for member in record.members)
                    ratio = moved / usual / max(1.0, steps / settings.round.steps)
                    found.append((ratio, fragment.index, record.version))
                fold(replica, entry)
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    for learner, ratio in sorted(asyncio.run(ratios(directory)).items()):
        print(f"{learner}: {ratio:.2f}")
    found = asyncio.run(moves(directory))
    for ratio, fragment, version in found[:8]:
        print(f"fragment {fragment}, version {version}: {ratio:.2f}")
    print(f"{len(found)} merges")


if __name__ == "__main__":
    main()
