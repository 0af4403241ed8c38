"""``make pin-images`` against a registry: the digests of releases' base images are those that their tags have there."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made.docker_commands import docker, docker_works
from tests.pace import DEADLINE_S

from diloco_ops.broker.server import free_port

ROOT = Path(__file__).parents[2]
BASE = "nats:2-alpine"

pytestmark = pytest.mark.compose
MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json, "
    "application/vnd.oci.image.manifest.v1+json"
)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of an empty registry."""
    if shutil.which("docker-registry") is None:
        pytest.skip("there is no docker-registry (Debian: apt-get install docker-registry)")
    if not docker_works("image", "inspect", BASE):
        pytest.skip(f"there is no docker, or no image {BASE}")
    address = f"localhost:{free_port()}"
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{ filesystem: {{ rootdirectory: {tmp_path}/registry }} }}\nhttp: {{ addr: {address} }}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        ends_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://{address}/v2/", timeout=DEADLINE_S):
                    break
            except OSError:
                assert time.monotonic() < ends_s, (tmp_path / "registry.log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def pin(folder: Path, **images: str) -> subprocess.CompletedProcess[str]:
    path = "/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(folder), **images}
    return subprocess.run([folder / "deploy/images/pin"], env=environment, capture_output=True, text=True, check=False)


def test_digests_are_those_of_the_registry_and_stay_if_one_is_not_there(registry: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy" / "images", tmp_path / "deploy" / "images")
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    written = tmp_path / "deploy" / "images" / "digests.env"
    comment = written.read_text()
    names = {"PYTHON_IMAGE": f"{registry}/python:3.11", "NATS_IMAGE": f"{registry}/nats:2-alpine"}
    docker("tag", BASE, names["NATS_IMAGE"])
    docker("push", "-q", names["NATS_IMAGE"], timeout_s=10 * DEADLINE_S)
    try:
        missing = pin(tmp_path, **names)
        assert missing.returncode == 1
        assert missing.stderr.endswith(f"pin: {names['PYTHON_IMAGE']}: cannot be pulled; digests.env is as it was\n")
        assert written.read_text() == comment
        docker("tag", BASE, names["PYTHON_IMAGE"])  # any image will do
        docker("push", "-q", names["PYTHON_IMAGE"], timeout_s=10 * DEADLINE_S)
        ended = pin(tmp_path, **names)
        assert (ended.returncode, ended.stdout) == (0, written.read_text())
        lines = written.read_text().removeprefix(comment).splitlines()
        for line, (argument, image) in zip(lines, names.items(), strict=True):
            digest = re.fullmatch(
                rf"{argument}=({re.escape(image.rpartition(':')[0])})@(sha256:[0-9a-f]{{64}})  # {image}", line
            )
            assert digest is not None, line
            name, tag = digest[1].partition("/")[2], image.rpartition(":")[2]
            request = urllib.request.Request(f"http://{registry}/v2/{name}/manifests/{tag}", headers={"Accept": MANIFESTS})
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                assert answer.headers["Docker-Content-Digest"] == digest[2]
    finally:
        for image in names.values():
            docker_works("image", "rm", image)
