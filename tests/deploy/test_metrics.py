"""Alert rules and dashboards: of metrics that services tell, as Prometheus and Grafana read them, provisioned in compose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry, ProcessCollector

import diloco_coordinator.run_metrics
import diloco_learner.run.learner_metrics
import diloco_syncer.syncer_metrics
from diloco.core.learner.learner import Activity
from diloco.service import metrics
from diloco.service.metrics import usual_kinds
from diloco_coordinator.server_watch import server_metrics as server_watch
from diloco_ops.keys.pki import Authority, new_key, plain_text
from diloco_syncer.shard import STATES

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "metrics" / "alerts.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "metrics" / "dashboards").glob("*.json"))
CASES = ROOT / "tests" / "deploy" / "alerts_test.yml"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
TROUBLESHOOTING_PAGE = ROOT / "docs" / "troubleshooting.md"

EVERYWHERE = {"run", "name", "region"}  # labels of all of a service's own metrics
SCRAPED = {"job", "instance", "team"}  # labels that Prometheus adds
TABLES = (
    metrics.COMMON,
    metrics.CONNECTED,
    diloco_learner.run.learner_metrics.METRICS,
    diloco_learner.run.learner_metrics.OF_PROCESSES,
    diloco_syncer.syncer_metrics.METRICS,
    diloco_coordinator.run_metrics.METRICS,
    server_watch.METRICS,
)
# of labels with few values: those that there are, by metric
VALUES = {
    ("diloco_build_info", "service"): {"coordinator", "syncer", "learner", "evaluator", "server-watch"},
    ("diloco_learner_state", "state"): set(get_args(Activity)),
    ("diloco_syncer_state", "state"): set(STATES),
    ("diloco_coordinator_run_state", "state"): set(diloco_coordinator.run_metrics.STATES),
    ("diloco_learner_versions_applied_total", "own_work"): {"yes", "no"},
    ("diloco_syncer_crossing_bytes_total", "way"): {"sent", "received"},
    ("ALERTS", "alertstate"): {"pending", "firing"},
    ("up", "job"): {"diloco", "diloco-teams"},
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool (Debian: apt-get install prometheus)"
)


def all_rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for rule in all_rules() if "alert" in rule]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def known_labels() -> dict[str, set[str]]:
    """By sample: the labels that it has, those that Prometheus adds included."""
    found = {"up": SCRAPED, "ALERTS": {"alertname", "alertstate", "severity", "other_region", *EVERYWHERE, *SCRAPED}}
    found |= {"diloco:refused_sender:place": {"run", "place", "sender"}}
    for family in ProcessCollector(registry=CollectorRegistry()).collect():
        found |= {sample.name: SCRAPED for sample in family.samples}
    for metric in (metric for table in TABLES for metric in table):
        own = {*metric.labels, *EVERYWHERE, *SCRAPED}
        found[metric.name] = own
        if metric.kind == "histogram":
            found |= {f"{metric.name}_bucket": own | {"le"}, f"{metric.name}_sum": own, f"{metric.name}_count": own}
    return found


def plain(expression: str) -> str:
    """An expression of a dashboard with its variables put in."""
    for variable, value in {"$__rate_interval": "1m", "$__range": "1h"}.items():
        expression = expression.replace(variable, value)
    return expression


def parts(node: Any) -> Iterator[Any]:
    """An expression and all that it is made of."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if isinstance(inner, promql.Expr):
            yield from parts(inner)
    for argument in getattr(node, "args", None) or []:
        yield from parts(argument)


def check(expression: str, source: str) -> None:
    """Fail if an expression names a metric that no service tells, or a label or a value that it does not have."""
    known, tree = known_labels(), list(parts(promql.parse(plain(expression))))
    selectors = [node for node in tree if isinstance(node, promql.VectorSelector)]
    assert selectors, source
    for selector in selectors:
        assert selector.name in known, f"{source}: {selector.name}"
        for matcher in selector.matchers.matchers:
            assert matcher.name in known[str(selector.name)], f"{source}: {selector.name}{{{matcher.name}}}"
            values = VALUES.get((str(selector.name), matcher.name))
            if "$" not in matcher.value and values is not None:
                assert set(matcher.value.split("|")) <= values, f"{source}: {matcher.name}={matcher.value}"
    named = {label for node in tree for label in _grouped(node)}
    assert named <= set().union(*(known[str(selector.name)] for selector in selectors)), f"{source}: {named}"


def _grouped(node: Any) -> list[str]:
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr):
        return list(modifier.labels) if modifier else []
    if isinstance(node, promql.BinaryExpr) and modifier is not None:
        matching = modifier.matching
        return [
            *(matching.labels if matching else ()),
            *(modifier.card.labels or () if hasattr(modifier.card, "labels") else ()),
        ]
    return []


def test_the_check_sees_what_no_service_tells() -> None:
    check('sum by (run) (rate(diloco_syncer_crossing_bytes_total{way="sent"}[5m])) > on (run) 1 * diloco_healthy', "right")
    for wrong in (
        "diloco_learner_lost",
        'diloco_learner_state{staet="stepping"}',
        'diloco_learner_state{state="walking"}',
        'max(diloco_healthy) + max(rate(diloco_syncer_crossing_bytes_total{way="out"}[5m]))',
        "sum by (fragment) (diloco_syncer_open_rounds)",
        "diloco_healthy and on (learner) diloco_ready",
        "histogram_quantile(0.5, diloco_syncer_round_seconds_buckets)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, "wrong")


# ---- alert rules


def test_each_alert_is_of_metrics_that_services_tell_says_what_to_do_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 10
    for rule in rules():
        assert rule.keys() - {"keep_firing_for"} == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"\d+[sm]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        check(rule["expr"], rule["alert"])
        said, where = rule["annotations"]["summary"], rule["annotations"]["docs"]
        assert said.count(". ") + said.count("; ") >= 1, f"{rule['alert']}: it names no remedy"
        page, _, anchor = where.partition("#")
        headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {_anchor(heading) for heading in headings}, where


def test_each_alert_leads_to_the_entry_that_the_page_of_symptoms_names_for_it() -> None:
    table = TROUBLESHOOTING_PAGE.read_text().partition("\n## Alerts\n")[2]
    entries: dict[str, str] = {}
    for names, said in re.findall(r"^\| (`Diloco.*?) \| (.*) \|$", table, re.MULTILINE):
        entry = re.fullmatch(r"\[.*\]\(#(.+)\)", said)  # what is said in the table itself has no entry of its own
        entries |= dict.fromkeys(re.findall(r"`(\w+)`", names), entry[1] if entry else "alerts")
    links = {rule["alert"]: rule["annotations"]["docs"] for rule in rules()}
    assert links == {name: f"docs/troubleshooting.md#{anchor}" for name, anchor in entries.items()}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_each_alert_is_seen_to_fire() -> None:
    fired = set(re.findall(r"alertname: (\w+)|alertname=\"(\w+)\"", CASES.read_text()))
    assert {name for pair in fired for name in pair if name} == {rule["alert"] for rule in rules()}


def test_the_metrics_page_lists_the_alerts() -> None:
    rows = [f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule['for']} |" for rule in rules()]
    listed = [line for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `Diloco")]
    assert [line[: len(row)] for line, row in zip(listed, rows, strict=True)] == rows


@pytest.mark.tool
@needs_promtool
def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    played = subprocess.run(["promtool", "test", "rules", str(CASES)], capture_output=True, text=True, check=False)
    assert played.returncode == 0, played.stdout + played.stderr


@pytest.mark.tool
@needs_promtool
def test_prometheus_takes_the_configuration_of_compose_with_the_rules(tmp_path: Path) -> None:
    mounted = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for config in mounted["services"]["prometheus"]["configs"]:
        shutil.copy(ROOT / mounted["configs"][config["source"]]["file"], tmp_path / Path(config["target"]).name)
    checked = subprocess.run(
        ["promtool", "check", "config", "--lint-fatal", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(all_rules())} rules found" in checked.stdout


@pytest.mark.tool
@needs_promtool
def test_prometheus_takes_the_configuration_of_a_datacenter(tmp_path: Path) -> None:
    folder = ROOT / "deploy" / "datacenter"
    composed = yaml.safe_load((folder / "compose.yml").read_text())
    at = {volume["target"]: volume["source"] for volume in composed["services"]["prometheus"]["volumes"] if "target" in volume}
    assert (folder / at["/etc/prometheus/alerts.yml"]).samefile(RULES)
    # its keys are where the configurations look for them; here any pair
    paths = {"/page": tmp_path / "page", "/observer.identity": tmp_path / "observer.identity", "/teams": tmp_path / "teams"}
    assert paths.keys() < at.keys()
    certificate, private_key, authority = _pair()
    (tmp_path / "page").mkdir()
    for name, text in {"server.pem": certificate, "server.key": private_key, "ca.pem": authority}.items():
        (tmp_path / "page" / name).write_text(text)
    (tmp_path / "observer.identity").write_text(f'x = """\n{certificate}"""\ny = """\n{private_key}"""\n')
    for name in ("prometheus.yml", "web.yml"):
        text = (folder / name).read_text()
        for there, here in paths.items():
            text = re.sub(rf"(?<=[\[ ]){there}\b", str(here), text)
        (tmp_path / name).write_text(text)
    shutil.copy(RULES, tmp_path)
    for what in (("config", "--lint-fatal", "prometheus.yml"), ("web-config", "web.yml")):
        checked = subprocess.run(["promtool", "check", *what], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def _pair() -> tuple[str, str, str]:
    """Return a server's certificate, its key, and the authority's certificate, as PEM."""
    authority, key = Authority.new("demo", new_key()), new_key()
    issued = authority.server("metrics-us", "demo", ["localhost"], datetime.now(UTC) + timedelta(days=2), key.public_key())
    return issued.certificate, plain_text(key), authority.certificate


# ---- dashboards


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_each_panel_is_of_metrics_that_services_tell(path: Path) -> None:
    dashboard = load(path)
    for panel in panels(dashboard):
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check(target["expr"], panel["title"])
            shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert shown <= {label for labels in known_labels().values() for label in labels}, panel["title"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            check(f"max by ({asked[2]}) ({asked[1]})", variable["name"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_each_dashboard_is_in_grafanas_schema(path: Path) -> None:
    """Grafana's own types read it, and what they write has all that is in the file: they drop what they do not know."""
    register_default_plugins()
    dashboard = load(path)
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert list(_missing(dashboard, again, "")) == []


def _missing(value: Any, among: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(among, dict):
        for key, inner in value.items():
            if key not in among:
                yield f"{where}.{key}"
            else:
                yield from _missing(inner, among[key], f"{where}.{key}")
    elif isinstance(value, list) and isinstance(among, list) and len(value) == len(among):
        for number, pair in enumerate(zip(value, among, strict=True)):
            yield from _missing(*pair, f"{where}[{number}]")
    elif value != among:
        yield f"{where}: {value!r} became {among!r}"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: str(path.stem))
def test_panels_lie_beside_each_other_and_ask_the_chosen_prometheus(path: Path) -> None:
    dashboard = load(path)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "run", "region"} <= variables
    for panel in panels(dashboard):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * len(sources)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        used = {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
        assert {name for name in used if not name.startswith("__")} <= variables


def test_compose_provisions_all_dashboards_and_the_prometheus_that_they_ask() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    grafana, prometheus = composed["services"]["grafana"], composed["services"]["prometheus"]
    assert grafana["profiles"] == prometheus["profiles"] == ["metrics"]
    assert all(port.startswith("127.0.0.1:") for port in (*grafana["ports"], *prometheus["ports"]))
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    mounted = {config["target"]: ROOT / composed["configs"][config["source"]]["file"] for config in grafana["configs"]}
    provisioning = "/etc/grafana/provisioning"
    [source] = yaml.safe_load(mounted[f"{provisioning}/datasources/prometheus.yml"].read_text())["datasources"]
    [provider] = yaml.safe_load(mounted[f"{provisioning}/dashboards/diloco.yml"].read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert prometheus["ports"][0].endswith(":9090")
    assert set(grafana["networks"]) <= set(prometheus["networks"])
    shown = {target: path for target, path in mounted.items() if path.suffix == ".json"}
    assert sorted(shown.values()) == DASHBOARDS
    assert {str(Path(target).parent) for target in shown} == {provider["options"]["path"]}
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in shown
    for dashboard in map(load, DASHBOARDS):
        chosen = next(variable for variable in dashboard["templating"]["list"] if variable["name"] == "datasource")
        assert chosen["current"] == {"text": source["name"], "value": source["uid"]}
    assert len({load(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)


def test_grafana_knows_how_often_prometheus_scrapes_the_job_of_the_alerts() -> None:
    config = yaml.safe_load((ROOT / "compose" / "prometheus.yml").read_text())
    [source] = yaml.safe_load((ROOT / "compose" / "grafana" / "datasource.yml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["diloco"]


def test_refused_messages_count_from_0_for_each_usual_kind() -> None:
    class Refused:
        def counts(self) -> dict[tuple[str, str], int]:
            return {("ann", "HashError"): 2, ("bob", "HashError"): 1, ("bob", "meeting"): 4}

    told = dict(metrics.by_kind(Refused()))  # type: ignore[arg-type]
    assert told.pop(("HashError",)) == 3
    assert told.pop(("meeting",)) == 4
    assert {"FormatError", "ChainError", "ClaimError", "MessageError"} <= {kind for (kind,) in told}
    assert set(told.values()) == {0.0}
    assert len(told) == len(usual_kinds()) - 1
