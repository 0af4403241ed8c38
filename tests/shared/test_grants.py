"""Grants: signed by a run's authority, believed of no other signer, and the bounds that they set."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from tests.made.learner_claims import BATCH, ann, chain_with, impossible
from tests.made.run_settings import CLAIMS, settings_of

from diloco.control import admission
from diloco.control.creation import KnownRun
from diloco.core.syncer.claims import StepBounds
from diloco.core.tensors.built_in import tensor_shapes
from diloco.core.tensors.fragments import FragmentMap, TensorSpec, build_map
from diloco.errors import AdmissionError, FenceError, FormatError
from diloco.member.admission import AdmissionClient
from diloco.nats import grants
from diloco.nats.nkey import NatsKey
from diloco.wire.grants import Grant, SignedGrant

AUTHORITY, OTHER = NatsKey.new(), NatsKey.new()
ANN = Grant("run", "ann", OTHER.public_key, 2 * BATCH, 0.05)
SIGNED = grants.sign(ANN, AUTHORITY)
OWN_MAP = build_map([TensorSpec("w", (8, 8))], 1)
BUILT_IN_MAP = build_map([TensorSpec(path, shape) for path, shape in tensor_shapes(settings_of(CLAIMS).task).items()], 4)


def test_a_grant_is_what_its_authority_signed() -> None:
    assert grants.opened(SIGNED, AUTHORITY.public_key, "run", "ann") == ANN
    assert grants.from_text(grants.to_text(SIGNED)) == SIGNED


@pytest.mark.parametrize(
    ("signed", "said"),
    [
        (None, "learner ann has no grant: diloco keys grant DIR ann"),
        (grants.sign(ANN, OTHER), "not signed by the authority of run 'run'"),
        (SignedGrant(msgspec.msgpack.encode(msgspec.structs.replace(ANN, batch_tokens=2**40)), SIGNED.signature), "not signed"),
        (SignedGrant(SIGNED.content + b"\0", SIGNED.signature), "not signed"),
        (SignedGrant(SIGNED.content, bytes(64)), "not signed"),
        (grants.sign(msgspec.structs.replace(ANN, learner="bob"), AUTHORITY), "was issued for learner bob of run 'run'"),
        (grants.sign(msgspec.structs.replace(ANN, run="other"), AUTHORITY), "was issued for learner ann of run 'other'"),
        (grants.sign(msgspec.structs.replace(ANN, batch_tokens=0), AUTHORITY), "grant: Expected `int` >= 1"),
    ],
)
def test_any_other_is_refused(signed: SignedGrant | None, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        grants.opened(signed, AUTHORITY.public_key, "run", "ann")


class Bucket:
    """A bucket in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def get(self, key: str) -> tuple[bytes, int] | None:
        return (self.values[key], 1) if key in self.values else None

    async def create(self, key: str, value: bytes) -> int:
        if key in self.values:
            raise FenceError(key)
        self.values[key] = value
        return 1

    async def update(self, key: str, value: bytes, revision: int) -> int:
        self.values[key] = value
        return 1


async def test_a_learner_shows_its_grant_and_is_not_admitted_without_one() -> None:
    settings = settings_of(CLAIMS)
    run = KnownRun("run", settings, cast(Any, Bucket()), AUTHORITY.public_key)
    for shown, grant in ((None, None), (grants.sign(ANN, OTHER), None), (SIGNED, ANN)):
        await admission.join(run, "ann", 7, OWN_MAP, settings.digest(), grant=shown)
        standing = await admission.admitted(run, "ann", OWN_MAP.digest)
        assert (standing.grant, standing.incarnation is None) == (grant, grant is None)
        assert bool(standing.reason) is (grant is None)
    run.authority = None
    assert (
        await admission.admitted(run, "ann", OWN_MAP.digest)
    ).grant is None  # it is not asked for where there are no identities


class Link:
    """What a learner's transport says of its identity."""

    def __init__(self, authority: str | None, grant: SignedGrant | None) -> None:
        self.authority, self.grant = authority, grant

    def wall_s(self) -> float:
        return 1.0


def client(authority: str | None, grant: SignedGrant | None, fragments: FragmentMap = BUILT_IN_MAP) -> AdmissionClient:
    run = KnownRun("run", settings_of(CLAIMS), cast(Any, Bucket()), authority)
    return AdmissionClient(cast(Any, Link(authority, grant)), run, "ann", fragments, cast(Any, None))


def test_a_learner_with_a_larger_batch_than_was_granted_is_told_at_its_start() -> None:
    client(None, None).check_batch(8 * BATCH)
    client(None, None).check_batch(BATCH // 8)
    with pytest.raises(
        AdmissionError, match=f"a step has {BATCH // 8 - 1} tokens.* at least {BATCH // 8} for the built-in model"
    ):
        client(None, None).check_batch(BATCH // 8 - 1)
    client(None, None, OWN_MAP).check_batch(1)
    client(None, None, OWN_MAP).check_batch(9 * BATCH)
    with pytest.raises(AdmissionError, match=f"a step has {9 * BATCH} tokens, the run's settings allow at most {8 * BATCH}"):
        client(None, None).check_batch(9 * BATCH)
    with pytest.raises(AdmissionError, match=f"no grant.*diloco keys grant DIR ann --batch-tokens {BATCH}"):
        client(AUTHORITY.public_key, None).check_batch(BATCH)
    client(AUTHORITY.public_key, SIGNED).check_batch(2 * BATCH)
    with pytest.raises(
        AdmissionError, match=f"its grant allows at most {2 * BATCH}.*keys grant DIR ann --batch-tokens {2 * BATCH + 1}"
    ):
        client(AUTHORITY.public_key, SIGNED).check_batch(2 * BATCH + 1)


def test_a_step_has_the_tokens_that_were_granted_in_any_task() -> None:
    """Row 15: twenty million tokens in one step, which a task of one's own would have let in."""
    own = settings_of(CLAIMS, tokens=10**9)
    assert impossible(own, bounds=StepBounds(), steps=1, tokens=2 * 10**7, data=[]) == ""
    assert "tokens in its steps: 20000000, at most 4096" in impossible(own, grant=ANN, steps=1, tokens=2 * 10**7, data=[])
    assert "at most 98304" in impossible(own, grant=ANN, tokens=24 * 2 * BATCH + 1)
    assert impossible(own, grant=ANN, tokens=24 * 2 * BATCH) == ""
    large = msgspec.structs.replace(ANN, batch_tokens=64 * BATCH)
    assert (
        impossible(settings_of(CLAIMS, tokens=10**7), grant=large, tokens=24 * 64 * BATCH) == ""
    )  # and a larger island is let in


def test_all_steps_of_a_learner_fit_into_the_time_since_genesis() -> None:
    """100 s, and 60 s by which clocks may differ, have 3,200 steps of 50 ms; 3,000 of them are merged already."""
    settings, chain = settings_of(CLAIMS, tokens=10**9), chain_with(ann(10**6, 0, steps=3000))
    assert impossible(settings, chain, grant=ANN, elapsed_s=100.0, steps=200, tokens=200 * BATCH) == ""
    reason = impossible(settings, chain, grant=ANN, elapsed_s=100.0, steps=201, tokens=201 * BATCH)
    assert "steps since genesis, merged ones included: 3201, at most 3200" in reason
    # a learner that was cut off for five minutes has trained meanwhile, however soon its offers came one after the other
    assert impossible(settings, chain, grant=ANN, elapsed_s=400.0, steps=6200, tokens=6200 * BATCH) == ""
    # a server's clock that is a minute behind that of genesis
    assert impossible(settings, grant=ANN, elapsed_s=-60.0, steps=1200, tokens=1200 * BATCH) == ""
    # without a grant no step is shorter than a tenth of a millisecond, nor is a batch trained sooner
    assert impossible(settings, elapsed_s=0.0, steps=600_000, tokens=600_000) == ""
    assert "at most 600000" in impossible(settings, elapsed_s=0.0, steps=600_001, tokens=600_001)
    assert "the end of its batches: 700000" in impossible(settings, elapsed_s=0.0, data=[(0, 699_999, 1)])
