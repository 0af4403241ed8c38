"""The processes of a learner as a cluster's launcher tells them: a Slurm step, or an indexed Job of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from diloco.errors import SettingsError
from diloco.settings.service import ProcessesSettings, may_lead
from diloco.settings.validation import parse

SLURM_PORTS = 61440, 4096  # the first of them, and their number: as JAX takes them, a job has one of its own


def resolved(settings: ProcessesSettings, environment: Mapping[str, str]) -> ProcessesSettings:
    """Return the processes with what their cluster says of them; a value that is set wins.

    Raises:
        SettingsError: a variable of the cluster is missing or wrong, or the processes do not fit one another.
    """
    if not settings.cluster:
        return settings
    given = settings.model_dump(exclude_unset=True, exclude={"cluster"})
    found = _slurm(environment, given) if settings.cluster == "slurm" else _kubernetes(environment)
    what = f"processes.cluster = {settings.cluster}"
    resolved: ProcessesSettings = parse(ProcessesSettings, {**found, **given}, what)
    return resolved


def _slurm(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "count": _number(environment, "SLURM_NTASKS", "slurm"),
        "index": _number(environment, "SLURM_PROCID", "slurm"),
    }
    if "address" not in given:
        first, ports = SLURM_PORTS
        port, count = first + _number(environment, "SLURM_JOB_ID", "slurm") % ports, given.get("count", found["count"])
        listed = _said(environment, "SLURM_STEP_NODELIST", "slurm")
        try:
            names = list(islice(hosts(listed), count + 1))
        except ValueError:
            raise SettingsError(
                f"processes.cluster = slurm: SLURM_STEP_NODELIST = {listed!r}: expected a list of hosts"
            ) from None
        leading = may_lead(count, given.get("least")) if len(names) == count else 1  # process i is on host i if each has one
        found["address"] = ",".join(f"{name}:{port}" for name in names[:leading])
    return found


def _kubernetes(environment: Mapping[str, str]) -> dict[str, Any]:
    return {"index": _number(environment, "JOB_COMPLETION_INDEX", "kubernetes")}


def hosts(listed: str) -> Iterator[str]:
    """Yield the hosts of a list as Slurm writes it: ``node[03-05,9],other`` gives node03, node04, node05, node9, other."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        yield from _hosts_of(item)


def _hosts_of(item: str) -> Iterator[str]:
    bracketed = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if bracketed is None:
        yield item
        return
    head, numbers, tail = bracketed.groups()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _hosts_of(tail):
                yield f"{head}{number:0{len(first)}d}{rest}"


def _number(environment: Mapping[str, str], variable: str, cluster: str) -> int:
    text = _said(environment, variable, cluster)
    if not text.isdecimal():
        raise SettingsError(f"processes.cluster = {cluster}: {variable} = {text!r}: expected a number")
    return int(text)


def _said(environment: Mapping[str, str], variable: str, cluster: str) -> str:
    if variable not in environment:
        step = "with srun, one task for each process" if cluster == "slurm" else "as a Job with completionMode: Indexed"
        raise SettingsError(
            f"processes.cluster = {cluster}: {variable} is not set in the environment: start the learner {step}"
        )
    return environment[variable]
