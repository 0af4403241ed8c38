"""Past states of a fragment that an owner needs: bases that offers are taken against, and versions to go back to."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.fold import Replica
from diloco.core.syncer import merging
from diloco.core.syncer.round import Merge, Round
from diloco.errors import BrokerError, RunError, UnmergeableError
from diloco.process.retry import until_available
from diloco.wire.entries import Genesis
from diloco_syncer.context import Context

Vector = NDArray[np.float32]


async def state_at(context: Context, index: int, version: int, genesis: tuple[Genesis, bytes]) -> Replica:
    """Return a fragment at a version: from the own region's log, or from another one's, which may go back further.

    Raises:
        RunError: none of them has it.
        RewoundError: the log lost its last entries.
    """
    try:
        return await until_available(partial(context.store.reader.state_at, index, version, *genesis), context.log)
    except RunError:
        for log in context.regions.others if context.regions is not None else ():
            with contextlib.suppress(RunError, BrokerError):
                return await log.reader.state_at(index, version, *genesis)
        raise


class BaseValues:
    """The values that merges take offers against with ``merge.against = current``, float32 [size] by version.

    These are the newest version's and those of ``round.max_staleness_versions`` before it. An owner has the values of
    versions after which it made another one. It reads older ones from the log when an offer is based on them, each once.
    """

    def __init__(self, context: Context, replica: Replica, round_: Round, genesis: tuple[Genesis, bytes]) -> None:
        """``replica`` is what the owner folds, ``round_`` has the state hashes of its versions."""
        self.context, self.replica, self.round, self.genesis = context, replica, round_, genesis
        self.fragment = context.map.fragments[replica.chain.fragment]
        self._values: dict[int, Vector] = {}

    def clear(self) -> None:
        """Forget all values: the fragment was taken back, and no offer on an older version is merged any more."""
        self._values.clear()

    async def know(self, merge: Merge) -> None:
        """Read the bases of offers that are not known from the log: a keyframe and the entries behind it, for each base.

        Raises:
            UnmergeableError: no log has a base any more, or has it with another state than its offers state.
            RewoundError: the log lost its last entries.
        """
        chain, hashes, log = self.replica.chain, self.round.hashes, self.context.log
        wanted = merging.bases_of(self.fragment, self.context.run.in_force, merge.held)
        faults: dict[int, str] = {}
        for version in sorted(wanted - self._values.keys() - {chain.version}):
            try:
                past = await state_at(self.context, self.fragment.index, version, self.genesis)
            except RunError as error:
                faults[version] = str(error)
            else:
                self._values[version], hashes[version] = past.theta, past.chain.state_hash
                log.info("base_read", fragment=self.fragment.index, version=version, newest=chain.version)
        left_out = [
            member
            for held in merge.held
            for member in held.offer.members
            if (version := member.base_version) in wanted
            and (version in faults or hashes.get(version, member.base_hash) != member.base_hash)
        ]
        if left_out:
            said = {faults.get(m.base_version, f"base {m.base_version} has another state hash in the log") for m in left_out}
            what = f"fragment {self.fragment.index}, version {merge.version}: the base of an offer is unknown"
            names = tuple(sorted(member.learner for member in left_out))
            raise UnmergeableError("merge_base_unknown", names, f"{what}: {'; '.join(sorted(said))}")

    def of_merge(self) -> Mapping[int, Vector]:
        """Return the values for the next merge, float32 [size] by version, once they are known; forget older ones."""
        replica = self.replica
        self._values = dict(merging.keep_bases(self.context.run.in_force, self._values, replica.chain.version, replica.theta))
        return self._values
