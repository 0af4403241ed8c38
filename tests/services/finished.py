"""A run of toys that is over, for those who look at what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.services.cluster import Cluster, small
from tests.services.forking import Nursery
from tests.services.toy import SLOW

from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco_ops.broker.server import Server
from diloco_ops.run_reader import read_chains


@dataclass
class Finished:
    """A run that is over: its directory, its server stopped."""

    path: Path
    state_hashes: list[str]

    def tape(self, name: str) -> Path:
        return self.path / "tapes" / f"{name}.tape"


async def finish(nursery: Nursery, path: Path) -> Finished:
    """Train three toys to the end, one of which is killed and begun again."""
    settings = small(log__keyframe_factor=0.2, log__keep_keyframes=1000, liveness__dead_s=1.0, log__archive=True)
    server = Server(path / "nats")
    server.start()
    cluster = Cluster(nursery, path, server.url, "verified", settings)
    try:
        for share in range(2):
            cluster.toy(share)
        cluster.coordinator()
        cluster.syncers()
        await cluster.link()
        await cluster.all_ready()
        killed = cluster.toy_process(2, slow=SLOW)
        await cluster.until(lambda: bool(cluster.heartbeats.get("toy-2")), "the process has joined")
        with cluster.slowly():
            cluster.gate.open()
            await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].step > 15, "it has trained for some rounds")
            killed.kill()
        first = cluster.heartbeats["toy-2"][-1].incarnation
        cluster.gate.close()
        cluster.toy_process(2)
        await cluster.until(lambda: cluster.heartbeats["toy-2"][-1].incarnation > first, "the process has joined again")
        cluster.gate.open()
        await cluster.ended()
        chains = await read_chains((await cluster.store())[0])
    finally:
        await cluster.close()
        server.stop()
    directory = RunDirectory(path, "verified", server.url, None, settings)
    directory.save()
    report = {
        "tokens_processed": settings.tokens,
        "fragments": [
            {
                "versions": chain.version,
                "tokens_merged": chain.tokens_merged,
                "tokens_lost": settings.tokens - chain.tokens_merged,
                "state_hash": chain.state_hash.hex(),
            }
            for chain in chains
        ],
    }
    rundir.write_json(directory.report, report)
    return Finished(path, [chain.state_hash.hex() for chain in chains])
