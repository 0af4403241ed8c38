"""Make a recording of a live run, from its learners' tapes and its log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from diloco.core.run.lives import Life
from diloco.errors import DataError
from diloco.process.tape import load_all
from diloco.wire import framing
from diloco.wire.entries import Record
from diloco_lab.paces.recording import RecordedLearner, Recording
from diloco_ops.reading.run_reader import RunReader, opened


async def record(directory: Path, about: str) -> Recording:
    """Return the times of a run's learners and syncers; ``about`` says which run it was.

    Raises:
        RunError: there is no run, or a tape in its directory cannot be read.
        BrokerError: its log cannot be reached.
        DataError: a learner's tape has no lengths of steps, or no offers.
    """
    async with opened(directory) as reader:
        tapes, _ = load_all(directory, reader.run.identity)
        commits_ms, members, versions = await _versions(reader)
        names = reader.directory.learner_names
    read = {tape.name: tape.lives() for tape in tapes if tape.name in names}
    lives = {name: read[name] for name in names if read.get(name)}
    if not versions or not lives:
        raise DataError(f"{directory}: {versions} versions and {len(lives)} learners' tapes, expected some of both")
    first_ms = min(own[0].start.at_ms for own in lives.values())
    learners = [learner(directory, name, own, first_ms, members[name] / versions) for name, own in lives.items()]
    return Recording(about=about, commits_ms=commits_ms, learners=learners)


async def _versions(reader: RunReader) -> tuple[list[int], Counter[str], int]:
    """Return how long each version took to be stored, how many each learner is in, and how many there are."""
    commits_ms: list[int] = []
    members: Counter[str] = Counter()
    versions = 0
    for fragment in reader.map.fragments:
        subject, end = reader.log.subjects.record(fragment.index), await reader.log.reader.end_sequence(fragment.index)
        async for stored in reader.transport.pull(reader.log.subjects.log_stream, [subject], 1):
            entry = framing.unpack(stored.data, Record, reader.run.identity)[0]
            if entry.members:
                versions += 1
                members.update(member.learner for member in entry.members)
                commits_ms.append(max(0, round(1000 * (stored.stored_at_s - entry.committed_at_s))))
            if stored.sequence >= end:
                break
    return commits_ms, members, versions


def learner(directory: Path, name: str, lives: list[Life], first_ms: int, versions: float) -> RecordedLearner:
    """Return the times of a learner by its lives, which are in order; ``versions`` is its share of them.

    Raises:
        DataError: there are no lengths of steps, or none of offers.
    """
    steps_ms = [step_ms for life in lives for step_ms in life.step_ms]
    offers_ms = [sent_ms for life in lives for sent_ms in life.sent_ms]
    if not steps_ms or not offers_ms:
        raise DataError(
            f"{directory}: the tape of {name} has {len(steps_ms)} lengths of steps and {len(offers_ms)} of offers, expected "
            "some of both: record a run of this version that took longer"
        )
    begun_ms = [life.start.at_ms - first_ms for life in lives]
    ended_ms = [begin_ms + sum(life.step_ms) for begin_ms, life in zip(begun_ms, lives, strict=True)]
    return RecordedLearner(
        name=name,
        versions=round(versions, 4),
        begins_ms=begun_ms[0],
        away_ms=list(zip(ended_ms[:-1], begun_ms[1:], strict=True)),
        steps_ms=steps_ms,
        offers_ms=offers_ms,
    )
