"""``diloco keys``: what it makes, and what it says where something is wrong. test_security.py tries who may do what."""

from __future__ import annotations

import hashlib
import re
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.made.command_line import Command, commanding
from tests.made.fixtures import Ended
from tests.pace import DEADLINE_S

from diloco.nats import identity
from diloco.nats.server_list import ServerList
from diloco.wire.subjects import reader_of
from diloco_ops.broker.server import find_binary
from diloco_ops.keys import accounts
from diloco_ops.keys.keys_command import keys
from diloco_ops.keys.permissions import CONTROL, Who, is_known, permissions

REGIONS = ("us", "eu")
LISTED = ServerList("nats-us", 3, "0123abcd")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with commanding(keys, ("keys",), 120, tmp_path, monkeypatch, capfd) as made:
        yield made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(ended: Ended) -> str:
    """The one line that a command says which does not do what was asked."""
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    return ended.err


def regional(command: Command) -> None:
    """A folder with two servers and a member of each kind."""
    for line in (
        "init k --run demo --region us --region eu",
        "add k server nats-us --host nats.us.example --host 10.0.0.1 --serves us --serves control",
        "add k server nats-eu --host nats.eu.example --serves eu",
        "add k learner learner-us-0 --region us --founder",
        "add k learner learner-eu-0 --region eu --batch-tokens 4096 --min-step-s 0.05",
        "add k syncer syncer-eu --region eu --days 10",
        "add k operator me",
    ):
        ended = command(*line.split())
        assert (ended.code, ended.err) == (0, ""), ended


def test_what_is_secret_is_nobody_elses_to_read(command: Command, tmp_path: Path) -> None:
    regional(command)
    folder = tmp_path / "k"
    secret = [folder / "ca.key", folder / "grants.key", *folder.glob("identities/*"), *folder.glob("servers/*/server.key")]
    assert len(secret) == 2 + 4 + 2
    assert mode(folder) == 0o700
    assert {mode(path) for path in secret} == {0o600}
    words = [line for path in secret for line in path.read_text().splitlines() if len(line) == 64 or line.startswith("seed")]
    others = "".join(path.read_text() for path in folder.rglob("*") if path.is_file() and path not in secret)
    assert len(words) > len(secret)
    certificates = "".join(path.read_text() for path in folder.rglob("*.pem"))
    assert not [word for word in words if word in others and word not in certificates]


def test_an_identity_is_what_its_process_reads(command: Command, tmp_path: Path) -> None:
    regional(command)
    read = identity.load(tmp_path / "k" / "identities" / "learner-us-0.identity")
    assert (read.run, read.role, read.name, read.region, read.founder) == ("demo", "learner", "learner-us-0", "us", True)
    assert read.tls.check_hostname
    assert abs(read.expires - datetime.now(UTC) - timedelta(days=365)) < timedelta(minutes=1)
    listed = tomllib.loads((tmp_path / "k" / "keys.toml").read_text())
    entry = next(entry for entry in listed["identities"] if entry["name"] == "learner-us-0")
    assert (entry["public_key"], entry["expires"]) == (read.public_key, read.expires)


def test_a_learner_is_granted_work_and_more_of_it_without_new_keys(command: Command, tmp_path: Path) -> None:
    regional(command)
    (us, eu), syncer = (
        [tmp_path / "k" / "identities" / f"learner-{region}-0.identity" for region in ("us", "eu")],
        tmp_path / "k" / "identities" / "syncer-eu.identity",
    )

    def granted(file: Path) -> tuple[int | None, float | None]:
        read = identity.load(file)
        assert read.authority == identity.load(syncer).authority
        assert read.grant is not None
        grant = read.grant.decode()
        assert (grant.run, grant.learner, grant.public_key) == ("demo", read.name, read.public_key)
        return grant.batch_tokens, grant.min_step_s

    assert identity.load(syncer).grant is None
    assert (granted(us), granted(eu)) == ((65_536, 0.01), (4096, 0.05))  # by default, and as given
    before, servers = identity.load(eu), [path.read_bytes() for path in sorted(tmp_path.glob("k/servers/*/*"))]
    ended = command("grant", "k", "learner-eu-0", "--batch-tokens", "8192")
    assert "learner-eu-0: 8192 tokens a step, steps of 0.05 s or longer" in ended.out
    assert granted(eu) == (8192, 0.05)
    after = identity.load(eu)
    assert (after.seed, after.expires, mode(eu), after.tls.check_hostname) == (before.seed, before.expires, 0o600, True)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("k/servers/*/*"))] == servers  # no server is to be reloaded
    assert command("renew", "k", "learner-eu-0").code == 0
    assert granted(eu) == (8192, 0.05)
    eu.unlink()  # it was handed over
    assert "put the file back" in refused(command("grant", "k", "learner-eu-0", "--batch-tokens", "9000"))


def test_certificates_say_whose_they_are_and_what_for(command: Command, tmp_path: Path) -> None:
    regional(command)
    text = tomllib.loads((tmp_path / "k" / "identities" / "syncer-eu.identity").read_text())
    leaf = x509.load_pem_x509_certificate(text["certificate"].encode())
    authority = x509.load_pem_x509_certificate((tmp_path / "k" / "ca.pem").read_bytes())
    leaf.verify_directly_issued_by(authority)
    assert leaf.subject.rfc4514_string() == "OU=syncer,O=demo,CN=syncer-eu"
    purposes = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]  # no member can pass for a server
    server = x509.load_pem_x509_certificate((tmp_path / "k" / "servers" / "nats-us" / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["nats.us.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    began = datetime.now(UTC) - timedelta(hours=23)  # a clock in another time zone takes nobody off
    assert all(each.not_valid_before_utc < began for each in (leaf, server, authority))


def test_servers_know_whom_they_have_to(command: Command, tmp_path: Path) -> None:
    regional(command)
    lists = {name: (tmp_path / "k" / "servers" / name / "auth.conf").read_text() for name in ("nats-us", "nats-eu")}
    known = {
        name: {line.split()[1].strip(":") for line in text.splitlines() if line.startswith("    # ")}
        for name, text in lists.items()
    }
    assert known == {
        "nats-us": {"learner-us-0", "learner-eu-0", "syncer-eu", "me"},  # it has the control store too
        "nats-eu": {"learner-eu-0", "syncer-eu", "me"},
    }


@pytest.mark.tool
def test_a_server_takes_the_file(command: Command, tmp_path: Path) -> None:
    regional(command)
    for name in ("nats-us", "nats-eu"):
        config = tmp_path / "k" / "servers" / name / "nats.conf"
        config.write_text('jetstream { store_dir: "js" }\ninclude "auth.conf"\n')
        done = subprocess.run(
            [find_binary(), "-t", "-c", config], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr


def test_revoking_takes_the_key_off_every_list(command: Command, tmp_path: Path) -> None:
    regional(command)
    path = tmp_path / "k" / "identities" / "syncer-eu.identity"
    public_key = tomllib.loads(path.read_text())["public_key"]
    ended = command("revoke", "k", "syncer-eu")
    assert ended.code == 0
    assert [line.split()[1] for line in ended.out.splitlines()[1:]] == ["nats-eu", "nats-us"]
    assert not path.exists()
    assert not [path for path in (tmp_path / "k").rglob("auth.conf") if public_key in path.read_text()]
    assert "syncer-eu     eu           revoked" in command("list", "k").out
    assert "choose another name" in refused(command("add", "k", "syncer", "syncer-eu", "--region", "eu"))
    assert "revoked already" in refused(command("revoke", "k", "syncer-eu"))
    assert "revoked already" in refused(command("renew", "k", "syncer-eu"))


def test_renewing_makes_the_old_key_useless(command: Command, tmp_path: Path) -> None:
    regional(command)
    path = tmp_path / "k" / "identities" / "learner-eu-0.identity"
    before = identity.load(path)
    assert command("renew", "k", "learner-eu-0", "--days", "20").code == 0
    after = identity.load(path)
    assert after.public_key != before.public_key
    assert (after.name, after.region, after.role) == (before.name, before.region, before.role)
    assert "(soon)" in next(line for line in command("list", "k").out.splitlines() if "learner-eu-0" in line)
    lists = [path.read_text() for path in (tmp_path / "k").rglob("auth.conf")]
    assert [(before.public_key in text, after.public_key in text) for text in lists] == [(False, True)] * 2
    certificate = tmp_path / "k" / "servers" / "nats-eu" / "server.pem"
    old = certificate.read_bytes()
    assert command("renew", "k", "nats-eu").code == 0
    assert certificate.read_bytes() != old


def test_once_a_run_has_begun_nobody_founds_it(command: Command, tmp_path: Path) -> None:
    regional(command)
    path = tmp_path / "k" / "servers" / "nats-us" / "auth.conf"

    def founding() -> int:  # a right of the user, and what leads out of its account
        return path.read_text().count('"$KV.DILOCO_demo.map"')

    assert founding() == 2
    assert "learner-us-0" in command("founded", "k").out
    assert founding() == 0
    assert "(any more)" in refused(command("founded", "k"))


def test_a_run_without_regions(command: Command, tmp_path: Path) -> None:
    for line in ("init k --run demo", "add k server nats --host localhost", "add k learner a", "add k syncer b"):
        assert command(*line.split()).code == 0
    assert "region" not in tomllib.loads((tmp_path / "k" / "identities" / "a.identity").read_text())
    assert "has no regions" in refused(command("add", "k", "learner", "c", "--region", "us"))
    assert "has no regions" in refused(command("add", "k", "server", "c", "--host", "h", "--serves", "us"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("init k --run demo", "not empty"),
        ("init other --run Demo", "run = 'Demo'"),
        ("init other --run demo --region us --region us", "twice"),
        ("init other --run demo --region control", "give the region another name"),
        ("init other --run demo --region U.S", "U.S"),
        ("add nowhere learner x", "diloco keys init nowhere"),
        ("add k lerner x --region us", "did you mean 'learner'"),
        ("add k learner x", "us, eu: say which with --region"),
        ("add k learner x --region uss", "did you mean 'us'"),
        ("add k learner X --region us", "name = 'X'"),
        ("add k learner learner-us-0 --region us", "already exists"),
        ("add k learner nats-us --region us", "already exists"),
        ("add k learner x --region us --days 0", "--days 0"),
        ("add k learner x --region us --days -3", "--days -3"),
        ("add k learner x --region us --host h", "--host does not apply to a learner"),
        ("add k syncer x --region us --founder", "only a learner"),
        ("add k syncer x --region us --batch-tokens 9", "--batch-tokens does not apply to a syncer"),
        ("add k learner x --region us --batch-tokens 0", "batch_tokens = 0"),
        ("add k learner x --region us --min-step-s 0", "min_step_s = 0.0"),
        ("add k syncer x --region us --processes 2", "--processes does not apply to a syncer"),
        ("add k learner x --region us --processes 1025", "processes = 1025"),
        ("renew k learner-us-0 --processes -1", "processes = -1"),
        ("renew k syncer-eu --processes 2", "--processes does not apply to a syncer"),
        ("renew k nats-us --processes 2", "--processes does not apply to a server"),
        ("grant k syncer-eu --batch-tokens 9", "is a syncer: only learners need grants"),
        (
            "grant k learner-eu-0 --batch-tokens 4095",
            "already has a larger grant (4096 tokens a step, steps of 0.05 s or longer)",
        ),
        ("grant k learner-eu-0 --min-step-s 0.1", "revoke it, and add another name"),
        ("add k server x --serves us", "--host"),
        ("add k server x --host nats --serves usa", "did you mean 'us'"),
        ("add k server x --host nats", "us, eu, control: say which"),
        ("add k server x --host nats/x --serves us", "nats/x"),
        ("add k server x --host nats --serves us --region us", "--region does not apply to a server"),
        ("revoke k learner-us-1", "did you mean 'learner-us-0'"),
        ("revoke k nats-us", "is a server"),
        ("renew k missing", "there is no 'missing'"),
    ],
)
def test_what_cannot_be_is_one_clear_line_and_changes_nothing(command: Command, tmp_path: Path, line: str, said: str) -> None:
    regional(command)

    def seen() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = seen()
    assert said in refused(command(*line.split()))
    assert seen() == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "ca.key").chmod(0o640), "chmod 600"),
        (lambda folder: (folder / "ca.key").unlink(), "ca.key: cannot be read"),
        (lambda folder: (folder / "ca.key").write_text("x"), "is damaged"),
        (lambda folder: (folder / "grants.key").write_text("x"), "is damaged"),
        (lambda folder: (folder / "grants.key").chmod(0o640), "chmod 600"),
        (
            lambda folder: (folder / "ca.pem").write_bytes((folder / "servers/nats-us/server.pem").read_bytes()),
            "not the certificate's",
        ),
        (lambda folder: (folder / "keys.toml").write_text("format = ["), "not TOML"),
        (lambda folder: (folder / "keys.toml").write_text('format = 2\nrun = "demo"'), "this version reads 1"),
        (lambda folder: (folder / "keys.toml").write_text('format = 1\nrun = "demo"\nregions = []\nrun_ = 1'), "run_"),
        (
            lambda folder: (folder / "keys.toml").write_bytes((folder / "keys.toml").read_bytes() * 1 + b"[[servers]]\n"),
            "servers",
        ),
    ],
)
def test_a_damaged_folder_is_one_clear_line(command: Command, tmp_path: Path, damage: object, said: str) -> None:
    regional(command)
    assert callable(damage)
    damage(tmp_path / "k")
    assert said in refused(command("list", "k"))


# ---- who may do what


def test_a_learner_writes_its_own_and_reads_the_log() -> None:
    allowed = permissions(Who("a", "learner", "us"), "r", REGIONS, ["us"])
    assert [subject for subject in allowed.publish if not subject.startswith("$JS")] == [
        "_INBOX_a.>",
        "diloco.r.delta.*.a.head",
        "diloco.r.delta.*.a.part.*",
        "diloco.r.state.*",
        "_R_.>",
    ]
    assert {subject.split(".")[-1].split("_")[-1] for subject in allowed.publish if "API.STREAM" in subject} == {"LOG"}
    assert allowed.subscribe == ("_INBOX_a.>", "diloco.r.state.a", "diloco.r.answer.a.*")
    control = permissions(Who("a", "learner", "us"), "r", REGIONS, [CONTROL])
    assert [subject for subject in control.publish if subject.startswith("$KV")] == [
        "$KV.DILOCO_r.member.a",
        "$KV.DILOCO_r.share.a",
    ]


def test_nobody_but_a_learner_writes_offers_and_nobody_but_a_syncer_versions() -> None:
    roles = identity.ROLES
    everything = {role: permissions(Who("a", role, None, role == "learner"), "r", (), ()).publish for role in roles}
    writers = {
        what: [role for role in roles if any(f".{what}." in s for s in everything[role])] for what in ("delta", "fragment")
    }
    assert writers == {"delta": ["learner"], "fragment": ["syncer"]}
    assert [role for role in roles if "diloco.r.keyframe.*.head" in everything[role]] == ["learner", "syncer"]
    assert "diloco.r.keyframe.*.head" not in permissions(Who("a", "learner"), "r", (), ()).publish
    assert not [subject for subjects in everything.values() for subject in subjects if subject.startswith(("$SYS", ">", "*"))]
    unbound = {s for subjects in everything.values() for s in subjects if s.startswith("$JS") and "_r" not in s}
    assert unbound == {"$JS.API.INFO", "$JS.API.STREAM.LIST"}
    for role in roles:  # names of other runs are an operator's to see
        assert ("$JS.API.STREAM.LIST" in everything[role]) == (role == "operator")


def test_consumers_are_named_by_a_key_that_nobody_guesses() -> None:
    key = "UABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRSTUVWX"
    assert Who("a-1", "learner", public_key=key).consumers == [f"a-1-ABCDEFGHIJKLMNOPQRST-{slot}" for slot in range(8)]
    assert Who("a-1", "learner").consumers[7] == "a-1-7"
    for consumer, of in {"a-1-ABCDEFGHIJKLMNOPQRST-0": "a-1", "a-1-7": "a-1", "a-1": "a", "KVwatch": "KVwatch"}.items():
        assert reader_of(consumer) == of


def test_processes_of_a_learner_share_an_identity_and_each_has_consumers_of_its_own(command: Command, tmp_path: Path) -> None:
    regional(command)
    file, lists = (tmp_path / "k" / path for path in ("identities/learner-us-1.identity", "servers/nats-us/auth.conf"))
    assert command("add", "k", "learner", "learner-us-1", "--region", "us", "--processes", "3").code == 0
    of_three = identity.load(file)
    assert of_three.processes == 3
    letters = of_three.public_key[1:21]
    made = re.findall(
        rf'"\$JS\.API\.CONSUMER\.CREATE\.DILOCO_demo_LOG\.learner-us-1-{letters}-(\d+)\.>"$', lists.read_text(), re.M
    )
    assert sorted(map(int, made)) == list(range(24))
    assert "learner-us-1" in command("list", "k").out.split("3 processes")[0].splitlines()[-1]
    assert command("renew", "k", "learner-us-1").code == 0
    assert identity.load(file).processes == 3
    assert command("renew", "k", "learner-us-1", "--processes", "16").code == 0
    assert (identity.load(file).processes, identity.load(file).seed == of_three.seed) == (16, False)
    limits = re.findall(r"max_connections: (\d+)", lists.read_text())
    assert sorted(map(int, limits))[-2:] == [32, 64], "four for each of 16"


def test_an_account_imports_what_its_identity_may_publish_and_nothing_else() -> None:
    people = {0: Who("a", "learner", "us"), 2: Who("b", "syncer", "us"), 3: Who("c", "observer"), 4: Who("d", "operator")}
    made = {account.name: account for account in accounts.accounts("r", REGIONS, ["us", CONTROL], people, 5, LISTED)}
    assert list(made) == ["RUN", "SIGNALS", *(f"P{number}" for number in range(2 * accounts.SPARE))]
    assert [name for name, account in made.items() if account.user is None] == [
        "RUN",
        "SIGNALS",
        "P1",  # revoked, or of another region
        *(f"P{number}" for number in range(5, 2 * accounts.SPARE)),
    ]
    for number, who in people.items():
        own = made[f"P{number}"]
        allowed = permissions(who, "r", REGIONS, ["us", CONTROL])
        services = [one.to or one.subject for one in own.imports if one.kind == "service"]
        chunks = [subject for subject in allowed.publish if subject.startswith("$JS.SNAPSHOT.RESTORE.")]
        assert sorted(services) == sorted(set(allowed.publish) - {f"_INBOX_{who.name}.>", "_R_.>", *chunks})
        assert {one.account for one in own.imports} <= {"RUN", "SIGNALS"}
        assert list(own.streams) == chunks  # a service would put a header before a chunk's bytes
    heard = {one.subject for one in made["SIGNALS"].imports if one.account == "P0"}
    whats = ("heartbeat.*", "presence.*", "round.*", "marker", "changed", "state.a")
    assert heard == {f"heard.diloco.r.{what}" for what in whats}
    assert made["RUN"].streams == ("_INBOX_d.>",)  # snapshots of streams are sent there
    assert sorted((one.kind, one.account, one.subject) for one in made["RUN"].imports) == [
        ("stream", "P4", f"$JS.SNAPSHOT.RESTORE.{stream}.>")
        for stream in ("DILOCO_r_ARCHIVE", "DILOCO_r_LOG", "DILOCO_r_OFFERS", "KV_DILOCO_r")
    ]


@pytest.mark.parametrize(
    ("pattern", "subject", "covered"),
    [
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.*.>", True),
        ("a.>", "a", False),
        ("a.b", "a.*", False),
        ("a.b", "a.b", True),
    ],
)
def test_a_pattern_covers_subjects_and_narrower_patterns(pattern: str, subject: str, covered: bool) -> None:
    assert accounts.covers(pattern, subject) == covered


def test_an_identity_keeps_the_number_of_its_account(command: Command, tmp_path: Path) -> None:
    regional(command)

    def numbers() -> dict[str, int]:
        return {
            entry["name"]: entry["account"] for entry in tomllib.loads((tmp_path / "k/keys.toml").read_text())["identities"]
        }

    before = numbers()
    assert sorted(before.values()) == [0, 1, 2, 3]
    assert command("add", "k", "learner", "aa", "--region", "us").code == 0  # the first by name
    assert command("renew", "k", "learner-us-0").code == 0
    assert command("revoke", "k", "syncer-eu").code == 0
    assert command("add", "k", "learner", "ab", "--region", "us").code == 0
    assert numbers() == before | {"aa": 4, "ab": 5}
    older = re.sub(r"account = \d+\n", "", (tmp_path / "k/keys.toml").read_text())
    (tmp_path / "k/keys.toml").write_text(older)
    assert command("founded", "k").code == 0
    assert sorted(numbers().values()) == [0, 1, 2, 3, 4, 5]


def test_servers_files_are_written_again(command: Command, tmp_path: Path) -> None:
    regional(command)
    paths = sorted((tmp_path / "k" / "servers").rglob("*.conf"))
    before = [path.read_text() for path in paths]
    for path in paths:
        path.write_text("of an older version")
    assert [line.split()[1] for line in command("refresh", "k").out.splitlines()] == ["nats-eu", "nats-us"]
    assert [path.read_text() for path in paths] == before


@pytest.mark.tool
def test_routes_are_pinned_to_the_control_servers(command: Command, tmp_path: Path) -> None:
    regional(command)
    servers = tmp_path / "k" / "servers"

    def pins(name: str) -> list[str]:
        return re.findall(r'"([0-9a-f]{64})"', (servers / name / "routes.conf").read_text())

    def public_key(name: str) -> str:
        read = ["openssl", "x509", "-in", str(servers / name / "server.pem"), "-pubkey", "-noout"]
        pem = subprocess.run(read, capture_output=True, check=True).stdout
        der = subprocess.run(
            ["openssl", "pkey", "-pubin", "-outform", "DER"], input=pem, capture_output=True, check=True
        ).stdout
        return hashlib.sha256(der).hexdigest()

    assert pins("nats-us") == [public_key("nats-us")]  # it has the control store too
    assert not (servers / "nats-eu" / "routes.conf").exists()
    ended = command("add", "k", "server", "control-eu", "--host", "h", "--serves", "control")
    assert "server nats-us gets" in ended.out
    assert "routes.conf" in ended.out
    assert pins("nats-us") == pins("control-eu") == [public_key("control-eu"), public_key("nats-us")]
    assert "server control-eu gets" in command("renew", "k", "nats-us").out
    assert pins("control-eu") == [public_key("control-eu"), public_key("nats-us")]


def test_a_learner_of_another_region_is_not_known() -> None:
    assert not is_known(Who("a", "learner", "eu"), REGIONS, ["us"])
    assert is_known(Who("a", "learner", "eu"), REGIONS, ["us", CONTROL])
    assert is_known(Who("a", "syncer", "eu"), REGIONS, ["us"])
    there = permissions(Who("a", "syncer", "eu"), "r", REGIONS, ["us"])
    assert "diloco.r.fragment.*.head" in there.publish
    assert not [s for s in there.publish if ("CREATE.DILOCO" in s and "STREAM" in s) or "PURGE" in s or "regional" in s]


def test_a_region_more_gets_keys(command: Command, tmp_path: Path) -> None:
    regional(command)
    assert "no region of run 'demo'" in refused(command("add", "k", "server", "nats-ap", "--host", "ap", "--serves", "ap"))
    ended = command("region", "k", "ap")
    assert (ended.code, ended.err) == (0, "")
    assert command("add", "k", "server", "nats-ap", "--host", "ap", "--serves", "ap").code == 0
    assert command("add", "k", "syncer", "syncer-ap", "--region", "ap").code == 0
    # syncers of all regions copy records into every log, so the other regions' servers know the new one
    assert "syncer-ap" in (tmp_path / "k" / "servers" / "nats-eu" / "auth.conf").read_text()
    assert "region ap: already exists; the regions are us, eu, ap" in refused(command("region", "k", "ap"))
    assert "region control: already exists" in refused(command("region", "k", "control"))
    assert "regions" in refused(command("region", "k", "A b"))
    command("init", "one", "--run", "demo")
    assert "has keys without regions" in refused(command("region", "one", "ap"))
