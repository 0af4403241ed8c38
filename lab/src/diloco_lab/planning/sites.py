"""A TOML file of one's own sites: what is trained, on which chips, over which links. What it leaves out is listed as taken.

``[model]`` and a ``[sites.NAME]`` each are needed, and with more than one site a ``[[links]]`` between any two, since each
region's syncers reach every other region's server. ``[plan]`` says what is wanted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.errors import SettingsError
from diloco.settings.counts import Count
from diloco.settings.loading import read_toml
from diloco.settings.run import RegionSettings
from diloco.settings.validation import nearest, parse, shown
from diloco_lab.published import published
from diloco_lab.simulator.cluster import MAX_LEARNERS, MAX_SLICES, YEAR_S

FLOPS_PER_PARAMETER = 6  # and token, forward and backward


Whole = Annotated[Count, Field(ge=1, le=10**18)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSpec(_Table):
    """The model and its training."""

    parameters: Whole = Field(description="parameters of the model")
    tokens: Whole = Field(description="token budget")
    tokens_per_step: Whole = Field(description="tokens of a step of all learners together, divided evenly")
    bytes_per_parameter: Positive = Field(
        16.0, description="of a learner's chips: value, gradient and AdamW's two moments in float32; no activations"
    )


class Wanted(_Table):
    """Limits of the plan."""

    utilisation: float = Field(0.95, gt=0, lt=1, description="least compute utilisation that the links must allow")
    most_learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)] = Field(
        8, description="the most for which arXiv 2604.21428 reports a large model's quality"
    )


class Site(_Table):
    """The chips of one place, all of a kind."""

    chips: Annotated[int, Field(ge=1, le=MAX_SLICES)] = Field(description="number of chips")
    memory_per_chip_bytes: Positive = Field(description="memory of a chip")
    price_per_chip_hour: NotNegative = Field(description="price of a chip for an hour")
    tokens_per_s_per_chip: Positive | None = Field(None, description="tokens per second of a chip")
    flops_per_chip: Positive | None = Field(None, description="a chip's peak, in operations per second")
    flops_utilisation: float = Field(0.4, gt=0, le=1, description="share of flops_per_chip that a step reaches by itself")
    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)] | None = Field(None, description="learners here")
    chips_per_host: Annotated[int, Field(ge=1, le=MAX_SLICES)] = Field(
        4, description="chips of a host, which is one process of its learner; TPU hosts have 4, GPU hosts 8"
    )
    chips_per_slice: Annotated[int, Field(ge=1, le=MAX_SLICES)] = Field(
        published.CHIPS_PER_SLICE, description="chips that fail and come back together; not published, assumed"
    )
    between_s: float = Field(YEAR_S, gt=0, description="mean time between interruptions of a chip; as in arXiv 2604.21428")
    repair_s: float = Field(
        published.FITTED.repair_s, gt=0, le=YEAR_S, description="mean time that a slice is away; fitted to the paper's tables"
    )
    downscale_s: float = Field(
        published.FITTED.downscale_s,
        ge=0,
        le=YEAR_S,
        description="time to continue without a slice; fitted to the paper's tables",
    )
    upscale_s: float = Field(
        published.FITTED.upscale_s, ge=0, le=YEAR_S, description="time to take slices in again; fitted to the paper's tables"
    )
    gather_s: float = Field(
        published.FITTED.gather_s,
        ge=0,
        le=YEAR_S,
        description="time that the first returning slice waits; fitted to the paper's tables",
    )

    @property
    def slices(self) -> int:
        """Whole ones."""
        return self.chips // self.chips_per_slice

    @property
    def price_per_hour(self) -> float:
        """Of all chips, those that make no whole slice too."""
        return self.chips * self.price_per_chip_hour

    def chip_tokens_per_s(self, model: ModelSpec) -> float:
        """Tokens that a chip takes a second while it computes."""
        if self.tokens_per_s_per_chip is not None:
            return self.tokens_per_s_per_chip
        assert self.flops_per_chip is not None
        return self.flops_per_chip * self.flops_utilisation / (FLOPS_PER_PARAMETER * model.parameters)

    def needed_slices(self, model: ModelSpec) -> int:
        """Return the fewest slices that a learner fits on."""
        return math.ceil(model.parameters * model.bytes_per_parameter / (self.chips_per_slice * self.memory_per_chip_bytes))

    def most_learners(self, model: ModelSpec) -> int:
        """Return the most learners that slices and memory allow."""
        return self.slices // self.needed_slices(model)


class Between(_Table):
    """A link between two sites, alike in both directions."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(description="the two sites")
    bits_per_s: Positive = Field(description="rate of each direction")
    delay_s: float = Field(0.05, ge=0, le=3600, description="one way; between continents, docs/wan.md has 0.03 to 0.07")


@dataclass(frozen=True)
class Default:
    """A value that the file does not give."""

    name: str
    value: float
    why: str


@dataclass(frozen=True)
class Sites:
    """The contents of a file."""

    model: ModelSpec
    wanted: Wanted
    sites: Mapping[str, Site]
    links: Sequence[Between]
    defaults: Sequence[Default]


def read(path: Path) -> Sites:
    """Read a file.

    Raises:
        SettingsError: it cannot be read or is not TOML; naming line, table and key where something is unknown, missing, out of
            range or cannot be: two sites without a link, slices larger than a site, a model that does not fit.
    """
    return _Reader(path).read()


T = TypeVar("T", bound=_Table)
TABLES = ("model", "plan", "sites", "links")


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path, self.values = path, read_toml(path)
        self.lines = _lines(path.read_text())
        self.defaults: list[Default] = []

    def read(self) -> Sites:
        for name in self.values:
            if name not in TABLES:
                raise self._error(
                    name, "", f"is not a table of such a file{nearest(name, TABLES)}; the tables are {', '.join(TABLES)}"
                )
        for name in ("model", "sites"):
            if not self.values.get(name):
                raise SettingsError(
                    f"{self.path}: [{name}] is missing: {ModelSpec.__doc__ if name == 'model' else Site.__doc__}"
                )
        model = self._table(ModelSpec, "model", self.values["model"])
        wanted = self._table(Wanted, "plan", self.values.get("plan", {}))
        sites = {name: self._table(Site, f"sites.{name}", table) for name, table in self._mapping("sites").items()}
        for name, site in sites.items():
            self._check_site(name, site, model, wanted)
        if len(sites) > 1:
            parse(RegionSettings, {"names": list(sites)}, f"{self.path}: sites")  # each is a region of the run
        fewest = sum(site.learners or 1 for site in sites.values())
        if fewest > wanted.most_learners:
            raise self._error(
                "plan", "most_learners", f"= {wanted.most_learners} is fewer than the {fewest} that sites have at least"
            )
        return Sites(model, wanted, sites, self._links(sites), self.defaults)

    def _mapping(self, name: str) -> dict[str, Any]:
        found = self.values[name]
        if not isinstance(found, dict):
            raise self._error(name, "", f"= {shown(found)}, expected tables [{name}.NAME]")
        return found

    def _check_site(self, name: str, site: Site, model: ModelSpec, wanted: Wanted) -> None:
        table = f"sites.{name}"
        if (site.tokens_per_s_per_chip is None) == (site.flops_per_chip is None):
            which = "neither" if site.flops_per_chip is None else "both"
            raise self._error(table, "", f"needs one of tokens_per_s_per_chip and flops_per_chip, and has {which}")
        if site.flops_per_chip is None and "flops_utilisation" in site.model_fields_set:
            raise self._error(table, "flops_utilisation", "applies to flops_per_chip, which is not given")
        if not site.slices:
            raise self._error(table, "chips_per_slice", f"= {site.chips_per_slice} is more than chips = {site.chips}")
        if site.chips_per_host % site.chips_per_slice and site.chips_per_slice % site.chips_per_host:
            said = (
                f"= {site.chips_per_host}: hosts have whole slices, or slices whole hosts; a slice has {site.chips_per_slice}"
            )
            raise self._error(table, "chips_per_host", f"{said} chips")
        most, needed = site.most_learners(model), site.needed_slices(model)
        if not most:
            raise self._error(
                table,
                "memory_per_chip_bytes",
                f"= {site.memory_per_chip_bytes:g}: the model needs {model.parameters * model.bytes_per_parameter:g} bytes, "
                f"{needed} slices of {site.chips_per_slice} chips, and there are {site.slices}",
            )
        if site.learners is not None and site.learners > most:
            raise self._error(
                table, "learners", f"= {site.learners} is more than the {most} that {site.slices} slices of memory allow"
            )

    def _links(self, sites: Mapping[str, Site]) -> list[Between]:
        tables = self.values.get("links", [])
        if not isinstance(tables, list):
            raise self._error("links", "", "expected [[links]], one for each pair of sites")
        links, pairs = [], set()
        for index, table in enumerate(tables):
            name = f"links[{index}]"
            link = self._table(Between, name, table)
            for site in link.between:
                if site not in sites:
                    raise self._error(name, "between", f"= {link.between}: no site {site!r}{nearest(site, list(sites))}")
            if len(set(link.between)) < 2:
                raise self._error(name, "between", f"= {link.between}: joins a site to itself")
            if (pair := frozenset(link.between)) in pairs:
                raise self._error(
                    name, "between", f"= {link.between}: is the second link between these sites; combine them into one"
                )
            links.append(link)
            pairs.add(pair)
        for one, other in itertools.combinations(sites, 2):
            if frozenset((one, other)) not in pairs:
                raise SettingsError(
                    f"{self.path}: [[links]] has none between {one!r} and {other!r}, and each region's syncers reach every "
                    f'other region\'s server; add between = ["{one}", "{other}"] with its bits_per_s'
                )
        return links

    def _table(self, cls: type[T], name: str, values: Any) -> T:
        if not isinstance(values, dict):
            raise self._error(name, "", f"= {shown(values)}, expected a table")
        try:
            table = cls.model_validate(values)
        except ValidationError as error:
            # a misspelt key is missing too
            detail = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
            key, given, message = str(detail["loc"][0]), detail["input"], detail["msg"]
            if detail["type"] == "extra_forbidden":
                raise self._error(name, key, f"is unknown{nearest(key, list(cls.model_fields))}") from None
            if detail["type"] == "missing":
                raise self._error(name, key, f"is missing: {cls.model_fields[key].description}") from None
            raise self._error(name, key, f"= {shown(given)}: {message[0].lower()}{message[1:]}") from None
        for key, field in cls.model_fields.items():
            value = getattr(table, key)
            if key not in table.model_fields_set and value is not None and not _idle(key, table):
                self.defaults.append(Default(f"{name}.{key}", value, field.description or ""))
        return table

    def _error(self, table: str, key: str, what: str) -> SettingsError:
        """Return an error about a key, or about a table as a whole."""
        line = self.lines.get((table, key), self.lines.get((table, "")))
        where = f"{self.path}:{line}" if line else f"{self.path}"
        return SettingsError(f"{where}: {table}{'.' if key else ''}{key} {what}")


def _idle(key: str, table: _Table) -> bool:
    """Whether nothing is taken from a value, because another one stands in its place."""
    return key == "flops_utilisation" and isinstance(table, Site) and table.flops_per_chip is None


_HEAD = re.compile(r"^\s*(\[\[?)\s*([\w.\"'\s-]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*[\"']?([\w-]+)[\"']?\s*=")


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the lines of tables (with an empty key) and of their keys, as far as each has a line of its own."""
    return dict(_found(text))


def _found(text: str) -> Iterator[tuple[tuple[str, str], int]]:
    table, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        if head := _HEAD.match(line):
            table = re.sub(r"[\"'\s]", "", head[2])
            if head[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}[{counts[table]}]"
            yield (table, ""), number
        elif key := _KEY.match(line):
            yield (table, key[1]), number
