"""How far norms of outer gradients stand out in a run: from which ``quarantine.factor`` on nobody would have been quarantined.

    diloco up --run-dir runs/mixed --set log.archive=true --slow learner-3=5
    python bench/outliers.py runs/mixed

The largest ratio of a merged offer's norm to what the rule compares it with (``core/outliers.py``), by learner, where above 1.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from pathlib import Path

from diloco import verify
from diloco.core.outliers import Norms, norm_of
from diloco.log import Entry
from diloco.outside import opened
from diloco.settings import QuarantineSettings


async def ratios(path: Path) -> dict[str, float]:
    """The largest ratio of each learner."""
    largest: dict[str, float] = defaultdict(float)
    async with opened(path) as outside:
        for fragment in outside.map.fragments:
            entries: list[Entry] = []
            await verify.read(outside, fragment.index, entries.append)
            norms, heard = Norms(), set[str]()
            for entry in entries:
                offers = []
                for member in entry.record.members:
                    archived = await outside.log.archived(fragment.index, member.learner, member.incarnation, member.number)
                    if archived is not None:
                        offer, body = archived
                        offers.append((offer, norm_of(body, fragment.size, offer.bits)))
                        heard.add(member.learner)
                for found in norms.judge(offers, heard, QuarantineSettings(factor=1.0)):
                    largest[found.learner] = max(largest[found.learner], found.norm / found.threshold)
    return dict(largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    for learner, ratio in sorted(asyncio.run(ratios(parser.parse_args().directory)).items()):
        print(f"{learner}: {ratio:.2f}")


if __name__ == "__main__":
    main()
