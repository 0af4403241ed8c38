"""A log that goes on with versions which fold to other states here: no command takes an older version for its newest one."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.made.syncer_parts import SIZE, Begun, begin, merge, offer

from diloco.errors import MachineError, RunError
from diloco.nats.transport import NatsTransport
from diloco.service.rundir import RunDirectory
from diloco_ops.audit.refold import refold
from diloco_ops.reading.run_reader import RunReader
from diloco_ops.weights import export
from diloco_syncer.owning.owner import FragmentOwner

pytestmark = pytest.mark.services


def reader_of(begun: Begun) -> RunReader:
    """The run as a command reads it."""
    context, directory, transport = begun.context, cast(RunDirectory, None), cast(NatsTransport, begun.context.transport)
    return RunReader(directory, transport, context.run, context.map, context.store, *begun.genesis, True, {}, {})


async def append(owner: FragmentOwner, number: int, *, wrong: bool = False, **changes: Any) -> None:
    """Append a version; with ``wrong`` its owner has a parameter with a bit too many, and goes on from that."""
    if wrong:
        owner.replica.theta[5] += 2.0**-10
    await owner.commit(merge(owner, offer(owner, "ann", -1.0, number, **changes)), 32)


class Recorded:
    """Weights that are written nowhere."""

    def put(self, fragment: object, values: object) -> None:
        pass


@pytest.fixture
async def begun(link: NatsTransport) -> Begun:
    return await begin(link)


async def test_versions_that_no_learner_has_folded_are_refused_until_another_syncer_takes_over(begun: Begun) -> None:
    owner, seen = await begun.taken_over(), reader_of(begun)
    for number in (1, 2):
        await append(owner, number)
    await append(owner, 3, wrong=True)
    said = (
        r"fragment 0: version 3 gives another state on this machine than its log entry states, so reading stops at version 2; "
    )
    with pytest.raises(
        RunError,
        match=said
        + r"the log's newest version is 3; reading continues once another syncer takes the fragment over from syncer-0",
    ):
        await export.write(seen, Recorded(), None, 1)
    with pytest.raises(RunError, match=r"version 3 cannot be read: version 3 gives another state on this machine"):
        await export.write(seen, Recorded(), 3, 1)
    assert [reason.split(",")[0] for reason in (await refold(seen, 0)).wrong] == [
        "version 3 gives another state on this machine than its log entry states"
    ]

    new = await begun.taken_over(context=begun.another("syncer-1"))
    assert (new.chain.version, new.chain.epoch) == (2, 2)
    assert (await export.newest(seen, 0)).theta.tolist() == [2.0] * SIZE
    await append(new, 3)
    assert (await export.newest(seen, 0)).chain.version == 3
    found = await refold(seen, 0)
    assert (found.wrong, len(found.passed_over)) == ([], 1)


async def test_versions_that_learners_went_on_with_are_this_machine_s_fault(begun: Begun) -> None:
    owner, seen = await begun.taken_over(), reader_of(begun)
    await append(owner, 1)
    await append(owner, 2, wrong=True)
    for number in (3, 4):
        await append(owner, number)  # of offers that ann made on the version before
    said = r"reading stops at version 1; the log's newest version is 4; ann accepted the entry"
    for average in (1, 2):
        with pytest.raises(MachineError, match=said):
            await export.write(seen, Recorded(), None, average)
    [reason] = (await refold(seen, 0)).wrong
    assert "newest version is 4; ann accepted the entry" in reason
