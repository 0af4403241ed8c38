"""What can be set: the run's settings (one set for all members) and each service's own.

The run's settings are created once, stored with the run, and never differ between members; their digest is part of the
run's identity. A preset is a complete set of them. Published values are those of algorithm.md's source, "Decoupled DiLoCo"
(arXiv 2604.21428); where the paper is silent the field's description says "unpublished".
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as EnvironmentValueError

from diloco.errors import SettingsError

Bits = Literal[4, 8, 16, 32]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,47}$", description="lower-case letters, digits, - and _")]
# a process's name, or what is before the number of one (:mod:`diloco.service` settles it)
ProcessName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,47}|[a-z0-9_-]{0,42}[*])$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FragmentSettings(_Section):
    """How the model is cut into fragments (Decoupled DiLoCo, section on fragmentation)."""

    count: int = Field(24, ge=1, le=4096, description="fragments P, embedding-like fragments counted in")
    strategy: Literal["balanced", "strided", "layer"] = Field("balanced", description="how tensors are dealt to fragments")


class RoundSettings(_Section):
    """When a fragment's round is due, and how long it stays open."""

    steps: int = Field(24, ge=1, le=100_000, description="sync interval H in inner steps, per fragment")
    overlap_steps: float = Field(2.0, gt=0, description="tau: steps of time a round may take before the version is applied")
    quorum: int | Literal["all"] = Field(1, description="learners K that must answer, or all that are alive")
    grace_factor: float = Field(
        0.9, ge=0, lt=1, description="gamma of the grace window; 0 switches the window off (gamma itself is unpublished)"
    )
    max_staleness_versions: int = Field(
        4, ge=0, le=64, description="an offer whose base is more versions behind is not merged (unpublished)"
    )
    learners_wait: bool = Field(False, description="learners pause from their answer until the version arrives (DiLoCo)")

    @property
    def lockstep(self) -> bool:
        """Whether every learner's every step is answered by a version of every fragment before the next one."""
        return self.learners_wait and self.steps == 1


class MergeSettings(_Section):
    """How outer gradients of several learners become one."""

    method: Literal["rda", "average"] = Field("rda", description="for all but embedding-like tensors, which are averaged")
    granularity: Literal["row", "tensor"] = Field(
        "row", description="one norm per row (vector along the last axis) or per tensor piece (unpublished)"
    )
    weights: Literal["quality", "tokens", "equal"] = Field("quality", description="tokens^2/steps, tokens, or 1")
    against: Literal["base", "current"] = Field(
        "base", description="outer gradients against the learner's base version, or the syncer's value as published"
    )


class OuterSettings(_Section):
    """SGD with Nesterov momentum; both values unpublished, the defaults are measured (docs/quality.md). Or AdamW."""

    optimizer: Literal["nesterov", "adamw"] = Field(
        "nesterov", description="adamw: learners send gradients, and the step that inner describes is taken from their average"
    )
    learning_rate: float = Field(0.7, gt=0, le=10, description="1 for adamw, whose rate is the inner one")
    momentum: float = Field(0.5, ge=0, lt=1, description="0 for adamw, which has its own")


class InnerSettings(_Section):
    """AdamW over a cosine schedule in tokens; all values unpublished. It is the learners', unless the outer one is AdamW."""

    learning_rate: float = Field(8e-3, gt=0, le=10)
    final_fraction: float = Field(0.1, ge=0, le=1, description="learning rate at the end of the budget, relative to the peak")
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="share of the token budget with a rising learning rate")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    restart_warmup_steps: int = Field(
        10, ge=0, le=100_000, description="steps of a learner's own warm-up when its optimizer state is lost in mid-run"
    )


class CarrySettings(_Section):
    """What becomes of work that a version does not contain (beyond the paper; published: all of it is overwritten)."""

    overlap: float = Field(0.0, ge=0, le=1, description="share kept of the progress made since the offer that was merged")
    late: float = Field(1.0, ge=0, le=1, description="share kept of progress that came too late for its round")
    max_versions: int = Field(8, ge=1, le=1024, description="progress carried over more versions than this is dropped")


class ApplySettings(_Section):
    """What a learner does with a version."""

    alpha: float = Field(0.0, ge=0, lt=1, description="mixing: share of the learner's own value kept on receipt")


class CodecSettings(_Section):
    """How offers and records are encoded."""

    offer_bits: Bits = Field(4, description="bits a value of a learner's offer")
    record_bits: Bits = Field(4, description="bits a value of a record's merged outer gradient")
    error_feedback: bool = Field(True, description="quantisation errors are added to the next offer or record")
    zstd_level: int = Field(-1, ge=-50, le=19, description="-1 is nearly free; 1 saves another 12 % at a third of the speed")


class LogSettings(_Section):
    """How the log is kept short."""

    keyframe_factor: float = Field(
        1.0, gt=0, le=1000, description="a keyframe is written when the records since the last one are this many times its size"
    )
    keep_keyframes: int = Field(2, ge=2, le=1_000_000, description="so many keyframes of a fragment stay, and all that follows")
    keep_bytes: int = Field(1 << 30, ge=0, le=2**60, description="more keyframes stay while the log is smaller than about this")
    archive: bool = Field(False, description="every merged offer is kept too, so that merges can be done again")
    archive_bytes: int = Field(1 << 34, ge=1 << 20, le=2**60, description="at most so much of them")
    replicas: Literal[1, 3, 5] = Field(1, description="servers of a NATS cluster that hold each message")


class LivenessSettings(_Section):
    """When a member counts as alive."""

    pulse_s: float = Field(0.5, gt=0, le=60, description="a learner pulses at every step, and at least this often")
    dead_s: float = Field(5.0, gt=0, le=3600, description="a learner not heard for so long is not waited for")
    lease_s: float = Field(30.0, gt=0, le=3600, description="a learner not heard for so long loses its data shares to others")
    takeover_s: float = Field(1.5, gt=0, le=3600, description="a syncer not heard for so long loses its fragments to others")


RegionName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,15}$", description="lower-case letters, digits and _")]


class RegionSettings(_Section):
    """Regions, each with a NATS server of its own, and the store that spans them."""

    names: list[RegionName] = Field([], max_length=64, description="all regions; empty: one server for all")
    away_s: float = Field(
        6.0,
        gt=0,
        le=3600,
        description="a region none of whose syncers is heard, or can commit, so long loses its fragments",
    )
    control_replicas: Literal[1, 3, 5] = Field(1, description="servers that hold the control store, which spans the regions")
    adaptive: bool = Field(True, description="fewer bits and longer sync intervals where a link is too slow (not in lockstep)")
    min_bits: Bits = Field(4, description="not fewer bits than this because of a slow link")
    max_pace: float = Field(
        4.0, ge=1, le=16, description="most times that the sync interval grows because of a slow link (not with learners_wait)"
    )
    merge: bool = Field(False, description="a region's offers are merged there, so that one crosses to a fragment's owner")

    @model_validator(mode="after")
    def _distinct(self) -> RegionSettings:
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"regions.names: two regions are named {twice[0]!r}; give each a name of its own")
        if "control" in self.names:
            raise ValueError("regions.names: 'control' is what links name the control store; give the region another name")
        if len(self.names) == 1:
            raise ValueError(f"regions.names: one ({self.names[0]!r}) is none: name all regions, or leave the list empty")
        if self.merge and not self.names:
            raise ValueError("regions.merge: there are no regions (regions.names); name them, or leave it out")
        return self


class QuarantineSettings(_Section):
    """When a learner whose outer gradients are outliers takes part no more (off as long as ``factor`` is 0)."""

    factor: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="an offer is an outlier above so many times the median norm of the other learners' recent ones; 0: never",
    )
    offers: int = Field(
        1, ge=1, le=1000, description="so many outliers of one fragment in a row, and its learner is quarantined"
    )


class TaskSettings(_Section):
    """What is trained: a built-in task or the user's own `package.module:attribute`."""

    name: str = Field("gpt", pattern=r"^[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?$")
    layers: int = Field(3, ge=1, le=128)
    width: int = Field(96, ge=8, le=16384)
    heads: int = Field(4, ge=1, le=256)
    context: int = Field(128, ge=8, le=131072, description="bytes a sequence")
    batch: int = Field(16, ge=1, le=65536, description="sequences a step")

    @model_validator(mode="after")
    def _heads_divide(self) -> TaskSettings:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        return self


# how the run is spread over machines and links, how its log is kept, and when somebody counts as gone
DEPLOYMENT = ("shards", "log", "liveness", "regions", "quarantine")


class RunSettings(_Section):
    """All that every member of a run must agree on."""

    preset: str = "decoupled"
    seed: int = Field(0, ge=0, lt=2**32)
    tokens: int = Field(7_500_000, ge=1, le=10**18, description="token budget: the run ends when so many were processed")
    learners: int = Field(4, ge=1, le=4096, description="learners M that the data is shared between")
    shards: int = Field(2, ge=1, le=1024, description="at most so many syncers share the fragments; further ones stand by")
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
    task: TaskSettings = TaskSettings()

    @model_validator(mode="after")
    def _consistent(self) -> RunSettings:
        quorum = self.round.quorum
        if isinstance(quorum, int) and not 1 <= quorum <= self.learners:
            raise ValueError(f"round.quorum = {quorum} must be between 1 and learners = {self.learners}")
        if self.shards > self.fragments.count:
            raise ValueError(f"shards = {self.shards} is more than fragments.count = {self.fragments.count}")
        if self.regions.merge and self.merge.against == "current":
            raise ValueError(
                "regions.merge with merge.against = current: the owner takes each offer against its own newest version, and of "
                "offers that are merged already it could not; set merge.against = base"
            )
        if self.regions.merge and self.quarantine.factor:
            raise ValueError(
                "quarantine.factor with regions.merge: an owner sees no norms of offers that are merged before; set one of them"
            )
        if self.outer.optimizer == "adamw":
            self._gradients_alone()
        return self

    def _gradients_alone(self) -> None:
        """An outer AdamW is for gradients: a displacement is one only if it holds one step, taken from the newest version."""
        needed: dict[str, tuple[Any, Any]] = {
            "round.steps": (self.round.steps, 1),
            "round.learners_wait": (self.round.learners_wait, True),
            "carry.overlap": (self.carry.overlap, 0.0),
            "carry.late": (self.carry.late, 0.0),
            "apply.alpha": (self.apply.alpha, 0.0),
            "outer.learning_rate": (self.outer.learning_rate, 1.0),
            "outer.momentum": (self.outer.momentum, 0.0),
        }
        wrong = [f"{name} = {value} must be {right}" for name, (value, right) in needed.items() if value != right]
        if wrong:
            raise ValueError(f"outer.optimizer = adamw is for gradients (preset data-parallel): {', '.join(wrong)}")

    @property
    def adapts(self) -> bool:
        """Whether precision and pace follow the links between regions (:mod:`diloco.core.bandwidth`)."""
        return self.regions.adaptive and bool(self.regions.names) and not self.round.lockstep

    def quorum(self, live_learners: int) -> int:
        """Learners that must answer before a round may close, given how many are alive."""
        return max(1, live_learners) if self.round.quorum == "all" else self.round.quorum

    def canonical(self) -> bytes:
        """The settings as canonical JSON: equal settings, equal bytes, on any machine."""
        return _canonical(self.model_dump())

    def digest(self) -> bytes:
        """BLAKE3 (32 bytes) as canonical JSON of all that a member's bits follow from.

        Left out is :data:`DEPLOYMENT`, which a run that is taken up again from a checkpoint may have otherwise.
        """
        return blake3(_canonical(self.model_dump(exclude=set(DEPLOYMENT)))).digest()


_PRESETS: dict[str, dict[str, Any]] = {
    # ours: the published structure, four bits both ways, late work carried over, defaults that measured best
    "decoupled": {},
    # algorithm.md section 1 to the letter; outer learning rate and momentum are those of the lineage
    "published": {
        "merge": {"granularity": "tensor", "against": "current"},
        "outer": {"learning_rate": 0.7, "momentum": 0.9},
        "carry": {"overlap": 0.0, "late": 0.0},
        "codec": {"offer_bits": 16, "record_bits": 16, "error_feedback": False},
    },
    # Streaming DiLoCo (arXiv 2501.18512): fragments, overlapped, but every live learner must answer
    "streaming": {
        "round": {"quorum": "all", "grace_factor": 0.0, "overlap_steps": 5.0},
        "merge": {"method": "average", "weights": "equal", "against": "current"},
        "outer": {"learning_rate": 0.4, "momentum": 0.9},
        "carry": {"overlap": 0.0, "late": 0.0},
        "apply": {"alpha": 0.5},
        "codec": {"offer_bits": 4, "record_bits": 32, "error_feedback": False},
    },
    # DiLoCo (arXiv 2311.08105): the whole model at once, and nobody goes on before the new version is there
    "diloco": {
        "shards": 1,
        "fragments": {"count": 1},
        "round": {"quorum": "all", "grace_factor": 0.0, "learners_wait": True},
        "merge": {"method": "average", "weights": "equal", "against": "current"},
        "outer": {"learning_rate": 0.7, "momentum": 0.9},
        "carry": {"overlap": 0.0, "late": 0.0},
        "codec": {"offer_bits": 32, "record_bits": 32, "error_feedback": False},
    },
    # the usual way: gradients are averaged at every step, over the same transport, as a reduce-scatter to the fragments' owners
    # and an all-gather from them. So many fragments share the model evenly between the owners of two regions or three.
    "data-parallel": {
        "fragments": {"count": 12},
        "round": {
            "steps": 1,
            "quorum": "all",
            "grace_factor": 0.0,
            "max_staleness_versions": 0,
            "learners_wait": True,
        },
        "merge": {"method": "average", "weights": "tokens"},
        "outer": {"optimizer": "adamw", "learning_rate": 1.0, "momentum": 0.0},
        "carry": {"overlap": 0.0, "late": 0.0},
        "codec": {"offer_bits": 16, "record_bits": 16, "error_feedback": False},
    },
}
PRESETS = tuple(_PRESETS)

SHOWN_CHARACTERS = 500  # of a wrong value, in an error
S = TypeVar("S", bound=BaseModel)


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def parse(cls: type[S], values: Mapping[str, Any], source: str) -> S:
    """Validate ``values`` as ``cls``.

    Raises:
        SettingsError: naming ``source``, every wrong setting, what was expected and, for an unknown one, the nearest name.
    """
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise SettingsError(f"{source}: " + "; ".join(_explain(cls, detail) for detail in error.errors())) from None


def run_settings(
    preset: str = "decoupled", overrides: Mapping[str, Any] | None = None, source: str = "settings"
) -> RunSettings:
    """A preset with overrides, which are nested mappings or dotted names (``{"round.steps": 12}``).

    Raises:
        SettingsError: unknown preset, unknown setting, or a value out of range.
    """
    if preset not in _PRESETS:
        raise SettingsError(f"{source}: no preset {preset!r}{nearest(preset, PRESETS)}; there are {', '.join(PRESETS)}")
    values: dict[str, Any] = json.loads(json.dumps(_PRESETS[preset])) | {"preset": preset}
    return _overridden(values, overrides or {}, source)


def changed_settings(settings: RunSettings, overrides: Mapping[str, Any], source: str) -> RunSettings:
    """Settings with overrides, as :func:`run_settings` takes them."""
    return _overridden(settings.model_dump(), overrides, source)


def _overridden(values: dict[str, Any], overrides: Mapping[str, Any], source: str) -> RunSettings:
    for key, value in overrides.items():
        if key == "preset":
            raise SettingsError(f"{source}: preset = {value!r}: a preset is chosen before any setting, not set among them")
        _put(values, key, value, source)
    return parse(RunSettings, values, source)


def parse_assignments(assignments: Sequence[str], source: str = "--set") -> dict[str, Any]:
    """``["round.steps=12", "merge.method=rda"]`` as a mapping; values are TOML where they parse as such, else text.

    Raises:
        SettingsError: an item without ``=``.
    """
    values: dict[str, Any] = {}
    for item in assignments:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise SettingsError(f"{source} {item}: expected KEY=VALUE, for example round.steps=12")
        try:
            values[key.strip()] = tomllib.loads(f"v = {text}")["v"]
        except (ValueError, RecursionError):
            values[key.strip()] = text.strip()
    return values


def all_names(cls: type[BaseModel] = RunSettings, prefix: str = "") -> list[str]:
    """Dotted names of all settings below ``cls``."""
    names: list[str] = []
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += all_names(field.annotation, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def value_of(settings: RunSettings, key: str) -> Any:
    """A setting by its dotted name."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _put(values: dict[str, Any], key: str, value: Any, source: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise SettingsError(f"{source}: no setting {key!r}{nearest(key, all_names())}")
        values = inner
    if isinstance(value, Mapping):
        for name, item in value.items():
            _put(values, f"{last}.{name}", item, source)
    else:
        values[last] = value


def nearest(name: str, known: Sequence[str]) -> str:
    """What an error says of the known name that is nearest to an unknown one; empty if none is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not close:
        leaf = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [leaf[m] for m in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(leaf), n=1, cutoff=0.6)]
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explain(cls: type[BaseModel], detail: Any) -> str:
    parts = [str(part) for part in detail["loc"] if not str(part).startswith(("literal[", "int", "constrained"))]
    name = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return f"no setting {name!r}{nearest(name, all_names(cls))}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return message if not name or detail["type"] == "value_error" else f"{name} = {shown(detail['input'])}: {message}"


def shown(value: object) -> str:
    """A value as an error shows it: not more of it than helps, and whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def host_and_port(address: str) -> tuple[str, int]:
    """What ``metrics_address`` says; port 0 is any that is free.

    Raises:
        ValueError: it is none; the message names the setting and its variable.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != address or "@" in address or any(map(str.isspace, address)):
        raise ValueError(
            f"metrics_address (DILOCO_METRICS_ADDRESS) = {address!r}: expected HOST:PORT, for example 127.0.0.1:9464, or "
            "0.0.0.0:9464 for all of this machine's addresses"
        )
    return host, port


class ServiceSettings(BaseSettings):
    """What every service is told by its TOML file (``--config``) and by ``DILOCO_*`` in the environment, which wins."""

    model_config = SettingsConfigDict(env_prefix="DILOCO_", extra="forbid", frozen=True)

    name: ProcessName = Field(
        description="learner-* is the first of learner-0, learner-1, ... that no process of state_dir has"
    )
    run: Name = "run"
    nats_url: str = Field("nats://127.0.0.1:4222", description="control traffic; bulk too unless nats_bulk_url is set")
    nats_bulk_url: str | None = None
    region: RegionName | None = Field(None, description="where this service is, in a run with regions")
    identity: str | None = Field(
        None,
        description="file of `diloco keys` for this process, {name} in it being its name; none: no TLS, no credentials",
    )
    state_dir: Path = Field(Path("."), description="where this process may keep files of its own")
    alive_file: Path | None = Field(None, description="touched at each sign of life that goes out, for health checks")
    clock_file: Path | None = Field(None, description="seconds that this process's wall clock is to be wrong by, for chaos")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = Field("json", description="console: for people, on standard error")
    log_to: Literal["file", "stderr"] = Field(
        "file", description="where JSON goes: state_dir/logs/NAME.jsonl, or standard error (for containers and journald)"
    )
    metrics_address: str = Field("", description="HOST:PORT that /metrics, /healthz and /readyz are served at; empty: nowhere")

    @field_validator("metrics_address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            host_and_port(value)
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @property
    def bulk_url(self) -> str:
        return self.nats_bulk_url or self.nats_url


class LearnerSettings(ServiceSettings):
    """A learner's own settings."""

    role: Literal["learner", "evaluator"] = "learner"
    share: int | None = Field(None, ge=0, description="which of the run's data shares this learner takes if it is free")
    data: str | None = Field(None, description="file or folder of text; default: Python's standard library sources")
    cache_dir: Path = Field(
        Path.home() / ".cache" / "diloco" / "jax", description="compiled programs, so that a restart need not compile again"
    )
    checkpoint_s: float = Field(10.0, ge=0, description="time between own checkpoints; 0: only when it leaves")
    leave_s: float = Field(10.0, ge=0, description="asked to end, it waits at most so long for its last work to be merged")
    slow: float = Field(1.0, ge=1, description="every step takes this many times as long, asleep (for experiments)")


class SyncerSettings(ServiceSettings):
    """A syncer's own settings: all syncers of a region are alike."""

    region_urls: dict[RegionName, str] = Field({}, description="bulk servers of the other regions")


class CoordinatorSettings(ServiceSettings):
    """The coordinator's own settings; ``settings`` is the run it creates where the server does not have it yet."""

    settings: RunSettings = RunSettings()


def check_region(region: str | None, regions: Sequence[str], run: str) -> None:
    """Refuse a service that is in none of a run's regions, or in one where there are none.

    Raises:
        SettingsError: the run's regions are named.
    """
    if (region is None) == (not regions) and (region is None or region in regions):
        return
    if region is None:
        raise SettingsError(f"region: run {run!r} has the regions {', '.join(regions)}; set the one that this service is in")
    known = f"there are {', '.join(regions)}{nearest(region, regions)}" if regions else "it has no regions"
    raise SettingsError(f"region = {region!r}: not a region of run {run!r}: {known}")


V = TypeVar("V", bound=ServiceSettings)


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says.

    Raises:
        SettingsError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, or a number of thousands of digits
        raise SettingsError(f"{path}: not TOML: {error}") from None


def load_service(cls: type[V], config: Path | None) -> V:
    """Read a service's settings from a TOML file and the environment.

    Raises:
        SettingsError: file missing or not TOML, unknown or wrong settings, unknown ``DILOCO_*`` variable.
    """
    values = {} if config is None else read_toml(config)
    known = {f"DILOCO_{name.upper()}": name for name in cls.model_fields}
    for variable in os.environ:
        if variable.startswith("DILOCO_") and variable not in known:
            raise SettingsError(f"environment: no setting {variable}{nearest(variable, list(known))}")
    try:
        return cls(**values)
    except ValidationError as error:
        source = str(config) if config else "environment"
        raise SettingsError(f"{source}: " + "; ".join(_explain(cls, detail) for detail in error.errors())) from None
    except EnvironmentValueError as error:
        raise SettingsError(f"environment: {error}") from None
