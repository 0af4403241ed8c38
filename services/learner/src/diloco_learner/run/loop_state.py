"""The state of a loop's learner, which the loop keeps in its own checkpoint: ``run.state_dict()``, ``run.load_state_dict()``.

It consists of plain values and arrays, in one tuple a rank, since ``torch.distributed.checkpoint`` keeps a tuple as it is:
before a loop is in its run nobody knows which arrays there will be. What rounding to bfloat16 has left over of each parameter
is apart, by path, so that it is spread over other ranks as the parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from diloco.core.learner.learner import ACCOUNTS, Dump
from diloco.errors import SettingsError

FORMAT = "diloco-loop-1"
PART, RESTS = "rank-", "rests"
NOTHING = ()  # a part of a loop that was not in its run

Arrays = dict[str, NDArray[Any]]


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plain values of one rank's part."""

    format: str
    run: str
    identity: str  # of the run, hexadecimal
    learner: str
    moment: str  # names the boundary that it is of, the same in all ranks
    rank: int
    ranks: int
    fingerprint: str  # of the parameters that the rank had then
    accounts: dict[str, Any]  # plain values of all fragments, which the first rank has


@dataclass(frozen=True)
class LoopState:
    """A state that was loaded, as far as it is here: parts of one moment, of one or several ranks."""

    run: str
    identity: str
    learner: str
    moment: str
    ranks: int
    fingerprints: dict[int, str]  # by rank
    accounts: dict[str, Any]
    arrays: Arrays

    @property
    def held(self) -> list[int]:
        """Return the fragments whose arrays are here."""
        return sorted({_fragment_of(name) for name in self.arrays})

    def check_values(self, rank: int, ranks: int, fingerprint: str) -> None:
        """Check that the parameters are those that a rank had; of another number of ranks that is not known.

        Raises:
            SettingsError: they are not.
        """
        if ranks == self.ranks and self.fingerprints.get(rank, fingerprint) != fingerprint:
            raise SettingsError(
                f"load_state_dict: the parameters are not those of the moment of this state ({self.moment}): load "
                "the model from the same checkpoint before the run is entered, or leave out load_state_dict to join without "
                "the work that was not merged"
            )


def packed(
    dump: Dump,
    *,
    run: str,
    identity: bytes,
    learner: str,
    moment: str,
    rank: int,
    ranks: int,
    fingerprint: str,
    shown: Callable[[NDArray[Any]], Any],
) -> dict[str, Any]:
    """Return a rank's part of a state; ``shown`` gives an array, any dtype [...], as users save it."""
    accounts, arrays = dump
    facts = _Facts(
        format=FORMAT,
        run=run,
        identity=identity.hex(),
        learner=learner,
        moment=moment,
        rank=rank,
        ranks=ranks,
        fingerprint=fingerprint,
        accounts=accounts,
    )
    return {f"{PART}{rank}": (msgspec.structs.asdict(facts), {name: shown(array) for name, array in arrays.items()})}


def placeholder(rank: int) -> dict[str, Any]:
    """Return the part of a rank that is not in its run, which says what there will be to load."""
    return {f"{PART}{rank}": NOTHING}


def unpacked(state: Any, rank: int) -> LoopState | None:
    """Return what :func:`packed` gave, for a rank: of the parts that are there all; None: a later rank has none.

    Raises:
        SettingsError: it is something else, damaged, of another version, or its parts are not of one moment.
    """
    if not isinstance(state, Mapping):
        raise SettingsError(f"load_state_dict: state is a {type(state).__name__}, expected what run.state_dict() returned")
    keys = [key for key in state if isinstance(key, str) and key.startswith(PART)]
    parts = [_part(key, state[key]) for key in sorted(keys) if not _is_nothing(state[key])]
    if rank and keys and not parts:
        return None
    if not any(facts.accounts for facts, _ in parts) and not (rank and parts):
        raise SettingsError(
            f"load_state_dict: the state has no accounts (keys {', '.join(map(str, state)) or 'none'}): load what "
            "run.state_dict() returned within the with statement, of several ranks that of the first one"
        )
    first = parts[0][0]
    for facts, _ in parts:
        if (facts.identity, facts.learner, facts.moment) != (first.identity, first.learner, first.moment):
            raise SettingsError(
                f"load_state_dict: rank {facts.rank}'s part is of {facts.learner}, {facts.moment}, and rank {first.rank}'s of "
                f"{first.learner}, {first.moment}: load parts of one checkpoint"
            )
    return LoopState(
        run=first.run,
        identity=first.identity,
        learner=first.learner,
        moment=first.moment,
        ranks=first.ranks,
        fingerprints={facts.rank: facts.fingerprint for facts, _ in parts},
        accounts=next((facts.accounts for facts, _ in parts if facts.accounts), {}),
        arrays={name: array for _, arrays in parts for name, array in arrays.items()},
    )


def agreed_moment(moments: Sequence[str]) -> str:
    """Return the moment of the state that all ranks begin from; empty: from none. ``moments`` by rank; empty: it has none.

    Raises:
        SettingsError: they differ.
    """
    for rank, moment in enumerate(moments):
        if moment not in ("", moments[0]):
            first = moments[0] or "none"
            raise SettingsError(
                f"load_state_dict: rank {rank} has loaded the state of {moment}, and rank 0 {first}: load the same checkpoint "
                "in all ranks"
            )
    return moments[0]


def bare_fragments(carriers: Iterable[int], held: Sequence[Sequence[int]]) -> list[int]:
    """Return the fragments whose carrier has no arrays of them; ``held`` by rank: those of which it has."""
    return [fragment for fragment, carrier in enumerate(carriers) if fragment not in held[carrier]]


def _is_nothing(part: Any) -> bool:
    return isinstance(part, tuple | list) and not part


def _part(key: str, part: Any) -> tuple[_Facts, Arrays]:
    """Return one rank's part.

    Raises:
        SettingsError: it is none.
    """
    if not isinstance(part, tuple | list) or len(part) != 2 or not all(isinstance(each, Mapping) for each in part):
        raise SettingsError(f"load_state_dict: {key!r} is damaged: expected plain values and arrays, as run.state_dict() gives")
    found = part[0].get("format")
    if found != FORMAT:
        raise SettingsError(
            f"load_state_dict: the state has the format {found!r}, expected {FORMAT!r}: install the version of diloco that "
            "saved it, or leave out load_state_dict"
        )
    try:
        facts = msgspec.convert(dict(part[0]), _Facts)
        arrays = {str(name): _host_array(array) for name, array in part[1].items() if _fragment_of(str(name)) >= 0}
    except (msgspec.ValidationError, TypeError, ValueError, RuntimeError) as error:
        raise SettingsError(f"load_state_dict: {key!r} is damaged: {error}") from None
    return facts, arrays


def _fragment_of(name: str) -> int:
    return int(name.removeprefix(ACCOUNTS).partition("/")[0])


def _host_array(array: Any) -> NDArray[Any]:
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
