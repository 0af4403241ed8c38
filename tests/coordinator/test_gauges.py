"""Figures that learners send of their own processes: read, sent, kept within a bound, and drawn."""

from __future__ import annotations

import asyncio
import math
import socket

import pytest
from tests.made.reports import fake_report

from diloco.member.instruments import Instruments, resident_bytes
from diloco.wire.control import Gauges
from diloco_coordinator.shown.gauges import MAX_LOSSES, MAX_POINTS, GaugeCurves, note_validation
from diloco_report.page import parts


def test_instruments_read_this_process() -> None:
    instruments = Instruments("x" * 200, lambda: 5)
    assert instruments.read("ann").learning_rate is None
    instruments.note_step(0.01, 1.5)
    held = bytearray(60_000_000)
    said = instruments.read("ann")
    assert (said.learner, said.learning_rate, said.gradient_norm) == ("ann", 0.01, 1.5)
    assert (said.device, said.host, said.device_memory_bytes) == ("x" * 100, socket.gethostname()[:100], 5)
    assert resident_bytes() > len(held)
    assert said.cores >= 0
    instruments.note_step(0.01, math.nan)
    assert instruments.read("ann").gradient_norm is None


async def test_they_are_sent_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.member.instruments.FIRST_GAUGES_S", 0.0)
    monkeypatch.setattr("diloco.member.instruments.GAUGES_S", 0.0)
    sent: list[Gauges] = []
    enough = asyncio.Event()

    async def send(said: Gauges) -> None:
        sent.append(said)
        if len(sent) == 3:
            enough.set()

    sending = asyncio.create_task(Instruments().send("ann", send))
    await asyncio.wait_for(enough.wait(), 60)
    sending.cancel()
    assert [said.learner for said in sent[:3]] == ["ann"] * 3


def test_curves_are_bounded_go_on_and_are_drawn() -> None:
    curves = GaugeCurves()
    for second in range(3 * MAX_POINTS):
        curves.note(Gauges("learner-0", 0.01, None, 0.5, 10**9, None, "cpu", "<b>node"), float(second))
    dumped = curves.dump()
    assert MAX_POINTS / 2 <= len(dumped["learner-0"]) <= MAX_POINTS
    assert GaugeCurves.load(dumped).dump() == dumped
    report = fake_report(learners=2)
    report["series"]["gauges"] = dumped
    report["learners"]["learner-0"] |= curves.places["learner-0"]
    drawn = parts(report)
    for title in ("Learning rate (no unit)", "Processor (cores)", "Memory (bytes)"):
        assert f">{title}</h3>" in drawn["course"]
    for title in ("Gradient norm (no unit)", "Device memory (bytes)"):  # not known
        assert f">{title}</h3>" not in drawn["course"]
    assert "cpu on &lt;b&gt;node" in drawn["learners"]


def test_losses_on_validation_data_are_bounded() -> None:
    points: list[tuple[float, int, float]] = []
    for second in range(3 * MAX_LOSSES):
        note_validation(points, 1.5, 16 * second, float(second))
    assert MAX_LOSSES / 2 <= len(points) <= MAX_LOSSES
    assert points == sorted(points)


@pytest.mark.parametrize("dumped", [{"a": [[1.0]]}, {"a": [["x", None, None, 1, 1, None]]}, {"a": 3}])
def test_damaged_curves_are_refused(dumped: dict[str, list[list[object]]]) -> None:
    with pytest.raises((TypeError, ValueError)):
        GaugeCurves.load(dumped)
