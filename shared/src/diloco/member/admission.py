"""A learner's admission to a run: taken once, looked at now and then, and waited for while an operator has ejected it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from diloco.control import admission
from diloco.control.creation import KnownRun
from diloco.core.syncer import claims
from diloco.core.tensors.fragments import FragmentMap
from diloco.errors import AdmissionError, RunError
from diloco.process.observe import Logger
from diloco.process.retry import until_available
from diloco.transport import Transport

READMITTED_S = 0.5  # between two looks at changes that a follower keeps up to date: costs nothing


class AdmissionClient:
    """The admission of learner ``name``, in an incarnation of its process."""

    def __init__(self, transport: Transport, run: KnownRun, name: str, fragments: FragmentMap, log: Logger) -> None:
        self.transport, self.run, self.name, self.map, self.log = transport, run, name, fragments, log
        self.incarnation = int(transport.wall_s() * 1000)

    def check_batch(self, batch_tokens: int) -> None:
        """Refuse to take part with steps of more tokens, or fewer, than syncers will let this learner state.

        Raises:
            AdmissionError: the grant, the step's tokens and the command that makes another grant are named.
        """
        grant = None if self.transport.grant is None else self.transport.grant.decode()
        command = f"diloco keys grant DIR {self.name} --batch-tokens {batch_tokens}"
        if grant is None and self.transport.authority is not None:
            raise AdmissionError(
                f"learner {self.name}: its identity has no grant, so its work would not be merged: have the operator run "
                f"{command}"
            )
        bounds = claims.step_bounds(self.run.created, self.map)
        most = claims.step_tokens(bounds, grant)
        if batch_tokens < bounds.least_tokens:
            raise AdmissionError(
                f"learner {self.name}: a step has {batch_tokens} tokens, and the run's settings require at least "
                f"{bounds.least_tokens} for the built-in model (task.batch x task.context / {claims.ISLAND}): train with "
                "a larger batch, or begin a run with a smaller task.batch"
            )
        if batch_tokens > most:
            granted = "its grant allows" if grant is not None and grant.batch_tokens else "the run's settings allow"
            raise AdmissionError(
                f"learner {self.name}: a step has {batch_tokens} tokens, {granted} at most {most}: train with a smaller "
                f"batch, or, in a run with identities, have the operator grant more: {command}"
            )

    async def take(self) -> None:
        """Be admitted, once the run has a fragment map if this learner may not propose one.

        Raises:
            AdmissionError: this learner's model is not the run's.
        """
        if not self.transport.founds and await until_available(partial(self.run.registry.get, "map"), self.log) is None:
            self.log.info("waiting_for_founder")
        self.incarnation = await until_available(self._join, self.log)

    async def is_lost(self) -> bool:
        """Return whether the server has lost the admission.

        Raises:
            RunError: a younger process goes by this name.
            BrokerError: the server is away.
        """
        admitted = (await admission.admitted(self.run, self.name, self.map.digest)).incarnation
        if admitted is not None and admitted > self.incarnation:
            raise RunError(
                f"run {self.run.name!r}: a newer process has joined as {self.name!r}, so this one ends: give every "
                "learner its own name and identity"
            )
        if admitted == self.incarnation:
            return False
        self.log.warning("admission_lost", incarnation=self.incarnation)
        return True

    async def renew(self) -> None:
        """Be admitted again, as the same process.

        Raises:
            BrokerError: the server is away.
        """
        await self._join()

    async def readmitted(self, closed: Callable[[], Awaitable[bool]]) -> None:
        """Wait while this learner is ejected, but not beyond the run's end, which ``closed`` tells."""
        complained = False
        while (ejected := self.run.now.ejected.get(self.name)) is not None:
            if not complained:
                self.log.warning("waiting_for_readmission", reason=ejected.label)
            complained = True
            if await closed():
                return
            await asyncio.sleep(READMITTED_S)

    async def _join(self) -> int:
        digest, founds, grant = self.run.created.digest(), self.transport.founds, self.transport.grant
        return await admission.join(self.run, self.name, self.incarnation, self.map, digest, founds=founds, grant=grant)
