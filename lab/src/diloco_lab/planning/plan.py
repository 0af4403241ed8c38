"""A plan for one's own sites: how many learners where, which settings, how long it takes, what it costs, what holds it up.

The candidates, their time and their cost are of :mod:`diloco_lab.planning.candidates`. Of candidates that are about as good the
one with the fewest learners is chosen. Syncers' processor time and memory are reckoned from measurements (docs/performance.md),
storage from the log's settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tomli_w

from diloco.core.log.fold import keyframe_bytes
from diloco.core.log.retention import keyframes_kept
from diloco.core.tensors.quantise import body_bytes
from diloco.settings.presets import run_settings
from diloco_lab.planning.candidates import DAY_S, Candidates, DataParallel, PlanCandidate, SeedMean, estimate, simulated
from diloco_lab.planning.island_plan import AT_ONCE_BYTES, IN_TURN_BYTES, STATE_SHARE, Hardware, fewest_shards, rows_bytes
from diloco_lab.planning.link_settings import PRECISIONS, PRESET, ChosenSettings, LinkWay, needed_bits_per_s
from diloco_lab.planning.sites import Default, Sites

PUBLISHED_STEPS = 100  # the longest H of a published figure
ALIKE = 0.01  # times that differ by less count as equal: the candidate with fewer learners is taken
LITTLE = 0.05  # a share of the time that is no bottleneck

# docs/performance.md: a syncer's part of "the whole way" with one learner's offers; the merge of 4; reading; peaks of memory
SYNCER_S_PER_VALUE = 0.41 / 100e6
MERGE_S_PER_VALUE = 1 / 3.1e9
READ_S_PER_BYTE = 0.32 / 1e9
OWNED_BYTES, OWNED_LEARNERS = 16, 2  # a parameter, with so many learners' offers
# docs/operations.md
FOLLOWED_BYTES = 8
SERVER_S_PER_BYTE = 4.5 / 1e9


@dataclass(frozen=True)
class LinkLoad:
    """The bytes that one direction of a link carries, and how full it is."""

    source: str
    target: str
    bytes_per_day: float
    load: float


@dataclass(frozen=True)
class Region:
    """The needs of a region's services. Processor time in cores, of all its syncers; memory of each syncer."""

    name: str
    syncers: int
    syncer_cores: float
    syncer_memory_bytes: float
    server_cores: float
    storage_bytes: float


@dataclass(frozen=True)
class PlannedLearner:
    """A learner of a site, alike to the others there: its chips and hosts, its mesh, and the needs of a chip and of a host.

    Attributes:
        state_bytes: of a chip: parameters, gradients, optimizer state; ``state_share`` of its memory.
        host_bytes: of a host, with rounds in turn; ``host_most_bytes`` with all rounds at once.
        sent_bytes: that a host sends to NATS in a cycle of H steps; as much comes back.
        rows_bytes: that a host sends to the learner's other hosts in a cycle, at most.
    """

    site: str
    learners: int
    chips: int
    hosts: int
    data: int
    fsdp: int
    state_bytes: float
    state_share: float
    host_bytes: float
    host_most_bytes: float
    sent_bytes: float
    rows_bytes: float


@dataclass(frozen=True)
class Setting:
    """A setting of the run, by its dotted name."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Bottleneck:
    """The largest cost, or the limit that forced the settings. ``memory``: failures, and no room for smaller learners."""

    kind: Literal["link", "memory", "failures", "chips"]
    name: str
    why: str


@dataclass(frozen=True)
class Plan:
    """The learners and settings to run, and the time, cost and needs that follow."""

    chosen: PlanCandidate
    uptime: SeedMean
    settings: Sequence[Setting]
    links: Sequence[LinkLoad]
    regions: Sequence[Region]
    islands: Sequence[PlannedLearner]
    data_parallel: Sequence[DataParallel]
    bottleneck: Bottleneck
    candidates: Sequence[PlanCandidate]
    defaults: Sequence[Default]
    notes: Sequence[str]


def plan(sites: Sites, *, cheapest: bool = False) -> Plan:
    """Return the fastest plan, or the cheapest.

    Raises:
        SettingsError: no candidate has links with room for it; or steps are too short or too long to be simulated.
    """
    found = Candidates(sites)
    measure: Callable[[Any], float] = (lambda one: one.cost.mean) if cheapest else (lambda one: one.days.mean)
    candidates: list[PlanCandidate] = []
    tried: set[tuple[str, ...]] = set()
    # a candidate that is worse even without failures is not simulated, unless it is the best on its sites
    for one in sorted(found.without_failures(), key=measure):
        if measure(one) <= (1 + ALIKE) * min(map(measure, candidates), default=math.inf) or tuple(one.learners) not in tried:
            candidates.append(found.with_failures(one))
            tried.add(tuple(one.learners))
    best = min(map(measure, candidates))
    alike = [one for one in candidates if measure(one) <= best * (1 + ALIKE)]
    chosen = min(alike, key=lambda one: (one.total, len(one.learners), measure(one)))
    return _Planner(found, sorted(candidates, key=measure), chosen).plan(measure)


def toml(settings: Sequence[Setting]) -> str:
    """Return settings as the file of a coordinator that creates the run."""
    tables: dict[str, Any] = {}
    for one in settings:
        *section, key = one.name.split(".")
        table = tables
        for name in section:
            table = table.setdefault(name, {})
        table[key] = one.value
    return tomli_w.dumps({"settings": tables})


class _Planner:
    """Works out a plan from its chosen candidate."""

    def __init__(self, found: Candidates, candidates: Sequence[PlanCandidate], chosen: PlanCandidate) -> None:
        self.found, self.sites, self.model = found, found.sites, found.model
        self.candidates, self.chosen = candidates, chosen

    def plan(self, measure: Callable[[Any], float]) -> Plan:
        """Return the whole plan; ``measure`` chooses the best single site for data-parallel training."""
        chosen, found = self.chosen, self.found
        names = list(chosen.learners)
        runs = simulated([learner for n in names for learner in found.learners(n, chosen.learners[n], chosen.step_s[n])])
        ways = found.ways(chosen.learners, min(chosen.step_s.values()))
        cycle_s = chosen.choice.steps * min(chosen.step_s.values())
        loads = [
            LinkLoad(*ends, way.cycle_bytes(chosen.choice) * DAY_S / cycle_s, way.load(chosen.choice))
            for ends, way in ways.items()
        ]
        alone = min((found.data_parallel([name]) for name in self.sites.sites), key=measure)
        together = [found.data_parallel(list(self.sites.sites))] if len(self.sites.sites) > 1 else []
        regions, islands = self.regions(cycle_s), self.islands()
        settings = self.settings(sum(region.syncers for region in regions))
        return Plan(
            chosen=chosen,
            uptime=estimate([run.uptime for run in runs]),
            settings=settings,
            links=loads,
            regions=regions,
            islands=islands,
            data_parallel=[*together, alone],
            bottleneck=self.bottleneck(ways),
            candidates=self.candidates,
            defaults=self.sites.defaults,
            notes=self.notes(islands),
        )

    def regions(self, cycle_s: float) -> list[Region]:
        """Return the needs of each site's services; each site owns an even part of the fragments."""
        chosen, model = self.chosen, self.model
        choice, count = chosen.choice, len(chosen.learners)
        codec_bytes = body_bytes(model.parameters, choice.bits)
        owned = model.parameters / count
        cores = (
            owned
            / cycle_s
            * (SYNCER_S_PER_VALUE + (chosen.total - 1) * (MERGE_S_PER_VALUE + READ_S_PER_BYTE * codec_bytes / model.parameters))
        )
        # no syncer gets more than a core's work; a run without regions has the preset's shards
        syncers = max(math.ceil(cores), PRESET.shards if count == 1 else 1)
        memory_bytes = (
            owned / syncers * OWNED_BYTES
            + max(0, chosen.total - OWNED_LEARNERS) * codec_bytes / count / syncers
            + (model.parameters - owned) * FOLLOWED_BYTES
        )
        log = PRESET.log
        log_bytes = keyframes_kept(log, model.parameters, 1) * keyframe_bytes(model.parameters, 1) * (1 + log.keyframe_factor)
        return [
            Region(
                name=name,
                syncers=syncers,
                syncer_cores=cores,
                syncer_memory_bytes=memory_bytes,
                server_cores=SERVER_S_PER_BYTE * codec_bytes * (learners + max(1, learners)) / cycle_s,
                storage_bytes=log_bytes + learners * codec_bytes,
            )
            for name, learners in chosen.learners.items()
        ]

    def islands(self) -> list[PlannedLearner]:
        """Return the learners of each site. Where activations have less room than they should, one replica has all chips."""
        return [self._island(name, learners) for name, learners in self.chosen.learners.items()]

    def _island(self, name: str, learners: int) -> PlannedLearner:
        site, parameters = self.sites.sites[name], self.model.parameters
        chips = site.slices // learners * site.chips_per_slice
        hosts = math.ceil(chips / site.chips_per_host)
        hardware = Hardware(chips, site.memory_per_chip_bytes, hosts)
        needed_bytes = parameters * self.model.bytes_per_parameter
        fsdp = fewest_shards(needed_bytes, hardware) or chips
        return PlannedLearner(
            site=name,
            learners=learners,
            chips=chips,
            hosts=hosts,
            data=chips // fsdp,
            fsdp=fsdp,
            state_bytes=needed_bytes / fsdp,
            state_share=needed_bytes / fsdp / site.memory_per_chip_bytes,
            host_bytes=IN_TURN_BYTES * parameters / hosts,
            host_most_bytes=AT_ONCE_BYTES * parameters / hosts,
            sent_bytes=body_bytes(parameters, self.chosen.choice.bits) / hosts,
            rows_bytes=rows_bytes(parameters, hosts, min(1.0, chips / hosts / fsdp)),
        )

    def settings(self, shards: int) -> list[Setting]:
        """Return the run's settings beside its preset, each with its reason.

        Raises:
            SettingsError: the product would refuse them.
        """
        chosen = self.chosen
        choice, names = chosen.choice, list(chosen.learners)
        split = ", ".join(f"{count} in {name}" for name, count in chosen.learners.items())

        def least(name: str, value: float, why: str) -> Setting:
            section, key = name.split(".")
            return Setting(name, value, "the preset's" if value == getattr(getattr(PRESET, section), key) else why)

        found = [
            Setting("learners", chosen.total, f"M: {split}; the fewest learners within {ALIKE:.0%} of the best plan"),
            Setting("tokens", self.model.tokens, "the budget"),
            Setting(
                "shards", shards, "syncers that share the fragments: of each region as many as it has cores' worth of work"
            ),
            Setting("round.quorum", PRESET.round.quorum, "K, the preset's: a round does not wait for learners that are down"),
            Setting(
                "round.grace_factor",
                PRESET.round.grace_factor,
                "the preset's: offers that arrive within the overlap are also merged; K = 1 without it costs quality",
            ),
            least("round.steps", choice.steps, "H: the least for which every link has room"),
            least("round.overlap_steps", choice.overlap_steps, "tau: the least that a version needs to be in time"),
            least("fragments.count", choice.fragments, "P: smaller fragments are over a link sooner"),
            *(
                least(f"codec.{which}_bits", choice.bits, "the most for which every link has room at this H")
                for which in ("offer", "record")
            ),
        ]
        if len(names) > 1:
            found.append(Setting("regions.names", names, "each site has a NATS server of its own"))
            found.append(least("regions.merge", choice.merge, "what a site sends does not grow with its learners"))
        if len(names) > 2:
            found.append(Setting("regions.control_replicas", 3, "the control store has a server in each of three regions"))
        run_settings(PRESET.preset, {one.name: one.value for one in found}, "plan")
        return found

    def bottleneck(self, ways: Mapping[tuple[str, str], LinkWay]) -> Bottleneck:
        """Return a link that made rounds rarer; else links or failures if they cost over a twentieth; else the chips."""
        chosen = self.chosen
        lost_links, lost_failures = 1 - chosen.utilisation, 1 - chosen.goodput.mean
        if chosen.choice.steps > PRESET.round.steps or lost_links > max(LITTLE, lost_failures):
            fullest = max(ways, key=lambda ends: (ways[ends].load(chosen.choice), ways[ends].delay_s))
            return self._full("-".join(fullest), ways[fullest])
        if lost_failures > LITTLE:
            return self._failing()
        paces = self.found.paces(chosen.learners)
        name = max(paces, key=paces.__getitem__)
        why = f"the chips themselves: links cost {lost_links:.1%} of the time and failures {lost_failures:.1%}"
        return Bottleneck("chips", name, f"{why}; {name} has {paces[name] / sum(paces.values()):.0%} of the pace")

    def _full(self, name: str, way: LinkWay) -> Bottleneck:
        chosen = self.chosen
        choice = ChosenSettings(merge=chosen.choice.merge)
        needed = needed_bits_per_s(way, choice, self.sites.wanted.utilisation)
        why = (
            f"{way.bits_per_s / 1e9:.3g} Gbit/s are {way.load(chosen.choice):.0%} full at H = {chosen.choice.steps}; "
            f"the preset's H = {choice.steps} with {choice.bits} bits needs "
        )
        why += f"{needed / 1e9:.3g} Gbit/s" if needed else f"less than {way.delay_s:g} s of delay, whatever the rate"
        return Bottleneck("link", name, why)

    def _failing(self) -> Bottleneck:
        chosen = self.chosen

        def chips(name: str) -> int:
            site = self.sites.sites[name]
            return site.slices // chosen.learners[name] * site.chips_per_slice

        name = max(chosen.learners, key=lambda name: chips(name) / self.sites.sites[name].between_s)
        site, count = self.sites.sites[name], chosen.learners[name]
        why = (
            f"goodput is {chosen.goodput.mean:.1%}: a learner of {name} has {chips(name)} chips, so one is interrupted every "
            f"{site.between_s / chips(name):.0f} s and its slice is away for {site.repair_s:.0f} s"
        )
        if count == site.most_learners(self.model) < site.slices:
            return Bottleneck("memory", name, f"{why}; its memory has room for no more than {count} learners")
        if chosen.total >= self.sites.wanted.most_learners:
            why += f"; plan.most_learners = {self.sites.wanted.most_learners} allows no smaller ones"
        return Bottleneck("failures", name, why)

    def notes(self, islands: Sequence[PlannedLearner]) -> list[str]:
        """Return the limits and assumptions that no figure shows."""
        chosen, found = self.chosen, []
        if chosen.total > 1:
            found.append(
                f"quality: {chosen.total} learners cost some; for 8 learners and H = 30 the scaling laws have +1.1 % loss with "
                "2.4B parameters and +3.9 % with 35M; with 5B parameters 8 learners were as good as data-parallel "
                "(arXiv 2604.21428)"
            )
            found.append(f"batch: {self.model.tokens_per_step / chosen.total:.0f} tokens a step and learner")
        if chosen.choice.bits > PRECISIONS[-1]:
            found.append(
                f"bits: {chosen.choice.bits} because the links have room; {PRECISIONS[-1]} were measured to be as good "
                f"(+0.09 % loss, arXiv 2604.21428) and are {PRECISIONS[-1] / chosen.choice.bits:.0%} of the bytes"
            )
        if chosen.choice.steps > PUBLISHED_STEPS:
            found.append(
                f"H = {chosen.choice.steps} is longer than any published; its effect on the model's quality is unknown"
            )
        if len(chosen.learners) == 2:
            found.append(
                "two regions wait for each other when the link is cut; a third region with a server and a syncer, but "
                "without learners, prevents that (docs/regions.md)"
            )
        return [*found, *self._left_out(), self._reckoned(), *self._chip_notes(), *self._full_chips(islands)]

    def _left_out(self) -> Iterator[str]:
        together = {name for one in self.candidates if len(one.learners) > 1 for name in one.learners}
        for name in self.sites.sites:
            if name not in self.chosen.learners:
                better = "the plan is better, or as good with fewer learners"
                yield f"{name} is left out: {better if name in together else 'links allow no H at all with it'}"

    def _reckoned(self) -> str:
        return (
            "services: reckoned from measurements on one machine with int4 (docs/performance.md): "
            f"{SYNCER_S_PER_VALUE * 1e9:.1f} ns a parameter and version, {OWNED_BYTES} bytes a parameter owned, "
            f"{FOLLOWED_BYTES} followed; storage before zstd"
        )

    def _chip_notes(self) -> Iterator[str]:
        for name, count in self.chosen.learners.items():
            site = self.sites.sites[name]
            if site.slices // count == site.needed_slices(self.model):
                yield (
                    f"a learner of {name} fills its memory: without one slice it would stop, but the plan assumes that "
                    "it continues"
                )
            idle = site.chips - site.slices // count * count * site.chips_per_slice
            if idle:
                yield (
                    f"{idle} of {site.chips} chips of {name} are paid for but unused: they do not make a whole slice "
                    "for each learner"
                )

    def _full_chips(self, islands: Sequence[PlannedLearner]) -> Iterator[str]:
        for one in islands:
            if one.state_share > STATE_SHARE:
                yield (
                    f"parameters, gradients and optimizer state fill {one.state_share:.0%} of a chip's memory in {one.site}, "
                    "split over all chips of a learner: little is left for activations"
                )
