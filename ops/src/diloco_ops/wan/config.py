"""A relay's settings, from its TOML file: links, routes, and where it is commanded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from diloco.errors import SettingsError
from diloco.settings.loading import read_toml
from diloco.settings.validation import nearest, parse
from diloco_ops.wan.impairments import UNLIMITED
from diloco_ops.wan.link import (
    MAX_DELAY_S,
    MAX_QUEUE_BYTES,
    MAX_RATE_BITS_PER_S,
    MIN_RATE_BITS_PER_S,
    PACKET_BYTES,
    LinkConditions,
    Traffic,
)

DEFAULT_CONTROL = "127.0.0.1:4300"


def split_address(text: str) -> tuple[str, int]:
    """Return ``host:port`` in its parts; an IPv6 address stands in brackets. Port 0, to listen at, is chosen by the kernel.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _checked_address(text: str) -> str:
    split_address(text)
    return text


def _rate(value: Any) -> Any:
    return None if value == UNLIMITED else value


Address = Annotated[str, AfterValidator(_checked_address)]
Region = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,31}$", description="lower-case letters, digits and _")]
Rate = Annotated[float, Field(ge=MIN_RATE_BITS_PER_S, le=MAX_RATE_BITS_PER_S)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LinkSettings(_Section):
    """One direction of a link."""

    rate_bits_per_s: Annotated[Rate | None, BeforeValidator(_rate)] = Field(None, description='payload; or "unlimited"')
    delay_s: float = Field(0.0, ge=0, le=MAX_DELAY_S, description="one way")
    jitter_s: float = Field(0.0, ge=0, le=MAX_DELAY_S, description="variation of the delay, up and down")
    queue_bytes: int | None = Field(
        None,
        ge=PACKET_BYTES,
        le=MAX_QUEUE_BYTES,
        description="size of the queue of each class; default: 0.1 s of the rate, at least 64 KiB",
    )

    def conditions(self) -> LinkConditions:
        """Return the conditions as the core takes them."""
        return LinkConditions(self.rate_bits_per_s, self.delay_s, self.jitter_s, self.queue_bytes)


class RouteSettings(_Section):
    """A port of the relay that leads from a region to a server in another one."""

    from_: Region = Field(alias="from")
    to: Region
    listen: Address
    target: Address
    traffic: Traffic

    @property
    def link(self) -> str:
        """The link that bytes to the server pass."""
        return f"{self.from_}-{self.to}"

    @property
    def back(self) -> str:
        """The link that bytes from the server pass."""
        return f"{self.to}-{self.from_}"


class _File(_Section):
    control: Address = DEFAULT_CONTROL
    seed: int = Field(0, description="seed of the jitter")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    log_file: Path | None = Field(None, description="file for the log as JSON lines, instead of stderr")
    defaults: dict[str, Any] = {}
    links: dict[str, dict[str, Any]] = {}
    routes: list[dict[str, Any]] = Field(min_length=1)


@dataclass(frozen=True)
class Config:
    """A relay's file, checked. ``links`` has both directions of every route, and no other link."""

    control: str
    seed: int
    log_level: Literal["debug", "info", "warning", "error"]
    log_format: Literal["json", "console"]
    log_file: Path | None
    links: Mapping[str, LinkSettings]
    routes: tuple[RouteSettings, ...]


def load(path: Path) -> Config:
    """Read a relay's file.

    Raises:
        SettingsError: it cannot be read, is not TOML, or says what cannot be; file, section and nearest name are named.
    """
    return checked(read_toml(path), str(path))


def checked(values: Mapping[str, Any], source: str) -> Config:
    """Check a relay's settings.

    Raises:
        SettingsError: as :func:`load`.
    """
    file = parse(_File, values, source)
    parse(LinkSettings, file.defaults, f"{source}, [defaults]")
    routes = tuple(parse(RouteSettings, route, f"{source}, [[routes]] {i}") for i, route in enumerate(file.routes, 1))
    _check_routes(file.control, routes, source)
    names = list(dict.fromkeys(name for route in routes for name in (route.link, route.back)))
    for name in file.links:
        if name not in names:
            raise SettingsError(
                f"{source}, [links.{name}]: no route passes this link{nearest(name, names)}; the links are {', '.join(names)}"
            )
    links = {name: parse(LinkSettings, file.defaults | file.links.get(name, {}), f"{source}, [links.{name}]") for name in names}
    return Config(
        control=file.control,
        seed=file.seed,
        log_level=file.log_level,
        log_format=file.log_format,
        log_file=file.log_file,
        links=links,
        routes=routes,
    )


def _check_routes(control: str, routes: tuple[RouteSettings, ...], source: str) -> None:
    taken = {control: "control"}
    for number, route in enumerate(routes, 1):
        where = f"{source}, [[routes]] {number}"
        if route.from_ == route.to:
            raise SettingsError(f"{where}: from and to are both {route.to!r}; a route leads to another region")
        if route.listen in taken and not route.listen.endswith(":0"):
            raise SettingsError(f"{where}: listen = {route.listen!r} is taken by {taken[route.listen]}")
        taken[route.listen] = f"[[routes]] {number}"
