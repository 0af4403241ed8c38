"""The words by which learners elsewhere join a run whose services are started here."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from diloco.service.rundir import RunDirectory
from diloco.settings.run import TaskSettings
from diloco_ops.broker.server import ANY_HOST, LOOPBACK
from diloco_ops.finetune.elsewhere import learner_text, model_of


def told_to_learners(directory: RunDirectory, url: str, listen: tuple[str, int] | None, *, embedded: bool) -> str:
    """Return how learners elsewhere join a run, where they can; ``embedded``: its server is started here."""
    task = directory.settings.task
    if not directory.starts_learners:
        return joining_text(directory.name, url, listen, task)
    if embedded or model_of(task) is None:
        return ""
    return learner_text(directory.name, url, task, "from every machine that reaches the server")


def joining_text(run: str, url: str, listen: tuple[str, int] | None, task: TaskSettings | None = None) -> str:
    """Return the line of code, or the file, by which learners join the run, and who can reach the server at ``url``."""
    host, port = (LOOPBACK if listen is None else listen[0]), urlsplit(url).port
    if host in ANY_HOST:
        url, reach = f"nats://{socket.gethostname()}:{port}", "from every machine that reaches this one"
    elif host == LOOPBACK:
        reach = "on this machine; --listen 0.0.0.0:4222 lets other machines in"
    else:
        reach = f"from every machine that reaches {host}"
    if task is not None and model_of(task) is not None:
        text = learner_text(run, url, task, reach)
    else:
        line = f'diloco.join("{url}", run="{run}", params=model, tokens=TOKENS_OF_A_STEP)'
        text = f"loops join {reach}:\n\n    {line}\n"
    if host == LOOPBACK:
        return text
    return f"{text}\n\nThe server asks for no identity: use it on a network that you trust."
