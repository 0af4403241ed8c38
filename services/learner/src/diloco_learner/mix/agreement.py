"""Comparison of data with the run's, which all its learners have, and the limit of epochs."""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from diloco.errors import AdmissionError, DataError
from diloco.settings.run import MixSettings, RunSettings

COPY = "copy its files from where the run was begun"


def digest_of(text: str) -> str:
    """Return a digest (hex) as ``task.mix`` has it."""
    return blake3(text.encode()).hexdigest(16)


def check_epochs(settings: RunSettings, mix: MixSettings, most: Mapping[str, float | None]) -> None:
    """Check that a run goes over no source more often than its table allows (``most``; None: no limit).

    Raises:
        DataError: it does; the source is named.
    """
    for name, epochs in settings.with_mix(mix).epochs(settings.tokens).items():
        limit = most[name]
        if limit is not None and epochs > limit:
            raise DataError(
                f"source {name!r}: ends before the run does: {settings.tokens} tokens go over it {epochs:.2f} times, "
                f"and sources.{name}.most_epochs = {limit:g}: set fewer tokens, a smaller weight or more epochs"
            )


def check_same(ours: MixSettings, runs: MixSettings, data: str, content: str = COPY) -> None:
    """Check that data are the run's; ``content`` is what to do if a source has other content.

    Raises:
        AdmissionError: they are not; the first thing that differs is named.
    """

    def refuse(what: str, here: object, there: object, advice: str) -> None:
        raise AdmissionError(f"{data}: {what} is {here} here, the run's is {there}: {advice}")

    if ours.sources.keys() != runs.sources.keys():
        refuse("the list of sources", ", ".join(ours.sources), ", ".join(runs.sources), "take the mix.toml that the run has")
    for name, source in ours.sources.items():
        other = runs.sources[name]
        if source.weight != other.weight:
            refuse(f"the weight of source {name!r}", source.weight, other.weight, "take the mix.toml that the run has")
        if source.digest != other.digest:
            here, there = (f"{each.digest} ({each.tokens} tokens)" for each in (source, other))
            refuse(f"the content of source {name!r}", here, there, content)
    # after the content: a tokenizer that is trained follows from it
    if ours.vocabulary != runs.vocabulary:
        refuse(
            "the vocabulary",
            ours.vocabulary,
            runs.vocabulary,
            "take the tokenizer's file from where the run was begun",
        )
    if ours.tokenizer != runs.tokenizer:
        refuse("the tokenizer", ours.tokenizer, runs.tokenizer, "take its file from where the run was begun")
    if ours != runs:
        here, there = (", ".join(str(source.tokens) for source in each.sources.values()) for each in (ours, runs))
        refuse(
            "the number of tokens by source",
            here,
            there,
            "use the version of the library tokenizers that the run was started with",
        )
