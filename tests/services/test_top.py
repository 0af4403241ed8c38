"""``diloco top`` over a real run: its views with the keyboard alone, with a coordinator and without, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.services.cluster import Cluster, small, some_versions
from tests.services.conftest import Launch

from diloco.service.rundir import RunDirectory
from diloco_ops.top.app import Top
from diloco_ops.top.feed import reached


def shown(app: Top) -> str:
    """What a person sees, as text."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def until(cluster: Cluster, app: Top, *texts: str) -> str:
    """Wait until a screen has all of these texts."""
    deadline_s = time.monotonic() + 60
    while not all(text in (seen := shown(app)) for text in texts):
        cluster.check_alive()
        assert time.monotonic() < deadline_s, f"{texts} not in:\n{seen}"
        await asyncio.sleep(0.05)
    return seen


async def test_views(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(tokens=10**9))
    await cluster.begin()
    await some_versions(cluster)
    directory = RunDirectory(tmp_path, cluster.name, cluster.url, None, cluster.settings)
    async with reached(directory, local=False) as feed:
        app = Top(feed)
        async with app.run_test(size=(80, 24)) as pilot:
            await asyncio.sleep(3)
            for key in ("", "enter", "escape", "2", "enter", "3", "enter", "4", "v", "5", "6", "1", "w", "w", "?"):
                if key:
                    await pilot.press(key)
                await pilot.pause(0.6)
                print("=====", key)
                print(shown(app))
            app.save_screenshot("/tmp/top/shot.svg")
