"""Keys whose private parts never leave the team that made them: requests and answers; the authority's passphrase."""

from __future__ import annotations

import getpass
import io
import re
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from tests.made.command_line import Command, commanding
from tests.made.fixtures import Ended

from diloco.nats import identity
from diloco.settings.folders import KEYS_VARIABLE, PASSPHRASE_VARIABLE
from diloco.settings.loading import load_service
from diloco.settings.service import SyncerSettings
from diloco_ops.keys import pki
from diloco_ops.keys.keys_command import keys

REQUESTS = {
    "nats-eu": "server nats-eu --serves eu --host nats.eu.example --host 10.0.0.2",
    "syncer-eu": "syncer syncer-eu --region eu",
    "learner-eu": "learner learner-eu --region eu --processes 2",
}
Change = Callable[[dict[str, object]], None]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    for variable in (PASSPHRASE_VARIABLE, KEYS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with commanding(keys, ("keys",), 200, tmp_path, monkeypatch, capfd) as made:
        yield made


def good(ended: Ended) -> str:
    assert (ended.code, ended.err) == (0, ""), ended
    return ended.out


def refused(ended: Ended) -> str:
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    return ended.err


def begun(command: Command) -> None:
    """An operator's folder with a server and a syncer of its own."""
    for line in (
        "init op --run demo --region us --region eu",
        "add op server nats-us --host nats.us.example --serves us --serves control",
        "add op syncer syncer-us --region us",
    ):
        good(command(*line.split()))


def requested(command: Command, *names: str, team: str = "team") -> list[str]:
    """Have the team ask for these; the files of its requests."""
    for name in names:
        good(command("request", team, *REQUESTS[name].split(), "--run", "demo"))
    return [f"{team}/requests/{name}.request" for name in names]


def answered(command: Command, *names: str) -> list[str]:
    """Have the operator answer requests for these; the files of the answers."""
    good(command("sign", "op", *requested(command, *names)))
    return [f"op/answers/{name}.answer" for name in names]


def fingerprints(text: str) -> list[str]:
    return re.findall(r"fingerprint ((?:[0-9a-f]{4}-){5}[0-9a-f]{4})", text)


def secret_lines(folder: Path) -> set[str]:
    """Lines of private keys and seeds in a folder's files."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text()
            for block in re.findall(r"BEGIN (?:EC )?PRIVATE KEY-----\n(.*?)\n-----END", text, re.S):
                found |= set(block.splitlines())
            found |= set(re.findall(r"\bSU[A-Z2-7]{56}\b", text))
    return found


def test_what_is_private_stays_with_its_team_and_the_files_are_what_keys_add_makes(command: Command, tmp_path: Path) -> None:
    begun(command)
    team, operator = tmp_path / "team", tmp_path / "op"
    asked = [fingerprints(good(command("request", "team", *line.split(), "--run", "demo"))) for line in REQUESTS.values()]
    own = secret_lines(team)
    assert len(own) == 3 * 3 + 2  # of three PEM blocks, and two seeds
    said = good(command("sign", "op", *(f"team/requests/{name}.request" for name in REQUESTS), "--min-step-s", "0.05"))
    assert set(fingerprints(said)[:3]) == {one for (one,) in asked}, "the operator sees what the team saw"
    assert "learner learner-eu (in eu; 2 processes)" in said
    assert "server nats-eu (for nats.eu.example, 10.0.0.2; with eu)" in said
    assert [line.split()[1] for line in said.splitlines() if "is reloaded" in line] == ["nats-eu", "nats-us"]
    completed = good(command("complete", "team", *(f"op/answers/{name}.answer" for name in REQUESTS)))
    assert set(fingerprints(completed)) == set(fingerprints(said)[3:])
    assert not own & secret_lines(operator)
    assert secret_lines(team) == own
    assert {path.stat().st_mode & 0o777 for path in team.rglob("*") if path.is_file() and secret_lines(path.parent)} <= {
        0o600,
        0o644,
    }
    assert not list((team / "requests").iterdir())

    read = identity.load(team / "identities" / "learner-eu.identity")
    assert (read.run, read.role, read.name, read.region, read.founder, read.processes) == (
        "demo",
        "learner",
        "learner-eu",
        "eu",
        False,
        2,
    )
    assert read.tls.check_hostname
    assert read.grant is not None
    grant = read.grant.decode()
    assert (grant.public_key, grant.batch_tokens, grant.min_step_s) == (read.public_key, 65_536, 0.05)
    assert identity.load(team / "identities" / "syncer-eu.identity").grant is None
    made = {path.name: path.stat().st_mode & 0o777 for path in (team / "servers" / "nats-eu").iterdir()}
    assert made == {"ca.pem": 0o644, "server.pem": 0o644, "auth.conf": 0o644, "server.key": 0o600}
    assert not (operator / "servers" / "nats-eu" / "server.key").exists()
    for name in ("nats-us", "nats-eu"):
        assert read.public_key in (operator / "servers" / name / "auth.conf").read_text()
    assert (team / "servers/nats-eu/auth.conf").read_text() == (operator / "servers/nats-eu/auth.conf").read_text()


def test_a_team_renews_its_own_keys_and_gets_a_larger_grant(command: Command, tmp_path: Path) -> None:
    begun(command)
    names = list(REQUESTS)
    good(command("complete", "team", *answered(command, *names)))
    before = {name: identity.load(tmp_path / f"team/identities/{name}.identity") for name in names[1:]}
    said = good(command("grant", "op", "learner-eu", "--batch-tokens", "70000"))
    assert "its team gets op/answers/learner-eu.answer" in said
    good(command("complete", "team", "op/answers/learner-eu.answer"))
    larger = identity.load(tmp_path / "team/identities/learner-eu.identity")
    assert larger.seed == before["learner-eu"].seed
    assert larger.grant is not None
    assert larger.grant.decode().batch_tokens == 70_000

    files = requested(command, *names)
    assert "already exists: if its team asks for new keys, sign with --renew" in refused(command("sign", "op", *files))
    good(command("sign", "op", *files, "--renew", "--days", "20"))
    assert identity.load(tmp_path / "team/identities/syncer-eu.identity").seed == before["syncer-eu"].seed  # until the answer
    key = (tmp_path / "team/servers/nats-eu/server.key").read_text()
    good(command("complete", "team", *(f"op/answers/{name}.answer" for name in names)))
    after = {name: identity.load(tmp_path / f"team/identities/{name}.identity") for name in names[1:]}
    assert all(after[name].seed != before[name].seed for name in after)
    assert after["learner-eu"].grant is not None
    assert after["learner-eu"].grant.decode().batch_tokens == 70_000
    assert (tmp_path / "team/servers/nats-eu/server.key").read_text() != key
    listed = (tmp_path / "op/servers/nats-us/auth.conf").read_text()
    assert [before["syncer-eu"].public_key in listed, after["syncer-eu"].public_key in listed] == [False, True]
    good(command("revoke", "op", "syncer-eu"))
    assert not (tmp_path / "op/answers/syncer-eu.answer").exists()
    assert "was revoked" in refused(command("sign", "op", *requested(command, "syncer-eu"), "--renew"))
    assert "never given out again" in refused(command("sign", "op", "team/requests/syncer-eu.request"))


def test_an_answer_of_before_takes_no_newer_list_away(command: Command, tmp_path: Path) -> None:
    begun(command)
    [answer] = answered(command, "nats-eu")
    good(command("complete", "team", answer))
    good(command("add", "op", "operator", "ada"))
    newest = (tmp_path / "op/servers/nats-eu/auth.conf").read_text()
    own = tmp_path / "team/servers/nats-eu/auth.conf"
    assert own.read_text() != newest
    own.write_text(newest)
    good(command("complete", "team", answer))
    assert own.read_text() == newest


def altered(path: Path, change: Change) -> None:
    values = tomllib.loads(path.read_text())
    change(values)
    path.write_text(tomli_w.dumps(values))


def other_key(values: dict[str, object]) -> None:
    values["certificate_request"] = pki.certificate_request("syncer-eu", pki.new_key())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("syncer-eu", lambda values: values.update(region="us"), "proof is not a signature by public_key"),
        ("syncer-eu", lambda values: values.update(kind="operator"), "proof is not a signature"),
        ("syncer-eu", lambda values: values.update(proof="x"), "proof is not a signature"),
        ("syncer-eu", lambda values: values.pop("proof"), "public_key or proof is missing"),
        ("syncer-eu", other_key, "proof is not a signature"),
        ("syncer-eu", lambda values: values.update(certificate_request="x"), "ask its team for another one"),
        ("syncer-eu", lambda values: values.update(certificate_request="x" * 9000), "certificate_request"),
        ("syncer-eu", lambda values: values.update(name="../syncer"), "name = '../syncer'"),
        ("syncer-eu", lambda values: values.update(hosts=["h"]), "a syncer has no hosts"),
        ("syncer-eu", lambda values: values.update(format=2), "format"),
        ("syncer-eu", lambda values: values.update(founder=True), "founder"),
        ("nats-eu", lambda values: values.update(hosts=[]), "a server's hosts are missing"),
        ("nats-eu", lambda values: values.update(region="eu"), "a server has no nkey, region or processes"),
        ("nats-eu", lambda values: values.update(serves=["uss"]), "did you mean 'us'"),
        ("nats-eu", lambda values: values.update(run="other"), "is for run 'other', and this folder has the keys of 'demo'"),
    ],
)
def test_a_request_that_was_altered_or_does_not_fit_is_one_clear_line_and_nothing_is_signed(
    command: Command, tmp_path: Path, name: str, change: Change, said: str
) -> None:
    begun(command)
    whole = [file for file in requested(command, *REQUESTS) if name not in file]
    wrong = tmp_path / "team/requests" / f"{name}.request"
    altered(wrong, change)

    def seen() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "op").rglob("*") if path.is_file()}

    before = seen()
    assert said in refused(command("sign", "op", *whole, str(wrong)))
    assert seen() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sign op", "got no file"),
        ("sign op nowhere.request", "cannot be read"),
        ("sign op team/requests/syncer-eu.request team/requests/syncer-eu.request", "another request is also for syncer-eu"),
        ("sign op team/requests/syncer-eu.request copy.request", "another request is also for syncer-eu"),
        ("sign op team/requests/syncer-eu.key", "syncer-eu.key: has no run: is it a file that 'diloco keys request' wrote?"),
        ("sign op team/requests/syncer-eu.request --founder", "only a learner founds a run"),
        ("sign op team/requests/syncer-eu.request --renew", "so nothing can be renewed: leave --renew out"),
        ("sign op team/requests/syncer-eu.request --days 0", "--days 0"),
        ("sign op large.request", "has more than 65536 bytes"),
        ("sign op bad.request", "no TOML"),
        ("request op syncer x --run demo --region eu", "has the authority itself: make keys there with 'diloco keys add'"),
        ("request team syncr x --run demo", "did you mean 'syncer'"),
        ("request team page x --run demo", "no such kind"),
        ("request team server x --run demo --serves eu", "give each with --host"),
        ("request team syncer x --run demo --host h", "--host does not apply to a syncer"),
        ("request team syncer x --run demo --processes 2", "--processes does not apply to a syncer"),
        ("request team syncer X --run demo --region eu", "name = 'X'"),
        ("complete team nowhere.answer", "cannot be read"),
        ("complete team team/requests/syncer-eu.request", "has no identity: is it a file that 'diloco keys sign' wrote?"),
        ("complete op answer", "has the authority itself"),
    ],
)
def test_what_cannot_be_is_one_clear_line(command: Command, tmp_path: Path, line: str, said: str) -> None:
    begun(command)
    [file] = requested(command, "syncer-eu")
    (tmp_path / "copy.request").write_bytes((tmp_path / file).read_bytes())
    (tmp_path / "large.request").write_bytes(b"#" * 70_000)
    (tmp_path / "bad.request").write_bytes(b"\xff[")
    assert said in refused(command(*line.split()))


def test_a_public_key_belongs_to_one_name(command: Command, tmp_path: Path) -> None:
    begun(command)
    good(command("complete", "team", *answered(command, "syncer-eu")))
    theirs = tomllib.loads((tmp_path / "op/answers/syncer-eu.answer").read_text())["identity"]["public_key"]
    [file] = requested(command, "learner-eu", team="other")
    altered(tmp_path / file, lambda values: values.update(public_key=theirs))
    assert "proof is not a signature" in refused(command("sign", "op", file))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.update(kind="server"), "lacks what a server needs"),
        (lambda values: values.update(name="other"), "its parts are of several identities"),
        (lambda values: values.update(name="../x"), "name = '../x'"),
        (lambda values: values["identity"].update(role="operator"), "its parts are of several identities"),
        (lambda values: values["identity"].update(public_key="U" + "A" * 55), "lacks the private key that belongs to it"),
        (lambda values: values["identity"].update(certificate="x"), "is damaged"),
        (lambda values: values["identity"].update(expires=datetime(2020, 1, 1, tzinfo=UTC)), "ended on 2020-01-01"),
    ],
)
def test_an_answer_that_was_altered_changes_nothing(command: Command, tmp_path: Path, change: Change, said: str) -> None:
    begun(command)
    good(command("complete", "team", *answered(command, "learner-eu")))
    [answer] = answered_again(command)
    before = {path: path.read_bytes() for path in (tmp_path / "team").rglob("*") if path.is_file()}
    altered(tmp_path / answer, change)
    assert said in refused(command("complete", "team", answer))
    assert {path: path.read_bytes() for path in (tmp_path / "team").rglob("*") if path.is_file()} == before


def answered_again(command: Command) -> list[str]:
    good(command("sign", "op", *requested(command, "learner-eu"), "--renew"))
    return ["op/answers/learner-eu.answer"]


def test_an_answer_of_another_authority_or_for_another_teams_key_is_refused(command: Command, tmp_path: Path) -> None:
    begun(command)
    good(command("complete", "team", *answered(command, "syncer-eu", "nats-eu")))
    good(command("request", "other", *REQUESTS["learner-eu"].split(), "--run", "demo"))
    good(command("sign", "op", "other/requests/learner-eu.request"))
    assert "team lacks the private key that belongs to it" in refused(
        command("complete", "team", "op/answers/learner-eu.answer")
    )
    [server] = ["op/answers/nats-eu.answer"]
    assert "other lacks the private key that belongs to it" in refused(command("complete", "other", server))
    good(command("init", "mallory", "--run", "demo", "--region", "us", "--region", "eu"))
    good(command("sign", "mallory", *requested(command, "learner-eu")))
    assert "is from another authority than team/ca.pem" in refused(
        command("complete", "team", "mallory/answers/learner-eu.answer")
    )


def test_an_authority_that_has_ended_signs_nothing_and_says_so(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pki, "AUTHORITY_DAYS", -1)
    good(command("init", "op", "--run", "demo", "--region", "us", "--region", "eu"))
    ended = f"ended {datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}"
    assert f"its authority: {ended}" in good(command("list", "op"))
    for line in (
        "add op learner a --region us",
        "add op server nats-us --host h --serves us",
        f"sign op {requested(command, 'syncer-eu')[0]}",
    ):
        said = refused(command(*line.split()))
        assert "the run's authority (ca.pem) ended on" in said
        assert "make a new folder" in said
    assert not list((tmp_path / "op").glob("[ais]*/*"))


# ---- the authority's passphrase


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_passphrase_is_needed_to_sign_and_for_nothing_else(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = secret(tmp_path / "right", "twelve letters\n"), secret(tmp_path / "wrong", "another twelve\n")
    good(command("init", "op", "--run", "demo", "--new-file", right))
    key = tmp_path / "op" / "ca.key"
    assert "ENCRYPTED" in key.read_text()
    assert key.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("sys.stdin", io.StringIO())
    add = ("add", "op", "learner", "a")
    assert f"name a file that holds it in {PASSPHRASE_VARIABLE}" in refused(command(*add))
    monkeypatch.setenv(PASSPHRASE_VARIABLE, wrong)
    assert "the passphrase is wrong" in refused(command(*add))
    monkeypatch.setenv(PASSPHRASE_VARIABLE, right)
    good(command(*add))
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    for line in ("list op", "refresh op", "grant op a --batch-tokens 70000", "revoke op a"):  # a timer needs none
        good(command(*line.split()))

    monkeypatch.setenv(PASSPHRASE_VARIABLE, right)
    assert "has the new passphrase" in good(command("passphrase", "op", "--new-file", wrong))
    assert "the passphrase is wrong" in refused(command("add", "op", "learner", "b"))
    monkeypatch.setenv(PASSPHRASE_VARIABLE, wrong)
    assert "no passphrase" in good(command("passphrase", "op", "--remove"))
    monkeypatch.delenv(PASSPHRASE_VARIABLE)
    good(command("add", "op", "learner", "b"))


def test_a_passphrase_is_typed_at_a_terminal_twice_when_it_is_new(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed: list[str] = []
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(getpass, "getpass", lambda prompt: typed.pop(0))
    typed[:] = ["twelve letters", "twelve lettres"]
    assert "the two passphrases differ" in refused(command("init", "op", "--run", "demo", "--passphrase"))
    assert not (tmp_path / "op").exists()
    typed[:] = ["twelve letters", "twelve letters", "twelve letters"]
    good(command("init", "op", "--run", "demo", "--passphrase"))
    good(command("add", "op", "observer", "a"))
    assert typed == []


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short", 0o600, "the passphrase has 5 letters: give it at least 12"),
        ("", 0o600, "its first line must be the passphrase"),
        ("\nsecond line", 0o600, "its first line must be the passphrase"),
        ("x" * 2000, 0o600, "at most 1024 bytes"),
        ("twelve letters", 0o644, "others on this machine can read it; chmod 600"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_no_passphrase(command: Command, tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
        (tmp_path / "file").chmod(mode)
    assert said in refused(command("init", "op", "--run", "demo", "--new-file", "file"))
    assert not (tmp_path / "op").exists()


def test_a_protected_key_that_is_damaged(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = secret(tmp_path / "right", "twelve letters")
    good(command("init", "op", "--run", "demo", "--new-file", right))
    monkeypatch.setenv(PASSPHRASE_VARIABLE, right)
    key = tmp_path / "op" / "ca.key"
    head, *rest = key.read_text().splitlines()
    for damaged in ("\n".join([head[:-3], *rest]), f"{head}\n", head[:-1] + "x\n" + "\n".join(rest)):
        key.write_text(damaged)
        assert "or the file is damaged" in refused(command("add", "op", "learner", "a"))


# ---- where the folder is


def test_without_a_folder_keys_are_outside_of_the_checkout(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "diloco-keys/keys.toml: does not exist" in refused(command("list"))
    good(command("init", "--run", "demo"))
    home = tmp_path / "home" / "diloco-keys"
    assert home.stat().st_mode & 0o777 == 0o700
    for line in ("add server nats --host h", "add learner a", "renew a", "grant a --batch-tokens 70000", "refresh", "founded"):
        ended = command(*line.split())
        assert ended.code == 0 or "no identity may found" in ended.err, ended
    assert (home / "identities" / "a.identity").exists()
    good(command("revoke", "a"))
    monkeypatch.setenv("DILOCO_KEYS", str(tmp_path / "stated"))
    good(command("init", "--run", "other"))
    assert "run other" in good(command("list"))
    monkeypatch.delenv("DILOCO_KEYS")
    good(command("init", "operator", "--run", "older"))  # where the page had it before
    assert "run older" in good(command("list"))
    assert "run demo" in good(command("list", str(home)))
    for line, said in (
        ("add a", "expected [DIR] KIND NAME, got 1 words: a"),
        ("renew a b c", "expected [DIR] NAME, got 3 words: a b c"),
        ("list a b", "expected [DIR], got 2 words: a b"),
    ):
        assert said in refused(command(*line.split()))


def test_services_of_the_same_shell_take_no_notice_of_these_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (KEYS_VARIABLE, PASSPHRASE_VARIABLE):
        monkeypatch.setenv(variable, "somewhere")
    monkeypatch.setenv("DILOCO_NAME", "syncer-0")
    assert load_service(SyncerSettings, None).name == "syncer-0"
