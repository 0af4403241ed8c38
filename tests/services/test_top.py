"""``diloco top`` over real runs: with the keyboard alone, with a coordinator and without one, and the command's refusals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.made.fixtures import Launch
from tests.pace import DEADLINE_S
from tests.services.cluster import Cluster, small, some_versions
from tests.services.secured import make_keys, members, serving
from textual.pilot import Pilot, WaitForScreenTimeout

from diloco.service.rundir import RunDirectory
from diloco_ops.keys.permissions import Who
from diloco_ops.top.app import Top
from diloco_ops.top.feed import reached

pytestmark = pytest.mark.usefixtures("patient_commands")

CURSOR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
COLOUR = re.compile(rb"\x1b\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


def seen(app: Top) -> str:
    """The screen as text."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


async def until(cluster: Cluster, app: Top, *texts: str) -> None:
    """Wait until the screen has all of these texts."""
    await cluster.until(lambda: all(text in seen(app) for text in texts), f"{texts} on the screen")


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys. What they do is waited for by what the screen shows, and not as long as Textual would wait."""
    with contextlib.suppress(WaitForScreenTimeout):
        await pilot.press(*keys)


def lists_merges(app: Top) -> bool:
    """Whether the view of a fragment lists versions with their members."""
    return re.search(r"version \d+ .*: toy-\d", seen(app)) is not None


@pytest.mark.promise("diloco top watches a run by keyboard, also without a coordinator")
async def test_a_run_is_watched_by_keys_and_also_when_its_coordinator_is_dead(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(tokens=10**9))
    await cluster.begin()
    await some_versions(cluster)
    cluster.gate.close()  # a version costs all processes time, and the views need few
    directory = RunDirectory(tmp_path, cluster.name, cluster.url, None, cluster.settings)
    async with reached(directory, local=False) as feed:
        app = Top(feed)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(cluster, app, "toy-2", "stepping", "● training")

            def named() -> list[str]:
                return [line[:10].strip() for line in seen(app).splitlines() if "toy-" in line]

            await cluster.until(lambda: named() == ["▸ ● toy-0", "● toy-1", "● toy-2"], "all learners are alive")
            await press(pilot, "down", "enter")
            await until(cluster, app, "learner toy-1", "processed", "whole run")
            await press(pilot, "down")
            await until(cluster, app, "learner toy-2")
            await press(pilot, "escape", "2")
            await until(cluster, app, "fragment version", "f3", "syncer-0", "syncer-1")

            # of what was merged before, the history tells; of versions from now on, the log
            await press(pilot, "enter")
            await until(cluster, app, "fragment 0", "of syncer-")
            await cluster.until(lambda: lists_merges(app), "merges of the history")
            before = app.watched.fragments[0].version
            cluster.gate.open()
            await cluster.until(lambda: app.watched.fragments[0].version > before + 1, "versions are heard")
            cluster.gate.close()
            await press(pilot, "escape", "4", "v")
            await until(cluster, app, "fragment 0", ", round ")
            await press(pilot, "6")
            await until(cluster, app, "loss", "└0:00")

            coordinator = next(service for service in cluster.services if service.name == "coordinator")
            coordinator.kill()
            await press(pilot, "1")
            await until(cluster, app, "! no coordinator answers for ", "toy-2")
            step = app.watched.status(asyncio.get_running_loop().time())["learners"]["toy-0"]["step"]

            def goes_on() -> bool:
                status = app.watched.status(asyncio.get_running_loop().time())
                return bool(status["learners"]["toy-0"]["step"] > step and status["versions"] > 0)

            cluster.gate.open()
            await cluster.until(goes_on, "learners are heard without a coordinator")
            await press(pilot, "4")
            await until(cluster, app, "no coordinator answers")


@dataclass
class Ended:
    """A command that ended on a terminal, and all that it wrote there."""

    code: int
    out: bytes

    @property
    def text(self) -> str:
        """The text without control sequences."""
        return CURSOR.sub(b"", self.out).decode(errors="replace").replace("\r\n", "\n")


async def on_terminal(*arguments: str, size: tuple[int, int] = (80, 24), keys: bytes = b"", after: str = "") -> Ended:
    """Run ``diloco top`` on a terminal of its own without colours; press ``keys`` once it shows ``after``."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "COLUMNS", "LINES"))}
    environment |= {"TERM": "xterm-256color", "NO_COLOR": "1"}
    command = (sys.executable, "-m", "diloco_ops.cli", "top", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    out, pressed = bytearray(), False
    reading = asyncio.Event()

    def read() -> None:
        try:
            out.extend(os.read(mine, 1 << 16))
        except OSError:  # the command has ended
            asyncio.get_running_loop().remove_reader(mine)
            reading.set()

    asyncio.get_running_loop().add_reader(mine, read)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not reading.is_set():
                if keys and not pressed and after in Ended(0, bytes(out)).text:
                    pressed = True
                    os.write(mine, keys)
                await asyncio.sleep(0.02)
            return Ended(await process.wait(), bytes(out))
    finally:
        if process.returncode is None:
            process.kill()
        os.close(mine)


@pytest.mark.slow
async def test_the_command_on_a_terminal_and_its_refusals(launch: Launch, tmp_path: Path) -> None:
    cluster = launch(small(tokens=10**9))
    await cluster.begin()
    await some_versions(cluster)
    cluster.gate.close()
    run, missing = ("--run", cluster.name), str(tmp_path / "none.toml")
    served = await on_terminal(cluster.url, *run, keys=b"2q", after="toy-2")
    refused = [
        await on_terminal(cluster.url, *run, size=(40, 10)),
        await on_terminal(cluster.url, "--run", "nobodys"),
        await on_terminal("nats://127.0.0.1:9", *run),
        await on_terminal(cluster.url, *run, "--identity", missing),
        await on_terminal(str(tmp_path)),
    ]
    assert served.code == 0
    assert "[1 learners]" in served.text
    assert not COLOUR.search(served.out)
    assert [ended.code for ended in refused] == [2, 5, 4, 2, 5]
    small_one, nobodys, silent, without, nowhere = refused
    assert "this terminal is 40 x 10; at least 66 x 12 is needed" in small_one.text
    assert "run 'nobodys': not at nats://127.0.0.1" in nobodys.text
    assert re.search(r"nats://127\.0\.0\.1:9 \(tried for \d+ s\)", silent.text)
    assert f"identity {missing}: cannot be read" in without.text
    assert f"{tmp_path}: not a run's directory" in nowhere.text
    for ended in refused:
        assert ended.text.count("\n") == 1, ended.text


@pytest.mark.slow
async def test_an_observers_identity_is_enough(launch: Launch, tmp_path: Path) -> None:
    who = [*members(3, 2), Who("watcher", "observer")]
    keys = make_keys(tmp_path / "keys", "run", who)
    with serving(keys, tmp_path / "server") as server:
        cluster = launch(small(tokens=10**9), server.url, "run")
        cluster.identity = str(keys.path / "identities" / "{name}.identity")
        await cluster.begin()
        await some_versions(cluster)
        cluster.gate.close()
        own = str(keys.identity_file("watcher"))
        directory = RunDirectory(tmp_path, "run", server.url, None, cluster.settings, nats_bulk_url=server.url, identity=own)
        async with reached(directory, local=True) as feed:  # a directory that `diloco attach` has made: it has no logs
            app = Top(feed)
            async with app.run_test(size=(80, 24)) as pilot:
                await until(cluster, app, "toy-2", "● training")
                await press(pilot, "5")
                await until(cluster, app, "the services' logs are not on this machine")
                await press(pilot, "6")
                await until(cluster, app, "loss", "└0:00")
                await press(pilot, "2", "enter")
                await until(cluster, app, "fragment 0", "of syncer-")
                await cluster.until(lambda: lists_merges(app), "merges of the history")
                before = app.watched.fragments[0].version
                cluster.gate.open()
                await cluster.until(lambda: app.watched.fragments[0].version > before + 1, "versions are heard")
                said = [event.text for event in app.watched.events if event.who in ("top", "coordinator")]
                assert [text for text in said if "permission" in text] == []
