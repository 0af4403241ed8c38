"""Every service of a run, scraped: what it tells is what the run's status and its heartbeats say."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, small

import diloco_coordinator.run_metrics
import diloco_learner.run.learner_metrics
import diloco_syncer.syncer_metrics
from diloco.control.changes import append_changes
from diloco.control.creation import KnownRun
from diloco.core.run.changes import Set
from diloco.process.observe import get_logger
from diloco.process.retry import until_available
from diloco.service import metrics
from diloco.service.metrics import Metric
from diloco_ops.broker.server import Server

COORDINATORS = ("coordinator", "coordinator-1")
SERVICES = (*COORDINATORS, "syncer-0", "syncer-1", "learner-0", "evaluator")
STATED: dict[str, tuple[Metric[Any], ...]] = {
    "coordinator": diloco_coordinator.run_metrics.METRICS,
    "syncer": diloco_syncer.syncer_metrics.METRICS,
    "learner": diloco_learner.run.learner_metrics.METRICS,
    "evaluator": diloco_learner.run.learner_metrics.METRICS,
}
Samples = dict[str, dict[tuple[str, ...], float]]


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def get(cluster: Cluster, name: str, path: str) -> tuple[int, str]:
    await cluster.until(lambda: bool(cluster.events("metrics_served", name)), f"{name} serves its metrics")
    port = cluster.events("metrics_served", name)[-1]["port"]
    return await asyncio.to_thread(_get, f"http://127.0.0.1:{port}{path}")


async def scrape(cluster: Cluster, name: str) -> Samples:
    """By name, and by the values of labels that not all metrics of the process have."""
    status, text = await get(cluster, name, "/metrics")
    assert status == 200
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = dict(sample.labels)
            if sample.name.startswith("diloco_"):
                assert (own.pop("run"), own.pop("name"), own.pop("region")) == (cluster.name, name, "")
            found.setdefault(sample.name, {})[tuple(own.values())] = sample.value
    return found


async def ready(cluster: Cluster, names: tuple[str, ...], wanted: bool) -> None:
    """Wait until all of these are ready, or none is; healthy they are all the time."""
    for name in names:
        ends_s = asyncio.get_running_loop().time() + DEADLINE_S
        while (await get(cluster, name, "/readyz"))[0] != (200 if wanted else 503):
            cluster.check_alive()
            assert asyncio.get_running_loop().time() < ends_s, (name, await get(cluster, name, "/readyz"))
            await asyncio.sleep(0.1)


async def never_take_over(cluster: Cluster) -> None:
    """Let a syncer stand by whose owner gets no processor time for long. Without an owner it waits as long before it is one."""
    link = await cluster.link()

    async def change() -> None:
        run = KnownRun(cluster.name, cluster.settings, await link.bucket(cluster.subjects.bucket, create=False))
        never = [Set("liveness.takeover_s", 600.0)]
        await append_changes(link, run, lambda now: never * (now.settings.liveness.takeover_s < 600.0), author="test")

    await until_available(change, get_logger())


async def healthy(cluster: Cluster, *names: str) -> None:
    """Wait until these are: one that got no processor time for long is not, just then."""
    for name in names:
        async with asyncio.timeout(DEADLINE_S):
            while await get(cluster, name, "/healthz") != (200, "ok\n"):
                cluster.check_alive()
                await asyncio.sleep(0.1)


async def settled(cluster: Cluster) -> dict[str, Samples]:
    """Scrape all, until one coordinator leads that has heard everybody: where processes stall, one takes another's place."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            told = {name: await scrape(cluster, name) for name in SERVICES}
            leaders = [told[name] for name in COORDINATORS if leads(told[name])]
            fit = all(samples["diloco_ready"] == samples["diloco_healthy"] == {(): 1} for samples in told.values())
            if fit and [heard(leader) for leader in leaders] == [(1, 2, True)]:
                return told
            cluster.check_alive()
            await asyncio.sleep(0.1)


def heard(leader: Samples) -> tuple[float, float, bool]:
    """Learners and syncers that a leader has heard, and whether an evaluator."""
    live = [sum(leader.get(f"diloco_coordinator_live_{who}", {}).values()) for who in ("learners", "syncers")]
    return live[0], live[1], bool(leader.get("diloco_coordinator_validation_loss_nats"))


def leads(coordinator: Samples) -> float:
    return coordinator["diloco_coordinator_leader"][()]


def family(sample: str) -> str:
    """The name of the metric that a sample is of."""
    return re.sub("_(bucket|sum|count)$", "", sample)


async def status_with(cluster: Cluster, predicate: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    ends_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not predicate(status := await cluster.status()):
        assert asyncio.get_running_loop().time() < ends_s, status
        await asyncio.sleep(0.1)
    return status


async def test_what_services_tell_is_what_the_run_says(make_server: Callable[[], Server], launch: Launch) -> None:
    server = make_server()
    task: dict[str, Any] = {
        "task__name": "gpt",
        "task__layers": 1,
        "task__width": 16,
        "task__heads": 2,
        "task__context": 16,
        "task__batch": 2,
    }
    run: dict[str, Any] = {"learners": 1, "shards": 1, "tokens": 10**9, "fragments__count": 3}
    run |= {"liveness__dead_s": 600.0}  # however long a process gets no processor time
    cluster = launch(small(**run, **task), url=server.url)
    text = cluster.directory / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(4000)))
    address, page = {"metrics_address": "127.0.0.1:0"}, {"page_address": "127.0.0.1:0"}
    shared = {**address, "data": str(text), "leave_s": 0.0, "checkpoint_s": 0.0}

    cluster.start("coordinator", "diloco_coordinator", settings=cluster.settings.model_dump(), **address, **page)
    await ready(cluster, ("coordinator",), True)
    cluster.start("coordinator-1", "diloco_coordinator", settings=cluster.settings.model_dump(), **address, **page)
    cluster.start("syncer-0", "diloco_syncer", **address)
    await cluster.until(lambda: bool(cluster.events("metrics_served", "syncer-0")), "a syncer serves its metrics")
    assert (await get(cluster, "syncer-0", "/readyz"))[0] == 503  # there is no learner yet, and so no model
    await healthy(cluster, "syncer-0")
    cluster.start("learner-0", "diloco_learner", slow=20.0, **shared)
    cluster.start("evaluator", "diloco_learner", role="evaluator", **shared)
    await cluster.link()
    await cluster.until(lambda: bool(cluster.events("serving", "syncer-0")), "the syncer serves")
    await never_take_over(cluster)
    cluster.start("syncer-1", "diloco_syncer", **address)
    await ready(cluster, SERVICES, True)
    await status_with(cluster, lambda status: len(status["validation"]) > 0)
    before = await status_with(cluster, lambda status: min(f["version"] for f in status["fragments"]) >= 2)
    await cluster.until(lambda: min(cluster.heartbeats["learner-0"][-1].versions) >= 2, "the learner has applied them")

    told = await settled(cluster)
    learner, owner = told["learner-0"], told["syncer-0"]
    leader = next(told[name] for name in COORDINATORS if leads(told[name]))

    # the status is made from heartbeats, which come a little later than what is scraped
    tokens, steps = learner["diloco_learner_tokens_total"][()], learner["diloco_learner_steps_total"][()]
    assert tokens == 32 * steps  # two sequences of 16
    assert before["learners"]["learner-0"]["tokens"] <= tokens
    assert before["learners"]["learner-0"]["step"] <= steps
    assert before["learners"]["learner-0"]["bytes_up"] <= learner["diloco_learner_sent_bytes_total"][()]
    await status_with(cluster, lambda status: status["learners"]["learner-0"]["tokens"] >= tokens)
    await cluster.until(
        lambda: any(heartbeat.loss == learner["diloco_learner_loss_nats"][()] for heartbeat in cluster.heartbeats["learner-0"]),
        "the loss",
    )
    fates = learner["diloco_learner_run_tokens"]
    assert set(fates) == {("merged",), ("lost",), ("held",)}
    assert sum(fates.values()) == tokens  # it has not been started again
    assert fates["merged",] > 0
    assert learner["diloco_learner_offers_total"][()] >= learner["diloco_learner_versions_applied_total"]["yes",] >= 6
    assert learner["diloco_learner_busy_seconds_total"][()] > 0
    assert learner["diloco_learner_not_finite_steps_total"] == {(): 0}
    assert told["evaluator"]["diloco_learner_validation_loss_nats"][()] > 0
    assert "diloco_learner_steps_total" not in told["evaluator"]

    versions = owner["diloco_syncer_versions_total"][()]
    assert before["versions"] <= versions == owner["diloco_syncer_merged_members_total"][()]  # one learner
    assert versions <= owner["diloco_syncer_rounds_total"][()] <= versions + 3
    assert owner["diloco_syncer_owned_fragments"] == {(): 3}
    assert owner["diloco_syncer_state"]["owner",] == told["syncer-1"]["diloco_syncer_state"]["standby",] == 1
    assert told["syncer-1"]["diloco_syncer_owned_fragments"] == {(): 0}
    for name in ("quorum", "round"):
        assert owner[f"diloco_syncer_{name}_seconds_count"][()] == versions
        assert owner[f"diloco_syncer_{name}_seconds_bucket"]["+Inf",] == versions
    assert 0 < owner["diloco_syncer_quorum_seconds_sum"][()] <= owner["diloco_syncer_round_seconds_sum"][()]
    assert owner["diloco_syncer_record_precision_bits"] == {(): 4}
    assert owner["diloco_syncer_unstored_fragments"] == {(): 0}
    await status_with(cluster, lambda status: status["versions"] >= versions)

    assert leader["diloco_coordinator_run_state"]["training",] == 1
    assert leader["diloco_coordinator_live_learners"] == {(): 1}
    assert leader["diloco_coordinator_live_syncers"] == {(): 2}
    assert leader["diloco_coordinator_budget_tokens"] == {(): 10**9}
    assert before["tokens_merged"] <= leader["diloco_coordinator_merged_tokens"][()]
    assert before["tokens_processed"] <= leader["diloco_coordinator_processed_tokens"][()]
    assert 0 < leader["diloco_coordinator_busy_ratio"][()] <= 1
    assert leader["diloco_coordinator_validation_loss_nats"][()] > 0

    # the syncer's next heartbeat says that it owns them, which it may have taken over a moment ago
    await status_with(cluster, lambda status: status["shards"]["syncer-0"]["fragments"] == 3)
    again = [await scrape(cluster, name) for name in COORDINATORS]
    assert {count for one in again for count in one.get("diloco_coordinator_unowned_fragments", {}).values()} == {0}

    unseen: set[str] = set()
    for name, samples in told.items():
        assert samples["diloco_ready"] == samples["diloco_healthy"] == {(): 1}
        stated = {metric.name for metric in (*STATED[name.partition("-")[0]], *metrics.COMMON, *metrics.CONNECTED)}
        assert {family(sample) for sample in samples if sample.startswith("diloco_")} <= stated
        unseen |= stated
    unseen -= {family(sample) for samples in told.values() for sample in samples}
    for name in SERVICES:
        [refused] = [values for sample, values in told[name].items() if "_refused_messages_total" in sample]
        assert set(refused.values()) == {0}
        assert ("HashError",) in refused
    of_regions = {
        "diloco_syncer_crossing_bytes_total",
        "diloco_syncer_offer_precision_bits",
        "diloco_syncer_region_connected",
        "diloco_coordinator_region_away",
    }
    of_trouble = {
        "diloco_refused_sender_age_seconds",
        "diloco_refused_sender_messages_total",
        "diloco_coordinator_outlying_learner",
        "diloco_syncer_dropped_heartbeats_total",
        "diloco_syncer_missed_offers_total",
        "diloco_syncer_refused_offers_total",
    }
    of_identities = {"diloco_certificate_remaining_seconds", "diloco_server_list_number"}
    of_own_tasks = {"diloco_learner_task_metric"}  # the toy has no metrics of its own
    assert unseen == of_regions | of_trouble | of_own_tasks | of_identities
    offsets_s = [value for samples in told.values() for value in samples.get("diloco_clock_offset_seconds", {}).values()]
    assert all(abs(offset_s) < 5 for offset_s in offsets_s)  # server and services share a clock

    # without NATS no process is ready, all are healthy, and the learner trains on
    server.stop()
    await ready(cluster, SERVICES, False)
    steps = (await scrape(cluster, "learner-0"))["diloco_learner_steps_total"][()]
    while (away := await scrape(cluster, "learner-0"))["diloco_learner_steps_total"][()] < steps + 3:
        await asyncio.sleep(0.1)
    assert set(away["diloco_broker_connected"].values()) == {0}
    for name in SERVICES:
        await healthy(cluster, name)
    server.start()
    await ready(cluster, SERVICES, True)
    assert min((await scrape(cluster, "learner-0"))["diloco_broker_reconnects_total"].values()) >= 1


async def test_an_address_in_use_and_one_that_is_none_are_named(launch: Launch) -> None:
    cluster = launch(small())
    cluster.start("syncer-0", "diloco_syncer", metrics_address="127.0.0.1:0")
    assert await get(cluster, "syncer-0", "/readyz") in [
        (503, f"waits for {what}\n") for what in ("NATS", "its run to be created")
    ]
    used = f"127.0.0.1:{cluster.events('metrics_served', 'syncer-0')[-1]['port']}"
    wrong = [
        cluster.start("coordinator", "diloco_coordinator", metrics_address=used),
        cluster.start("learner-0", "diloco_learner", metrics_address=used),
        cluster.start("syncer-1", "diloco_syncer", metrics_address="everywhere"),
    ]
    for (code, line), address in zip(await cluster.refused(*wrong), (used, used, "everywhere"), strict=True):
        assert (code, f"metrics_address (DILOCO_METRICS_ADDRESS) = '{address}'" in line) == (2, True), line


@pytest.mark.promise("services publish metrics that agree with the run")
async def test_a_learner_that_returns_counts_from_nothing_and_knows_what_it_did_in_the_run(launch: Launch) -> None:
    cluster = launch(small(tokens=10**9))
    await cluster.begin()
    await cluster.until(lambda: cluster.steps() > 60, "training")
    first = cluster.toys[0]
    first.leave()
    await cluster.until(lambda: not first.running, "it leaves")
    assert first.member is not None
    before = first.member.step
    again = cluster.toy(0)
    await cluster.until(lambda: again.member is not None and again.member.step > before, "it goes on")
    cluster.gate.close()
    member = again.member
    assert member is not None
    await cluster.until(lambda: again.name in cluster.gate.held, "it is held")
    steps = member.learner.accounts.done.steps
    metric = {metric.name: metric for metric in diloco_learner.run.learner_metrics.METRICS}
    seen = diloco_learner.run.learner_metrics.MemberMoment(member, member.heartbeat())
    assert metric["diloco_learner_steps_total"].value(seen) == steps == member.step - before
    fates = metric["diloco_learner_run_tokens"].value(seen)
    assert isinstance(fates, Mapping)
    assert sum(fates.values()) == pytest.approx(16 * member.step)
