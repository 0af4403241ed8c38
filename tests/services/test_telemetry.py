"""The way of one delta, as learners, syncers and readers tell it to a collector, each by itself."""

from __future__ import annotations

from collections import defaultdict

import pytest
from tests.services.cluster import small
from tests.services.conftest import Launch

pytest.importorskip("opentelemetry.proto.collector.trace.v1", reason="needs diloco[otel]")
from tests.collector import Seen, collecting

LEARNERS = {"toy-0", "toy-1", "toy-2"}


async def test_the_spans_of_a_version_hang_together(launch: Launch) -> None:
    settings = small()
    cluster = launch(settings)
    with collecting() as collector:
        telemetry = {"endpoint": collector.url, "sample": 1.0}
        cluster.start("coordinator", "diloco_coordinator", settings=settings.model_dump(), telemetry=telemetry)
        for index in range(settings.shards):
            cluster.start(f"syncer-{index}", "diloco_syncer", telemetry=telemetry)
        for share in range(settings.learners):
            cluster.toy_process(share, telemetry=telemetry)
        await cluster.ended()
        folded = await cluster.folded()

    assert collector.paths == {"/v1/traces"}
    spans = collector.spans
    by_trace: defaultdict[bytes, list[Seen]] = defaultdict(list)
    for span in spans:
        by_trace[span.trace].append(span)
        assert span.began_ns <= span.ended_ns
    assert len({(span.trace, span.span) for span in spans}) == len(spans)  # no id is made twice

    rounds = {(span.about["diloco.fragment"], span.about["diloco.version"]): span for span in spans if span.name == "round"}
    offers = {(span.trace, span.span): span for span in spans if span.name == "offer"}
    merged = {(log.index, record.version): record for log in folded for record in log.versions}
    assert rounds.keys() == merged.keys()
    for place, root in rounds.items():
        record, trace = merged[place], by_trace[root.trace]
        assert (root.service, root.member, root.parent) == ("diloco-syncer", record.syncer, b"")
        stages = [span.name for span in sorted(trace, key=lambda span: span.began_ns) if span.parent == root.span]
        assert [name for name in stages if name != "read"] == ["quorum", "grace", "merge", "outer step", "publish"]
        # a version is read by all learners; the last one, which closes the log, by those that still apply it
        reads = {span.member: span for span in trace if span.name == "read"}
        assert all(span.parent == root.span and span.service == "diloco-learner" for span in reads.values())
        assert record.closing or reads.keys() == LEARNERS
        for read in reads.values():
            assert {span.name for span in trace if span.parent == read.span} == {"fetch", "fold", "apply"}
        # the offers that it merged, each told by its learner in a trace of its own, which names the round that it answered
        assert len(root.links) == len(record.members)
        for link, member in zip(root.links, record.members, strict=True):
            offer = offers[link]
            told = (offer.member, offer.about["diloco.member"], offer.about["diloco.number"], offer.about["diloco.fragment"])
            assert told == (member.learner, member.learner, member.number, place[0])
            answered = rounds[place[0], member.round]
            assert offer.links == ((answered.trace, answered.span),)
            parts = sorted((span for span in by_trace[offer.trace] if span is not offer), key=lambda span: span.began_ns)
            assert [span.name for span in parts] == ["snapshot", "encode", "upload"]
            assert all(span.parent == offer.span for span in parts)
            assert (parts[0].began_ns, parts[-1].ended_ns) == (offer.began_ns, offer.ended_ns)
