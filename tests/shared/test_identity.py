"""Identity files: what is read from a good one, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.made.identity_texts import GOOD_IDENTITY, PUBLIC_KEY, SEED

from diloco.errors import SettingsError
from diloco.nats import grants, identity
from diloco.nats.nkey import NatsKey
from diloco.wire.grants import Grant

ANOTHER_SEED = "SUAAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAQCAIBAEAT6EE"
OTHER = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
GRANT = grants.to_text(grants.sign(Grant("demo", "ann", OTHER, None, None), NatsKey.from_seed(SEED)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "ann.identity", GOOD_IDENTITY)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(SettingsError) as refused:
        identity.load(path)
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_a_good_file_says_who_it_is_and_shows_no_secret(file: Path) -> None:
    ann = identity.load(file)
    assert (ann.run, ann.role, ann.name, ann.region, ann.founder) == ("demo", "learner", "ann", "us", False)
    assert (ann.seed, ann.public_key) == (SEED, PUBLIC_KEY)
    assert ann.inbox == "_INBOX_ann"
    assert SEED not in repr(ann)


def test_processes_that_share_it_know_each_other_and_are_no_more_than_it_says(file: Path) -> None:
    alone = identity.load(file)
    assert alone.processes == 1
    with pytest.raises(SettingsError, match=r"is for 1 processes of ann, .* = 2: .* renew DIR ann --processes 2"):
        identity.of_service(str(file), "ann", "demo", "us", "learner", 2)
    write(file, GOOD_IDENTITY.replace("founder", "processes = 2\nfounder"))
    both = [identity.of_service(str(file), "ann", "demo", "us", "learner", 2) for _ in range(2)]
    assert both[0].meeting_key == both[1].meeting_key == alone.meeting_key
    another = GOOD_IDENTITY.replace(SEED, ANOTHER_SEED).replace(PUBLIC_KEY, NatsKey.from_seed(ANOTHER_SEED).public_key)
    assert identity.load(write(file, another)).meeting_key != alone.meeting_key
    assert len(alone.meeting_key) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_touch_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"its mode is {mode:04o}, others here can read or change it: chmod 600 {file}" in refusal(file)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path / "missing.identity")
    assert "cannot be read: No such file or directory; make it with 'diloco keys add'" in said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("format = 1", "format = 2", "format = 2, this version reads 1"),
        ("format = 1", "", "format = None, this version reads 1"),
        ('role = "learner"', 'role = "king"', "role = 'king', expected one of learner, evaluator, syncer"),
        ('name = "ann"', "", "name is missing or is not a string"),
        ("founder = false", "processes = 0", "processes = 0, expected 1 to 1024"),
        ("founder = false", "processes = 1025", "processes = 1025, expected 1 to 1024"),
        ("founder = false", "processes = true", "processes = True, expected 1 to 1024"),
        ("founder = false", 'processes = "2"', "processes = '2', expected 1 to 1024"),
        ('role = "learner"', 'role = "syncer"\nprocesses = 2', "processes = 2, expected 1 to 1024 for a learner, 1 for others"),
        ('name = "ann"', "name = 3", "name is missing or is not a string"),
        ('region = "us"', "region = 3", "region must be a string"),
        ("founder = false", 'founder = "yes"', "founder must be true or false"),
        ('region = "us"', "colour = 3", "no such key: 'colour'"),
        ("2999-01-01T00:00:00Z", "2999-01-01", "expires must be a time with a time zone"),
        ("2999-01-01T00:00:00Z", "2020-01-01T00:00:00Z", "its certificate ended on 2020-01-01, by this machine's clock"),
        ("2999-01-01T00:00:00Z", "2020-01-01T00:00:00Z", "'diloco keys renew ann'"),
        (SEED, ANOTHER_SEED, "seed and public_key do not belong together"),
        (SEED, SEED[:-1], "seed is not a key of NATS"),
        (SEED, "", "seed is not a key of NATS"),
        (SEED, "é", "seed is not a key of NATS"),
        ("format = 1", "format = ", "Invalid value"),
        ("founder = false", "authority = 3", "authority and grant must be strings"),
        ("founder = false", f'grant = "{GRANT}"', "grant without authority"),
        ("founder = false", 'authority = "UAAAA"', "not a public key of a NATS user"),
        ("founder = false", f'authority = "{PUBLIC_KEY}"\ngrant = "x"', "grant is damaged"),
        ("founder = false", f'authority = "{PUBLIC_KEY}"\ngrant = "{GRANT}"', "grant was issued for another public_key"),
        ("founder = false", f'authority = "{OTHER}"\ngrant = "{GRANT}"', "is not signed by the authority of run 'demo'"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(file: Path, before: str, after: str, said: str) -> None:
    assert before in GOOD_IDENTITY
    write(file, GOOD_IDENTITY.replace(before, after))
    assert said in refusal(file)


def test_a_file_is_read_only_so_far(file: Path) -> None:
    write(file, GOOD_IDENTITY + "#" * identity.MAX_BYTES)
    assert f"more than {identity.MAX_BYTES} bytes" in refusal(file)


def test_damaged_certificates_are_named(file: Path) -> None:
    with pytest.raises(SettingsError, match=r"ann\.identity: certificate, private_key or ca is damaged"):
        _ = identity.load(file).tls


def test_a_service_takes_only_its_own_identity(file: Path) -> None:
    path = str(file.parent / "{name}.identity")
    assert identity.of_service(path, "ann", "demo", "us", "learner").name == "ann"
    for run, region, role, said in (
        ("other", "us", "learner", "run 'demo', not 'other'"),
        ("demo", "us", "syncer", "role 'learner', not 'syncer'"),
        ("demo", "eu", "learner", "region 'us', not 'eu'"),
        ("demo", None, "learner", "region 'us', not None"),
    ):
        with pytest.raises(SettingsError) as refused:
            identity.of_service(path, "ann", run, region, role)  # type: ignore[arg-type]
        assert str(refused.value) == f"identity {file}: is for {said}: set DILOCO_IDENTITY to the identity of this process"
    with pytest.raises(SettingsError, match=r"bob\.identity: cannot be read"):
        identity.of_service(path, "bob", "demo", "us", "learner")
    file.rename(file.with_name("bob.identity"))
    with pytest.raises(SettingsError, match="is for name 'ann', not 'bob'"):
        identity.of_service(path, "bob", "demo", "us", "learner")


def test_a_command_takes_an_identity_of_its_run(file: Path) -> None:
    assert identity.of_command(file, "demo").name == "ann"
    with pytest.raises(SettingsError, match="is for run 'demo', not 'other'"):
        identity.of_command(file, "other")
