"""Statements of a run's syncers about outliers: read by all members, written by each syncer under its own key."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.control.creation import KnownRun
from diloco.control.tables import read_owners
from diloco.core.run.quarantine import Statements
from diloco.wire.fields import MAX_SYNCERS
from diloco.wire.quarantines import PREFIX, OutlierStatement, outliers_key, unpack_outliers

WHOLE_EVERY = 12  # readings until all keys are read again: a server that lost values gives revisions once more


class StatementReader:
    """Reads all syncers' statements; once they are known, one request says that there is nothing new."""

    def __init__(self, run: KnownRun) -> None:
        self._run = run
        self._statements: dict[str, OutlierStatement] = {}
        self._revision = self._readings = 0

    async def read(self) -> tuple[Statements, Sequence[str] | None]:
        """Return the statements by syncer, and the owners of the fragments; None: they are not known, or nothing is stated.

        Raises:
            BrokerError: the server is away.
        """
        registry = self._run.registry
        whole = self._readings % WHOLE_EVERY == 0
        statements = {} if whole else dict(self._statements)
        revision, seen = 0 if whole else self._revision, set[str]()
        while found := await registry.after(f"{PREFIX}*", revision):
            key, value, revision = found
            syncer = key.removeprefix(PREFIX)
            statement = unpack_outliers(value, syncer)
            if statement is None:
                statements.pop(syncer, None)
            elif syncer in statements or len(statements) < MAX_SYNCERS:
                statements[syncer] = statement
            if key in seen:
                break  # a writer without rest must not hold this up
            seen.add(key)
        self._readings, self._revision, self._statements = self._readings + 1, revision, statements
        if not any(statement.outliers for statement in statements.values()):
            return statements, None
        table = await read_owners(self._run)
        return statements, None if table is None else table.owners


async def read_outliers(run: KnownRun) -> None:
    """Have ``run`` go by what its syncers state of outliers now.

    Raises:
        BrokerError: the server is away.
    """
    run.judge(*await StatementReader(run).read())


async def write_outliers(run: KnownRun, statement: OutlierStatement) -> None:
    """Set a syncer's own key.

    Raises:
        BrokerError: the server is away, or refuses it.
    """
    await run.registry.put(outliers_key(statement.syncer), statement.pack())
