"""The regions of a run that goes on, on a map: who is where, and what each link between two of them carries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_report import html
from diloco_report.colours import HUES
from diloco_report.drawing.frame import text_at
from diloco_report.facts import Report
from diloco_report.units import MISSING, count, decimal, duration, finite, share, size

MAX_DRAWN = 12  # regions that a map has room for; the tables have all
WIDTH, HIGH, LOW = 760.0, 380.0, 150.0  # of a map; two regions are on one line, and need no more than LOW
RADIUS = 34.0  # of a region
BEND = 26.0  # by which a link leaves the straight line, so that the one back is beside it
ASIDE = 13.0  # from a link to the text beside it
THINNEST, THICKEST = 1.0, 6.0  # of a link's line, by its rate
TIP = 13.0  # of its arrow, where the line ends

Region = Mapping[str, Any]
Link = Mapping[str, Any]


def islands(report: Report) -> str:
    """Draw the map, and tables of regions and of links; nothing of a run without regions, or that is over."""
    regions: Mapping[str, Region] = (report.get("now") or {}).get("regions") or {}
    links: Sequence[Link] = (report.get("now") or {}).get("links") or []
    if not regions:
        return ""
    picture = html.wide(_map(regions, links)) if len(regions) <= MAX_DRAWN else ""
    return html.section(
        "Regions and their links",
        "Lines are as thick as the bytes that go over them now. The bound: bytes that a ring all-reduce between the regions "
        "sends for as many versions, at the bits of the settings; from the end of the first cycle on, since before it the "
        "initial model is brought to each region. Grey and dashed: no process of the region is heard.",
        picture + html.wide(_regions(regions)) + html.subhead("Links") + html.wide(_links(links)),
    )


def _map(regions: Mapping[str, Region], links: Sequence[Link]) -> str:
    high = HIGH if len(regions) > 2 else LOW
    places = _places(list(regions), high)
    most = max((float(link.get("bytes_per_s") or 0) for link in links), default=0.0)
    away = {name for name, region in regions.items() if region.get("away_s") is not None}
    drawn = [_line(link, places, most, away) for link in links if {link.get("from"), link.get("to")} <= places.keys()]
    numbered = enumerate(zip(regions.items(), places.values(), strict=True))
    drawn += [_node(name, region, place, number) for number, ((name, region), place) in numbered]
    said = f"{len(regions)} regions" + (f", away: {', '.join(sorted(away))}" if away else "")
    return (
        f'<svg class="map" viewBox="0 0 {WIDTH:g} {high:g}" role="img" aria-label="{escape(said)}"><defs>'
        f"{_tip('link')}{_tip('cut')}</defs>{''.join(drawn)}</svg>"
    )


def _tip(kind: str) -> str:
    """Return the marker of a link's end."""
    return (
        f'<marker id="tip-of-{kind}" viewBox="0 0 8 8" refX="0" refY="4" markerWidth="{TIP:g}" markerHeight="{TIP:g}" '
        f'orient="auto" markerUnits="userSpaceOnUse"><path class="{kind}-tip" d="M0 0L8 4L0 8z"/></marker>'
    )


def _places(names: Sequence[str], map_high: float) -> dict[str, tuple[float, float]]:
    """Return where each region is: on an ellipse, the first one on the left."""
    wide, high = WIDTH / 2 - 2.6 * RADIUS, map_high / 2 - 1.6 * RADIUS
    turns = {name: math.pi + 2 * math.pi * number / len(names) for number, name in enumerate(names)}
    return {name: (WIDTH / 2 + wide * math.cos(turn), map_high / 2 + high * math.sin(turn)) for name, turn in turns.items()}


def _line(link: Link, places: Mapping[str, tuple[float, float]], most: float, away: set[str]) -> str:
    (x1, y1), (x2, y2) = places[str(link["from"])], places[str(link["to"])]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    along, across = ((x2 - x1) / length, (y2 - y1) / length), ((y1 - y2) / length, (x2 - x1) / length)
    end = RADIUS + TIP
    x1, y1, x2, y2 = x1 + RADIUS * along[0], y1 + RADIUS * along[1], x2 - end * along[0], y2 - end * along[1]
    x1, y1, x2, y2 = (value + 8 * across[i % 2] for i, value in enumerate((x1, y1, x2, y2)))
    bend_x, bend_y = (x1 + x2) / 2 + BEND * across[0], (y1 + y2) / 2 + BEND * across[1]
    rate = float(link.get("bytes_per_s") or 0)
    width = THINNEST + (THICKEST - THINNEST) * (rate / most if most else 0)
    kind = "cut" if {link["from"], link["to"]} & away else "link"
    tip = f"{link['from']} → {link['to']}\n{_rate(link)}, {size(link.get('bytes'))} in all\n{_bits(link)}"
    middle = ((x1 + x2) / 4 + bend_x / 2 + ASIDE * across[0], (y1 + y2) / 4 + bend_y / 2 + ASIDE * across[1])
    anchor = "middle" if abs(across[0]) < 0.5 else "start" if across[0] > 0 else "end"
    path = f"M{x1:.1f} {y1:.1f}Q{bend_x:.1f} {bend_y:.1f} {x2:.1f} {y2:.1f}"
    shown = f'd="{path}" stroke-width="{width:.1f}" marker-end="url(#tip-of-{kind})"'
    return f'<path class="link {kind}" {shown} data-tip="{escape(tip)}"/>' + text_at(
        "rate", middle[0], middle[1] + 4, anchor, _rate(link)
    )


def _node(name: str, region: Region, place: tuple[float, float], number: int) -> str:
    x, y = place
    css = "island cut" if region.get("away_s") is not None else "island"
    tip = f"{name}\n{_members(region)}\n{count(region.get('fragments'))} fragments, {_queue(region)}"
    at = f'cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS:g}"'
    return (
        f'<circle class="{css}" {at} stroke="var(--s{number % HUES})" data-tip="{escape(tip)}"/>'
        + text_at("region", x, y - 4, "middle", name[:9])
        + text_at("label", x, y + 12, "middle", f"{count(region.get('heard'))} of {count(region.get('members'))}")
    )


def _regions(regions: Mapping[str, Region]) -> str:
    head = ("region", "members", "away", "fragments", "offers under way", "rounds open", "sent", "of the bound", "received")
    rows = [
        [
            escape(str(name)),
            _members(region),
            duration(region.get("away_s")),
            *(count(region.get(key)) for key in ("fragments", "sending", "open")),
            size(region.get("bytes_out")),
            share(region.get("of_bound")),
            size(region.get("bytes_in")),
        ]
        for name, region in regions.items()
    ]
    return html.table(head, rows, of="regions")


def _links(links: Sequence[Link]) -> str:
    head = ("from and to", "now", "in all", "bits of offers", "bits of versions", "pace")
    rows = [
        [
            escape(f"{link.get('from', '')} → {link.get('to', '')}"),
            _rate(link),
            size(link.get("bytes")),
            *(count(link.get(key)) for key in ("offer_bits", "record_bits")),
            _pace(link),
        ]
        for link in links
    ]
    return html.table(head, rows, of="links")


def _rate(link: Link) -> str:
    rate = link.get("bytes_per_s")
    return f"{size(rate)}/s" if finite(rate) else MISSING


def _pace(link: Link) -> str:
    return f"{decimal(link['pace'], 1)}×" if finite(link.get("pace")) else MISSING


def _bits(link: Link) -> str:
    return f"bits of offers: {count(link.get('offer_bits'))}, of versions: {count(link.get('record_bits'))}"


def _members(region: Region) -> str:
    return f"{count(region.get('heard'))} of {count(region.get('members'))} heard"


def _queue(region: Region) -> str:
    return f"{count(region.get('sending'))} offers under way, {count(region.get('open'))} rounds open"
