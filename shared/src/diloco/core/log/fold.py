"""A fragment's parameters and outer momentum as a fold of its log.

Syncers, learners, standbys and verifiers fold the same entries with the same kernels and arrive at the same bits, which the
hash in each entry proves. A body must have passed :func:`diloco.core.tensors.quantise.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from diloco.core.log.chain import Chain
from diloco.core.tensors import outer, quantise
from diloco.core.tensors.outer import NESTEROV, OuterOptimizer
from diloco.errors import HashError, StateError, WrongEntryError
from diloco.wire.entries import Keyframe, Record


@dataclass
class Replica:
    """One fragment as of its log's checked head: float32 vectors of the fragment's size, the optimizer's moments in one."""

    chain: Chain
    theta: NDArray[np.float32]
    momentum: NDArray[np.float32]
    optimizer: OuterOptimizer = NESTEROV

    def copy(self) -> Replica:
        """Return a replica that is folded further by itself."""
        chain = replace(self.chain, cursors=dict(self.chain.cursors), ends=dict(self.chain.ends))
        return replace(self, chain=chain, theta=self.theta.copy(), momentum=self.momentum.copy())

    def without_state(self) -> Replica:
        """Return a replica of the same chain whose arrays are empty."""
        return replace(self, theta=np.empty(0, np.float32), momentum=np.empty(0, np.float32))

    def fold(
        self, record: Record, entry_hash: bytes, sequence: int, body: NDArray[np.uint8] | None, *, in_place: bool = True
    ) -> None:
        """Check that the entry follows, and fold its body, uint8 [quantised bytes].

        With ``in_place=False`` ``theta`` becomes a new array; the old one stays as the version before.

        Raises:
            ChainError: the entry does not follow; nothing has changed.
            StateError: the result does not have the hash that the entry states; the replica is invalid, and to be loaded again.
        """
        self.chain.check(record)
        if body is not None and record.rolled_back is not None:
            if not in_place:
                self.theta = np.empty_like(self.theta)
            self.set_state(body.view(np.dtype("<f4")))
            state_hash = outer.state_hash(self.theta, self.momentum)
        elif body is not None:
            theta = self.theta if in_place else np.empty_like(self.theta)
            step = self.optimizer.at(record.version, record.learning_rate, record.momentum)
            out = None if in_place else theta
            state_hash = outer.fold(self.theta, self.momentum, body, record.bits, step, theta_out=out)
            self.theta = theta
        else:
            state_hash = self.chain.state_hash
        _check_state(record, state_hash, sequence)
        self.chain.advance(record, entry_hash, sequence)

    def judge(self, record: Record, entry_hash: bytes, sequence: int, body: NDArray[np.uint8] | None) -> None:
        """Fold an entry and its body, uint8 [quantised bytes], as :meth:`fold` does; one that is wrong changes nothing.

        It costs the time of a second fold, and no copy of the replica.

        Raises:
            ChainError: the entry does not follow.
            WrongEntryError: it states another state than it folds to; all readers pass over it.
            StateError: so it seems, but this replica has not the state that its head states, and must be loaded again.
        """
        self.chain.check(record)
        try:
            _check_state(record, self._hash_after(record, body), sequence)
        except StateError as error:
            if outer.state_hash(self.theta, self.momentum) != self.chain.state_hash:
                raise
            raise WrongEntryError(str(error)) from None
        self.fold(record, entry_hash, sequence, body)

    def _hash_after(self, record: Record, body: NDArray[np.uint8] | None) -> bytes:
        """Return the state hash that folding an entry's body would give."""
        if body is None:
            return self.chain.state_hash
        if record.rolled_back is not None:
            values = body.view(np.dtype("<f4"))
            return outer.state_hash(values[: self.theta.size], values[self.theta.size :])
        step = self.optimizer.at(record.version, record.learning_rate, record.momentum)
        return outer.folded_hash(self.theta, self.momentum, body, record.bits, step)

    def set_state(self, values: NDArray[np.float32]) -> None:
        """Take over the :meth:`state` of another version, float32 [(1 + moments) * size]; the chain stays."""
        n = self.theta.size
        self.theta[:], self.momentum[:] = values[:n], values[n:]

    def state(self) -> NDArray[np.float32]:
        """Return theta and the optimizer's moments, float32 [(1 + moments) * size]."""
        return np.concatenate([self.theta, self.momentum], dtype=np.dtype("<f4"))


def _check_state(record: Record, state_hash: bytes, sequence: int) -> None:
    """Compare the state that an entry folds to with the one that it states.

    Raises:
        StateError: they differ.
    """
    if state_hash != record.state_hash:
        raise StateError(
            f"fragment {record.fragment}, version {record.version}: folding gives state {state_hash.hex()[:16]}, the "
            f"entry states {record.state_hash.hex()[:16]}",
            sequence,
        )


def keyframe_body(replica: Replica, residual: NDArray[np.float32] | None) -> NDArray[np.uint8]:
    """Return theta, momentum and residual, float32 [size] or None for zeros, as a keyframe's body, uint8 [raw bytes]."""
    if residual is None:
        residual = np.zeros_like(replica.theta)
    body = np.concatenate([replica.theta, replica.momentum, residual], dtype=np.dtype("<f4"))
    return body.view(np.uint8)


def entry_values(record: Record, size: int, moments: int) -> int:
    """Return the number of values in an entry's body, for a fragment of ``size`` parameters and so many moments of each."""
    return size if record.rolled_back is None else (1 + moments) * size


def keyframe_bytes(size: int, moments: int) -> int:
    """Return the raw bytes of a keyframe's body, for a fragment of ``size`` parameters and so many moments of each."""
    return 4 * (2 + moments) * size


def load_keyframe(
    keyframe: Keyframe, chain: Chain, raw: NDArray[np.uint8], optimizer: OuterOptimizer = NESTEROV
) -> tuple[Replica, NDArray[np.float32]]:
    """Return the replica that a keyframe describes, and the residual, float32 [size]; ``raw`` is its body, uint8 [bytes].

    Raises:
        HashError: parameters and momentum do not have the hash that the keyframe states.
        NonFiniteError: the residual holds NaN or infinity.
    """
    values = raw.view(np.dtype("<f4")).astype(np.float32, copy=False)
    n = values.size // (2 + optimizer.moments)
    theta, momentum, residual = (part.copy() for part in np.split(values, [n, values.size - n]))
    replica = load_state(keyframe, chain, theta, momentum, optimizer)
    quantise.validate(residual.view(np.uint8), n, 32)
    return replica, residual


def load_state(
    keyframe: Keyframe,
    chain: Chain,
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    optimizer: OuterOptimizer = NESTEROV,
) -> Replica:
    """Return the replica that a keyframe describes, of these arrays, float32 [size] and [moments * size].

    Raises:
        HashError: parameters and momentum do not have the hash that the keyframe states.
    """
    state_hash = outer.state_hash(theta, momentum)
    if state_hash != keyframe.state_hash:
        raise HashError(
            f"fragment {keyframe.fragment}, keyframe of version {keyframe.version}: its content has state "
            f"{state_hash.hex()[:16]}, it states {keyframe.state_hash.hex()[:16]}"
        )
    return Replica(chain, theta, momentum, optimizer)
