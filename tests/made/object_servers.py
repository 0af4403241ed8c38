"""Servers of objects on this machine: SeaweedFS, which speaks S3; a web server with TLS; the routes of the Hugging Face hub.

Each listens on the loopback device, and ends with its ``with``.
"""

from __future__ import annotations

import datetime
import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.pace import DEADLINE_S

from diloco_ops.broker.server import free_ports

WEED = Path(sys.executable).with_name("weed")
LOOK_S = 0.1  # between looks whether a server answers
KEYS = {"AWS_ACCESS_KEY_ID": "the-key-id", "AWS_SECRET_ACCESS_KEY": "the-secret-key"}
READER = {"AWS_ACCESS_KEY_ID": "reader-key-id", "AWS_SECRET_ACCESS_KEY": "reader-secret-key"}


@contextmanager
def weed_server(folder: Path) -> Iterator[str]:
    """Run a SeaweedFS with two identities, of which one may only read; yield the URL of its S3 gateway."""
    folder.mkdir(parents=True, exist_ok=True)
    actions = {"all": (KEYS, ["Admin", "Read", "Write", "List"]), "reader": (READER, ["Read", "List"])}
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}],
            "actions": allowed,
        }
        for name, (keys, allowed) in actions.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    names = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = [f"-{name.partition('.')[0]}.port{'.grpc' if '.' in name else ''}={port}" for name, port in ports.items()]
    command = [
        str(WEED),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.config={folder}/s3.json",
    ]
    command += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=100",
        *options,
    ]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{ports['s3']}"
    try:
        _wait_until(lambda: process.poll() is None and _answers(url), folder / "weed.log")
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=DEADLINE_S).close()
    except urllib.error.HTTPError:
        return True  # it refuses those without keys
    except OSError:
        return False
    return True


def _wait_until(is_there: Callable[[], bool], log: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_there():
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(LOOK_S)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve requests in threads; yield the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: object, code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.answer(code, json.dumps(value).encode(), {"Content-Type": "application/json"} | dict(headers or {}))

    def answer_file(self, content: bytes, etag: str) -> None:
        """Answer with a file, or the range of it that is asked for."""
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        asked = self.headers.get("Range")
        if asked is None:
            self.answer(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(content)) + 1, len(content))
        self.answer(206, content[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"})


@dataclass
class WebServer:
    """A web server with TLS over a folder. ``authority`` is the file of the certificate that it is trusted by."""

    url: str
    authority: Path
    asked: list[str] = field(default_factory=list)  # method, path and range of each request


@contextmanager
def web_server(folder: Path, certificates: Path) -> Iterator[WebServer]:
    found = WebServer("", certificates / "authority.pem")

    class Files(_Quiet):
        def do_GET(self) -> None:
            found.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
            path = folder / self.path.lstrip("/")
            if not path.is_file():
                self.answer(404, b"no such file")
                return
            content = path.read_bytes()
            self.answer_file(content, f'"{hashlib.sha256(content).hexdigest()[:16]}"')

        def do_HEAD(self) -> None:
            self.do_GET()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_certificate(certificates))
    with serving(Files, context) as port:
        found.url = f"https://127.0.0.1:{port}"
        yield found


def _certificate(folder: Path) -> Path:
    """Write the certificate of an authority, and a file with a server's key and certificate; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    names = {name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "127.0.0.1")}
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in names}
    made = {}
    for name in names:
        is_authority = name == "authority"
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["authority"])
            .public_key(keys[name].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=10))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))]), critical=False)
        made[name] = builder.sign(keys["authority"], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "authority.pem").write_bytes(made["authority"])
    key = keys["127.0.0.1"].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(key + made["127.0.0.1"])
    return folder / "server.pem"


@dataclass
class Hub:
    """A hub with one repository of models, ``org/model``; ``org/gated`` is gated."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 1
    authorised: set[str] = field(default_factory=set)  # values of the header that requests had

    @property
    def commit(self) -> str:
        return f"{self.commits:040x}"


@contextmanager
def hub_server(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serve the routes of the hub that huggingface_hub uses to list, to read, and to commit small files."""
    hub = Hub(files=dict(files))

    class Routes(_Quiet):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "/org/" in path:
                hub.authorised.add(self.headers.get("Authorization", ""))
            if "org/gated" in path:
                self.answer_json({}, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            elif "org/model" not in path:
                self.answer_json({}, 404, {"X-Error-Code": "RepoNotFound"})
            elif "/tree/" in path:
                below = path.partition("/tree/")[2].partition("/")[2]
                listed = [_about(name, content) for name, content in hub.files.items() if name.startswith(below)]
                if listed:
                    self.answer_json(listed)
                else:
                    self.answer_json({}, 404, {"X-Error-Code": "EntryNotFound"})
            elif "/resolve/" in path:
                name = path.partition("/resolve/")[2].partition("/")[2]
                self.answer_file(hub.files[name], f'"{_blob(hub.files[name])}"')
            else:
                self.answer_json({"id": "org/model", "sha": hub.commit, "modelId": "org/model", "private": False})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "/paths-info/" in self.path:
                wanted = json.loads(body)["paths"] if body[:1] == b"{" else _form(body)
                self.answer_json([_about(name, hub.files[name]) for name in wanted if name in hub.files])
            elif "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                self.answer_json(
                    {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]}
                )
            elif "/commit/" in self.path:
                for line in body.splitlines():
                    said = json.loads(line)
                    if said["key"] == "file":
                        hub.files[said["value"]["path"]] = b64decode(said["value"]["content"])
                    elif said["key"] == "deletedFile":
                        del hub.files[said["value"]["path"]]
                hub.commits += 1
                self.answer_json({"commitUrl": f"{hub.url}/org/model/commit/{hub.commit}", "commitOid": hub.commit})
            else:
                self.answer_json({}, 404)

    with serving(Routes) as port:
        hub.url = f"http://127.0.0.1:{port}"
        yield hub


def _form(body: bytes) -> list[str]:
    return [value for values in urllib.parse.parse_qs(body.decode()).values() for value in values]


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _about(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}


@dataclass
class CuttingProxy:
    """A proxy before an S3 gateway. From its ``cuts_at``-th request (from 1) on, all are cut: unheard, or unanswered."""

    url: str = ""
    cuts_at: int | None = None
    after: bool = False  # the first that is cut is carried out, only not answered
    requests: list[str] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)  # the first one was cut


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    proxy, lock = CuttingProxy(), threading.Lock()

    class Forward(_Quiet):
        def _forward(self) -> None:
            with lock:
                proxy.requests.append(f"{self.command} {self.path.partition('?')[0]}")
                number = len(proxy.requests)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            cut = proxy.cuts_at is not None and number >= proxy.cuts_at
            if not cut or (proxy.after and number == proxy.cuts_at):
                link = http.client.HTTPConnection(target.removeprefix("http://"), timeout=DEADLINE_S)
                link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():  # the host, too: it is part of what is signed
                    link.putheader(name, value)
                link.endheaders(body)
                answer = link.getresponse()
                content = answer.read()
                link.close()
            if cut:
                proxy.reached.set()
                self.close_connection = True
                self.connection.close()
                return
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in ("content-length", "connection")}
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.answer(answer.status, content, kept | {"Content-Length": length or "0"})

        def do_GET(self) -> None:
            self._forward()

        def do_PUT(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def do_DELETE(self) -> None:
            self._forward()

        def do_HEAD(self) -> None:
            self._forward()

    with serving(Forward) as port:
        proxy.url = f"http://127.0.0.1:{port}"
        yield proxy
