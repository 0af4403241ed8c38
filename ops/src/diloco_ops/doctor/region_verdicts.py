"""Verdicts on a service's way to the servers of a run's other regions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_ops.doctor.check import Check, Role


def shortening(place: str, allowed: bool) -> Check:
    """Judge whether a coordinator may drop old entries of a region's log."""
    name = f"{place} shortening"
    if allowed:
        return Check(name, "ok", "old entries of the log may be dropped")
    return Check(
        name,
        "warning",
        "this coordinator may not drop old entries: while it leads, the region's log only grows",
        "the right to purge the log",
        "write the server's newest auth.conf with 'diloco keys refresh', copy it to the server and restart the server",
    )


def other_regions(role: Role, own: str | None, regions: Sequence[str], urls: Collection[str]) -> Check:
    """Judge for which of a run's other ``regions`` a syncer or coordinator has the server's URL."""
    others = [name for name in regions if name != own]
    missing, unknown = [name for name in others if name not in urls], sorted(set(urls) - set(regions))
    needed, remedy = f"the servers of {', '.join(others)}", "correct region_urls (DILOCO_REGION_URLS)"
    if unknown:
        return Check("region_urls", "failed", f"the run has no region {', '.join(unknown)}", needed, remedy)
    if missing and role == "syncer":
        return Check("region_urls", "failed", f"missing: {', '.join(missing)}", needed, remedy)
    if missing:
        found = f"missing: {', '.join(missing)}; while this coordinator leads, their logs only grow"
        return Check("region_urls", "warning", found, needed, remedy)
    return Check("region_urls", "ok", f"the servers of {', '.join(others)} are set")
