"""Makes offers: quantises and compresses a fragment, and stores the result, however long that takes.

A learner of one process has one for all fragments, and each process of a learner of several has one for those that it carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diloco.control.creation import KnownRun
from diloco.core.learner.delta import EncodedOffer, PendingDelta
from diloco.core.tensors import codec
from diloco.errors import BrokerError, NonFiniteError, StorageFullError
from diloco.log.offers import append_offer
from diloco.member.member_tracing import OfferTrace
from diloco.process.observe import Logger
from diloco.process.retry import Complaint
from diloco.process.tasks import computed
from diloco.transport import Transport
from diloco.wire.body import ATTEMPT_BYTES, describe_body
from diloco.wire.offers import Offer
from diloco.wire.subjects import Subjects

OFFER_TIMEOUT_S = 15.0  # an offer of 100 MB takes that long at 50 Mbit/s; it is then sent again, under the same id


@dataclass(frozen=True)
class QuantisedOffer:
    """An offer that is quantised and not stored yet."""

    encoded: EncodedOffer
    packed: bytes  # the zstd frame of its body
    content_hash: bytes  # of its body
    trace: OfferTrace | None


class OfferMaker:
    """Makes the offers of one process. Its coroutines are the loop's."""

    def __init__(self, transport: Transport, run: KnownRun, log: Logger) -> None:
        self.transport, self.run, self.log, self.subjects = transport, run, log, Subjects(run.name)

    async def quantise(
        self,
        fragment: int,
        version: int,
        encode: Callable[[], EncodedOffer],
        trace: OfferTrace | None,
        size: int | None = None,
    ) -> QuantisedOffer | None:
        """Return an offer's arrays as ``encode`` gives them, compressed; None if its values are not finite.

        ``version`` is for the log. ``size`` is that of the fragment if its values are on the host; else ``encode`` waits for
        a device.
        """
        pack = partial(self._pack, encode)
        try:
            packing = asyncio.to_thread(pack) if size is None else computed(size, pack)
            encoded, packed, content_hash = await packing
        except NonFiniteError as error:
            self.log.warning("displacement_not_finite", fragment=fragment, version=version, reason=str(error))
            return None
        if trace is not None:
            trace.encoded()
        return QuantisedOffer(encoded, packed, content_hash, trace)

    def _pack(self, encode: Callable[[], EncodedOffer]) -> tuple[EncodedOffer, bytes, bytes]:
        encoded = encode()
        return encoded, codec.pack(encoded.body, self.run.created.codec.zstd_level), codec.content_hash(encoded.body)

    def storing(self, fragment: int, offer: PendingDelta, quantised: QuantisedOffer) -> Coroutine[Any, Any, int]:
        """Return the work that stores an offer, however long that takes, and gives its head's stream sequence.

        It keeps no copy of what is kept elsewhere.
        """
        attempt = self.transport.random_bytes(ATTEMPT_BYTES)
        body, inline, parts = describe_body(quantised.packed, quantised.content_hash, attempt)
        return self._store(offer.message(fragment, body), inline, parts, quantised.trace)

    async def _store(self, offer: Offer, inline: bytes, parts: Sequence[bytes], trace: OfferTrace | None) -> int:
        complaint = Complaint(self.log)

        def failed(error: BrokerError) -> None:
            values = {"fragment": offer.fragment, "number": offer.number, "reason": str(error)}
            if isinstance(error, StorageFullError):
                complaint.warn("offer_not_stored", **values)
            else:
                self.log.warning("offer_retried", **values)

        run = self.run.identity
        sequence = await append_offer(
            self.transport, self.subjects, run, offer, inline, parts, timeout_s=OFFER_TIMEOUT_S, failed=failed
        )
        assert sequence is not None  # it is wanted as long as it is not stored
        if trace is not None:
            trace.stored(offer)
        return sequence
