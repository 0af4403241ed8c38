"""The file that a server gets gives each role what its column in ``docs/security.md`` names, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.made.heartbeats import learner_heartbeat
from tests.services.secured import make_keys

from diloco.control import history
from diloco.nats.append import HEADER_BYTES
from diloco.nats.identity import ROLES, load
from diloco.wire import framing
from diloco.wire.body import PART_BYTES
from diloco.wire.control import Gauges, MarkerAnswer, StateLoan, StatePart
from diloco.wire.frame_sizes import largest_bytes
from diloco.wire.offers import Offer
from diloco_coordinator.overview import MOST_STATUS_BYTES
from diloco_ops.keys.permissions import (
    CONTROL,
    CONTROL_PAYLOAD_BYTES,
    COORDINATOR_PAYLOAD_BYTES,
    LEARNER_PAYLOAD_BYTES,
    READER_PAYLOAD_BYTES,
    Who,
    most_payload_bytes,
)

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
RUN, HOME, AWAY = "demo", "us", "eu"
PLACES = {"c": CONTROL, "h": HOME, "o": AWAY}
UNTIL_FOUNDED = {"founder": "learner", "creator": "coordinator"}
COLUMNS = ("learner", "founder", *ROLES[1:], "creator")


def named() -> dict[tuple[str, str, str], set[str]]:
    """The subjects that the page names, by column, place and what may be done."""
    found: dict[tuple[str, str, str], set[str]] = {}
    lines = [line for line in SECURITY.read_text().splitlines() if line.startswith("| ")]
    head = next(i for i, line in enumerate(lines) if line.startswith("| | learner |"))
    columns, what = [cell.strip() for cell in lines[head].split("|")[2:-1]], ""
    assert tuple(columns) == COLUMNS
    for line in lines[head + 1 :]:
        first, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if first.startswith("**"):
            what = first.strip("*")
        elif first.startswith("`") and what:
            for column, places in zip(columns, cells, strict=True):
                for place in places:
                    found.setdefault((column, place, what), set()).add(first.strip("`"))
        else:
            break
    return found


def given(text: str, name: str) -> dict[str, set[str]]:
    """What a server's file allows an identity, and what its account may reach of others, in the words of the page."""
    account = next((found for found in re.findall(r"^  P\d+ \{\n.*?^  \}$", text, re.M | re.S) if f"# {name}: " in found), "")

    def subjects(pattern: str) -> set[str]:
        parts = re.findall(pattern, account, re.S)
        return {subject for part in parts for subject in re.findall(r'^ +"([^"]+)"$', part, re.M)}

    imports = re.findall(r'\{ service: \{ account: (\w+), subject: "([^"]+)" \}', account)
    services = {subject.removeprefix("sent.") if hub == "SIGNALS" else subject for hub, subject in imports}
    heard = {subject.removeprefix("heard.") for subject in re.findall(r'\{ service: "([^"]+)" \}', account)}
    lists = {what: subjects(rf"{what}: \{{ allow: \[(.*?)\] \}}") for what in ("publish", "subscribe")}
    found = lists | {"imports": services, "exports": heard}
    own, letters = {name: "NAME", RUN: "R"}, "".join(re.findall(r"nkey: U(.{20})", account))
    found = {what: {re.sub(rf"\.{name}-{letters}-[0-7]\b", ".NAME-KEY-n", one) for one in them} for what, them in found.items()}
    return {
        what: {re.sub(rf"(?<=[._])({'|'.join(own)})(?=[._]|$)", lambda m: own[m[1]], one) for one in them}
        for what, them in found.items()
    }


def test_a_role_s_largest_message_fits_its_limit() -> None:
    fragments, run = [2**31] * 4096, bytes(8)
    beginning = learner_heartbeat("judge", 1, role="evaluator", failure="\N{SNOWMAN}" * 500)
    none, large = [0] * 4096, [2**62] * 4096
    own = replace(beginning, versions=fragments, steps=none, fragment_tokens=none, lost_tokens=none)
    assert len(framing.pack(own, run)) < READER_PAYLOAD_BYTES - HEADER_BYTES
    trained = [(3 * share, 2**62, 2**62) for share in range(64)]
    counts = {"versions": large, "steps": large, "fragment_tokens": large, "lost_tokens": large}
    learners = replace(beginning, role="learner", trained=trained, **counts)
    assert len(framing.pack(learners, run)) < CONTROL_PAYLOAD_BYTES - HEADER_BYTES
    for kind in (Offer, StatePart):
        assert largest_bytes(kind) + PART_BYTES < LEARNER_PAYLOAD_BYTES - HEADER_BYTES
    assert max(map(largest_bytes, (StateLoan, MarkerAnswer, Gauges))) < CONTROL_PAYLOAD_BYTES - HEADER_BYTES
    assert max(history.MAX_BYTES, MOST_STATUS_BYTES) < COORDINATOR_PAYLOAD_BYTES - HEADER_BYTES


def test_who_never_sends_large_messages_may_not() -> None:
    apart, together = ["us", "eu"], ["us", CONTROL]
    limits = {
        (Who("a", "observer"), "us"): READER_PAYLOAD_BYTES,
        (Who("a", "evaluator", "us"), CONTROL): READER_PAYLOAD_BYTES,
        (Who("a", "coordinator", "us", True), CONTROL): COORDINATOR_PAYLOAD_BYTES,
        (Who("a", "learner", "us"), CONTROL): CONTROL_PAYLOAD_BYTES,
        (Who("a", "learner", "us"), "us"): LEARNER_PAYLOAD_BYTES,
        (Who("a", "learner", "us", True), CONTROL): None,  # the fragment map may be as large as a value
        (Who("a", "syncer", "us"), CONTROL): None,
        (Who("a", "operator"), CONTROL): None,
    }
    for (who, place), most in limits.items():
        assert most_payload_bytes(who, apart, [place]) == most, (who, place)
    assert most_payload_bytes(Who("a", "learner", "us"), apart, together) == LEARNER_PAYLOAD_BYTES
    assert most_payload_bytes(Who("a", "learner"), (), ()) == LEARNER_PAYLOAD_BYTES
    assert most_payload_bytes(Who("a", "learner", None, True), (), ()) is None


def test_an_identity_knows_whether_servers_limit_its_messages(tmp_path: Path) -> None:
    founders = [Who("a-founder", "learner", None, founder=True), Who("a-creator", "coordinator", None, founder=True)]
    everybody = [*(Who(f"a-{role}", role) for role in ROLES), *founders]
    folder = make_keys(tmp_path, RUN, everybody)
    for who in everybody:
        limited = most_payload_bytes(who, (), ()) is not None
        assert load(folder.identity_file(who.name)).sends_little == limited, who


@pytest.mark.parametrize("column", COLUMNS)
def test_a_role_may_do_what_the_page_names(tmp_path: Path, column: str) -> None:
    role = UNTIL_FOUNDED.get(column, column)
    region = None if role in ("operator", "observer") else HOME
    others = [Who("other", "learner", HOME), Who("far", "syncer", AWAY)]
    who = Who("this-one", role, region, column in UNTIL_FOUNDED)  # type: ignore[arg-type]
    keys = make_keys(tmp_path / "k", RUN, [who, *others], regions=(HOME, AWAY), servers={at: [at] for at in PLACES.values()})
    page = named()
    for place, at in PLACES.items():
        may = given((keys.server_folder(at) / "auth.conf").read_text(), who.name)
        publish, subscribe = (page.get((column, place, what), set()) for what in ("publish", "subscribe"))
        assert may["publish"] == publish, place
        assert may["subscribe"] == subscribe, place
        assert may["imports"] <= publish, place
        assert may["exports"] <= subscribe, place
        assert bool(publish) == (place != "o" or role not in ("learner", "evaluator"))
