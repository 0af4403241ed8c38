"""The words by which learners elsewhere join a run whose services are started here."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from diloco_ops.broker.server import ANY_HOST, LOOPBACK


def joining_text(run: str, url: str, listen: tuple[str, int] | None) -> str:
    """Return the line of code by which a loop joins the run, and who can reach the server at ``url``."""
    host, port = (LOOPBACK if listen is None else listen[0]), urlsplit(url).port
    if host in ANY_HOST:
        url, reach = f"nats://{socket.gethostname()}:{port}", "from every machine that reaches this one"
    elif host == LOOPBACK:
        reach = "on this machine; --listen 0.0.0.0:4222 lets other machines in"
    else:
        reach = f"from every machine that reaches {host}"
    line = f'diloco.join("{url}", run="{run}", params=model, tokens=TOKENS_OF_A_STEP)'
    if host == LOOPBACK:
        return f"loops join {reach}:\n\n    {line}\n"
    return f"loops join {reach}:\n\n    {line}\n\nThe server asks for no identity: use it on a network that you trust."
