"""``report.html``: the report dictionary as one file that opens without a network.

Style sheet and script are inlined, pictures are SVG (:mod:`diloco_report.charts`), and a content security policy forbids the
browser to fetch anything or to run any script but this one, known by its hash. All that comes from a run (names, settings,
generated text) is escaped. ``docs/report.md`` describes the dictionary; keys that are missing leave their part out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from diloco_report import changed, charts, compared, curves, html, now
from diloco_report.colours import HUES
from diloco_report.facts import Report, learners_of, natural, until_s
from diloco_report.facts import colours as colours_of
from diloco_report.facts import ratio as ratio_of
from diloco_report.islands import islands
from diloco_report.samples import samples
from diloco_report.units import MISSING, count, decimal, duration, finite, model_size, share, size, times

MAX_PERIODS = 9
MAX_OPEN = 16  # fragments whose table is shown without being asked for, while a run goes on
MAX_MEMBERS = 8  # of a merge whose names a table has room for
STILL = "This page does not move by itself: its script does not run in this browser. Load it again for the run as of then."
_ACCENT, _PLAIN = "var(--accent)", "var(--parallel)"


def write_html(report: Report, path: Path) -> None:
    """Write the page; a reader sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(render_html(report), encoding="utf-8", errors="replace")
    os.replace(part, path)


def render_html(report: Report) -> str:
    """Return the page as one file, with the report's data in it."""
    return html.document(_title(report), _header(report), body(parts(report)), html.inlined(_script("page.js")))


def begin_live(report: Report, actions: str | None = None) -> str:
    """Return the beginning of the same page as a server gives it out, which goes on by itself.

    Its parts follow, as :func:`body` has them, and then :func:`end_live`. So a browser may show the first ones while others are
    still drawn.

    Args:
        report: a run's report as of now.
        actions: the part of :func:`diloco_report.actions.form`, where the server has actions.
    """
    assets = html.linked(("page.js",) if actions is None else ("page.js", "act.js"))
    note = f'<p id="link" class="late" role="status">{STILL}</p>\n{actions or ""}'
    return f'{html.opening(_title(report), _header(report), assets)}{note}<div id="parts">\n'


def end_live(state: str) -> str:
    """Return the end of the page; ``state``: the name of the parts' state, after which the page asks for all that follows."""
    return f'\n</div>\n<div id="state" data-state="{escape(state)}" hidden></div>{html.closing(html.linked(()))}'


def parts(report: Report) -> dict[str, str]:
    """Return the parts of the page by name, in order; of one that the report has nothing for the text is empty."""
    return {name: draw(report) for name, draw in PARTS.items()}


def asset(name: str) -> bytes:
    """Return a file that a served page links to.

    ``page.css``; ``page.js``, which has the script of both pages; ``act.js``, that of actions; ``enter.js``, that of the form
    of a token.
    """
    if name == "page.css":
        return html.style().encode()
    return "".join(_script(part) for part in (("page.js", "live.js") if name == "page.js" else (name,))).encode()


def _script(name: str) -> str:
    return files("diloco_report").joinpath(name).read_text(encoding="utf-8")


def body(drawn: Mapping[str, str]) -> str:
    """Return parts as :func:`parts` drew them, each where it is found again by its name."""
    return "\n".join(f'<div class="part" id="part-{name}">{text}</div>' for name, text in drawn.items())


def _title(report: Report) -> str:
    return str(report.get("run", "run"))


def _header(report: Report) -> str:
    preset = escape(str(report.get("preset", "")))
    return f"""{f'<span class="preset">{preset}</span>' if preset else ""}
<button id="theme" type="button">Light or dark</button>"""


def _headline(report: Report) -> str:
    if report.get("now"):
        return now.headline(report)
    learners = learners_of(report)
    traffic = report.get("traffic") or {}
    processed, merged, wall_s = (report.get(key) for key in ("tokens_processed", "tokens_merged", "wall_s"))
    blocked = [learner.get("blocked_fraction") for learner in learners.values()]
    before = f", after {count(report['tokens_before'])}" if report.get("tokens_before") else ""
    worst = max((value for value in blocked if value is not None), default=None)
    ratio, word = times(traffic["ratio"]) if traffic.get("ratio") else (None, "")
    compared = ", ".join(filter(None, (escape(_units(report)), _against_others(report))))
    bytes_ = f"than data-parallel: {size(traffic.get('bytes_up'))} up, {size(traffic.get('bytes_down'))} down"
    rounds = f"{count(report.get('versions'))} versions from {count(report.get('rounds'))} rounds"
    figures = (
        ("Validation loss", decimal(report.get("val_loss")), "", compared),
        ("Wall time", duration(wall_s), "", f"{count(ratio_of(processed, wall_s))} tokens/s, {len(learners)} learners"),
        ("Tokens merged", share(ratio_of(merged, processed), 1), "", f"{count(merged)} of {count(processed)}{before}"),
        ("Traffic", f"{ratio}×" if ratio else MISSING, word, bytes_),
        ("Steps blocked", share(worst, 2), "at most", rounds),
    )
    return '<div class="figures">\n' + "\n".join(html.figure(*figure) for figure in figures) + "\n</div>"


def _units(report: Report) -> str:
    """Return the units of the loss; empty where the task does not name them."""
    return str(report.get("units") or "")


def _against_others(report: Report) -> str:
    """Return how the loss compares with data-parallel training, or where that was not measured, with n-gram models."""
    loss, others = report.get("val_loss"), compared.references(report) or compared.baselines(report)
    if loss is None or not others:
        return f"began at {decimal(report.get('val_loss_initial'))}"
    name = min(others, key=lambda name: others[name])
    css = "" if loss > others[name] else ' class="good"'
    return f"<span{css}>{compared.above(loss, others[name])}</span> {escape(name)} ({decimal(others[name], 2)})"


def _losses(report: Report) -> str:
    series = report.get("series") or {}
    colours = colours_of(report)
    # by line: wall time, tokens of the whole run, loss
    drawn = [
        (name, colours.get(name, "var(--soft)"), [(point[0], point[1], point[3]) for point in points if finite(point[3])])
        for name, points in sorted((series.get("learners") or {}).items(), key=lambda item: natural(str(item[0])))
    ]
    whole: list[tuple[Any, ...]] = [(point[0], point[1], point[2]) for point in series.get("global") or [] if finite(point[2])]
    end = (report.get("wall_s"), report.get("tokens_merged"), report.get("val_loss"))
    # the newest loss is carried on by no point of its own: a flat end would look like a plateau
    if whole and not report.get("now") and all(finite(value) for value in end) and end[2] != whole[-1][2]:
        whole.append(end)
    drawn.append(("global", "var(--global)", whole))
    rolled_back = series.get("rollbacks") or []

    def chart(place: int, key: str, axis: charts.Axis, label: str) -> str:
        lines = [
            curves.CurveLine(
                name,
                css,
                [(point[place], point[2]) for point in points],
                strong=name == "global",
                breaks=() if name == "global" else curves.gaps([point[0] for point in points]),
            )
            for name, css, points in drawn
        ]
        moments = [(moment[key], f"back to {moment['to_version']}") for moment in rolled_back]
        return charts.line_chart(lines, compared.baselines(report), axis=axis, label=label, name=axis, moments=moments)

    units, counted = _units(report).capitalize(), compared.baselines(report)
    return html.section(
        "Loss",
        (f"{units}. " if units else "")
        + "Learners: training loss, as a mean over each short stretch. Global: validation loss of "
        "the model that the log holds, against the tokens merged by then."
        + (" Dashed: models that only count which bytes follow which, fitted on the same text." if counted else "")
        + (" Upright: the run was rolled back to that version." if rolled_back else ""),
        html.toggles((name, css) for name, css, _ in drawn)
        + html.pair(
            f"<h3>Over tokens of the whole run</h3>{chart(1, 'tokens', 'tokens', 'tokens')}",
            f"<h3>Over time</h3>{chart(0, 'wall_s', 'time', 'wall time')}",
        ),
    )


def _others_and_traffic(report: Report) -> str:
    others = compared.baselines(report) | compared.references(report)
    losses: dict[str, float | None] = {
        "this run": report.get("val_loss"),
        **{name: others[name] for name in sorted(others, key=lambda name: others[name])},
        "untrained": report.get("val_loss_initial"),
    }
    rows = [(name, loss, decimal(loss), _ACCENT if name == "this run" else _PLAIN) for name, loss in losses.items()]
    learners, traffic, colours = learners_of(report), report.get("traffic") or {}, colours_of(report)
    links: list[tuple[str, float | None, str, str]] = []
    for name, learner in learners.items():
        both = _sum(learner, "bytes_up", "bytes_down")
        links.append((name, both, size(both), colours[name]))
    parallel = ratio_of(traffic.get("bytes_data_parallel"), len(learners))
    rate = ratio_of(parallel, report.get("wall_s"))
    links.append(("data-parallel", parallel, size(parallel), _PLAIN))
    traffic_of_each = (
        "<h2>Bytes over each learner's link</h2>"
        + html.note(
            "Sent and received. Data-parallel: a ring all-reduce of bfloat16 gradients at each of the same steps"
            + (f", {size(rate)} each second on every link." if rate else ".")
        )
        + charts.bars(links)
    )
    sentences = compared.sentences(report)
    if sum(finite(loss) for loss in losses.values()) < 2 and not sentences:  # while a run goes on no other model is known
        return f"<section>{traffic_of_each}</section>"
    in_units = f" in {_units(report)}" if _units(report) else ""
    models = (
        "<h2>Against other models</h2>"
        + html.note(f"Validation loss{in_units}; less is better.")
        + charts.bars(rows)
        + "".join(map(html.note, sentences))
    )
    return f"<section>{html.pair(models, traffic_of_each)}</section>"


def _activity(report: Report) -> str:
    activity = {
        str(name): [(float(start_s), float(stop_s), str(state)) for start_s, stop_s, state in spans]
        for name, spans in sorted(
            ((report.get("series") or {}).get("activity") or {}).items(), key=lambda item: natural(str(item[0]))
        )
    }
    if not activity:
        return ""
    seen = {state for spans in activity.values() for _, _, state in spans}
    legend = html.legend((state, f"var(--state-{state})") for state in charts.STATES if state in seen)
    return html.section(
        "What each learner did",
        "Sending happens beside the steps, which go on. A gap: the learner was not heard.",
        legend + html.wide(charts.timeline(activity, until_s(report))),
    )


def _merges(report: Report) -> str:
    rounds: Sequence[Mapping[str, Any]] = (report.get("series") or {}).get("merges") or []
    colours = colours_of(report)
    for name in sorted({str(member[0]) for merged in rounds for member in merged["members"]} - set(colours), key=natural):
        colours[name] = "var(--soft)"
    picture, drawn = charts.merges(rounds, colours, until_s(report))
    every = int((report.get("series") or {}).get("merges_every") or 1)
    known = _known_from(report) if (report.get("series") or {}).get("merges_missed") else ""
    some = f" {drawn} of {every * len(rounds)} are drawn." if 0 < drawn < every * len(rounds) else ""
    return html.section(
        "Who was in each merge",
        "One column of marks for each version of a fragment, one mark for each learner; grey: it had no part. Pale: its offer "
        f"was made from an older version. Point at one for weights and times.{some}{known}",
        html.toggles(colours.items()) + html.wide(picture),
    )


def _known_from(report: Report) -> str:
    """Say from where the merges are known, where the log had dropped some before they were read."""
    series = report["series"]
    return (
        f" {count(series['merges_missed'])} older versions are not here: the log had dropped them before a coordinator read "
        f"it, the last time at {duration(series.get('merges_missed_until_s'))}."
    )


def _regions(report: Report) -> str:
    """Draw each learner's merges in a run with regions, and the traffic between them."""
    regions: Mapping[str, Mapping[str, Any]] = report.get("regions") or {}
    if not regions:
        return ""
    points, end_s = (report.get("series") or {}).get("learners") or {}, until_s(report)
    groups = [
        charts.ChartRegion(
            str(name),
            f"var(--s{place % HUES})",
            {
                str(member): [(float(at_s), float(step)) for at_s, _, step, _ in points.get(member, ())]
                for member in sorted(region["learners"], key=natural)
            },
            [(float(from_s), end_s if to_s is None else float(to_s)) for from_s, to_s in region["absences"]],
        )
        for place, (name, region) in enumerate(regions.items())
    ]
    homes = {str(syncer): str(name) for name, region in regions.items() for syncer in region["syncers"]}
    rounds: Sequence[Mapping[str, Any]] = (report.get("series") or {}).get("merges") or []
    legend = html.legend((group.name, group.css) for group in groups)
    return html.section(
        "Who was merged with whom",
        "A lane for each learner, and in it a row for each fragment: a mark is an offer that was merged, in the colour of the "
        "region that owned the fragment then. A pale line goes back from an offer that brought more work than usual, over the "
        "time in which it was done. Shaded: no process of the region was heard.",
        legend + html.wide(charts.regions(rounds, groups, homes, end_s)) + _periods(report) + _borders(report),
    )


def _periods(report: Report) -> str:
    periods: Sequence[Mapping[str, Any]] = report.get("together") or []
    tables = "".join(_period(period) for period in periods[:MAX_PERIODS])
    left_out = f" The first {MAX_PERIODS} of {len(periods)} periods are here." if len(periods) > MAX_PERIODS else ""
    said = "In how many versions two learners were merged together; with itself: in how many a learner was merged." + left_out
    return f"<h3>Merged together</h3>{html.note(said)}" + html.wide(f'<div class="periods">{tables}</div>') if tables else ""


def _period(period: Mapping[str, Any]) -> str:
    learners = [str(name) for name in period["learners"]]
    away = f"{', '.join(str(name) for name in period['away'])} away" if period["away"] else "all here"
    when = f"{duration(period['from_s'])} to {duration(period['to_s'])}: {away}, {count(period['versions'])} versions"
    rows = []
    for name, row in zip(learners, period["together"], strict=True):
        cells = [f'<td style="{_shade(ratio_of(times, period["versions"]))}">{count(times)}</td>' for times in row]
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in learners)
    return (
        f"<table><caption>{escape(when)}</caption><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _shade(part: float | None) -> str:
    return f"background:color-mix(in srgb, var(--accent) {round(45 * min(1.0, part or 0.0))}%, transparent)"


def _borders(report: Report) -> str:
    borders: Sequence[Mapping[str, Any]] = (report.get("traffic") or {}).get("borders") or []
    if not borders:
        return ""
    emulated = any(border.get("link") for border in borders)
    head = ("from and to", "syncers' payload", *(("link: bulk", "control", "headers") if emulated else ()))
    rows = []
    for border in borders:
        link: Mapping[str, Any] = border.get("link") or {}
        sizes = [link.get(key) for key in ("bulk_bytes", "control_bytes", "header_bytes_estimated")] if emulated else []
        ends = escape(f"{border.get('from', '')} → {border.get('to', '')}")
        rows.append([ends, *(size(value) for value in [border.get("payload_bytes"), *sizes])])
    said = "Messages as the syncers on both sides count them" + (
        "; and all that the emulated links carried, with TCP's and IP's headers as estimated." if emulated else "."
    )
    return f"<h3>Bytes between regions</h3>{html.note(said)}{html.wide(html.table(head, rows))}"


def _learners(report: Report) -> str:
    learners, colours = learners_of(report), colours_of(report)
    if not learners:
        return ""
    lives = bool(report.get("now"))
    head = ("learner", *(("state", "heard", "loss", "tokens/s") if lives else ()), "steps", "step", "tokens", "merged", "lost")
    head += ("busy", "blocked", "up", "down", "in versions", "missed")
    rows = [
        [
            f'<i style="background:{colours[name]}"></i>{escape(name)}',
            *(_doing(learner) if lives else ()),
            count(learner.get("steps")),
            f"{decimal(learner.get('step_s'))} s",
            count(learner.get("tokens_processed")),
            share(ratio_of(learner.get("tokens_merged"), learner.get("tokens_processed")), 1),
            count(learner.get("tokens_lost")),
            share(learner.get("busy_fraction"), 1),
            share(learner.get("blocked_fraction"), 2),
            size(learner.get("bytes_up")),
            size(learner.get("bytes_down")),
            count(learner.get("rounds_merged")),
            count(learner.get("rounds_missed")),
        ]
        for name, learner in learners.items()
    ]
    return html.section("Learners", "", html.wide(html.table(head, rows)))


def _doing(learner: Mapping[str, Any]) -> tuple[str, ...]:
    state = str(learner.get("state", ""))
    css = f"var(--state-{state})" if state in charts.STATES else "var(--muted)"
    named = f'<i style="background:{css}"></i>{escape(state)}'
    return named, now.ago(learner.get("seen_s_ago")), decimal(learner.get("loss")), count(learner.get("tokens_per_s"))


def _fragments(report: Report) -> str:
    fragments: Sequence[Mapping[str, Any]] = report.get("fragments") or []
    if not fragments:
        return ""
    lives, rounds = bool(report.get("now")), now.rounds(report)
    head = ("fragment", "parameters", "merged by", "owner", *(("epoch", "round", "last merge", "of") if lives else ()))
    head += ("versions", "tokens merged", "state")
    rows = [
        [
            str(int(fragment.get("fragment", 0))),
            count(fragment.get("parameters")),
            "average" if fragment.get("embedding") or fragment.get("state") else "direction",
            escape(str(fragment.get("owner", ""))),
            *(_last_merge(fragment, rounds) if lives else ()),
            count(fragment.get("versions")),
            count(fragment.get("tokens_merged")),
            f"<code>{escape(str(fragment.get('state_hash', ''))[:16])}</code>",
        ]
        for fragment in fragments
    ]
    state, trained = (
        sum(fragment.get("parameters") or 0 for fragment in fragments if bool(fragment.get("state")) is kind)
        for kind in (True, False)
    )
    shown = " open" if lives and len(fragments) <= MAX_OPEN else ""
    return html.section(
        "Fragments",
        f"{len(fragments)} fragments of {model_size(trained, state)}. The state is the start of the hash of a fragment's last "
        "version, which is the same on every machine.",
        f"<details{shown}><summary>Show all</summary>{html.wide(html.table(head, rows))}</details>",
    )


def _last_merge(fragment: Mapping[str, Any], rounds: Mapping[int, str]) -> tuple[str, ...]:
    members = [str(name) for name in fragment.get("members") or []][:MAX_MEMBERS]
    others = int(fragment.get("members_count") or len(members)) - len(members)
    shown = ", ".join(members) + (f" and {others} more" if others > 0 else "")
    opened = rounds.get(int(fragment.get("fragment", 0)), MISSING)
    return count(fragment.get("epoch")), opened, duration(fragment.get("merged_at_s")), escape(shown)


def _data(report: Report) -> str:
    data: Mapping[str, Any] = report.get("data") or {}
    shares: Sequence[Mapping[str, Any]] = data.get("shares") or []
    own: Mapping[str, Any] = data.get("own") or {}
    if not shares and not own:
        return ""
    notes = [
        f"{name} trained on data of its own: {count(tokens)} merged tokens are not accounted for."
        for name, tokens in own.items()
    ]
    notes += [str(error) for error in data.get("errors") or []]
    head = ("share", "trained by", "batches", "in every fragment", "in none", "trained again")
    rows = [
        [
            str(int(row.get("share", 0))),
            escape(", ".join(str(name) for name in row.get("learners") or [])),
            *(count(row.get(key)) for key in ("trained", "merged", "lost", "repeated")),
        ]
        for row in shares
    ]
    return html.section(
        "Data",
        f"What became of the batches, of {count(data.get('batch_tokens'))} tokens each, by share of the data: merged into "
        "every fragment, merged into none, and trained again because a learner died before they were merged.",
        html.wide(html.table(head, rows)) + _epochs(data) + "".join(map(html.note, notes)),
    )


def _epochs(data: Mapping[str, Any]) -> str:
    """Draw how often the merged tokens go over each source of a mix."""
    epochs: Mapping[str, Any] = data.get("epochs") or {}
    rows = [(escape(str(name)), decimal(value, 2)) for name, value in epochs.items()]
    return f"<h3>Epochs by source</h3>{html.table(('source', 'epochs'), rows)}" if rows else ""


def _values(report: Report) -> str:
    values: Mapping[str, Any] = report.get("values") or {}
    initial: Mapping[str, Any] = report.get("values_initial") or {}
    if not values:
        return ""
    rows = [(escape(name), decimal(value, 4), decimal(initial.get(name), 4)) for name, value in values.items()]
    text = (
        "Of the global model at the end and as it was initialised: its losses on named validation sets, its metrics there, and "
    )
    return html.section(
        "Values", f"{text}those of the task's own.", html.wide(html.table(("value", "at the end", "at first"), rows))
    )


# --- small parts ----------------------------------------------------------------------------------------------------


def _sum(values: Mapping[str, Any], *keys: str) -> float:
    return float(sum(values.get(key) or 0 for key in keys))


PARTS: dict[str, Callable[[Report], str]] = {
    "state": now.state,
    "headline": _headline,
    "alerts": now.alerts,
    "loss": _losses,
    "sample": samples,
    "values": _values,
    "others": _others_and_traffic,
    "activity": _activity,
    "merges": _merges,
    "islands": islands,
    "regions": _regions,
    "learners": _learners,
    "syncers": now.syncers,
    "storage": now.storage,
    "fragments": _fragments,
    "events": now.events,
    "data": _data,
    "settings": changed.settings,
    "changes": changed.changes,
}
