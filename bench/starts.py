"""How soon services work: when a run begins, when a learner was killed, when a syncer fails, and when all are restarted.

python bench/starts.py begin                       # compiled programs are in the cache: a run before has compiled them
python bench/starts.py begin --cold                # an empty cache
python bench/starts.py begin --runs 3              # so many at once
python bench/starts.py begin --loops 8             # beside so many busy loops
python bench/starts.py begin --cold --template gpt # diloco init and python train.py of its project, from an empty folder
python bench/starts.py restart                     # 5 kills with its own checkpoint, 5 without; the default model
python bench/starts.py restart --set learners=2 --nice     # what others lose is not lost to the new process's imports
python bench/starts.py takeover                    # 10 kills and 10 freezes of a run of the default model
python bench/starts.py takeover --kills 3 --freezes 0 --json
python bench/starts.py rolling                     # needs a docker daemon and the base images
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from harness.console import Bench, Result, Script, folder, say
from harness.host import machine
from harness.live_run import DILOCO, Up, Watch, events, up, watching

from diloco.control import creation
from diloco.errors import DilocoError, MessageError
from diloco.log.log import Log
from diloco.member.member import Member
from diloco.nats.transport import NatsTransport
from diloco.process import observe
from diloco.process.observe import get_logger
from diloco.process.tape import load_all
from diloco.service.rundir import RunDirectory
from diloco.settings.service import LearnerSettings
from diloco.states.statefolder import StateFolder
from diloco.transport import Heard
from diloco.wire import framing
from diloco.wire.control import Announcement, Heartbeat, ShardHeartbeat
from diloco.wire.entries import Keyframe
from diloco_ops.broker.server import free_ports
from diloco_ops.reading.run_reader import opened

# ---- begin


def train(home: Path, directories: Sequence[Path], tokens: int, loops: int) -> None:
    """Do runs at once with the cache of this home, beside busy loops."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(up(each, tokens=tokens, environment={"HOME": str(home)})) for each in directories]
            codes = [running.process.wait() for running in runs]
            if any(codes):
                raise SystemExit(f"diloco up failed: {[running.said() for running in runs]}")
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train_template(home: Path, template: str) -> Path:
    """Make a project with the caches of this home, that of the kernels too, and train it; return its run's directory."""
    environment = os.environ | {"HOME": str(home), "NUMBA_CACHE_DIR": str(home / "kernels")}
    folder = home / f"project-{time.monotonic_ns()}"
    init = [*DILOCO, "init", str(folder), "--template", template]
    for command, place in ((init, home), ([sys.executable, "train.py"], folder)):
        subprocess.run(command, cwd=place, env=environment, stdout=subprocess.DEVNULL, check=True)
    [directory] = (folder / "runs").iterdir()
    return directory


async def first_steps_s(directory: Path) -> dict[str, float]:
    """Return by learner when its first step had ended, by the wall clock in seconds."""
    async with opened(directory) as reader:
        tapes, _ = load_all(directory, reader.run.identity)
    first = {tape.name: tape.lives()[0] for tape in tapes if tape.lives()}
    return {name: (life.start.at_ms + life.step_ms[0]) / 1000 for name, life in sorted(first.items()) if life.step_ms}


def started_learners(directory: Path, began_s: float) -> dict[str, dict[str, float]]:
    """Return a run's learners by name: seconds since then, CPU seconds, and the share of the versions.

    A learner of PyTorch compiles no programs, and says when it has its model, and no CPU time.
    """
    report = json.loads((directory / "report.json").read_text())
    found = {}
    for name, first_s in asyncio.run(first_steps_s(directory)).items():
        compiled = events(directory, name, "compiled", "island_ready")[-1]
        found[name] = {
            "compiled_s": compiled["time"].timestamp() - began_s,
            "cpu_s": compiled.get("process_cpu_s", float("nan")),
            "first_step_s": first_s - began_s,
            "versions": report["learners"][name]["rounds_merged"] / report["versions"],
        }
    return found


def begin(
    *,
    tokens: int = 150_000,
    runs: Annotated[int, "at once"] = 1,
    loops: Annotated[int, "busy processes besides"] = 0,
    template: Annotated[str | None, "of a project, which is made and trained instead"] = None,
    cold: Annotated[bool, "begin with an empty cache"] = False,
) -> Result:
    """Measure how soon the learners of a run begin, and how far apart: to the end of each one's first step.

    ``compiled`` is when a learner has its programs, and ``CPU`` the processor time of its process by then, imports included;
    ``first step`` is when its first step had ended, by its tape. ``versions`` is the share of the run's versions that it is in.
    """
    with folder() as home:
        if not cold and template is None:
            train(home, [home / "before"], 1, 0)
        elif not cold and template is not None:
            train_template(home, template)
        load, began_s = os.getloadavg()[0], time.time()
        if template is None:
            directories = [home / f"run-{number}" for number in range(runs)]
            train(home, directories, tokens, loops)
        else:
            directories = [train_template(home, template)]
        return {
            "machine": machine(),
            "load": [load, os.getloadavg()[0]],
            "wall_s": time.time() - began_s,
            "runs": [started_learners(directory, began_s) for directory in directories],
        }


def show_begin(result: Result) -> None:
    print(f"load {result['load'][0]:.0f} before and {result['load'][1]:.0f} after; all took {result['wall_s']:.1f} s")
    for run in result["runs"]:
        for name, learner in run.items():
            print(
                f"  {name}: compiled {learner['compiled_s']:6.1f} s (CPU {learner['cpu_s']:.1f} s), first step "
                f"{learner['first_step_s']:6.1f} s, versions {100 * learner['versions']:.1f} %"
            )
        firsts = [learner["first_step_s"] for learner in run.values()]
        print(f"first steps of {len(firsts)} learners end {max(firsts) - min(firsts):.2f} s apart")


# ---- restart

FIRST_STEP_TARGET_S, LOST_TARGET, KEYFRAMES_TARGET = 2.0, 0.01, 2.0
KILLED = "learner-1"
LOWEST_PRIORITY = 19
CHECKPOINT_PAUSE_S = 12.0  # between two kills, so that there is a checkpoint
RESTART_PATIENCE_S = 400.0


def others_pace(watch: Watch) -> float:
    """Return the steps a second of all learners but the killed one, since :meth:`Watch.forget`."""
    return sum(watch.pace(name) for name in watch.heartbeats if name != KILLED)


def others_blocked(watch: Watch, began_s: float) -> float:
    """Return the share of the others' time without a step in flight since then."""
    blocked_s = busy_s = 0.0
    for name, heartbeats in watch.heartbeats.items():
        since = [heartbeat for at_s, heartbeat in heartbeats if at_s >= began_s]
        if name != KILLED and since:
            blocked_s += since[-1].blocked_s - since[0].blocked_s
            busy_s += since[-1].busy_s - since[0].busy_s
    return blocked_s / max(busy_s + blocked_s, 1e-9)


async def kill(running: Up, watch: Watch, *, checkpoint: bool, nice: bool) -> Result:
    """Kill a learner, and wait until its work is merged again."""
    watch.forget()
    await asyncio.sleep(CHECKPOINT_PAUSE_S)
    pace = others_pace(watch)
    if not checkpoint:
        for path in StateFolder(running.directory, KILLED).generations():
            path.unlink(missing_ok=True)
    killed = running.pid(KILLED)
    running.signal(signal.SIGKILL, KILLED)
    killed_s, before = time.time(), watch.last(KILLED)
    watch.forget()
    if nice:
        await running.reach(lambda: running.pid(KILLED) not in (0, killed), "it is started again")
        os.setpriority(os.PRIO_PROCESS, running.pid(KILLED), LOWEST_PRIORITY)

    def mine() -> list[tuple[float, Heartbeat]]:
        return [(at_s, p) for at_s, p in watch.heartbeats.get(KILLED, ()) if p.incarnation > before.incarnation]

    await running.reach(lambda: mine() and mine()[-1][1].step > mine()[0][1].step, "it steps again")
    compiled_s = running.events(KILLED, "compiled")[-1]["time"].timestamp()
    assert compiled_s > killed_s, "a step before its program was compiled"
    stepped_s = next(at_s for at_s, heartbeat in mine() if heartbeat.step > mine()[0][1].step)

    def rounds() -> int | None:
        made: dict[int, int] = {}
        for at_s, record in watch.records:
            if at_s < stepped_s or record.entry != "version":
                continue
            made[record.fragment] = made.get(record.fragment, 0) + 1
            if any(m.learner == KILLED and m.incarnation > before.incarnation for m in record.members):
                return made[record.fragment]
        return None

    await running.reach(lambda: rounds() is not None, "its work is merged")
    return {
        "checkpoint": checkpoint,
        "started_s": compiled_s - killed_s,
        "first_step_s": stepped_s - compiled_s,
        "merged_s": time.time() - stepped_s,
        "rounds": rounds(),
        "blocked": others_blocked(watch, killed_s),
        "steps_lost": 1 - others_pace(watch) / pace,
    }


async def catch_up(running: Up, watch: Watch, versions: int) -> Result:
    """Load the log as a learner that comes back does, once every fragment has so many versions."""
    await running.reach(lambda: min(min(each.versions) for each in watch.learners()) >= versions, "enough versions")
    run_directory = watch.run
    transport = await NatsTransport.open(run_directory.nats_url, run_directory.nats_url, "bench-reader", get_logger(), 60)
    run = await creation.find(transport, run_directory.name, get_logger())
    fragments = await creation.find_map(run)
    store = Log(transport, run.name, run.identity, fragments, run.created)
    keyframes = 0
    for fragment in fragments.fragments:
        stored = await transport.last(store.subjects.log_stream, store.subjects.keyframe(fragment.index))
        assert stored is not None
        keyframes += framing.unpack(stored.data, Keyframe, run.identity)[0].body.size_bytes
    settings = LearnerSettings(name="bench-reader", run=run.name, role="evaluator", nats_url=run_directory.nats_url)
    before, began_s = transport.bytes_in, time.monotonic()
    member = Member(transport, run, fragments, settings, get_logger())
    await member.join()
    wall_s, read = time.monotonic() - began_s, transport.bytes_in - before
    newest = member.versions()
    await member.close()
    await transport.close()
    return {
        "versions": [min(newest), max(newest)],
        "read_bytes": read,
        "keyframe_bytes": keyframes,
        "keyframes": read / keyframes,
        "wall_s": wall_s,
    }


async def restart(
    *,
    kills: Annotated[int, "with a checkpoint, and as many without"] = 5,
    versions: Annotated[int, "that the log must have before it is read"] = 100,
    set_: Annotated[Sequence[str], "KEY=VALUE, a setting of the run; repeatable"] = (),
    nice: Annotated[bool, "start the killed learner again with the lowest priority"] = False,
) -> Result:
    """Measure the cost of a learner's death: from its SIGKILL to its first step and first merged work, and the others' losses.

    It begins a run with ``diloco up``, which starts a killed learner again. ``started_s`` is from the kill to the end of its
    imports and compilation, ``first_step_s`` from there to the end of its first step; ``rounds`` are the versions that a
    fragment made from then on up to the first with its work, of the fragment that merged it first. The others' ``blocked`` is
    the share of time without a step in flight in all that time, and ``steps_lost`` the share by which they took fewer steps a
    second than in the seconds before the kill. That is also what the new process's imports take from them where cores are
    short: with ``--nice`` it has the lowest priority, and takes only what is left over.

    At the end it reads the whole log as a learner that comes back does, and compares the bytes with the newest keyframes'.
    """
    with folder() as place, up(place / "run", sets=set_, patience_s=RESTART_PATIENCE_S) as running:
        watch = await watching(running)
        await running.reach(watch.all_step, "all learners step")
        results = []
        for known in [True] * kills + [False] * kills:
            results.append(await kill(running, watch, checkpoint=known, nice=nice))
            say(f"kill {len(results)} of {2 * kills}: its programs were there after {results[-1]['started_s']:.1f} s")
        read = await catch_up(running, watch, versions)
        await watch.link.close()
    targets = {"first_step_s": FIRST_STEP_TARGET_S, "steps_lost": LOST_TARGET, "keyframes": KEYFRAMES_TARGET}
    return {"machine": machine(), "kills": results, "catch_up": read, "targets": targets}


def show_restart(result: Result) -> None:
    for checkpoint in (True, False):
        kills = [kill for kill in result["kills"] if kill["checkpoint"] == checkpoint]
        print(f"killed with {'its checkpoint' if checkpoint else 'no checkpoint'}, {len(kills)} times: median, mean, max")
        for what in ("started_s", "first_step_s", "merged_s", "rounds", "blocked", "steps_lost") if kills else ():
            values = [kill[what] for kill in kills]
            print(f"  {what:14} {statistics.median(values):8.3f} {statistics.mean(values):8.3f} {max(values):8.3f}")
    back = result["catch_up"]
    print(
        f"a learner that comes back when the log has {back['versions'][0]} to {back['versions'][1]} versions reads "
        f"{back['read_bytes'] / 1e6:.2f} MB, {back['keyframes']:.2f} times the newest keyframes, in {back['wall_s']:.2f} s"
    )
    targets = result["targets"]
    print(
        f"targets: first step {targets['first_step_s']:g} s, steps lost {targets['steps_lost']:g}, "
        f"keyframes {targets['keyframes']:g}"
    )


# ---- takeover

TAKEOVER_TARGET_S = 3.0
FROZEN_S = 5.0
PAUSE_S = 5.0  # between two failures, so that a syncer that was started again is there
TAKEOVER_PATIENCE_S = 120.0


def owned(watch: Watch) -> dict[str, list[int]]:
    """Return the fragments by syncer, of those heard in the last second."""
    now_s = time.time()
    return {name: beats[-1][1].fragments for name, beats in watch.syncers.items() if now_s - beats[-1][0] < 1.0}


def settled(watch: Watch) -> bool:
    """Whether every fragment has one owner, and there is a standby."""
    found = owned(watch)
    everything = sorted(fragment for fragments in found.values() for fragment in fragments)
    return everything == list(range(watch.run.settings.fragments.count)) and not all(found.values())


async def fail(running: Up, watch: Watch, how: signal.Signals) -> Result:
    """Kill or freeze the owner of most fragments; return the seconds until others have them."""
    await running.reach(lambda: settled(watch), "every fragment has an owner, and one stands by")
    name, lost = max(owned(watch).items(), key=lambda item: len(item[1]))
    pid = running.pid(name)
    watch.records.clear()
    running.signal(how, name)
    began_s = time.time()

    def seen(entry: str) -> dict[int, float]:
        found: dict[int, float] = {}
        for at_s, record in watch.records:
            if record.entry == entry and record.syncer != name and record.fragment in lost:
                found.setdefault(record.fragment, at_s - began_s)
        return found

    await running.reach(lambda: len(seen("takeover")) == len(lost) and seen("version"), f"others take {name}'s fragments over")
    if how == signal.SIGSTOP:
        await asyncio.sleep(max(0.0, began_s + FROZEN_S - time.time()))
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(PAUSE_S)
    taken = seen("takeover").values()
    return {
        "how": how.name,
        "syncer": name,
        "fragments": len(lost),
        "first_record_s": min(taken),
        "last_record_s": max(taken),
        "first_version_s": min(seen("version").values()),
    }


async def takeover(*, kills: int = 10, freezes: int = 10, standbys: int = 2) -> Result:
    """Measure how long fragments have no owner: from a syncer's SIGKILL or SIGSTOP to the first record of the next one.

    It begins a run with ``diloco up`` (its defaults: four learners, two shards; and two standbys), waits until every fragment
    has versions, and then kills or freezes the owner of most fragments, time and again. Measured are the first and the last
    takeover record of its fragments, as they pass on their way into the log, and the first version that a new owner makes.
    `up` starts killed syncers again; frozen ones go on after 5 s, and find that they own nothing any more.
    """
    options = ("--standbys", str(standbys))
    with folder() as place, up(place / "run", *options, patience_s=TAKEOVER_PATIENCE_S) as running:
        watch = await watching(running)

        def begun() -> bool:
            made = {record.fragment for _, record in watch.records if record.entry == "version"}
            return len(made) == watch.run.settings.fragments.count and settled(watch)

        await running.reach(begun, "every fragment has a version")
        signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * freezes
        failures = [await fail(running, watch, how) for how in signals]
        await watch.link.close()
    return {"machine": machine(), "failures": failures, "target_s": TAKEOVER_TARGET_S}


def show_takeover(result: Result) -> None:
    print("seconds from the failure of an owner to the records of who takes its fragments over")
    for how in ("SIGKILL", "SIGSTOP"):
        failures = [failure for failure in result["failures"] if failure["how"] == how]
        for what in ("first_record_s", "last_record_s", "first_version_s") if failures else ():
            values = [failure[what] for failure in failures]
            print(
                f"  {how} {what:16} min {min(values):5.2f}   median {statistics.median(values):5.2f}   max {max(values):5.2f}"
                f"   ({len(values)} times)"
            )
    print(f"  target: first record within {result['target_s']:g} s")


# ---- rolling

ROOT = Path(__file__).parents[1]
REGIONS = ("us", "eu", "ap")
ORDER = (
    "coordinator",
    "evaluator",
    *(f"control-{region}" for region in REGIONS),
    *(f"nats-{region}" for region in REGIONS),
    *(f"syncer-{region}" for region in REGIONS),
    *(f"learner-{region}" for region in REGIONS),
)
GRACE_S = {"learner": 40, "syncer": 20}  # as docker-compose.yml has them
DEADLINE_S = 600.0

AFTERWARDS_S = 30.0  # the last rounds end
MOST_LOST = 0.01  # of all steps

RUN = """
[settings]
tokens = 100_000_000_000
learners = 3
shards = 3
fragments = { count = 12 }
regions = { names = ["us", "eu", "ap"], control_replicas = 3 }
task = { layers = 1, width = 32, heads = 2, context = 64, batch = 4 }
"""

SLOW = 25  # times that a step takes as long as it takes
READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=5)"


class RolledRun(Watch):
    """A run whose rounds are counted, too."""

    def __init__(self, run: RunDirectory, link: NatsTransport) -> None:
        super().__init__(run, link)
        self.announced: dict[tuple[str, int], int] = {}  # version of the newest round, by owner and fragment
        self.quorate: dict[tuple[int, int], str] = {}  # fragment and version of rounds with a quorum: whose

    async def open(self) -> None:
        await self.link.subscribe(self.subjects.round(), self._hear_round)
        await super().open()

    async def _hear_round(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            round_ = framing.unpack(message.data, Announcement, self.identity)[0]
            self.announced[round_.syncer, round_.fragment] = round_.version

    async def _hear_shard(self, message: Heard) -> None:
        with contextlib.suppress(MessageError):
            heartbeat = framing.unpack(message.data, ShardHeartbeat, self.identity)[0]
            for fragment, answers, quorum, _ in heartbeat.open:
                version = self.announced.get((heartbeat.syncer, fragment))
                if version is not None and answers >= quorum:
                    self.quorate.setdefault((fragment, version), heartbeat.syncer)

    def made_by(self) -> dict[tuple[int, int], str]:
        """Return the syncers that made versions, by fragment and version."""
        return {(record.fragment, record.version): record.syncer for _, record in self.records if record.entry == "version"}

    def newest(self) -> dict[int, int]:
        """Return the newest version of each fragment."""
        return dict(sorted(self.made_by()))

    def lost_tokens(self) -> float:
        """Return the tokens lost by all learners so far: of each the mean over its fragments."""
        return sum(sum(heartbeat.lost_tokens) / len(heartbeat.lost_tokens) for heartbeat in self.learners())


class Project:
    """The run of ``docker-compose.yml`` as a compose project of its own; ``folder`` holds what is different."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(RUN)
        slow = {f"learner-{region}": {"environment": {"DILOCO_SLOW": str(SLOW)}} for region in REGIONS}
        changes = {"configs": {"run": {"file": str(folder / "run.toml")}}, "services": slow}
        self.changes = folder / "override.json"  # which is YAML too
        self.changes.write_text(json.dumps(changes))
        self.name = f"diloco-rolling-{uuid.uuid4().hex[:8]}"
        ports = dict(zip(("CONTROL_PORT", "NATS_PORT", "WAN_PORT", "PAGE_PORT"), map(str, free_ports(4)), strict=True))
        self.environment = ports
        self.control, self.bulk = (f"nats://127.0.0.1:{ports[name]}" for name in ("CONTROL_PORT", "NATS_PORT"))

    def compose(self, *arguments: str) -> str:
        return _docker("compose", "-p", self.name, *self._files(), *arguments, **self.environment)

    def _files(self) -> list[str]:
        return ["-f", str(ROOT / "docker-compose.yml"), "-f", str(self.changes)]

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--format", "{{.Name}}", service).split()

    async def restart(self, container: str, service: str) -> float:
        """End a container in order, start it, and wait until it is ready; how long that took."""
        kind = service.split("-")[0]
        began_s = time.monotonic()
        await asyncio.to_thread(_docker, "restart", "--time", str(GRACE_S.get(kind, 10)), container)
        server = kind in ("control", "nats")
        asked = ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8222/healthz"] if server else ["python", "-c", READY]
        while not await asyncio.to_thread(_works, "exec", container, *asked):
            if time.monotonic() - began_s > DEADLINE_S:
                raise SystemExit(f" {container} is not ready after {DEADLINE_S:g} s")
            await asyncio.sleep(0.5)
        return time.monotonic() - began_s


def _docker(*arguments: str, **environment: str) -> str:
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, env=os.environ | environment)
    if ended.returncode:
        raise SystemExit(f" docker {' '.join(arguments)}: {ended.stderr[-2000:]}")
    return ended.stdout


def _works(*arguments: str) -> bool:
    return subprocess.run(["docker", *arguments], capture_output=True, check=False).returncode == 0


async def rolling() -> Result:
    """Restart every service of the run of ``docker-compose.yml``, one after another, while it goes on.

    It starts the three regions with their relay as a compose project of its own, waits until every learner's work is merged,
    and then restarts each container with SIGTERM, as an upgrade does: first the coordinator and the evaluator, the servers of
    the control store, those of the regions, the syncers, the learners. The next one is restarted when this one is ready again.
    Meanwhile it hears the run's heartbeats at the control store of `us`, and its entries at the server there, and counts:

    * rounds that had as many answers as their quorum, and of these the ones of which no version came, by any syncer;
    * tokens that learners booked as lost, and of how many that they processed, as steps are: all steps have as many.

    The run keeps the steps that are taken while an answer is on its way (`carry.overlap`), so that nothing is lost but by
    restarts and by what comes too late for its round. The model is small and its steps mostly asleep, a quarter of a second or
    more each, so that many processes fit a few cores.
    """
    observe.configure("rolling", "", level="error")  # that its own connections are lost is what it is for
    with folder() as place:
        project = Project(place)
        project.compose("build")
        project.compose("up", "-d")
        try:
            link = await NatsTransport.open(project.control, project.bulk, "rolling", get_logger(), DEADLINE_S)
            settings = (await creation.find(link, "run", get_logger())).created
            watch = RolledRun(RunDirectory(Path(), "run", project.control, None, settings), link)
            await watch.open()
            await _until(watch.all_step, "every learner is merged")
            found = await restart_all(project, watch)
            await link.close()
        finally:
            with contextlib.suppress(SystemExit, DilocoError):
                project.compose("down", "--volumes", "--timeout", "5")
    return found | machine()


async def _until(reached: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not reached():
        if time.monotonic() > end_s:
            raise SystemExit(f"not within {DEADLINE_S:g} s: {what}")
        await asyncio.sleep(0.5)


async def restart_all(project: Project, watch: RolledRun) -> Result:
    """Restart all containers, and count."""
    began_s, tokens, lost, versions = time.monotonic(), watch.tokens(), watch.lost_tokens(), sum(watch.newest().values())
    watch.quorate.clear()
    took_s, lost_by = {}, {}
    for service in ORDER:
        for container in project.containers(service):
            name, before = container.removeprefix(f"{project.name}-"), watch.lost_tokens()
            took_s[name] = await project.restart(container, service)
            lost_by[name] = watch.lost_tokens() - before
            say(f"{name}: ready after {took_s[name]:.1f} s, lost {lost_by[name]:.0f} tokens")
    wall_s, quorate = time.monotonic() - began_s, dict(watch.quorate)
    await _until(lambda: watch.all_step() and time.monotonic() > began_s + wall_s + AFTERWARDS_S, "all train again")
    # a version further on has all before it: the chain has no gaps
    newest, made_by = watch.newest(), watch.made_by()
    gone = [(fragment, version) for fragment, version in quorate if newest.get(fragment, 0) < version]
    elsewhere = sum(made_by.get(round_, owner) != owner for round_, owner in quorate.items())
    processed, lost_tokens = watch.tokens() - tokens, watch.lost_tokens() - lost
    steps_lost = lost_tokens / processed if processed else 0.0
    return {
        "restarts": len(took_s),
        "wall_s": wall_s,
        "took_s": took_s,
        "lost_by": lost_by,
        "versions": sum(newest.values()) - versions,
        "rounds_with_quorum": len(quorate),
        "rounds_made_by_another_owner": elsewhere,
        "rounds_lost": len(gone),
        "tokens_processed": processed,
        "tokens_lost": lost_tokens,
        "steps_lost": steps_lost,
        "passed": not gone and steps_lost <= MOST_LOST,
    }


def show_rolling(result: Result) -> None:
    slowest = max(result["took_s"].items(), key=lambda item: item[1])
    print(
        f"{result['restarts']} restarts in {result['wall_s']:.0f} s; the longest {slowest[0]}, ready after {slowest[1]:.0f} s\n"
        f"{result['versions']} versions; rounds with a quorum {result['rounds_with_quorum']}, of these lost "
        f"{result['rounds_lost']} (target: 0), made by another owner {result['rounds_made_by_another_owner']}\n"
        f"steps lost {100 * result['steps_lost']:.3f} % (target: at most {100 * MOST_LOST:g} %): "
        f"{result['tokens_lost']:.0f} of {result['tokens_processed']} tokens"
    )


BENCHES = Bench(begin, show_begin), Bench(restart, show_restart), Bench(takeover, show_takeover), Bench(rolling, show_rolling)
SCRIPT = Script(__doc__, *BENCHES)

if __name__ == "__main__":
    SCRIPT.run()
