"""The right to see a page: on loopback all of the machine have it; elsewhere those with the run's token or identities.

A browser reaches a server of this machine for any site that it shows. So requests of other sites are refused, and those for a
name that is not this machine's: a site may have its own name lead here.

A page may have actions. They need the token itself in a header: a browser sends a cookie to all ports of a host, so who has
only that may look, and no more.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
import stat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from diloco.errors import SettingsError
from diloco.settings.service import host_and_port

COOKIE = "diloco_page"  # begins the cookie's name
LEAST_TOKEN = 16  # characters
TOKEN_BYTES = 16  # of one that is made
MAX_TOKEN_BYTES = 4096
MAX_FORM_BYTES = 8192
ACT = "/act/"  # begins the path of each action
OTHERS_MODES = stat.S_IRWXG | stat.S_IRWXO

OPEN = ("/token", "/page.css", "/enter.js")  # what the form of the token needs
_SETTING = "The token is in the file that the setting page_token_file names, on the coordinator's machine."
_PRINTED = "The command that serves this page has printed the token."

_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>diloco</title><link rel="stylesheet" href="page.css">
<script src="enter.js" defer></script></head><body><main><section><h1>This page needs a token</h1><p>{said} {where}</p>
<form method="post" action="token"><label>Token <input name="token" type="password" autocomplete="off" autofocus required>
</label> <button type="submit">Open the page</button></form></section></main></body></html>
"""


class PageGuard:
    """The rules of one page's address.

    Args:
        address: HOST:PORT that it is served at.
        token: that is asked for; None: it is not asked for.
        acts: whether the page has actions; then it is served to this machine alone, and has a token.
        identified: whether all who connect have shown a certificate of the run.
    """

    def __init__(self, address: str, token: str | None, *, acts: bool = False, identified: bool = False) -> None:
        self.host, _ = host_and_port(address, "page_address")
        self._proof = None if token is None else _proof(token)
        self._acts, self._only_here = acts, acts or (token is None and not identified)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused, or None."""
        host, path = request.headers.get("host", ""), str(request.scope["path"])
        allowed = self._methods(path)
        if request.method not in allowed:
            said = "" if self._acts else "this page is read-only\n"
            return PlainTextResponse(said, 405, headers={"Allow": ", ".join(allowed)})
        if self._only_here and not self._is_here(host):
            said = f"this page is served as {self.host}, not as {host[:100]!r}; open it by that name\n"
            return PlainTextResponse(said, 421)
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if (origin is not None and urlsplit(origin).netloc != host) or site not in ("none", "same-origin"):
            if request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate":
                return None if self._may_see(request) else self._ask("")  # a link from elsewhere shows the page, and no more
            return PlainTextResponse("other sites may not read this page\n", 403)
        if path.startswith(ACT):
            return None if self._bears(request) else PlainTextResponse("this request needs the page's token in a header\n", 401)
        if self._may_see(request) or path in OPEN:
            return None
        if path == "/":
            return self._ask("")
        return PlainTextResponse("this request needs the run's token: reload the page and enter the token\n", 401)

    def _methods(self, path: str) -> tuple[str, ...]:
        posted = (path == "/token" and self._proof is not None) or (self._acts and path.startswith(ACT))
        return ("POST",) if posted else ("GET", "HEAD")

    async def take_token(self, request: Request) -> Response:
        """Answer the form with the token."""
        sent = b""
        async for piece in request.stream():
            sent += piece
            if len(sent) > MAX_FORM_BYTES:
                return PlainTextResponse("too long for a token\n", 413)
        token = _field(sent)
        if self._proof is None or not hmac.compare_digest(_proof(token), self._proof):
            return self._ask("That is not the token of this run.")
        answer = Response(status_code=303, headers={"Location": "."})
        secure = request.url.scheme == "https"
        answer.set_cookie(_cookie(request), self._proof, httponly=True, samesite="strict", path="/", secure=secure)
        return answer

    def _may_see(self, request: Request) -> bool:
        if self._proof is None or self._bears(request):
            return True
        return hmac.compare_digest(request.cookies.get(_cookie(request), "").encode(), self._proof.encode())

    def _bears(self, request: Request) -> bool:
        """Whether a request brings the token itself."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return (
            self._proof is not None and scheme.lower() == "bearer" and hmac.compare_digest(_proof(token.strip()), self._proof)
        )

    def _is_here(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name == self.host or is_loopback(name)

    def _ask(self, said: str) -> Response:
        form = _FORM.format(said=said, where=_PRINTED if self._acts else _SETTING)
        return HTMLResponse(form, 401, headers={"WWW-Authenticate": "Bearer"})


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(TOKEN_BYTES)


def make_token(file: Path) -> bool:
    """Write a token into a file that is not there yet, readable by this user alone; return whether it was made.

    Raises:
        SettingsError: it cannot be made.
    """
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as made:
            made.write(new_token() + "\n")
    except FileExistsError:
        return False
    except OSError as error:
        raise SettingsError(f"page_token_file {file}: is missing, and cannot be created: {error}") from None
    return True


def check(address: str, token_file: Path | None, tls_folder: Path | None = None) -> tuple[str | None, ssl.SSLContext | None]:
    """Return the token of a page's address, None where none is asked for, and the TLS context of its connections, if any.

    Raises:
        SettingsError: an address that others reach has neither, or a file of theirs will not do.
    """
    host, _ = host_and_port(address, "page_address")
    token = None if token_file is None else _read(token_file)
    if tls_folder is not None:
        return token, _tls(tls_folder, identities=token is None)
    if token is not None or is_loopback(host):
        return token, None
    raise SettingsError(
        f"page_address = {address!r}: other machines can reach this address, so set page_token_file to a file for a "
        "token, which is created if it is missing, or page_tls to a folder of diloco keys, which admits the run's "
        "identities; or serve the page at 127.0.0.1 and reach it through ssh -L"
    )


def _tls(folder: Path, *, identities: bool) -> ssl.SSLContext:
    """Return a server's context; ``identities``: all who connect have to show a certificate of the run's authority."""
    key = folder / "server.key"
    try:
        mode = stat.S_IMODE(key.stat().st_mode)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(folder / "server.pem", key)
        if identities:
            context.load_verify_locations(folder / "ca.pem")
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"page_tls {folder}: server.pem, server.key or ca.pem cannot be used: {error}; make them with 'diloco keys add DIR "
            "page NAME --host HOST'"
        ) from None
    if mode & OTHERS_MODES:
        raise SettingsError(
            f"page_tls {folder}: the mode of server.key is {mode:04o}, others here can read it: chmod 600 {key}"
        )
    return context


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(MAX_TOKEN_BYTES + 1)
        token = data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"page_token_file {path}: cannot be read: {error}") from None
    if stat.S_IMODE(mode) & OTHERS_MODES:
        raise SettingsError(
            f"page_token_file {path}: its mode is {stat.S_IMODE(mode):04o}, others here can read or change it: chmod 600 {path}"
        )
    if not LEAST_TOKEN <= len(token) <= MAX_TOKEN_BYTES:
        raise SettingsError(
            f"page_token_file {path}: a token of {len(token)} characters, expected at least {LEAST_TOKEN}; for example: "
            f"openssl rand -hex 16 > {path}"
        )
    return token


def _proof(token: str) -> str:
    """Return a cookie's value: not the token itself, since a cookie is sent to all ports of a host."""
    return hashlib.blake2b(token.encode(errors="replace"), person=b"diloco page").hexdigest()


def _cookie(request: Request) -> str:
    """Return a cookie's name: pages at several ports of a host have one each."""
    try:
        port = urlsplit(f"//{request.headers.get('host', '')}").port
    except ValueError:
        port = None
    return f"{COOKIE}_{port or 0}"


def _field(form: bytes) -> str:
    fields = parse_qs(form.decode("latin-1"), max_num_fields=4) if form.count(b"&") < 4 else {}
    return fields.get("token", [""])[0].strip()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address of this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
