"""The settings of a run: one set for all members, created once, stored with the run, equal everywhere.

Their digest is part of the run's identity. Published values are those of "Decoupled DiLoCo" (arXiv 2604.21428); where the
paper is silent the field's description says "unpublished".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from blake3 import blake3
from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from diloco.settings.counts import Count
from diloco.settings.publish import PublishSettings
from diloco.settings.section import Section as _Section

Bits = Literal[1, 2, 4, 8, 16, 32]
Strategy = Literal["balanced", "strided", "layer", "layers", "tensors"]
BY_LAYERS: tuple[Strategy, ...] = ("layers", "tensors")  # strategies that keep a model's layers apart from all other tensors
# a slow link never leads to 1 or 2 bits: members of a run that does not begin with them need not know them
AdaptiveBits = Literal[4, 8, 16, 32]
# features that a run requires of its members
NARROW_BITS = {1: "one_bit", 2: "two_bits"}  # by bits: the feature that this encoding requires
CONTINUES = "continues"  # a version 0 that another run ended with, and shares that begin where that one's ended
REGIONAL_QUARANTINE = "regional_quarantine"  # outliers are judged where a region merges its learners' offers

MAX_NAME = 48  # characters
NAME_PATTERN = rf"^[a-z0-9][a-z0-9_-]{{0,{MAX_NAME - 1}}}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, description="lower-case letters, digits, - and _")]


# a process's name, or a pattern that ends in a star (:mod:`diloco.service.skeleton` settles the number)
ProcessName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,47}|[a-z0-9_-]{0,42}[*])$")]


class FragmentSettings(_Section):
    """Cutting the model into fragments (Decoupled DiLoCo, section on fragmentation)."""

    count: int = Field(
        24,
        ge=1,
        le=4096,
        description="number of fragments P of all kinds; with `layers` and `tensors` the maximum, since a small model "
        "has fewer",
    )
    strategy: Strategy = Field("balanced", description="how tensors are distributed over fragments (user-guide.md, Fragments)")
    layers: int = Field(1, ge=1, le=4096, description="strategy `layers`: approximate least number of layers per fragment")

    _LATER: ClassVar[frozenset[str]] = frozenset({"layers"})

    @model_validator(mode="after")
    def _of_layers(self) -> FragmentSettings:
        if self.layers > 1 and self.strategy != "layers":
            raise ValueError(
                f"fragments.layers = {self.layers} requires fragments.strategy = layers, but the strategy is "
                f"{self.strategy}: set fragments.strategy = layers, or fragments.layers = 1"
            )
        return self


class RoundSettings(_Section):
    """Opening and closing of a fragment's rounds."""

    steps: int = Field(24, ge=1, le=100_000, description="sync interval H in inner steps, per fragment")
    overlap_steps: float = Field(
        2.0, gt=0, description="tau: time that a round may take before its version is applied, in inner steps"
    )
    quorum: int | Literal["all"] = Field(
        1, description="K: number of learners whose offers a round needs; `all`: every learner that is alive"
    )
    grace_factor: float = Field(
        0.9, ge=0, lt=1, description="gamma of the grace window; 0 switches the window off (gamma itself is unpublished)"
    )
    max_staleness_versions: int = Field(
        4, ge=0, le=64, description="an offer is not merged if its base is more versions behind (unpublished)"
    )
    learners_wait: bool = Field(False, description="learners pause after their offer until the version arrives (DiLoCo)")
    grace_capped: bool = Field(False, description="the grace window lasts at most one step, as published")

    _LATER: ClassVar[frozenset[str]] = frozenset({"grace_capped"})

    @property
    def lockstep(self) -> bool:
        """Whether every learner's every step is answered by a version of every fragment before the next one."""
        return self.learners_wait and self.steps == 1


class MergeSettings(_Section):
    """Merging the outer gradients of several learners."""

    method: Literal["rda", "average"] = Field("rda", description="of all tensors that are not embedding-like")
    embedding: Literal["average", "rda"] = Field("average", description="method of embedding-like tensors")
    granularity: Literal["row", "tensor"] = Field(
        "row", description="one norm per row (vector along the last axis) or per tensor piece (unpublished)"
    )
    weights: Literal["quality", "tokens", "equal"] = Field("quality", description="weight: tokens^2/steps, tokens, or 1")
    against: Literal["base", "current"] = Field(
        "base",
        description="outer gradients are relative to the learner's base version, or, as published, to the syncer's value",
    )

    _LATER: ClassVar[frozenset[str]] = frozenset({"embedding"})


class OuterSettings(_Section):
    """SGD with Nesterov momentum; both values unpublished, the defaults are measured (docs/quality.md). Or AdamW."""

    optimizer: Literal["nesterov", "adamw"] = Field(
        "nesterov",
        description="adamw: learners send gradients, and the settings of `inner` describe the step taken with their average",
    )
    learning_rate: float = Field(0.5, gt=0, le=10, description="1 for adamw, whose rate is the inner one")
    momentum: float = Field(0.5, ge=0, lt=1, description="0 for adamw, which has its own")


class InnerSettings(_Section):
    """Muon or AdamW over a cosine schedule in tokens; all values unpublished. An outer AdamW goes by them, too."""

    optimizer: Literal["muon", "adamw"] = Field(
        "muon", description="muon: Muon for matrices, AdamW for embeddings, the head and vectors; better in our measurements"
    )
    learning_rate: float = Field(0.0125, gt=0, le=10, description="smaller models and shorter runs take a higher rate")
    final_fraction: float = Field(0.1, ge=0, le=1, description="learning rate at the end of the budget, relative to the peak")
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="share of the token budget in which the rate rises")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    restart_warmup_steps: int = Field(
        10, ge=0, le=100_000, description="steps of warm-up for one learner that lost its optimizer state during the run"
    )


class CarrySettings(_Section):
    """Carrying over work that a version does not contain (beyond the paper, where a version overwrites all of it)."""

    overlap: bool = Field(True, description="progress made while an offer was merged is kept, and is part of the next offer")


class ApplySettings(_Section):
    """Writing a version into a learner's model."""

    alpha: float = Field(0.0, ge=0, lt=1, description="mixing: share of the learner's own value kept on receipt")
    at: Literal["arrival", "overlap"] = Field(
        "arrival",
        description="when a version is applied: on arrival, or exactly round.overlap_steps of the learner's "
        "steps after its offer; the learner waits there for a late version",
    )

    _LATER: ClassVar[frozenset[str]] = frozenset({"at"})


class CodecSettings(_Section):
    """Encoding of offers and records."""

    offer_bits: Bits = Field(4, description="bits per value of a learner's offer")
    record_bits: Bits = Field(4, description="bits per value of a record's merged outer gradient")
    error_feedback: bool = Field(True, description="quantisation errors are added to the next offer or record")
    zstd_level: int = Field(-1, ge=-50, le=19, description="-1 is nearly free; 1 saves another 12 % at a third of the speed")


class LogSettings(_Section):
    """Retention of the log."""

    keyframe_factor: float = Field(
        1.0, gt=0, le=1000, description="a keyframe is written when the records since the last one are this many times its size"
    )
    keep_keyframes: int = Field(
        2, ge=2, le=1_000_000, description="number of keyframes kept per fragment, with all records after the oldest of them"
    )
    keep_bytes: Count = Field(
        1 << 30, ge=0, le=2**60, description="size of the log, approximately, up to which more keyframes are kept"
    )
    archive: bool = Field(False, description="also keep every merged offer, so that merges can be repeated")
    archive_bytes: Count = Field(1 << 34, ge=1 << 20, le=2**60, description="greatest size of the archive")
    replicas: Literal[1, 3, 5] = Field(1, description="servers of a NATS cluster that hold each message")


class LivenessSettings(_Section):
    """Heartbeats, and the silence after which a member counts as dead."""

    heartbeat_s: float = Field(0.5, gt=0, le=60, description="a learner sends a heartbeat at least this often")
    dead_s: float = Field(5.0, gt=0, le=3600, description="rounds do not wait for a learner silent for longer")
    lease_s: float = Field(30.0, gt=0, le=3600, description="a learner silent for longer loses its data shares to others")
    takeover_s: float = Field(1.5, gt=0, le=3600, description="a syncer silent for longer loses its fragments to others")


RegionName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,15}$", description="lower-case letters, digits and _")]


class RegionSettings(_Section):
    """Regions, each with a NATS server of its own, and the store that spans them."""

    names: list[RegionName] = Field([], max_length=64, description="all regions; empty: one server for all")
    away_s: float = Field(
        6.0,
        gt=0,
        le=3600,
        description="a region loses its fragments after this time without a heartbeat of its syncers, or without a syncer "
        "that can commit",
    )
    control_replicas: Literal[1, 3, 5] = Field(1, description="servers that hold the control store, which spans the regions")
    adaptive: bool = Field(True, description="fewer bits and longer sync intervals where a link is too slow (not in lockstep)")
    min_bits: AdaptiveBits = Field(4, description="least number of bits to which a slow link lowers the encoding")
    max_pace: float = Field(
        4.0, ge=1, le=16, description="largest stretch of the sync interval by a slow link (not with learners_wait)"
    )
    merge: bool = Field(
        False, description="a region merges its learners' offers first, so that a single offer crosses to a fragment's owner"
    )

    @model_validator(mode="after")
    def _distinct(self) -> RegionSettings:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"regions.names: two regions are named {twice[0]!r}; give each a name of its own")
        if "control" in self.names:
            raise ValueError("regions.names: 'control' is reserved for the control store; give the region another name")
        if len(self.names) == 1:
            raise ValueError(f"regions.names lists one region ({self.names[0]!r}): list at least two, or none")
        if self.merge and not self.names:
            raise ValueError("regions.merge: the run has no regions: list them in regions.names, or do not set regions.merge")
        return self


class QuarantineSettings(_Section):
    """Offers left out of a merge, and exclusion of a learner whose outer gradients are outliers (off where ``factor`` is 0)."""

    factor: float = Field(
        5.0,
        ge=0,
        le=1e9,
        description="an offer is an outlier, and left out of the merge or cut, if its norm is above this many times the median "
        "norm of the other learners' recent offers; 0: never",
    )
    offers: int = Field(
        1,
        ge=1,
        le=1000,
        description="number of consecutive outliers after which a fragment counts; a learner is quarantined while more than "
        "half of the fragments count",
    )
    merge_factor: float = Field(
        100.0,
        ge=0,
        le=1e9,
        description="a merge that would move a fragment by more than this many times the usual is made without its largest "
        "offers; 0: no limit",
    )


MAX_SOURCES = 64
MAX_VOCABULARY = 1 << 24
SourceName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,48}$", description="lower-case letters, digits and _")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class MixedSource(_Section):
    """A source of a mix of data."""

    digest: _Digest = Field(description="hash of the content, independent of its location")
    tokens: int = Field(ge=1, le=10**18, description="number of tokens to train on in one epoch: those that the loss counts")
    weight: int = Field(
        ge=1, le=10**9, description="windows from this source in every sum(weights) windows; of conversations: learned tokens"
    )


class MixSettings(_Section):
    """The data that `--data mix.toml` names, or conversations: all learners of a run have the same (`docs/data.md`)."""

    vocabulary: int = Field(ge=2, le=MAX_VOCABULARY)
    tokenizer: _Digest
    sources: dict[SourceName, MixedSource] = Field(min_length=1, max_length=MAX_SOURCES)

    def epochs(self, tokens: int) -> dict[str, float]:
        """Return how often training on so many tokens goes over each source, by its name."""
        whole = sum(source.weight for source in self.sources.values())
        return {name: tokens * source.weight / whole / source.tokens for name, source in self.sources.items()}


MAX_OPTIONS = 64
MAX_OPTION_ITEMS = 1024


class TaskSettings(_Section):
    """The training task: a built-in one or the user's own `package.module:attribute`."""

    name: str = Field("gpt", pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")
    layers: int = Field(3, ge=1, le=128)
    width: int = Field(96, ge=8, le=16384)
    heads: int = Field(4, ge=1, le=256)
    context: int = Field(128, ge=8, le=131072, description="tokens per sequence: bytes, or tokens of a mix")
    batch: int = Field(16, ge=1, le=65536, description="sequences per step")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the built-in model's matrices in a step; log, offers and optimizers always use float32"
    )
    options: dict[str, Any] = Field(
        {}, max_length=MAX_OPTIONS, description="options of your own task, given as `--task NAME=VALUE`"
    )

    mix: MixSettings | None = Field(None, description="the mix or the conversations that `--data` names; set by diloco up")

    _LATER: ClassVar[frozenset[str]] = frozenset({"dtype", "options", "mix"})

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of a step of a built-in task; a task of the user's own has its own number."""
        return self.batch * self.context

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name, value in options.items():
            items = value if isinstance(value, list) else [value]
            if not all(isinstance(item, bool | int | float | str) for item in items) or len(items) > MAX_OPTION_ITEMS:
                raise ValueError(
                    f"task.options.{name}: expected a bool, a number, text, or a list of at most {MAX_OPTION_ITEMS} of these"
                )
            if any(isinstance(item, float) and not math.isfinite(item) for item in items):
                raise ValueError(f"task.options.{name}: expected finite numbers")
        return options

    @model_validator(mode="after")
    def _heads_divide(self) -> TaskSettings:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        return self


class ContinuedRun(_Section):
    """The run that this one continues, which is over: version 0 is the parameters and outer momentum that it ended with."""

    run: Name
    identity: str = Field(pattern=r"^[0-9a-f]{16}$", description="identity of that run, in hexadecimal")
    tokens: int = Field(ge=0, le=10**18, description="tokens merged by that run and by the runs that it continues")
    batches: list[Annotated[int, Field(ge=0, le=2**61)]] = Field(
        max_length=1 << 14, description="first batch of each data share in this run; further shares begin with batch 0"
    )


# settings of machines, links, the log and liveness, on which no member's bits depend
DEPLOYMENT = ("shards", "log", "liveness", "regions", "quarantine", "publish")


class RunSettings(_Section):
    """All that every member of a run must agree on."""

    preset: str = "decoupled"
    seed: int = Field(0, ge=0, lt=2**32)
    tokens: Count = Field(
        7_500_000, ge=1, le=10**18, description="token budget: the run ends when learners have processed this many"
    )
    learners: int = Field(4, ge=1, le=4096, description="M: number of learners among which the data is divided")
    shards: int = Field(2, ge=1, le=1024, description="most syncers that share the fragments at a time; others stand by")
    fragments: FragmentSettings = FragmentSettings()
    round: RoundSettings = RoundSettings()
    merge: MergeSettings = MergeSettings()
    outer: OuterSettings = OuterSettings()
    inner: InnerSettings = InnerSettings()
    carry: CarrySettings = CarrySettings()
    apply: ApplySettings = ApplySettings()
    codec: CodecSettings = CodecSettings()
    log: LogSettings = LogSettings()
    liveness: LivenessSettings = LivenessSettings()
    regions: RegionSettings = RegionSettings()
    quarantine: QuarantineSettings = QuarantineSettings()
    publish: PublishSettings = PublishSettings()
    task: TaskSettings = TaskSettings()
    continues: ContinuedRun | None = Field(None, description="the run that this one continues; set by diloco up --continue")

    _LATER: ClassVar[frozenset[str]] = frozenset({"continues", "publish"})

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        quorum = self.round.quorum
        if isinstance(quorum, int) and not 1 <= quorum <= self.learners:
            raise ValueError(f"round.quorum = {quorum} must be between 1 and learners = {self.learners}")
        if self.shards > self.fragments.count:
            raise ValueError(f"shards = {self.shards} is more than fragments.count = {self.fragments.count}")
        if self.regions.merge and self.merge.against == "current":
            raise ValueError(
                "regions.merge = true with merge.against = current: an owner can take only single offers against its "
                "current value, and a region sends merged ones; set merge.against = base"
            )
        if self.offers_gradients:
            self._gradients_alone()
        if self.apply.at == "overlap":
            self._overlap_fits()
        return self

    @property
    def offers_gradients(self) -> bool:
        """Whether learners offer the gradients of single steps, and take none of their own: the outer rule takes the steps."""
        return self.outer.optimizer == "adamw"

    def _overlap_fits(self) -> None:
        """Refuse an overlap of a fixed length in which no step could be taken, or which the next round would end."""
        if self.round.learners_wait:
            raise ValueError(
                "apply.at = overlap with round.learners_wait: a learner that waits takes no steps while a version is "
                "made; set only one of these settings"
            )
        if self.round.overlap_steps >= self.round.steps:
            raise ValueError(
                f"apply.at = overlap with round.overlap_steps = {self.round.overlap_steps:g} and round.steps = "
                f"{self.round.steps}: the next round would begin before the version is applied; set round.overlap_steps "
                "below round.steps"
            )

    def _gradients_alone(self) -> None:
        """Refuse an outer AdamW unless a displacement is a gradient: of one step, from the newest version."""
        needed: dict[str, tuple[Any, Any]] = {
            "round.steps": (self.round.steps, 1),
            "round.learners_wait": (self.round.learners_wait, True),
            "carry.overlap": (self.carry.overlap, False),
            "apply.alpha": (self.apply.alpha, 0.0),
            "outer.learning_rate": (self.outer.learning_rate, 1.0),
            "outer.momentum": (self.outer.momentum, 0.0),
            "inner.optimizer": (self.inner.optimizer, "adamw"),
        }
        wrong = [f"{name} = {value} must be {right}" for name, (value, right) in needed.items() if value != right]
        if wrong:
            raise ValueError(f"outer.optimizer = adamw is for gradients (preset data-parallel): {', '.join(wrong)}")

    @property
    def adapts(self) -> bool:
        """Whether precision and pace follow the links between regions (:mod:`diloco.core.syncer.bandwidth`)."""
        return self.regions.adaptive and bool(self.regions.names) and not self.round.lockstep

    @property
    def requires(self) -> list[str]:
        """Names of the features that each member of such a run must know (docs/protocol.md, section 16)."""
        narrow = {feature: bits in (self.codec.offer_bits, self.codec.record_bits) for bits, feature in NARROW_BITS.items()}
        needed = {
            **narrow,
            CONTINUES: self.continues is not None,
            REGIONAL_QUARANTINE: self.regions.merge and self.quarantine.factor > 0,  # earlier versions refuse the two together
        }
        return [feature for feature, is_needed in needed.items() if is_needed]

    def quorum(self, live_learners: int) -> int:
        """Return the number of learners that must answer before a round may close, of so many that are alive."""
        return max(1, live_learners) if self.round.quorum == "all" else self.round.quorum

    @property
    def tokens_before(self) -> int:
        """Tokens that version 0 holds: of the runs that this one continues; 0 if it continues none."""
        return 0 if self.continues is None else self.continues.tokens

    def epochs(self, tokens: int) -> dict[str, float]:
        """Return how often this run goes over each source of its mix of data by so many tokens; nothing without a mix.

        The run that it continues went over the same data, if shares begin where that one's ended.
        """
        task, before = self.task, 0 if self.continues is None else sum(self.continues.batches)
        return {} if task.mix is None else task.mix.epochs(tokens + before * task.tokens_per_batch)

    def with_mix(self, mix: MixSettings | None) -> RunSettings:
        """Return these settings of a run whose data is this mix, or none."""
        return self.model_copy(update={"task": self.task.model_copy(update={"mix": mix})})

    def first_batch(self, share: int) -> int:
        """Return the batch with which a share of the data begins in this run."""
        batches = [] if self.continues is None else self.continues.batches
        return batches[share] if share < len(batches) else 0

    def for_members(self) -> RunSettings:
        """Return the settings that are stored with the run: without those that concern only the process that starts it."""
        return self.model_copy(update={"publish": PublishSettings()})

    def canonical(self) -> bytes:
        """Return the settings for members as canonical JSON: equal settings, equal bytes, on any machine."""
        return _canonical(self.for_members().model_dump())

    def digest(self) -> bytes:
        """Return BLAKE3 (32 bytes) of the canonical JSON of all settings that a member's bits depend on.

        :data:`DEPLOYMENT` is left out: a run that is resumed from a checkpoint may have other values there.
        """
        return blake3(_canonical(self.model_dump(exclude=set(DEPLOYMENT)))).digest()


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
