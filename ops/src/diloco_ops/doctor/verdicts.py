"""Verdicts on measurements, and the words for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from diloco.core.syncer.bandwidth import steps_between
from diloco.core.tensors.fragments import FragmentMap
from diloco.nats.server_list import ServerList
from diloco.settings.run import RunSettings
from diloco_ops.doctor import needs
from diloco_ops.doctor.check import Check, Role, skipped
from diloco_ops.doctor.needs import ModelSizes
from diloco_report import units

OLDEST_PYTHON, OLDEST_JAX = (3, 11), (0, 10)
MAX_PAYLOAD_BYTES = 1 << 20  # of the protocol's largest message
ENDS_SOON = timedelta(days=14)
CLOCK_S = 1.0  # logs of several machines stay readable side by side
FREE_SHARE = 0.1  # of a disk: less is called little, whatever is needed
SLOW_SYNC_S = 0.05  # a version waits for two of them in a row
QUICK_SYNC_S = 50e-6  # no disk is forced to write in less
NEAR_S = 0.005  # over a longer round trip, the time of a sync is lost in the link's jitter
FILES = 256  # file descriptors


@dataclass(frozen=True)
class ServerInfo:
    """A server's own description, said before anybody has logged in."""

    version: str
    max_payload_bytes: int
    jetstream: bool
    tls: bool


@dataclass(frozen=True)
class Storage:
    """A server's account of this account's storage, in bytes; a limit of None is none."""

    used_bytes: int
    limit_bytes: int | None
    stored_bytes: Mapping[str, int]  # by stream of this run


@dataclass(frozen=True)
class Speed:
    """A link to a server: the least round trip, and the rates both ways; None: not measured."""

    rtt_s: float
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Members:
    """The members of a run that were heard for a while."""

    heard: int
    same_name: str  # what a process of the own name said of itself; empty: there is none
    step_s: float | None  # median of learners that step
    unreadable: str  # why a heartbeat could not be read; empty: all could
    software: tuple[str, ...] = ()  # versions of diloco that they are of


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, ``2.15.1-beta`` as (2, 15); () where it has none."""
    try:
        major, minor = version.lstrip("v").split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _ms(value_s: float) -> str:
    return f"{1e3 * value_s:.3g} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{8e-6 * bytes_per_s:.3g} Mbit/s"


# ---- this machine


def versions(role: Role, diloco: str, protocol: int, python: tuple[int, ...], jax: str | None) -> Check:
    """Judge the installed versions. ``jax``: None where it is not installed."""
    found = f"diloco {diloco}, protocol {protocol}, Python {_text(python)}" + (f", JAX {jax}" if jax else "")
    needed = f"Python {_text(OLDEST_PYTHON)}"
    trains = role in ("learner", "evaluator")
    needed += f" and JAX {_text(OLDEST_JAX)}" if trains else ""
    if python[:2] < OLDEST_PYTHON or (trains and (jax is None or _numbers(jax) < OLDEST_JAX)):
        missing = ", JAX is not installed" if trains and jax is None else ""
        return Check("versions", "failed", found + missing, f"at least {needed}", "reinstall the distribution of this service")
    return Check("versions", "ok", found, f"at least {needed}")


def identity(path: Path, role: str, name: str, expires: datetime, now: datetime) -> Check:
    """Judge an identity file that can be used today."""
    found = f"{path}: {role} {name}, until {expires:%Y-%m-%d}"
    if expires - now < ENDS_SOON:
        return Check(
            "identity",
            "warning",
            found,
            f"at least {ENDS_SOON.days} more days",
            "renew it with 'diloco keys renew', and restart the service with it",
        )
    return Check("identity", "ok", found)


def grant(role: Role, name: str, *, authority: bool, granted: bool) -> Check | None:
    """Judge what an identity file says of grants, ``authority``: whose; None: it is as this version makes it."""
    if not authority:
        what = "the identity file is of an older version: it names no authority of grants"
        needed = (
            "a grant; without it this learner's work is not merged"
            if role == "learner"
            else ("an authority; without it any claim of work is accepted")
        )
        return Check("grant", "failed" if role == "learner" else "warning", what, needed, f"diloco keys renew DIR {name}")
    if role == "learner" and not granted:
        remedy = f"diloco keys grant DIR {name} --batch-tokens N"
        return Check(
            "grant", "failed", "the identity file has none", "a grant; without it this learner's work is not merged", remedy
        )
    return None


def memory(role: Role, settings: RunSettings, model: ModelSizes, available_bytes: int) -> Check:
    """Judge the memory of this machine, or of the process's control group."""
    usual, worst = needs.memory_bytes(role, settings, model.size)
    found, needed = (
        f"{units.size(available_bytes)} available",
        f"{units.size(usual)} for {units.count(model.size)} values",
    )
    if available_bytes < usual:
        return Check("memory", "failed", found, needed, "use a larger machine, or raise the container's memory limit")
    if available_bytes < worst:
        why = "alone with all fragments" if role == "syncer" else "with all rounds at once"
        return Check(
            "memory",
            "warning",
            found,
            f"{needed}, {units.size(worst)} {why}",
            "more memory, or more syncers" if role == "syncer" else "more memory",
        )
    return Check("memory", "ok", found, needed)


def state_dir(path: Path, free_bytes: int, total_bytes: int, needed_bytes: int, sync_s: float, foreign: Sequence[str]) -> Check:
    """Judge the folder for the process's own files, which can be written."""
    found = f"{path}: {units.size(free_bytes)} free of {units.size(total_bytes)}, a sync takes {_ms(sync_s)}"
    needed = units.size(needed_bytes)
    if foreign:
        return Check(
            "state_dir",
            "failed",
            f"{path}: {foreign[0]} belongs to another run" + (f", and {len(foreign) - 1} more" if foreign[1:] else ""),
            "a folder of this run, or an empty one",
            "give the service another state_dir, or empty this one",
        )
    if free_bytes < needed_bytes:
        return Check("state_dir", "failed", found, needed, "free space, or give the service a state_dir on another disk")
    if free_bytes < FREE_SHARE * total_bytes:
        return Check("state_dir", "warning", found, needed, "the disk is nearly full, and others may write to it: free space")
    if sync_s > SLOW_SYNC_S:
        return Check(
            "state_dir", "warning", found, f"a sync within {_ms(SLOW_SYNC_S)}", "a faster disk: checkpoints wait for it"
        )
    return Check("state_dir", "ok", found, needed)


def open_files(limit: int) -> Check:
    """Judge the process's limit of file descriptors."""
    found, needed = f"at most {limit}", str(FILES)
    if limit < FILES:
        return Check("open files", "warning", found, needed, "raise it: ulimit -n, LimitNOFILE=, or ulimits: of the container")
    return Check("open files", "ok", found, needed)


def allocator(found: Mapping[str, str | None], wanted: Mapping[str, str]) -> Check:
    """Judge glibc's settings in the environment."""
    differing = [name for name, value in wanted.items() if found.get(name) != value]
    if differing:
        settings = " ".join(f"{name}={wanted[name]}" for name in differing)
        return Check("allocator", "warning", f"{', '.join(differing)} not set", "", f"put into the environment: {settings}")
    return Check("allocator", "ok", "glibc's allocator keeps large buffers")


def listening(address: str, error: str) -> Check:
    """Judge the address of metrics and probes. ``error``: the reason why it cannot be listened at."""
    if error:
        return Check(
            "metrics", "failed", f"{address}: {error}", "", "end the program that listens there, or set another metrics_address"
        )
    return Check("metrics", "ok", f"{address} is free")


# ---- servers and the run


def listed(place: str, found: ServerList | None) -> Check:
    """Judge a server's list of identities. ``found``: None where it has no number."""
    if found is None:
        remedy = "have the operator run 'diloco keys refresh', hand the server its new auth.conf, and restart it"
        return Check(
            f"{place} list", "warning", "the server's list of identities was written before lists had numbers", "", remedy
        )
    return Check(f"{place} list", "ok", f"{found}; 'diloco keys status' says whether it is the newest")


def members(name: str, found: Members, listened_s: float) -> list[Check]:
    """Judge the members that were heard: whether the own name is taken, and all speak this version's protocol."""
    heard = f"{found.heard} members heard in {listened_s:.2g} s"
    heard += f", of diloco {', '.join(found.software)}" if found.software else ""
    checks = [Check("name", "ok", f"no process is called {name}")]
    if found.same_name:
        checks = [
            Check(
                "name",
                "failed",
                f"{name} is there already: {found.same_name}",
                "a name that no running process uses",
                "end that process, or give this one another name, unless that process is this service",
            )
        ]
    if found.unreadable:
        return [
            *checks,
            Check("members", "warning", f"{heard}; {found.unreadable}", "", "all services need compatible versions"),
        ]
    return [*checks, Check("members", "ok", heard)]


def no_run(name: str, role: Role, reason: str) -> Check:
    """Judge a run that its server does not have."""
    if role == "coordinator":
        return Check("run", "ok", f"{name} is not there yet; this coordinator will create it")
    remedy = (
        "start its coordinator, or correct the name (run, DILOCO_RUN) or the server's address; until then the service waits"
    )
    return Check("run", "warning", f"{name}: {reason}", "a run that exists", remedy)


def excluded(name: str, learner: str) -> Check:
    """Judge a run that does not merge this learner's work."""
    found, remedy = f"{name}: {learner} was ejected, or quarantined", "ask its operator to run 'diloco readmit'"
    return Check("run", "failed", found, "a learner whose work is merged", remedy)


def run(name: str, settings: RunSettings, model: FragmentMap | None) -> Check:
    """Judge a run that can be joined."""
    text = f"{name}: preset {settings.preset}"
    if model is None:
        return Check("run", "ok", f"{text}; no learner has proposed its model yet")
    return Check(
        "run", "ok", f"{text}, {len(model.fragments)} fragments, {units.model_size(model.parameters, model.state_values)}"
    )


# ---- a server


def reached(place: str, servers: Sequence[tuple[str, str, float, str]]) -> Check:
    """Judge a place's servers: the URL of each, its address, the time to connect, and why it could not be connected to."""
    name = f"{place} reach"
    found = ", ".join(
        f"{url}: {error}" if error else f"{url} ({address}) in {_ms(took_s)}" for url, address, took_s, error in servers
    )
    errors = [error for *_, error in servers if error]
    if not errors:
        return Check(name, "ok", found)
    remedy = "correct the address, start the server, or make it reachable (DNS, firewall)"
    return Check(name, "failed" if len(errors) == len(servers) else "warning", found, "a connection", remedy)


def server(place: str, found: ServerInfo, oldest: tuple[int, ...]) -> Check:
    """Judge a server's description of itself."""
    name = f"{place} server"
    text = f"nats-server {found.version}, messages of {units.size(found.max_payload_bytes)}"
    if _numbers(found.version) < oldest:
        return Check(name, "failed", text, f"at least {_text(oldest)}", "install a newer nats-server")
    if found.max_payload_bytes < MAX_PAYLOAD_BYTES:
        return Check(name, "failed", text, units.size(MAX_PAYLOAD_BYTES), "set max_payload: 1MB in its configuration")
    if not found.jetstream:
        return Check(
            name,
            "failed",
            f"{text}, without JetStream",
            "JetStream",
            "start it with -js, or put a jetstream block into its configuration",
        )
    return Check(name, "ok", f"{text}, JetStream")


def certificate(place: str, ends: datetime, now: datetime) -> Check:
    """Judge a server's certificate, which was accepted."""
    name, found = f"{place} tls", f"its certificate is of the run's authority and for this host, until {ends:%Y-%m-%d}"
    if ends - now < ENDS_SOON:
        return Check(
            name,
            "warning",
            found,
            f"at least {ENDS_SOON.days} more days",
            "renew the server's keys with 'diloco keys renew', and reload it",
        )
    return Check(name, "ok", found)


def missing_bytes(found: Storage, needed: Mapping[str, int]) -> int:
    """Return the bytes that a run's streams will still take."""
    return sum(max(0, size - found.stored_bytes.get(stream, 0)) for stream, size in needed.items())


def storage(place: str, found: Storage, needed: Mapping[str, int] | None) -> Check:
    """Judge the room for a run's streams, by the account's limit. ``needed``: None where it is not known yet."""
    name, text = f"{place} storage", f"{units.size(found.used_bytes)} used"
    if needed is None:
        limit = "no limit" if found.limit_bytes is None else f"of {units.size(found.limit_bytes)}"
        return Check(name, "ok", f"{text}, {limit} for this account", "not known before the run has a model")
    missing = missing_bytes(found, needed)
    wanted = f"{units.size(missing)} more ({', '.join(f'{stream} {units.size(size)}' for stream, size in needed.items())})"
    if found.limit_bytes is None:
        return Check(name, "ok", f"{text}, no limit for this account", wanted)
    text += f" of {units.size(found.limit_bytes)}"
    if found.limit_bytes - found.used_bytes < missing:
        return Check(
            name, "failed", text, wanted, "raise the server's max_file or the account's limit, or lower log.keep_bytes"
        )
    return Check(name, "ok", text, wanted)


def reserved(place: str, missing_bytes: int, refusal: str) -> Check:
    """Judge whether a server sets aside the room that a run's streams need. ``refusal``: its answer if it does not."""
    name, wanted = f"{place} room", f"{units.size(missing_bytes)}"
    if refusal:
        return Check(
            name, "failed", refusal, wanted, "free its disk or raise max_file in its configuration, or lower log.keep_bytes"
        )
    return Check(name, "ok", "the server has it", wanted)


def limits(place: str, wider: Mapping[str, Sequence[str]], *, lists_have_none: bool = False) -> Check:
    """Judge the limits of a run's streams, and whether the server's list lacks one of this identity's messages."""
    name = f"{place} limits"
    if lists_have_none:
        remedy = "write the server's newest auth.conf with 'diloco keys refresh', copy it to the server and reload the server"
        return Check(name, "warning", "the server's auth.conf has no max_payload for this identity", "a limit", remedy)
    if not wider:
        return skipped(name, "the run has no streams yet, or this identity may not see them")
    found = [f"{stream}: {limit}" for stream, limits in wider.items() for limit in limits]
    if not found:
        return Check(name, "ok", f"limits of {', '.join(wider)} as the run sets them")
    remedy = "an older version created the streams; a new run, or a run resumed from a checkpoint, gets narrower limits"
    return Check(name, "warning", ", ".join(found), "", remedy)


def sync(place: str, memory_s: float, file_s: float) -> Check:
    """Judge the time until a message is durable: the least time of an append to memory, and to disk."""
    name, sync_s = f"{place} sync", file_s - memory_s
    found = f"an append takes {_ms(file_s)}, {_ms(max(0.0, sync_s))} longer than one to memory"
    if memory_s > NEAR_S:
        return Check(name, "ok", found, "a check from a nearby machine, to see whether sync_interval is always")
    if sync_s < QUICK_SYNC_S:
        return Check(
            name,
            "warning",
            found,
            "sync_interval: always",
            "set sync_interval: always in its configuration: it acknowledges messages before they are on its disk",
        )
    if sync_s > SLOW_SYNC_S:
        return Check(name, "warning", found, f"less than {_ms(SLOW_SYNC_S)}", "a faster disk: every version waits for it")
    return Check(name, "ok", found)


def clock(place: str, offset_s: float, uncertain_s: float) -> Check:
    """Judge how far this machine's clock is ahead of a server's; ``uncertain_s`` is the greatest error of that."""
    name = f"{place} clock"
    found = f"this machine's is {abs(offset_s):.3g} s {'ahead' if offset_s > 0 else 'behind'} (± {_ms(uncertain_s)})"
    if abs(offset_s) - uncertain_s > CLOCK_S:
        return Check(
            name,
            "warning",
            found,
            f"{CLOCK_S:g} s",
            "no decision depends on clocks, but logs and reports show their times: run NTP",
        )
    return Check(name, "ok", found)


def signs(place: str, rtt_s: float, settings: RunSettings | None) -> Check:
    """Judge the way to a store that carries heartbeats only."""
    name, found = f"{place} link", f"round trip {_ms(rtt_s)}"
    if settings is None:
        return Check(name, "ok", found)
    within_s = settings.liveness.takeover_s / 2
    if rtt_s > within_s:
        return Check(name, "warning", found, f"less than {_ms(within_s)}", "heartbeats come late: raise liveness.takeover_s")
    return Check(name, "ok", found, f"less than {_ms(within_s)}")


def allowed(place: str, tried: int, refused: Sequence[str], excess: Sequence[str]) -> Check:
    """Judge a service's access to a server: how much was tried, what the server forbids, and what it should forbid."""
    name = f"{place} permissions"
    wide = [f"too wide: to write to {subject}" for subject in excess]
    if refused or excess:
        return Check(
            name,
            "failed" if refused else "warning",
            "; ".join([*([f"refused: {', '.join(refused)}"] if refused else []), *wide]),
            "only what its role needs",
            "write the server's newest auth.conf with 'diloco keys refresh', copy it to the server and restart the "
            "server; if that does not help, make an identity of this role",
        )
    return Check(name, "ok", f"{tried} things that its role does are allowed")


def link(
    place: str,
    role: Role,
    speed: Speed,
    settings: RunSettings | None,
    model: ModelSizes | None,
    step_s: float | None,
    *,
    far: bool,
) -> list[Check]:
    """Judge a link to a server by the bytes that the run sends over it."""
    up, down = speed.up_bytes_per_s, speed.down_bytes_per_s
    rates = f", {_rate(up)} there, {_rate(down)} back" if up is not None and down is not None else ""
    found = f"round trip {_ms(speed.rtt_s)}{rates}"
    name = f"{place} link"
    if settings is None or model is None:
        return [Check(name, "ok", found, "not known before the run has a model")]
    if step_s is None:
        return [Check(name, "ok", found, "unknown while no learner trains; give the time of a step with --step-s")]
    if up is None or down is None:
        return [Check(name, "warning", found, "the link's rates, which could not be measured")]
    return [_rates(name, found, role, speed, settings, model, step_s, far=far), *_times(place, speed, settings, model, step_s)]


def _rates(
    name: str, found: str, role: Role, speed: Speed, settings: RunSettings, model: ModelSizes, step_s: float, *, far: bool
) -> Check:
    ways = needs.ways(role, settings, model.size, far=far)
    rates = [rate for rate in (speed.up_bytes_per_s, speed.down_bytes_per_s) if rate is not None]
    wanted = [needs.needed_bytes_per_s(way, settings, step_s) for way in ways]
    needed = f"{_rate(wanted[0])} there, {_rate(wanted[1])} back, at {step_s:.3g} s a step"
    fitting = [needs.fits(way, settings, rate, step_s) for way, rate in zip(ways, rates, strict=True)]
    if None in fitting:
        remedy = "a faster link; or a longer round.steps, or fewer bits (codec.offer_bits, codec.record_bits), for a new run"
        return Check(name, "failed", found, needed, remedy)
    worse = [
        level
        for level, way in zip(fitting, ways, strict=True)
        if level is not None and (level.bits, level.pace) != (way.best, 1)
    ]
    if worse:
        bits, pace = min(level.bits for level in worse), max(level.pace for level in worse)
        steps = steps_between(settings, pace)
        remedy = (
            f"the run will lower its precision to {bits} bits and lengthen rounds to {steps} steps; only a faster link helps"
        )
        return Check(name, "warning", found, needed, remedy)
    return Check(name, "ok", found, needed)


def _times(place: str, speed: Speed, settings: RunSettings, model: ModelSizes, step_s: float) -> list[Check]:
    if settings.round.learners_wait or not speed.up_bytes_per_s or not speed.down_bytes_per_s:
        return []  # a learner that waits for versions has no window for them
    takes_s = needs.round_s(settings, model, speed.rtt_s, speed.up_bytes_per_s, speed.down_bytes_per_s)
    window_s = settings.round.overlap_steps * step_s
    name, found = f"{place} round", f"takes at least {takes_s:.2g} s over this link"
    needed = f"{window_s:.2g} s (round.overlap_steps of {step_s:.3g} s)"
    if takes_s > window_s:
        remedy = "its offers come late: raise round.overlap_steps and round.steps; if that is not enough, raise round.quorum"
        return [Check(name, "warning", found, needed, remedy)]
    return [Check(name, "ok", found, needed)]


def turned_away(place: str, reason: str) -> Check:
    """Judge a server that was reached and does not let us in."""
    return Check(
        f"{place} login",
        "failed",
        reason,
        "",
        "check that the server has the newest auth.conf, and this service its own identity",
    )
