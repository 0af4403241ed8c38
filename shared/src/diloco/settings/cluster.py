"""The processes of a learner as a cluster's launcher tells them: a Slurm step, or an indexed Job of Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diloco.errors import SettingsError
from diloco.settings.service import ProcessesSettings
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
        host = first_host(_said(environment, "SLURM_STEP_NODELIST", "slurm"))
        first, ports = SLURM_PORTS
        found["address"] = f"{host}:{first + _number(environment, 'SLURM_JOB_ID', 'slurm') % ports}"
    return found


def _kubernetes(environment: Mapping[str, str]) -> dict[str, Any]:
    return {"index": _number(environment, "JOB_COMPLETION_INDEX", "kubernetes")}


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: ``node[03-05,9],other`` gives ``node03``."""
    bracketed = re.match(r"([^,\[]*)\[([^\]]*)\](.*)$", hosts)
    if bracketed is None or "," in bracketed[1]:
        return hosts.partition(",")[0]
    first = re.split("[,-]", bracketed[2])[0]
    return bracketed[1] + first + bracketed[3].partition(",")[0]


def _number(environment: Mapping[str, str], variable: str, cluster: str) -> int:
    text = _said(environment, variable, cluster)
    if not text.isdecimal():
        raise SettingsError(f"processes.cluster = {cluster}: {variable} = {text!r}: expected a number")
    return int(text)


def _said(environment: Mapping[str, str], variable: str, cluster: str) -> str:
    if variable not in environment:
        step = "with srun, one task for each process" if cluster == "slurm" else "as a Job with completionMode: Indexed"
        raise SettingsError(
            f"processes.cluster = {cluster}: there is no {variable} in the environment: start the learner {step}"
        )
    return environment[variable]
