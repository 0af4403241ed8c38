"""The addresses of a run's page that ``diloco up`` has its coordinators serve, and the browser that shows it."""

from __future__ import annotations

import contextlib
import socket
import sys
import webbrowser

from diloco.errors import SettingsError
from diloco.service import rundir
from diloco.service.rundir import RunDirectory
from diloco.settings.loading import read_toml
from diloco.settings.service import host_and_port
from diloco_ops.broker.server import free_ports

ANYWHERE = "127.0.0.1:0"  # any free port: runs beside each other do not meet
NOWHERE = "none"
HELP = f"HOST:PORT of the run's page; {NOWHERE}: no page. Default: a free port of this machine."


def addresses(wanted: str, coordinators: int) -> list[str]:
    """Return an address for each coordinator's page: the one that is wanted, others where these are in use.

    Raises:
        SettingsError: it is no address.
    """
    if wanted == NOWHERE:
        return []
    try:
        host, port = host_and_port(wanted, "page_address")
    except ValueError:
        raise SettingsError(f"--page {wanted}: expected HOST:PORT, for example 127.0.0.1:8420, or {NOWHERE}") from None
    first, *others = free_ports(coordinators)
    if port and is_free(host, port):
        first = port
    elif port:
        print(f"note: --page {wanted}: the port is in use; the run's page is at port {first}", file=sys.stderr)
    return [address(host, each) for each in (first, *others)]


def address(host: str, port: int) -> str:
    """Return host and port as settings have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def link(address: str) -> str:
    """Return the page's address as a browser takes it."""
    return f"http://{address}/"


def link_of(directory: RunDirectory) -> str | None:
    """Return the address of the page of a run that ``diloco up`` works on now; None: it serves none, or it is not known."""
    try:
        address = read_toml(directory.path / "services" / "coordinator.toml").get("page_address")
    except SettingsError:
        return None
    return link(address) if isinstance(address, str) and address and rundir.is_locked(directory.path) else None


def show(where: str) -> None:
    """Open a page's :func:`link` in this machine's browser, where there is one."""
    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(where)


def is_free(host: str, port: int) -> bool:
    """Whether a service could listen at an address now."""
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError:
        return False
    return True
