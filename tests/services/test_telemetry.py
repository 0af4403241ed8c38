"""The way of one delta, as learners, syncers and readers tell it to a collector, each by itself."""

from __future__ import annotations

from collections import defaultdict

import pytest
from tests.made.fixtures import Launch, Regions
from tests.made.run_checks import WAITS
from tests.services.apart import apart
from tests.services.cluster import NEVER_S, small

from diloco.core.run.tracing import version_ids
from diloco.wire.framing import run_id

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="needs diloco[otel]")
from tests.made.span_collector import Collector, Seen, collecting

LEARNERS = {"toy-0", "toy-1", "toy-2"}
SYNCERS = {"syncer-0", "syncer-1", "syncer-2"}
WANTED = 3  # versions of which all is told


def whole(collector: Collector) -> list[tuple[Seen, list[Seen], list[Seen]]]:
    """The versions of which all has come: the round, the spans of its trace, and the offers that it merged."""
    by_trace: defaultdict[bytes, list[Seen]] = defaultdict(list)
    for span in list(collector.spans):
        by_trace[span.trace].append(span)
    found = []
    for root in [span for span in list(collector.spans) if span.name == "round"]:
        trace = by_trace[root.trace]
        offers = [span for link, _ in root.links for span in by_trace[link] if span.name == "offer"]
        applied = [span for span in trace if span.name == "apply"]
        reads = {span.member for span in trace if span.name == "read"}
        if len(applied) == len(LEARNERS) < len(reads) and len(offers) == len(root.links):
            found.append((root, trace, [*offers, *(span for link, _ in root.links for span in by_trace[link])]))
    return found


@pytest.mark.promise("traces connect an offer with its version")
async def test_the_spans_of_a_version_hang_together(launch: Launch) -> None:
    settings = small(tokens=10**9)
    cluster = launch(settings)
    run = cluster.run_id
    with collecting() as collector:
        telemetry = {"endpoint": collector.url, "sample": 1.0}
        cluster.start("coordinator", "diloco_coordinator", settings=settings.model_dump(), telemetry=telemetry)
        for index in range(settings.shards + 1):  # one stands by
            cluster.start(f"syncer-{index}", "diloco_syncer", telemetry=telemetry)
        for share in range(settings.learners):
            cluster.toy_process(share, telemetry=telemetry)
        await cluster.until(lambda: len(whole(collector)) >= WANTED, "versions are told of by all")
        found = whole(collector)
        await cluster.close()

    assert collector.paths == {"/v1/traces"}
    assert all(span.began_ns <= span.ended_ns for span in collector.spans)
    for root, trace, told in found:
        fragment, version = root.about["diloco.fragment"], root.about["diloco.version"]
        ids = version_ids(run, fragment, version)
        assert (root.service, root.trace, root.span, root.parent) == ("diloco-syncer", ids.trace, ids.span, b"")
        assert root.member in SYNCERS
        stages = sorted((span for span in trace if span.parent == root.span and span.name != "read"), key=lambda s: s.began_ns)
        assert [span.name for span in stages] == ["quorum", "grace", "merge", "outer step", "publish"]
        assert (stages[0].began_ns, stages[-1].ended_ns <= root.ended_ns) == (root.began_ns, True)
        reads = {span.member: span for span in trace if span.name == "read"}
        assert reads.keys() > LEARNERS
        for read in reads.values():
            learns = read.member in LEARNERS
            assert learns or read.member in SYNCERS - {root.member}
            assert (read.service, read.parent) == ("diloco-learner" if learns else "diloco-syncer", root.span)
            parts = [span for span in trace if span.parent == read.span]
            assert {span.name for span in parts} == {"fetch", "fold"} | ({"apply"} if learns else set())
            assert max(span.ended_ns for span in parts) == read.ended_ns
        # the offers that it merged, each told by its learner in a trace of its own, which names the round that it answered
        assert 1 <= root.about["diloco.members"] == len(root.links) <= len(LEARNERS)
        for offer in told[: len(root.links)]:
            assert (offer.service, offer.about["diloco.member"]) == ("diloco-learner", offer.member)
            assert offer.about["diloco.fragment"] == fragment
            answered = {version_ids(run, fragment, before).span for before in range(1, version + 1)}
            assert [span in answered for _, span in offer.links] == [True]
            parts = sorted((s for s in told if s.trace == offer.trace and s.parent), key=lambda span: span.began_ns)
            assert [span.name for span in parts] == ["snapshot", "encode", "upload"]
            assert {span.parent for span in parts} == {offer.span}
            assert (parts[0].began_ns, parts[-1].ended_ns) == (offer.began_ns, offer.ended_ns)


async def test_a_regional_offer_links_to_what_it_merged_and_its_round_to_it(regions: Regions) -> None:
    patience = {"liveness__dead_s": NEVER_S, "regions__away_s": 600.0}  # a regional offer has all of its region
    settings = apart(learners=6, tokens=10**9, regions__merge=True, **WAITS, **patience)
    run = await regions(settings)
    identity = run_id(run.name, settings.digest())
    with collecting() as collector:
        run.of_syncers = {"telemetry": {"endpoint": collector.url, "sample": 1.0}}
        await run.begin()

        def linked() -> list[tuple[Seen, Seen]]:
            """Regional offers, each with a round that merged it."""
            spans = list(collector.spans)
            rounds = {link: span for span in spans if span.name == "round" for link, _ in span.links}
            return [(span, rounds[span.trace]) for span in spans if span.name == "regional offer" and span.trace in rounds]

        await run.until(lambda: len(linked()) >= WANTED, "regional offers are told of, and the rounds that merged them")
        found = linked()
        await run.close()
    for offer, round_ in found:
        fragment = round_.about["diloco.fragment"]
        assert offer.member != round_.member
        assert offer.about["diloco.members"] == 2  # those of its region
        answered, *merged = offer.links
        ids = version_ids(identity, fragment, round_.about["diloco.version"])
        assert answered == (round_.trace, round_.span) == (ids.trace, ids.span)
        assert len(merged) == 2
        assert set(merged) < set(round_.links)
        parts = {span.name: span for span in collector.spans if span.parent == offer.span}
        assert parts.keys() == {"merge", "upload"}
        assert parts["merge"].began_ns == offer.began_ns
        assert parts["merge"].ended_ns == parts["upload"].began_ns
        assert parts["upload"].ended_ns == offer.ended_ns
