"""How a service of one region reaches the servers of the others."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.errors import SettingsError
from diloco.nats.identity import Identity
from diloco.nats.transport import NatsTransport
from diloco.process.observe import Logger
from diloco.service.metrics import Exporter
from diloco.settings.service import CoordinatorSettings, SyncerSettings
from diloco.transport import Connect


def ways_to_others(
    settings: SyncerSettings | CoordinatorSettings,
    regions: Sequence[str],
    identity: Identity | None,
    exporter: Exporter,
    log: Logger,
    *,
    needs_all: bool,
) -> dict[str, Connect]:
    """Return by region how a service reaches the servers of a run's other ``regions``: of all, or of those that it knows.

    Raises:
        SettingsError: it needs all and does not know one, or names a region that the run does not have.
    """
    urls = settings.region_urls
    others = [name for name in regions if name != settings.region]
    unknown = sorted(urls.keys() - set(regions))
    missing = [name for name in others if name not in urls]
    if unknown or (missing and needs_all):
        raise SettingsError(
            f"region_urls: expected the servers of {', '.join(others) or 'no region'}; "
            f"{'missing: ' + ', '.join(missing) if missing else 'no such region: ' + ', '.join(unknown)}"
        )
    if missing:
        log.warning("regions_unknown", regions=missing, reason="region_urls does not have their servers: their logs only grow")

    def way(region: str) -> Connect:
        url, name = urls[region], f"{settings.name}-{region}"

        async def connect() -> NatsTransport:
            exporter.far[region] = opened = await NatsTransport.open_bulk(url, name, log.bind(other_region=region), identity)
            return opened

        return connect

    return {name: way(name) for name in others if name in urls}
