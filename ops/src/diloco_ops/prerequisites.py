"""Requirements of ``diloco up`` and ``diloco serve`` that are checked before anything is made."""

from __future__ import annotations

import math
from importlib.util import find_spec

from diloco.errors import DilocoError, SettingsError
from diloco.nats.opening import checked, shown
from diloco.settings.run import RunSettings
from diloco_ops.track.trackers import check as check_trackers

SERVICES = {name: name.replace("_", "-") for name in ("diloco_learner", "diloco_syncer", "diloco_coordinator")}


def check_installed(track: list[str]) -> None:
    """Check that the services are installed, and what is to track the run.

    Raises:
        DilocoError: some are not; they are named.
    """
    check_trackers(track, "--track")
    if missing := [name for module, name in SERVICES.items() if find_spec(module) is None]:
        raise DilocoError(f"diloco up: not installed: {', '.join(missing)}; install all of it with: pip install 'diloco[all]'")


def check_server(nats_url: str | None, settings: RunSettings) -> None:
    """Check that a server that was given is enough for the run.

    Raises:
        SettingsError: it is no address; or the run has regions, each of which needs a server.
    """
    names, address = settings.regions.names, None if nats_url is None else checked(nats_url)
    if address is not None and names:
        raise SettingsError(
            f"--nats {shown(address)}: is one server, but the run has the regions {', '.join(names)}: leave it out, which "
            "starts a server for each region, or train without regions: --set 'regions.names=[]'"
        )


def slow_factors(items: list[str], names: list[str]) -> dict[str, float]:
    """Return by learner how many times as long its steps take, as ``--slow`` says.

    Raises:
        SettingsError: it is no factor of a learner of the run.
    """
    factors = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not 1 <= factor < math.inf:
            raise SettingsError(f"--slow {item}: expected LEARNER=FACTOR with a factor of at least 1, for example learner-3=5")
        if name not in names:
            raise SettingsError(f"--slow {item}: no learner {name!r}; the learners are {names[0]} to {names[-1]}")
        factors[name] = factor
    return factors
