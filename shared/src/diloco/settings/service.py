"""The settings of a service: each process has its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from diloco.errors import SettingsError
from diloco.settings.folders import CACHE_DIR
from diloco.settings.places import refuse_credentials
from diloco.settings.presets import run_settings
from diloco.settings.run import Name, ProcessName, RegionName, RunSettings
from diloco.settings.validation import nearest

MAX_LEADING = 16  # addresses of one learner: a process that meets the others tries all of them


def may_lead(count: int, least: int | None) -> int:
    """Return how many of ``count`` processes may lead, of which ``least`` go on where others are lost.

    It is one alone if none is left out, or if two parts of a cut network, without a process in common, could both go on.
    """
    return 1 if least is None or least >= count or 2 * least <= count else min(count, MAX_LEADING)


def host_and_port(address: str, setting: str = "metrics_address") -> tuple[str, int]:
    """Return host and port of an address; port 0 is any free one.

    Raises:
        ValueError: it is no address; the message names the setting and its variable.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.netloc != address or "@" in address or any(map(str.isspace, address)):
        raise ValueError(
            f"{setting} (DILOCO_{setting.partition('.')[0].upper()}) = {address!r}: expected HOST:PORT, for example "
            "127.0.0.1:9464, or 0.0.0.0:9464 for all of this machine's addresses"
        )
    return host, port


class TelemetrySettings(BaseModel):
    """Where a service's spans go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str = Field(
        "", description="collector that takes OTLP over HTTP, for example http://127.0.0.1:4318; empty: nowhere"
    )
    sample: float = Field(0.01, ge=0, le=1, description="share of the versions that are traced; must be equal in all services")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value:
            try:
                parts = urlsplit(value)
                known = (
                    parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
                )
            except ValueError:
                known = False
            if not known or any(map(str.isspace, value)):
                raise ValueError("expected http:// or https://, a host and a port, for example http://127.0.0.1:4318")
        return value

    @property
    def traces_url(self) -> str:
        """The address for spans: the endpoint's path, or OTLP's own."""
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else self.endpoint.rstrip("/") + "/v1/traces"


class ServiceSettings(BaseSettings):
    """Settings of every service, from its TOML file (``--config``) and from ``DILOCO_*`` in the environment, which wins."""

    model_config = SettingsConfigDict(env_prefix="DILOCO_", extra="forbid", frozen=True)

    name: ProcessName = Field(
        description="learner-* is the first of learner-0, learner-1, ... that no process of state_dir has"
    )
    run: Name = "run"
    nats_url: str = Field("nats://127.0.0.1:4222", description="control traffic; bulk too unless nats_bulk_url is set")
    nats_bulk_url: str | None = None
    region: RegionName | None = Field(None, description="region of this service, in a run with regions")
    identity: str | None = Field(
        None,
        description="identity file of this process, made by `diloco keys`; {name} in it stands for the process's name; "
        "none: no TLS, no credentials",
    )
    state_dir: Path = Field(Path("."), description="folder for the files of this process")
    alive_file: Path | None = Field(None, description="file touched whenever a heartbeat is sent, for health checks")
    clock_file: Path | None = Field(
        None, description="file with the seconds by which this process's wall clock is set wrong, for chaos tests"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = Field("json", description="console: readable text on standard error")
    log_to: Literal["file", "stderr"] = Field(
        "file", description="where JSON goes: state_dir/logs/NAME.jsonl, or standard error (for containers and journald)"
    )
    metrics_address: str = Field("", description="HOST:PORT of /metrics, /healthz and /readyz; empty: not served")
    telemetry: TelemetrySettings = Field(TelemetrySettings(), description="traces of versions and offers (watching.md)")

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


class MeshSettings(BaseModel):
    """The mesh of one learner's devices: their number is the product of its axes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: int = Field(1, ge=1, description="replicas of the model: each takes its rows of a batch")
    fsdp: int | None = Field(
        None, ge=1, description="devices that share the tensors and also take rows of a batch; by default all remaining devices"
    )
    tensor: int = Field(1, ge=1, description="devices that share the tensors whose partition names this axis")

    def axes(self, devices: int) -> dict[str, int]:
        """Return the sizes of its axes on so many devices, whose product is another number where they do not fit it."""
        fsdp = self.fsdp or max(1, devices // (self.data * self.tensor))
        return {"data": self.data, "fsdp": fsdp, "tensor": self.tensor}

    def of(self, present: int, count: int) -> MeshSettings | None:
        """Return the mesh of so many of ``count`` processes: of as many replicas less; None if a part of one would be left."""
        data, part = divmod(self.data * present, count)
        return None if part else self.model_copy(update={"data": data})


class ProcessesSettings(BaseModel):
    """The processes of one learner, one a host, whose devices make one mesh."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(1, ge=1, le=1024, description="processes of this learner")
    index: int = Field(0, ge=0, description="number of this process, from 0")
    address: str = Field(
        "",
        description="HOST:PORT where process 0 meets the others; after commas the addresses of processes 1, 2, ..., "
        "which lead if the processes before them are lost (at most 16; needs a `least` of more than half); "
        "the same in all processes",
    )
    cluster: Literal["", "slurm", "kubernetes"] = Field(
        "",
        description="settings missing here are taken from this cluster's environment: a Slurm step, or the index of "
        "an indexed Job",
    )
    start_s: float = Field(60.0, gt=0, le=3600, description="time within which all processes have to meet")
    silent_s: float = Field(10.0, ge=1, le=600, description="a process that is silent for longer is gone, and all others end")
    least: int | None = Field(
        None,
        ge=1,
        description="least number of processes that continue when others are lost, and take back processes "
        "that return; by default the loss of any process ends all of them",
    )
    regroup_s: float = Field(
        10.0,
        ge=0,
        description="with `least`: processes start without the missing ones after this time without a new one; survivors "
        "of a loss wait less",
    )

    @model_validator(mode="after")
    def _fits(self) -> ProcessesSettings:
        if self.index >= self.count and not self.cluster:
            raise ValueError(f"index = {self.index}: expected 0 to {self.count - 1}, as count = {self.count}")
        if self.count > 1 and not self.address and self.cluster != "slurm":
            raise ValueError("address: several processes need a HOST:PORT at which the others reach process 0")
        self._check_addresses()
        if self.least is not None and self.least > self.count and not self.cluster:
            raise ValueError(f"least = {self.least}: expected 1 to {self.count}, as count = {self.count}")
        if self.elastic and self.regroup_s > self.start_s:
            raise ValueError(
                f"regroup_s = {self.regroup_s:g}: expected at most start_s = {self.start_s:g}, within which a generation meets"
            )
        return self

    def _check_addresses(self) -> None:
        places = [host_and_port(address, "processes.address") for address in self.addresses]
        if twice := [address for address, place in zip(self.addresses, places, strict=True) if places.count(place) > 1]:
            raise ValueError(f"address = {self.address}: {twice[0]} is listed twice: give each process its own address")
        if len(places) > MAX_LEADING:
            raise ValueError(
                f"address: {len(places)} addresses, expected at most {MAX_LEADING}, the most processes that may lead"
            )
        if len(places) > 1 and not self.cluster:
            if len(places) > self.count:
                raise ValueError(
                    f"address = {self.address}: {len(places)} addresses for {self.count} processes; give at "
                    "most one address per process"
                )
            if may_lead(self.count, self.least) == 1:
                raise ValueError(
                    f"address: with {len(places)} addresses several processes may lead, and least must be more than half "
                    f"of count = {self.count} and less than count, got {self.least}: otherwise both halves of a split "
                    "network would continue; set least, or give only the address of process 0"
                )

    @property
    def addresses(self) -> list[str]:
        """The addresses of the processes that may lead, by index."""
        return [address.strip() for address in self.address.split(",")] if self.address else []

    @property
    def own_address(self) -> str | None:
        """Where this process meets the others if it leads; None: it never does."""
        return self.addresses[self.index] if self.index < len(self.addresses) else None

    @property
    def elastic(self) -> bool:
        """Whether fewer processes than all may be a generation of the learner."""
        return self.least is not None and self.least < self.count

    def sizes(self, mesh: MeshSettings) -> list[int]:
        """Return how many processes a generation of the learner may have, the largest number first."""
        least = self.count if self.least is None else self.least
        return [self.count, *(size for size in range(self.count - 1, least - 1, -1) if mesh.of(size, self.count))]


class LearnerSettings(ServiceSettings):
    """A learner's own settings."""

    role: Literal["learner", "evaluator"] = "learner"
    share: int | None = Field(None, ge=0, description="the data share that this learner takes if it is free")
    data: str | None = Field(
        None,
        description="file or folder of text, a mix.toml, or the place of either (storage.md); default: Python's standard "
        "library sources",
    )
    init: str | None = Field(
        None,
        description="safetensors file or folder of the weights that the run begins with, or its place (storage.md); ignored "
        "once the run has begun",
    )
    init_names: Path | None = Field(None, description="JSON file that maps the model's tensor names to those in `init`")
    sample_every_s: float = Field(
        60.0,
        ge=0,
        description="interval at which an evaluator samples text from the model, if the task can, in at most a fiftieth "
        "of its time; it also samples at 10 and 50 % of the run; 0: only at the end",
    )
    cache_dir: Path = Field(
        CACHE_DIR,
        description="folder of compiled programs and tokens of a mix, which a restart reuses",
    )
    checkpoint_s: float = Field(
        10.0,
        ge=0,
        description="least time between the learner's own checkpoints, longer if they delay steps; 0: only when it leaves",
    )
    leave_s: float = Field(10.0, ge=0, description="time that a stopping learner waits for its last work to be merged")
    mesh: MeshSettings = Field(MeshSettings(), description="axes of the mesh of its devices")
    processes: ProcessesSettings = Field(ProcessesSettings(), description="processes that form this learner")
    slow: float = Field(1.0, ge=1, description="every step takes this many times as long, by sleeping (for experiments)")
    allow_code: str = Field(
        "", description="model whose repository may run Python code of its own on this machine, by the name that `model` has"
    )

    @field_validator("data", "init")
    @classmethod
    def _has_no_credentials(cls, value: str | None, info: ValidationInfo) -> str | None:
        try:
            refuse_credentials(value or "", f"{info.field_name} =")
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return value


class TorchLearnerSettings(LearnerSettings):
    """A learner's own settings, which computes with PyTorch."""

    task: str | None = Field(
        None, description="only for diloco-torch-learner: MODULE:MAKE of a torch task, if the run's task is written for JAX"
    )
    model: str | None = Field(
        None,
        description="only for diloco-torch-learner, in a run of `diloco up --model`: folder of the model on this machine, if "
        "it is not where the run's settings say",
    )


class SyncerSettings(ServiceSettings):
    """A syncer's own settings: all syncers of a region are alike."""

    region_urls: dict[RegionName, str] = Field({}, description="bulk servers of the other regions")


class CoordinatorSettings(ServiceSettings):
    """The coordinator's own settings; ``settings`` is the run that it creates if the server does not have it yet."""

    settings: RunSettings = RunSettings()
    region_urls: dict[RegionName, str] = Field({}, description="bulk servers of the other regions, whose logs it shortens")
    started_by: str = Field("", description="command line that started the run, for its page")
    report_follows: bool = Field(
        False, description="the page at the run's end is marked preliminary, because diloco up replaces it by the final report"
    )
    page_address: str = Field("", description="HOST:PORT of the run's page; empty: not served (watching.md)")
    page_token_file: Path | None = Field(
        None,
        description="file of the token that the page asks for, made if it is missing; this or page_tls is required if "
        "other machines can reach page_address",
    )
    page_url: str = Field(
        "",
        pattern=r"^(https?://\S+/)?$",
        description="URL by which browsers reach the page, such as http://127.0.0.1:8420/; the log then has one link of "
        "this URL and the token",
    )
    page_tls: Path | None = Field(
        None,
        description="folder made by `diloco keys add DIR page`: the page is served over TLS, and without a token only to "
        "the run's identities",
    )

    @field_validator("page_address")
    @classmethod
    def _is_place(cls, value: str) -> str:
        if value:
            host_and_port(value, "page_address")
        return value

    @field_validator("settings", mode="before")
    @classmethod
    def _of_preset(cls, value: Any) -> Any:
        """Take the settings of the preset that a table names, with the table's other values over them."""
        if not isinstance(value, Mapping) or "preset" not in value:
            return value
        return run_settings(str(value["preset"]), {name: item for name, item in value.items() if name != "preset"})


class ServerWatchSettings(ServiceSettings):
    """The settings of the process that watches a NATS server; ``name`` is the server's."""

    monitor_address: str = Field(
        "127.0.0.1:8222", description="HOST:PORT of the server's monitoring, `http` in the server's configuration"
    )
    store_dir: Path = Field(Path("/data"), description="folder of the server's streams, whose file system is watched")
    memory_bytes: int | None = Field(
        None, gt=0, description="memory that the server may use; none: all of the machine's memory"
    )
    pid_file: Path | None = Field(
        None,
        description="file to which the server writes its PID (`-P`), for a container in the server's network: if the "
        "server is silent and was restarted, the watching process ends, so that it is restarted in the new "
        "network",
    )

    log_file: Path | None = Field(
        None, description="file that the server logs to (`log_file` in its configuration), to count permission violations"
    )
    lists_file: Path | None = Field(
        None, description="the server's `auth.conf`, for the names of identities in these counts; none: a hash of their keys"
    )

    @field_validator("monitor_address")
    @classmethod
    def _is_monitor(cls, value: str) -> str:
        host_and_port(value, "monitor_address")
        return value


def check_region(region: str | None, regions: Sequence[str], run: str) -> None:
    """Refuse a service outside the run's regions, or in a region of a run without regions.

    Raises:
        SettingsError: with the run's regions.
    """
    if (region is None) == (not regions) and (region is None or region in regions):
        return
    if region is None:
        raise SettingsError(f"region: run {run!r} has the regions {', '.join(regions)}; set the one that this service is in")
    known = f"there are {', '.join(regions)}{nearest(region, regions)}" if regions else "it has no regions"
    raise SettingsError(f"region = {region!r}: not a region of run {run!r}: {known}")
