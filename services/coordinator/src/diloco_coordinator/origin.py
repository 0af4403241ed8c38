"""How a run began, as the coordinator that leads it knows it: the report's ``origin``; and whether its end is preliminary."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from diloco import __version__

if TYPE_CHECKING:
    from diloco_coordinator.service import Coordinator


def origin(coordinator: Coordinator) -> dict[str, Any]:
    """Return the command line that started the run, this machine's name, the software, and when the run began (Unix time)."""
    began_at_s = coordinator.transport.wall_s() - coordinator.now_s()
    return {
        "command": coordinator.settings.started_by or None,
        "host": socket.gethostname(),
        "began_at_s": round(began_at_s),
        "version": __version__,
    }


def preliminary_at_s(coordinator: Coordinator) -> float | None:
    """Return the time (Unix), where ``diloco up`` writes the final report after this coordinator; else None."""
    return coordinator.transport.wall_s() if coordinator.settings.report_follows else None
