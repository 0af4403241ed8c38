"""A process that begins again in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.pace import DEADLINE_S

pytestmark = pytest.mark.services

PROGRAM = """
import os, socket, sys, threading, time
from diloco.process.renewal import expected, renew
print(os.getpid(), *sys.argv[1:], flush=True)
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    server.set_inheritable(True)  # as a library may leave it
    threading.Thread(target=renew, args=({2, 0},)).start()
    time.sleep(3600)  # the main thread waits for something that never comes
socket.create_server(("127.0.0.1", int(sys.argv[2]))).close()
print("again", sorted(expected()), sorted(expected()))
"""


def test_it_keeps_its_number_and_arguments_and_nothing_that_was_open(tmp_path: Path) -> None:
    from diloco.processes.meeting import free_port

    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(tmp_path / "mark"), str(free_port("127.0.0.1"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    first, second, last = ended.stdout.splitlines()
    assert first == second
    assert last == "again [0, 2] []", "it alone is told whom to expect"
