"""How a run was begun: by which command line, on which machine, and when."""

from __future__ import annotations

import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from diloco.service.rundir import RunDirectory

MAX_COMMAND = 2000  # characters
_PASSWORD = re.compile(r"(\w+://)[^/@\s]+@")  # of a server's address


def noted(directory: RunDirectory) -> RunDirectory:
    """Return a run's directory that says how this process was called; a live run keeps its beginning."""
    return replace(
        directory,
        command=command_line(sys.argv[1:]),
        host=socket.gethostname(),
        began_at_s=directory.began_at_s or time.time(),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line of ``diloco`` with these arguments, without passwords in addresses."""
    line = shlex.join(["diloco", *(_PASSWORD.sub(r"\1***@", argument) for argument in arguments)])
    return line[:MAX_COMMAND].encode(errors="replace").decode()
