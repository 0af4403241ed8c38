"""A run of toys that is over, for those who look at what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.pace import scaled_s
from tests.services.cluster import Cluster, small, some_versions
from tests.services.forking import Nursery

from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco_ops.broker.server import Server
from diloco_ops.reading.run_reader import read_chains


@dataclass
class Finished:
    """A run that is over: its directory, its server stopped."""

    path: Path
    state_hashes: list[str]

    def tape(self, name: str) -> Path:
        return self.path / "tapes" / f"{name}.tape"


async def finish(nursery: Nursery, path: Path) -> Finished:
    """Train three toys to the end, one of which is killed and begun again."""
    settings = small(
        tokens=10**9,
        log__keyframe_factor=0.2,
        log__keep_keyframes=1000,
        log__archive=True,
        liveness__dead_s=scaled_s(1.0),  # so long do rounds wait for the one that is killed
    )
    server = Server(path / "nats")
    server.start()
    cluster = Cluster(nursery, path, server.url, "verified", settings)

    async def train(steps: int) -> None:
        """Have every learner take more steps than so many in its life, and three versions of every fragment be made."""
        cluster.gate.open()
        await some_versions(cluster, 3)
        await cluster.until(lambda: all(p[-1].step > steps for p in cluster.heartbeats.values()), f"more than {steps} steps")

    try:
        cluster.gate.close()
        for share in range(2):
            cluster.toy(share)
        cluster.coordinator()
        cluster.syncers()
        await cluster.link()
        await cluster.all_ready()
        killed = cluster.toy_process(2)
        await cluster.until(lambda: bool(cluster.heartbeats.get("toy-2")), "the process has joined")
        await train(25)
        killed.kill()
        first = cluster.heartbeats["toy-2"][-1].incarnation
        cluster.gate.close()
        cluster.toy_process(2)
        await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].incarnation > first, "the process has joined again")
        await train(5)
        await cluster.use_up()
        processed = sum(heartbeat.tokens for heartbeat in (await cluster.finished_heartbeats()).values())
        chains = await read_chains((await cluster.store())[0])
    finally:
        await cluster.close()
        server.stop()
    directory = RunDirectory(path, "verified", server.url, None, settings)
    directory.save()
    report = {
        "tokens_processed": processed,
        "fragments": [
            {
                "versions": chain.version,
                "tokens_merged": chain.tokens_merged,
                "tokens_lost": processed - chain.tokens_merged,
                "state_hash": chain.state_hash.hex(),
            }
            for chain in chains
        ],
    }
    rundir.write_json(directory.report, report)
    return Finished(path, [chain.state_hash.hex() for chain in chains])
