"""Work that is tried again until the server takes it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from diloco.errors import AppendUncertainError, BrokerError, FenceError, StorageFullError
from diloco.process import retry
from diloco.process.observe import Logger


class Warnings:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def warning(self, event: str, reason: str) -> None:
        self.reasons.append(reason)


async def patient(answers: list[Any], warnings: Warnings) -> Any:
    async def work() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return await retry.until_available(work, cast(Logger, warnings))


async def test_silence_and_full_storage_are_waited_out_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.0)
    warnings = Warnings()
    answers = [AppendUncertainError("silent"), StorageFullError("full"), AppendUncertainError("silent"), 7, 8]
    assert await patient(answers, warnings) == 7
    assert answers == [8]
    assert warnings.reasons == ["silent"]


@pytest.mark.parametrize("error", [BrokerError("refused"), FenceError("another one was first")])
async def test_what_waiting_does_not_fix_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        await patient([error], Warnings())


def test_a_complaint_is_made_once_until_it_is_over() -> None:
    warnings = Warnings()
    complaint = retry.Complaint(cast(Logger, warnings))
    assert not complaint.over()
    complaint.warn("event", reason="first")
    complaint.warn("event", reason="second")
    assert warnings.reasons == ["first"]
    assert complaint.over()
    complaint.warn("event", reason="third")
    assert warnings.reasons == ["first", "third"]
