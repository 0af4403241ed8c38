"""``diloco simulate island``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from diloco.errors import SettingsError
from diloco.settings.counts import COUNT, parse_count
from diloco_lab.planning.island_plan import DISK_BYTES_PER_S, EXAMPLES, JOIN_BYTES_PER_S, Hardware, IslandPlan, Optimizer
from diloco_lab.planning.island_plan import island as found
from diloco_report.units import count, size


def island(
    parameters: Annotated[
        float,
        typer.Option(parser=parse_count, metavar=COUNT, help="Parameters of the model; without: 1B, 8B and 70B as examples."),
    ] = 0,
    devices: Annotated[int, typer.Option(help="Devices of the learner, on all its hosts.")] = 8,
    memory: Annotated[float, typer.Option(parser=parse_count, metavar=COUNT, help="Memory of a device, in bytes.")] = 80e9,
    hosts: Annotated[int, typer.Option(help="Hosts, with one process each.")] = 1,
    optimizer: Annotated[
        Optimizer, typer.Option(help="adamw or muon, which sets the bytes per parameter on a device.")
    ] = "adamw",
    disk: Annotated[float, typer.Option(help="Bytes per second that a host's disk writes.")] = DISK_BYTES_PER_S,
    link: Annotated[
        float, typer.Option(help="Bytes per second at which a host reads its state when it joins.")
    ] = JOIN_BYTES_PER_S,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Plan one learner of several devices or hosts: mesh, fragments, memory, bytes, seconds."""
    for name, value in {"parameters": parameters, "devices": devices - 1, "hosts": hosts - 1}.items():
        if not 0 <= value <= 1e15:
            raise SettingsError(f"--{name}: expected a number from {0 if name == 'parameters' else 1} to 1e15")
    for name, value in {"memory": memory, "disk": disk, "link": link}.items():
        if not 0 < value < 1e18:
            raise SettingsError(f"--{name} {value:g}: expected a number of bytes above 0")
    given = Hardware(devices, memory, hosts, disk, link)
    examples = [(int(parameters), given)] if parameters else EXAMPLES
    islands = [found(number, hardware, optimizer) for number, hardware in examples]
    print(json.dumps([asdict(one) for one in islands]) if json_ else table(islands))


def table(islands: Sequence[IslandPlan]) -> str:
    """Return islands as a table of Markdown, one a column."""
    rows = [
        ("", *(f"{count(one.parameters)} parameters" for one in islands)),
        ("---",) * (1 + len(islands)),
        ("devices, hosts", *(_hardware(one.hardware) for one in islands)),
        ("`mesh.data`, `mesh.fsdp`", *(f"{one.data}, {one.fsdp}" for one in islands)),
        ("`fragments.count`, the host's vector of one", *(f"{one.fragments}, {size(one.fragment_bytes)}" for one in islands)),
        ("a device: state, without activations", *(size(one.state_bytes) for one in islands)),
        ("a checkpoint's copy fits beside it", *("yes" if one.copy_fits else "no: steps wait" for one in islands)),
        ("a host: rounds in turn, all at once", *(f"{size(one.host_bytes)}, {size(one.host_most_bytes)}" for one in islands)),
        ("a host and cycle: to NATS, and from it", *(size(one.sent_bytes) for one in islands)),
        ("a host and cycle: to other hosts", *(size(one.rows_bytes) if one.rows_bytes else "" for one in islands)),
        ("a checkpoint: of a host", *(f"{size(one.checkpoint_bytes)}, {_time(one.checkpoint_s)}" for one in islands)),
        ("joining: a host reads", *(f"{size(one.join_bytes)}, {_time(one.join_s)}" for one in islands)),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _hardware(found: Hardware) -> str:
    return f"{found.devices} of {size(found.memory_bytes)}, {found.hosts}"


def _time(value_s: float) -> str:
    return f"{value_s:.0f} s" if value_s < 600 else f"{value_s / 60:.0f} min"
