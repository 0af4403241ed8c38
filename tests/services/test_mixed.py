"""Islands of several sizes and paces in one run, each granted exactly what it does: none of their messages is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.made.fixtures import Launch
from tests.services.cluster import check_accounts, small, some_versions
from tests.services.secured import guest, make_keys, members, serving
from tests.services.toy import SAMPLES, STEP_S

RUN = "mixed"
SIZES = {"toy-0": 1, "toy-1": 8, "toy-2": 2}  # batches of the smallest in a step
PACES = {"toy-0": 1, "toy-1": 5, "toy-2": 1}  # steps of the fastest in the time of one


async def test_islands_of_all_sizes_are_merged_as_they_say(launch: Launch, tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", RUN, members(3, 2))
    for name, size in SIZES.items():
        entry = keys.roster.identity(name)
        assert entry is not None
        keys.grant(entry.model_copy(update={"batch_tokens": size * SAMPLES, "min_step_s": PACES[name] * STEP_S}))
    with serving(keys, tmp_path / "server") as server:
        cluster = launch(small(tokens=10**9), server.url, RUN)
        cluster.identity = str(keys.path / "identities" / "{name}.identity")

        def begin(share: int) -> None:
            name = f"toy-{share}"
            cluster.toy(share, step_tokens=SIZES[name] * SAMPLES, step_s=PACES[name] * STEP_S)

        for share in range(3):
            begin(share)
        await cluster.begin()
        await some_versions(cluster, 1)
        await asyncio.to_thread(cluster.toys.pop().stop)
        before = cluster.heartbeats["toy-2"][-1].incarnation
        begin(2)  # one that comes back
        await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].incarnation > before, "it is back")
        await some_versions(cluster, 1)

        async with guest(server, keys, "operator") as operator:
            await cluster.use_up(operator.link, hurry=False)  # no learner may be faster than it was granted

        folded = await cluster.folded()
        check_accounts(await cluster.finished_heartbeats(), folded)
        for log in folded:
            found = [member for record in log.versions for member in record.members]
            assert {member.learner for member in found} == SIZES.keys()
            assert all(member.tokens == member.steps * SIZES[member.learner] * SAMPLES for member in found)
        assert not cluster.wronged()
