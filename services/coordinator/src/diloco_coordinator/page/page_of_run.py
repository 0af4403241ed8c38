"""Serving a run's page beside its coordinator, where an address is set."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from diloco.process.observe import Logger
from diloco.settings.service import CoordinatorSettings

if TYPE_CHECKING:
    from diloco_coordinator.page.page_server import PageServer
    from diloco_coordinator.service import Coordinator


@contextlib.asynccontextmanager
async def serve_page(coordinator: Coordinator, settings: CoordinatorSettings, log: Logger) -> AsyncIterator[PageServer | None]:
    """Serve the run's page, where an address is set.

    Raises:
        SettingsError: the address cannot be used, or needs a token.
    """
    if not settings.page_address:
        yield None
        return
    # here rather than above: these take a fifth of a second to import
    from diloco_coordinator.page.drawing import Drawing, nonce_of
    from diloco_coordinator.page.guard import check, make_token
    from diloco_coordinator.page.page_server import PageServer
    from diloco_coordinator.page.source import CoordinatorSource

    if settings.page_token_file is not None and make_token(settings.page_token_file):
        log.info("page_token_made", file=str(settings.page_token_file))
    token, tls = check(settings.page_address, settings.page_token_file, settings.page_tls)
    nonce = nonce_of(coordinator.run.identity, coordinator.transport.random_bytes(6))
    drawing = Drawing(CoordinatorSource(coordinator), nonce, log)
    server = PageServer(drawing, settings.page_address, token, log, tls=tls, url=settings.page_url)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
