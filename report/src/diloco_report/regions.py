"""The regions of a run in its report: members, absences, learners merged together, bytes between regions.

Pure functions of the coordinator's series and of the counters of an emulated WAN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MAX_BOUNDS = 16  # the longest absences, at which the table of learners merged together is cut


def describe(names: Sequence[str], series: Mapping[str, Any], owners: Sequence[str]) -> dict[str, Any]:
    """Return by region its members, the number of fragments that it owns at the end, and when it was away.

    Raises:
        KeyError, TypeError, ValueError: the series are damaged.
    """
    places: Mapping[str, str] = series["places"]
    learners = {str(name) for name in series["learners"]}
    return {
        name: {
            "learners": sorted(member for member, region in places.items() if region == name and member in learners),
            "syncers": sorted(member for member, region in places.items() if region == name and member not in learners),
            "fragments": sum(places.get(owner) == name for owner in owners),
            "absences": [[from_s, to_s] for region, from_s, to_s in series["absences"] if region == name],
        }
        for name in names
    }


def together(regions: Mapping[str, Any], merges: Sequence[Mapping[str, Any]], end_s: float) -> list[dict[str, Any]]:
    """Count the versions in which each two learners were merged together, before, during and after each absence.

    A new period begins whenever a region goes away or comes back; of many absences the longest ``MAX_BOUNDS`` count. A
    learner's number with itself is how many versions merged an offer of it.
    """
    learners = [name for region in regions.values() for name in region["learners"]]
    absences = [
        (name, from_s, end_s if to_s is None else to_s)
        for name, region in regions.items()
        for from_s, to_s in region["absences"]
    ]
    absences = sorted(absences, key=lambda absence: absence[1] - absence[2])[:MAX_BOUNDS]
    bounds = sorted({0.0, *(at_s for _, *span in absences for at_s in span if at_s < end_s)})
    periods = []
    for from_s, to_s in zip(bounds, [*bounds[1:], None], strict=True):
        inside = Counter(
            frozenset(str(member[0]) for member in merged["members"])
            for merged in merges
            if from_s <= merged["wall_s"] and (to_s is None or merged["wall_s"] < to_s)
        )
        periods.append(
            {
                "from_s": from_s,
                "to_s": end_s if to_s is None else to_s,
                "away": sorted({name for name, since_s, until_s in absences if since_s <= from_s < until_s}),
                "versions": inside.total(),
                "learners": learners,
                "together": [
                    [sum(times for members, times in inside.items() if {one, other} <= members) for other in learners]
                    for one in learners
                ],
            }
        )
    return periods


def borders(names: Sequence[str], series: Mapping[str, Any], links: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the bytes from each region to each other: as syncers counted, and as ``links`` of an emulated WAN carried them.

    ``links`` may know places besides the regions, such as the control store's; it is empty where nothing is emulated.

    Raises:
        KeyError, TypeError, ValueError: the series are damaged.
    """
    sizes = {(source, to): 0 for source in names for to in names if source != to}
    for syncer, _, other, sent, received in series["crossing"]:
        home = series["places"][syncer]
        sizes[home, other] += sent
        sizes[other, home] += received
    others = [pair for pair in (tuple(link.split("-")) for link in links) if pair not in sizes]
    carried = ("control_bytes", "bulk_bytes", "header_bytes_estimated")
    return [
        {
            "from": source,
            "to": to,
            "payload_bytes": sizes.get((source, to)),
            "link": {key: links[f"{source}-{to}"][key] for key in carried} if f"{source}-{to}" in links else None,
        }
        for source, to in [*sizes, *others]
    ]
